"""Times operations beside their floors: what `python -m lanewise bench`, the demo and bench/ are made of.

A floor is the least that work can cost: F1 reads the row (for its maximum), F2 reads it and takes the exp of all of it,
F3 copies it. They are kernels like others, of the same ISA, timed inside C; an operation is timed around its Python
call. A machine's clock and its neighbours drift, so a floor and what is compared with it take turns, and ratios are
medians of the ratios of single turns: absolute times of two runs say little.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import lanewise

from . import _numpy_way, _ops
from ._caches import last_level_cache

Call = Callable[[np.ndarray], Any]
Ready = Callable[[int], Call]  # of a vocabulary size: allocates what the call writes to

PLACES = 4
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
PIPELINE = {**SETTINGS["T 0.8, top-k 50, top-p 0.9"], "repetition_penalty": 1.3}  # what servers are asked for


class Operation(NamedTuple):
    name: str
    floors: tuple[str, ...]
    lanewise: Ready
    numpy: Ready
    setting: dict[str, Any] | None = None  # of sample, if that is what it calls


def always(call: Call) -> Ready:
    return lambda vocab: call


def writing(function: Callable[..., Any], out: Callable[[int], Any]) -> Ready:
    return lambda vocab: partial(function, out=out(vocab))


def row(vocab: int) -> np.ndarray:
    return np.empty(vocab, np.float32)


def top_k(k: int) -> Operation:
    def ready(vocab: int) -> Call:
        out = np.empty(k, np.float32), np.empty(k, np.int64)
        return lambda x: lanewise.top_k(x, k, out=out)

    return Operation(f"top_k, k = {k}", ("F1",), ready, always(lambda x: _numpy_way.top_k(x, k)))


def logprobs(x: np.ndarray) -> tuple[Any, ...]:
    found = lanewise.logprobs(x, 17, top_n=20)
    return found.top_logprobs, found.top_ids, found.chosen, found.rank


def prompt(vocab: int) -> np.ndarray:
    """512 distinct ids."""
    return np.random.default_rng(0).permutation(vocab)[:512]


def sampling(name: str, setting: dict[str, Any]) -> Operation:
    def ready(sample: Callable[..., Any], rng: Any, vocab: int) -> Call:
        ids = {"prompt_ids": prompt(vocab)} if "repetition_penalty" in setting else {}
        return partial(sample, **setting, **ids, rng=rng)

    wide = setting.get("top_p", 1) < 1 and not setting.get("top_k")  # its nucleus needs the mass of the whole row
    return Operation(
        f"sample: {name}",
        ("F2",) if wide else ("F1",),
        partial(ready, lanewise.sample, lanewise.Stream(0)),
        partial(ready, _numpy_way.sample, np.random.default_rng(0)),
        setting,
    )


OPERATIONS = (
    Operation("softmax", ("F2", "F3"), writing(lanewise.softmax, row), always(_numpy_way.softmax)),
    Operation("log_softmax", ("F2", "F3"), writing(lanewise.log_softmax, row), always(_numpy_way.log_softmax)),
    Operation(
        "logsumexp",
        ("F2",),
        writing(lanewise.logsumexp, lambda vocab: np.empty((), np.float32)),
        always(_numpy_way.logsumexp),
    ),
    Operation(
        "scale",
        ("F3",),
        writing(partial(lanewise.scale, temperature=0.7), row),
        always(lambda x: x / np.float32(0.7)),
    ),
    Operation("argmax", ("F1",), always(lanewise.argmax), always(np.argmax)),
    top_k(5),
    top_k(50),
    Operation(
        "top_p_mask, p = 0.9",
        ("F2",),
        writing(partial(lanewise.top_p_mask, p=0.9), row),
        always(partial(_numpy_way.top_p_mask, p=0.9)),
    ),
    Operation("logprobs, top 20", ("F2",), always(logprobs), always(lambda x: _numpy_way.logprobs(x, 17, 20))),
    *(sampling(name, setting) for name, setting in SETTINGS.items()),
    sampling("full pipeline", PIPELINE),
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}


# ---- rows ----


def cold_rows(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """As many as fill the last-level cache three times: each is out of it when its turn comes again."""
    count = max(len(rows), 3 * last_level_cache() // rows[0].nbytes + 1)
    return list(np.stack(list(itertools.islice(itertools.cycle(rows), count))))


def just_written(rows: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Each in turn as a model's last layer leaves it: the product of a matrix that has them as columns and a vector."""
    matrix, picks = np.stack(rows, axis=1), np.eye(len(rows), dtype=np.float32)
    x = np.empty_like(rows[0])
    for pick in itertools.cycle(picks):
        yield np.matmul(matrix, pick, out=x)


