"""Logit rows to try things on: real ones, which the package carries, and made ones of any vocabulary size."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from typing import NamedTuple

import numpy as np


class RealRow(NamedTuple):
    """What a model said about the token after `prompt` (data/README.md)."""

    name: str
    prompt: str
    prompt_ids: list[int]
    greedy: int
    tokens: dict[int, str]  # the texts of the 200 likeliest
    logits: np.ndarray  # float16, (49152,)

    def text(self, token: int) -> str:
        return self.tokens.get(token, f"#{token}")


def unpacked(peak: np.ndarray, below: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Exact up to 13 below the row's peak, in whole steps further down, where a wheel should not spend its bytes."""
    logits: np.ndarray = peak[:, None] - below.astype(np.float16)
    logits[below == 0] = near
    return logits


def real_rows() -> list[RealRow]:
    data = files("lanewise") / "data"
    described = json.loads((data / "logits.json").read_text("utf-8"))["rows"]
    with (data / "logits.npz").open("rb") as file:
        logits = unpacked(**np.load(file))
    return [
        RealRow(**{**row, "tokens": {int(id_): text for id_, text in row["tokens"].items()}}, logits=logits[i])
        for i, row in enumerate(described)
    ]


def realistic(vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Like the rows of SmolLM2, to which the constants are fitted: a Gaussian body in which low ids are likelier,
    an upper tail stretched by the row's confidence, and any centre."""
    likelier = np.log((vocab + 200) / (np.arange(vocab) + 200)) - 1
    z = 0.38 * likelier + np.sqrt(1 - 0.38**2) * rng.standard_normal(vocab)
    z += abs(rng.normal(0.24, 0.14)) * np.maximum(z - 1.5, 0) ** 2
    x: np.ndarray = rng.normal(3, 7) + rng.uniform(2.8, 4.2) * z
    return x.astype(np.float32)


def flat(vocab: int, rng: np.random.Generator) -> np.ndarray:
    return 0.1 * rng.standard_normal(vocab, np.float32)


def peaked(vocab: int, rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal(vocab, np.float32)
    x[rng.integers(vocab)] = 20
    return x


def sharp(vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Twenty tokens stand out, by 1 to 20."""
    x = rng.standard_normal(vocab, np.float32)
    x[rng.choice(vocab, 20, replace=False)] += np.arange(1, 21, dtype=np.float32)
    return x


def ascending(vocab: int, rng: np.random.Generator) -> np.ndarray:
    return np.sort(realistic(vocab, rng))


def descending(vocab: int, rng: np.random.Generator) -> np.ndarray:
    return ascending(vocab, rng)[::-1].copy()


def ties(vocab: int, rng: np.random.Generator) -> np.ndarray:
    return np.full(vocab, rng.normal(3, 7), np.float32)


def half_ties(vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Every second entry, on average, is the maximum."""
    x = realistic(vocab, rng)
    x[rng.random(vocab) < 0.5] = x.max()
    return x


def masked(vocab: int, rng: np.random.Generator) -> np.ndarray:
    """As a grammar leaves a row: nine in ten are -inf."""
    x = realistic(vocab, rng)
    x[rng.random(vocab) < 0.9] = -np.inf
    x[rng.integers(vocab)] = 0  # never all of them
    return x


KINDS: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    make.__name__.replace("_", " "): make
    for make in (realistic, flat, peaked, sharp, ascending, descending, ties, half_ties, masked)
}
