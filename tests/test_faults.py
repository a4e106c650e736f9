"""Faults that samplers, caches, dispatchers and wheels of others had, as tests: one function a fault.

The names are those of a catalogue of 107 public faults. What needs something lanewise does not have yet is skipped
with the reason; what another file tests is looked up there. Each runs on every ISA, alone and inside a batch.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lanewise
from lanewise import InvalidLogitsError, reference

from guarded import Guarded
from laws import chi_square

INF = np.inf
MAPS = (lanewise.softmax, lanewise.log_softmax, lanewise.logsumexp, lambda x: lanewise.scale(x, 0.5))
FILTERS = (
    lambda x: lanewise.top_k_mask(x, 3),
    lambda x: lanewise.top_p_mask(x, 0.9),
    lambda x: lanewise.min_p_mask(x, 0.1),
    lambda x: lanewise.apply_bias(x, {0: 1.0}),
    lambda x: lanewise.apply_token_bitmask(x, np.array([True])),
)

FAULTS: dict[str, Callable[..., None]] = {}


def fault(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(test: Callable[[], None]) -> Callable[[], None]:
        FAULTS[name] = test
        return test

    return register


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def log32(probabilities: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probabilities, np.float64)).astype(np.float32)


def draw(row: np.ndarray, **kw: Any) -> tuple[int, lanewise.Support]:
    """Token and support of a row alone, after making sure that a batch around it changes nothing."""
    kw = {"seed": 11, "step": 5} | kw if "u" not in kw else kw
    token, support = lanewise.sample(row, **kw, return_support=True)
    lists = {name: [[0], kw[name], [1]] for name in ("prompt_ids", "output_ids") if name in kw}
    bias = {"bias": [{}, kw["bias"], {0: 1.0}]} if isinstance(kw.get("bias"), dict) else {}
    masks = {"mask": np.stack([np.ones_like(kw["mask"])] * 3)} if "mask" in kw else {}
    if masks:
        if kw["mask"].dtype != bool:
            masks["mask"][:] = -1
        masks["mask"][1] = kw["mask"]
    batch = np.stack([np.zeros_like(row), row, np.ones_like(row)])
    keys = {} if "u" in kw else {"keys": [3, 0, 8]}
    tokens, all_support = lanewise.sample(batch, **(kw | lists | bias | masks | keys), return_support=True)
    own = slice(*all_support.indptr[1:3])
    assert tokens[1] == token
    assert all_support.ids[own].tolist() == support.ids.tolist()
    assert all_support.logprobs[own].tobytes() == support.logprobs.tobytes()
    return token, support


def kept(row: np.ndarray, **kw: Any) -> list[int]:
    return draw(row, **kw)[1].ids.tolist()


def gap(row: np.ndarray, **kw: Any) -> float:
    """logprob of id 0 less that of id 1: the difference of the logits as they were judged."""
    _, support = draw(row, **kw)
    logprob = dict(zip(support.ids.tolist(), support.logprobs.tolist(), strict=True))
    return logprob[0] - logprob[1]


# ---- sampling ----


@fault("SA01")
def zero_weight_is_never_drawn() -> None:
    assert (lanewise.sample(np.broadcast_to(f32(-INF, 0), (1000, 2)), u=0.0) == 1).all()
    probs = np.broadcast_to(f32(0, 1), (1000, 2))
    assert (lanewise.sample_from_probs(probs, u=0.0) == 1).all()
    assert (lanewise.sample_from_probs(probs, seed=1, step=0) == 1).all()


@fault("SA03")
def largest_u_gives_the_last_id() -> None:
    uniform = np.zeros(151936, np.float32)
    assert draw(uniform, u=1 - 2.0**-53)[0] == 151935
    assert draw(uniform, u=0.99999994)[0] == int(0.99999994 * 151936)
    assert draw(f32(0, 0, -INF), u=1 - 2.0**-53)[0] == 1
    weights = f32(16777216, 16777216, 16777216, 445570, 0)  # float32 bins over a float64 sum end below 1
    assert lanewise.sample_from_probs(weights, u=0.99999994) == 3
    assert lanewise.sample_from_probs(np.full(151936, 1 / 151936, np.float32), u=1 - 2.0**-53) == 151935


@fault("SA05")
def no_part_of_the_vocabulary_is_lost() -> None:
    row = log32(np.repeat([1.0, 1e-3], 50000))
    _, support = draw(row, u=0.9995)
    assert np.exp(support.logprobs[50000:].astype(np.float64)).sum() == pytest.approx(1 / 1001, rel=1e-5)
    ids = [lanewise.sample(row, u=u) for u in np.linspace(0.99901, 0.9999999, 50)]
    assert ids == sorted(set(ids)) and ids[0] >= 50000
    assert lanewise.sample(np.zeros(256000, np.float32), u=1 - 2.0**-53) == 255999
    probs = np.repeat(f32(1, 1e-3), 50000)
    ids = [lanewise.sample_from_probs(probs, u=u) for u in np.linspace(0.99901, 0.9999999, 50)]
    assert ids == sorted(set(ids)) and ids[0] >= 50000
    some = np.broadcast_to(probs[::100], (20000, 1000))
    late = (lanewise.sample_from_probs(some, seed=3, step=0) >= 500).sum()
    assert abs(late - 20000 / 1001) < 4 * np.sqrt(20)


@fault("SA07")
def top_p_near_one_keeps_all() -> None:
    row = np.random.default_rng(0).standard_normal(32000).astype(np.float32)
    assert len(kept(row, top_p=0.9999999)) == 32000
    _, support = lanewise.sample(np.stack([row, row]), top_p=[0.9999999, 0.9], seed=1, step=0, return_support=True)
    assert support.indptr[2] - support.indptr[1] == len(kept(row, top_p=0.9)) < 32000


@fault("SA09")
def mass_equal_to_top_p_ends_the_nucleus() -> None:
    half = f32(0, 0, -INF, -INF)  # two weights of exactly 2^43
    assert kept(half, top_p=0.5) == [0]
    assert kept(half, top_p=np.nextafter(0.5, 1)) == [0, 1]
    assert kept(f32(0, 0, 0, 0), top_p=0.75) == [0, 1, 2]
    assert lanewise.top_p_mask(half, 0.5).tolist() == [0, -INF, -INF, -INF]
    assert lanewise.top_p_renorm(f32(0.5, 0.25, 0.125, 0.125), 0.75).tolist() == [
        np.float32(2 / 3),
        np.float32(1 / 3),
        0,
        0,
    ]
    third = lanewise.top_p_renorm(f32(0.3, 0.1, 0.1, 0.5), 0.8)  # float32's shares fall short of the float64 0.8
    assert np.flatnonzero(third).tolist() == [0, 1, 3]


@fault("SA10")
def top_k_keeps_exactly_k() -> None:
    row = f32(1, 2, 2, 2, 3)
    assert kept(row, top_k=3) == [1, 2, 4]
    assert lanewise.top_k(row, 3)[1].tolist() == [4, 1, 2]
    assert lanewise.top_k(np.stack([row] * 8), 3)[1].tolist() == [[4, 1, 2]] * 8
    assert lanewise.top_k_mask(np.stack([row] * 8), 3).tolist() == [[-INF, 2, 2, -INF, 3]] * 8
    assert kept(row, top_k=3, ties="all") == [1, 2, 3, 4]
    assert kept(row, top_k=3, top_p=0.6, ties="top_k") == [1, 4]  # of 3, 2, 2, 2: top-p breaks the ties top-k kept
    assert kept(row, top_k=3, top_p=0.6, ties="all") == [1, 2, 3, 4]


@fault("SA11")
def top_1_of_equals_is_the_first() -> None:
    row = np.broadcast_to(f32(21.375, 3, 21.375), (1000, 3))
    assert (lanewise.sample(row, top_k=1, seed=list(range(1000)), step=0) == 0).all()


@fault("SA13")
def top_p_after_top_k_is_of_what_top_k_kept() -> None:
    for preset in ("transformers", "vllm", "llama.cpp"):
        assert kept(np.zeros(8, np.float32), top_k=1, top_p=0.8, preset=preset) == [0]


@fault("SA15")
def min_p_works_on_negative_logits() -> None:
    assert kept(f32(-1, -2, -30), min_p=0.1) == [0, 1]
    assert lanewise.min_p_mask(f32(-1, -2, -30), 0.1).tolist() == [-1, -2, -INF]


@fault("SA17")
def tiny_temperature_is_the_argmax() -> None:
    for row, t in ((np.float16([10, 9, -3]), 1e-4), (f32(50, 40, 0), 1e-38), (f32(50, 40, 0), 1e-12)):
        assert draw(row, temperature=t)[0] == 0
        assert lanewise.softmax(row, temperature=t).tolist() == [1, 0, 0]


@fault("SA18")
def greedy_rows_are_not_divided() -> None:
    rows = np.stack([f32(1, -INF, 0), f32(1, 2, 3)])
    assert lanewise.sample(rows, temperature=[0, 0.7], seed=1, step=0)[0] == 0
    assert not np.isnan(lanewise.softmax(rows, temperature=[0, 0.7])).any()
    with pytest.raises(ValueError, match=r"temperature.* -1"):
        lanewise.sample(rows, temperature=-1.0)


@fault("SA19")
def temperature_zero_is_greedy() -> None:
    for zero in (0, 0.0, -0.0):
        assert draw(f32(0, 1, 5, 2), temperature=zero)[0] == 2


@fault("SA21")
def a_huge_top_k_is_off() -> None:
    row = np.full(32000, -INF, np.float32)
    row[1] = 0
    assert all(lanewise.sample(row, top_k=1073741824, seed=s, step=0) == 1 for s in range(10))


@fault("SA23")
def ids_stay_in_range() -> None:
    rng = np.random.default_rng(0)
    for rows, vocab in ((989, 1000), (989, 10)):
        x = rng.standard_normal((rows, vocab)).astype(np.float32)
        tokens = lanewise.sample(x, top_p=0.9, seed=1, step=0)
        assert tokens.min() >= 0 and tokens.max() < vocab


@fault("SA24")
def a_nan_row_is_an_error_and_touches_no_other() -> None:
    rows = np.stack([f32(1, 2, 3), f32(np.nan, np.nan, np.nan), f32(3, 2, 1)])
    with pytest.raises(InvalidLogitsError) as caught:
        lanewise.sample(rows, seed=1, step=0)
    alone = [lanewise.sample(rows[i], seed=1, step=0, keys=i) for i in (0, 2)]
    assert caught.value.rows == [1]
    assert caught.value.tokens.tolist() == [alone[0], -1, alone[1]]
    assert lanewise.sample(rows, seed=1, step=0, on_invalid="mark").tolist() == [alone[0], -1, alone[1]]


@fault("SA25")
def noise_of_zero_lets_nothing_impossible_win() -> None:
    probs, noise = f32(0.9, 0.1, 0, 0), f32(1, 1, 0, 0.5)
    assert lanewise.sample_from_probs(probs, noise=noise) == 0
    assert lanewise.sample_from_probs(f32(0.9, 0.1, 0, 0), noise=f32(1, 0, 0, 0)) == 1
    assert lanewise.sample_from_probs(f32(0.1, 0.9, 0, 0), noise=f32(0, 0, 0, 0)) == 1
    assert lanewise.sample_from_probs(f32(0, 1e-45, 0), noise=f32(INF, INF, INF)) == 1
    rng = np.random.default_rng(0)
    drawn = lanewise.sample_from_probs(np.tile(probs, (4000, 1)), noise=rng.exponential(size=(4000, 4)))
    assert chi_square(np.bincount(drawn, minlength=4), probs) > 1e-3


@fault("SA26")
def noise_never_lifts_what_is_forbidden() -> None:
    row = np.broadcast_to(f32(0, -INF), (1000, 2))
    assert (lanewise.sample(row, seed=1, step=0) == 0).all()
    assert draw(row[0], u=0.0)[0] == draw(row[0], u=1 - 2.0**-53)[0] == 0
    ids = lanewise.sample_from_probs(np.broadcast_to(f32(0.9, 0.1, 0, 0), (1000, 4)), n=4, seed=1, step=0)
    assert (np.sort(ids[:, :2]) == [0, 1]).all() and (ids[:, 2:] == -1).all()


@fault("SA27")
def any_vocabulary_size() -> None:
    for vocab in (1, 2, 7, 31, 33, 40001):
        row = np.random.default_rng(vocab).standard_normal(vocab).astype(np.float32)
        token, _ = draw(row, top_k=50, top_p=0.8)
        assert token == reference.sample(row, top_k=50, top_p=0.8, seed=11, step=5)[0]


@fault("SA29")
def a_rows_seed_is_its_own() -> None:
    row = np.zeros(5000, np.float32)
    alone = lanewise.sample(row, seed=42, step=0)
    for other in (None, 7, None):
        assert lanewise.sample(np.stack([row, row]), seed=[42, other], step=0)[0] == alone


@fault("SA30")
def min_p_of_one_row_leaves_others_alone() -> None:
    rows = np.stack([f32(-INF, 0, -INF), f32(0, 1, 2)])
    assert lanewise.sample(rows, min_p=[0, 0.5], u=0.0)[0] == 1


@fault("SA31")
def mirostat_is_one_rows_affair() -> None:
    rows = np.random.default_rng(0).standard_normal((2, 500)).astype(np.float32)
    sampler = lanewise.Sampler([lanewise.steps.Mirostat()], seed=1)
    sampler.add("mirostat")
    sampler.add("greedy", steps=[lanewise.steps.TopK(1), lanewise.steps.Temperature(1.5)])
    assert {int(sampler(rows)[1]) for _ in range(20)} == {int(rows[1].argmax())}
    assert sampler.state("mirostat") != (10.0, 0.0) and sampler.state("greedy") is None


@fault("SA33")
def a_row_of_minus_inf_is_an_error() -> None:
    nothing = np.full(8, -INF, np.float32)
    with pytest.raises(InvalidLogitsError):
        lanewise.sample(nothing, seed=1, step=0)
    rows = np.zeros((4, 8), np.float32)
    rows[1] = nothing
    tokens = lanewise.sample(rows, seed=1, step=0, on_invalid="mark")
    assert tokens[1] == -1 and (tokens[[0, 2, 3]] >= 0).all()


@fault("SA35")
def nothing_allowed_is_an_error() -> None:
    row = f32(-INF, -INF, 3, 2)
    for mask in ([True, True, False, False], [False] * 4):
        with pytest.raises(InvalidLogitsError):
            lanewise.sample(row, mask=np.array(mask), seed=1, step=0)


@fault("SA36")
def a_short_mask_forbids_the_rest() -> None:
    row = np.zeros(70, np.float32)
    with pytest.raises(InvalidLogitsError):
        lanewise.sample(row, mask=np.zeros(2, np.int32), seed=1, step=0)
    assert kept(row, mask=np.full(2, -1, np.int32)) == list(range(64))
    for width in (33, 65):
        assert kept(row, mask=np.ones(width, bool)) == list(range(width))
    assert kept(row[:40], mask=np.full(4, -1, np.int32)) == list(range(40))
    for mask, allowed in ((np.zeros(2, np.int32), 0), (np.full(2, -1, np.int32), 64), (np.ones(33, bool), 33)):
        assert np.isfinite(lanewise.apply_token_bitmask(row, mask)).tolist() == [True] * allowed + [False] * (
            70 - allowed
        )


@fault("SA37")
def every_row_is_drawn_from_itself() -> None:
    rows = np.full((2, 4), -INF, np.float32)
    rows[0, 0] = rows[1, 3] = 0
    assert lanewise.sample(rows, seed=1, step=0).tolist() == [0, 3]


@fault("SA38")
def huge_weights_do_not_overflow() -> None:
    weights = f32(2.1188e38, 1.7152e38, 2.3821, 1.0128, 1.16, 2.0244)
    assert {lanewise.sample_from_probs(weights, seed=s, step=0) for s in range(100)} == {0, 1}
    assert lanewise.sample_from_probs(np.stack([weights] * 3), u=[0.0, 0.5, 0.6]).tolist() == [0, 0, 1]
    row = log32(weights)
    assert {lanewise.sample(row, seed=s, step=0) for s in range(100)} == {0, 1}


# ---- penalties ----


@fault("PE01")
def penalty_lowers_negative_logits_too() -> None:
    kw: dict[str, Any] = {"repetition_penalty": 1.5, "prompt_ids": [0, 1]}
    assert gap(f32(2, -2), **kw) == pytest.approx(2 / 1.5 + 3, abs=1e-5)
    assert lanewise.apply_penalties(f32(2, -2), **kw).tolist() == [np.float32(2 / 1.5), -3]


@fault("PE02")
def penalty_counts_each_id_once() -> None:
    kw: dict[str, Any] = {"repetition_penalty": 1.1, "output_ids": [0, 0, 0]}
    assert gap(f32(2, 0), **kw) == pytest.approx(1.81818, abs=1e-5)
    assert lanewise.apply_penalties(f32(2, 0), **kw).tolist() == [np.float32(2) / np.float32(1.1), 0]


@fault("PE03")
def penalty_is_applied_once() -> None:
    kw: dict[str, Any] = {"repetition_penalty": 1.1, "prompt_ids": [0], "output_ids": [0]}
    assert gap(f32(2, 0), **kw) == pytest.approx(1.81818, abs=1e-5)
    assert lanewise.apply_penalties(f32(2, 0), **kw).tolist() == [np.float32(2) / np.float32(1.1), 0]


@fault("PE05")
def padding_is_not_penalised() -> None:
    rows = np.zeros((2, 10), np.float32) + 2
    kw: dict[str, Any] = {"repetition_penalty": 2.0, "seed": 1, "step": 0, "return_support": True}
    want = lanewise.sample(rows, **kw, prompt_ids=[[3], [4, 6]])
    got = lanewise.sample(rows, **kw, prompt_ids=np.array([[3, -1], [4, 6]]))
    assert [a.tolist() for a in got[1]] == [a.tolist() for a in want[1]]
    own = want[1].logprobs[: want[1].indptr[1]]
    assert np.flatnonzero(own < own.max()).tolist() == [3]  # the one penalised id of row 0
    with pytest.raises(ValueError, match=r"prompt_ids\[0\]\[1\] is 10"):
        lanewise.sample(rows, **kw, prompt_ids=np.array([[3, 10], [4, 6]]))
    assert gap(rows[0], repetition_penalty=2.0, prompt_ids=[0]) == pytest.approx(-1)
    penalised = lanewise.apply_penalties(rows, repetition_penalty=2.0, prompt_ids=np.array([[3, -1], [4, 6]]))
    assert np.argwhere(penalised != 2).tolist() == [[0, 3], [1, 4], [1, 6]]


@fault("PE07")
def ids_are_checked_before_anything_is_written() -> None:
    for bad in (10, 11, 2**31 - 1, -1):
        guarded = Guarded(at_end=True)
        out = guarded((2,), np.int64)
        out[:] = 77
        with pytest.raises(ValueError, match=f"output_ids.* is {bad}"):
            lanewise.sample(np.zeros((2, 10), np.float32), output_ids=[[1], [bad]], out=out)
        assert out.tolist() == [77, 77]
        row = guarded((10,), np.float32)
        row[:] = 77
        with pytest.raises(ValueError, match=f"output_ids.* is {bad}"):
            lanewise.apply_penalties(row, presence_penalty=1.0, output_ids=[1, bad], out=row)
        assert (row == 77).all()
        guarded.check()


# ---- logprobs ----


def scored(row: np.ndarray, tokens: int | None = None, **kw: Any) -> lanewise.Logprobs:
    """Of a row alone, after making sure that a batch around it changes nothing."""
    alone = lanewise.logprobs(row, tokens, **kw)
    batch = np.stack([np.ones_like(row), row, np.zeros_like(row)])
    among = lanewise.logprobs(batch, None if tokens is None else [0, tokens, 1], **kw)
    assert all((a is None) == (b is None) for a, b in zip(alone, among, strict=True))
    for one, many in zip(alone, among, strict=True):
        assert one is None or np.asarray(one, many.dtype).tobytes() == many[1].tobytes()
    return alone


@fault("LP01")
def forbidden_is_minus_infinity_and_can_be_written_as_json() -> None:
    found = scored(f32(3, 1, 0), 2, top_n=3, mask=np.array([True, False, False]))
    assert found.chosen == -INF and found.top_ids.tolist() == [0, 1, 2]
    assert found.top_logprobs.tolist() == [0, -INF, -INF]
    shown = [None if value == -INF else value for value in found.top_logprobs.tolist()]
    assert json.dumps(shown, allow_nan=False) == "[0.0, null, null]"
    found = scored(f32(3, 1, 0), 0, top_n=3, temperature=0.0)
    assert [found.chosen, *found.top_logprobs] == [0, 0, -INF, -INF]


@fault("LP03")
def rank_is_how_many_are_greater_and_one() -> None:
    row = f32(9, 8, 7, 6)
    assert scored(row, 0, top_n=3).top_ids.tolist() == [0, 1, 2]
    assert [scored(row, token).rank for token in range(4)] == [1, 2, 3, 4]
    assert [scored(f32(5, 7, 5, 7, 1), token).rank for token in range(5)] == [3, 1, 3, 1, 5]


@fault("LP05")
def probabilities_are_of_what_is_allowed() -> None:
    row, mask = np.zeros(4, np.float32), np.array([True, True, False, False])
    _, support = draw(row, mask=mask)
    assert np.exp(support.logprobs) == pytest.approx([0.5, 0.5]) and support.ids.tolist() == [0, 1]
    assert np.exp(scored(row, mask=mask, ids=range(4)).given) == pytest.approx([0.5, 0.5, 0, 0])
    assert np.exp(scored(row, ids=range(4)).given) == pytest.approx([0.25] * 4)


@fault("LP07")
def what_has_no_probability_adds_no_entropy() -> None:
    for row in (f32(0, -INF), f32(0, -200), f32(0, -3e38), f32(-INF, 7)):
        assert scored(row, entropy=True).entropy == 0
    assert scored(f32(0, -INF, 0), entropy=True).entropy == np.float32(np.log(2))
    assert scored(f32(1, 2), entropy=True, temperature=0.0).entropy == 0


# ---- numerics ----


@fault("NU01")
def logsumexp_of_nothing() -> None:
    for n in (1, 2, 4, 17, 64):
        assert lanewise.logsumexp(np.full(n, -INF, np.float32)) == -INF


@fault("NU03")
def one_value_among_minus_inf() -> None:
    for places in ([50000], [0, 99999]):
        row = np.full(100000, -INF, np.float32)
        row[places] = 10
        assert lanewise.logsumexp(row) == pytest.approx(10 + np.log(len(places)))
        assert lanewise.log_softmax(row)[places] == pytest.approx(-np.log(len(places)))
        assert lanewise.softmax_stats(row) == (10, len(places))
        state = None
        for block in row.reshape(100, 1000):
            state = lanewise.softmax_stats(block, state)
        assert state == (10, len(places))


@fault("NU05")
def floating_point_flags_stay_the_hosts() -> None:
    with np.errstate(all="raise"):
        for row in (f32(1, np.nan, 0), f32(0, -INF, -200), np.full(100, -200, np.float32)):
            for op in (*MAPS, lanewise.softmax_stats):
                op(row)
            assert np.float32(1) + np.float32(2) == 3


@fault("NU07")
def far_below_the_maximum_is_zero() -> None:
    p = lanewise.softmax(f32(0, -87.5, -90, -95, -103.9, -104))
    assert p.tolist() == [1, 0, 0, 0, 0, 0]


@fault("NU09")
def adding_masks_does_not_overflow_in_half() -> None:
    row = np.float16([-65504, -65504])
    assert kept(row, bias=np.float32([-20, -20])) == [0, 1]
    assert lanewise.apply_bias(row, {0: -20, 1: -20}).tolist() == [-65524, -65524]
    least = np.finfo(np.float32).min
    with pytest.raises(InvalidLogitsError):
        lanewise.sample(f32(least, least), bias=f32(least, least), seed=1, step=0)


@fault("NU10")
def small_rows() -> None:
    rng = np.random.default_rng(0)
    for n in range(1, 41):
        for dtype in (np.float16, np.float32):
            row = rng.standard_normal(n).astype(dtype)
            for k in (1, (n + 1) // 2, n):
                assert lanewise.top_k(row, k)[1].tolist() == reference.top_k(row.astype(np.float32), k)[1].tolist()
    with pytest.raises(ValueError, match="at least one column"):
        lanewise.top_k(np.zeros(0, np.float32), 1)


@fault("NU11")
def half_precision_of_mixed_signs() -> None:
    row = np.random.default_rng(1).standard_normal(64).astype(np.float16)
    assert lanewise.top_k(row, 29)[0].tolist() == np.sort(row)[::-1][:29].tolist()


@fault("NU13")
def top_k_has_one_rule_for_nan() -> None:
    negative = np.uint32([0xFFC00000]).view(np.float32)[0]
    for nan in (np.float32(np.nan), negative):
        for k in (1, 2, 4):
            with pytest.raises(InvalidLogitsError) as caught:
                lanewise.top_k(np.stack([f32(-1, nan, 2, 1), f32(4, 3, 2, 1)]), k)
            assert caught.value.rows == [0]
            assert caught.value.tokens.tolist() == [[-1] * k, list(range(k))]
            out = np.empty((2, k), np.float32), np.empty((2, k), np.int64)
            with pytest.raises(InvalidLogitsError):
                lanewise.top_k(np.stack([f32(-1, nan, 2, 1), f32(4, 3, 2, 1)]), k, out=out)
            assert out[1].tolist() == [[-1] * k, list(range(k))] and out[0][1].tolist() == [4, 3, 2, 1][:k]


# ---- dispatch and packaging ----


@fault("DI13")
def no_tail_is_over_read() -> None:
    for n in range(1, 131):
        guarded = Guarded(at_end=True)
        for dtype in (np.float32, np.float16):
            x = guarded.place(np.random.default_rng(n).standard_normal(n).astype(dtype))
            mask = guarded.place(np.arange(n) % 3 < 2)
            words = guarded.place(np.full(-(-n // 32), -1, np.int32))
            for op in (lanewise.softmax, lanewise.log_softmax):
                op(x, out=guarded((n,), np.float32))
            lanewise.logsumexp(x), lanewise.argmax(x), lanewise.top_k(x, (n + 1) // 2)
            lanewise.sample(x, mask=mask, top_p=0.9, seed=1, step=0)
            lanewise.sample(x, mask=words, top_k=5, seed=1, step=0)
            for allowed in (mask, words):
                lanewise.apply_token_bitmask(x, allowed, out=guarded((n,), dtype))
            for masked in (lanewise.top_k_mask(x, 9), lanewise.top_p_mask(x, 0.9), lanewise.min_p_mask(x, 0.1)):
                assert masked.max() == x.max()
        guarded.check()


@fault("PA05")
def the_gil_stays_off() -> None:
    if not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled():
        pytest.skip("this Python has its GIL on")
    lanewise.softmax(np.zeros(4, np.float32))
    assert not sys._is_gil_enabled()


@fault("PA06")
def a_forked_child_can_work() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    want = lanewise.sample(np.zeros(1000, np.float32), seed=1, step=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which earlier tests left
        child = os.fork()
    if child == 0:
        os._exit(0 if lanewise.sample(np.zeros(1000, np.float32), seed=1, step=0) == want else 1)
    assert os.waitpid(child, 0)[1] == 0


@fault("PA07")
def no_openmp() -> None:
    for module in (lanewise._ops, lanewise.sampling):
        binary = Path(module.__file__).read_bytes()
        assert b"libgomp" not in binary and b"libomp" not in binary and b"libiomp" not in binary


# ---- api ----

VIEWS: list[Callable[[np.ndarray], np.ndarray]] = [
    lambda a: a[:, :70],
    lambda a: a[::2],
    lambda a: a[::-1],
    lambda a: a[:, ::-1],
    lambda a: a[:, ::3],
    lambda a: a.T,
    lambda a: np.broadcast_to(a[0], a.shape),
]


def scored_first(x: np.ndarray) -> np.ndarray:
    return lanewise.logprobs(x, ids=[0], top_n=1).given


@fault("AP01")
def views_are_their_copies() -> None:
    a = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    for view in VIEWS:
        x = view(a)
        copy = np.array(x, order="C")
        for op in (
            *MAPS,
            *FILTERS,
            lanewise.argmax,
            lambda x: lanewise.sample(x, seed=1, step=0),
            lambda x: lanewise.top_k(x, 3)[1],
            scored_first,
        ):
            assert op(x).tobytes() == op(copy).tobytes()
        if x.flags.writeable:
            target = view(np.zeros_like(a))
            lanewise.softmax(copy, out=target)
            assert target.tobytes() == lanewise.softmax(copy).tobytes()


@fault("AP02")
def read_only_arrays_are_accepted_and_never_written() -> None:
    x = np.frombuffer(np.random.default_rng(0).standard_normal(64).astype(np.float32).tobytes(), np.float32)
    ids = np.arange(3)
    ids.flags.writeable = False
    some = (lambda x: lanewise.top_k(x, 2), lambda x: lanewise.sample(x, prompt_ids=ids))
    for op in (*MAPS, *FILTERS, lanewise.argmax, *some):
        op(x)
    with pytest.raises(ValueError, match="out is read-only"):
        lanewise.softmax(x, out=x)


@fault("AP03")
def empty_batches() -> None:
    none = np.zeros((0, 9), np.float32)
    assert lanewise.softmax(none).shape == lanewise.log_softmax(none).shape == (0, 9)
    assert lanewise.logsumexp(none).shape == lanewise.argmax(none).shape == lanewise.sample(none).shape == (0,)
    assert lanewise.top_k(none, 2)[1].shape == (0, 2)
    shapes = [field.shape for field in lanewise.logprobs(none, [], top_n=2, ids=[1, 2, 3], entropy=True)]
    assert shapes == [(0,), (0,), (0, 2), (0, 2), (0, 3), (0,)]
    for shape in ((3, 0), (0, 0), (0,)):
        for op in (*MAPS, *FILTERS, lanewise.argmax, lanewise.sample, lambda x: lanewise.top_k(x, 1), scored_first):
            with pytest.raises(ValueError, match="at least one column"):
                op(np.zeros(shape, np.float32))


@fault("AP04")
def removing_a_row_takes_its_options_along() -> None:
    row = f32(0, 0, 0, 5, 0)
    sampler = lanewise.Sampler([lanewise.steps.Temperature(2.0)], seed=3)
    sampler.add("A")
    sampler.add("B", steps=[lanewise.steps.Suppress([3]), lanewise.steps.Temperature(2.0)])
    sampler(np.stack([row, row]))
    sampler.remove("A")
    tokens = [sampler(row[None])[0] for _ in range(1000)]
    assert 3 not in tokens and set(tokens) == {0, 1, 2, 4}
    sampler.add("C")
    pairs = np.array([sampler(np.stack([row, row])) for _ in range(100)])
    assert 3 not in pairs[:, 0] and 3 in pairs[:, 1]


@fault("AP05")
def results_have_one_type() -> None:
    for row, kind in ((np.zeros(4, np.float32), int), (np.zeros((2, 4), np.float32), np.ndarray)):
        assert type(lanewise.sample(row)) is kind and type(lanewise.argmax(row)) is kind
        result = lanewise.sample(row, return_support=True)
        assert len(result) == 2 and type(result[0]) is kind and type(result[1]) is lanewise.Support
    assert "return_support" in inspect.signature(lanewise.sample).parameters


@fault("OK05")
def subnormal_probabilities_are_zero() -> None:
    assert lanewise.softmax(f32(0, -100)).tolist() == [1, 0]


@fault("OK07")
def u_at_an_edge_gives_one_id() -> None:
    row = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    w = reference.weights(reference.exp32(row - row.max()))
    edges = np.cumsum(w)[::97].astype(object)
    total = int(w.sum())
    for edge in edges:
        u = float(edge) / total
        for near in (np.nextafter(u, 0), u, np.nextafter(u, 1), u - 1e-7):
            assert draw(row, u=float(near))[0] == reference.sample(row, u=float(near))[0]


@fault("OK09")
def ids_are_not_narrowed() -> None:
    for bad in (2**32 + 5, 2**63, -(2**40)):
        with pytest.raises(ValueError, match=str(bad)):
            lanewise.sample(np.zeros(10, np.float32), prompt_ids=[bad])
        with pytest.raises(ValueError, match=str(bad)):
            lanewise.sample(np.zeros(10, np.float32), bias={bad: 1.0})


@fault("OK10")
def other_layouts_are_read_right() -> None:
    x = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    unaligned = np.frombuffer(b"x" + x.tobytes(), np.float32, offset=1)
    for same in (x.astype(">f4"), unaligned, x.astype(np.float64)):
        assert lanewise.softmax(same).tobytes() == lanewise.softmax(x).tobytes()
    rounded = x.astype(ml_dtypes.bfloat16)
    assert lanewise.softmax(rounded).tobytes() == lanewise.softmax(rounded.astype(np.float32)).tobytes()
    for wrong in (x.astype(np.int32), x.astype(np.complex64), ["a"], None):
        with pytest.raises(TypeError, match="logits must be"):
            lanewise.softmax(wrong)


@fault("OK11")
def out_may_overlap() -> None:
    for taken, given in (
        ((slice(1, None)), slice(None, -1)),
        (slice(None, -1), slice(1, None)),
        (slice(None), slice(None)),
    ):
        a = np.random.default_rng(0).standard_normal((3, 9000)).astype(np.float32)
        for op in (lanewise.softmax, lanewise.log_softmax):
            want = op(a[:, given].copy())
            b = a.copy()
            op(b[:, given], out=b[:, taken])
            assert b[:, taken].tobytes() == want.tobytes()
            b = np.ascontiguousarray(a[:2])
            want = op(b[::-1].copy())
            op(b[::-1], out=b)
            assert b.tobytes() == want.tobytes()
    rows = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    want, ids = lanewise.top_k(rows, 40), np.empty((3, 40), np.int64)
    assert lanewise.top_k(rows, 40, out=(rows, ids))[0] is rows
    assert rows.tobytes() == want[0].tobytes() and ids.tobytes() == want[1].tobytes()
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"out must have shape \(2, 3\)"):
        lanewise.softmax(x, out=np.zeros((3, 2), np.float32))
    with pytest.raises(TypeError, match="out must be float32"):
        lanewise.softmax(x, out=np.zeros((2, 3)))


@fault("OK13")
def every_core_says_the_same() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("a process cannot be pinned to a core here")
    cores = os.sched_getaffinity(0)
    try:
        seen = set()
        for core in cores:
            os.sched_setaffinity(0, {core})
            seen.add(lanewise._ops.cpu_signature())
    finally:
        os.sched_setaffinity(0, cores)
    assert len(seen) == 1, "cores differ: the veto must be asked on each"


@fault("OK15")
def a_sub_interpreter_works_or_says_no() -> None:
    interpreters = pytest.importorskip("_interpreters", reason="this Python has no sub-interpreter module")
    code = "try:\n import lanewise\nexcept ImportError as e:\n assert 'interpreter' in str(e)"
    one = interpreters.create()
    try:
        assert interpreters.run_string(one, code) is None
    finally:
        interpreters.destroy(one)


# ---- caches of sequences ----


def paged(num_blocks: int, block_size: int = 4, **kw: Any) -> lanewise.PagedKVCache:
    return lanewise.PagedKVCache(2, num_blocks, 2, 8, block_size=block_size, huge_pages=False, **kw)


def some_rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, count, 2, 8)).astype(np.float32)


def with_rows(cache: lanewise.PagedKVCache, count: int, seed: int = 0) -> lanewise.Sequence:
    seq = cache.sequence()
    seq.append(some_rows(count, seed), some_rows(count, seed + 1))
    return seq


def held_bytes(cache: lanewise.PagedKVCache, seq: lanewise.Sequence) -> list[bytes]:
    """What is stored for its tokens, codes and scales, whatever blocks they lie in."""
    slots = seq.slots()
    at = np.divmod(slots[slots >= 0], cache.geometry.block_size)
    views = [cache.keys(), cache.values(), *(cache.scales() or ())]
    return [view[:, at[0], :, at[1]].tobytes() for view in views]


@fault("KV13")
def keys_turned_twice_are_turned_by_the_sum() -> None:
    """Turning is done when it is asked for; nothing is left pending that a second one could overwrite."""
    angles = np.arange(8, dtype=np.float64)[:, None] * 10.0 ** -np.arange(4)
    cos, back = np.cos(angles).astype(np.float32), -np.sin(angles).astype(np.float32)
    keys = some_rows(1)[:1]
    cache = np.zeros((1, 1, 2, 1, 8), np.float32)  # a layer, a block, two heads, a token

    def turned(k: np.ndarray, by: int) -> np.ndarray:
        lanewise.append_kv(k, None, cache, None, [0], layout="LNHTD", rope="neox", cos=cos, sin=back, positions=[by])
        return lanewise.gather_kv(cache, None, [0], layout="LNHTD")[0]

    np.testing.assert_allclose(turned(turned(keys, 2), 3), turned(keys, 5), rtol=0, atol=1e-6)


@fault("KV15")
def compaction_keeps_codes_and_scales() -> None:
    for dtype in ("int8", "float16"):
        cache = paged(6, dtype=dtype)
        seqs = [with_rows(cache, 4, seed) for seed in range(6)]
        for i in (3, 1):
            seqs.pop(i).free()
        before = [held_bytes(cache, seq) for seq in seqs]
        moves = cache.compact()
        assert {tuple(move) for move in moves.tolist()} == {(5, 1), (4, 3)}
        assert [held_bytes(cache, seq) for seq in seqs] == before
        assert sorted(cache.block_tables(seqs)[:, 0]) == [0, 1, 2, 3]
        cache.check()


@fault("KV17")
def a_block_beyond_the_host_pool_is_refused_before_any_copy() -> None:
    device, host = np.ones((512, 4)), np.zeros((39, 4))
    with pytest.raises(ValueError, match="511"):
        lanewise.swap_blocks(device, host, [(0, 0), (511, 511)])
    assert not host.any()


@fault("KV19")
def both_tiers_count_right() -> None:
    device, host = paged(2), paged(2, dtype="int8", layout="NHD", order="layer")
    swapped: list[lanewise.Sequence] = []
    for i in range(20):
        seq = with_rows(device, 5, i)
        if len(swapped) == 1:
            swapped.pop().free()
        swapped.append(seq.to(host))
        seq.free()
        for cache in (device, host):
            pool = cache.pool
            assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks == 2
            cache.check()
        with pytest.raises(lanewise.OutOfBlocksError):
            with_rows(device, 4).to(host)
        assert (device.pool.num_free, host.pool.num_free) == (2, 0)


@fault("KV21")
def a_group_of_zeros_is_codes_of_zero() -> None:
    cache = paged(2, dtype="int8")
    rows = some_rows(3)
    rows[:, 1], rows[:, 2] = 0, 1e-45
    seq = cache.sequence()
    seq.append(rows, rows)
    for found in cache.gather([seq]):
        assert not found[:, 1:].any() and np.isfinite(found).all() and found[:, 0].any()
    (scales, _), (block,) = cache.scales() or (), cache.pool.ids(seq.handles)
    assert not cache.keys()[:, block, :, 1:].any() and not scales[:, block, :, 1:].any()


@fault("KV23")
def scales_that_cannot_be_are_refused() -> None:
    codes = np.ones((1, 1, 1, 8), np.int8)
    for scale in (0.0, np.nan, -1.0, np.inf):
        scales = np.zeros((1, 1, 1, 2), np.float32)
        scales[..., 0] = scale
        with pytest.raises(ValueError, match="scale"):
            lanewise.gather_kv(codes, None, [0], layout="NTHD", k_scales=scales)


@fault("KV25")
def layouts_are_told_and_not_guessed() -> None:
    by_head = some_rows(12).reshape(6, 2, 4, 8)[:3]  # blocks, heads, tokens, head_dim
    by_token = np.ascontiguousarray(by_head.swapaxes(1, 2))
    slots = [0, 5, 11]
    found = [
        lanewise.gather_kv(cache, None, slots, layout=layout)[0]
        for cache, layout in ((by_head, "HND"), (by_token, "NHD"), (by_token.swapaxes(1, 2), "HND"))
    ]
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()


@fault("OK01")
def pairs_are_copied_as_if_at_once() -> None:
    for pairs in ([(0, 1), (1, 0)], [(0, 1), (1, 2)]):
        pool = np.arange(12.0).reshape(3, 4)
        want = pool.copy()
        want[[to for _, to in pairs]] = pool[[start for start, _ in pairs]]
        lanewise.copy_blocks(pool, pairs)
        assert pool.tolist() == want.tolist()


@fault("OK02")
def a_fork_keeps_what_its_parent_goes_on_from() -> None:
    cache = paged(8)
    parent = with_rows(cache, 6)
    child = parent.fork()
    parent.append(some_rows(1, 7), some_rows(1, 7))
    before = held_bytes(cache, child)
    child.append(some_rows(1, 8), some_rows(1, 8))
    assert held_bytes(cache, parent) != held_bytes(cache, child)
    child.truncate(6)
    assert held_bytes(cache, child) == before
    assert cache.gather([parent])[0][:, 6:].tobytes() == some_rows(1, 7).tobytes()
    assert parent.handles[0] == child.handles[0] and parent.handles[1] != child.handles[1]


@fault("OK03")
def appending_at_and_across_borders() -> None:
    cache = paged(8)
    one_by_one, at_once = with_rows(cache, 4), cache.sequence()
    assert len(one_by_one.handles) == 1
    one_by_one.append(some_rows(1, 5), some_rows(1, 5))
    assert len(one_by_one.handles) == 2
    at_once.append(some_rows(9, 3), some_rows(9, 4))
    assert len(at_once.handles) == 3
    for seq in (one_by_one, at_once):
        ids = cache.pool.ids(seq.handles)
        assert seq.slots().tolist() == [int(ids[i // 4]) * 4 + i % 4 for i in range(seq.length)]
    assert cache.gather([at_once])[0].tobytes() == some_rows(9, 3).tobytes()


# ---- moves of blocks ----


@fault("KV17")
def a_block_that_the_host_pool_lacks_is_refused_before_any_copy() -> None:
    device, host = np.ones((512, 8), np.float32), np.zeros((39, 8), np.float32)
    with pytest.raises(ValueError, match=r"pairs\[1, 1\] is 511; dst has the blocks 0 to 38"):
        lanewise.swap_blocks(device, host, [(0, 0), (1, 511)])
    assert not host.any()


@fault("OK01")
def moves_of_one_call_count_as_made_at_once() -> None:
    for pairs, want in (([(0, 1), (1, 0)], [1, 0, 2]), ([(0, 1), (1, 2)], [0, 0, 1])):
        for pool in (np.arange(3), np.arange(3, dtype=np.float32), np.arange(3)[:, None] * np.ones(70)):
            at_once = pool.copy()
            lanewise.copy_blocks(at_once, pairs)
            lanewise.swap_blocks(pool, pool, pairs)
            for moved in (pool, at_once):
                assert moved.reshape(3, -1)[:, 0].tolist() == want


# ---- beams ----


def spread(**logprobs: float) -> np.ndarray:
    """A row with these logprobs, id 0 called t0 and so on, and the rest of the mass thin over 2000 ids."""
    p = np.zeros(2000)
    for name, value in logprobs.items():
        p[int(name[1:])] = np.exp(value)
    p[len(p) // 2 :] = (1 - p.sum()) / (len(p) // 2)
    return log32(p)


@fault("PE09")
def penalty_sees_all_of_the_history() -> None:
    row, want = f32(*range(10)), np.float64(range(10))
    want[[4, 9]] -= 100
    expected = lanewise.log_softmax(want.astype(np.float32))
    greedy = lanewise.logprobs(row, ids=[4, 9], presence_penalty=100.0, output_ids=[4, 9])
    np.testing.assert_array_equal(greedy.given, expected[[4, 9]])
    found = lanewise.beam_step([0.0, 0.0], np.stack([row] * 2), n=20, presence_penalty=100.0, output_ids=[[4, 9]] * 2)
    for token in (4, 9):
        np.testing.assert_array_equal(found.scores[found.tokens == token], [expected[token]] * 2)
    search = lanewise.BeamSearch(1, max_length=9, presence_penalty=100.0)
    while not search.done:
        search.step(row[None])
    assert search.finish()[0][0].tokens.tolist() == [9, 8, 7, 6, 5, 4, 3, 2, 1]


@fault("BE01")
def bound_knows_the_sign_of_length_penalty() -> None:
    """Kept: -0.5. Open: -2.0 at length 2, which may be -0.2 at length 10 if the penalty divides."""
    for penalty, goes_on in {1.0: True, 0.0: False, -1.0: False}.items():
        search = lanewise.BeamSearch(1, max_length=10, eos_ids=[0], length_penalty=penalty, early_stopping="never")
        search.step(spread(t0=-0.5, t1=-1.4)[None])
        assert search.finish()[0][0].score == pytest.approx(-0.5, abs=1e-5)
        if not search.done:
            search.step(spread(t0=-1.5, t1=-0.6)[None])
            assert search.scores.item() == pytest.approx(-2.0, abs=1e-5)
        assert search.done != goes_on, penalty
    short = lanewise.BeamSearch(1, max_length=10, eos_ids=[0], early_stopping=False)  # at its present length
    short.step(spread(t0=-0.5, t1=-1.4)[None])
    assert short.done


@fault("BE03")
def open_beam_that_can_still_win_wins() -> None:
    """Ended: -2.0 at length 2, -1 a token. Open: -2.2 at length 3, -0.733 a token."""
    for early_stopping in (True, False, "never"):
        search = lanewise.BeamSearch(2, max_length=10, eos_ids=[0], early_stopping=early_stopping)
        search.step(np.stack([spread(t1=-1.0, t2=-1.5)] * 2))
        search.step(np.stack([spread(t0=-1.0), spread(t1=-0.6)]))
        assert search.finish()[0][1].score == pytest.approx(-1.05, abs=1e-5) and not search.done
        search.step(np.stack([spread(t0=-0.1)] * 2))
        best = search.finish()[0][0]
        assert best.tokens.tolist() == [2, 1, 0] and best.score == pytest.approx(-2.2 / 3, abs=1e-5)


@fault("BE05")
def length_counts_what_was_generated_and_its_end() -> None:
    search = lanewise.BeamSearch(1, max_length=9, eos_ids=[0], length_penalty=1.0)
    for token in (1, 2, 0):
        search.step(log32([np.where(np.arange(3) == token, 0.8, 0.1)]))
    best = search.finish()[0][0]
    assert best.tokens.tolist() == [1, 2, 0]
    assert best.sum == pytest.approx(3 * np.log(0.8), abs=1e-6) and best.score == best.sum / 3


@fault("BE07")
def kept_hypotheses_are_bounded() -> None:
    search = lanewise.BeamSearch(20, max_length=120, eos_ids=[0], early_stopping="never", length_penalty=5.0)
    logits = np.stack([log32([0.5, *[0.5 / 39] * 39])] * 20)
    while not search.done:
        search.step(logits)
        assert len(search.finish()[0]) <= 20 and sum(map(len, search._kept)) <= 20
    assert search.length == 120


@fault("BE09")
def first_step_gives_different_tokens() -> None:
    search = lanewise.BeamSearch(3, max_length=5)
    move = search.step(np.stack([f32(0.1, 0.5, 0.3, 0.2, 0.4)] * 3))
    assert move.tokens.tolist() == [1, 4, 2] and move.rows.tolist() == [0, 0, 0]


# ---- drafts ----


def verified(target: Any, draft: list[int], q: Any = None, **told: Any) -> lanewise.Verified:
    how: dict[str, Any] = {"probs": True, "method": "ratio", "on_invalid": "mark", **told}
    return lanewise.verify_draft(np.float32(target), draft, q=None if q is None else np.float32(q), **how)


@fault("SP01")
def nan_row_gives_no_id() -> None:
    for vocab in (10, 129280):
        nan = np.full((2, vocab), np.nan)
        q = np.full((1, vocab), 1 / vocab)
        for method, draft_q in (("ratio", q), ("ratio", None), ("block", q), ("block", None), ("noise", None)):
            found = verified(nan, [3], draft_q, method=method, seed=1, step=0)
            assert found.accepted == 0 and found.tokens.tolist() == [-1, -1]
        for method in ("noise", "ratio", "block", "typical"):
            found = verified(nan, [3], method=method, probs=False, seed=1, step=0)
            assert found.accepted == 0 and found.tokens.tolist() == [-1, -1]
        left = np.where(np.arange(vocab) == vocab - 1, np.nan, 0.0)  # the draft falls, and what is left has a NaN
        assert verified([left, left], [3], q, seed=1, step=0).tokens.tolist() == [-1, -1]
    with pytest.raises(InvalidLogitsError) as caught:
        verified(np.full((2, 10), np.nan), [3], seed=1, step=0, on_invalid="raise")
    assert caught.value.rows == [0] and caught.value.tokens.accepted == 0


@fault("SP03")
def coin_of_0_does_not_accept_what_has_no_probability() -> None:
    for method, q in (("ratio", [[1, 0]]), ("ratio", None), ("block", [[1, 0]]), ("block", None)):
        found = verified([[0, 1], [0.5, 0.5]], [0], q, method=method, u=[0.0, 0.0])
        assert found.tokens.tolist() == [1, -1] and found.accepted == 0


@fault("SP05")
def output_follows_p_when_q_is_what_was_drawn_from() -> None:
    trials = 6000
    rng = np.random.default_rng(5)
    p, soft = (lanewise.softmax(rng.standard_normal(8).astype(np.float32)) for _ in range(2))
    q = lanewise.top_k_renorm(soft, 3)
    draft = lanewise.sample_from_probs(np.broadcast_to(q, (trials, 8)), seed=1, step=0)
    kept = {}
    for name, given in (("drawn from", q), ("not drawn from", soft)):
        rows = np.broadcast_to(p, (trials, 2, 8)), np.broadcast_to(given, (trials, 1, 8))
        found = lanewise.verify_draft(rows[0], draft[:, None], q=rows[1], probs=True, method="ratio", seed=2, step=0)
        kept[name] = chi_square(np.bincount(found.tokens[:, 0], minlength=8), p)
    assert kept["drawn from"] > 1e-4 and kept["not drawn from"] < 1e-6


@fault("SP06")
def certain_draft_is_not_judged_by_a_soft_q() -> None:
    trials = 6000
    p = np.broadcast_to(f32(0.5, 0.5), (trials, 2, 2))
    draft = np.zeros((trials, 1), np.int64)
    one_hot, soft = (np.broadcast_to(f32(*q), (trials, 1, 2)) for q in ((1, 0), (0.6, 0.4)))
    share = {}
    for name, q in (("absent", None), ("one-hot", one_hot), ("soft", soft)):
        found = lanewise.verify_draft(p, draft, q=q, probs=True, method="ratio", seed=3, step=0)
        share[name] = float((found.tokens[:, 0] == 0).mean())
    assert share["absent"] == pytest.approx(0.5, abs=0.03) and share["one-hot"] == pytest.approx(0.5, abs=0.03)
    assert share["soft"] == pytest.approx(0.833, abs=0.03)  # the wrong q shows


@fault("SP07")
def small_ratios_leave_what_they_should() -> None:
    """What is left of p where q is far less: p - q, within 1e-6 of float64, by the draw at the u between two ids."""
    for ratio in (1e-9, 1e-6, 1e-3):
        p, q = np.float64([0.5, 0.25, 0.25]), np.float64([0.5 * ratio, 0.25 * ratio, 0.9])
        rest = np.maximum(np.float32(p).astype(np.float64) - np.float32(q), 0)
        edge = rest[0] / rest.sum()
        for u, token in ((edge - 1e-6, 0), (edge + 1e-6, 1)):
            assert verified([p, p], [2], [q], u=[0.999, u]).tokens.tolist() == [token, -1]


@fault("SP09")
def ragged_drafts_keep_their_own_q() -> None:
    rng = np.random.default_rng(9)
    counts = [0, 1, 3, 3]
    p = lanewise.softmax((2 * rng.standard_normal((4, 4, 50))).astype(np.float32))
    q = lanewise.softmax((2 * rng.standard_normal((4, 3, 50))).astype(np.float32))
    u = rng.random((4, 4))
    for method in ("ratio", "block"):
        draft = np.array([[*q[i, :n].argmax(1), *[-1] * (3 - n)] for i, n in enumerate(counts)])
        batch = lanewise.verify_draft(p, draft, q=q, probs=True, method=method, u=u)
        for i, n in enumerate(counts):
            alone = verified(p[i, : n + 1], draft[i, :n].tolist(), q[i, :n], method=method, u=u[i, : n + 1])
            assert alone.tokens.tolist() == batch.tokens[i, : n + 1].tolist()
            assert alone.accepted == batch.accepted[i]


# ---- not here ----

# ---- attention ----


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, keys: int, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    """Queries (n, D) over one sequence's keys (keys, D), one head; alone and beside other sequences."""
    n, dim = q.shape
    alone = lanewise.extend_attention(
        q[:, None], k[None, None], v[None, None], None, [keys], [0, n], return_lse=True, **how
    )
    if how.get("mask") is None:
        three = lanewise.extend_attention(
            np.concatenate([np.ones((1, 1, dim), np.float32), q[:, None], np.ones((1, 1, dim), np.float32)]),
            np.stack([k * 0, k, k * 0])[:, None],
            np.stack([v * 0, v, v * 0])[:, None],
            None,
            [0, keys, min(keys, 1)],
            [0, 1, 1 + n, 2 + n],
            return_lse=True,
            **how,
        )
        assert [part[1:-1].tobytes() for part in three] == [part.tobytes() for part in alone]
    return alone[0][:, 0], alone[1][:, 0]


