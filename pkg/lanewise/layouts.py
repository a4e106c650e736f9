"""How keys and values lie in arrays, told by a string and never guessed from a shape.

A layout has a letter for each axis, the slowest first:

    L layers    N blocks    2 keys, then values    H heads    T tokens of a block    D head_dim
    S slots: the tokens of all blocks in one axis (in place of N and T)
    x at the end: D is cut into pieces of x elements, and D in the string stands for the axis of pieces

What has no L may be a list of arrays, one a layer; what has no H is one head. Two strings, (keys', values'), tell of a
pair that lies in two ways. "NHD" and "HND" are short for "NTHD" and "NHTD", blocks as FlashInfer names them.

    KVCache of an engine                                      layout              arrays
    vLLM FlashAttention, CPU; LMCache NL x TWO_NB_BS_NH_HS    "2NTHD", "2NHTD"    a list, one a layer
    FlashInfer; LMCache NL x NB_TWO_BS_NH_HS                  "N2THD", "N2HTD"    a list, one a layer, or one array
    FlashInfer's pairs                                        "NHD", "HND"        (keys, values)
    LMCache NB_NL_TWO_BS_NH_HS, and with layers first         "NL2THD", "LN2THD"  one array
    LMCache KV_2LTD, its last axis reshaped to heads, D       "2LSHD"             one array
    SGLang; LMCache TWO x NL x NBBS_NH_HS                     "SHD"               (a list of keys, a list of values)
    MLA's latents; LMCache NL x NB_BS_HS, NL x NBBS_1_HS      "NTD", "SHD"        one array or a list, without values
    vLLM's first PagedAttention                               ("NHDTx", "NHDT")   (keys, values)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._arrays import as_array

Layout: TypeAlias = str | tuple[str, str]
Views: TypeAlias = list[NDArray[Any]]  # of all layers, or one a layer

NAMES = {"NHD": "NTHD", "HND": "NHTD"}
CANONICAL = "2LNHTDx"
MEANINGS = "L layers, N blocks, 2 keys and values, H heads, T tokens, D head_dim, S slots, x elements of a piece of D"


def parse(layout: Layout) -> tuple[str, str]:
    """The axes of keys and of values, checked; both alike unless told apart.

    >>> from lanewise import layouts
    >>> layouts.parse("HND"), layouts.parse(("NHDTx", "NHDT"))
    (('NHTD', 'NHTD'), ('NHDTx', 'NHDT'))
    """
    if isinstance(layout, str):
        axes = _axes(layout)
        return axes, axes
    if not isinstance(layout, tuple) or len(layout) != 2 or not all(isinstance(part, str) for part in layout):
        raise TypeError(f"layout must be a string or two, (keys', values'), got {layout!r}")
    keys, values = _axes(layout[0]), _axes(layout[1])
    if "2" in keys + values:
        raise ValueError(f"layout {layout!r}: two strings tell of two arrays, so neither may have the axis 2")
    return keys, values


@lru_cache
def _axes(layout: str) -> str:
    axes = NAMES.get(layout, layout)
    for letter in axes:
        if letter not in "LN2HTDSx":
            raise ValueError(f"layout {layout!r}: unknown axis {letter!r}; axes are {MEANINGS}")
        if axes.count(letter) > 1:
            raise ValueError(f"layout {layout!r}: axis {letter!r} stands twice")
    if "D" not in axes:
        raise ValueError(f"layout {layout!r} must have the axis D")
    if ("S" in axes) == ("N" in axes or "T" in axes) or ("N" in axes) != ("T" in axes):
        raise ValueError(f"layout {layout!r} must have either N and T, blocks and their tokens, or S, slots")
    if "x" in axes[:-1]:
        raise ValueError(f"layout {layout!r}: x must be the last axis")
    return axes


def views(arrays: Any, layout: Layout, block_size: int | None = None) -> tuple[Views, Views | None]:
    """Keys and values as they lie, seen as (layers, blocks, heads, tokens, head_dim), without a copy: lists with one
    array of all layers, or one a layer. Where head_dim is in pieces they are (..., pieces, x).

    arrays: with 2 in the layout an array or a list of arrays, one a layer; else a pair (keys, values) of those, or keys
    alone, whose values are None. block_size: what slots are counted by; default all in one block.

    >>> from lanewise import layouts
    >>> keys, values = layouts.views(np.zeros((7, 2, 16, 4, 64), np.float32), "N2THD")
    >>> keys[0].shape, values[0].strides == keys[0].strides
    ((1, 7, 4, 16, 64), True)
    """
    key_axes, value_axes = parse(layout)
    if "2" in key_axes:
        both = _arrays(arrays, key_axes, layout, "cache")
        if both[0].shape[key_axes.index("2")] != 2:
            raise ValueError(f"layout {layout!r}: axis 2 must have 2 entries, got shape {both[0].shape}")
        seen = _canonical(both, key_axes, block_size)
        return [view[0] for view in seen], [view[1] for view in seen]
    if isinstance(arrays, tuple):
        if len(arrays) != 2:
            raise ValueError(f"layout {layout!r} tells of a pair (keys, values), got {len(arrays)} arrays")
        keys = _arrays(arrays[0], key_axes, layout, "keys")
        values = _arrays(arrays[1], value_axes, layout, "values")
        if len(keys) != len(values):
            raise ValueError(f"keys and values must have as many layers, got {len(keys)} and {len(values)}")
        return _canonical(keys, key_axes, block_size), _canonical(values, value_axes, block_size)
    return _canonical(_arrays(arrays, key_axes, layout, "keys"), key_axes, block_size), None


def scale_views(arrays: Any, layout: Layout, block_size: int | None = None) -> tuple[Views, Views | None]:
    """Scales and zeros of int8 arrays of this layout, likewise seen as (layers, blocks, heads, tokens, 2).

    They have the axes of the layout but D and x, and last an axis of 2: scale, zero.
    """
    keys, values = (_scale_axes(axes) for axes in parse(layout))
    return views(arrays, keys if keys == values else (keys, values), block_size)


def _scale_axes(axes: str) -> str:
    return axes.replace("D", "").replace("x", "") + "D"


def _arrays(given: Any, axes: str, layout: Layout, name: str) -> list[NDArray[Any]]:
    if isinstance(given, list | tuple):
        if "L" in axes:
            raise ValueError(f"layout {layout!r} has the layers in an axis, so {name} must be one array, got a list")
        if not given:
            raise ValueError(f"{name} must have at least one layer, got an empty list")
        arrays = [as_array(array, f"{name}[{i}]") for i, array in enumerate(given)]
    else:
        arrays = [as_array(given, name)]
    for i, array in enumerate(arrays):
        if array.ndim != len(axes):
            at = f"{name}[{i}]" if len(arrays) > 1 else name
            raise ValueError(f"{at} must have {len(axes)} axes for layout {layout!r}, got shape {array.shape}")
        if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
            raise ValueError(
                f"{name}[{i}] must be as {name}[0], {arrays[0].dtype} of shape {arrays[0].shape}, "
                f"got {array.dtype} of shape {array.shape}"
            )
    return arrays


def _canonical(arrays: Sequence[NDArray[Any]], axes: str, block_size: int | None) -> Views:
    if "S" in axes and block_size is not None:
        at = axes.index("S")
        slots = arrays[0].shape[at]
        if slots % block_size:
            raise ValueError(f"{slots} slots are no whole number of blocks of {block_size}")
        arrays = [_split(array, at, block_size) for array in arrays]
        axes = axes.replace("S", "NT")
    missing, order = _order(axes)
    return [array[missing].transpose(order) for array in arrays]


@lru_cache
def _order(axes: str) -> tuple[tuple[None, ...], tuple[int, ...]]:
    """The axes that are missing, to be put first, and the order that is canonical then."""
    axes = axes.replace("S", "T")  # of one block
    missing = [letter for letter in "LNH" if letter not in axes]
    shown = "".join(missing) + axes
    return (None,) * len(missing), tuple(shown.index(letter) for letter in CANONICAL if letter in shown)


def _split(array: NDArray[Any], at: int, size: int) -> NDArray[Any]:
    """The axis `at` as two, the second of `size`: by strides, since reshape would copy what is not adjacent."""
    shape = (*array.shape[:at], array.shape[at] // size, size, *array.shape[at + 1 :])
    step = array.strides[at]
    strides = (*array.strides[:at], step * size, step, *array.strides[at + 1 :])
    return np.lib.stride_tricks.as_strided(array, shape, strides)
