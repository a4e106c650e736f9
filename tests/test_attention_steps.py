"""The single steps: any blocks give attention, and a cut keeps what crosses."""

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
