"""SampleState: any tiles, in any order, in any number of states, give the token of the row in one piece."""

from __future__ import annotations

import pickle
import threading
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lanewise
from lanewise import InvalidLogitsError, SampleState, SamplingParams, reference

NOISE = {"seed": 5, "step": 3, "key": 2**63}
ROW = (np.random.default_rng(3).standard_normal(9000) * 2).astype(np.float32)


def random_row(rng: np.random.Generator) -> np.ndarray:
    n = int(rng.choice([1, 5, 64, 65, 1000, 5000, 9000]))
    row = (rng.standard_normal(n) * rng.choice([0.01, 1, 5])).astype(np.float32)
    row = np.round(row) if rng.random() < 0.4 else row
    row[rng.random(n) < rng.choice([0, 0, 0.5, 0.99])] = -np.inf
    if rng.random() < 0.05:
        row[rng.integers(n)] = rng.choice([np.nan, np.inf])
    return row


def random_settings(rng: np.random.Generator, n: int) -> dict[str, Any]:
    return {
        "temperature": float(rng.choice([0, 0.1, 0.7, 1, 1.5, 1e31])),
        "top_k": int(rng.choice([0, 0, 1, 3, 50, n])),
        "top_p": float(rng.choice([1, 1, 0.1, 0.5, 0.9])),
        "min_p": float(rng.choice([0, 0, 0.01, 0.1, 1])),
        "min_keep": int(rng.choice([1, 1, 3])),
        "ties": str(rng.choice(["lowest", "all", "top_k"])),
        "preset": str(rng.choice(list(reference.PRESETS))),
    }


def pieces(rng: np.random.Generator, n: int) -> list[tuple[int, int]]:
    cuts = np.unique([0, n, *rng.integers(0, n + 1, rng.integers(0, 8))]).tolist()
    tiles = list(pairwise(cuts))
    rng.shuffle(tiles)
    return [(int(first), int(end)) for first, end in tiles]


@pytest.mark.parametrize("seed", range(12))
def test_tiles_and_shards_give_the_token_of_the_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept = set()
    for _ in range(60):
        row = random_row(rng)
        how, key = random_settings(rng, len(row)), int(rng.integers(2**63))
        want = lanewise.sample(row, **how, seed=seed, step=7, keys=key, on_invalid="mark")
        states = [SampleState(len(row), **how, seed=seed, step=7, key=key) for _ in range(3)]
        for first, end in pieces(rng, len(row)):
            shard = int(rng.integers(3))
            states[shard].feed(row[first:end], first)
            if rng.random() < 0.3:
                states[shard] = pickle.loads(pickle.dumps(states[shard]))
        states[0].merge(states[2])
        states[1].merge(states[0])
        kept.add(type(states[1]._kept).__name__)
        if want < 0:
            with pytest.raises(InvalidLogitsError) as caught:
                states[1].finish()
            assert caught.value.tokens == -1
        else:
            assert states[1].finish() == want == states[1].finish(), (len(row), how)
    assert len(kept) == 4


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, ">f4"], ids=str)
def test_tiles_of_any_dtype(dtype: Any) -> None:
    row = ROW.astype(dtype)
    for how in ({}, {"top_k": 9}, {"min_p": 0.1}, {"top_p": 0.9}):
        state = SampleState(len(row), **how, **NOISE)
        state.feed(row[4000:], 4000)
        state.feed(row[:4000][::-1][::-1], 0)
        assert state.finish() == lanewise.sample(row, **how, seed=5, step=3, keys=2**63)


def test_params_are_their_keywords() -> None:
    one = SampleState(9000, SamplingParams(temperature=0.7, top_k=5), **NOISE)
    other = SampleState(9000, temperature=0.7, top_k=5, **NOISE)
    one.feed(ROW[:10], 0)
    other.feed(ROW[10:], 10)
    one.merge(other)
    assert one.finish() == lanewise.sample(ROW, temperature=0.7, top_k=5, seed=5, step=3, keys=2**63)


def test_a_state_is_small_where_it_can_be() -> None:
    for how, most in (({}, 2000), ({"top_k": 20, "top_p": 0.9}, 2000), ({"min_p": 0.05}, 3000)):
        state = SampleState(9000, **how, **NOISE)
        state.feed(ROW, 0)
        assert len(pickle.dumps(state)) < most


