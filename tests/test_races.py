"""Logits that other threads overwrite while they are read: what comes of it may be wrong, but it comes, and nothing
else is touched. Each runs in a process of its own, which this file is the program of, and which says where it hangs."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lanewise
from lanewise import InvalidLogitsError, steps

COLS = 20_005
NOISE: dict[str, Any] = {"seed": 1, "step": 0, "on_invalid": "mark"}
PICKED = [[steps.TopK(50), steps.Smoothing(0.3, 2.0), steps.AdaptiveP(0.3)], [steps.XTC(1.0, 0.05), steps.Typical(0.5)]]
LISTS = [lanewise.Sampler(some, seed=1) for some in PICKED]


def drawn(tokens: Any) -> None:
    """-1, or an id."""
    assert ((np.asarray(tokens) >= -1) & (np.asarray(tokens) < COLS)).all(), tokens


def softmax_into(x: np.ndarray) -> None:
    room = np.full(COLS + 1, 7, np.float32)
    lanewise.softmax(x, temperature=0.0, out=room[:COLS])
    assert room[COLS] == 7


READERS: dict[str, Callable[[np.ndarray], Any]] = {
    "softmax": softmax_into,
    "argmax": lambda x: drawn(lanewise.argmax(x, on_invalid="mark")),
    "top_k": lambda x: drawn(lanewise.top_k(x, 50)[1]),
    "all of top_k": lambda x: drawn(lanewise.top_k(x, 5000, ties="all")[1]),
    "top_p_mask": lambda x: lanewise.top_p_mask(x, 0.9, on_invalid="mark"),
    "top_p_renorm": lambda x: lanewise.top_p_renorm(x, 0.5, on_invalid="mark"),
    "logprobs": lambda x: drawn(lanewise.logprobs(x, 1, top_n=20, entropy=True).top_ids),
    "sample": lambda x: drawn(lanewise.sample(x, top_p=0.9, **NOISE)),
    "support": lambda x: drawn(lanewise.sample(x, top_p=0.9, return_support=True, **NOISE)[1].ids),
    "sample with top-k": lambda x: drawn(lanewise.sample(x, top_k=40, top_p=0.9, **NOISE)),
    "sample_n": lambda x: drawn(lanewise.sample_n(x, 5, top_p=0.9, **NOISE)),
    "verify": lambda x: lanewise.verify(x, token=3, top_p=0.9, **NOISE),
    "probs by noise": lambda x: drawn(lanewise.sample_from_probs(x, **NOISE)),
    "probs by u": lambda x: drawn(lanewise.sample_from_probs(x, u=0.999, on_invalid="mark")),
    "smoothing": lambda x: drawn(LISTS[0](x, "a", record=False, on_invalid="mark")),
    "typical": lambda x: drawn(LISTS[1](x, "a", record=False, on_invalid="mark")),
    "beam_step": lambda x: drawn(lanewise.beam_step([0.0], x[None], n=4, on_invalid="mark").tokens),
    "verify_draft": lambda x: lanewise.verify_draft(np.broadcast_to(x, (3, COLS)), [1, 2], top_p=0.9, **NOISE),
}


def spoil(x: np.ndarray, over: threading.Event) -> None:
    """No two reads of x need find the same maximum, NaNs, infinities or mass."""
    rng = np.random.default_rng(1)
    usual = (4 * rng.standard_normal(COLS)).astype(np.float32)
    spike, infinite, nan = usual.copy(), usual.copy(), usual.copy()
    spike[7], infinite[::90], nan[::90] = 40, np.inf, np.nan
    others = [np.full(COLS, fill, np.float32) for fill in (0, -1e30, -np.inf, np.nan)]
    bits = rng.integers(0, 2**32, COLS, np.uint32).view(np.float32)
    patterns = [usual, np.abs(usual), spike, infinite, nan, usual - 60, *others, bits]
    while not over.is_set():
        np.copyto(x, patterns[rng.integers(len(patterns))])


def race(isa: str, seconds: float) -> None:
    x, over = np.zeros(COLS, np.float32), threading.Event()
    threads = [threading.Thread(target=spoil, args=(x, over), daemon=True) for _ in range(2)]
    for sampler in LISTS:
        sampler.add("a")
    with lanewise.using(isa):
        for thread in threads:
            thread.start()
        for name, read in READERS.items():
            print(name, flush=True)
            faulthandler.dump_traceback_later(60, exit=True)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                with suppress(InvalidLogitsError):
                    read(x)
            faulthandler.cancel_dump_traceback_later()
    over.set()


def run_race(isa: str, seconds: float) -> None:
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", here, isa, str(seconds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}\n{done.stderr}"


def test_readers_end(isa: str) -> None:
    run_race(isa, 0.06)


@pytest.mark.slow
def test_readers_end_for_long(isa: str) -> None:
    run_race(isa, 5.0)


if __name__ == "__main__":
    race(sys.argv[1], float(sys.argv[2]))
