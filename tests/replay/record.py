"""Writes what every Case does on the scalar ISA, for replay.c: python tests/replay/record.py FILE."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

import lanewise
from lanewise import _ops

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import CASES, DTYPES, SIZES, Case

SPAN = struct.Struct("<Qq")  # struct span of csrc/ops.h


class Region(NamedTuple):
    """Memory that spans share: one that is used in place, or parts of one array."""

    start: int
    before: bytes
    after: bytes


def regions_of(spans: list[tuple[int, bytes, bytes]]) -> list[Region]:
    """Merges (address, before, after) that overlap, in the order of their addresses."""
    regions: list[Region] = []
    for start, before, after in sorted(spans):
        if regions and start < regions[-1].start + len(regions[-1].before):
            first, *contents = regions[-1]
            at = start - first
            merged = [old[:at] + new + old[at + len(new) :] for old, new in zip(contents, (before, after), strict=True)]
            regions[-1] = Region(first, *merged)
        else:
            regions.append(Region(start, before, after))
    return regions


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


class Recording:
    """The file: see replay.c for its layout. Equal contents are kept once."""

    def __init__(self, label: str = "") -> None:
        self.label = label
        self.calls: list[bytes] = []
        self.contents = bytearray()
        self.places: dict[bytes, int] = {}
        self.largest = 0

    def place(self, content: bytes) -> int:
        if content not in self.places:
            self.places[content] = len(self.contents)
            self.contents += padded(content)
        self.largest = max(self.largest, len(content))
        return self.places[content]

    def add(self, operation: str, args: bytes, before: list[bytes | None], after: list[bytes | None]) -> None:
        addresses = [SPAN.unpack_from(args, SPAN.size * i)[0] for i in range(len(before))]
        spans = [(a, b, c) for a, b, c in zip(addresses, before, after, strict=True) if b is not None and c is not None]
        regions = regions_of(spans)
        parts = [
            struct.pack("<32s96sqqq", operation.encode(), self.label.encode(), len(args), len(before), len(regions)),
            args,
        ]
        for address, content in zip(addresses, before, strict=True):
            at = next(
                (i for i, r in reversed(list(enumerate(regions))) if content is not None and r.start <= address), -1
            )
            parts.append(struct.pack("<qq", at, address - regions[at].start if at >= 0 else 0))
        parts += [struct.pack("<qqq", len(r.before), self.place(r.before), self.place(r.after)) for r in regions]
        self.calls.append(b"".join(parts))

    def write(self, path: Path) -> None:
        calls = b"".join(self.calls)
        head = struct.pack("<8sqqq", b"LANEWISE", len(self.calls), 32 + len(calls), self.largest)
        path.write_bytes(head + calls + self.contents)

    def run(self, case: Case, n: int, dtype: str) -> None:
        x = case.inputs(np.random.default_rng(n), n, DTYPES[dtype])
        for settings in case.settings(n):
            self.label = f"n={n} {dtype} {settings}"
            case.run(x, settings, np.zeros)


def sizes(dtype: str) -> list[int]:
    """The larger ones in one dtype only: the file has to fit an emulated machine."""
    return [n for n in SIZES if n <= (50_000 if dtype == "f32" else 1000)]


def record(path: Path) -> None:
    recording = Recording()
    _ops.set_recorder(recording.add)
    try:
        # zeros, so that what a kernel leaves as it was is no accident
        with lanewise.using("scalar"), mock.patch.object(np, "empty", np.zeros):
            for case in CASES:
                for dtype in case.dtypes:
                    for n in sizes(dtype):
                        recording.run(case, n, dtype)
    finally:
        _ops.set_recorder(None)
    recording.write(path)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
