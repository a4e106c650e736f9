"""Keys and values in and out of caches: every layout to every other, int8, RoPE, and what is refused."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lanewise
from lanewise import _ops, layouts, reference
from lanewise.transfer import KVTarget

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BF16)
ONE = ("NL2THD", "LN2THD", "LN2HTD", "2LSHD", "TNLH2D")
PAIRS = ("LNTHD", "LNHTD", "LSHD", "LHSD", "LNHDT", ("LNHDTx", "LNHDT"), ("NHLDTx", "LNHTD"))
LISTS = ("2NTHD", "2NHTD", "N2THD", "N2HTD")
LIST_PAIRS = ("NHD", "HND", "SHD", ("NHDTx", "NHDT"))
EVERY: tuple[Any, ...] = tuple((layout, kind) for kind in (ONE, PAIRS, LISTS, LIST_PAIRS) for layout in kind)


def ones_of(axes: str, sizes: dict[str, int], dtype: Any) -> np.ndarray:
    piece = 4 if sizes["D"] % 4 == 0 else 1
    actual = {
        **sizes,
        "S": sizes["N"] * sizes["T"],
        "2": 2,
        "x": piece,
        "D": sizes["D"] // (piece if "x" in axes else 1),
    }
    return np.ones([actual[a] for a in axes], dtype)


def blank(layout: Any, kind: Any, sizes: dict[str, int], dtype: Any) -> Any:
    axes = layouts.parse(layout)

    def half(of: str) -> Any:
        return (
            [ones_of(of, sizes, dtype) for _ in range(sizes["L"])]
            if kind in (LISTS, LIST_PAIRS)
            else ones_of(of, sizes, dtype)
        )

    return half(axes[0]) if "2" in axes[0] else (half(axes[0]), half(axes[1]))


def seen(arrays: Any, layout: Any, block_size: int) -> list[np.ndarray]:
    """Keys and values, canonical, in one array each."""
    halves = layouts.views(arrays, layout, block_size)
    return [np.concatenate([x.reshape(*x.shape[:4], -1) for x in half]).astype(np.float32) for half in halves if half]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(EVERY),
    st.sampled_from(EVERY),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 4), st.sampled_from([1, 3, 4, 8, 16, 20, 36])),
    st.booleans(),
)
def test_every_layout_to_every_other(
    source: Any, target: Any, from_dtype: Any, to_dtype: Any, shape: tuple[int, ...], some: bool
) -> None:
    sizes = dict(zip("LNHTD", shape, strict=True))
    src, dst = blank(*source, sizes, from_dtype), blank(*target, sizes, to_dtype)
    rng = np.random.default_rng(shape)
    for half in layouts.views(src, source[0], sizes["T"]):
        for view in half or ():
            view[...] = rng.standard_normal(view.shape)
    slots = sizes["N"] * sizes["T"]
    pairs = np.stack([rng.permutation(slots), rng.permutation(slots)], 1)[: slots // 2 + 1] if some else None
    lanewise.relayout(src, source[0], dst, target[0], pairs=pairs)
    for before, after in zip(seen(src, source[0], sizes["T"]), seen(dst, target[0], sizes["T"]), strict=True):
        flat = [np.moveaxis(x, 2, 3).reshape(sizes["L"], slots, sizes["H"], sizes["D"]) for x in (before, after)]
        want = np.ones_like(flat[1])
        moved = np.arange(slots)[:, None].repeat(2, 1) if pairs is None else pairs
        want[:, moved[:, 1]] = flat[0][:, moved[:, 0]].astype(to_dtype).astype(np.float32)
        np.testing.assert_array_equal(flat[1], want)


def test_two_heads_look_like_two_tokens() -> None:
    """KV25: (N, 16, 2, 256) fits two layouts, and each reads back what was written in it."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 5, 2, 256)).astype(np.float32)
    slots = [3, 17, 0, 31, 16]
    for layout, cache in (
        ("NHD", np.zeros((2, 2, 16, 2, 256), np.float32)),
        ("HND", np.zeros((2, 2, 16, 2, 256), np.float32).transpose(0, 1, 3, 2, 4)),
    ):
        lanewise.append_kv(k, v, cache[0], cache[1], slots, layout=layout)
        got = lanewise.gather_kv(cache[0], cache[1], slots, layout=layout)
        np.testing.assert_array_equal(got, (k, v))


