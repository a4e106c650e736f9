"""Moves of whole blocks: as NumPy has them, as if at once, of any layout; and what is refused before it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lanewise
from lanewise import _dispatch, _ops, moves, reference

STRUCTURED = np.dtype([("scale", "f4"), ("codes", "i1", 3)])
DTYPES = (np.int8, np.float32, np.complex128, ml_dtypes.bfloat16, STRUCTURED, "S5", "M8[s]")


def filled(shape: tuple[int, ...], dtype: Any = np.uint8, seed: int = 0) -> np.ndarray:
    """Any bytes at all."""
    dtype = np.dtype(dtype)
    data = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return data.view(dtype).reshape(shape)


def assert_equal(got: np.ndarray, want: np.ndarray) -> None:
    """Bit for bit, NaNs too."""
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == want.tobytes()


@pytest.fixture(params=["streamed", "cached", "threads"])
def way(request: pytest.FixtureRequest) -> Any:
    """Around the caches, through them, and shared among threads."""
    lanewise.set_stream_threshold(0 if request.param == "streamed" else 1 << 62)
    if request.param == "threads":
        _ops.set_crossover(0)
        lanewise.set_num_threads(3)
    yield request.param
    lanewise.set_stream_threshold(None)
    lanewise.set_num_threads(None)
    _ops.set_crossover(None)


def layouts(shape: tuple[int, ...]) -> list[np.ndarray]:
    """One shape in memory as arrays and their views have it."""
    wide = filled((*shape[:-1], 2 * shape[-1]))
    return [
        filled(shape),
        filled(shape[::-1]).T,
        wide[..., ::2],
        wide[..., : shape[-1]],
        wide[..., shape[-1] - 1 :: -1],
        filled((shape[0] * 3, *shape[1:]))[::-3],
        filled((*shape, 1)).transpose(1, 0, *range(2, len(shape) + 1))[..., 0].swapaxes(0, 1),
    ]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_every_layout_and_axis(axis: int, way: str) -> None:
    rng = np.random.default_rng(1)
    for pool, other in product(layouts((6, 5, 7)), layouts((6, 5, 7))):
        count = pool.shape[axis]
        ids = rng.integers(0, count, count)
        before = pool.copy()
        got = lanewise.gather_blocks(pool, ids, axis=axis)
        assert got.flags.c_contiguous
        assert_equal(got, np.take(before, ids, axis))
        assert lanewise.gather_blocks(pool, ids, axis=axis, out=other) is other
        assert_equal(other.copy(), np.take(before, ids, axis))
        order = rng.permutation(count)
        lanewise.scatter_blocks(pool, order, other, axis=axis)
        assert_equal(np.take(other, order, axis), pool.copy())
        lanewise.permute_blocks(other, order, axis=axis)
        assert_equal(other.copy(), pool.copy())
        assert_equal(pool.copy(), before)
        lanewise.zero_blocks(other, order[:2], axis=axis)
        assert not np.take(other, order[:2], axis).any()
        assert_equal(np.take(other, order[2:], axis), np.take(pool, order[2:], axis))
        lanewise.zero_blocks(other, axis=axis)
        assert not other.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids", [np.int8, np.uint16, np.int32, ">i4", np.int64, np.uint64, list], ids=str)
def test_every_dtype(dtype: Any, ids: Any) -> None:
    pool, chosen = filled((9, 3, 5), dtype), [8, 0, 0, 3]
    given = chosen if ids is list else np.array(chosen, ids)
    assert_equal(lanewise.gather_blocks(pool, given), pool[chosen])
    distinct, target = given[1:2], pool.copy()
    lanewise.scatter_blocks(pool[4:5], distinct, target)
    assert_equal(target[0], pool[4])
    assert_equal(target[1:], pool[1:])


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 511, 512, 513, 1000, 4096, 70001])
@pytest.mark.parametrize("isa", _dispatch.runnable())
def test_every_size_and_alignment(size: int, isa: str, way: str) -> None:
    memory, taken = filled((8 * size + 70,)), filled((5 * size + 200,), seed=1)
    ids = [1, 2, 3, 7, 0]
    with lanewise.using(isa):
        for at in (0, 1, 33):
            pool, out, whole = memory[at : at + 8 * size].reshape(8, size), taken[at : at + 5 * size], taken.copy()
            lanewise.gather_blocks(pool, ids, out=out.reshape(5, size))
            assert_equal(out.reshape(5, size), pool[ids])
            assert_equal(taken[:at], whole[:at])
            assert_equal(taken[at + 5 * size :], whole[at + 5 * size :])
            lanewise.zero_blocks(out.reshape(5, size), [0, 1, 4])
            assert_equal(out.reshape(5, size), pool[ids] * np.uint8([[0], [0], [1], [1], [0]]))
            assert_equal(taken[at + 5 * size :], whole[at + 5 * size :])


# ---- as if at once ----


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    count = draw(st.integers(1, 12))
    targets = draw(st.lists(st.integers(0, count - 1), unique=True))
    return count, [(draw(st.integers(0, count - 1)), target) for target in targets]


@given(copies(), st.sampled_from([1, 3, 600]), st.booleans())
def test_copies_count_as_made_at_once(case: tuple[int, list[tuple[int, int]]], size: int, shared: bool) -> None:
    count, pairs = case
    _ops.set_crossover(0 if shared else None)
    try:
        for axis, shape in ((0, (count, size)), (1, (3, count, size))):
            pool = filled(shape)
            want = reference.move_blocks(pool, pool, pairs, axis)
            twin, third = pool.copy(), pool.copy()
            lanewise.swap_blocks(pool, pool, pairs, axis=axis)
            lanewise.copy_blocks([twin, third], pairs, axis=axis)
            for got in (pool, twin, third):
                assert_equal(got, want)
    finally:
        _ops.set_crossover(None)


@given(st.data())
def test_views_of_one_memory_count_as_moved_at_once(data: st.DataObject) -> None:
    """Shifted by blocks, by parts of one, by layers, turned round: all is read before any of it is written."""
    count, layers, size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    stack = filled((layers + 2, count * 2, size))

    def view(memory: np.ndarray, layer: int, first: int, step: int) -> np.ndarray:
        return memory[layer : layer + layers, first : first + count * abs(step)][:, ::step]

    places = [(data.draw(st.integers(0, 2)), data.draw(st.integers(0, count)), 1) for _ in range(2)]
    places = [place if data.draw(st.booleans()) else (place[0], 0, data.draw(st.sampled_from([2, -2, -1])))
              for place in places]  # fmt: skip
    targets = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    pairs = [(data.draw(st.integers(0, count - 1)), target) for target in targets]
    want = stack.copy()
    source, target = view(want, *places[0]), view(want, *places[1])
    target[...] = reference.move_blocks(source, target, pairs, 1)
    lanewise.swap_blocks(view(stack, *places[0]), view(stack, *places[1]), pairs, axis=1)
    assert_equal(stack, want)


@given(st.integers(2, 30), st.integers(-8, 8), st.data())
def test_gather_and_scatter_within_one_memory(count: int, shift: int, data: st.DataObject) -> None:
    memory = filled((count * 8 + 16,))
    ids = data.draw(st.lists(st.integers(0, count - 1), max_size=count, unique=True))
    pool, rows = slice(8, 8 + count * 8), slice(8 + shift, 8 + shift + len(ids) * 8)
    for kind in ("gather", "scatter"):
        got, want = memory.copy(), memory.copy()
        if kind == "gather":
            want[rows] = memory[pool].reshape(count, 8)[ids].ravel()
            lanewise.gather_blocks(got[pool].reshape(count, 8), ids, out=got[rows].reshape(-1, 8))
        else:
            want[pool].reshape(count, 8)[ids] = memory[rows].reshape(-1, 8)
            lanewise.scatter_blocks(got[rows].reshape(-1, 8), ids, got[pool].reshape(count, 8))
        assert_equal(got, want)


def test_a_long_rotation_and_a_long_chain(way: str) -> None:
    pool = filled((5000, 3))
    want = np.roll(pool, 1, 0)
    lanewise.permute_blocks(pool, np.roll(np.arange(5000), 1))
    assert_equal(pool, want)
    lanewise.copy_blocks(pool, [(i, i + 1) for i in range(4999)])
    assert_equal(pool[1:], want[:-1])


def test_keys_and_values_in_one_array_are_apart() -> None:
    both = filled((6, 2, 4, 3))
    want = both.copy()
    want[[1, 5], 1] = both[[3, 0], 0]
    lanewise.swap_blocks(both[:, 0], both[:, 1], [(3, 1), (0, 5)])
    assert_equal(both, want)


def test_nothing_to_move() -> None:
    for pool in (filled((0, 3)), filled((3, 0)), filled((3, 2))):
        before = pool.copy()
        assert lanewise.gather_blocks(pool, []).shape == (0, *pool.shape[1:])
        lanewise.scatter_blocks(pool[:0], [], pool)
        lanewise.copy_blocks(pool, [])
        lanewise.copy_blocks([], [])
        lanewise.swap_blocks(pool, pool, np.empty((0, 2), np.int32))
        lanewise.permute_blocks(pool, np.arange(len(pool)))
        lanewise.zero_blocks(pool, [])
        assert_equal(pool, before)
        lanewise.zero_blocks(pool)
        assert not pool.any()


# ---- what is refused ----


def refusals() -> list[tuple[Callable[[np.ndarray], object], type[Exception], str]]:
    gather, scatter, copy, swap = (
        lanewise.gather_blocks,
        lanewise.scatter_blocks,
        lanewise.copy_blocks,
        lanewise.swap_blocks,
    )
    return [
        (lambda p: gather(p, [0, 4]), ValueError, r"ids\[1\] is 4; pool has the blocks 0 to 3"),
        (lambda p: gather(p, [-1]), ValueError, r"ids\[0\] is -1"),
        (lambda p: gather(p, np.uint64([2**64 - 1])), ValueError, "ids has a 18446744073709551615"),
        (lambda p: gather(p, [0.5]), TypeError, "ids must be integers, got float64"),
        (lambda p: gather(p, [True]), TypeError, "ids must be integers, got bool"),
        (lambda p: gather(p, [[0]]), ValueError, r"ids must have shape \(M,\), got \(1, 1\)"),
        (lambda p: gather(p, 2), ValueError, r"ids must have shape \(M,\), got \(\)"),
        (lambda p: gather(p[:0], [0]), ValueError, "ids must be empty: pool has no blocks"),
        (lambda p: gather(p, [0], axis=2), ValueError, r"axis must be in \[-2, 1\] for pool of shape \(4, 3\), got 2"),
        (lambda p: gather(p[0, 0], [0]), ValueError, "pool must have at least one axis"),
        (lambda p: gather(np.array([None]), [0]), TypeError, "pool must not have Python objects in it"),
        (lambda p: gather(p, [0], out=np.zeros((1, 3), np.int8)), TypeError, "out must be uint8 as pool is, got int8"),
        (lambda p: gather(p, [0], out=p[:2]), ValueError, "out must have 1 blocks"),
        (lambda p: gather(p, [0], out=p[:1, :2]), ValueError, r"out must have the shape of pool but along axis 0"),
        (lambda p: gather(p, [0], out=[[1, 2, 3]]), TypeError, "out must be an array, got list"),
        (lambda p: gather(p, [0], out=np.broadcast_to(p[:1], (1, 3))), ValueError, "out is read-only"),
        (lambda p: scatter(p[:2], [1, 1], p), ValueError, r"ids\[0\] and ids\[1\] are both 1: a block can be written"),
        (lambda p: scatter(p[:3], [0, 1], p), ValueError, "blocks must have 2 blocks"),
        (lambda p: scatter(p[:1], [4], p), ValueError, r"ids\[0\] is 4; pool has the blocks 0 to 3"),
        (lambda p: scatter(p[:1], [0], p.tolist()), TypeError, "pool must be an array, got list"),
        (lambda p: copy(p, [(0, 1), (2, 1)]), ValueError, r"pairs\[0, 1\] and pairs\[1, 1\] are both 1"),
        (lambda p: copy(p, [(0, 1), (9, 2)]), ValueError, r"pairs\[1, 0\] is 9; pool has the blocks 0 to 3"),
        (
            lambda p: copy([p, p[:2].copy()], [(0, 2)]),
            ValueError,
            r"pairs\[0, 1\] is 2; pool\[1\] has the blocks 0 to 1",
        ),
        (lambda p: copy([p, p], [(0, 1)]), ValueError, r"pool\[0\] and pool\[1\] are the same memory"),
        (lambda p: copy(p, [0, 1]), ValueError, r"pairs must have shape \(M, 2\), got \(2,\)"),
        (lambda p: swap(p, p[:2], [(0, 1), (3, 511)]), ValueError, r"pairs\[1, 1\] is 511; dst has the blocks 0 to 1"),
        (lambda p: swap(p, p, [(2**40, 0)]), ValueError, r"pairs\[0, 0\] is 1099511627776; src has"),
        (lambda p: swap(p, p, [(0, 2**32)]), ValueError, r"pairs\[0, 1\] is 4294967296; dst has"),
        (lambda p: lanewise.permute_blocks(p, [0, 1, 2]), ValueError, "order must have one id a block: 4, got 3"),
        (lambda p: lanewise.permute_blocks(p, [0, 1, 2, 0]), ValueError, r"order\[0\] and order\[3\] are both 0"),
        (lambda p: lanewise.zero_blocks(p, [0, -2]), ValueError, r"ids\[1\] is -2"),
        (
            lambda p: copy(np.lib.stride_tricks.as_strided(p, (3, 4), (3, 1)), [(0, 1)]),
            ValueError,
            "pool has blocks that overlap one another in memory",
        ),
    ]


@pytest.mark.parametrize(("call", "error", "message"), refusals())
def test_refused_before_anything_is_written(call: Callable[..., Any], error: type[Exception], message: str) -> None:
    pool = filled((4, 3))
    before = pool.copy()
    with pytest.raises(error, match=message):
        call(pool)
    assert_equal(pool, before)


@pytest.mark.parametrize("name", ["scatter", "copy", "swap", "permute", "zero"])
def test_read_only_pools_stay_as_they_are(name: str) -> None:
    pool = filled((4, 3))
    pool.flags.writeable = False
    calls = {
        "scatter": lambda: lanewise.scatter_blocks(filled((1, 3)), [0], pool),
        "copy": lambda: lanewise.copy_blocks(pool, [(0, 1)]),
        "swap": lambda: lanewise.swap_blocks(filled((1, 3)), pool, [(0, 1)]),
        "permute": lambda: lanewise.permute_blocks(pool, [1, 0, 2, 3]),
        "zero": lambda: lanewise.zero_blocks(pool),
    }
    with pytest.raises(ValueError, match="is read-only"):
        calls[name]()


# ---- the rest ----


def test_addresses() -> None:
    source, target = filled((100,)), np.zeros(100, np.uint8)
    at, to = source.ctypes.data, target.ctypes.data
    moves.copy_addresses([at, at + 10, at + 50], [to + 1, to + 11, to + 90], [10, 20, 3])
    want = np.zeros(100, np.uint8)
    want[1:31], want[90:93] = source[:30], source[50:53]
    assert_equal(target, want)
    with pytest.raises(ValueError, match="must be as many, got 1, 1 and 2"):
        moves.copy_addresses([at], [to], [1, 2])
    with pytest.raises(ValueError, match=r"sizes\[0\] is -1"):
        moves.copy_addresses([at], [to], [-1])


def test_stream_threshold() -> None:
    lanewise.set_stream_threshold(5)
    assert lanewise.get_stream_threshold() == 5
    lanewise.set_stream_threshold(None)
    assert 2 << 20 <= lanewise.get_stream_threshold() <= 32 << 20
    for wrong, error in ((-1, ValueError), (0.5, TypeError), (2**63, ValueError)):
        with pytest.raises(error, match="n must be"):
            lanewise.set_stream_threshold(wrong)


@pytest.mark.native
@pytest.mark.parametrize(("text", "said"), [("123", "123"), ("-1", "ValueError"), ("9" * 30, "ValueError")])
def test_stream_threshold_of_the_environment(text: str, said: str) -> None:
    code = "import lanewise; print(lanewise.get_stream_threshold())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "LANEWISE_STREAM_BYTES": text},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said in done.stdout + done.stderr
