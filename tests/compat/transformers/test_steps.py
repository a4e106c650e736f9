"""A Sampler's steps against transformers' processors: edits bit for bit, truncations by what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation import logits_process

import lanewise
from lanewise import steps
from lanewise._plan import groups, program_of
from lanewise.compat.transformers import steps_of

VOCAB, PROMPT = 300, 12


def rows() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    found = [rng.normal(0, scale, VOCAB) for scale in (0.3, 1, 2, 4, 4)]
    found[-1][rng.random(VOCAB) < 0.7] = -np.inf
    return [row.astype(np.float32) for row in found]


def text_of(seed: int, length: int, vocab: int = 15) -> list[int]:
    return np.random.default_rng([3, seed]).integers(0, vocab, length).tolist()


TEXTS = [text_of(seed, PROMPT + n) for seed, n in enumerate((0, 1, 4, 5, 40))]


def seen(found: list[steps.Step], row: np.ndarray, text: list[int], guide: np.ndarray | None = None) -> np.ndarray:
    given = []

    def look(ids: np.ndarray, z: np.ndarray) -> np.ndarray:
        given.append(z.copy())
        return np.zeros_like(z)

    sampler = lanewise.Sampler([*found, steps.Custom(look)], seed=1)
    sampler.add(0, text[:PROMPT], output_ids=text[PROMPT:])
    sampler(row, guides=guide)
    return given[0]


def theirs(processor: Any, row: np.ndarray, text: list[int]) -> np.ndarray:
    return processor(torch.tensor([text]), torch.tensor(row)[None].clone())[0].numpy()  # type: ignore[no-any-return]


SEQUENCES = {(7,): 1.5, (3, 8): -2.0, (1, 2, 9): 0.25, (4, 7): 0.5, (5, 6): float("-inf"), (11,): -0.75}
WORDS = [[3, 8], [5], [1, 2, 3], [14], [6, 9]]

EDITS: dict[str, tuple[steps.Step, Callable[[list[int]], Any]]] = {
    "repetition": (
        steps.Penalties(1.3),
        lambda text: transformers.RepetitionPenaltyLogitsProcessor(1.3),
    ),
    "encoder repetition": (
        steps.EncoderRepetition(1.4),
        lambda text: transformers.EncoderRepetitionPenaltyLogitsProcessor(1.4, torch.tensor([text[:PROMPT]])),
    ),
    "encoder repetition, other ids": (
        steps.EncoderRepetition(0.6, [1, 20, 30]),
        lambda text: transformers.EncoderRepetitionPenaltyLogitsProcessor(0.6, torch.tensor([[1, 20, 30]])),
    ),
    **{
        f"no repeat, {n}": (
            steps.NoRepeatNgram(n),
            lambda text, n=n: transformers.NoRepeatNGramLogitsProcessor(n),  # type: ignore[misc]
        )
        for n in (1, 2, 3, 50)
    },
    **{
        f"encoder no repeat, {n}": (
            steps.EncoderNoRepeatNgram(n),
            lambda text, n=n: transformers.EncoderNoRepeatNGramLogitsProcessor(  # type: ignore[misc]
                n, torch.tensor([text[:PROMPT]])
            ),
        )
        for n in (1, 2, 3)
    },
    "sequence bias": (
        steps.SequenceBias(SEQUENCES),
        lambda text: transformers.SequenceBiasLogitsProcessor(dict(SEQUENCES)),
    ),
    "bad words": (
        steps.BadWords(WORDS, eos_ids=14),
        lambda text: transformers.NoBadWordsLogitsProcessor(WORDS, eos_token_id=14),
    ),
    "min length": (
        steps.MinTokens(PROMPT + 5, [2, 4], "both"),
        lambda text: transformers.MinLengthLogitsProcessor(PROMPT + 5, [2, 4]),
    ),
    "min new": (
        steps.MinTokens(5, 2),
        lambda text: transformers.MinNewTokensLengthLogitsProcessor(PROMPT, 5, 2),
    ),
    "forced eos": (
        steps.ForcedEOS(PROMPT + 5, [2, 4]),
        lambda text: transformers.ForcedEOSTokenLogitsProcessor(PROMPT + 5, [2, 4]),
    ),
    "length decay": (
        steps.LengthDecay(2, 1.07, [2, 4]),
        lambda text: transformers.ExponentialDecayLengthPenalty((2, 1.07), [2, 4], PROMPT),
    ),
    "suppress": (steps.Suppress([3, 4]), lambda text: transformers.SuppressTokensLogitsProcessor([3, 4])),
    "suppress at begin": (
        steps.SuppressAtBegin([3, 4]),
        lambda text: transformers.SuppressTokensAtBeginLogitsProcessor([3, 4], PROMPT),
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits(name: str) -> None:
    step, processor = EDITS[name]
    changed = 0
    for row in rows():
        for text in TEXTS:
            mine, other = seen([step], row, text), theirs(processor(text), row, text)
            np.testing.assert_array_equal(mine, other)
            changed += np.count_nonzero(mine != row)
    assert bool(changed) == (name != "no repeat, 50")


def test_forced_bos() -> None:
    for text in ([3], [3, 4]):
        mine = seen([steps.ForcedBOS(7)], rows()[1], text)
        assert np.array_equal(mine, theirs(transformers.ForcedBOSTokenLogitsProcessor(7), rows()[1], text))


def test_guidance() -> None:
    row, guide, text = rows()[2], rows()[1], TEXTS[0]
    process = logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, None)
    process.get_unconditional_logits = lambda ids: torch.tensor(guide)[None, None]  # type: ignore[method-assign]
    mine = seen([steps.Guidance(1.7)], row, text, guide)
    np.testing.assert_allclose(mine, theirs(process, row, text), rtol=1e-6, atol=2e-6)
    both = torch.tensor(np.stack([row, guide]))
    batched = logits_process.ClassifierFreeGuidanceLogitsProcessor(1.7)(torch.tensor([text]), both)[0]
    np.testing.assert_allclose(mine, torch.log_softmax(batched, -1) + lse(mine), rtol=1e-5, atol=1e-5)


def lse(row: np.ndarray) -> float:
    return float(np.log(np.exp(row.astype(float)).sum()))


def test_watermark() -> None:
    process = logits_process.WatermarkLogitsProcessor(VOCAB, "cpu", greenlist_ratio=0.3, bias=1.5)
    step = steps.Watermark(0.3, 1.5, greens=lambda ids: process._get_greenlist_ids(torch.tensor(ids)).numpy())
    for row in rows():
        for text in TEXTS:
            assert np.array_equal(seen([step], row, text), theirs(process, row, text))


def test_renormalised() -> None:
    row, text = rows()[2], TEXTS[0]
    mine = seen([steps.Renormalise()], row, text)
    np.testing.assert_allclose(mine, theirs(transformers.LogitNormalization(), row, text), rtol=1e-6)


LEFT: dict[str, tuple[list[steps.Step], list[Any]]] = {
    "temperature": ([steps.Temperature(0.7)], [transformers.TemperatureLogitsWarper(0.7)]),
    "top-k": ([steps.TopK(20, ties="all")], [transformers.TopKLogitsWarper(20)]),
    "top-k, min_keep": ([steps.TopK(3, 7, ties="all")], [transformers.TopKLogitsWarper(3, min_tokens_to_keep=7)]),
    "top-p": ([steps.TopP(0.8)], [transformers.TopPLogitsWarper(0.8)]),
    "top-p, min_keep": ([steps.TopP(0.1, 6)], [transformers.TopPLogitsWarper(0.1, min_tokens_to_keep=6)]),
    "min-p": ([steps.MinP(0.1)], [transformers.MinPLogitsWarper(0.1)]),
    "min-p, min_keep": ([steps.MinP(0.9, 9)], [transformers.MinPLogitsWarper(0.9, min_tokens_to_keep=9)]),
    "typical": ([steps.Typical(0.7)], [transformers.TypicalLogitsWarper(0.7)]),
    "typical, min_keep": ([steps.Typical(0.05, 5)], [transformers.TypicalLogitsWarper(0.05, min_tokens_to_keep=5)]),
    "epsilon": ([steps.Epsilon(0.004)], [transformers.EpsilonLogitsWarper(0.004)]),
    "epsilon, min_keep": ([steps.Epsilon(0.4, 4)], [transformers.EpsilonLogitsWarper(0.4, min_tokens_to_keep=4)]),
    "eta": ([steps.Eta(0.01)], [transformers.EtaLogitsWarper(0.01)]),
    "eta, min_keep": ([steps.Eta(0.9, 4)], [transformers.EtaLogitsWarper(0.9, min_tokens_to_keep=4)]),
    "top-h": ([steps.TopH(0.6)], [transformers.TopHLogitsWarper(0.6)]),
    "all": (
        [*steps.transformers(temperature=0.8, top_h=0.9, top_k=40, top_p=0.95, min_p=0.01, typical_p=0.9)],
        [
            transformers.TemperatureLogitsWarper(0.8),
            transformers.TopHLogitsWarper(0.9),
            transformers.TopKLogitsWarper(40),
            transformers.TopPLogitsWarper(0.95),
            transformers.MinPLogitsWarper(0.01),
            transformers.TypicalLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str) -> None:
    """The same ids, but for one at the edge of a mass or an entropy that float32 sums put on its other side."""
    ours, processors = LEFT[name]
    same = 0
    for row in rows():
        mine, other = seen(ours, row, TEXTS[0]), row
        for processor in processors:
            other = theirs(processor, other, TEXTS[0])
        kept, wanted = np.flatnonzero(mine > -np.inf), np.flatnonzero(other > -np.inf)
        if not np.array_equal(kept, wanted):
            assert len(np.setxor1d(kept, wanted)) == 1
            continue
        same += 1
        p = np.exp(other[kept].astype(float) - other.max())
        np.testing.assert_allclose(np.exp(mine[kept]), p / p.sum(), rtol=1e-4)
    assert same >= 4


# ---- processors as steps ----


@pytest.mark.parametrize("name", EDITS)
def test_edits_by_their_processors(name: str) -> None:
    _, processor = EDITS[name]
    for row in rows():
        for text in TEXTS:
            (step,) = steps_of([processor(text)])
            assert isinstance(step, steps.Custom) == name.startswith("encoder no repeat")
            np.testing.assert_array_equal(seen([step], row, text), theirs(processor(text), row, text))


@pytest.mark.parametrize("name", LEFT)
def test_truncations_by_their_processors(name: str) -> None:
    ours, processors = LEFT[name]
    mine, wanted = (program_of(groups(found)[0]).codes for found in (steps_of(processors), tuple(ours)))
    np.testing.assert_allclose(mine, wanted, rtol=1e-7)  # eta's number is a float32


def test_the_list_of_a_model_is_a_list_of_steps() -> None:
    """What generate() would apply, and a processor of one's own among it."""

    class Own(transformers.LogitsProcessor):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 0, -torch.inf)

    processors = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.2),
            transformers.NoRepeatNGramLogitsProcessor(2),
            Own(),
            transformers.TopKLogitsWarper(5, filter_value=-1e4),
            transformers.TopPLogitsWarper(0.9),
        ]
    )
    found = steps_of(processors)
    names = [type(step).__name__ for step in found]
    assert names == ["Penalties", "NoRepeatNgram", "Custom", "Custom", "TopP"]
    sampler = lanewise.Sampler(found, seed=2)
    sampler.add(0, TEXTS[4])
    for row in rows()[:4] * 10:
        wanted = processors(torch.tensor([TEXTS[4] + sampler.output(0).tolist()]), torch.tensor(row)[None].clone())[0]
        token = sampler(row)
        assert wanted[token] > -torch.inf and token % 2 == 1
