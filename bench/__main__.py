"""`python -m bench [--quick | --bars]`: see docs/performance.md."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import lanewise
from lanewise._measure import HEADING, OPERATIONS, Cell, Operation, Ready, cold_rows, line, measure
from lanewise._rows import KINDS, real_rows

from . import bars, peers, report

VOCABS = 32000, 50257, 128256, 151936, 262144
SEEDS = 16
COLD = "realistic, cold"
PEERS = peers.installed()


def rows(quick: bool) -> Iterator[tuple[str, Sequence[np.ndarray]]]:
    if quick:
        yield from ((kind, bars.made(kind, 4096, 2)) for kind in ("realistic", "ties"))
        return
    yield "real", [row.logits.astype(np.float32) for row in real_rows()]
    for vocab in VOCABS:
        yield from ((kind, bars.made(kind, vocab, SEEDS)) for kind in KINDS)
        yield COLD, cold_rows(bars.made("realistic", vocab, SEEDS))


def others(operation: Operation, row: np.ndarray) -> dict[str, Ready]:
    """The other ways to do it, once they have been seen to give the same."""
    ways = {name: ways[operation.name] for name, ways in PEERS.items() if operation.name in ways}
    ways = {"NumPy": operation.numpy, **ways}
    if not operation.name.startswith("sample"):  # each draws with its own noise
        expected = operation.lanewise(row.size)(row)
        for ready in ways.values():
            np.testing.assert_allclose(peers.first(ready(row.size)(row)), peers.first(expected), rtol=1e-4, atol=1e-5)
    return ways


def cells(quick: bool) -> Iterator[Cell]:
    """The best ISA on every kind of row; the other ISAs and the other libraries on ordinary ones."""
    best, *rest = lanewise.info()["usable"]
    timed = partial(measure, seconds=0.0 if quick else 0.2)
    for kind, some in rows(quick):
        ordinary = kind in ("realistic", "real")
        for operation in OPERATIONS:
            beside = others(operation, some[0]) if ordinary else {}
            yield timed(operation, kind, best, some, beside, cold=kind == COLD)
            for isa in rest if ordinary else ():
                yield timed(operation, kind, isa, some, {})


def table(quick: bool, results: Path) -> None:
    print(HEADING)
    done = []
    for cell in cells(quick):
        done.append(cell)
        print(line(cell), flush=True)
    print("\n" + report.summary(done))
    path = report.save(results, "table", {"cells": [cell._asdict() for cell in done]})
    print(f"\n{path}")
    if find_spec("matplotlib"):
        report.plot(done, path.with_suffix(".png"))
        print(path.with_suffix(".png"))


def bar_table(quick: bool, results: Path) -> None:
    done = []
    for bar in bars.measured((4096,), 0.0) if quick else bars.measured((32000, 128256), 1.0):
        done.append(bar)
        print(bar, flush=True)
    print(report.save(results, "bars", {"bars": [bar._asdict() for bar in done]}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="operations beside their floors and peers")
    parser.add_argument("--bars", action="store_true", help="the bars only: measured, limit, PASS or over")
    parser.add_argument("--quick", action="store_true", help="few repeats and sizes: whether it runs, not how fast")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where to write to")
    args = parser.parse_args()
    (bar_table if args.bars else table)(args.quick, args.results)


if __name__ == "__main__":
    main()
