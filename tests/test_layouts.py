"""Layouts: every engine's arrays seen alike without a copy; what is said about strings and arrays that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lanewise import layouts

L, N, H, T, D, X = 3, 5, 2, 4, 16, 8
SIZES = {"L": L, "N": N, "2": 2, "H": H, "T": T, "D": D, "S": N * T, "x": X}


def numbered(axes: str, value: bool = False) -> np.ndarray:
    """An array whose every element tells where it is: layer, block, head, token, dim, and keys or values."""
    sizes = {**SIZES, "D": D // X if "x" in axes else D}
    at = dict(zip(axes, np.indices([sizes[a] for a in axes]), strict=True))
    zero = np.zeros(1, int)
    block, token = (at["S"] // T, at["S"] % T) if "S" in axes else (at["N"], at["T"])
    dim = at["D"] * X + at["x"] if "x" in axes else at["D"]
    second = at.get("2", zero + value)
    numbers = ((((second * L + at.get("L", zero)) * N + block) * H + at.get("H", zero)) * T + token) * D + dim
    return np.ascontiguousarray(numbers.astype(np.float32))


def expected(axes: str, value: bool) -> np.ndarray:
    layers, heads = L if "L" in axes else 1, H if "H" in axes else 1
    layer, block, head, token, dim = np.indices([layers, N, heads, T, D])
    return (((((int(value) * L + layer) * N + block) * H + head) * T + token) * D + dim).astype(np.float32)


def joined(view: np.ndarray) -> np.ndarray:
    return view.reshape(*view.shape[:4], -1)


ONE = ["NL2THD", "LN2THD", "LN2HTD", "N2THD", "N2HTD", "2NTHD", "2NHTD", "2LSHD", "2LSD", "2NTD", "TNLH2D"]
PAIRS = ["NHD", "HND", "NTHD", "NHTD", "SHD", "LSHD", "HSD", "NHDT", "NTD", ("NHDTx", "NHDT"), ("NHDTx", "NHTD")]


@pytest.mark.parametrize("layout", ONE)
def test_one_array_is_seen_as_keys_and_values(layout: str) -> None:
    array = numbered(layout)
    keys, values = layouts.views(array, layout, T)
    assert values is not None and len(keys) == len(values) == 1
    for view, value in ((keys[0], False), (values[0], True)):
        assert np.shares_memory(view, array)
        np.testing.assert_array_equal(view, expected(layout, value))


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_a_pair_is_seen_as_keys_and_values(layout: Any) -> None:
    axes = layouts.parse(layout)
    pair = numbered(axes[0]), numbered(axes[1], value=True)
    keys, values = layouts.views(pair, layout, T)
    assert values is not None
    for view, array, value in ((keys[0], pair[0], False), (values[0], pair[1], True)):
        assert np.shares_memory(view, array)
        np.testing.assert_array_equal(joined(view), expected(axes[value], value))


@pytest.mark.parametrize("layout", ["2NTHD", "N2HTD", "NHD", "NTD"])
def test_a_list_has_an_array_a_layer(layout: str) -> None:
    axes = layouts.parse(layout)[0]
    lists = [[numbered(axes, value) + i for i in range(L)] for value in (False, True)]
    keys, values = layouts.views(lists[0] if "2" in axes else tuple(lists), layout)
    assert values is not None
    for i in range(L):
        np.testing.assert_array_equal(keys[i], expected(axes, False) + i)
        np.testing.assert_array_equal(values[i], expected(axes, True) + i)


def test_keys_alone_have_no_values() -> None:
    keys, values = layouts.views([numbered("NTD")] * L, "NTD")
    assert len(keys) == L and values is None


def test_with_two_heads_the_layout_decides() -> None:
    """(N, 16, 2, 256) could be either: nothing is guessed (KV25)."""
    cache = np.arange(3 * 16 * 2 * 256, dtype=np.float32).reshape(3, 16, 2, 256)
    by_token = layouts.views(cache, "NHD")[0][0]
    by_head = layouts.views(cache, "HND")[0][0]
    assert by_token.shape == (1, 3, 2, 16, 256) and by_head.shape == (1, 3, 16, 2, 256)
    contiguous = np.ascontiguousarray(cache.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(layouts.views(contiguous, "HND")[0][0], by_token)


def test_scales_have_the_layouts_axes_but_the_dim() -> None:
    scales = np.zeros((N, 2, T, H, 2), np.float32)
    keys, values = layouts.scale_views(scales, "N2THD")
    assert values is not None and keys[0].shape == values[0].shape == (1, N, H, T, 2)
    keys, values = layouts.scale_views((np.zeros((N, H, T, 2)), np.zeros((N, H, T, 2))), ("NHDTx", "NHDT"))
    assert values is not None and keys[0].shape == values[0].shape == (1, N, H, T, 2)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("NTHQ", "unknown axis 'Q'"),
        ("NTHDD", "axis 'D' stands twice"),
        ("NTH", "must have the axis D"),
        ("NHD2", "either N and T"),
        ("SNTD", "either N and T"),
        ("TD", "either N and T"),
        ("NxTD", "x must be the last"),
        ("", "must have the axis D"),
        (("2NTD", "NTD"), "neither may have the axis 2"),
    ],
)
def test_layouts_that_are_none(layout: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layouts.parse(layout)


@pytest.mark.parametrize("layout", [None, 3, ("NHD",), ("NHD", 2), ["NHD", "NHD"]])
def test_layouts_of_other_types(layout: Any) -> None:
    with pytest.raises(TypeError, match="layout must be a string or two"):
        layouts.parse(layout)


@pytest.mark.parametrize(
    ("arrays", "layout", "error", "message"),
    [
        (np.zeros((2, 3, 4)), "NHD", ValueError, r"keys must have 4 axes for layout 'NHD', got shape \(2, 3, 4\)"),
        (np.zeros((5, 3, 4, 2, 8)), "2NTHD", ValueError, r"axis 2 must have 2 entries, got shape \(5, 3, 4, 2, 8\)"),
        ((1, 2, 3), "SHD", ValueError, "a pair"),
        ([], "SHD", ValueError, "at least one layer"),
        ([np.zeros((4, 2, 8))], "LSHD", ValueError, "must be one array"),
        (([np.zeros((4, 2, 8))], [np.zeros((4, 2, 8))] * 2), "SHD", ValueError, "as many layers, got 1 and 2"),
        ([np.zeros((4, 2, 8)), np.zeros((4, 2, 9))], "SHD", ValueError, r"keys\[1\] must be as keys\[0\]"),
        ([np.zeros((4, 2, 8)), np.zeros((4, 2, 8), "f4")], "SHD", ValueError, r"keys\[1\] must be as keys\[0\]"),
        (object(), "SHD", TypeError, "keys must be an array"),
    ],
)
def test_arrays_that_do_not_fit(arrays: Any, layout: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layouts.views(arrays, layout)


def test_slots_must_fill_their_blocks() -> None:
    with pytest.raises(ValueError, match="10 slots are no whole number of blocks of 4"):
        layouts.views(np.zeros((10, 2, 8)), "SHD", 4)
