"""The bars: what must hold on one thread, through the Python call, on hot rows if nothing else is said."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import lanewise
from lanewise import reference, steps
from lanewise._measure import (
    BY_NAME,
    PIPELINE,
    SETTINGS,
    Operation,
    Ready,
    clock,
    compare,
    prompt,
    row,
    sampling,
    writing,
)
from lanewise._rows import KINDS, real_rows

from . import peers, readme
from .report import View, grid
from .table import VOCABS, made

F1, F2, F3 = "F1", "F2", "F3"
SMALL, LARGE = 32000, 128256
ANY, SORTED = tuple(KINDS), ("ascending", "descending")
TOP_K = SETTINGS["T 0.8, top-k 50, top-p 0.9"]
MASSES = 0.5, 0.9, 0.95, 0.99


class Bar(NamedTuple):
    """At most so many times the floors, at each vocabulary size: the worst of the ways on the worst kind of rows."""

    what: str
    floors: tuple[str, ...]
    limits: dict[int, float]
    ways: Mapping[str, Ready]
    kinds: Sequence[str] = ("realistic",)
    state: str = "hot"
    average: Callable[[np.ndarray], Any] = np.median


class Beside(NamedTuple):
    """At least so many times as fast as a library."""

    operation: str
    peer: str
    least: dict[int, float]
    theirs: str = ""  # the library's operation, if it is another


def draw(**setting: Any) -> Ready:
    return sampling("", setting).lanewise


def one(name: str) -> dict[str, Ready]:
    return {name: BY_NAME[name].lanewise}


def stepping(*found: steps.Step) -> Ready:
    """A Sampler's call, after 512 ids of which the last 16 have been before."""

    def ready(vocab: int) -> Callable[[np.ndarray], Any]:
        text = prompt(vocab)
        text[-16:] = text[100:116]
        sampler = lanewise.Sampler(found, seed=1)
        sampler.add(0, text)
        return partial(sampler, record=False)

    return ready


