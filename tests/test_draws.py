"""What the draws beside sample promise beyond single decisions: laws, ties to sample, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lanewise
from lanewise import InvalidLogitsError, SamplingParams, Stream, _dispatch, reference

from laws import chi_square

DRAWS = 20000
_RNG = np.random.default_rng(8)
LOGITS = (_RNG.standard_normal(300) * 1.5).astype(np.float32)
PROBS = np.exp(LOGITS) * np.float32(7)  # sums to nothing in particular
ROWS = (_RNG.standard_normal((6, 5000)) * 2).astype(np.float32)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"top_p": 0.8, "min_keep": 3},
    {"min_p": 0.02, "temperature": 1.4, "preset": "llama.cpp"},
    {"top_k": 300, "bias": {3: 4.0}, "repetition_penalty": 1.3, "prompt_ids": [[1, 2]] * 6},
    {"mask": np.arange(5000) % 3 == 0, "top_k": 5, "ties": "all"},
]


def batch(row: np.ndarray) -> np.ndarray:
    return np.broadcast_to(row, (DRAWS, len(row)))


# ---- from probabilities ----


def test_draws_follow_the_probabilities() -> None:
    tokens = lanewise.sample_from_probs(batch(PROBS), seed=1, step=0)
    assert chi_square(np.bincount(tokens, minlength=300), PROBS.astype(np.float64)) > 1e-4
    by_u = lanewise.sample_from_probs(batch(PROBS), u=(np.arange(DRAWS) + 0.5) / DRAWS)
    assert (np.diff(by_u) >= 0).all()
    law = PROBS.astype(np.float64) / PROBS.sum(dtype=np.float64)
    assert np.abs(np.bincount(by_u, minlength=300) - law * DRAWS).max() <= 1.01


def test_small_probabilities_are_drawn_as_often_as_they_say() -> None:
    """Subnormal ones too: 2^-149 against 3 * 2^-149."""
    tokens = lanewise.sample_from_probs(batch(np.float32([2.0**-149, 0, 3 * 2.0**-149])), seed=2, step=0)
    assert chi_square(np.bincount(tokens, minlength=3)[[0, 2]], np.array([1.0, 3.0])) > 1e-4


def test_probabilities_have_the_noise_of_their_logarithms() -> None:
    logits = np.log(PROBS.astype(np.float64)).astype(np.float32)
    of_probs = lanewise.sample_from_probs(batch(PROBS), seed=3, step=0)
    assert (of_probs == lanewise.sample(batch(logits), seed=3, step=0)).mean() > 0.999


def test_a_scale_does_not_matter() -> None:
    want = lanewise.sample_from_probs(batch(PROBS)[:500], seed=4, step=0).tolist()
    for factor in (2.0**-100, 2.0**80):
        assert lanewise.sample_from_probs(batch(PROBS * np.float32(factor))[:500], seed=4, step=0).tolist() == want


@pytest.mark.parametrize("bad", [[1, np.nan], [1, -1e-45], [1, np.inf], [0, -0.0], [-1, -1]], ids=str)
def test_what_are_no_probabilities_is_invalid(bad: list[float]) -> None:
    rows = np.float32([[0, 1], bad, [1, 0]])
    for how in ({"seed": 1, "step": 0}, {"u": 0.5}):
        assert lanewise.sample_from_probs(rows, **how, on_invalid="mark").tolist() == [1, -1, 0]
        with pytest.raises(InvalidLogitsError, match="a negative") as caught:
            lanewise.sample_from_probs(rows, **how)
        assert caught.value.rows == [1] and caught.value.tokens.tolist() == [1, -1, 0]
    with pytest.raises(InvalidLogitsError) as caught:
        lanewise.sample_from_probs(rows[1])
    assert caught.value.tokens == -1
    several = lanewise.sample_from_probs(rows, n=2, seed=1, step=0, on_invalid="mark")
    assert several.tolist() == [[1, -1], [-1, -1], [0, -1]]


# ---- several ----


def test_the_order_of_several_has_its_law() -> None:
    """P(i, j) = p_i p_j / (1 - p_i)."""
    p = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    law = p[:, None] * p / (1 - p[:, None])
    np.fill_diagonal(law, 0)
    of_probs = lanewise.sample_from_probs(batch(p.astype(np.float32)), n=2, seed=5, step=0)
    of_logits = lanewise.sample_n(batch(np.log(p).astype(np.float32)), 2, seed=6, step=0)
    for drawn in (of_probs, of_logits):
        seen = np.zeros((5, 5))
        np.add.at(seen, (drawn[:, 0], drawn[:, 1]), 1)
        off = ~np.eye(5, dtype=bool)
        assert seen[~off].sum() == 0
        assert chi_square(seen[off], law[off]) > 1e-4


@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_the_first_is_the_token_of_sample_and_others_follow_without_it(how: dict[str, Any]) -> None:
    how = how | {"seed": 7, "step": 1}
    tokens, support = lanewise.sample(ROWS, **how, return_support=True)
    ids = lanewise.sample_n(ROWS, 50, **how)
    assert ids[:, 0].tolist() == tokens.tolist()
    for r in range(len(ROWS)):
        kept = support.ids[support.indptr[r] : support.indptr[r + 1]]
        count = min(50, len(kept))
        assert len(set(ids[r, :count])) == count and np.isin(ids[r, :count], kept).all()
        assert (ids[r, count:] == -1).all()
    fewer = lanewise.sample_n(ROWS, 3, **how)
    assert fewer.tolist() == ids[:, :3].tolist()
    if "mask" not in how and "bias" not in how and len(kept) > 1:  # whoever was first is forbidden: the second wins
        z = np.full_like(ROWS[-1], -np.inf)
        z[kept] = ROWS[-1][kept]
        z[ids[-1, 0]] = -np.inf
        assert lanewise.sample(z, temperature=how.get("temperature", 1.0), seed=7, step=1, keys=5) == ids[-1, 1]


def test_all_of_a_row_is_a_permutation() -> None:
    for ids in (
        lanewise.sample_n(LOGITS, 300, seed=1, step=0),
        lanewise.sample_from_probs(PROBS, n=300, seed=1, step=0),
    ):
        assert sorted(ids.tolist()) == list(range(300))
    greedy = lanewise.sample_n(LOGITS, 300, temperature=0.0, top_k=2)
    assert greedy.tolist() == lanewise.top_k(LOGITS, 300)[1].tolist()


# ---- verify ----


@pytest.mark.parametrize("how", [*SETTINGS, {"temperature": 0.0}], ids=str)
def test_the_margin_tells_who_won(how: dict[str, Any]) -> None:
    how = how | {"seed": 8, "step": 2}
    first, second, *_ = lanewise.sample_n(ROWS, 3, **how).T
    won, lost = lanewise.verify(ROWS, token=first, **how), lanewise.verify(ROWS, token=second, **how)
    assert (won > 0).all() and (lost == -won).all()
    tokens = [int(i) for i in np.argsort(ROWS[0])[::700]]
    params = SamplingParams(**{k: v for k, v in how.items() if k in ("temperature", "top_k", "top_p", "min_p")})
    if set(how) <= {"temperature", "top_k", "top_p", "min_p", "seed", "step"}:
        for token in tokens:
            margin = lanewise.verify(ROWS[0], params, token=token, seed=8, step=2)
            assert margin == reference.verify(ROWS[0], token, **how)
            assert isinstance(margin, float) and (margin > 0) == (token == first[0])


def test_margins_at_their_edges() -> None:
    row = np.float32([1, 2, -np.inf])
    how: dict[str, Any] = {"seed": 1, "step": 0}
    assert lanewise.verify(row, token=2, **how) == -np.inf
    assert lanewise.verify(row, token=1, top_k=1, **how) == np.inf
    assert lanewise.verify(row, token=0, top_k=1, **how) == -np.inf
    assert lanewise.verify(row, token=[0], temperature=0.0, **how) == -1
    assert lanewise.verify(np.float32([3, 3]), token=0, temperature=0.0, **how) == 0
    rows, out = np.float32([[1, np.nan], [0, 9]]), np.empty(2)
    assert lanewise.verify(rows, token=[0, 1], temperature=0.0, on_invalid="mark", out=out, **how) is out
    assert np.isnan(out[0]) and out[1] == 9
    with pytest.raises(InvalidLogitsError) as caught:
        lanewise.verify(rows, token=0, **how)
    assert caught.value.rows == [0] and np.isnan(caught.value.tokens[0])


# ---- what all share ----


def test_streams_count_and_fresh_entropy_differs() -> None:
    stream = Stream(9)
    got = [lanewise.sample_n(LOGITS, 4, rng=stream).tolist(), int(lanewise.sample_from_probs(PROBS, rng=stream))]
    assert stream.step == 2
    assert got[0] == lanewise.sample_n(LOGITS, 4, seed=9, step=0).tolist()
    assert got[1] == lanewise.sample_from_probs(PROBS, seed=9, step=1)
    assert len({tuple(lanewise.sample_n(LOGITS, 20).tolist()) for _ in range(3)}) == 3
    assert len({tuple(lanewise.sample_from_probs(PROBS, n=20).tolist()) for _ in range(3)}) == 3


def test_out_is_written_and_returned() -> None:
    rows, probs = np.stack([LOGITS] * 4), np.stack([PROBS] * 4)
    for out in (np.empty((4, 3), np.int64), np.empty((3, 4), np.int64).T):
        assert lanewise.sample_n(rows, 3, seed=1, step=0, out=out) is out
        assert out.tolist() == lanewise.sample_n(rows, 3, seed=1, step=0).tolist()
        assert lanewise.sample_from_probs(probs, n=3, seed=1, step=0, out=out) is out
        assert out.tolist() == lanewise.sample_from_probs(probs, n=3, seed=1, step=0).tolist()
    one = np.empty(3, np.int64)
    assert lanewise.sample_n(LOGITS, 3, seed=1, step=0, out=one) is one


ERRORS: list[tuple[Any, dict[str, Any], str]] = [
    (lanewise.sample_n, {"n": 0}, r"n must be in \[1, 300\], got 0"),
    (lanewise.sample_n, {"n": 301}, r"n must be in \[1, 300\], got 301"),
    (lanewise.sample_n, {"n": 2, "vocab_size": 1, "seed": 1}, r"n must be in \[1, 1\], got 2"),
    (lanewise.sample_n, {"n": 1, "seed": 1}, "seed needs step="),
    (lanewise.sample_n, {"n": 1, "out": np.empty((2, 2), np.int64)}, r"out must have shape \(2, 1\)"),
    (lanewise.sample_n, {"n": 1, "top_p": np.nan}, "top_p must not be NaN"),
    (lanewise.sample_from_probs, {"n": 301}, r"n must be in \[1, 300\], got 301"),
    (lanewise.sample_from_probs, {"n": 1, "u": 0.5}, "u draws one id"),
    (lanewise.sample_from_probs, {"u": 1.0}, r"u must be in \[0, 1\), got 1"),
    (lanewise.sample_from_probs, {"step": 1}, "step needs seed"),
    (lanewise.verify, {"token": 300, "seed": 1, "step": 0}, r"token must be in \[0, 299\], got 300"),
    (lanewise.verify, {"token": [0, -1], "seed": 1, "step": 0}, r"token\[1\] must be in \[0, 299\], got -1"),
    (lanewise.verify, {"token": [0], "seed": 1, "step": 0}, "token must be one value or one a row: 2 rows, got 1"),
    (lanewise.verify, {"token": 0, "seed": [1, None], "step": 0}, "needs the seed of every row"),
    (lanewise.verify, {"token": 0, "seed": None, "step": 0}, "needs the seed of every row"),
]


@pytest.mark.parametrize(("call", "how", "message"), ERRORS, ids=str)
def test_errors_name_the_argument_the_row_and_the_value(call: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(np.stack([LOGITS, LOGITS]), **how)


def test_a_row_without_columns_or_with_too_many_is_an_error() -> None:
    wide = np.broadcast_to(np.float32(1), (1, 2**20 + 1))
    for call in (lanewise.sample_from_probs, lambda x: lanewise.sample_n(x, 1)):
        with pytest.raises(ValueError, match="up to 1048576 ids a row, got 1048577"):
            call(wide)
        with pytest.raises(ValueError, match="at least one column"):
            call(np.empty((2, 0), np.float32))
        assert call(np.empty((0, 4), np.float32)).shape[0] == 0
    with pytest.raises(ValueError, match="out is for"):
        lanewise.sample_from_probs(PROBS, out=np.empty((), np.int64))


# ---- at length ----


@pytest.mark.slow
def test_random_rows_are_the_reference() -> None:
    rng = np.random.default_rng(5)
    for _ in range(3000):
        n = int(rng.choice([1, 2, 17, 64, 65, 100, 1000, 5000, 20000]))
        row = (rng.standard_normal(n) * rng.choice([0.01, 1, 5, 50])).astype(np.float32)
        row = np.round(row) if rng.random() < 0.4 else row
        row[rng.random(n) < rng.choice([0, 0, 0.5, 0.99])] = -np.inf
        noise = {"seed": int(rng.integers(2**63)), "step": int(rng.integers(2**32))}
        how = {
            "temperature": float(rng.choice([0, 0.1, 0.7, 1, 1.5, 1e-20, 1e31])),
            "top_k": int(rng.choice([0, 0, 1, 3, 50, n, n - 1])),
            "top_p": float(rng.choice([1, 1, 0, 0.1, 0.5, 0.9, 0.999])),
            "min_p": float(rng.choice([0, 0, 0.01, 0.1, 1])),
            "min_keep": int(rng.choice([1, 1, 3])),
            "ties": str(rng.choice(["lowest", "all", "top_k"])),
            "preset": str(rng.choice(list(reference.PRESETS))),
        }
        k, token, u = int(rng.choice([1, min(n, 17), min(n, 300)])), int(rng.integers(n)), float(rng.random())
        with np.errstate(all="ignore"):
            probs = np.nan_to_num(np.exp(row - row.max()) * np.float32(rng.choice([1, 1e-30, 1e-40, 1e38])))
        want = [
            reference.sample_n(row, k, **how, **noise),
            reference.verify(row, token, **how, **noise),
            reference.sample_from_probs(probs, n=k, **noise),
            *reference.sample_from_probs(probs, u=u),
        ]
        for isa in _dispatch.runnable():
            with lanewise.using(isa):
                got = [
                    lanewise.sample_n(row, k, **how, **noise, on_invalid="mark").tolist(),
                    lanewise.verify(row, token=token, **how, **noise, on_invalid="mark"),
                    lanewise.sample_from_probs(probs, n=k, **noise, on_invalid="mark").tolist(),
                    lanewise.sample_from_probs(probs, u=u, on_invalid="mark"),
                ]
            assert repr(got) == repr(want), (isa, n, how)
