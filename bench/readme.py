"""The number of the README: a step of a server that hands over 64 rows of 151,936 logits, cold, on one core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

import lanewise
from lanewise import _ops
from lanewise._measure import BY_NAME, Call, Ready, clock, cold_rows, prompt

from . import peers, plots
from .report import View, grid
from .table import made

ROWS, VOCAB = 64, 151936
PIPELINE = BY_NAME["sample: full pipeline"]
Timed = Callable[[np.ndarray], int]  # a batch -> nanoseconds
POOL = ThreadPoolExecutor(1)


def read(x: np.ndarray) -> None:
    _ops.run_rows("read_max", x, np.empty(len(x), np.float32))


def read_by_two(x: np.ndarray) -> None:
    half = len(x) // 2
    other = POOL.submit(read, x[half:])
    read(x[:half])
    other.result()


def drawing(setting: dict[str, Any], rows: int, vocab: int) -> Call:
    ids = {"prompt_ids": np.tile(prompt(vocab), (rows, 1))} if "repetition_penalty" in setting else {}
    return partial(lanewise.sample, **setting, **ids, rng=lanewise.Stream(0))


def by_two(call: Call, idle: np.ndarray) -> Timed:
    def timed(x: np.ndarray) -> int:
        lanewise.set_num_threads(2)
        try:
            call(idle)  # starts the second thread
            return clock(call, x)
        finally:
            lanewise.set_num_threads(1)

    return timed


def row_by_row(ready: Ready, vocab: int) -> Timed:
    call = ready(vocab)
    return lambda x: sum(clock(call, row) for row in x)


def own(rows: int, vocab: int) -> dict[str, Timed]:
    """lanewise and the reads it is held to."""
    draw = drawing(PIPELINE.setting or {}, rows, vocab)
    return {
        "reading it once": partial(clock, read),
        "lanewise": partial(clock, draw),
        "reading it, two cores": partial(clock, read_by_two),
        "lanewise, two cores": by_two(draw, np.zeros((rows, vocab), np.float32)),
    }


def times(ways: dict[str, Timed], rows: int, vocab: int, turns: int) -> dict[str, np.ndarray]:
    """Nanoseconds of each way and turn, each on the next of some batches that the caches do not hold together."""
    batches = cycle(cold_rows([np.stack(made("realistic", vocab, rows))]))
    found = [[way(next(batches)) for way in ways.values()] for _ in range(turns)]
    return dict(zip(ways, np.array(found).T, strict=True))


class Row(NamedTuple):
    what: str
    rows: int
    vocab: int
    ms: float
    over_reading: float
    over_lanewise: float


def measured(quick: bool) -> Iterator[Row]:
    rows, vocab, turns = (4, 4096, 1) if quick else (ROWS, VOCAB, 11)
    others = {name: row_by_row(ready, vocab) for name, ready in peers.ways(PIPELINE).items()}
    took = times({**own(rows, vocab), **others}, rows, vocab, turns)
    for what, ns in took.items():
        over = [float(np.median(ns / took[other])) for other in ("reading it once", "lanewise")]
        yield Row(what, rows, vocab, float(np.median(ns)) / 1e6, *over)


def cells(row: Row) -> list[str]:
    return [
        row.what,
        f"{row.ms:.2f}",
        f"{1000 * row.ms / row.rows:.1f}",
        f"{row.over_reading:.2f}",
        f"{row.over_lanewise:.3g}",
    ]


HEADINGS = f"{ROWS} rows x {VOCAB:,}, cold", "ms", "us a row", "x reading it", "x lanewise"
FORMAT = "{:<26} {:>9} {:>10} {:>13} {:>11}".format


def markdown(rows: Sequence[Row]) -> str:
    return grid(HEADINGS, [cells(row) for row in rows])


VIEW = View(
    "64 rows of 151,936",
    "64 rows x 151,936, cold, full pipeline, one core",
    Row,
    measured,
    FORMAT(*HEADINGS),
    lambda row: FORMAT(*cells(row)),
    markdown,
    plots.batch,
)
