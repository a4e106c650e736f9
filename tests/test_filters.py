"""Truncations and edits as operations of their own: they do what sample does, and write where they should."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lanewise
from lanewise import InvalidLogitsError, reference

INF = np.inf
NAN_BITS = 0x7FC00000
WIDEST = 1 << 20
MASKS: dict[str, Callable[..., np.ndarray]] = {
    "top_k_mask": lambda x, **kw: lanewise.top_k_mask(x, 2, **kw),
    "top_p_mask": lambda x, **kw: lanewise.top_p_mask(x, 0.6, **kw),
    "min_p_mask": lambda x, **kw: lanewise.min_p_mask(x, 0.3, **kw),
}
RENORMS: dict[str, Callable[..., np.ndarray]] = {
    "top_k_renorm": lambda x, **kw: lanewise.top_k_renorm(x, 2, **kw),
    "top_p_renorm": lambda x, **kw: lanewise.top_p_renorm(x, 0.6, **kw),
}


def edits(rows: int, n: int) -> dict[str, Callable[..., np.ndarray]]:
    ids = [[0, n - 1]] * rows
    return {
        "apply_penalties": lambda x, **kw: lanewise.apply_penalties(x, repetition_penalty=2.0, prompt_ids=ids, **kw),
        "apply_bias": lambda x, **kw: lanewise.apply_bias(x, {1: 0.5}, **kw),
        "dense bias": lambda x, **kw: lanewise.apply_bias(x, np.arange(n, dtype=np.float32), **kw),
        "apply_token_bitmask": lambda x, **kw: lanewise.apply_token_bitmask(x, np.arange(n) % 3 > 0, **kw),
    }


def all_of(rows: int, n: int) -> list[Callable[..., np.ndarray]]:
    return [*MASKS.values(), *RENORMS.values(), *edits(rows, n).values()]


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# ---- the same as sample ----

KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "realistic": lambda rng, n: 3 * rng.standard_normal(n),
    "tied": lambda rng, n: np.round(rng.standard_normal(n)),
    "equal": lambda rng, n: np.full(n, -3.25),
    "masked": lambda rng, n: np.where(rng.random(n) < 0.3, rng.standard_normal(n), -INF),
    "zeros": lambda rng, n: rng.choice([0.0, -0.0, -1.0], n),
}


@pytest.mark.parametrize("kind", KINDS)
def test_masks_keep_what_sample_keeps(kind: str, isa: str) -> None:
    rng = np.random.default_rng(5)
    for n in (1, 7, 64, 65, 1000, 4100):
        row = KINDS[kind](rng, n).astype(np.float32)
        row[rng.integers(n)] = 0.5
        for _ in range(12):
            both: dict[str, Any] = {"min_keep": int(rng.choice([0, 1, 3, 70]))}
            ties = {"ties": str(rng.choice(["lowest", "all"]))}
            warm = {"temperature": float(rng.choice([0.0, 1e-30, 0.7, 1.0, 3.0, 1e31]))}
            k, p, min_p = int(rng.integers(-1, n + 3)), float(rng.uniform(-0.1, 1.1)), float(rng.uniform())
            for got, how in (
                (lanewise.top_k_mask(row, k, **both, **ties), {"top_k": k} | both | ties),
                (lanewise.top_p_mask(row, p, **both, **ties, **warm), {"top_p": p} | both | ties | warm),
                (lanewise.min_p_mask(row, min_p, **both, **warm), {"min_p": min_p} | both | warm),
            ):
                _, support = lanewise.sample(row, **how, seed=1, step=0, return_support=True)
                kept = np.zeros(n, bool)
                kept[support.ids] = True
                assert got.tobytes() == np.where(kept, row, np.float32(-INF)).tobytes(), how


MISLEADING: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "flat": lambda rng, n: 0.1 * rng.standard_normal(n),
    "wide": lambda rng, n: 30 * rng.standard_normal(n),
    "tied": lambda rng, n: np.round(rng.standard_normal(n)),
    "high where looked at": lambda rng, n: rng.standard_normal(n) + 5 * (np.arange(n) % (n // 128) == 0),
    "low where looked at": lambda rng, n: rng.standard_normal(n) - 50 * (np.arange(n) % (n // 128) == 0),
    "nothing where looked at": lambda rng, n: np.where(np.arange(n) % (n // 128) == 0, -INF, rng.standard_normal(n)),
    "all of it where looked at": lambda rng, n: np.where(np.arange(n) % (n // 128) == 0, rng.standard_normal(n), -INF),
}


@pytest.mark.parametrize("kind", MISLEADING)
def test_a_guess_decides_nothing(kind: str, isa: str) -> None:
    """The nucleus is sought between bounds taken from 128 entries; whatever these are, it is the same one."""
    rng = np.random.default_rng(8)
    for n in (1023, 1024, 1500, 5000):
        row = MISLEADING[kind](rng, n).astype(np.float32)
        probs = np.exp(row - row.max())
        for p in (0.01, 0.5, 0.9, 0.999, float(rng.uniform())):
            want = np.where(np.isin(np.arange(n), reference.support(row, top_p=p)), row, np.float32(-INF))
            assert lanewise.top_p_mask(row, p).tobytes() == want.tobytes(), (n, p)
            assert lanewise.top_p_renorm(probs, p).tobytes() == reference.top_p_renorm(probs, p).tobytes(), (n, p)


def test_edits_give_the_row_that_sample_judges(isa: str) -> None:
    rng = np.random.default_rng(6)
    row = rng.standard_normal(500).astype(np.float32)
    penalties: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.1, "presence_penalty": 0.3}
    penalties |= {"prompt_ids": [3, 4, 5], "output_ids": [4, 4, 499]}
    bias, mask = {4: 1.5, 7: -INF}, rng.random(500) < 0.7
    z = lanewise.apply_bias(row, bias)
    z = lanewise.apply_penalties(z, **penalties, out=z)
    z = lanewise.apply_token_bitmask(z, mask, out=z)
    assert z.tobytes() == reference.processed(row, bias=bias, mask=mask, **penalties).tobytes()
    at_once = lanewise.sample(row, bias=bias, mask=mask, **penalties, u=0.5, return_support=True)[1]
    step_by_step = lanewise.sample(z, u=0.5, return_support=True)[1]
    assert at_once.ids.tolist() == step_by_step.ids.tolist()
    assert at_once.logprobs.tobytes() == step_by_step.logprobs.tobytes()


def test_rows_may_differ_in_every_number(isa: str) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((4, 300)).astype(np.float32)
    probs, ids = lanewise.softmax(x), [[1, 2], [], [3], [4, 4]]
    k, p, min_p, t, keep = (
        [1, 0, 50, 7],
        [0.1, 1.0, 0.9, -1.0],
        [0.0, 0.5, 1.0, 0.1],
        [0.0, 1.0, 0.5, 2.0],
        [1, 9, 2, 3],
    )
    masks = rng.random((4, 300)) < 0.5
    biases: Any = [{1: 2.0}, None, {}, {0: -1.0, 299: 3.0}]
    together = (
        lanewise.top_k_mask(x, k, min_keep=keep),
        lanewise.top_p_mask(x, np.array(p), temperature=t, min_keep=np.array(keep)),
        lanewise.min_p_mask(x, min_p, temperature=t, min_keep=keep),
        lanewise.top_k_renorm(probs, k),
        lanewise.top_p_renorm(probs, p),
        lanewise.apply_penalties(x, repetition_penalty=[1.1, 2.0, 0.5, 1.0], presence_penalty=p, output_ids=ids),
        lanewise.apply_bias(x, biases),
        lanewise.apply_token_bitmask(x, masks),
    )
    for i in range(4):
        alone = (
            lanewise.top_k_mask(x[i], k[i], min_keep=keep[i]),
            lanewise.top_p_mask(x[i], p[i], temperature=t[i], min_keep=keep[i]),
            lanewise.min_p_mask(x[i], min_p[i], temperature=t[i], min_keep=keep[i]),
            lanewise.top_k_renorm(probs[i], k[i]),
            lanewise.top_p_renorm(probs[i], p[i]),
            lanewise.apply_penalties(
                x[i], repetition_penalty=[1.1, 2.0, 0.5, 1.0][i], presence_penalty=p[i], output_ids=ids[i]
            ),
            lanewise.apply_bias(x[i], biases[i] or {}),
            lanewise.apply_token_bitmask(x[i], masks[i]),
        )
        for many, one in zip(together, alone, strict=True):
            assert many.dtype == one.dtype == np.float32 and one.shape == (300,)
            assert many[i].tobytes() == one.tobytes()


# ---- probabilities ----


@pytest.mark.parametrize("spread", [0, 1, 20, 140])
def test_nucleus_of_any_probabilities(spread: int, isa: str) -> None:
    """From equal ones to what spans all of float32: the bisection and the sorted sum agree."""
    rng = np.random.default_rng(spread)
    for n in (1, 2, 17, 64, 300):
        for some in (3, n):
            row = np.exp2(-rng.uniform(0, spread, n)).astype(np.float32)
            row = row[rng.integers(0, some, n)] if some < n else row
            for p in (
                *rng.uniform(0, 1, 4),
                0.5,
                0.75,
                1e-300,
                1 - 2.0**-53,
                *(i / n for i in range(0, n, n // 3 + 1)),
            ):
                for ties in ("lowest", "all"):
                    want = reference.top_p_renorm(row, p, ties=ties)
                    assert lanewise.top_p_renorm(row, p, ties=ties).tobytes() == want.tobytes(), (n, p, ties)


def test_mass_equal_to_p_ends_the_nucleus(isa: str) -> None:
    row = f32(0.125, 0.5, 0.25, 0.125)
    for p, kept in (
        (0.5, [1]),
        (np.nextafter(0.5, 1), [1, 2]),
        (0.75, [1, 2]),
        (0.875, [0, 1, 2]),
        (0.9, [0, 1, 2, 3]),
    ):
        assert np.flatnonzero(lanewise.top_p_renorm(row, p)).tolist() == kept
        assert np.flatnonzero(lanewise.top_p_renorm(row * 2.0**-140, p)).tolist() == kept
    assert np.flatnonzero(lanewise.top_p_renorm(row, 0.8, ties="all")).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("n", [5, 4100, 1 << 20])
def test_renormed_values_are_near_float64(n: int, isa: str) -> None:
    rng = np.random.default_rng(n)
    for row in (rng.random(n, np.float32), np.full(n, 0.9, np.float32), lanewise.softmax(rng.normal(0, 4, n))):
        for got in (
            lanewise.top_k_renorm(row, n // 2),
            lanewise.top_p_renorm(row, 0.7),
            lanewise.top_p_renorm(row, 1.0),
        ):
            kept = got > 0
            want = row[kept] / row[kept].sum(dtype=np.float64)
            assert (np.abs(got[kept] - want) <= want * 2.0**-24 * 5).all()
            assert got.sum(dtype=np.float64) == pytest.approx(1, abs=2.0**-22)


# ---- invalid rows ----


@pytest.mark.parametrize("name", [*MASKS, *RENORMS])
def test_invalid_rows_are_marked_and_raised_after_the_others(name: str, isa: str) -> None:
    op = (MASKS | RENORMS)[name]
    good = f32(0.5, 0.25, 0.125, 0.125)
    none = 0.0 if name in RENORMS else -INF
    bad = [f32(np.nan, 1, 0, 0), f32(0.5, INF, 0, 0), f32(none, none, none, none)]
    bad += [f32(0.5, -1e-9, 0, 0), f32(0.5, -INF, 0, 0)] if name in RENORMS else []
    rows = np.stack([good, *bad, good])
    want = np.full_like(rows, np.nan)
    want[[0, -1]] = op(good)
    assert not np.isnan(want[0]).any()
    assert op(rows, on_invalid="mark").tobytes() == want.tobytes()
    out = np.zeros_like(rows)
    with pytest.raises(InvalidLogitsError, match="negative number" if name in RENORMS else "allowed ids") as caught:
        op(rows, out=out)
    assert caught.value.rows == [*range(1, len(rows) - 1)]
    assert caught.value.tokens is out and out.tobytes() == want.tobytes()
    with pytest.raises(InvalidLogitsError) as caught:
        op(bad[0])
    assert caught.value.rows == [0] and np.isnan(caught.value.tokens).all()
    with pytest.raises(ValueError, match="on_invalid must be"):
        op(rows, on_invalid="ignore")


def test_edits_choose_nothing_so_any_row_will_do(isa: str) -> None:
    row = np.array([np.nan, INF, -INF, -0.0, 1.0], np.float32)
    row.view(np.uint32)[0] = 0xFFC12345
    for op in edits(1, 5).values():
        op(row[None])
    ids = lanewise.apply_penalties(row, repetition_penalty=2.0, prompt_ids=[4])
    words = lanewise.apply_token_bitmask(row, np.uint32([0b01111]))
    biased = lanewise.apply_bias(row, {4: 1.0})
    for untouched in (ids, words, biased):
        assert untouched[:4].tobytes() == row[:4].tobytes()
    touched = lanewise.apply_bias(row, {0: 1.0, 1: -INF, 3: 0.0})
    assert touched.view(np.uint32)[[0, 1, 3]].tolist() == [NAN_BITS, NAN_BITS, 0]
    assert lanewise.apply_bias(row, np.full(5, -INF, np.float32)).view(np.uint32)[1] == NAN_BITS
    assert lanewise.apply_penalties(row, repetition_penalty=2.0, prompt_ids=[0]).view(np.uint32)[0] == NAN_BITS


# ---- out ----

PLACES: list[tuple[Any, Any]] = [
    (np.s_[:, 1:], np.s_[:, :-1]),
    (np.s_[:, :-1], np.s_[:, 1:]),
    (np.s_[:], np.s_[:]),
    (np.s_[::-1], np.s_[:]),
    (np.s_[1:], np.s_[:-1]),
    (np.s_[:, ::2], np.s_[:, 1::2]),
]


def test_out_may_be_the_input_or_overlap_it(isa: str) -> None:
    a = np.random.default_rng(0).random((3, 202), np.float32)
    for taken, given in PLACES:
        rows, n = a[given].shape
        for op in all_of(rows, n):
            want = op(a[given].copy())
            b = a.copy()
            got = op(b[given], out=b[taken])
            assert got.base is b and got.tobytes() == want.tobytes()
            b[taken] = a[taken]
            assert b.tobytes() == a.tobytes(), "written beside out"


def test_out_may_have_any_layout(isa: str) -> None:
    a = np.random.default_rng(0).random((3, 70), np.float32)
    for out in (
        np.zeros((70, 3), np.float32).T,
        np.zeros((6, 140), np.float32)[::2, ::2],
        np.zeros((3, 70), np.float32)[::-1],
    ):
        for op in all_of(3, 70):
            assert op(a, out=out) is out
            assert out.tobytes() == op(a).tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_mask_leaves_16_bit_logits_as_they_are(dtype: Any, isa: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 77)).astype(dtype)
    mask = np.random.default_rng(1).random((3, 77)) < 0.5
    want = np.where(mask, x, dtype(-INF))
    for words in (mask, np.packbits(np.pad(mask, ((0, 0), (0, 19))), axis=1, bitorder="little").view(np.uint32)):
        new = np.empty_like(x)
        assert lanewise.apply_token_bitmask(x, words, out=new) is new and new.tobytes() == want.tobytes()
        for view in (np.s_[:, :], np.s_[::-1, :], np.s_[:, ::-1], np.s_[::2, :]):
            y = x.copy()
            assert lanewise.apply_token_bitmask(y[view], words[: len(y[view])], out=y[view]).base is y
            assert y[view].tobytes() == np.where(mask[: len(y[view])], x[view], dtype(-INF)).tobytes()
        assert lanewise.apply_token_bitmask(x, words).tobytes() == want.astype(np.float32).tobytes()
    other = np.float16 if dtype is not np.float16 else ml_dtypes.bfloat16
    with pytest.raises(TypeError, match="out must be float32"):
        lanewise.apply_token_bitmask(x, mask, out=np.empty(x.shape, other))
    for op in (*MASKS.values(), lambda x, out: lanewise.apply_bias(x, {}, out=out)):
        with pytest.raises(TypeError, match="out must be float32"):
            op(x, out=x.copy())
    bare = x.view(np.uint16).view([("bfloat16", "u2")])  # as lanewise reads a tensor of another library
    if dtype is not np.float16:
        assert lanewise.apply_token_bitmask(bare, mask, out=bare).tobytes() == want.tobytes()


def test_a_bias_or_mask_that_lies_in_out_is_read_first(isa: str) -> None:
    x = np.random.default_rng(0).random((4, 64), np.float32)
    for at in (0, 2, 3):
        out = np.random.default_rng(1).random((4, 64), np.float32)
        want = x + out[at]
        assert lanewise.apply_bias(x, out[at], out=out).tobytes() == want.tobytes()
        out = np.random.default_rng(1).random((4, 64), np.float32)
        words = out.view(np.uint32)[at, :2]
        want = lanewise.apply_token_bitmask(x, words.copy())
        assert lanewise.apply_token_bitmask(x, words, out=out).tobytes() == want.tobytes()


@pytest.mark.skipif(sys.platform != "linux", reason="makes pages read-only with mprotect")
def test_in_place_writes_only_what_changes(isa: str) -> None:
    """Three pages, the middle one read-only: an edit of the outer two that wrote the whole row would fault."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    x = np.frombuffer(memory, np.float32)
    x[:] = 1
    n = len(x)
    libc = ctypes.CDLL(None, use_errno=True)
    middle = ctypes.c_void_p(x.ctypes.data + page)
    assert libc.mprotect(middle, page, mmap.PROT_READ) == 0
    mask = np.ones(n, bool)
    mask[[0, n - 1]] = False
    words = np.packbits(mask, bitorder="little").view(np.int32)
    want = np.ones(n, np.float32)
    try:
        lanewise.apply_penalties(x, frequency_penalty=0.5, prompt_ids=[2], output_ids=[1, 1, n - 2], out=x)
        want[[1, n - 2]] = 0, 0.5
        lanewise.apply_bias(x, {3: 4.0, n - 4: -1.0}, out=x)
        want[[3, n - 4]] = 5, 0
        assert x.tobytes() == want.tobytes()
        for allowed in (mask, words):
            lanewise.apply_token_bitmask(x, allowed, out=x)
            half = x.view(np.float16)
            lanewise.apply_token_bitmask(half, np.repeat(allowed if allowed is mask else mask, 2), out=half)
    finally:
        assert libc.mprotect(middle, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert (x[1:-1] == want[1:-1]).all() and (x.view(np.float16)[[0, 1, -2, -1]] == -INF).all()


# ---- arguments ----

X = np.zeros((2, 10), np.float32)
WRONG: list[tuple[Callable[[np.ndarray], Any], type[Exception], str]] = [
    (lambda out: lanewise.top_k_mask(X, 1.5, out=out), TypeError, r"k must be an integer, got 1.5"),
    (lambda out: lanewise.top_k_mask(X, [1, 2, 3], out=out), ValueError, r"k must be one value .* 2 rows, got 3"),
    (lambda out: lanewise.top_k_mask(X, [1, "a"], out=out), TypeError, r"k\[1\] must be an integer, got 'a'"),
    (lambda out: lanewise.top_k_mask(X, None, out=out), TypeError, "k must be a number or one a row, got None"),
    (lambda out: lanewise.top_k_mask(X, 1, min_keep=-1, out=out), ValueError, r"min_keep must be in \[0, .* got -1"),
    (lambda out: lanewise.top_k_mask(X, 1, ties="some", out=out), ValueError, "ties must be .* got 'some'"),
    (lambda out: lanewise.top_p_mask(X, np.nan, out=out), ValueError, "p must not be NaN"),
    (lambda out: lanewise.top_p_mask(X, None, out=out), TypeError, "p must be a number or one a row, got None"),
    (lambda out: lanewise.top_p_mask(X, 0.5, temperature=[1, -1], out=out), ValueError, r"temperature\[1\] .* got -1"),
    (lambda out: lanewise.min_p_mask(X, 1.5, out=out), ValueError, r"min_p must be in \[0, 1\], got 1.5"),
    (lambda out: lanewise.min_p_mask(X, None, out=out), TypeError, "min_p must be a number or one a row, got None"),
    (lambda out: lanewise.top_k_renorm(X[:, :0], 1), ValueError, "probs must have at least one column"),
    (lambda out: lanewise.top_p_renorm(X.astype(int), 0.5, out=out), TypeError, "probs must be float32"),
    (lambda out: lanewise.apply_bias(X, None, out=out), TypeError, "bias must be .* got None"),
    (lambda out: lanewise.apply_bias(X, {10: 1.0}, out=out), ValueError, r"bias\[0\]: id must be in \[0, 9\], got 10"),
    (lambda out: lanewise.apply_bias(X, X[:1, :9], out=out), ValueError, r"bias must have shape \(10,\)"),
    (lambda out: lanewise.apply_bias(X, {0: np.nan}, out=out), ValueError, r"bias\[0\]\[0\] must be"),
    (lambda out: lanewise.apply_token_bitmask(X, None, out=out), TypeError, "mask must be .* got None"),
    (lambda out: lanewise.apply_token_bitmask(X, [1, 0], out=out), TypeError, "mask must be bool.* got int64"),
    (lambda out: lanewise.apply_token_bitmask(X, np.ones((3, 10), bool), out=out), ValueError, "mask must have shape"),
    (
        lambda out: lanewise.apply_penalties(X, repetition_penalty=0, out=out),
        ValueError,
        r"repetition_penalty must be in \[1.17549e-38, .* got 0",
    ),
    (
        lambda out: lanewise.apply_penalties(X, output_ids=[[0], [10]], out=out),
        ValueError,
        r"output_ids\[1\]\[0\] is 10, not an id in 0..9",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_arguments_are_told_before_anything_is_written(
    call: Callable[[np.ndarray], Any], error: type[Exception], message: str
) -> None:
    out = np.full((2, 10), 77, np.float32)
    with pytest.raises(error, match=message):
        call(out)
    assert (out == 77).all()


def test_out_is_checked() -> None:
    x = np.ones((2, 10), np.float32)
    for op in all_of(2, 10):
        read_only = np.zeros_like(x)
        read_only.flags.writeable = False
        for out, error, message in (
            (read_only, ValueError, "out is read-only"),
            (np.zeros((2, 9), np.float32), ValueError, r"out must have shape \(2, 10\), got \(2, 9\)"),
            (np.zeros((2, 10)), TypeError, "out must be float32, got float64"),
            ([0.0] * 10, TypeError, "out must be a numpy array, got list"),
        ):
            with pytest.raises(error, match=message):
                op(x, out=out)


def test_empty_batches_and_the_widest_row() -> None:
    none = np.zeros((0, 9), np.float32)
    for op in all_of(0, 9):
        assert op(none).shape == (0, 9)
    wide = np.zeros(WIDEST + 1, np.float32)
    for op in (*MASKS.values(), *RENORMS.values()):
        with pytest.raises(ValueError, match=f"takes up to {WIDEST} ids, got {WIDEST + 1}"):
            op(wide)
    assert lanewise.apply_bias(wide, {len(wide) - 1: 1.0})[-1] == 1
