"""logprobs beyond its Case: log_softmax's bits, what is asked, shapes, errors, entropy's bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lanewise
from lanewise import reference

from cases import ANY, DTYPES, rows

SIZES = (1, 65, 4099, 40001)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_bits_are_those_of_log_softmax(n: int, dtype: str, isa: str) -> None:
    rng = np.random.default_rng(n)
    x = rows(ANY)(rng, n, DTYPES[dtype])
    count = len(x)
    tokens, ids = rng.integers(n, size=count), rng.integers(n, size=(count, 5))
    for temperature in (1.0, 0.7, 0.0, [0.0, 1.0, 0.1, 2.0, 1e31, 1e-30, 5.0, 0.5, 1.0, 3.0][:count]):
        want = lanewise.log_softmax(x, temperature=temperature)
        for entropy in (False, True):
            got = lanewise.logprobs(x, tokens, ids=ids, top_n=min(n, 3), temperature=temperature, entropy=entropy)
            assert got.chosen.tobytes() == want[np.arange(count), tokens].tobytes()
            assert got.given.tobytes() == np.take_along_axis(want, ids, 1).tobytes()
            top = np.take_along_axis(want, np.maximum(got.top_ids, 0), 1)
            assert got.top_logprobs.tobytes() == top.tobytes()


def test_processed_is_the_edited_row_scored() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5000)).astype(np.float32)
    x[1, 7] = np.nan
    edits: dict[str, Any] = {
        "repetition_penalty": [1.0, 1.5, 0.5],
        "frequency_penalty": 0.25,
        "prompt_ids": [[1, 2], [], [4999]],
        "output_ids": [[2, 2, 3], [0], [7]],
        "bias": [None, {5: 2.0}, {6: -np.inf}],
        "mask": np.arange(5000) != 7,
    }
    rows_of = [
        reference.processed(
            x[r],
            repetition_penalty=edits["repetition_penalty"][r],
            frequency_penalty=0.25,
            prompt_ids=edits["prompt_ids"][r],
            output_ids=edits["output_ids"][r],
            bias=edits["bias"][r],
            mask=edits["mask"],
        )
        for r in range(3)
    ]
    got = lanewise.logprobs(x, [2, 5, 6], top_n=30, entropy=True, temperature=0.8, **edits)
    want = lanewise.logprobs(np.stack(rows_of), [2, 5, 6], top_n=30, entropy=True, temperature=0.8)
    for a, b in zip(got, want, strict=True):
        assert (a is None and b is None) or a.tobytes() == b.tobytes()
    assert got.chosen[2] == -np.inf and not np.isnan(got.entropy).any()


def test_only_what_is_asked_is_given() -> None:
    x = np.float32([[1, 2, 3]])
    asks: dict[str, Any] = {"tokens": [1], "top_n": 2, "ids": [0, 2], "entropy": True}
    gives = {
        "tokens": {"chosen", "rank"},
        "top_n": {"top_ids", "top_logprobs"},
        "ids": {"given"},
        "entropy": {"entropy"},
    }
    everything = lanewise.logprobs(x, **asks)
    for name, value in asks.items():
        found = lanewise.logprobs(x, **{name: value})._asdict()
        assert {field for field, array in found.items() if array is not None} == gives[name]
        for field in gives[name]:
            assert found[field].tobytes() == getattr(everything, field).tobytes()
    with pytest.raises(ValueError, match="nothing is asked for"):
        lanewise.logprobs(x, temperature=0.5)


def test_a_single_row_gives_numbers() -> None:
    found = lanewise.logprobs(np.float32([1, 2, 3]), 1, top_n=2, ids=[0], entropy=True)
    assert (type(found.chosen), type(found.rank), type(found.entropy)) == (float, int, float)
    assert (found.top_ids.shape, found.top_logprobs.shape, found.given.shape) == ((2,), (2,), (1,))
    assert lanewise.logprobs(np.float32([1, 2, 3]), np.int32(1)).chosen == found.chosen
    out = lanewise.Logprobs(np.empty((), np.float32), np.empty((), np.int64), None, None, None, None)
    assert lanewise.logprobs(np.float32([1, 2, 3]), 1, out=out) is out
    assert out.chosen == found.chosen and out.rank == found.rank


def test_minus_one_is_nobody() -> None:
    found = lanewise.logprobs(np.zeros((2, 4), np.float32), [-1, 2], ids=[[1, -1], [-1, -1]])
    assert np.isnan(found.chosen).tolist() == [True, False] and found.rank.tolist() == [0, 1]
    assert np.isnan(found.given).tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, None])
def test_a_row_without_probabilities_is_marked_and_touches_no_other(bad: float | None, isa: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 9000)).astype(np.float32)
    if bad is None:
        x[1] = -np.inf
    else:
        x[1, 8000] = bad
    for temperature in (1.0, 0.0):
        found = lanewise.logprobs(x, [5, 6, 7], top_n=3, ids=[1, 2], entropy=True, temperature=temperature)
        for name, array in found._asdict().items():
            if array.dtype == np.int64:
                assert (array[1] == (0 if name == "rank" else -1)).all()
                assert (array[[0, 2]] >= 0).all()
            else:
                assert (array[1:2].view(np.uint32) == 0x7FC00000).all()
                assert not np.isnan(array[[0, 2]]).any()


def test_out_of_any_layout() -> None:
    x = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    want = lanewise.logprobs(x, [1, 2, 3, 4], top_n=3)
    room = np.zeros((4, 8), np.float32)
    out = lanewise.Logprobs(x[:, 0], np.zeros(8, np.int64)[::2], np.zeros((3, 4), np.int64).T, room[:, 1:4], None, None)
    assert lanewise.logprobs(x, [1, 2, 3, 4], top_n=3, out=out) is out
    for a, b in zip(want[:4], out[:4], strict=True):
        assert a.tobytes() == np.ascontiguousarray(b).tobytes()
    assert (room[:, [0, 4, 5, 6, 7]] == 0).all()


ROWS = np.zeros((2, 10), np.float32)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, r"tokens\[1\] is 10, not an id in 0\.\.9", {"tokens": [0, 10]}),
        (ValueError, r"tokens\[0\] is -2", {"tokens": [-2, 0]}),
        (ValueError, rf"tokens\[1\] is {2**63}", {"tokens": np.array([0, 2**63], np.uint64)}),
        (ValueError, r"ids\[1\]\[0\] is 11", {"ids": [[0], [11]]}),
        (ValueError, r"ids\[2\] is 10", {"ids": [0, 1, 10]}),
        (ValueError, r"tokens must have shape \(2,\), got \(3,\)", {"tokens": [0, 1, 2]}),
        (ValueError, r"tokens must have shape \(2,\), got \(\)", {"tokens": 3}),
        (ValueError, r"ids must have shape \(2, 1\) or \(1,\), got \(3, 1\)", {"ids": [[0], [1], [2]]}),
        (TypeError, "tokens must be integers, got float64", {"tokens": [0.0, 1.0]}),
        (TypeError, "ids must be integers, got bool", {"ids": [True]}),
        (ValueError, r"top_n must be in \[0, 10\], got 11", {"top_n": 11}),
        (ValueError, r"top_n must be in \[0, 10\], got -1", {"top_n": -1}),
        (ValueError, r"temperature.* -1", {"top_n": 1, "temperature": -1.0}),
        (ValueError, r"tokens\[0\] is 7, not an id in 0\.\.4", {"tokens": [7, 0], "vocab_size": 5}),
        (TypeError, "out must be a Logprobs, got ndarray", {"top_n": 1, "out": np.zeros(2)}),
        (ValueError, "out.top_ids must be an array", {"top_n": 1, "out": lanewise.Logprobs(*[None] * 6)}),
        (
            ValueError,
            "out.chosen must be None",
            {"entropy": True, "out": lanewise.Logprobs(np.zeros(2, np.float32), *[None] * 5)},
        ),
        (
            TypeError,
            "out.entropy must be float32",
            {"entropy": True, "out": lanewise.Logprobs(None, None, None, None, None, np.zeros(2))},
        ),
    ],
)
def test_errors_name_argument_row_and_value(error: type[Exception], match: str, call: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        lanewise.logprobs(ROWS, **call)


@pytest.mark.parametrize("bad", [10, -2, 2**70])
def test_a_single_token_out_of_range_is_named(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"tokens .*{bad}"):
        lanewise.logprobs(ROWS[0], bad)


def test_vocab_size_cuts_the_row() -> None:
    x = np.float32([[1, 2, 3, 100], [3, 2, 1, np.nan]])
    found = lanewise.logprobs(x, [0, 0], top_n=3, entropy=True, vocab_size=3)
    want = lanewise.logprobs(x[:, :3].copy(), [0, 0], top_n=3, entropy=True)
    assert all(a is b is None or a.tobytes() == b.tobytes() for a, b in zip(found, want, strict=True))


def test_rank_counts_every_block() -> None:
    for n in (63, 64, 65, 4096, 4097, 9001):
        row = np.random.default_rng(n).permutation(n).astype(np.float32)
        for value in (0, n // 2, n - 1):
            assert lanewise.logprobs(row, int(np.flatnonzero(row == value)[0])).rank == n - value


@pytest.mark.parametrize("n", [64, 4096, 50000])
def test_entropy_keeps_its_bound_where_sums_round_one_way(n: int) -> None:
    """A peak over a body of equal logits: every addition of a block rounds in the same direction."""
    rng = np.random.default_rng(n)
    for _ in range(30):
        row = np.zeros(n, np.float32)
        row[rng.integers(n)] = np.log(n) + rng.normal(0, 3)
        for temperature in (1.0, 0.7):
            want = reference.score(row, temperature=temperature)["entropy"]
            got = lanewise.logprobs(row, entropy=True, temperature=temperature).entropy
            assert abs(got - want) <= 2.0**-24 * (80 + 80 * want)
