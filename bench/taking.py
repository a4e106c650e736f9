"""Ways to do one thing, timed in turns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LOOPS = "copy_each", "stream_each"

Turn = Callable[[int], float]  # of the number of a turn: the nanoseconds one call takes


def taken(ways: dict[str, Turn], turns: int, flush: Callable[[], object] = lambda: None) -> dict[str, np.ndarray]:
    """Every way's nanoseconds, turn by turn, in another order each turn; a first turn is left out."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    rng, number = np.random.default_rng(0), 0
    for _ in range(turns + 1):
        for name in rng.permutation(list(ways)):
            flush()
            times[name].append(ways[name](number))
            number += 1
    return {name: np.array(ns[1:]) for name, ns in times.items()}


def over_loop(took: dict[str, np.ndarray], loops: tuple[str, ...] = LOOPS) -> tuple[float, str]:
    best = min(loops, key=lambda name: float(np.median(took[name])))
    note = ", ".join(f"{name or 'lanewise'} {np.median(ns) / 1e3:.1f} us" for name, ns in took.items())
    return float(np.median(took[""] / took[best])), note
