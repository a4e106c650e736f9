"""The bars of the block pool and the prefix cache, from Python, on one thread: `python -m bench.kv_pool`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter_ns

import numpy as np

from lanewise import BlockPool, PrefixCache

from .bars import Row, line

PROMPT = 32768


def microseconds(call: Callable[[], object], inner: int, after: Callable[[], object] = lambda: None) -> float:
    """Of the median of 100 turns of `inner` calls; `after` each turn, untimed."""
    took = []
    for _ in range(100):
        start = perf_counter_ns()
        for _ in range(inner):
            call()
        took.append((perf_counter_ns() - start) / inner)
        after()
    return float(np.median(took)) / 1000


def allocate_and_free() -> Row:
    pool = BlockPool(4096)
    took = microseconds(lambda: pool.free(pool.allocate()), 1000)
    return Row("allocate() and free(h)", 1, took, 1.5, "us", "of 4,096 blocks")


def fork() -> Row:
    pool = BlockPool(4096)
    table = pool.allocate(1000)
    took = microseconds(lambda: pool.fork(table), 1, lambda: pool.free(table))
    return Row("fork(handles)", 1000, took, 50, "us", "an array")


def match() -> Row:
    pool = BlockPool(4096)
    cache = PrefixCache(pool, 16)
    tokens = np.random.default_rng(0).integers(0, 152064, PROMPT)
    table = pool.allocate(PROMPT // 16)
    cache.commit(table, tokens)
    pool.free(table)
    held: list[np.ndarray] = []
    took = microseconds(lambda: held.append(cache.match(tokens, cap=False)[0]), 1, lambda: pool.free(held.pop()))
    return Row("match(tokens), all hit", PROMPT, took, 150, "us", "int64, 2,048 cached blocks of 16")


def rows() -> Iterator[Row]:
    yield allocate_and_free()
    yield fork()
    yield match()


if __name__ == "__main__":
    for row in rows():
        print(line(row))
