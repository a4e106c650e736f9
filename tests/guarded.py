"""Memory that a kernel cannot leave unnoticed: arrays that touch an unreadable page, poison on their other side."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
POISON = 0x88
UNREADABLE = os.environ.get("LANEWISE_TEST_PAGES") != "readable"  # qemu's AVX2 reads what a masked load leaves out


class Guarded:
    """Hands out arrays that end right before an unreadable page, or begin right after one.

    `check()` asserts that the poison around every array is as it was.
    """

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self.zones: list[tuple[np.ndarray, slice]] = []

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        room = -(-max(size, 1) // PAGE) * PAGE + PAGE  # at least a page of poison
        memory = mmap.mmap(-1, room + 2 * PAGE)
        zone = np.frombuffer(memory, np.uint8)
        start = PAGE + room - size if self.at_end else PAGE
        zone[PAGE : PAGE + room] = POISON
        if UNREADABLE:
            for guard in (0, PAGE + room):
                assert LIBC.mprotect(ctypes.c_void_p(zone.ctypes.data + guard), PAGE, 0) == 0
        self.zones.append((zone, slice(start, start + size)))
        return zone[start : start + size].view(dtype).reshape(shape)

    def place(self, x: np.ndarray) -> np.ndarray:
        placed = self(x.shape, x.dtype)
        placed[...] = x
        placed.flags.writeable = False
        return placed

    def check(self) -> None:
        for zone, used in self.zones:
            inside = slice(PAGE, len(zone) - PAGE)
            before, after = zone[inside.start : used.start], zone[used.stop : inside.stop]
            assert (before == POISON).all(), "a kernel wrote before its array"
            assert (after == POISON).all(), "a kernel wrote behind its array"