def words(allowed: np.ndarray) -> np.ndarray:
    """A mask as grammar engines have it: bit j of word w allows id 32w+j."""
    bits = np.zeros(-(-allowed.size // 32) * 32, bool)
    bits[: allowed.size] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


def masked(allowed: Callable[[int], np.ndarray]) -> Ready:
    return lambda vocab: draw(**TOP_K, mask=words(allowed(vocab)))(vocab)


def clustered(vocab: int) -> np.ndarray:
    """One in a hundred, in eight runs."""
    return np.arange(vocab) % (vocab // 8) < vocab // 800


def random(share: float, vocab: int) -> np.ndarray:
    return np.random.default_rng(0).random(vocab) < share


BARS = (
    Bar("softmax", (F2, F3), {SMALL: 1.3, LARGE: 1.3}, one("softmax")),
    Bar("log_softmax", (F2, F3), {SMALL: 1.35, LARGE: 1.35}, one("log_softmax")),
    Bar("logsumexp", (F2,), {SMALL: 1.3, LARGE: 1.3}, one("logsumexp")),
    Bar("top_k, k = 50", (F1,), {SMALL: 4.5, LARGE: 2}, one("top_k, k = 50")),
    Bar("top_k, k = 50, any row", (F1,), {LARGE: 8}, one("top_k, k = 50"), ANY),
    Bar(
        "sample, any setting and row",
        (F2,),
        {SMALL: 12, LARGE: 12},
        {
            **{name: draw(**setting) for name, setting in SETTINGS.items()},
            "full pipeline": draw(**PIPELINE),
            "top-p 0.5": draw(top_p=0.5),
            "top-p 0.99": draw(top_p=0.99),
            "top-k 1000": draw(top_k=1000),
            "T 1.5, top-p 0.95": draw(temperature=1.5, top_p=0.95),
            "top-k 50, min-p 0.02, penalty": draw(top_k=50, min_p=0.02, repetition_penalty=1.1),
        },
        ANY,
    ),
    Bar("T, top-k 50, top-p 0.9", (F1,), {SMALL: 4.5, LARGE: 1.8}, {"": draw(**TOP_K)}),
    Bar("the same, 512 penalised ids", (F1,), {SMALL: 7, LARGE: 2.3}, {"": draw(**PIPELINE)}),
    Bar("the same, ties", (F1,), {LARGE: 6}, {"": draw(**TOP_K)}, ("ties", "half ties")),
    Bar("the same, sorted or flat", (F1,), {LARGE: 6}, {"": draw(**TOP_K)}, (*SORTED, "flat")),
    Bar("the same, mask of 1 %, clustered", (F1,), {LARGE: 2.2}, {"": masked(clustered)}),
    Bar(
        "the same, mask of random 1 to 90 %",
        (F1,),
        {LARGE: 3},
        {f"{share:.0%}": masked(partial(random, share)) for share in (0.01, 0.1, 0.5, 0.9)},
    ),
    Bar("T alone", (F1,), {SMALL: 3.5, LARGE: 1.8}, {"": draw(temperature=0.8)}),
    Bar(
        "T, top-p 0.9, realistic or peaked",
        (F2,),
        {SMALL: 0.7, LARGE: 0.7},
        {"": draw(temperature=0.8, top_p=0.9)},
        ("realistic", "peaked"),
    ),
    Bar(
        "top-p 0.5 to 0.99, any row",
        (F2,),
        dict.fromkeys(VOCABS, 3),
        {f"{p}": draw(top_p=p) for p in MASSES},
        ANY,
        average=np.mean,
    ),
    Bar(
        "the same, return_support",
        (F2,),
        dict.fromkeys(VOCABS, 6),
        {f"{p}": draw(top_p=p, return_support=True) for p in MASSES},
        ANY,
        average=np.mean,
    ),
    Bar(
        "the same, top_p_mask",
        (F2,),
        dict.fromkeys(VOCABS, 6),
        {f"{p}": writing(partial(lanewise.top_p_mask, p=p), row) for p in MASSES},
        ANY,
        average=np.mean,
    ),
    Bar("T, min-p 0.05", (F1,), {SMALL: 4, LARGE: 1.8}, {"": draw(temperature=0.8, min_p=0.05)}),
    Bar(
        "logprobs: chosen, top 20, rank",
        (F2,),
        {SMALL: 1.7, LARGE: 1.7},
        one("logprobs, top 20"),
    ),
    Bar(
        "llama.cpp's chain with DRY and XTC, 512 ids",
        (F1,),
        {LARGE: 3},
        {"": stepping(*steps.llama_cpp(dry_multiplier=0.8, dry_penalty_last_n=-1, xtc_probability=0.5))},
    ),
    Bar("mirostat 2", (F2,), {LARGE: 1.5}, {"": stepping(steps.MirostatV2())}),
    Bar("typical 0.9", (F2,), {LARGE: 2}, {"": stepping(steps.Typical(0.9))}),
    Bar("top-n-sigma 1", (F2,), {LARGE: 1.3}, {"": stepping(steps.TopNSigma(1.0))}),
    Bar("T, top-k 50, top-p 0.9, cold", (F1,), {LARGE: 1.25}, {"": draw(**TOP_K)}, state="cold"),
)

BESIDE = (
    Beside("softmax", "onnxruntime", {SMALL: 1, LARGE: 1}),
    Beside("log_softmax", "onnxruntime", {SMALL: 1, LARGE: 1}, theirs="softmax"),
    Beside("sample: full pipeline", "onnxruntime-genai", {LARGE: 8}),
    Beside("sample: full pipeline", "llama.cpp", {LARGE: 40}),
    Beside("sample: full pipeline", "torch", {LARGE: 25}),
    Beside("sample: full pipeline", "transformers", {LARGE: 500}),
    Beside("sample: T 0.7", "torch.multinomial", {LARGE: 200}),
    Beside("sample: T 0.7", "torch", {LARGE: 20}),  # cumsum and searchsorted
)


class Row(NamedTuple):
    what: str
    vocab: int
    measured: float
    limit: float
    unit: str
    note: str
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.at_least and not self.limit:  # a figure without a bar
            return "none"
        return "PASS" if (self.measured >= self.limit if self.at_least else self.measured <= self.limit) else "over"


# ---- times the floors ----


def over_floors(bar: Bar, vocab: int, case: tuple[str, str], seeds: int, seconds: float) -> tuple[float, str]:
    way, kind = case
    took = compare(
        bar.floors, {way: bar.ways[way]}, made(kind, vocab, seeds), state=bar.state, seconds=seconds, least=seeds
    )
    named = [way] * (len(bar.ways) > 1) + [kind] * (len(bar.kinds) > 1)
    return took.over_floor(way, bar.average), ", ".join([f"{took.microseconds(way):.1f} us", *named])


def worst(bar: Bar, vocab: int, quick: bool) -> tuple[float, str]:
    """Of many, a short look at each, and a long one at the three that look worst."""
    look, short = partial(over_floors, bar, vocab), (2, 0.0) if quick else (8, 0.02)
    cases = list(itertools.product(bar.ways, bar.kinds))
    if len(cases) > 3:
        cases = sorted(cases, key=lambda case: look(case, *short))[-3:]
    return max(look(case, *(short if quick else (64, 1.0))) for case in cases)


# ---- beside a library ----


def faster(bar: Beside, vocab: int, quick: bool) -> tuple[float, str]:
    theirs = peers.ways(BY_NAME[bar.theirs or bar.operation])[bar.peer]
    ways = {"ours": BY_NAME[bar.operation].lanewise, "theirs": theirs}
    took = compare((), ways, made("realistic", vocab, 2 if quick else 64), seconds=0.0 if quick else 1.0, least=64)
    return took.ratio(
        "theirs", to="ours"
    ), f"{took.microseconds('ours'):.1f} us, its {took.microseconds('theirs'):.1f} us"


# ---- the rest ----


def batch(quick: bool) -> Iterator[Row]:
    rows, vocab, turns = (4, 4096, 2) if quick else (readme.ROWS, readme.VOCAB, 25)
    took = readme.times(readme.own(rows, vocab), rows, vocab, turns)
    for what, read, cores, limit in (
        ("lanewise", "reading it once", "one core", 1.3),
        ("lanewise, two cores", "reading it, two cores", "two cores", 1.15),
    ):
        over = float(np.median(took[what] / took[read]))
        note = f"{np.median(took[what]) / 1e6:.2f} ms, {read} {np.median(took[read]) / 1e6:.2f} ms"
        yield Row(f"{rows} rows, cold, full, {cores}", vocab, over, limit, "x the read", note)


def small_call(operation: Operation) -> float:
    """Microseconds of a call on 16 elements, in batches of a thousand."""
    call, x = operation.lanewise(16), np.arange(16, dtype=np.float32)

    def thousand(x: np.ndarray) -> None:
        for _ in range(1000):
            call(x)

    return float(np.median([clock(thousand, x) for _ in range(15)])) / 1e6


def small_calls() -> Row:
    names = "softmax", "log_softmax", "logsumexp", "scale", "top_k, k = 5"
    slowest, name = max((small_call(BY_NAME[name]), name) for name in names)
    return Row("a call on 16 elements with out=", 16, slowest, 2, "us", name)


def sequences() -> Iterator[Row]:
    """What a Sampler's sequences cost."""
    sampler = lanewise.Sampler("llama.cpp", seed=1)
    text, own, x = prompt(LARGE), steps.llama_cpp(xtc_probability=0.5), np.arange(16, dtype=np.float32)

    def comes_and_goes(x: np.ndarray) -> None:
        for i in range(1000):
            sampler.add(i, text, steps=own)
            sampler.remove(i)

    def goes_on(x: np.ndarray) -> None:
        for _ in range(1000):
            sampler(x)

    took = [clock(comes_and_goes, x) for _ in range(15)]
    yield Row("a row of a Sampler added and removed", 512, float(np.median(took)) / 1e6, 5, "us", "512 ids of prompt")
    sampler.add("one", [1, 2, 3])
    took = [clock(goes_on, x) for _ in range(15)]
    yield Row("a step of a Sampler on 16 logits", 16, float(np.median(took)) / 1e6, 5, "us", "llama.cpp's chain")


def differing() -> Row:
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
    return Row(
        "tokens that differ: ISA, batch, order", 49152, int(np.sum(ways != ways[:, :1])), 0, "tokens", f"of {ways.size}"
    )


def wrong_sets(vocab: int) -> Row:
    """Nuclei that are not those of the reference, in exact integers."""
    wrong, cases = 0, list(itertools.product(ANY, MASSES))
    for kind, p in cases:
        (x,) = made(kind, vocab, 1)
        kept = np.sort(reference.support(x, top_p=p))
        _, support = lanewise.sample(x, top_p=p, return_support=True, seed=0, step=0)
        wrong += not np.array_equal(np.sort(support.ids), kept)
        wrong += not np.array_equal(np.flatnonzero(lanewise.top_p_mask(x, p) > -np.inf), kept)
    return Row("wrong sets: return_support, top_p_mask", vocab, wrong, 0, "sets", f"of {len(cases)} rows")


def measured(quick: bool) -> Iterator[Row]:
    for bar in BARS:
        for vocab, limit in bar.limits.items():
            unit = f"x ({'+'.join(bar.floors)})" if len(bar.floors) > 1 else f"x {bar.floors[0]}"
            size = 4096 if quick else vocab
            found, note = worst(bar, size, quick)
            yield Row(bar.what, size, found, limit, unit, note)
    for beside in BESIDE:
        for vocab, least in beside.least.items() if beside.peer in peers.installed() else ():
            size = 4096 if quick else vocab
            found, note = faster(beside, size, quick)
            yield Row(f"{beside.operation} / {beside.peer}", size, found, least, "x as fast", note, at_least=True)
    yield from batch(quick)
    yield small_calls()
    yield from sequences()
    yield from (wrong_sets(vocab) for vocab in ((4096,) if quick else VOCABS))
    yield differing()


def line(row: Row) -> str:
    sign = ">=" if row.at_least else "<="
    bar = f"{row.measured:7.2f}  {sign} {row.limit:<4g} {row.unit:<10}"
    return f"{row.verdict}  {row.what:<42} {row.vocab:>7,} {bar} {row.note}"


def markdown(rows: Sequence[Row]) -> str:
    headings = "what", "V", "measured", "bar", "", "", ""
    return grid(
        headings,
        [
            [
                row.what,
                f"{row.vocab:,}",
                f"{row.measured:.2f}",
                f"{'at least' if row.at_least else 'at most'} {row.limit:g}",
                row.unit,
                row.verdict,
                row.note,
            ]
            for row in rows
        ],
    )


VIEW = View("The bars", "the bars: measured, limit, PASS or over", Row, measured, "", line, markdown)
