"""Drawing a token, beside the libraries that are installed: same rows, same run, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import lanewise
from lanewise._measure import HEADING, OPERATIONS, Cell, line, measure, times

from . import peers, plots
from .report import View, grid
from .table import made


def measured(quick: bool) -> Iterator[Cell]:
    isa = lanewise.info()["usable"][0]
    for vocab in (4096,) if quick else (32000, 128256):
        rows = made("realistic", vocab, 2 if quick else 16)
        for operation in OPERATIONS:
            if operation.setting is not None:
                yield measure(operation, "realistic", isa, rows, peers.ways(operation), seconds=0.0 if quick else 1.0)


def markdown(cells: Sequence[Cell]) -> str:
    names = list(dict.fromkeys(name for cell in cells for name in cell.peers))
    rows = []
    for cell in cells:
        theirs = [times(cell.peers[name]) if name in cell.peers else "" for name in names]
        rows.append(
            [cell.operation, f"{cell.vocab:,}", f"{cell.us:.1f}", f"{cell.over_floor:.2f} {cell.floor}", *theirs]
        )
    return grid(("", "V", "lanewise, us", "x floor", *names), rows)


VIEW = View(
    "Drawing beside other libraries",
    "drawing beside other libraries",
    Cell,
    measured,
    HEADING,
    line,
    markdown,
    plots.beside,
)
