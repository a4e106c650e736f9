"""The single steps: any blocks give attention and its statistics, and a cut keeps what crosses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lanewise
from lanewise import reference


@pytest.mark.parametrize("order", [1, -1])
def test_blocks_in_steps_are_attention_though_the_maximum_moves(order: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 32), (90, 2, 32), (90, 2, 16)))
    k = (k * np.linspace(0.1, 6, 90)[::order, None, None]).astype(np.float32)  # ever larger scores, or ever smaller
    state = None
    for first, end in ((0, 1), (1, 18), (18, 50), (50, 90)):
        state = lanewise.attention_step(q, k[first:end], v[first:end], state)
    want, sums = reference.attention(q[None], k, v)
    np.testing.assert_allclose(state[0], want[0], rtol=4e-6, atol=4e-6)
    np.testing.assert_allclose(state[1], sums[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("order", [1, -1])
def test_statistics_of_blocks_are_those_of_the_row(order: int) -> None:
    row = (np.random.default_rng(1).standard_normal((3, 5000)) * np.linspace(1, 40, 5000)[::order]).astype(np.float32)
    state = None
    for first, end in ((0, 1), (1, 700), (700, 4900), (4900, 5000)):
        state = lanewise.softmax_stats(row[:, first:end], state)
    m, total = state
    want, sums = reference.softmax_stats(row)
    assert m.tolist() == want.tolist() == row.max(1).tolist()
    np.testing.assert_allclose(total, sums, rtol=4e-6)
    np.testing.assert_allclose(m + np.log(total), lanewise.logsumexp(row), rtol=1e-6)


def test_statistics_in_place_and_of_what_is_no_number() -> None:
    rows = np.float32([[1, -np.inf], [-np.inf, -np.inf], [0, np.inf], [0, np.nan]])
    state = np.full(4, -np.inf, np.float32), np.full(4, np.nan)  # there was nothing: what l says does not matter
    assert lanewise.softmax_stats(rows, state, out=state) is state
    np.testing.assert_array_equal(state[0], np.float32([1, -np.inf, np.inf, np.nan]))
    np.testing.assert_array_equal(state[1], [1, 0, np.nan, np.nan])
    again = lanewise.softmax_stats(np.float32([[0.0]] * 4), state)  # what is none stays none
    np.testing.assert_array_equal(again[0], np.float32([1, 0, np.inf, np.nan]))
    np.testing.assert_allclose(again[1], [1 + np.exp(-1), 1, np.nan, np.nan], rtol=1e-6)
    m, total = lanewise.softmax_stats([-np.inf, -np.inf])
    assert (type(m), type(total), m, total) == (np.float32, np.float64, -np.inf, 0)


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        (np.zeros(2), TypeError, "state must be a pair"),
        ((0.0, 1.0), ValueError, r"state\[0\] must have shape \(2,\)"),
        (([0, 0], [1]), ValueError, r"state\[1\] must have shape \(2,\)"),
        (([0, 0], [1, -2]), ValueError, r"state\[1\]\[1\] must be a sum of exponentials, 0 or more.*got -2.0"),
        (([0, 0], [np.inf, 1]), ValueError, r"state\[1\]\[0\].*got inf"),
        (([0j, 0], [1, 1]), TypeError, r"state\[0\] must be numbers"),
    ],
)
def test_states_that_are_none(state: object, error: type[Exception], said: str) -> None:
    out = np.zeros(2, np.float32), np.zeros(2)
    with pytest.raises(error, match=said):
        lanewise.softmax_stats(np.ones((2, 3), np.float32), state, out=out)
    assert not out[0].any() and not out[1].any()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(0, 60))
def test_the_one_that_crosses_is_kept(weights: list[int], share: int) -> None:
    row = np.sort(np.array(weights))[::-1] / 64  # exact sums
    kept, p = lanewise.prefix_cut(row, share / 64), share / 64
    assert kept == 1 or row[: kept - 1].sum() < p
    assert kept == row.size or row[:kept].sum() >= p


@pytest.mark.parametrize("bad", [[], [0.2, 0.3], [0.5, np.nan], [0.5, -0.1], [[0.5]]])
def test_bad_lists(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="probs"):
        lanewise.prefix_cut(bad, 0.5)


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match="axes"):
        lanewise.attention_step(np.zeros(4), np.zeros((1, 1, 4)), np.zeros((1, 1, 4)))
