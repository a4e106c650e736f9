"""The bars: what must hold on one thread, on hot rows, through the Python call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

import lanewise
from lanewise import _dispatch
from lanewise._measure import OPERATIONS, SETTINGS, Call, Operation, clock, compare
from lanewise._rows import KINDS, real_rows, realistic

from . import peers

VOCABS = 32000, 128256
BY_NAME = {operation.name: operation for operation in OPERATIONS}
TOP_K = BY_NAME["top_k, k = 50"]


class Bar(NamedTuple):
    what: str
    vocab: int | None
    measured: float
    limit: float
    unit: str
    note: str = ""

    def __str__(self) -> str:
        verdict = "PASS" if self.measured <= self.limit else "over"
        size = f"{self.vocab:,}" if self.vocab else ""
        return (
            f"{verdict}  {self.what:<34} {size:>8}  {self.measured:8.2f} at most {self.limit:5.4g} {self.unit:<10} {self.note}"
        )


def made(kind: str, vocab: int, seeds: int = 16) -> list[np.ndarray]:
    return [KINDS[kind](vocab, np.random.default_rng(seed)) for seed in range(seeds)]


def softmax_bars(vocab: int, rows: list[np.ndarray], seconds: float) -> Iterator[Bar]:
    ort = peers.installed().get("onnxruntime", {})
    for name, limit in (("softmax", 1.3), ("log_softmax", 1.35)):
        calls: dict[str, Call] = {name: BY_NAME[name].ready(vocab)}
        if ort:
            calls["onnxruntime"] = ort["softmax"](vocab)
        took = compare(("F2", "F3"), calls, rows, seconds=seconds)
        yield Bar(name, vocab, took.over_floor(name), limit, "x (F2+F3)", f"{took.microseconds(name):.1f} us")
        if ort:
            note = f"its softmax {took.microseconds('onnxruntime'):.1f} us"
            yield Bar(f"{name} / onnxruntime's softmax", vocab, took.ratio(name, "onnxruntime"), 1.0, "x", note)


def over_floor(operation: Operation, vocab: int, rows: list[np.ndarray], seconds: float) -> tuple[float, float]:
    """Times its floor, and microseconds."""
    took = compare(operation.floors, {operation.name: operation.ready(vocab)}, rows, seconds=seconds)
    return took.over_floor(operation.name), took.microseconds(operation.name)


def worst(operations: list[Operation], vocab: int, seconds: float) -> tuple[float, str]:
    """Over all kinds of rows."""
    found = max(
        (*over_floor(operation, vocab, made(kind, vocab, 4), seconds), kind, operation.name)
        for kind in KINDS
        for operation in operations
    )
    times, us, kind, name = found
    return times, f"{us:.1f} us, {kind}" + (f", {name.removeprefix('sample: ')}" if len(operations) > 1 else "")


def small_call() -> Bar:
    """Batches of a thousand calls on 16 elements; the slowest operation that takes out=."""
    x = np.arange(16, dtype=np.float32)

    def microseconds(operation: Operation) -> float:
        call = operation.ready(16)

        def thousand(x: np.ndarray) -> None:
            for _ in range(1000):
                call(x)

        return float(np.median([clock(thousand, x) for _ in range(15)])) / 1e6

    names = "softmax", "log_softmax", "logsumexp", "scale", "top_k, k = 5"
    us, name = max((microseconds(BY_NAME[name]), name) for name in names)
    return Bar("a call on 16 elements with out=", 16, us, 2.0, "us", f"the slowest: {name}")


def differing() -> Bar:
    """Tokens that are not what each row gave alone on the first ISA: on every ISA, in a batch, in another order."""
    rows = np.stack([row.logits for row in real_rows()]).astype(np.float32)
    order = np.arange(len(rows))[::-1]
    count = differ = 0
    for setting in SETTINGS.values():
        draw = partial(lanewise.sample, **setting, prompt_ids=[[1, 2, 3]] * len(rows), seed=5, step=0)
        alone = None
        for isa in _dispatch.usable():
            with lanewise.using(isa):
                one_by_one = [
                    lanewise.sample(row, **setting, prompt_ids=[1, 2, 3], seed=5, step=0, keys=[i])
                    for i, row in enumerate(rows)
                ]
                alone = one_by_one if alone is None else alone
                for tokens in (one_by_one, draw(rows), draw(rows[order], keys=order)[order]):
                    count += len(rows)
                    differ += int(np.sum(np.asarray(tokens) != alone))
    return Bar("tokens that differ: ISA, batch, order", None, differ, 0, "", f"of {count}")


def measured(seconds: float) -> Iterator[Bar]:
    for vocab in VOCABS:
        rows = made("realistic", vocab)
        yield from softmax_bars(vocab, rows, seconds)
        times, us = over_floor(BY_NAME["logsumexp"], vocab, rows, seconds)
        yield Bar("logsumexp", vocab, times, 1.3, "x F2", f"{us:.1f} us")
        times, us = over_floor(TOP_K, vocab, rows, seconds)
        yield Bar("top_k, k = 50, realistic", vocab, times, {32000: 4.5, 128256: 2.0}[vocab], "x F1", f"{us:.1f} us")
    yield Bar("top_k, k = 50, any distribution", vocab, *_spread(worst([TOP_K], vocab, seconds), 8.0, "x F1"))
    for vocab in VOCABS:
        settings = [operation for operation in OPERATIONS if operation.name.startswith("sample")]
        yield Bar("sample, any setting", vocab, *_spread(worst(settings, vocab, seconds / 4), 12.0, "x F2"))
    yield small_call()
    yield differing()


def _spread(found: tuple[float, str], limit: float, unit: str) -> tuple[float, float, str, str]:
    return found[0], limit, unit, found[1]