# ---- timing ----


class Timings(NamedTuple):
    """Nanoseconds of each turn: of the floor, and of every call."""

    floor: np.ndarray
    calls: dict[str, np.ndarray]

    def microseconds(self, name: str) -> float:
        return float(np.median(self.calls[name])) / 1e3

    def over_floor(self, name: str, average: Callable[[np.ndarray], Any] = np.median) -> float:
        return float(average(self.calls[name] / self.floor))

    def ratio(self, name: str, to: str) -> float:
        return float(np.median(self.calls[name] / self.calls[to]))


def clock(call: Call, x: np.ndarray) -> int:
    if prepare := getattr(call, "prepare", None):
        prepare(x)
    start = time.perf_counter_ns()
    call(x)
    return time.perf_counter_ns() - start


def hot(call: Call, x: np.ndarray, repeats: int = 5) -> float:
    """The median of five, after one that brings row and output into the cache; one is enough for what takes long."""
    first = clock(call, x)
    return first if first > 2_000_000 else float(np.median([clock(call, x) for _ in range(repeats)]))


def floor_time(name: str, x: np.ndarray, out: np.ndarray, repeats: int) -> float:
    ns: Any = _ops.run_rows(FLOORS[name], x, out, repeats=repeats)
    return float(np.median(ns))


def compare(
    floors: Iterable[str],
    ways: dict[str, Ready],
    rows: Sequence[np.ndarray],
    *,
    state: str = "hot",
    seconds: float = 0.2,
    least: int = 5,
) -> Timings:
    """Floors and ways in turns, for at least `seconds` and `least` turns; one turn if seconds is 0.

    hot: all of a turn on one row, repeated so that it is in the cache. written: each once, on a row that has just been
    written. cold: each on the next of `rows`, once. What is written to is one of four allocations, each turn the next:
    where it lies changes a time by up to a tenth.
    """
    vocab, once = rows[0].shape[-1], state != "hot"
    turns = just_written(rows) if state == "written" else itertools.cycle(cold_rows(rows) if state == "cold" else rows)
    outs = [np.empty_like(rows[0]) for _ in range(PLACES)]
    calls = {name: [ready(vocab) for _ in range(PLACES)] for name, ready in ways.items()}
    floor: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    while len(floor) < (least if seconds else 1) or time.perf_counter() < end:
        place, x = len(floor) % PLACES, next(turns)
        floor.append(
            sum(floor_time(name, next(turns) if once else x, outs[place], 1 if once else 6) for name in floors)
        )
        for name in ways:
            call = calls[name][place]
            times[name].append(clock(call, next(turns)) if once else hot(call, x))
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
    kind: str,
    isa: str,
    rows: Sequence[np.ndarray],
    peers: dict[str, Ready],
    *,
    state: str = "hot",
    seconds: float = 0.2,
) -> Cell:
    with lanewise.using(isa):
        ways = {"lanewise": operation.lanewise, **peers}
        took = compare(operation.floors, ways, rows, state=state, seconds=seconds)
    return Cell(
        operation.name,
        rows[0].size,
        kind if state == "hot" else f"{kind}, {state}",
        isa,
        took.microseconds("lanewise"),
        "+".join(operation.floors),
        float(np.median(took.floor)) / 1e3,
        took.over_floor("lanewise"),
        {peer: took.ratio(peer, to="lanewise") for peer in peers},
    )


HEADING = f"{'operation':<37} {'V':>7}  {'row':<18} {'ISA':<7} {'us':>8}  {'x floor':>13}   others take, in lanewise's"


def line(cell: Cell) -> str:
    what = f"{cell.operation:<37} {cell.vocab:>7,}  {cell.kind:<18} {cell.isa:<7}"
    return f"{what} {cell.us:8.1f}  {cell.over_floor:7.2f} {cell.floor:<5}   {beside(cell, '  ')}".rstrip()


def beside(cell: Any, separator: str) -> str:
    return separator.join(f"{peer} {times(ratio)}" for peer, ratio in cell.peers.items())


def times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 99.5 else f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2g}x"
