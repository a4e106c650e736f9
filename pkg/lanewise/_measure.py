"""Times operations beside their floors: what `python -m lanewise bench`, the demo and bench/ are made of.

A floor is the least that work can cost: F1 reads the row (for its maximum), F2 reads it and takes the exp of all of it,
F3 copies it. They are kernels like others, of the same ISA, timed inside C; an operation is timed around its Python
call. A machine's clock and its neighbours drift, so a floor and what is compared with it take turns, and ratios are
medians of the ratios of single turns: absolute times of two runs say little.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import lanewise

from . import _numpy_way, _ops

Call = Callable[[np.ndarray], Any]

FLOORS = {"F1": "read_max", "F2": "read_exp", "F3": "copy"}

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T 1": {},
    "T 0.7": {"temperature": 0.7},
    "T 1, top-p 0.9": {"top_p": 0.9},
    "T 0.8, top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "T 1, min-p 0.05": {"min_p": 0.05},
    "T 0.7, repetition penalty 1.3": {"temperature": 0.7, "repetition_penalty": 1.3},
}


class Operation(NamedTuple):
    """`ready(vocab)` allocates what the call writes to, and gives the call; `numpy` is the call of the NumPy way."""

    name: str
    floors: tuple[str, ...]
    ready: Callable[[int], Call]
    numpy: Call


def _writing(function: Callable[..., Any], out: Callable[[int], Any]) -> Callable[[int], Call]:
    return lambda vocab: partial(function, out=out(vocab))


def _row(vocab: int) -> np.ndarray:
    return np.empty(vocab, np.float32)


def _top_k(k: int) -> Operation:
    def ready(vocab: int) -> Call:
        out = np.empty(k, np.float32), np.empty(k, np.int64)
        return lambda x: lanewise.top_k(x, k, out=out)

    return Operation(f"top_k, k = {k}", ("F1",), ready, lambda x: _numpy_way.top_k(x, k))


def sampling(name: str, setting: dict[str, Any]) -> Operation:
    prompt: dict[str, Any] = {"prompt_ids": np.arange(512)} if "repetition_penalty" in setting else {}
    rng = np.random.default_rng(0)

    def ready(vocab: int) -> Call:
        return partial(lanewise.sample, **setting, **prompt, rng=lanewise.Stream(0))

    return Operation(f"sample: {name}", ("F2",), ready, lambda x: _numpy_way.sample(x, rng, **setting, **prompt))


OPERATIONS = (
    Operation("softmax", ("F2", "F3"), _writing(lanewise.softmax, _row), _numpy_way.softmax),
    Operation("log_softmax", ("F2", "F3"), _writing(lanewise.log_softmax, _row), _numpy_way.log_softmax),
    Operation(
        "logsumexp", ("F2",), _writing(lanewise.logsumexp, lambda vocab: np.empty((), np.float32)), _numpy_way.logsumexp
    ),
    Operation(
        "scale",
        ("F3",),
        lambda vocab: partial(lanewise.scale, temperature=0.7, out=_row(vocab)),
        lambda x: x / np.float32(0.7),
    ),
    Operation("argmax", ("F1",), lambda vocab: lanewise.argmax, np.argmax),
    _top_k(5),
    _top_k(50),
    *(sampling(name, setting) for name, setting in SETTINGS.items()),
)


# ---- rows ----


def last_level_cache() -> int:
    """Bytes, or what many machines have where the system does not say."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().rstrip("K\n")) << 10 for size in sizes), default=32 << 20)


def cold_rows(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """At least 64 rows, and three times the last-level cache: each is out of it when its turn comes again."""
    count = max(64, 3 * last_level_cache() // rows[0].nbytes)
    return list(np.stack(list(itertools.islice(itertools.cycle(rows), count))))


# ---- timing ----


class Timings(NamedTuple):
    """Nanoseconds of each turn: of the floor, and of every call."""

    floor: np.ndarray
    calls: dict[str, np.ndarray]

    def microseconds(self, name: str) -> float:
        return float(np.median(self.calls[name])) / 1e3

    def over_floor(self, name: str) -> float:
        return float(np.median(self.calls[name] / self.floor))

    def ratio(self, name: str, to: str) -> float:
        return float(np.median(self.calls[name] / self.calls[to]))


def clock(call: Call, x: np.ndarray) -> int:
    start = time.perf_counter_ns()
    call(x)
    return time.perf_counter_ns() - start


def hot(call: Call, x: np.ndarray, repeats: int = 5) -> float:
    """The median of five, after one that brings row and output into the cache; one is enough for what takes long."""
    first = clock(call, x)
    return first if first > 2_000_000 else float(np.median([clock(call, x) for _ in range(repeats)]))


def _floor(name: str, x: np.ndarray, out: np.ndarray, repeats: int) -> float:
    return float(np.median(_ops.run_rows(FLOORS[name], x, out, repeats=repeats)))


def compare(
    floors: Iterable[str],
    calls: dict[str, Call],
    rows: Sequence[np.ndarray],
    *,
    cold: bool = False,
    seconds: float = 0.2,
) -> Timings:
    """Floors and calls in turns, for at least `seconds` and five turns.

    Hot: all of a turn on one row, repeated so that it is in the cache. Cold: each on the next of `rows`, once.
    """
    turns, out = itertools.cycle(rows), np.empty_like(rows[0])
    floor: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while len(floor) < 5 or time.perf_counter() < end:
        row = next(turns)
        floor.append(sum(_floor(name, next(turns), out, 1) if cold else _floor(name, row, out, 6) for name in floors))
        for name, call in calls.items():
            times[name].append(clock(call, next(turns)) if cold else hot(call, row))
    return Timings(np.array(floor), {name: np.array(ns) for name, ns in times.items()})


# ---- the table ----


class Cell(NamedTuple):
    """One line of the table."""

    operation: str
    vocab: int
    kind: str
    isa: str
    us: float
    floor: str
    floor_us: float
    over_floor: float
    peers: dict[str, float]  # library: how many times lanewise's time it takes, in the same turns


def measure(
    operation: Operation,
    vocab: int,
    kind: str,
    isa: str,
    rows: Sequence[np.ndarray],
    peers: dict[str, Call],
    *,
    cold: bool = False,
    seconds: float = 0.2,
) -> Cell:
    with lanewise.using(isa):
        calls = {"lanewise": operation.ready(vocab), **peers}
        took = compare(operation.floors, calls, rows, cold=cold, seconds=seconds)
    return Cell(
        operation.name,
        vocab,
        kind,
        isa,
        took.microseconds("lanewise"),
        "+".join(operation.floors),
        float(np.median(took.floor)) / 1e3,
        took.over_floor("lanewise"),
        {peer: took.ratio(peer, to="lanewise") for peer in peers},
    )


HEADING = f"{'operation':<37} {'V':>7}  {'row':<15} {'ISA':<7} {'us':>8}  {'x floor':>13}   others take, in lanewise's"


def line(cell: Cell) -> str:
    what = f"{cell.operation:<37} {cell.vocab:>7,}  {cell.kind:<15} {cell.isa:<7}"
    return f"{what} {cell.us:8.1f}  {cell.over_floor:7.2f} {cell.floor:<5}   {beside(cell, '  ')}".rstrip()


def beside(cell: Cell, separator: str) -> str:
    return separator.join(
        f"{peer} {times:.1f}x" if times >= 1 else f"{peer} {times:.2g}x" for peer, times in cell.peers.items()
    )
