"""Measures on this machine which instruction set each operation is fastest on, and keeps the winners."""

from __future__ import annotations

from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np

from . import _cpu, _dispatch, _ops

CLEARLY = 1.05  # what a better ISA must lose by, at every size, to be passed over
SIZES = (32000, 128256)
SAMPLE_NS = 200_000  # one timing takes about this long, so that the clock's own steps do not show
SETTINGS: dict[str, dict[str, Any]] = {  # what operations need beyond logits
    "scale": {"temperature": 0.8},
    "top_k": {"k": 50},
    "logprobs": {"tokens": [0], "top_n": 20},
    "sample": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 1, "step": 0},
    "sample_n": {"n": 5, "seed": 1, "step": 0},
    "verify": {"token": 0, "seed": 1, "step": 0},
    "sample_from_probs": {"seed": 1, "step": 0},
    "top_k_mask": {"k": 50},
    "top_p_mask": {"p": 0.95},
    "min_p_mask": {"min_p": 0.05},
    "top_k_renorm": {"k": 50},
    "top_p_renorm": {"p": 0.95},
    "apply_penalties": {"repetition_penalty": 1.1, "prompt_ids": np.arange(256)[None]},
    "apply_bias": {"bias": {0: -1.0}},
    "apply_token_bitmask": {"mask": np.arange(SIZES[0]) % 3 == 0},
}
PROBABILITIES = ("sample_from_probs", "top_k_renorm", "top_p_renorm")  # what they take instead of logits


def tune(seconds: float = 0.4) -> list[dict[str, Any]]:
    """Times every operation on every usable instruction set, about `seconds` each, and uses the winners from now on.

    They are also kept in the user's cache for later processes. No result changes: all instruction sets give the same
    bits. Returns one dict an operation: operation, isa (the winner), untuned (what is used without this), and
    microseconds, {isa: {size: median}}.
    """
    flags, runnable = _cpu.detect()[0], _dispatch.runnable()
    names, untuned = _dispatch.usable(flags, runnable), _dispatch.plan(flags, runnable)
    table = []
    for op in (op for op in _ops.NAMES if _ops.GROUPS[op] == "sampling"):
        times = {size: time_all(op, size, names, seconds / len(SIZES)) for size in SIZES}
        winner = fastest(untuned[op], names, times)
        microseconds = {isa: {size: float(np.median(times[size][isa])) / 1e3 for size in SIZES} for isa in names}
        table.append({"operation": op, "isa": winner, "untuned": untuned[op], "microseconds": microseconds})
    _cpu.remember(tuned={row["operation"]: row["isa"] for row in table})
    _dispatch.reconsider()
    return table


def fastest(untuned: str, names: tuple[str, ...], times: dict[int, dict[str, Any]]) -> str:
    """The ISA that beats `untuned` by most, if any does so clearly at every size; times are paired by position."""

    def gain(isa: str) -> float:
        return min(float(np.median(np.divide(t[untuned], t[isa]))) for t in times.values())

    best = max(names, key=gain)
    return best if gain(best) > CLEARLY else untuned


def time_all(op: str, size: int, names: tuple[str, ...], seconds: float) -> dict[str, list[float]]:
    """{isa: [nanoseconds a call]}, the ISAs taking turns so that whatever else the machine does hits all alike."""
    import lanewise

    x, settings, operation = realistic(size), SETTINGS.get(op, {}), getattr(lanewise, op)
    x = lanewise.softmax(x) if op in PROBABILITIES else x
    out = operation(x, **settings)

    def sample(isa: str, calls: int) -> float:
        with _dispatch.using(isa, op):
            start = perf_counter_ns()
            for _ in range(calls):
                operation(x, out=out, **settings)
            return (perf_counter_ns() - start) / calls

    deadline = perf_counter() + seconds
    calls = {isa: max(1, round(SAMPLE_NS / min(sample(isa, 1) for _ in range(3)))) for isa in names}
    times: dict[str, list[float]] = {isa: [] for isa in names}
    while len(times[names[0]]) < 5 or perf_counter() < deadline:
        for isa in names:
            times[isa].append(sample(isa, calls[isa]))
    return times


def realistic(size: int) -> np.ndarray:
    """A row as models give them: a Gaussian body and a tail of a few hundred likely ids."""
    rng = np.random.default_rng(size)
    row = rng.normal(0.0, 2.0, size)
    row[rng.choice(size, 300, replace=False)] += rng.exponential(4.0, 300)
    return row[None, :].astype(np.float32)