# ---- int8 ----


def int8_cache(blocks: int, heads: int, tokens: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((blocks, heads, tokens, dim), 9, np.int8), np.full((blocks, heads, tokens, 2), np.nan, np.float32)


def test_int8_is_within_half_a_step(isa: str) -> None:
    """Rows as models have them: a few channels twenty to fifty times as large as the rest."""
    rng = np.random.default_rng(1)
    k = rng.standard_normal((64, 3, 64)) * np.exp(rng.normal(0, 0.5, (3, 64)))
    k[:, :, [5, 37]] *= 40
    k = k.astype(np.float32)
    cache, scales = int8_cache(4, 3, 16, 64)
    lanewise.append_kv(
        k, k[..., ::2], cache, np.zeros((4, 3, 16, 32), np.float16), np.arange(64), layout="HND", k_scales=scales
    )
    back = lanewise.gather_kv(cache, None, np.arange(64), layout="HND", k_scales=scales)[0]
    step = scales[:, :, :, 0].transpose(0, 2, 1).reshape(64, 3, 1)
    np.testing.assert_allclose(step[..., 0], (np.maximum(k.max(-1), 0) - np.minimum(k.min(-1), 0)) / 255, rtol=1e-6)
    assert (np.abs(back - k) <= step * np.float32(0.5001)).all()


def test_rows_of_zeros_stay_zeros(isa: str) -> None:
    """KV21: no 0 / 0 in a row of zeros, nor in one of what is nearly nothing, among ordinary ones."""
    k = np.random.default_rng(2).standard_normal((4, 2, 64)).astype(np.float32)
    k[1] = 0
    k[2] = 1e-45
    cache, scales = int8_cache(1, 2, 4, 64)
    lanewise.append_kv(k, None, cache, None, np.arange(4), layout="HND", k_scales=scales)
    back = lanewise.gather_kv(cache, None, np.arange(4), layout="HND", k_scales=scales)[0]
    assert (cache[0, :, 1:3] == 0).all() and (scales[0, :, 1:3] == 0).all() and (back[1:3] == 0).all()
    assert np.abs(back[[0, 3]] - k[[0, 3]]).max() < 0.02 and (back[0] != 0).any()


@pytest.mark.parametrize("bad", [(0.0, 0.0), (np.nan, 0.0), (-1.0, 0.0), (np.inf, 0.0), (1.0, 300.0), (1.0, np.nan)])
def test_scales_that_cannot_be(bad: tuple[float, float]) -> None:
    """KV23: codes whose scale was never set, or is none, are not read as if they had one."""
    cache, scales = int8_cache(2, 2, 4, 8)
    scales[...] = 1.0, 0.0
    scales[1, 1, 2] = bad
    out = np.full((2, 2, 8), 5, np.float32)
    with pytest.raises(ValueError, match=r"k_cache: token 1, layer 0, head 1: an int8 row must have a scale above 0"):
        lanewise.gather_kv(cache, None, [0, 6], layout="HND", k_scales=scales, out=(out, None))
    assert (out == 5).all()
    lanewise.gather_kv(cache, None, [0, 5], layout="HND", k_scales=scales, out=(out, None))
    assert (out == 9).all()


def test_int8_moves_as_it_is(isa: str) -> None:
    """Codes and scales of rows that move between int8 caches are the same bytes."""
    rng = np.random.default_rng(3)
    src, src_scales = rng.integers(-128, 128, (3, 2, 4, 8)).astype(np.int8), rng.random((3, 2, 4, 2)).astype(np.float32)
    dst, dst_scales = np.zeros((3, 4, 2, 8), np.int8), np.zeros((3, 4, 2, 2), np.float32)
    lanewise.relayout(src, "HND", dst, "NHD", src_scales=src_scales, dst_scales=dst_scales)
    np.testing.assert_array_equal(dst, src.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(dst_scales, src_scales.transpose(0, 2, 1, 3))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_int8_cannot_hold_is_named_before_anything_is_written(value: float, dtype: Any) -> None:
    k = np.zeros((2, 3, 2, 8), dtype)
    v = k.copy()
    v[1, 2, 1, 7] = value
    cache, scales = np.full((2, 2, 2, 4, 8, 2), 9, np.int8), np.full((2, 2, 2, 4, 2, 2), 9, np.float32)
    keys, values = cache[..., 0].copy(), cache[..., 1].copy()
    with pytest.raises(ValueError, match=r"v: token 2, layer 1, head 1 has a NaN or an infinity"):
        lanewise.append_kv(
            k,
            v,
            keys,
            values,
            [0, 1, 2],
            layout="LNHTD",
            k_scales=scales[..., 0].copy(),
            v_scales=scales[..., 1].copy(),
        )
    assert (keys == 9).all() and (values == 9).all()
    lanewise.append_kv(k, v, keys.astype(np.float32), values.astype(np.float32), [0, 1, 2], layout="LNHTD")


# ---- RoPE ----


@pytest.mark.parametrize("rope", ["neox", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 32), (6, 2), (128, 96)])
def test_rope_turns_complex_numbers(rope: Any, dim: int, rotary: int, isa: str) -> None:
    rng = np.random.default_rng(4)
    k, v = rng.standard_normal((2, 7, 3, dim)).astype(np.float32)
    angle = np.outer(np.arange(50), 10000.0 ** (-np.arange(0, rotary, 2) / rotary))
    positions = np.array([0, 49, 7, 7, 1, 30, 12])
    cache = np.zeros((2, 2, 4, 3, dim), np.float32)
    lanewise.append_kv(
        k,
        v,
        cache,
        None,
        np.arange(7),
        layout="2NTHD",
        rope=rope,
        cos=np.cos(angle),
        sin=np.sin(angle),
        positions=positions,
    )
    part = k[..., :rotary].astype(np.float64)
    half = rotary // 2
    pairs = (
        part[..., 0::2] + 1j * part[..., 1::2] if rope == "interleaved" else part[..., :half] + 1j * part[..., half:]
    )
    turned = pairs * np.exp(1j * angle[positions])[:, None]
    want = k.astype(np.float64)
    if rope == "interleaved":
        want[..., 0:rotary:2], want[..., 1:rotary:2] = turned.real, turned.imag
    else:
        want[..., :half], want[..., half:rotary] = turned.real, turned.imag
    got = cache.reshape(2, 8, 3, dim)[:, :7]
    np.testing.assert_allclose(got[0], want, atol=1e-6)
    np.testing.assert_array_equal(got[1], v)


# ---- append and gather ----


def rows(count: int, heads: int = 2, dim: int = 8, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(count * heads * dim).reshape(count, heads, dim).astype(dtype) + 1


def test_layers_in_lists_and_in_one_array_are_alike() -> None:
    k, v = rows(6).reshape(2, 3, 2, 8), -rows(6).reshape(2, 3, 2, 8)
    slots = [7, -1, 2]
    whole = np.zeros((2, 2, 2, 4, 2, 8), np.float32)
    lanewise.append_kv(k, v, whole, None, slots, layout="L2NTHD")
    one_a_layer = [np.zeros((2, 2, 4, 2, 8), np.float32) for _ in range(2)]
    lanewise.append_kv(list(k), list(v), one_a_layer, None, slots, layout="2NTHD")
    np.testing.assert_array_equal(whole, one_a_layer)
    assert np.count_nonzero(whole) == 2 * 2 * 2 * 16
    got = lanewise.gather_kv([x[0] for x in whole], [x[1] for x in whole], slots, layout="NHD")
    np.testing.assert_array_equal(got[0], k * np.array([1, 0, 1])[None, :, None, None])
    np.testing.assert_array_equal(got[1], v * np.array([1, 0, 1])[None, :, None, None])


def test_keys_alone_without_heads() -> None:
    """MLA: one latent a token, no values."""
    cache = np.zeros((3, 4, 8), BF16)
    lanewise.append_kv(rows(2)[:, 0], None, cache, None, [11, 4], layout="NTD")
    latents, nothing = lanewise.gather_kv(cache, None, [4, 11], layout="NTD", dtype=np.float32)
    assert nothing is None
    np.testing.assert_array_equal(latents, rows(2)[::-1, 0])


def test_values_may_have_another_head_dim() -> None:
    k_cache, v_cache = np.zeros((2, 4, 2, 8), np.float32), np.zeros((2, 4, 2, 6), np.float32)
    lanewise.append_kv(rows(1), rows(1, dim=6), k_cache, v_cache, [5], layout="NHD")
    k, v = lanewise.gather_kv(k_cache, v_cache, [5], layout="NHD")
    np.testing.assert_array_equal(k, rows(1))
    np.testing.assert_array_equal(v, rows(1, dim=6))


def test_a_block_table_gives_its_sequences_one_behind_the_other() -> None:
    cache = rows(12).reshape(3, 4, 2, 8)
    table = np.array([[2, 0], [1, -1], [-1, 2]], np.int32)
    k, _ = lanewise.gather_kv(cache, None, layout="NHD", block_table=table, lengths=[6, 3, 5])
    slots = [8, 9, 10, 11, 0, 1, 4, 5, 6, None, None, None, None, 8]
    np.testing.assert_array_equal(k, [np.zeros((2, 8)) if s is None else rows(12)[s] for s in slots])


def test_out_keeps_what_is_skipped_and_has_any_float_dtype() -> None:
    cache, out = rows(4, dtype=np.float16).reshape(1, 4, 2, 8), np.full((2, 2, 8), 7, BF16)
    k, _ = lanewise.gather_kv(cache, None, [-5, 3], layout="NHD", out=(out, None))
    assert k is out and (out[0] == 7).all()
    np.testing.assert_array_equal(out[1].astype(np.float32), rows(4)[3].astype(BF16).astype(np.float32))


def test_a_slot_twice_is_an_error_or_the_last_ones() -> None:
    cache = np.zeros((2, 4, 2, 8), np.float32)
    slots = [6, 3, -1, 6, -1, 3]
    with pytest.raises(ValueError, match=r"slots\[1\] and slots\[5\] are both 3"):
        lanewise.append_kv(rows(6), None, cache, None, slots, layout="NHD")
    assert not cache.any()
    lanewise.append_kv(rows(6), None, cache, None, slots, layout="NHD", duplicates="last")
    np.testing.assert_array_equal(cache.reshape(8, 2, 8)[[6, 3]], rows(6)[[3, 5]])


def test_source_and_target_may_overlap() -> None:
    memory = rows(8)
    before = memory.copy()
    pairs = np.stack([np.arange(7), np.arange(1, 8)], 1)
    lanewise.relayout(memory, "SHD", memory, "SHD", pairs=pairs)
    np.testing.assert_array_equal(memory[1:], before[:7])
    lanewise.append_kv(memory[2:6], None, memory, None, [3, 4, 5, 6], layout="SHD")
    np.testing.assert_array_equal(memory[3:7], before[1:5])


def test_strided_tokens_of_a_fused_projection() -> None:
    fused = np.random.default_rng(5).standard_normal((5, 6, 8)).astype(np.float32)
    cache = np.zeros((2, 4, 2, 8), np.float32)
    lanewise.append_kv(fused[::-1, 2:4], None, cache, None, range(5), layout="NHD")
    np.testing.assert_array_equal(cache.reshape(8, 2, 8)[:5], fused[::-1, 2:4])


def test_float64_and_lists_are_taken() -> None:
    cache = np.zeros((1, 2, 1, 2), np.float32)
    lanewise.append_kv([[[1, 2.5]], [[3, 4]]], None, cache, None, (1, 0), layout="NHD")
    assert cache.ravel().tolist() == [3, 4, 1, 2.5]


def test_nothing_is_no_error() -> None:
    cache = np.zeros((2, 4, 2, 8), np.float32)
    lanewise.append_kv(rows(0), None, cache, None, [], layout="NHD")
    assert lanewise.gather_kv(cache, None, [], layout="NHD")[0].shape == (0, 2, 8)
    lanewise.relayout(cache[:0], "NHD", cache[:0], "NHD")
    assert not cache.any()


def targets(layers: int, dtype: Any = np.float32) -> tuple[KVTarget, np.ndarray, np.ndarray]:
    """Keys and values of 5 blocks of 2 heads and 4 tokens, between one another in one array, 8 and 6 wide."""
    memory = np.zeros((layers, 5, 2, 4, 14), dtype)
    return KVTarget(memory[..., :8], memory[..., 8:]), memory[..., :8], memory[..., 8:]


@pytest.mark.parametrize("dtype", [*FLOATS, np.float64], ids=str)
@pytest.mark.parametrize("cache_dtype", FLOATS, ids=str)
def test_a_target_is_written_as_append_kv_writes(cache_dtype: Any, dtype: Any) -> None:
    k, v = rows(9).reshape(3, 3, 2, 8).astype(dtype) / 7, rows(9, dim=6).reshape(3, 3, 2, 6).astype(dtype) / 7
    strided = np.zeros((3, 2, 3, 8), dtype).swapaxes(1, 2)
    strided[...] = k
    for slots in ([3, 4, 9], [19, 0, 7]):
        want = targets(3, cache_dtype)[1:]
        lanewise.append_kv(k, v, *want, slots, layout="LNHTD")
        for given_ in (k, strided):
            for layer in (-1, 0, 2):
                target, *got = targets(3, cache_dtype)
                x, y = (given_, v) if layer < 0 else (given_[layer], v[layer])
                assert target.write(x, y, np.array(slots), layer) == (dtype != np.float64)
                if dtype != np.float64:
                    at = slice(None) if layer < 0 else layer
                    assert [half[at].tobytes() for half in got] == [half[at].tobytes() for half in want]
                    assert layer < 0 or not got[0][1].any()


def test_states_go_behind_those_of_evenly_spaced_blocks() -> None:
    k, v = rows(4).reshape(2, 2, 2, 8), rows(4, dim=6).reshape(2, 2, 2, 6).swapaxes(1, 2)
    target, keys, values = targets(1)
    assert target.write_states(k, v, 1, 2, 1)
    assert (keys[0, [1, 3], :, 1:3] == k).all() and (values[0, [1, 3], :, 1:3] == v).all()
    assert np.count_nonzero(keys) == k.size and np.count_nonzero(values) == v.size


def test_a_target_leaves_alone_what_it_does_not_take() -> None:
    target, keys, values = targets(1)
    k, v, slots = rows(2)[None], rows(2, dim=6)[None], np.array([3, 1])
    for bad in (
        *((k, v, np.array(wrong)) for wrong in ([3, 3], [20, 1], [-1, 1], [1], [[3, 1]], [1.0, 2.0])),
        *((x, v, slots) for x in (k[:, :1], k[..., :6], k[:, :, :1], k[0], k[..., ::-1], k.astype(">f4"), list(k))),
        (keys[0, :2].reshape(1, 2, -1, 8)[:, :, :2], v, slots),
        (k, values[0, :1, :, :2].swapaxes(1, 2), slots),  # where it would be written
        (k, v, [3, 1]),
    ):
        assert not target.write(*bad)
    assert not target.write(k[0], v[0], slots, 1)
    states, others = rows(4).reshape(2, 2, 2, 8), rows(4, dim=6).reshape(2, 2, 2, 6)
    for place in ((4, 1, 0), (0, 5, 0), (0, 0, 0), (-1, 1, 0), (1, -1, 0), (0, 1, 3), (0, 1, -1)):
        assert not target.write_states(states, others, *place)
    for bad in ((states[:1], others), (states[..., :6], others), (states[:, :1], others), (states, others[:, :, :1])):
        assert not target.write_states(*bad, 0, 1, 0)
    assert not keys.any() and not values.any()


def test_threads_share_a_call_and_the_bits_are_the_same() -> None:
    k = np.random.default_rng(6).standard_normal((2, 257, 3, 40)).astype(np.float32)
    slots = np.random.default_rng(7).permutation(288)[:257]
    found = []
    for threads in (1, 3):
        cache, scales = np.zeros((2, 9, 3, 32, 40), np.int8), np.zeros((2, 9, 3, 32, 2), np.float32)
        before = lanewise.get_num_threads()
        lanewise.set_num_threads(threads)
        _ops.set_crossover(1000)
        try:
            lanewise.append_kv(k, None, cache, None, slots, layout="LNHTD", k_scales=scales)
            back = lanewise.gather_kv(cache, None, slots, layout="LNHTD", k_scales=scales)[0]
        finally:
            _ops.set_crossover()
            lanewise.set_num_threads(before)
        found.append((cache.tobytes(), scales.tobytes(), back.tobytes()))
    assert found[0] == found[1]


def test_two_threads_write_to_their_own_slots() -> None:
    cache = np.zeros((64, 4, 2, 8), np.float32)
    k = rows(128)

    def write(slots: Any) -> None:
        for _ in range(20):
            lanewise.append_kv(k, None, cache, None, slots, layout="NHD")

    others = [threading.Thread(target=write, args=(np.arange(first, 256, 2),)) for first in (0, 1)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    np.testing.assert_array_equal(cache.reshape(128, 2, 2, 8), np.repeat(k[:, None], 2, 1))


# ---- what is refused ----

CACHE = np.zeros((2, 4, 2, 8), np.float32)
READ_ONLY = CACHE.copy()
READ_ONLY.flags.writeable = False
OVERLAID = np.lib.stride_tricks.as_strided(CACHE, (2, 4, 2, 8), (0, 64, 32, 4))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"slots": [8]}, ValueError, r"slots\[0\] is 8, but there are 8 slots"),
        ({"slots": [2**63]}, ValueError, r"slots\[0\] is 9223372036854775808, but there are 8 slots"),
        ({"slots": [0, 1]}, ValueError, "one number a token: 1 tokens, got 2"),
        ({"slots": [0.0]}, TypeError, "slots must be integers, got float64"),
        ({"slots": [[0]]}, ValueError, r"slots must have one axis, got shape \(1, 1\)"),
        ({"k": rows(1, heads=3)}, ValueError, "k and k_cache must have as many heads, got 3 and 2"),
        ({"k": rows(1, dim=7)}, ValueError, "k and k_cache must have one head_dim, got 7 and 8"),
        ({"k": rows(1)[0]}, ValueError, r"axes \(tokens, heads, head_dim\) for this cache, got shape \(2, 8\)"),
        ({"k": rows(1, dtype=np.int8)}, TypeError, "k must be floats, got int8"),
        ({"k": rows(1, dtype=np.int32)}, TypeError, "k must be float32, float16, bfloat16 or int8, got int32"),
        ({"v": rows(2)}, ValueError, "as many tokens, got 1 and 2"),
        ({"v": None}, ValueError, "v must be None if, and only if, the cache has no values"),
        ({"v_cache": None}, ValueError, "v must be None if, and only if, the cache has no values"),
        ({"v_cache": CACHE[:1]}, ValueError, "2 blocks of 4 and 1 of 4"),
        ({"k_cache": READ_ONLY}, ValueError, "k_cache is read-only"),
        ({"k_cache": OVERLAID}, ValueError, "k_cache has elements that share memory"),
        ({"k_cache": CACHE[::-1]}, ValueError, "k_cache must have no negative strides"),
        ({"k_cache": CACHE.astype(">f4")}, TypeError, "k_cache must be float32, float16, bfloat16 or int8, got >f4"),
        ({"k_cache": CACHE.astype(np.int8)}, ValueError, "k_cache is int8, so its scales must be given"),
        ({"k_cache": CACHE[..., 0]}, ValueError, r"4 axes for layout 'NHD', got shape \(2, 4, 2\)"),
        ({"layout": "2NTHD"}, ValueError, "v_cache must be None"),
        ({"layout": "XYZ"}, ValueError, "unknown axis 'X'"),
        ({"rope": "gptj"}, ValueError, "rope must be 'neox' or 'interleaved', got 'gptj'"),
        ({"rope": "neox"}, ValueError, "rope needs cos, sin and positions"),
        (
            {"rope": "neox", "cos": np.ones((3, 5)), "sin": np.ones((3, 5)), "positions": [0]},
            ValueError,
            "cos has 5 columns",
        ),
        (
            {"rope": "neox", "cos": np.ones((3, 4)), "sin": np.ones((3, 4)), "positions": [3]},
            ValueError,
            r"positions\[0\]",
        ),
        (
            {"rope": "neox", "cos": np.ones((3, 4)), "sin": np.ones((3, 4)), "positions": [-1]},
            ValueError,
            "at least 0, got -1",
        ),
        ({"rope": "neox", "cos": np.ones((3, 4)), "sin": np.ones((3, 3)), "positions": [0]}, ValueError, "one shape"),
        ({"duplicates": "first"}, ValueError, "duplicates must be 'raise' or 'last', got 'first'"),
    ],
)
def test_append_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {
        "k": rows(1),
        "v": rows(1),
        "k_cache": CACHE.copy(),
        "v_cache": CACHE.copy(),
        "slots": [0],
        "layout": "NHD",
    }
    k_cache = call["k_cache"]
    call |= changed
    layout = call.pop("layout")
    with pytest.raises(error, match=message):
        lanewise.append_kv(
            *[call.pop(name) for name in ("k", "v", "k_cache", "v_cache", "slots")], layout=layout, **call
        )
    assert not k_cache.any()


