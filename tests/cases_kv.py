"""The Cases of group kv: see cases.py. The rows of x are blocks of a pool."""

from __future__ import annotations

from typing import Any

import numpy as np

import lanewise
from lanewise import reference

from cases import Alloc, Case, Results, rows, special, with_nan

BLOCKS = 7
PAIRS = ((3, 1), (1, 3), (2, 0), (0, 4), (4, 6), (5, 2))  # a cycle, chains, neighbours


def pool(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
    one = rows({"special": special, "with NaN": with_nan})(rng, n, dtype)
    return np.concatenate([one] * 4)[:BLOCKS] * np.arange(1, BLOCKS + 1)[:, None].astype(dtype)


def streamed(settings: dict[str, Any]) -> None:
    lanewise.set_stream_threshold(0 if settings["stream"] else 1 << 62)


def run_move(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
    gathered, moved = alloc((3, x.shape[1]), x.dtype), alloc(x.shape, x.dtype)
    moved[...] = x
    streamed(settings)
    try:
        lanewise.gather_blocks(x, [5, 6, 0], out=gathered)
        lanewise.copy_blocks(moved, PAIRS)
    finally:
        lanewise.set_stream_threshold(None)
    return {"gathered": gathered, "moved": moved}


def run_zero(x: np.ndarray, settings: dict[str, Any], alloc: Alloc) -> Results:
    out = alloc(x.shape, x.dtype)
    out[...] = x
    streamed(settings)
    try:
        lanewise.zero_blocks(out, [1, 2, 6])
    finally:
        lanewise.set_stream_threshold(None)
    return {"out": out}


KV = [
    Case(
        "move_blocks",
        pool,
        lambda n: [{"stream": False}, {"stream": True}],
        run_move,
        lambda x, s: {"gathered": x[[5, 6, 0]], "moved": reference.move_blocks(x, x, PAIRS, 0)},
    ),
    Case(
        "zero_blocks",
        pool,
        lambda n: [{"stream": False}, {"stream": True}],
        run_zero,
        lambda x, s: {"out": reference.zero_blocks(x, [1, 2, 6])},
    ),
]
