"""The bars of beams and drafts, on one thread through the Python call: `python -m bench.beams`. A call and the floor of
the rows it is about, all of them one after the other, take turns."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

import lanewise
from lanewise._measure import floor_time, hot

from .bars import LARGE, Row, line
from .table import made

BEAMS, DRAFTS = 8, 5


def over_floor(call: Callable[[np.ndarray], object], floor: str, rows: np.ndarray, turns: int) -> tuple[float, float]:
    """Medians over turns: of the call's microseconds, and of its ratio to the floor of all rows."""
    out = np.empty_like(rows)
    took = [(hot(call, rows), floor_time(floor, rows, out, 6)) for _ in range(turns)]
    us, ratio = np.median([(call_ns / 1e3, call_ns / floor_ns) for call_ns, floor_ns in took], axis=0)
    return float(us), float(ratio)


def beam_bar(vocab: int, turns: int) -> Row:
    logits, scores = np.stack(made("realistic", vocab, BEAMS)), np.linspace(-9.0, -5.0, BEAMS)
    us, ratio = over_floor(lambda x: lanewise.beam_step(scores, x), "F2", logits, turns)
    return Row(f"beam_step, {BEAMS} beams", vocab, ratio, 1.45, f"x {BEAMS} F2", f"{us:.0f} us")


def noise_bar(vocab: int, turns: int) -> Row:
    """All drafts stand: else the rest would not be looked at."""
    logits = np.stack(made("realistic", vocab, DRAFTS + 1))
    draft = [lanewise.sample(row, seed=1, step=i) for i, row in enumerate(logits[:-1])]
    us, ratio = over_floor(partial(lanewise.verify_draft, draft=draft, seed=1, step=0), "F1", logits, turns)
    return Row(
        f"verify {DRAFTS} drafts, shared noise, less 10 us",
        vocab,
        ratio * (1 - 10 / us),
        1.6,
        f"x {DRAFTS + 1} F1",
        f"{us:.0f} us",
    )


def ratio_bars(vocab: int, turns: int) -> Iterator[Row]:
    p = lanewise.softmax(np.stack(made("realistic", vocab, DRAFTS + 1)))
    q = lanewise.softmax(np.stack(made("realistic", vocab, DRAFTS + 1))[:-1] * np.float32(0.9))
    call = partial(lanewise.verify_draft, p, q=q, probs=True, method="ratio", step=0)
    for what, last, stand in (
        ("all stand", int((p[-2] - q[-1]).argmax()), DRAFTS),
        ("the last falls", int((q[-1] - p[-2]).argmax()), DRAFTS - 1),
    ):
        draft = [*(p[:-2] - q[:-1]).argmax(1).tolist(), last]
        seed = next(seed for seed in itertools.count() if call(draft, seed=seed).accepted == stand)
        timed = partial(lanewise.verify_draft, draft=draft, q=q, probs=True, method="ratio", seed=seed, step=0)
        us, ratio = over_floor(timed, "F1", p, turns)
        note = f"{us:.0f} us, {what}"
        yield Row(f"verify {DRAFTS} drafts, p and q", vocab, ratio * (DRAFTS + 1), 8, "x F1", note)


def measured(quick: bool) -> Iterator[Row]:
    vocab, turns = (4096, 1) if quick else (LARGE, 25)
    yield beam_bar(vocab, turns)
    yield noise_bar(vocab, turns)
    yield from ratio_bars(vocab, turns)


def main() -> None:
    lanewise.set_num_threads(1)
    for row in measured("--quick" in sys.argv[1:]):
        print(line(row))


if __name__ == "__main__":
    main()
