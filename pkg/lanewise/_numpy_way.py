"""The same work as one writes it with NumPy alone: what the demo and the bench put beside lanewise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def softmax(x: np.ndarray) -> np.ndarray:
    e: np.ndarray = np.exp(x - x.max())
    e /= e.sum()
    return e


def log_softmax(x: np.ndarray) -> np.ndarray:
    y: np.ndarray = x - x.max()
    y -= np.log(np.exp(y).sum())
    return y


def logsumexp(x: np.ndarray) -> float:
    top = x.max()
    return float(top + np.log(np.exp(x - top).sum()))


def top_k(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argpartition(x, -k)[-k:]
    ids = ids[np.argsort(-x[ids])]
    return x[ids], ids


def top_p_mask(x: np.ndarray, p: float) -> np.ndarray:
    ids = np.argsort(-x)
    masked = np.full_like(x, -np.inf)
    kept = ids[: np.searchsorted(np.cumsum(softmax(x[ids])), p) + 1]
    masked[kept] = x[kept]
    return masked


def logprobs(x: np.ndarray, token: int, n: int) -> tuple[np.ndarray, np.ndarray, float, int]:
    """The n largest and their ids, and one token's, with its rank."""
    y = log_softmax(x)
    return *top_k(y, n), float(y[token]), int((y > y[token]).sum()) + 1


def sample(
    x: np.ndarray,
    rng: np.random.Generator,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    prompt_ids: Sequence[int] = (),
) -> int:
    """One token from float32 logits (V,). Sorts only where top_p needs it, and only what top_k has left."""
    if repetition_penalty != 1:
        x, seen = x.copy(), np.unique(prompt_ids)
        x[seen] = np.where(x[seen] > 0, x[seen] / repetition_penalty, x[seen] * repetition_penalty)
    if temperature == 0:
        return int(x.argmax())
    ids = None
    if top_k:
        ids = np.argpartition(x, -top_k)[-top_k:]
        ids = ids[np.argsort(-x[ids])]
    elif top_p < 1:
        ids = np.argsort(-x)
    if ids is not None:
        x = x[ids]
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    if top_p < 1:
        p = p[: np.searchsorted(np.cumsum(p), top_p) + 1]
    if min_p > 0:
        p = np.where(p >= min_p * p.max(), p, 0)
    mass = np.cumsum(p)
    drawn = np.searchsorted(mass, rng.random() * mass[-1], side="right")
    return int(drawn if ids is None else ids[drawn])
