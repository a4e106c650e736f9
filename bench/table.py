"""Every operation on every kind of row: hot, just written and cold; every ISA and the peers on ordinary ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import numpy as np

import lanewise
from lanewise._measure import HEADING, OPERATIONS, Cell, beside, line, measure
from lanewise._rows import KINDS, real_rows

from . import peers, plots
from .report import View, grid

VOCABS = 32000, 50257, 128256, 151936, 262144
ORDINARY = "realistic", "real"


@lru_cache(maxsize=16)
def made(kind: str, vocab: int, seeds: int) -> list[np.ndarray]:
    return [KINDS[kind](vocab, np.random.default_rng(seed)) for seed in range(seeds)]


def inputs(quick: bool) -> Iterator[tuple[str, str, Sequence[np.ndarray]]]:
    """Kind, state and rows."""
    if quick:
        yield from ((kind, "hot", made(kind, 4096, 2)) for kind in ("realistic", "ties"))
        yield from (("realistic", state, made("realistic", 4096, 2)) for state in ("written", "cold"))
        return
    yield "real", "hot", [row.logits.astype(np.float32) for row in real_rows()]
    for vocab in VOCABS:
        yield from ((kind, "hot", made(kind, vocab, 16)) for kind in KINDS)
        yield from (("realistic", state, made("realistic", vocab, 16)) for state in ("written", "cold"))


def measured(quick: bool) -> Iterator[Cell]:
    best, *rest = lanewise.info()["usable"]
    timed = partial(measure, seconds=0.0 if quick else 0.2)
    for kind, state, rows in inputs(quick):
        ordinary = kind in ORDINARY and state == "hot"
        for operation in OPERATIONS:
            yield timed(operation, kind, best, rows, peers.ways(operation) if ordinary else {}, state=state)
            for isa in rest if ordinary else ():
                yield timed(operation, kind, isa, rows, {})


def markdown(cells: Sequence[Cell]) -> str:
    """A row an operation and vocabulary, on the best ISA."""
    best = [cell for cell in cells if cell.isa == cells[0].isa]
    rows = []
    for main in (cell for cell in best if cell.kind in ORDINARY):
        same = {cell.kind: cell for cell in best if (cell.operation, cell.vocab) == (main.operation, main.vocab)}
        states = [
            f"{same[kind].over_floor:.2f}" if kind in same else "" for kind in ("realistic, written", "realistic, cold")
        ]
        worst = max((cell for kind, cell in same.items() if "," not in kind), key=lambda cell: cell.over_floor)
        rows.append(
            [
                main.operation,
                f"{main.vocab:,}",
                f"{main.us:.1f}",
                main.floor,
                f"{main.over_floor:.2f}",
                f"{worst.over_floor:.2f} {worst.kind}",
                *states,
                beside(main, ", "),
            ]
        )
    worst_of, others = "the worst kind of row", "others take, in lanewise's"
    return grid(("operation", "V", "us", "floor", "x floor", worst_of, "written", "cold", others), rows)


VIEW = View(
    "Every operation",
    "every operation and kind of row (the default)",
    Cell,
    measured,
    HEADING,
    line,
    markdown,
    plots.over_floors,
)
