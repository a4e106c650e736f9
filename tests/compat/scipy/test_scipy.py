"""lanewise.compat.scipy against scipy.special."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import special

import lanewise.compat.scipy as ours

import page

NAMES = ["softmax", "log_softmax", "logsumexp"]
INF, NAN = np.inf, np.nan
AXES: list[Any] = [None, 0, 1, 2, -1, -3, (0,), (1, 2), (2, 0), (-1, 1), (0, 1, 2), np.int64(1)]
each_name = pytest.mark.parametrize("name", NAMES)


def answer(call: Callable[[], Any]) -> Any:
    """What a call gives, or the type of what it raises. Warnings are compared by test_warnings_are_scipys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:
            return type(error)


def agree(found: Any, expected: Any, rtol: float = 1e-5) -> None:
    if isinstance(expected, tuple):
        assert isinstance(found, tuple)
        for a, b in zip(found, expected, strict=True):
            agree(a, b, rtol)
    elif isinstance(expected, type):
        assert found is expected
    else:
        assert type(found) is type(expected) and found.dtype == expected.dtype and found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)


def compare(name: str, *args: Any, rtol: float = 1e-5, **kwargs: Any) -> None:
    agree(*(answer(lambda where=where: getattr(where, name)(*args, **kwargs)) for where in (ours, special)), rtol)


def cube(dtype: Any = np.float32) -> Any:
    return (np.random.default_rng(0).normal(size=(3, 4, 5)) * 5).astype(dtype)


@each_name
def test_signatures(name: str) -> None:
    def shape(module: Any) -> list[Any]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]

    assert shape(ours) == shape(special)


@each_name
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda dtype: dtype.__name__)
def test_every_axis(name: str, axis: Any, dtype: Any) -> None:
    x = cube(dtype)
    layouts = [x, x[::-1, :, ::2], x.T, np.asfortranarray(x), np.broadcast_to(x[:1], x.shape), x[0], x[0, 0]]
    for given in layouts:  # with fewer axes, some are errors
        compare(name, given, axis=axis, rtol=1e-5 if dtype is np.float32 else 4e-3)


@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("return_sign", [False, True])
@pytest.mark.parametrize("b", [None, 2.0, np.float32([0, 1, -1, 3, 0.5])], ids=["", "b=2", "b"])
def test_logsumexp_arguments(axis: Any, keepdims: bool, return_sign: bool, b: Any) -> None:
    compare("logsumexp", cube(), axis, b, keepdims, return_sign)


ROWS = [
    list(row)
    for width in (1, 2, 3)
    for row in itertools.product([0.0, -INF, INF, NAN, -100.0, 100.0, 3e38, -3e38], repeat=width)
]


@each_name
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64], ids=lambda dtype: dtype.__name__)
def test_infinities_and_nans(name: str, dtype: Any) -> None:
    for row in ROWS:
        with np.errstate(over="ignore"):
            x = np.array(row, dtype)
        compare(name, x)
        compare(name, np.stack([np.zeros_like(x), x]), axis=-1)
        if name == "logsumexp":
            compare(name, x, return_sign=True)
            compare(name, x, keepdims=True, return_sign=True, b=0)


@each_name
@pytest.mark.parametrize(
    "x",
    [
        [1, 2, 3],
        3.0,
        np.float32(2),
        np.array(2.0, np.float32),
        np.arange(6).reshape(2, 3),
        np.array([True, False]),
        np.array([1 + 2j, 3 - 1j]),
        np.array([1 + 2j, 3 - 1j], np.complex64),
        np.array([1.0, 2.0], ">f4"),
        np.array([1.0, 2.0], np.longdouble),
        np.zeros((0,), np.float32),
        np.zeros((0, 3), np.float32),
        np.zeros((3, 0), np.float32),
        np.ma.array([1.0, 2.0], mask=[False, True], dtype=np.float32),
        np.array(["a"]),
        np.array([1.0, None], object),
        None,
    ],
    ids=repr,
)
def test_whatever_else_is_given(name: str, x: Any) -> None:
    for axis in (None, 0, 1, -1):
        compare(name, x, axis=axis)


@each_name
@pytest.mark.parametrize("axis", [3, -4, (0, 0), (0, -3), (), "0", 1.0, [0], [0, 1], (0, None), True], ids=repr)
def test_axes_that_are_wrong(name: str, axis: Any) -> None:
    compare(name, cube(), axis=axis)


@each_name
@pytest.mark.parametrize("row", [[1.0, 2.0], [NAN, 0.0], [INF, 0.0], [-INF, -INF], [-INF, 0.0]], ids=str)
def test_warnings_are_scipys(name: str, row: list[float]) -> None:
    seen = []
    for where in (ours, special):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(where, name)(np.array(row, np.float32))
        seen.append([(each.category, str(each.message)) for each in caught])
    assert seen[0] == seen[1]


def test_float64_is_scipys_bit_for_bit() -> None:
    x = cube(np.float64)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(ours, name)(x, 1), getattr(special, name)(x, 1))


def test_float32_is_lanewises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("SciPy was called")

    expected = special.softmax(cube(), 1)
    for name in NAMES:
        monkeypatch.setattr(special, name, refuse)
    assert not np.array_equal(ours.softmax(cube(), 1), expected)  # rounded elsewhere
    ours.log_softmax(cube()), ours.logsumexp(cube(np.float16), (0, 1), return_sign=True)
    with pytest.raises(AssertionError):
        ours.softmax(cube(np.float64))


def test_the_input_stays_as_it_is() -> None:
    x = cube()
    x.flags.writeable = False
    result = ours.softmax(x)
    assert result.flags.writeable and not np.shares_memory(result, x)


def test_a_float16_sum_does_not_overflow() -> None:
    x = np.zeros(100_000, np.float16)
    assert ours.logsumexp(x) == np.float16(np.log(100_000))
    assert ours.softmax(x)[0] == np.float16(1e-5)


def test_without_scipy_an_error_says_what_is_needed() -> None:
    code = "import sys; sys.modules['scipy'] = None\nimport lanewise\nimport lanewise.compat.scipy"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: scipy 1.15 and later is needed" in ran.stderr


def test_the_page() -> None:
    page.run_section("scipy")


def test_the_example() -> None:
    page.run_example("scipy_special")