@fault("AT01")
def merging_empty_parts() -> None:
    zero, nothing = np.zeros((1, 1, 4), np.float32), np.full((1, 1), -INF, np.float32)
    v, s = lanewise.merge_state(zero, nothing, zero, nothing)
    assert not v.any() and s == -INF
    real = np.float32([[[1.5, -2.0, 3.25, 0.1]]])
    parts = np.stack([zero, real, zero], 1), np.float32([[[-INF], [7.5], [-INF]]])
    v, s = lanewise.merge_states(*parts)
    assert v.tobytes() == real.tobytes() and s == 7.5


@fault("AT02")
def no_stand_in_for_minus_infinity() -> None:
    q, k, v = f32(-60000)[:, None], f32(1)[:, None], f32(3)[:, None]
    out, lse = attend(q, k, v, 1, scale=1.0)
    assert out == 3.0 and lse == -60000


@fault("AT03")
def fully_masked_row() -> None:
    q, k, v = np.ones((3, 4), np.float32), np.ones((1, 4), np.float32), np.full((1, 4), 2, np.float32)
    out, lse = attend(q, k, v, 1)
    assert not out[:2].any() and (lse[:2] == -INF).all() and (out[2] == 2).all()
    k, v = np.ones((5, 4), np.float32), np.ones((5, 4), np.float32)
    mask = np.array([[False] * 5, [True] * 5, [False] * 4 + [True]])
    for causal in (False, True):
        out, lse = attend(q, k, v, 5, mask=mask, causal=causal)
        assert not out[0].any() and lse[0] == -INF and np.isfinite(lse[1:]).all()


