"""Tables of blocks: handles, the slots that they stand for, and the integers that calls are told."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ._arrays import as_array
from ._types import Ints

Handles = NDArray[np.int64]
Slots = NDArray[np.int64]
ID = 0xFFFFFFFF  # of a handle, the part that is the block
DROPPED = -1  # in a table, in place of a handle


def slots_of(handles: array[int], start: int, stop: int, block_size: int) -> Slots:
    """Slots of the tokens start .. stop - 1; -1 in dropped blocks."""
    first = start // block_size
    table = np.array(handles[first : -(-stop // block_size)], np.int64)
    at = np.arange(start, stop) - first * block_size
    blocks = table[at // block_size]
    slots: Slots = np.where(blocks < 0, DROPPED, (blocks & ID) * block_size + at % block_size)
    return slots


def next_slots(tables: list[array[int]], lengths: list[int], counts: array[int], size: int) -> Slots:
    """Slots of the counts[i] tokens behind the first lengths[i] of each table."""
    slots = [slots_of(t, n, n + count, size) for t, n, count in zip(tables, lengths, counts, strict=True)]
    return np.concatenate([np.empty(0, np.int64), *slots])


def held(handles: array[int] | Slots) -> Slots:
    found: Slots = np.array(handles, np.int64)
    kept: Slots = found[found != DROPPED]
    return kept


def packed(numbers: NDArray[np.int64]) -> array[int]:
    return array("q", numbers.tobytes())


def joined(tables: Iterable[array[int] | Slots]) -> Slots:
    total: Slots = np.concatenate([np.empty(0, np.int64), *tables])
    return total


def ids_of(values: Ints, name: str) -> array[int]:
    """Integers, one axis of them, as int64."""
    try:
        if isinstance(values, list | tuple):
            return array("q", values)
        found = as_array(values, name)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers along one axis, got {found.dtype} of shape {found.shape}")
        if found.dtype.itemsize == 8 and found.dtype.kind == "u" and (found > np.iinfo(np.int64).max).any():
            raise OverflowError
        return array("q", found.astype(np.int64).tobytes())
    except OverflowError:
        raise ValueError(f"{name} must be in [-2**63, 2**63)") from None
