"""The bars: what must hold on one thread, on hot rows, through the Python call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

import lanewise
from lanewise._measure import OPERATIONS, SETTINGS, Operation, clock, compare, sampling
from lanewise._rows import KINDS, real_rows

from . import peers

BY_NAME = {operation.name: operation for operation in OPERATIONS}
TOP_K = BY_NAME["top_k, k = 50"]
TAKE_OUT = "softmax", "log_softmax", "logsumexp", "scale", "top_k, k = 5"
SAMPLING = [operation for operation in OPERATIONS if operation.name.startswith("sample")] + [
    sampling(", ".join(f"{name} {value}" for name, value in setting.items()), setting)
    for setting in (
        {"top_p": 0.5},
        {"top_p": 0.99},
        {"top_k": 1000},
        {"temperature": 1.5, "top_p": 0.95},
        {"top_k": 50, "min_p": 0.02, "repetition_penalty": 1.1},
    )
]


class Bar(NamedTuple):
    what: str
    vocab: int
    measured: float
    limit: float
    unit: str
    note: str

    def __str__(self) -> str:
        verdict = "PASS" if self.measured <= self.limit else "over"
        bar = f"{self.measured:7.2f}  <= {self.limit:<4g} {self.unit:<9}"
        return f"{verdict}  {self.what:<38} {self.vocab:>7,} {bar} {self.note}"


def made(kind: str, vocab: int, seeds: int) -> list[np.ndarray]:
    return [KINDS[kind](vocab, np.random.default_rng(seed)) for seed in range(seeds)]


def over_floor(operation: Operation, rows: Sequence[np.ndarray], seconds: float) -> tuple[float, str]:
    took = compare(operation.floors, {"": operation.lanewise}, rows, seconds=seconds)
    return took.over_floor(""), f"{took.microseconds(''):.1f} us"


def worst(operations: Sequence[Operation], vocab: int, seconds: float) -> tuple[float, str]:
    """Over all kinds of rows: a short look at each, and a long one at the three that look worst."""
    rows = {kind: made(kind, vocab, 4) for kind in KINDS}

    def times(case: tuple[Operation, str], seconds: float) -> tuple[float, str]:
        operation, kind = case
        found, us = over_floor(operation, rows[kind], seconds)
        return found, f"{us}, {kind}" + operation.name.replace("sample: ", ", ") * (len(operations) > 1)

    cases = sorted(itertools.product(operations, rows), key=lambda case: times(case, seconds / 10))
    return max(times(case, seconds) for case in cases[-3:])


def beside_onnxruntime(name: str, rows: Sequence[np.ndarray], seconds: float) -> tuple[float, str]:
    ways = {name: BY_NAME[name].lanewise, "its": peers.onnxruntime()["softmax"]}
    took = compare((), ways, rows, seconds=seconds)
    return took.ratio(name, to="its"), f"{took.microseconds(name):.1f} us, its {took.microseconds('its'):.1f} us"


def small_call(operation: Operation) -> float:
    """Microseconds of a call on 16 elements, in batches of a thousand."""
    call, x = operation.lanewise(16), np.arange(16, dtype=np.float32)

    def thousand(x: np.ndarray) -> None:
        for _ in range(1000):
            call(x)

    return float(np.median([clock(thousand, x) for _ in range(15)])) / 1e6


def differing() -> tuple[int, str]:
    """Tokens that are not what their row gave alone on the best ISA: on every ISA, in a batch, in another order."""
    rows = np.stack([row.logits for row in real_rows()]).astype(np.float32)
    order = np.arange(len(rows))[::-1]
    tokens = []
    for setting in SETTINGS.values():
        one = partial(lanewise.sample, **setting, prompt_ids=[1, 2, 3], seed=5, step=0)
        batch = partial(one, prompt_ids=[[1, 2, 3]] * len(rows))
        for isa in lanewise.info()["usable"]:
            with lanewise.using(isa):
                alone = [one(row, keys=[key]) for key, row in enumerate(rows)]
                tokens.append((alone, batch(rows), np.array(batch(rows[order], keys=order))[order]))
    ways = np.array(tokens).reshape(len(SETTINGS), -1, len(rows))
    return int(np.sum(ways != ways[:, :1])), f"of {ways.size}"


def measured(vocabs: Sequence[int], seconds: float) -> Iterator[Bar]:
    for vocab in vocabs:
        rows = made("realistic", vocab, 16)
        found = partial(over_floor, rows=rows, seconds=seconds)
        for name, limit in (("softmax", 1.3), ("log_softmax", 1.35)):
            yield bar(name, vocab, limit, "x (F2+F3)", found(BY_NAME[name]))
            if "onnxruntime" in peers.installed():
                ratio = beside_onnxruntime(name, rows, seconds)
                yield bar(f"{name} / onnxruntime's softmax", vocab, 1.0, "x", ratio)
        yield bar("logsumexp", vocab, 1.3, "x F2", found(BY_NAME["logsumexp"]))
        yield bar("top_k, k = 50, realistic", vocab, 4.5 if vocab <= 32000 else 2.0, "x F1", found(TOP_K))
    yield bar("top_k, k = 50, any distribution", vocabs[-1], 8.0, "x F1", worst([TOP_K], vocabs[-1], seconds))
    for vocab in vocabs:
        yield bar("sample, any setting and distribution", vocab, 12.0, "x F2", worst(SAMPLING, vocab, seconds))
    slowest = max((small_call(BY_NAME[name]), name) for name in TAKE_OUT)
    yield bar("a call on 16 elements with out=", 16, 2.0, "us", slowest)
    yield bar("tokens that differ: ISA, batch, order", 49152, 0, "tokens", differing())


def bar(what: str, vocab: int, limit: float, unit: str, found: tuple[float, str]) -> Bar:
    return Bar(what, vocab, found[0], limit, unit, found[1])
