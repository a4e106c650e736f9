"""decode_attention and extend_attention on tensors, any shapes, beside torch's scaled_dot_product_attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import lanewise

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def paged(rows: list[torch.Tensor], block_size: int, layout: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences (tokens, heads, D) in blocks anywhere, what they do not fill full of NaN; and their table."""
    counts = [-(-len(row) // block_size) for row in rows]
    ids = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
    blocks = torch.full((len(ids), block_size, *rows[0].shape[1:]), math.nan, dtype=rows[0].dtype)
    table = torch.full((len(rows), max(counts)), -1)
    for b, row in enumerate(rows):
        for i, part in enumerate(row.split(block_size)):
            table[b, i] = ids.pop()
            blocks[table[b, i], : len(part)] = part
    return (blocks if layout == "NHD" else blocks.transpose(1, 2).contiguous()), table


def by_torch(q: Any, k: Any, v: Any, window: int | None, scale: float | None, causal: bool) -> Any:
    """Of one sequence, in float64: q (queries, heads, D); k, v (keys, kv_heads, D)."""
    count, length = len(q), len(k)
    at, own = torch.arange(length), length - count + torch.arange(count)[:, None]
    mask = at <= own if causal else torch.ones(count, length, dtype=torch.bool)
    if window is not None:
        mask = mask & (at >= own - window)
    q, k, v = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def check(data: st.DataObject, most_queries: int) -> None:
    draw = data.draw
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    dim, v_dim = (draw(st.sampled_from([1, 5, 16, 40, 64, 128])) for _ in range(2))
    counts = draw(st.lists(st.integers(1, most_queries), min_size=1, max_size=3))
    lengths = [count + draw(st.integers(0, 600)) for count in counts]
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(["NHD", "HND"]))
    window, scale = draw(st.none() | st.integers(0, 700)), draw(st.none() | st.floats(0.01, 0.5))
    causal = most_queries == 1 or draw(st.booleans())
    block_size, seed = draw(st.integers(1, 256)), draw(st.integers(0, 99))

    def rows(heads: int, width: int) -> list[torch.Tensor]:
        return [torch.randn(n, heads, width, generator=random).to(dtype) for n in lengths]

    k_rows, v_rows = rows(kv_heads, dim), rows(kv_heads, v_dim)
    q = torch.randn(sum(counts), kv_heads * group, dim, generator=random).to(dtype)
    (k, table), (v, _) = (paged(some, block_size, layout, seed) for some in (k_rows, v_rows))
    how: dict[str, Any] = {"layout": layout, "window": window, "scale": scale}
    if most_queries == 1:
        out = lanewise.decode_attention(q, k, v, table, lengths, **how)
    else:
        starts = torch.tensor([0, *counts]).cumsum(0)
        out = lanewise.extend_attention(q, k, v, table, lengths, starts, causal=causal, **how)
    found = torch.from_numpy(out).double().split(counts)
    for own, queries, keys, values in zip(found, q.split(counts), k_rows, v_rows, strict=True):
        want = by_torch(queries, keys, values, window, scale, causal)
        torch.testing.assert_close(own, want, rtol=2e-6, atol=4e-6)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_decode_is_torchs_attention(data: st.DataObject) -> None:
    check(data, 1)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_extend_is_torchs_attention(data: st.DataObject) -> None:
    check(data, 12)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([1, 40]))
def test_many_more_shapes(data: st.DataObject, most_queries: int) -> None:
    check(data, most_queries)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_is_torchs_lower_right_corner(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, h, 64, generator=random).to(dtype) for n, h in ((7, 4), (50, 4), (50, 4)))
    parts = (x.float().transpose(1, 2) for x in (q, k, v))
    want = scaled_dot_product_attention(*parts, attn_mask=causal_lower_right(7, 50)).transpose(1, 2)
    out = lanewise.extend_attention(q[0], k, v, None, [50], [0, 7], layout="NHD")
    torch.testing.assert_close(torch.from_numpy(out), want[0], rtol=2e-5, atol=2e-5)
