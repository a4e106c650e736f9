"""Cases of what moves rows of keys and values between layouts and dtypes."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

import lanewise
from lanewise import reference

from cases import Alloc, Case, Results

TARGETS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8}
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 65520.0, 65519.99, 5.9e-8, 2.99e-8, 3.4e38, -3.4e38, 1.00390625, 1.01171875]
BLOCK, BLOCKS, POSITIONS = 2, 3, 5
SLOTS = np.array([5, -1, 0, 2])  # of four tokens


def kv_rows(rng: np.random.Generator, n: int, dtype: np.dtype) -> np.ndarray:
    """(tokens, heads, head_dim): one token of outliers, one of special values, one of zeros and what is nearly that."""
    heads = 2 if n <= 5000 else 1
    x = rng.standard_normal((len(SLOTS), heads, n)) * 3
    x[0, :, :: max(n // 3, 1)] *= 60
    x[2] = rng.choice([0.0, 1e-40, -1e-45], (heads, n))
    x[3] = rng.choice(SPECIAL if n > 1 else [65520.0], (heads, n))
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype)


def settings_of(n: int) -> list[dict[str, Any]]:
    plain = [{"to": to, "layout": layout} for to, layout in zip(TARGETS, ["NHD", "HND", "pieces", "HND"], strict=True)]
    turned = [{"to": "f32", "layout": "NHD", "rope": "neox"}, {"to": "i8", "layout": "pieces", "rope": "interleaved"}]
    unfit = [{"to": to, "layout": "HND", "unfit": True} for to in ("f16", "bf16")]
    return plain + (turned if n > 1 else []) + unfit if n <= 5000 else [plain[2], plain[3]]


def given(x: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    """The rows as a setting has them: for int8 finite, for "unfit" not."""
    x = x.copy()
    if s.get("unfit"):
        x[0, 0, 0], x[3, -1, -1], x[3, 0, 0] = np.nan, -np.inf, np.inf
    elif s["to"] == "i8" or "rope" in s:
        x[~(np.abs(x.astype(np.float32)) < 1e30)] = 7.0
    return x


def tables(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    angle = np.outer(np.arange(POSITIONS), 1 / (1 + np.arange(max(n // 3, 1)))).astype(np.float64)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), np.array([4, 1, 0, 3])


def rope_of(x: np.ndarray, s: dict[str, Any]) -> dict[str, Any]:
    if "rope" not in s:
        return {}
    cos, sin, positions = tables(x.shape[-1])
    return {"rope": s["rope"], "cos": cos, "sin": sin, "positions": positions}


def cache_of(x: np.ndarray, s: dict[str, Any], alloc: Alloc) -> tuple[np.ndarray, Any]:
    heads, n = x.shape[1:]
    if s["layout"] == "pieces":
        piece = 8 if n % 8 == 0 else 1
        return alloc((BLOCKS, heads, n // piece, BLOCK, piece), TARGETS[s["to"]]), ("NHDTx", "NHDT")
    shape = (BLOCKS, BLOCK, heads, n) if s["layout"] == "NHD" else (BLOCKS, heads, BLOCK, n)
    return alloc(shape, TARGETS[s["to"]]), s["layout"]


def run_move(x: np.ndarray, s: dict[str, Any], alloc: Alloc) -> Results:
    x = given(x, s)
    cache, layout = cache_of(x, s, alloc)
    scales = None
    if s["to"] == "i8":
        scales = alloc((BLOCKS, x.shape[1], BLOCK, 2), np.float32)
        scales[...] = 0
    cache[...] = 0
    lanewise.append_kv(x, None, cache, None, SLOTS, layout=layout, k_scales=scales, **rope_of(x, s))
    back = alloc(x.shape, np.float32)
    back[...] = 0
    lanewise.gather_kv(cache, None, SLOTS, layout=layout, k_scales=scales, out=(back, None))
    moved = {"back": back, "rows": rows_of(cache, s)}
    return moved if scales is None else {**moved, "scales": scales.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], 2)}


def rows_of(cache: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    """(slots, heads, head_dim), bfloat16 as its bits."""
    if s["layout"] == "pieces":
        cache = cache.transpose(0, 3, 1, 2, 4)
    elif s["layout"] == "HND":
        cache = cache.transpose(0, 2, 1, 3)
    rows = np.ascontiguousarray(cache.reshape(BLOCKS * BLOCK, *cache.shape[2:3], -1))
    return rows.view(np.uint16) if s["to"] == "bf16" else rows


def move_reference(x: np.ndarray, s: dict[str, Any]) -> Results:
    x = given(x, s)
    if "rope" in s:
        cos, sin, at = tables(x.shape[-1])
        x = reference.turn(x, cos[at][:, None], sin[at][:, None], interleaved=s["rope"] == "interleaved")
    kept = SLOTS >= 0
    rows = np.zeros((BLOCKS * BLOCK, *x.shape[1:]), np.float32)
    rows[SLOTS[kept]] = x[kept]
    if s["to"] == "i8":
        codes, scales = reference.quantise(rows)
        wide = reference.dequantise(codes, scales)
        found = {"rows": codes, "scales": scales}
    else:
        narrowed = reference.narrow(rows, s["to"])
        wide = (
            narrowed.view(ml_dtypes.bfloat16).astype(np.float32) if s["to"] == "bf16" else narrowed.astype(np.float32)
        )
        found = {"rows": narrowed}
    return {**found, "back": np.where(kept[:, None, None], reference.narrow(wide, "f32")[SLOTS], np.float32(0))}


def run_check(x: np.ndarray, s: dict[str, Any], alloc: Alloc) -> Results:
    """Where append_kv says that int8 cannot hold a token."""
    x = given(x, {"to": "i8"})
    if s["token"] is not None:
        x[s["token"], s["head"] % x.shape[1], int(s["at"] * (x.shape[2] - 1))] = s["value"]
    cache, scales = (
        alloc((BLOCKS, x.shape[1], BLOCK, x.shape[2]), np.int8),
        alloc((BLOCKS, x.shape[1], BLOCK, 2), np.float32),
    )
    cache[...], scales[...] = 5, 3.0
    found = [-1, -1]
    try:
        lanewise.append_kv(x, None, cache, None, SLOTS, layout="HND", k_scales=scales)
    except ValueError as error:
        found = [int(m) for m in re.findall(r"token (\d+), layer 0, head (\d+) has a NaN", str(error))[0]]
        assert (cache == 5).all() and (scales == 3.0).all()
    return {"where": np.array(found)}


def check_reference(x: np.ndarray, s: dict[str, Any]) -> Results:
    skipped = s["token"] is None or SLOTS[s["token"]] < 0
    return {"where": np.array([-1, -1] if skipped else [s["token"], s["head"] % x.shape[1]])}


def check_settings(n: int) -> list[dict[str, Any]]:
    places = [(0, 0, 0.0, np.nan), (3, 1, 1.0, np.inf), (1, 0, 0.5, np.nan), (2, 1, 0.5, -np.inf), (None, 0, 0, 0)]
    return [
        dict(zip(("token", "head", "at", "value"), place, strict=True)) for place in places[: 5 if n <= 5000 else 2]
    ]


TRANSFER = [
    Case("move_kv", kv_rows, settings_of, run_move, move_reference),
    Case("check_kv", kv_rows, check_settings, run_check, check_reference),
]