@fault("AT05")
def base_of_the_logarithm() -> None:
    v = np.float32([[[[1.0]], [[0.0]]]])
    s = np.float32([[[1.0], [2.0]]])
    natural, _ = lanewise.merge_states(v, s)
    assert natural.item() == pytest.approx(0.26894142)
    binary, lse = lanewise.merge_states(v, s, lse_base="2")
    assert binary.item() == pytest.approx(1 / 3) and lse.item() == pytest.approx(np.log2(6))
    q = np.ones((1, 4), np.float32)
    _, e = attend(q, np.ones((3, 4), np.float32), np.ones((3, 4), np.float32), 3)
    _, two = attend(q, np.ones((3, 4), np.float32), np.ones((3, 4), np.float32), 3, lse_base="2")
    assert two == pytest.approx(e / np.log(2))


@fault("AT07")
def masked_nan_does_not_leak() -> None:
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((n, 4)).astype(np.float32) for n in (1, 3, 3))
    mask = np.array([[True, False, True]])
    want = attend(q, k, v, 3, mask=mask)
    k[1] = v[1] = np.nan
    got = attend(q, k, v, 3, mask=mask)
    assert [part.tobytes() for part in got] == [part.tobytes() for part in want]
    assert np.isnan(attend(q, k, v, 3)[0]).all()