@pytest.mark.parametrize(
    ("given_", "error", "message"),
    [
        ({}, ValueError, "either slots or block_table"),
        ({"slots": [0], "block_table": [[0]]}, ValueError, "either slots or block_table"),
        ({"block_table": [[0]]}, ValueError, "block_table needs lengths"),
        ({"block_table": [[0]], "lengths": [5]}, ValueError, r"lengths\[0\] is 5"),
        ({"block_table": [[0]], "lengths": [-1]}, ValueError, r"lengths\[0\] must be at least 0, got -1"),
        ({"block_table": [[2]], "lengths": [1]}, ValueError, r"block_table\[0, 0\] is 2, but there are 2 blocks"),
        ({"block_table": [[2**62]], "lengths": [1]}, ValueError, r"block_table\[0, 0\] is 4611686018427387904"),
        ({"block_table": [0], "lengths": [1]}, ValueError, r"\(sequences, blocks\), got shape \(1,\)"),
        ({"slots": [0], "dtype": np.int8}, TypeError, r"out\[0\] must be floats, got int8"),
        ({"slots": [0], "dtype": np.float64}, TypeError, r"out\[0\] must be float32, float16, bfloat16"),
        (
            {"slots": [0], "out": (np.zeros((1, 2, 7), np.float32), None)},
            ValueError,
            r"out\[0\] must have shape \(1, 2, 8\)",
        ),
        ({"slots": [0], "out": (READ_ONLY[0, :1], None)}, ValueError, r"out\[0\] is read-only"),
    ],
)
def test_gather_refuses(given_: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lanewise.gather_kv(CACHE, None, layout="NHD", **given_)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"dst": np.zeros((3, 4, 2, 8), np.float32)}, "as many slots, got 8 and 12; or give pairs"),
        ({"pairs": [0, 1]}, r"pairs must have shape \(n, 2\), got \(2,\)"),
        ({"pairs": [[0, 1], [8, 2]]}, r"pairs\[:, 0\]\[1\] is 8"),
        ({"pairs": [[0, 1], [2, 1]]}, r"pairs\[:, 1\]\[0\] and pairs\[:, 1\]\[1\] are both 1"),
        ({"dst": (CACHE.copy(), CACHE.copy())}, "both have values, or neither"),
        ({"dst": CACHE.astype(np.int8)}, "dst keys is int8, so its scales must be given"),
    ],
)
def test_relayout_refuses(given_: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"dst": CACHE.copy(), "dst_layout": "NHD"} | given_
    with pytest.raises(ValueError, match=message):
        lanewise.relayout(CACHE, "NHD", call.pop("dst"), call.pop("dst_layout"), **call)


def test_narrowing_is_to_nearest_even_and_nans_are_the_one(isa: str) -> None:
    bits = np.concatenate([np.arange(0, 1 << 32, 65521, np.int64), [0x7F800001, 0xFFC12345, 0x477FF000, 0x477FEFFF]])
    x = bits.astype(np.uint32).view(np.float32)
    x = np.resize(x, (-(-len(x) // 64), 1, 64))
    for name, dtype in (("f16", np.dtype(np.float16)), ("bf16", BF16)):
        cache = np.zeros(x.shape, dtype)
        lanewise.append_kv(x, None, cache, None, np.arange(len(x)), layout="SHD")
        want = reference.narrow(x, name)
        np.testing.assert_array_equal(cache.view(np.uint16), want.view(np.uint16))
        finite = np.isfinite(x)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(cache[finite], x[finite].astype(dtype))
