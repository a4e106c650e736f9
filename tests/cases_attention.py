"""Cases of attention: a cache of two sequences, x the keys and the values, (2, blocks, kv_heads, tokens, head_dim)."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

import lanewise
from lanewise import reference

from cases import ANY, EPS, Alloc, Case, Results, rows

KV_HEADS = 2
DIMS = (16, 48, 5, 32, 16, 80, 128)
TOLERANCE = 2e-6


def cache(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
    """About min(n, 300) tokens a sequence, in blocks of 16, of n if that is less."""
    tokens = min(n, 16)
    blocks = 2 * -(-min(n, 300) // tokens)
    shape = (2, blocks, KV_HEADS, tokens, DIMS[n % len(DIMS)])
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def cache_of_several_chunks(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
    return cache(rng, 600, dtype)[..., : DIMS[n % len(DIMS)]].copy()


def ways(n: int) -> list[dict[str, Any]]:
    if n > 1000:
        return [{"group": 3, "queries": [5, 2]}]
    return [
        {"group": 1},
        {"group": 4, "layout": "NHD", "lse_base": "2"},
        {"group": 7, "scale": 0.3, "soft_cap": 2.0},
        {"group": 2, "queries": [3, 70], "window": 9, "sinks": True},  # more rows than a tile has
        {"group": 5, "queries": [2, 9], "causal": False, "slopes": True},
        {"group": 2, "queries": [1, 4], "mask": "bool"},
        {"group": 3, "queries": [2, 3], "mask": "added"},
        {"group": 2, "int8": True},
        {"group": 3, "int8": True, "queries": [1, 5], "layout": "NHD"},
        {"group": 2, "transposed": True},
    ]


def in_pieces(n: int) -> list[dict[str, Any]]:
    return [
        {"group": 2, "queries": [2, 1], "threads": 2},
        {"group": 3, "sinks": True, "shared_prefix": 256, "threads": 1},
    ]


def arranged(x: np.ndarray, s: dict[str, Any]) -> dict[str, Any]:
    """What the calls take, made of x and the settings, the same each time."""
    rng = np.random.default_rng(x.size)
    tokens = x.shape[3]
    queries = s.get("queries", [1, 1])
    heads = KV_HEADS * s["group"]
    half = x.shape[1] // 2
    table = rng.permutation(x.shape[1]).reshape(2, half)
    if "shared_prefix" in s:
        table[1, : s["shared_prefix"] // tokens] = table[0, : s["shared_prefix"] // tokens]
    keys = half * tokens
    k, v = x
    scales = None
    if s.get("int8"):
        k, v = (np.round(np.clip(a.astype(np.float32) * 30, -128, 127)).astype(np.int8) for a in x)
        scales = rng.uniform(0.01, 0.02, (2, *k.shape[:3], 2)).astype(np.float32)
        scales[..., 1] = rng.integers(-30, 30, scales.shape[:-1])
    mask = None
    if "mask" in s:
        mask = rng.random((sum(queries), heads, keys)) < 0.6
        mask = mask if s["mask"] == "bool" else np.where(mask, rng.standard_normal(mask.shape), -np.inf)
    return {
        "q": rng.standard_normal((sum(queries), heads, x.shape[4])).astype(np.float32),
        "k": k,
        "v": v,
        "table": table,
        "lengths": [keys, max(keys - 7, s.get("shared_prefix", 0))],
        "starts": np.concatenate([[0], np.cumsum(queries)]),
        "scales": scales,
        "slopes": rng.uniform(0, 0.1, heads).astype(np.float32) if "slopes" in s else None,
        "sinks": rng.standard_normal(heads).astype(np.float32) if "sinks" in s else None,
        "mask": mask if mask is None or mask.dtype == bool else mask.astype(np.float32),
        "how": {name: s[name] for name in ("scale", "soft_cap", "window", "causal") if name in s},
    }


def run_attend(x: np.ndarray, s: dict[str, Any], alloc: Alloc) -> Results:
    a = arranged(x, s)
    layout: Any = s.get("layout", "HND")
    k, v, scales = a["k"], a["v"], [None, None] if a["scales"] is None else a["scales"]
    if s.get("transposed"):  # as vLLM's first PagedAttention had it: head_dim in pieces, tokens innermost
        layout, some = ("NHDTx", "NHDT"), math.gcd(k.shape[3], 8)
        k = np.ascontiguousarray(k.reshape(*k.shape[:3], -1, some).swapaxes(2, 3))
        v = np.ascontiguousarray(v.swapaxes(2, 3))
    if layout == "NHD":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        scales = [None if one is None else one.swapaxes(1, 2) for one in scales]
    before = lanewise.get_num_threads()
    lanewise.set_num_threads(s.get("threads", 1))
    try:
        out, lse = lanewise.extend_attention(
            a["q"],
            k,
            v,
            a["table"],
            a["lengths"],
            a["starts"],
            layout=layout,
            k_scales=scales[0],
            v_scales=scales[1],
            slopes=a["slopes"],
            sinks=a["sinks"],
            mask=a["mask"],
            shared_prefix=s.get("shared_prefix", 0),
            return_lse=True,
            lse_base=s.get("lse_base", "e"),
            out=alloc((*a["q"].shape[:2], a["v"].shape[-1]), np.float32),
            **a["how"],
        )
    finally:
        lanewise.set_num_threads(before)
    return {"out": out, "lse": lse}


def attend_reference(x: np.ndarray, s: dict[str, Any]) -> Results:
    a = arranged(x, s)
    outs, sums = [], []
    k, v = (one.astype(np.float64) for one in (a["k"], a["v"]))
    if a["scales"] is not None:
        k, v = (f[..., :1] * (one - f[..., 1:]) for one, f in zip((k, v), a["scales"].astype(np.float64), strict=True))
    for b, length in enumerate(a["lengths"]):
        own = slice(a["starts"][b], a["starts"][b + 1])
        kept = [one[a["table"][b]].transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, x.shape[4])[:length] for one in (k, v)]
        mask = None if a["mask"] is None else a["mask"][own]
        out, lse = reference.attention(a["q"][own], *kept, slopes=a["slopes"], sinks=a["sinks"], mask=mask, **a["how"])
        outs.append(out)
        sums.append(lse * (np.log2(np.e) if s.get("lse_base") == "2" else 1))
    return {"out": np.concatenate(outs), "lse": np.concatenate(sums)}


def states(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
    """(4, parts, heads, D + 1): outputs and their lse; some parts empty, all of row 0."""
    x = rng.standard_normal((4, 5, 2, min(n, 300) + 1)).astype(np.float32)
    x[..., -1] *= 10
    x[rng.random(x.shape[:3]) < 0.3, -1] = -np.inf
    x[0, :, :, -1] = -np.inf
    x[x[..., -1] == -np.inf, 0] = np.nan  # not looked at
    return x.astype(dtype)


def run_merge(x: np.ndarray, s: dict[str, Any], alloc: Alloc) -> Results:
    shape = (len(x), x.shape[2])
    out = alloc((*shape, x.shape[3] - 1), np.float32), alloc(shape, np.float32)
    v, lse = lanewise.merge_states(x[..., :-1], x[..., -1], **s, out=out)
    return {"v": v, "s": lse}


def merge_reference(x: np.ndarray, s: dict[str, Any]) -> Results:
    v, lse = reference.merge_states(x[..., :-1], x[..., -1], **s)
    return {"v": v, "s": lse}


def before(x: np.ndarray, s: dict[str, Any]) -> Any:
    """(m, l) of blocks that came before: smaller maxima, larger ones, none."""
    if not s["before"]:
        return None
    own = [np.random.default_rng(zlib.crc32(row.tobytes())) for row in x.astype(np.float32)]  # alone: the same
    m = np.float32([-np.inf if rng.random() < 0.3 else 5 * rng.standard_normal() for rng in own])
    return m, np.float64([rng.uniform(1, 9) for rng in own])


def run_stats(x: np.ndarray, s: dict[str, Any], alloc: Alloc) -> Results:
    out = alloc((len(x),), np.float32), alloc((len(x),), np.float64)
    m, sums = lanewise.softmax_stats(x, before(x, s), out=out)
    return {"m": m.view(np.uint32), "l": sums}


def stats_reference(x: np.ndarray, s: dict[str, Any]) -> Results:
    m, sums = reference.softmax_stats(x, before(x, s))
    return {"m": m.view(np.uint32), "l": sums}


def near(x: np.ndarray, s: dict[str, Any], want: np.ndarray) -> np.ndarray:
    return TOLERANCE * (1 + np.abs(want))


ATTENTION = [
    Case("attend", cache, ways, run_attend, attend_reference, near),
    Case("attend_merge", cache_of_several_chunks, in_pieces, run_attend, attend_reference, near, dtypes=("f32",)),
    Case(
        "softmax_stats",
        rows(ANY),
        lambda n: [{"before": False}, {"before": True}],
        run_stats,
        stats_reference,
        lambda x, s, want: want * EPS * (80 + 4 * np.log(x.shape[1])),  # 64 sums a lane; the mean of |score - m|
    ),
    Case("merge_states", states, lambda n: [{}, {"lse_base": "2"}], run_merge, merge_reference, near, dtypes=("f32",)),
]