@fault("AT09")
def causal_mask_is_aligned_bottom_right() -> None:
    q, k, v = np.zeros((2, 4), np.float32), np.zeros((6, 4), np.float32), np.zeros((6, 4), np.float32)
    _, lse = attend(q, k, v, 6)
    assert np.exp(lse) == pytest.approx([5, 6])


LATER = {
    "no wheel for 32-bit Arm is offered": ["PA03"],
    "needs a second NumPy: make test-pythons covers the range": ["PA01"],
}
ELSEWHERE = {
    "test_dispatch.py": ["DI01", "DI02", "DI03", "DI05", "DI07", "DI09", "DI11"],
    "test_build.py": ["PA02", "PA04"],
    "test_pool.py": [f"KV{i:02}" for i in (1, 2, 3, 4, 5, 6, 7, 9, 11)],
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_fault(name: str, isa: str) -> None:
    FAULTS[name]()


@pytest.mark.parametrize(("name", "reason"), [(name, why) for why, names in LATER.items() for name in names])
def test_fault_to_come(name: str, reason: str) -> None:
    pytest.skip(reason)


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in ELSEWHERE.items() for name in names])
def test_fault_is_tested_elsewhere(file: str, name: str) -> None:
    assert name in (Path(__file__).parent / file).read_text()


def test_all_faults_are_here() -> None:
    later, elsewhere = [*chain(*LATER.values())], [*chain(*ELSEWHERE.values())]
    assert len({*FAULTS, *later, *elsewhere}) == len(FAULTS) + len(later) + len(elsewhere) == 107
