"""From a batch of logits to tokens: lanewise's way, NumPy's and transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from talk import Choose, Talk

import lanewise
from lanewise import _numpy_way


def by_lanewise(seed: int) -> Choose:
    """One call for all. A talk's noise is that of its number and its step, so the others have no say in its text."""

    def choose(logits: np.ndarray, talks: Sequence[Talk], masks: np.ndarray) -> Sequence[int]:
        return lanewise.sample(
            logits,
            [lanewise.SamplingParams(**talk.settings) for talk in talks],
            prompt_ids=[talk.history for talk in talks],
            mask=masks,
            seed=seed,
            keys=[talk.number for talk in talks],
            step=[len(talk.answer) for talk in talks],
        ).tolist()

    return choose


def by_numpy(seed: int) -> Choose:
    rng = np.random.default_rng(seed)

    def choose(logits: np.ndarray, talks: Sequence[Talk], masks: np.ndarray) -> Sequence[int]:
        return [
            _numpy_way.sample(allowed(row, words), rng, prompt_ids=talk.history, **talk.settings)
            for row, talk, words in zip(logits, talks, masks, strict=True)
        ]

    return choose


def allowed(row: np.ndarray, words: np.ndarray) -> np.ndarray:
    if (words == -1).all():
        return row
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(row))
    return np.where(bits, row, np.float32(-np.inf))


def by_transformers(seed: int) -> Choose:
    """Its processors and torch.multinomial, row by row: a generate() has one setting for all."""
    import torch
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    steps = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    generator = torch.Generator().manual_seed(seed)

    def one(row: np.ndarray, talk: Talk) -> int:
        greedy: Any = talk.settings.get("temperature") == 0
        used = [name for name in steps if name in talk.settings and not (greedy and name != "repetition_penalty")]
        process = LogitsProcessorList([steps[name](talk.settings[name]) for name in used])
        scores = process(torch.tensor([talk.history]), torch.from_numpy(row)[None])
        if greedy:
            return int(scores.argmax())
        return int(torch.multinomial(torch.softmax(scores, -1), 1, generator=generator))

    def choose(logits: np.ndarray, talks: Sequence[Talk], masks: np.ndarray) -> Sequence[int]:
        return [one(allowed(row, words), talk) for row, talk, words in zip(logits, talks, masks, strict=True)]

    return choose


WAYS: dict[str, Callable[[int], Choose]] = {
    "lanewise": by_lanewise,
    "NumPy": by_numpy,
    "transformers": by_transformers,
}