def test_what_is_fed_may_change_afterwards() -> None:
    for how in ({}, {"top_k": 9}, {"min_p": 0.1}, {"top_p": 0.9}):
        row = ROW.copy()
        state = SampleState(9000, **how, **NOISE)
        state.feed(row, 0)
        row[:] = 0
        assert state.finish() == lanewise.sample(ROW, **how, seed=5, step=3, keys=2**63)


def test_each_id_is_fed_once_and_none_is_left_out() -> None:
    state, other = (SampleState(100, top_p=0.9, **NOISE) for _ in range(2))
    with pytest.raises(ValueError, match=r"the ids 0\.\.99 have not been fed"):
        state.finish()
    state.feed(ROW[20:50], 20)
    for first, end, double in ((10, 21, 20), (49, 60, 49), (30, 31, 30), (0, 100, 20), (20, 50, 20)):
        with pytest.raises(ValueError, match=f"id {double} was fed before"):
            state.feed(ROW[first:end], first)
    other.feed(ROW[40:100], 40)
    with pytest.raises(ValueError, match="id 40 was fed before"):
        state.merge(other)
    with pytest.raises(ValueError, match="with itself"):
        state.merge(state)
    state.feed(ROW[0:20], 0)
    with pytest.raises(ValueError, match=r"the ids 50\.\.99 have not been fed"):
        state.finish()
    state.feed(ROW[60:100], 60)
    with pytest.raises(ValueError, match=r"the ids 50\.\.59 have not been fed"):
        state.finish()
    state.feed(ROW[50:60], 50)
    assert state.finish() == lanewise.sample(ROW[:100], top_p=0.9, seed=5, step=3, keys=2**63)


def test_only_states_of_one_draw_merge() -> None:
    state = SampleState(100, **NOISE)
    for name, value in (("temperature", 0.5), ("top_k", 3), ("seed", 6), ("step", 4), ("key", 1), ("ties", "all")):
        other = SampleState(100, **{**NOISE, name: value})
        with pytest.raises(ValueError, match=f"but {name}s? is"):
            state.merge(other)
    with pytest.raises(ValueError, match="but vocab_size is 100 here, 101 there"):
        state.merge(SampleState(101, **NOISE))
    with pytest.raises(TypeError, match="must be a SampleState"):
        state.merge(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size must be in"),
        ({"vocab_size": 2**20 + 1}, ValueError, "vocab_size must be in"),
        ({"temperature": -1.0}, ValueError, "temperature must be in"),
        ({"top_p": np.nan}, ValueError, "top_p must not be NaN"),
        ({"step": 2**32}, ValueError, "step must be in"),
        ({"preset": "vlm"}, ValueError, "preset must be one of"),
        ({"ties": "first"}, ValueError, "ties must be"),
        ({"params": SamplingParams(presence_penalty=1.0)}, ValueError, "params has penalties"),
        ({"params": SamplingParams(), "top_k": 3}, ValueError, "top_k is given in params and as a keyword"),
        ({"temperature": [0.5]}, TypeError, r"temperature must be one number, got \[0.5\]"),
        ({"seed": None, "step": None}, TypeError, "seed must be one number, got None"),
    ],
    ids=str,
)
def test_what_sample_would_not_take_is_an_error(how: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        SampleState(**{"vocab_size": 100, **NOISE, **how})


@pytest.mark.parametrize("how", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_a_failed_feed_changes_nothing(how: dict[str, Any]) -> None:
    state = SampleState(100, **how, **NOISE)
    state.feed(ROW[:50], 0)
    for tile, first in ((ROW[:51], 50), (ROW[:1], -1), (ROW[None, :9], 50), (np.arange(50), 50), (ROW[:0], 50)):
        with pytest.raises((ValueError, TypeError)):
            state.feed(tile, first)
    state.feed(ROW[50:100], 50)
    assert state.finish() == lanewise.sample(ROW[:100], **how, seed=5, step=3, keys=2**63)


def test_a_state_is_for_one_thread_at_a_time() -> None:
    state, free = (SampleState(100, **NOISE) for _ in range(2))
    errors = []

    def use() -> None:
        for call in (
            lambda: state.feed(ROW[:9], 0),
            state.finish,
            lambda: free.merge(state),
            lambda: pickle.dumps(state),
        ):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    with state._alone():
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert len(errors) == 4 and all("in use by a call that is not over" in error for error in errors)
    state.feed(ROW[:100], 0)
