"""Rows of keys and values between arrays and slots of a cache, from one dtype to another.

bfloat16 and int8 are made as everywhere in the package: rounded half to even; and codes c that stand for
scale * (c - zero), of each token and head, so that its least and largest number and 0 are held.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
LEAST_RANGE = np.float32(2.0**-126)  # below it a row counts as zeros


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize == 2 and dtype.kind == "V"


def widened(rows: NDArray[Any]) -> F32:
    if is_bfloat16(rows.dtype):
        wide: F32 = (np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return wide
    return rows.astype(np.float32)


def narrowed(rows: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Rows of floats in another float dtype."""
    if rows.dtype == dtype or (is_bfloat16(rows.dtype) and is_bfloat16(dtype)):
        return rows.view(dtype)
    wide = widened(rows)
    if not is_bfloat16(dtype):
        with np.errstate(over="ignore"):
            return wide.astype(dtype)
    bits = np.ascontiguousarray(wide).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(wide), bits >> 16 | 0x40, rounded).astype(np.uint16).view(dtype)


def quantised(rows: NDArray[Any], name: str) -> tuple[NDArray[np.int8], F32]:
    """Codes (layers, tokens, heads, width), and scale and zero of each row. A NaN or an infinity is ValueError."""
    wide = widened(rows)
    wrong = np.argwhere(~np.isfinite(wide))
    if len(wrong):
        layer, token, head, at = map(int, wrong[0])
        raise ValueError(
            f"{name} must be finite for an int8 cache, got {wide[layer, token, head, at]} "
            f"in layer {layer}, token {token}, head {head}"
        )
    low, high = (np.float32(0) + f(wide, axis=-1, initial=0) for f in (np.min, np.max))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scale = (high - low) / np.float32(255)
        scale = np.where(np.isinf(scale), high / np.float32(255) - low / np.float32(255), scale)
        zeros = high - low < LEAST_RANGE
        zero = np.clip(np.rint(np.float32(-128) - low / scale), -128, 127)
        scale, zero = np.where(zeros, 0, scale), np.where(zeros, 0, zero)
        codes = np.clip(np.rint(wide / scale[..., None]) + zero[..., None], -128, 127)
    codes = np.where(zeros[..., None], 0, codes).astype(np.int8)
    return codes, np.stack([scale, zero], -1).astype(np.float32)


def put(view: NDArray[Any], block: NDArray[np.int64], token: NDArray[np.int64], rows: NDArray[Any]) -> None:
    """Into (layers, blocks, heads, tokens, width), rows (layers, tokens, heads, width)."""
    view[:, block, :, token] = rows.swapaxes(0, 1)


def get(view: NDArray[Any], block: NDArray[np.int64], token: NDArray[np.int64]) -> NDArray[Any]:
    found: NDArray[Any] = view[:, block, :, token]
    return np.ascontiguousarray(found.swapaxes(0, 1))
