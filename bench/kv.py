"""The bars of the KV-cache, on one thread, through the Python call, beside C loops over the same ids and other code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

import lanewise
from lanewise import _ops
from lanewise._caches import last_level_cache

from . import kv_pool, kv_transfer, kv_transformers, peers
from .bars import Row, line, markdown
from .report import View
from .taking import LOOPS, Turn, over_loop, taken

KIB, MIB = 1 << 10, 1 << 20


class Place(NamedTuple):
    """Slots of a pool in random order, and as many blocks one after another, in some sets."""

    pool: np.ndarray
    blocks: np.ndarray
    ids: np.ndarray  # (sets, count)

    def of(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        sets = len(self.ids)
        return self.ids[turn % sets], self.blocks[turn % len(self.blocks)]


def place(count: int, size: int, slots: int, sets: int) -> Place:
    """Blocks of `size` bytes, as 16-bit elements."""
    ids = np.random.default_rng(0).permutation(slots)[: sets * count].reshape(sets, count)
    pool, blocks = np.ones((slots, size // 2), np.uint16), np.ones((max(sets // 2, 1), count, size // 2), np.uint16)
    return Place(pool, blocks, ids)


def clocked(call: Callable[[np.ndarray, np.ndarray], object], at: Place, inner: int) -> Turn:
    def turn(number: int) -> float:
        ids, blocks = at.of(number)
        start = perf_counter_ns()
        for _ in range(inner):
            call(ids, blocks)
        return (perf_counter_ns() - start) / inner

    return turn


def loop(name: str, gathers: bool, at: Place, inner: int) -> Turn:
    numbers = np.arange(at.ids.shape[1])

    def turn(number: int) -> float:
        ids, blocks = at.of(number)
        if gathers:
            return float(_ops.run_moves(name, at.pool, blocks, ids, numbers, inner).mean())
        return float(_ops.run_moves(name, blocks, at.pool, numbers, ids, inner).mean())

    return turn


def gathers(at: Place, inner: int) -> dict[str, Turn]:
    pool, gather, numpy_take = at.pool, lanewise.gather_blocks, np.take  # looked up once, as by torch's method below

    def ours(ids: np.ndarray, out: np.ndarray) -> None:
        gather(pool, ids, out=out)

    def take(ids: np.ndarray, out: np.ndarray) -> None:
        numpy_take(pool, ids, 0, out, "clip")  # with "raise" it goes through a buffer

    return {"": clocked(ours, at, inner), "numpy.take": clocked(take, at, inner)} | {
        name: loop(name, True, at, inner) for name in LOOPS
    }


def scatters(at: Place, inner: int) -> dict[str, Turn]:
    pool, scatter = at.pool, lanewise.scatter_blocks

    def ours(ids: np.ndarray, blocks: np.ndarray) -> None:
        scatter(blocks, ids, pool)

    def assign(ids: np.ndarray, blocks: np.ndarray) -> None:
        pool[ids] = blocks

    ways = {"": clocked(ours, at, inner), "numpy": clocked(assign, at, inner)}
    if "torch" in peers.installed():
        ways["torch.index_copy_"] = index_copy(at, inner)
    return ways | {name: loop(name, False, at, inner) for name in LOOPS}


def index_copy(at: Place, inner: int) -> Turn:
    import torch

    torch.set_num_threads(1)
    pool = torch.from_numpy(at.pool.view(np.int16)).view(torch.bfloat16)

    def call(ids: torch.Tensor, blocks: torch.Tensor) -> None:
        pool.index_copy_(0, ids, blocks)

    def turn(number: int) -> float:
        ids, blocks = at.of(number)
        tensors = torch.from_numpy(ids), torch.from_numpy(blocks.view(np.int16)).view(torch.bfloat16)
        start = perf_counter_ns()
        for _ in range(inner):
            call(*tensors)
        return (perf_counter_ns() - start) / inner

    return turn


def emptied() -> Callable[[], object]:
    """Reads until nothing else is in the caches: a way would pay for writing back what the one before it left there."""
    return np.ones(3 * last_level_cache() // 8, np.int64).max


def beside(what: str, count: int, took: dict[str, np.ndarray], peer: str, least: float, note: str = "") -> Row:
    times = float(np.median(took[peer] / took[""]))
    return Row(f"{what} / {peer}", count, times, least, "x as fast", note, at_least=True)


def cold(quick: bool) -> Iterator[Row]:
    total, turns, flush = (2 * MIB, 1, lambda: None) if quick else (32 * MIB, 12, emptied())
    for size in (4 * KIB, 32 * KIB, 512 * KIB):
        count = total // size
        at = place(count, size, 6 * count, 6)
        for name, ways in (("gather", gathers(at, 1)), ("scatter", scatters(at, 1))):
            took = taken(ways, turns, flush)
            over, note = over_loop(took)
            what = f"{name}, cold, blocks of {size // KIB} KiB"
            yield Row(what, count, over, 1.1, "x the loop", note)
            if name == "gather":
                yield beside(what, count, took, "numpy.take", 1.3)


def hot(quick: bool) -> Iterator[Row]:
    for count, slots in ((64, 1024), (1024, 16384)):
        at, inner, turns = place(count, 2 * KIB, slots, 1), 1 if quick else 6400 // count, 2 if quick else 60
        took = taken(gathers(at, inner), turns)
        _, note = over_loop(took)
        yield beside("gather, hot, blocks of 2 KiB", count, took, "numpy.take", 0.95, note)
        if count == 64:
            took = taken(scatters(at, inner), turns)
            over, note = over_loop(took)
            what = "scatter, hot, blocks of 2 KiB"
            yield Row(what, count, over, 2, "x the loop", note)
            if "torch.index_copy_" in took:
                yield beside(what, count, took, "torch.index_copy_", 8)


def zeros(quick: bool) -> Iterator[Row]:
    count = 1 if quick else 64
    at = place(count, MIB, count, 1)
    pool = at.pool.view(np.float32)
    ways = {
        "": clocked(lambda ids, blocks: lanewise.zero_blocks(pool), at, 1),
        "numpy.fill": clocked(lambda ids, blocks: pool.fill(0), at, 1),
        "stream_zeros": loop("stream_zeros", False, at, 1),
    }
    took = taken(ways, 2) if quick else taken(ways, 20, emptied())
    over, note = over_loop(took, ("stream_zeros",))
    yield Row("zero, blocks of 1 MiB", count, over, 1.05, "x the floor", note)
    yield beside("zero, blocks of 1 MiB", count, took, "numpy.fill", 2.5)


def measured(quick: bool) -> Iterator[Row]:
    lanewise.set_num_threads(1)
    for part in (cold, hot, zeros, kv_transfer.rows):
        yield from part(quick)
    yield from kv_pool.rows()
    if "transformers" in peers.installed():
        yield from kv_transformers.rows(quick)


VIEW = View("The bars of the KV-cache", "the bars of the KV-cache", Row, measured, "", line, markdown)
