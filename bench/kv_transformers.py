"""PagedCache beside transformers' DynamicCache: the time in update() while a text grows to 4,096 tokens, one a step.

Ours is timed as it grows. Theirs copies all there is at every step, so a few steps at each of some lengths tell the
mean: `python -m bench.kv_transformers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

import numpy as np

from .bars import Row, line

MOST = 4096
KINDS = (("float32", 8, 128), ("bfloat16", 8, 128), ("float32", 3, 64), ("bfloat16", 3, 64))


def of_a_step(cache: Any, states: tuple[Any, Any], steps: int) -> np.ndarray:
    """Nanoseconds of each of some steps."""
    took = np.empty(steps)
    for i in range(steps):
        start = perf_counter_ns()
        cache.update(*states, 0)
        took[i] = perf_counter_ns() - start
    return took


def grown(dtype: str, heads: int, dim: int, most: int, turns: int) -> Row:
    import torch
    from transformers import DynamicCache

    from lanewise.compat.transformers import PagedCache

    def states(count: int) -> tuple[Any, Any]:
        return torch.randn(1, heads, count, dim).to(kind), torch.randn(1, heads, count, dim).to(kind)

    kind, ours, theirs = getattr(torch, dtype), [], []
    with torch.no_grad():
        for _ in range(turns):
            ours.append(of_a_step(PagedCache(), states(1), most).mean())
            lengths = np.linspace(0, most, 17)[1:] - most // 32  # the middles of 16 parts
            steps = []
            for length in lengths.astype(int):
                cache = DynamicCache()
                cache.update(*states(length), 0)
                steps.append(np.median(of_a_step(cache, states(1), 7)))
            theirs.append(np.mean(steps))
    times = float(np.median(np.array(theirs) / ours))
    note = f"a step: {np.median(ours) / 1e3:.1f} us, DynamicCache {np.median(theirs) / 1e3:.1f} us"
    return Row(
        f"PagedCache, {dtype}, {heads} x {dim} / transformers", most, times, 10, "x as fast", note, at_least=True
    )


def rows(quick: bool) -> Iterator[Row]:
    import torch

    torch.set_num_threads(1)
    for kind in KINDS:
        yield grown(*kind, *((64, 1) if quick else (MOST, 5)))


if __name__ == "__main__":
    for row in rows(False):
        print(line(row))
