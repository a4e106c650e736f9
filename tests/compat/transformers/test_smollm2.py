"""SmolLM2-135M by examples/generate: its forward pass beside transformers', and one greedy text by all routes."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import lanewise.compat.transformers as compat
from lanewise.compat._transformers_cache import PagedLayer

import page

HERE = page.ROOT / "examples" / "generate"
MOST = 16


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[None]:
    sys.path.insert(0, str(HERE))
    yield
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def model() -> Any:
    from model import Model

    return Model(runpy.run_path(str(HERE / "__main__.py"))["weights"]())


@pytest.fixture(scope="module")
def tokenizer(model: Any) -> Any:
    from text import tokenizer_of

    return tokenizer_of(model.fields)


@pytest.fixture(scope="module")
def theirs(model: Any) -> Any:
    from as_transformers import as_transformers

    torch.set_num_threads(1)  # a token is too little work for more
    return as_transformers(model)


def talks() -> list[Any]:
    from talk import Talk

    return [
        Talk("Moon", "Write three short facts about the Moon.", {"temperature": 0.0}),
        Talk("story", "Tell me a very short story.", {"temperature": 0.8, "top_p": 0.95}),
        Talk("river", "Name a long river.", {"temperature": 0.0, "repetition_penalty": 1.2}),
    ]


def answers(model: Any, tokenizer: Any, choose: Any) -> dict[str, list[int]]:
    from talk import answer

    asked = talks()
    times = answer(model, tokenizer, asked, choose, MOST, lambda talk: None)
    assert times.tokens >= MOST
    return {talk.name: talk.answer for talk in asked}


def test_the_forward_pass_is_that_of_transformers(model: Any, tokenizer: Any, theirs: Any) -> None:
    from text import chat

    prompts = [tokenizer.encode(text).ids for text in ("The capital of France is", chat("Hello!"))]
    cache = model.cache([100] * len(prompts))
    sequences = [cache.sequence() for _ in prompts]
    ours = model.forward(cache, sequences, prompts)
    then = model.forward(cache, sequences, [[5], [7]])
    for row, ids in enumerate(prompts):
        with torch.no_grad():
            logits = theirs(torch.tensor([[*ids, (5, 7)[row]]])).logits[0, -2:].numpy()
        np.testing.assert_allclose(np.stack([ours[row], then[row]]), logits, rtol=0, atol=1e-3)


def test_greedy_text_is_the_same_by_all_routes(model: Any, tokenizer: Any, theirs: Any) -> None:
    from text import chat
    from ways import WAYS

    texts = {way: answers(model, tokenizer, make(1)) for way, make in WAYS.items()}
    for name, question, settings in [
        ("Moon", talks()[0].question, {}),
        ("river", talks()[2].question, {"repetition_penalty": 1.2}),
    ]:
        prompt = torch.tensor([tokenizer.encode(chat(question)).ids])
        for context in (torch.no_grad, compat.installed):
            with context():
                ids = theirs.generate(prompt, do_sample=False, max_new_tokens=MOST, **settings)
            new = [i for i in ids[0, prompt.shape[1] :].tolist() if i != theirs.config.eos_token_id]
            assert {way: text[name] for way, text in texts.items()} == dict.fromkeys(WAYS, new)
    assert "Moon" in tokenizer.decode(texts["lanewise"]["Moon"])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_greedy_text_is_the_same_over_paged_cache_and_by_either_attention(tokenizer: Any, theirs: Any) -> None:
    from text import chat

    long = chat("Say in short: " + "the Moon is a rock that goes around the Earth, and tides follow. " * 14)
    asked = [tokenizer.encode(chat(talks()[0].question)).ids, tokenizer.encode(long).ids]
    assert len(asked[1]) < 256 < len(asked[1]) + MOST  # so that the blocks grow on the way
    most = max(map(len, asked))
    pad = theirs.config.pad_token_id
    prompts = torch.tensor([[pad] * (most - len(ids)) + ids for ids in asked])
    told = {"attention_mask": (torch.arange(most) >= most - torch.tensor([[len(ids)] for ids in asked])).long()}
    want = theirs.generate(prompts, do_sample=False, max_new_tokens=MOST, **told)
    for attention in ("lanewise", "sdpa"):  # left at what it was
        theirs.set_attn_implementation(attention)
        cache = compat.PagedCache(theirs.config)
        got = theirs.generate(prompts, do_sample=False, max_new_tokens=MOST, past_key_values=cache, **told)
        assert torch.equal(got, want), attention
        assert all(type(layer) is PagedLayer and layer.room is not None for layer in cache.layers)


def test_a_talks_text_does_not_depend_on_the_others(model: Any, tokenizer: Any) -> None:
    """As far as the forward pass gives the same logits, which a matrix product of fewer rows does but for rounding."""
    from talk import answer
    from ways import by_lanewise

    together, alone = talks(), talks()[:2]
    answer(model, tokenizer, together, by_lanewise(3), MOST, lambda talk: None)
    answer(model, tokenizer, alone, by_lanewise(3), MOST, lambda talk: None)
    assert alone[1].answer == together[1].answer
    assert len(alone[1].answer) > 5


def test_a_grammar_forces_json(model: Any, tokenizer: Any) -> None:
    from talk import Talk, answer
    from ways import by_lanewise

    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    asked = [Talk("JSON", "Is it sunny?", {"temperature": 1.0}, {**schema, "additionalProperties": False})]
    answer(model, tokenizer, asked, by_lanewise(1), 40, lambda talk: None)
    assert asked[0].ended
    assert set(json.loads(tokenizer.decode(asked[0].answer))) == {"sunny"}


def test_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["generate", "--tokens", "8", "--compare"])
    runpy.run_path(str(HERE), run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("greedy text identical") == 2
    assert "DIFFERENT" not in out and "lanewise: " in out
