"""The words of the arithmetic over all their values: exp over every float, every half, log and its order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from lanewise import _ops

LEAST, MOST = np.float32(-87.33), np.float32(88.7)


def exp32(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    _ops.run_rows("exp32", x, out)
    return out


def log64(x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    _ops.run_rows("log64", x, out)
    return out


def bits(x: np.float32) -> int:
    return int(x.view(np.uint32))


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """|got - want| in units of the last place of want, got being the narrower type."""
    digits = np.finfo(got.dtype).nmant
    _, exponent = np.frexp(want)
    return np.abs(got.astype(want.dtype) - want) / np.ldexp(want.dtype.type(1), exponent - 1 - digits)


def floats(first: int, last: int, step: int = 1) -> np.ndarray:
    return np.arange(first, last + 1, step, dtype=np.uint32).view(np.float32)


def check_exp(x: np.ndarray) -> float:
    """Ascending x: that exp ascends, and its worst error in ULP."""
    e = exp32(x)
    assert (np.diff(e) >= 0).all()
    return float(ulps(e, np.exp(x.astype(np.float64))).max())


def test_exp_is_monotone_and_close_at_a_sample(isa: str) -> None:
    step = 100003
    negative = floats(bits(np.float32(-0.0)), bits(LEAST), step)[::-1]
    positive = floats(0, bits(MOST), step)
    assert max(check_exp(negative), check_exp(positive)) < 1.02
    assert exp32(np.float32([0, -0.0])).tolist() == [1, 1]


def test_exp_is_zero_below_its_range(isa: str) -> None:
    below = floats(bits(np.nextafter(LEAST, np.float32(-np.inf))), bits(np.float32(-np.inf)), 10007)
    assert not exp32(below).any()
    assert not exp32(np.float32([np.nan, -np.inf])).any()
    assert exp32(np.float32([LEAST]))[0] > 0


def rough_share(x: np.ndarray) -> float:
    rough = np.empty_like(x)
    _ops.run_rows("exp_rough", x, rough)
    return float(np.max(np.abs(rough / exp32(x).astype(np.float64) - 1)))


def test_rough_exp_is_within_its_share(isa: str) -> None:
    x = -np.concatenate([np.linspace(0, 87, 300_000), np.geomspace(1e-30, 87, 300_000)]).astype(np.float32)
    assert 0.03 < rough_share(x) < 0.031  # what bounds on masses allow for: ROUGH_SHARE


@pytest.mark.slow
def test_rough_exp_of_every_float() -> None:
    first, last, size = bits(np.float32(-0.0)), bits(np.float32(-87.0)), 1 << 22
    for start in range(first, last + 1, size):
        assert rough_share(floats(start, min(start + size, last))) < 0.031


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "last", "falling"), [(bits(np.float32(-0.0)), bits(LEAST), True), (0, bits(MOST), False)]
)
def test_exp_of_every_float(first: int, last: int, falling: bool) -> None:
    worst, size = 0.0, 1 << 22
    for start in range(first, last + 1, size):
        x = floats(start, min(start + size, last))  # one value more, so that the seams are compared too
        worst = max(worst, check_exp(x[::-1] if falling else x))
    assert worst < 1.02


@pytest.mark.slow
def test_exp_of_every_float_below_is_zero() -> None:
    first, last, size = bits(np.nextafter(LEAST, np.float32(-np.inf))), bits(np.float32(-np.inf)), 1 << 22
    for start in range(first, last + 1, size):
        assert not exp32(floats(start, min(start + size, last))).any()


@pytest.mark.parametrize(
    ("name", "dtype", "code"), [("float16", np.dtype(np.float16), 1), ("bfloat16", np.dtype(ml_dtypes.bfloat16), 2)]
)
def test_every_half_widens_exactly(name: str, dtype: np.dtype, code: int, isa: str) -> None:
    x = np.arange(65536, dtype=np.uint16).view(dtype)
    out = np.empty(65536, np.float32)
    _ops.run_rows("widen", x, out, dtype=code)
    with np.errstate(invalid="ignore"):
        want = x.astype(np.float32)
    nan = np.isnan(want)
    assert (out[~nan].view(np.uint32) == want[~nan].view(np.uint32)).all()
    assert nan.any() and (out[nan].view(np.uint32) == 0x7FC00000).all()


def test_log_is_close(isa: str) -> None:
    x = np.exp(np.random.default_rng(0).uniform(-745, 709, 100000))
    x = np.concatenate([x[x > 1e-307], 1 + np.random.default_rng(1).standard_normal(10000) * 1e-9])
    assert ulps(log64(x), np.log(x.astype(np.longdouble))).max() < 1
    assert log64(np.array([1.0]))[0] == 0


def neighbours(x: np.ndarray, count: int) -> np.ndarray:
    """Every x with its next `count` doubles, as rows."""
    return (x.view(np.uint64)[:, None] + np.arange(count, dtype=np.uint64)).view(np.float64)


def test_log_is_monotone_from_one_double_to_the_next(isa: str) -> None:
    rng = np.random.default_rng(0)
    binades = 2.0 ** np.arange(-1020, 1020)
    edges = np.concatenate([binades, binades * np.sqrt(0.5), binades * np.sqrt(2)])
    starts = np.concatenate([edges * (1 - 2.0**-49), np.exp(rng.uniform(-700, 700, 5000)), rng.uniform(0.5, 2, 5000)])
    rows = neighbours(starts, 32)
    assert (np.diff(log64(rows.reshape(-1)).reshape(rows.shape), axis=1) >= 0).all()


@pytest.mark.slow
def test_log_of_every_float_is_monotone() -> None:
    first, last, size = bits(np.finfo(np.float32).tiny), bits(np.finfo(np.float32).max), 1 << 22
    for start in range(first, last + 1, size):
        x = floats(start, min(start + size, last)).astype(np.float64)
        y = log64(x)
        assert (np.diff(y) > 0).all()
        assert ulps(y, np.log(x)).max() <= 2
