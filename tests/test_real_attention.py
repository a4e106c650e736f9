"""Attention on a real model's keys, values and queries (data/README.md), beside float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lanewise
from lanewise import reference

BLOCK = 16


def blocks_of(rows: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sequences, one behind the other, as blocks of one head, (blocks, 1, tokens, head_dim), and their table."""
    counts = -(-lengths // BLOCK)
    ids = iter(range(counts.sum()))
    table = np.full((len(lengths), counts.max()), -1)
    blocks = np.zeros((counts.sum(), 1, BLOCK, rows.shape[1]), np.float32)
    for b, own in enumerate(np.split(rows, np.cumsum(lengths)[:-1])):
        table[b, : counts[b]] = [next(ids) for _ in range(counts[b])]
        padded = np.zeros((counts[b] * BLOCK, rows.shape[1]), np.float32)
        padded[: len(own)] = own
        blocks[table[b, : counts[b]], 0] = padded.reshape(-1, BLOCK, rows.shape[1])
    return blocks, table


def wide(cache: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """What a cache stands for, in float64."""
    x = cache.astype(np.float64)
    return x if scales is None else scales[..., :1].astype(np.float64) * (x - scales[..., 1:])


# of each row, the largest error over the largest value: beside what the cache holds, and beside what was put into it
BOUNDS = [
    (np.float32, 2e-6, 2e-6),
    (np.float16, 2e-6, 2e-6),  # the data are float16
    (ml_dtypes.bfloat16, 2e-6, 4e-2),
    (np.int8, 1e-5, 1e-1),  # q (s (c - z)) is s (q c - z sum(q)), with a difference in it
]


@pytest.mark.parametrize(("dtype", "of_kernel", "of_format"), BOUNDS, ids=lambda x: getattr(x, "__name__", ""))
def test_errors_beside_float64(dtype: Any, of_kernel: float, of_format: float) -> None:
    with np.load(Path(__file__).parent / "data" / "kv.npz") as data:
        keys, values, queries, lengths = (data[name] for name in ("keys", "values", "queries", "lengths"))
    assert keys.shape == values.shape == (lengths.sum(), 64) and queries.shape == (2, 8, 3, 64)
    (k, table), (v, _) = (blocks_of(rows.astype(np.float32), lengths) for rows in (keys, values))
    scales: Any = None, None
    if dtype == np.int8:
        codes = tuple(np.zeros(x.shape, np.int8) for x in (k, v))
        scales = tuple(np.zeros((*x.shape[:3], 2), np.float32) for x in (k, v))
        lanewise.relayout((k, v), "HND", codes, "HND", dst_scales=scales)
        k, v = codes
    else:
        k, v = k.astype(dtype), v.astype(dtype)
    q = queries.reshape(16, 3, 64)
    how = {"k_scales": scales[0], "v_scales": scales[1]}
    out, lse = lanewise.extend_attention(q, k, v, table, lengths, [0, 8, 16], return_lse=True, **how)
    for b, end in enumerate(np.cumsum(lengths)):
        own, held = slice(8 * b, 8 * b + 8), slice(end - lengths[b], end)
        kept = [
            wide(x, s)[table[b, : -(-lengths[b] // BLOCK)]].reshape(-1, 1, 64)[: lengths[b]]
            for x, s in zip((k, v), scales, strict=True)
        ]
        want, sums = reference.attention(q[own], *kept)
        original, _ = reference.attention(q[own], keys[held, None], values[held, None])
        top = np.abs(want).max(-1, keepdims=True)
        assert (np.abs(out[own] - want) / top).max() < of_kernel
        assert (np.abs(out[own] - original) / top).max() < of_format
        np.testing.assert_allclose(lse[own], sums, rtol=2e-6, atol=2e-6)
