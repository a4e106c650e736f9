from __future__ import annotations

import importlib
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai
import pytest
import tiny

import lanewise
import lanewise.compat.onnxruntime_genai as ours

LENGTH = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.genai_model(tmp_path_factory.mktemp("float32"), tiny.table())


def generator(model: Any, prompts: list[list[int]], **search: Any) -> Any:
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(batch_size=len(prompts), max_length=LENGTH, **search)
    made = onnxruntime_genai.Generator(model, parameters)
    made.append_tokens(np.array(prompts, np.int32))
    return made


def texts(made: Any, rows: int, **settings: Any) -> list[list[int]]:
    """What a loop gives: lanewise's with settings, the generator's own without."""
    while not made.is_done():
        if settings:
            tokens = ours.generate_next_token(made, **settings)
            assert tokens.shape == (rows,) and tokens.dtype == np.int64
        else:
            made.generate_next_token()
    return [made.get_sequence(row).tolist() for row in range(rows)]


def greedy(last: int) -> int:
    return int(tiny.table()[last].argmax())


@pytest.mark.parametrize("prompts", [[[3]], [[3, 4, 7]], [[3, 4], [6, 7], [8, 9]], [[1, 2], [7, 7]]])
def test_greedy_texts_are_the_same(model: Any, prompts: list[list[int]]) -> None:
    own = texts(generator(model, prompts), len(prompts))
    assert texts(generator(model, prompts), len(prompts), temperature=0.0) == own
    first = generator(model, prompts)
    assert ours.generate_next_token(first, temperature=0.0).tolist() == [greedy(prompt[-1]) for prompt in prompts]
    assert first.get_next_tokens().tolist() == [greedy(prompt[-1]) for prompt in prompts]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_models_of_16_bits(dtype: str, tmp_path: Path) -> None:
    model = tiny.genai_model(tmp_path, tiny.table(), dtype)
    own = texts(generator(model, [[3, 4]]), 1)
    assert texts(generator(model, [[3, 4]]), 1, temperature=0.0) == own


def test_drawn_texts(model: Any) -> None:
    """Token for token what lanewise.sample gives for the same rows, until each text ends; padding follows."""
    settings = {"temperature": 1.5, "top_p": 0.9}
    drawn = texts(generator(model, [[3, 4], [5, 6]]), 2, rng=lanewise.Stream(8), **settings)
    for key, text in enumerate(drawn):
        for step, (before, token) in enumerate(pairwise(text[1:])):
            if before == tiny.END:
                assert not any(text[step + 2 :])
                break
            assert token == lanewise.sample(tiny.table()[before], seed=8, step=step, keys=key, **settings)
    assert drawn[0] != drawn[1]


def test_the_search_options_do_not_choose(model: Any) -> None:
    """It samples, but from one token."""
    plain = texts(generator(model, [[3, 4]]), 1, top_k=5, rng=lanewise.Stream(2))
    own_options = {"do_sample": True, "top_k": 3, "top_p": 0.2, "temperature": 2.0, "repetition_penalty": 1.3}
    assert texts(generator(model, [[3, 4]], **own_options), 1, top_k=5, rng=lanewise.Stream(2)) == plain


def test_the_same_distribution(model: Any) -> None:
    """Of a token after 3, by both samplers: both near what the row says, with top-k 4 at temperature 2."""
    count = 3000
    row = tiny.table()[3]
    kept = np.argsort(-row)[:4]
    expected = np.exp(row[kept] / 2) / np.exp(row[kept] / 2).sum() * count
    made = generator(model, [[3]], do_sample=True, top_k=4, temperature=2.0, random_seed=7)
    rng = lanewise.Stream(7)
    for lanewises in (True, False):
        drawn: Counter[int] = Counter()
        for _ in range(count):
            if lanewises:
                ours.generate_next_token(made, top_k=4, temperature=2.0, rng=rng)
            else:
                made.generate_next_token()
            drawn[int(made.get_sequence(0)[1])] += 1
            made.rewind_to(0)
            made.append_tokens([3])
        assert set(drawn) <= set(kept.tolist())
        assert sum((drawn[t] - e) ** 2 / e for t, e in zip(kept.tolist(), expected, strict=True)) < 21.1  # p = 1e-4


def test_repetition_penalty(model: Any) -> None:
    """Over the whole sequence, as generate_next_token has it; other ids if they are given."""
    own = texts(generator(model, [[3, 4]], repetition_penalty=1.7), 1)
    assert own != texts(generator(model, [[3, 4]]), 1)
    assert texts(generator(model, [[3, 4]]), 1, repetition_penalty=1.7, temperature=0.0) == own
    unpenalised = texts(generator(model, [[3, 4]]), 1, repetition_penalty=1.7, temperature=0.0, output_ids=[[]])
    assert unpenalised == texts(generator(model, [[3, 4]]), 1)


def test_params_and_masks(model: Any) -> None:
    made = generator(model, [[3, 4]])
    mask = np.zeros(50, bool)
    mask[11] = True
    assert ours.generate_next_token(made, lanewise.SamplingParams(top_k=3), mask=mask).tolist() == [11]
    assert made.get_next_tokens().tolist() == [11] and made.get_sequence(0).tolist() == [3, 4, 11]


def test_what_it_does_not_take(model: Any) -> None:
    made = generator(model, [[3, 4]])
    for name, value in (("return_support", True), ("on_invalid", "mark"), ("out", np.zeros(1, np.int64))):
        with pytest.raises(TypeError, match=name):
            ours.generate_next_token(made, **{name: value})
    with pytest.raises(lanewise.InvalidLogitsError):
        ours.generate_next_token(made, mask=np.zeros(50, bool))
    assert made.token_count() == 2
    assert ours.generate_next_token(made, temperature=0.0).tolist() == [greedy(4)]


def test_append_tokens(model: Any) -> None:
    """The other way to have lanewise choose: for one sequence, whose end the caller watches."""
    made = generator(model, [[3, 4]])
    text = [3, 4]
    for _ in range(10):
        token = int(lanewise.sample(made.get_logits()[:, -1], temperature=0.0)[0])
        made.append_tokens([token])
        text.append(token)
    assert made.get_sequence(0).tolist() == text
    assert text == texts(generator(model, [[3, 4]]), 1)[0][:12]


def test_without_genai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    monkeypatch.delitem(sys.modules, "lanewise.compat.onnxruntime_genai")
    with pytest.raises(ImportError, match=r"onnxruntime-genai 0\.18 is needed"):
        importlib.import_module("lanewise.compat.onnxruntime_genai")
