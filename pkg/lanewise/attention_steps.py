"""The steps that attention and nucleus sampling are taught by, one at a time: to learn from and to check against."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import decode_attention, merge_state

State = tuple[np.ndarray, np.ndarray]


def attention_step(q: Any, k: Any, v: Any, state: State | None = None) -> State:
    """One step of online-softmax attention: (out, lse) of q over another block of keys and those of `state` before it.

    q: (heads, head_dim); k, v: (tokens, kv_heads, head_dim), as decode_attention takes them. When the maximum moves,
    what was gathered before is scaled down with it, and `out` is divided by the sum of all: after the last block it is
    the result. Raises ValueError, TypeError.

    >>> q, kv = np.ones((1, 2), np.float32), np.float32([[[0, 0]], [[9, 9]]])
    >>> state = lanewise.attention_step(q, kv[:1], kv[:1])
    >>> out, lse = lanewise.attention_step(q, kv[1:], kv[1:], state)
    >>> out.round(3).tolist()
    [[9.0, 9.0]]
    """
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    if q.ndim != 2 or k.ndim != 3 or v.ndim != 3:
        raise ValueError(f"q, k and v must have 2, 3 and 3 axes, got shapes {q.shape}, {k.shape} and {v.shape}")
    out, lse = decode_attention(q[None], k[None], v[None], None, [len(k)], layout="NHD", return_lse=True)
    if state is not None:
        before, sums = (np.asarray(part) for part in state)
        out, lse = merge_state(before[None], sums[None], out, lse)
    return out[0], lse[0]


def prefix_cut(probs: Any, p: float) -> int:
    """How many of the probabilities `probs` (V,), in descending order, are the nucleus of mass p: what crosses p is
    kept, and so is the first. Sums run in float64 from the first on. Raises ValueError.

    >>> lanewise.prefix_cut([0.5, 0.3, 0.2], 0.6)
    2
    """
    row = np.asarray(probs, np.float64)
    if row.ndim != 1 or not row.size:
        raise ValueError(f"probs must have shape (V,), V at least 1, got {row.shape}")
    bad = np.flatnonzero(~((row >= 0) & (row < np.inf)) | np.append(False, row[1:] > row[:-1]))
    if bad.size:
        raise ValueError(f"probs[{bad[0]}] must be a number from 0 to the one before it, got {row[bad[0]]}")
    if np.isnan(p):
        raise ValueError(f"p must be a number, got {p}")
    before = np.append(0.0, np.cumsum(row)[:-1])
    return row.size if p >= 1 else max(1, int(np.count_nonzero(before < p)))
