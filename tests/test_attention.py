"""Attention beyond its Cases: any shapes against the reference, the same bits however the work is cut, bad input."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lanewise
from lanewise import _dispatch, _ops, layouts, reference

INF = np.inf


def paged(
    rng: np.random.Generator, rows: list[np.ndarray], block_size: int, layout: str
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences (tokens, heads, D) put into blocks anywhere, what they do not fill full of NaN; and the table."""
    counts = [-(-len(row) // block_size) for row in rows]
    ids = rng.permutation(sum(counts) + 1)
    blocks = np.full((len(ids), block_size, *rows[0].shape[1:]), np.nan, np.float32).astype(rows[0].dtype)
    table = np.full((len(rows), max(counts)), -1)
    for b, row in enumerate(rows):
        own, ids = ids[: counts[b]], ids[counts[b] :]
        table[b, : counts[b]] = own
        for i, block in enumerate(own):
            part = row[i * block_size : (i + 1) * block_size]
            blocks[block, : len(part)] = part
    return (blocks if layout == "NHD" else np.ascontiguousarray(blocks.swapaxes(1, 2))), table


def random_rows(rng: np.random.Generator, lengths: list[int], heads: int, dim: int) -> list[np.ndarray]:
    return [rng.standard_normal((n, heads, dim)).astype(np.float32) for n in lengths]


@pytest.fixture
def shared() -> Iterator[None]:
    """Every call is work enough for several threads."""
    before = lanewise.get_num_threads()
    _ops.set_crossover(1)
    yield
    _ops.set_crossover(None)
    lanewise.set_num_threads(before)


# ---- right ----


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape_agrees_with_the_reference(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    dim, v_dim = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    lengths = draw(st.lists(st.integers(1, 530), min_size=1, max_size=3))
    counts = [draw(st.integers(0, 6)) for _ in lengths]
    starts = np.concatenate([[0], np.cumsum(counts)])
    block_size, layout = draw(st.integers(1, 256)), draw(st.sampled_from(["NHD", "HND"]))
    dtype = draw(st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
    heads = kv_heads * group
    how: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(0, 300)),
        "soft_cap": draw(st.none() | st.floats(0.5, 50)),
        "slopes": draw(st.sampled_from([None, rng.uniform(0, 0.2, heads).astype(np.float32)])),
        "sinks": draw(st.sampled_from([None, rng.standard_normal(heads).astype(np.float32)])),
    }
    mask = draw(st.sampled_from([None, rng.random((starts[-1], heads, max(lengths))) < 0.5]))
    k_rows, v_rows = (
        [row.astype(dtype) for row in random_rows(rng, lengths, kv_heads, width)] for width in (dim, v_dim)
    )
    q = rng.standard_normal((starts[-1], heads, dim)).astype(np.float32)
    seed = int(rng.integers(1 << 30))
    k, table = paged(np.random.default_rng(seed), k_rows, block_size, layout)
    v, _ = paged(np.random.default_rng(seed), v_rows, block_size, layout)
    out, lse = lanewise.extend_attention(
        q, k, v, table, lengths, starts, layout=layout, mask=mask, return_lse=True, **how
    )
    for b in range(len(lengths)):
        own = slice(starts[b], starts[b + 1])
        want, sums = reference.attention(q[own], k_rows[b], v_rows[b], mask=None if mask is None else mask[own], **how)
        np.testing.assert_allclose(out[own], want, rtol=2e-6, atol=4e-6)
        np.testing.assert_allclose(lse[own], sums, rtol=2e-6, atol=2e-6)


def test_contiguous_caches_and_dtypes_of_q() -> None:
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 3, 2, 40, 32)).astype(np.float32)
    q = rng.standard_normal((3, 4, 32)).astype(ml_dtypes.bfloat16)
    out = lanewise.decode_attention(q, k, v, None, [40, 7, 0])
    for b, n in enumerate([40, 7]):
        want, _ = reference.attention(
            q[b : b + 1].astype(np.float32), k[b, :, :n].swapaxes(0, 1), v[b, :, :n].swapaxes(0, 1)
        )
        np.testing.assert_allclose(out[b], want[0], rtol=2e-6, atol=2e-6)
    assert not out[2].any()
    same = lanewise.decode_attention(
        q.astype(np.float32), k.swapaxes(1, 2), v.swapaxes(1, 2), None, [40, 7, 0], layout="NHD"
    )
    assert same.tobytes() == out.tobytes()


# ---- the same bits ----


@pytest.mark.usefixtures("shared")
def test_bits_do_not_depend_on_how_the_work_is_cut() -> None:
    rng = np.random.default_rng(2)
    lengths, group = [700, 3, 1100], 3
    k_rows, v_rows = (random_rows(rng, lengths, 2, dim) for dim in (64, 48))
    q = rng.standard_normal((3, 2 * group, 64)).astype(np.float32)
    first: tuple[bytes, bytes] | None = None
    isas = cycle(_dispatch.runnable())
    for threads, layout, block_size in product((1, 2), ("NHD", "HND"), (1, 5, 16, 256, 2000)):
        k, table = paged(np.random.default_rng(3), k_rows, block_size, layout)
        v, _ = paged(np.random.default_rng(3), v_rows, block_size, layout)
        lanewise.set_num_threads(threads)
        with lanewise.using(next(isas)):  # in turns; all with all in the slow test
            out, lse = lanewise.decode_attention(q, k, v, table, lengths, layout=layout, return_lse=True)
            alone = [
                lanewise.decode_attention(q[b : b + 1], k, v, table[b : b + 1], lengths[b : b + 1], layout=layout)
                for b in range(3)
            ]
        first = first or (out.tobytes(), lse.tobytes())
        assert (out.tobytes(), lse.tobytes()) == first, (block_size, layout, threads)
        assert np.concatenate(alone).tobytes() == first[0]


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("window", [None, 0, 300, 6000])
def test_more_chunks_than_are_joined_at_once(window: int | None) -> None:
    rng = np.random.default_rng(6)
    keys = 256 * 35 + 7
    k, v = rng.standard_normal((2, 1, 1, keys, 16)).astype(np.float32)
    k *= np.linspace(0, 30, keys, dtype=np.float32)[:, None]  # maxima that move from chunk to chunk
    q, sinks = rng.standard_normal((1, 3, 16)).astype(np.float32), np.float32([-50, 0, 50])
    found = set()
    for threads, isa in product((1, 2, 5), _dispatch.runnable()):
        lanewise.set_num_threads(threads)
        with lanewise.using(isa):
            out, lse = lanewise.decode_attention(q, k, v, None, [keys], window=window, sinks=sinks, return_lse=True)
        found.add((out.tobytes(), lse.tobytes()))
    assert len(found) == 1
    first = 0 if window is None else keys - 1 - window
    scores = np.einsum("hd,kd->hk", q[0], k[0, 0, first:], dtype=np.float64) / 4
    total = np.logaddexp(np.logaddexp.reduce(scores, axis=1), sinks)
    np.testing.assert_allclose(lse[0], total, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(out[0], np.exp(scores - total[:, None]) @ v[0, 0, first:], rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8], ids=lambda x: x.__name__)
@pytest.mark.parametrize(("group", "dim"), [(1, 40), (3, 64), (4, 128), (7, 80)])
def test_not_a_bit_differs_over_isa_threads_blocks_and_batch(group: int, dim: int, dtype: Any) -> None:
    rng = np.random.default_rng([group, dim])
    lengths, counts = [600, 1, 0, 257, 1300], [9, 1, 2, 1, 3]
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = [random_rows(rng, lengths, 2, width) for width in (dim, 56)]
    rows = [[(30 * row).round().clip(-128, 127) if dtype == np.int8 else row for row in some] for some in rows]
    scales = [[rng.uniform(0.01, 0.03, (n, 2, 2)).astype(np.float32) for n in lengths] for _ in range(2)]
    q = rng.standard_normal((starts[-1], 2 * group, dim)).astype(np.float32)
    first: tuple[bytes, ...] | None = None
    for block_size, layout in product((1, 3, 16, 64, 256, 1300), ("NHD", "HND")):
        names = "k_cache", "v_cache", "k_scales", "v_scales"
        cut = [paged(np.random.default_rng(3), some, block_size, layout) for some in (*rows, *scales)]
        table = cut[0][1]
        caches: dict[str, Any] = {name: x for name, (x, _) in zip(names, cut, strict=True)}
        for name in names[:2]:
            caches[name] = np.nan_to_num(caches[name]).astype(dtype)
        if dtype != np.int8:
            del caches["k_scales"], caches["v_scales"]
        for isa, threads in product(_dispatch.runnable(), (1, 2, 5)):
            lanewise.set_num_threads(threads)
            with lanewise.using(isa):
                how = {"layout": layout, "return_lse": True, **caches}
                together = lanewise.extend_attention(q, **how, block_table=table, lengths=lengths, query_start=starts)
                alone = [
                    lanewise.extend_attention(
                        q[starts[b] : starts[b + 1]],
                        **how,
                        block_table=table[b : b + 1],
                        lengths=lengths[b : b + 1],
                        query_start=[0, counts[b]],
                    )
                    for b in range(len(lengths))
                ]
            got = tuple(part.tobytes() for part in together)
            first = first or got
            assert got == first, (block_size, layout, isa, threads)
            assert tuple(np.concatenate(parts).tobytes() for parts in zip(*alone, strict=True)) == first


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", [0, 1], ids=["scale", "zero"])
@pytest.mark.parametrize("side", ["k_scales", "v_scales"])
def test_a_scale_that_is_no_number_shows_where_it_is_seen(side: str, part: int, bad: float, isa: str) -> None:
    rng = np.random.default_rng(1)
    k, v = rng.integers(-128, 128, (2, 4, 2, 16, 24), dtype=np.int8)
    good = {name: rng.uniform(0.01, 0.02, (4, 2, 16, 2)).astype(np.float32) for name in ("k_scales", "v_scales")}
    q = np.abs(rng.standard_normal((3, 4, 24))).astype(np.float32)

    def spoilt(block: int, token: int) -> dict[str, np.ndarray]:
        scales = good[side].copy()
        scales[block, :, token, part] = bad
        return good | {side: scales}

    def extend(scales: dict[str, np.ndarray], **how: Any) -> np.ndarray:
        found: np.ndarray = lanewise.extend_attention(q, k, v, [[0, 1]], [30], [0, 3], **how, **scales)
        return found

    mask = np.ones((3, 32), bool)
    mask[:, 5] = False
    for unseen, how in [((1, 14), {}), ((2, 0), {}), ((0, 5), {"mask": mask}), ((0, 5), {"window": 8})]:
        assert extend(spoilt(*unseen), **how).tobytes() == extend(good, **how).tobytes()
    last = extend(spoilt(1, 13))  # which the last query alone sees
    assert last[:2].tobytes() == extend(good)[:2].tobytes()
    assert not np.isfinite(last[2]).any() or (bad == np.inf and side == "k_scales")  # a score of -inf weighs nothing


def test_scales_may_lie_anyhow() -> None:
    rng = np.random.default_rng(1)
    k = rng.integers(-128, 128, (4, 2, 16, 8), dtype=np.int8)
    scales = rng.uniform(0.01, 0.02, (4, 2, 16, 2)).astype(np.float32)
    wide = np.zeros((8, 2, 16, 4), np.float32)
    wide[::-2, :, :, ::2] = scales
    q = np.ones((1, 2, 8), np.float32)
    for lie in (np.asfortranarray(scales), wide[::-2, :, :, ::2], torn(scales)):
        got = lanewise.decode_attention(q, k, k, [[2, 3]], [20], k_scales=lie, v_scales=lie)
        want = lanewise.decode_attention(q, k, k, [[2, 3]], [20], k_scales=scales, v_scales=scales)
        assert got.tobytes() == want.tobytes()


def torn(x: np.ndarray) -> np.ndarray:
    """At an odd address."""
    memory = np.zeros(x.nbytes + 1, np.uint8)
    memory[1:] = np.frombuffer(x.tobytes(), np.uint8)
    return memory[1:].view(x.dtype).reshape(x.shape)


I8 = np.zeros((4, 2, 16, 8), np.int8)
SCALES = np.ones((4, 2, 16, 2), np.float32)


@pytest.mark.parametrize("name", ["k_scales", "v_scales"])
@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (None, ValueError, "is missing: an int8 cache needs"),
        (SCALES.astype(np.float64), TypeError, "must be float32, got float64"),
        (SCALES.astype(">f4"), TypeError, "must be float32, got >f4"),
        (SCALES[:3], ValueError, r"must have shape \(4, 2, 16, 2\), got \(3, 2, 16, 2\)"),
        (SCALES[..., :1], ValueError, r"must have shape \(4, 2, 16, 2\), got \(4, 2, 16, 1\)"),
        (SCALES[..., 0], ValueError, r"must have shape \(4, 2, 16, 2\), got \(4, 2, 16\)"),
        (SCALES.swapaxes(1, 2), ValueError, r"must have shape \(4, 2, 16, 2\), got \(4, 16, 2, 2\)"),
        (np.float32(1), ValueError, r"must have shape \(4, 2, 16, 2\), got \(\)"),
    ],
)
def test_bad_scales(name: str, given: Any, error: type[Exception], said: str) -> None:
    scales = {"k_scales": SCALES, "v_scales": SCALES} | {name: given}
    with pytest.raises(error, match=f"{name} {said}"):
        lanewise.decode_attention(np.ones((1, 2, 8), np.float32), I8, I8, [[0]], [9], **scales)


def lying(layout: Any, sizes: dict[str, int], dtype: Any) -> Any:
    """Arrays for this layout, of zeros; x cuts D."""

    def one(axes: str) -> np.ndarray:
        cut = sizes["x"] if "x" in axes else 1
        return np.zeros([sizes[letter] // (cut if letter == "D" else 1) for letter in axes], dtype)

    key_axes, value_axes = layouts.parse(layout)
    return one(key_axes) if "2" in key_axes else (one(key_axes), one(value_axes))


LAYOUTS = (
    *("NHD", "2NTHD", "2NHTD", "N2THD", "N2HTD", "NL2THD", "LN2THD", "2LSHD", "SHD", "NT2HD", "NHTD2", "DHNT"),
    *(("NHDTx", "NHDT"), ("NHDT", "NHDTx"), ("SHD", "HSD"), "2NHDTx"),
)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bits_do_not_depend_on_the_layout(layout: Any, dtype: Any) -> None:
    rng = np.random.default_rng(11)
    lengths, starts = [300, 0, 17, 65], [0, 7, 8, 9, 14]
    rows = [random_rows(rng, lengths, 2, 24) for _ in range(2)]
    (k, table), (v, _) = (paged(np.random.default_rng(3), some, 16, "HND") for some in rows)
    scales = None
    if dtype == np.int8:
        codes = [np.zeros(x.shape, np.int8) for x in (k, v)]
        scales = tuple(np.zeros((*x.shape[:3], 2), np.float32) for x in (k, v))
        filled = tuple(np.nan_to_num(x) for x in (k, v))
        lanewise.relayout(filled, "HND", tuple(codes), "HND", dst_scales=scales)
        k, v = codes
    else:
        k, v = k.astype(dtype), v.astype(dtype)
    sizes = {"L": 1, "N": len(k), "2": 2, "H": 2, "T": 16, "D": 24, "S": 16 * len(k), "x": 8}
    cache = lying(layout, sizes, dtype)
    others = None if scales is None else lying(scale_layout(layout), sizes | {"D": 2}, np.float32)
    lanewise.relayout((k, v), "HND", cache, layout, src_scales=scales, dst_scales=others)
    pairs = (x if isinstance(x, tuple) else (x, None) for x in (cache, others))
    (k_there, v_there), (k_scales, v_scales) = pairs
    q = rng.standard_normal((14, 6, 24)).astype(np.float32)
    kept = {} if scales is None else {"k_scales": scales[0], "v_scales": scales[1]}
    want = lanewise.extend_attention(q, k, v, table, lengths, starts, return_lse=True, **kept)
    plan = lanewise.AttentionPlan(table, lengths, num_heads=6, num_kv_heads=2, block_size=16, query_start=starts)
    how: dict[str, Any] = {"layout": layout, "return_lse": True, "k_scales": k_scales, "v_scales": v_scales}
    got = [plan.run(q, k_there, v_there, **how)]
    in_slots = "S" in layouts.parse(layout)[0]
    if in_slots:
        table = (table[:, :, None] * 16 + np.arange(16)).reshape(len(table), -1)
    if not (in_slots and "T" in "".join(layouts.parse(layout))):
        got.append(lanewise.extend_attention(q, k_there, v_there, table, lengths, starts, **how))
    for one in got:
        assert [part.tobytes() for part in one] == [part.tobytes() for part in want]


def scale_layout(layout: Any) -> Any:
    """Scales and zeros lie as the cache without head_dim, and last the two of them."""
    axes = tuple(part.replace("D", "").replace("x", "") + "D" for part in layouts.parse(layout))
    return axes[0] if axes[0] == axes[1] else axes


def test_slots_without_a_table_are_one_sequence_and_latents_one_head() -> None:
    rng = np.random.default_rng(12)
    k, v = rng.standard_normal((2, 40, 1, 32)).astype(np.float32)
    q = rng.standard_normal((1, 4, 32)).astype(np.float32)
    want = lanewise.decode_attention(q, k[None], v[None], None, [33], layout="NHD")
    assert lanewise.decode_attention(q, k, v, None, [33], layout="SHD").tobytes() == want.tobytes()
    got = lanewise.decode_attention(q, k[:, 0], v[:, 0], None, [33], layout="SD")
    assert got.tobytes() == want.tobytes()
    latents = k.reshape(5, 8, 32)  # multi-head latent attention: values are a part of the keys
    want = lanewise.decode_attention(q, latents[:, None], latents[:, None, :, :20], [[4, 0]], [9])
    got = lanewise.decode_attention(q, latents, latents[..., :20], [[4, 0]], [9], layout="NTD")
    assert got.tobytes() == want.tobytes()


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_query_among_others_is_the_query_alone(threads: int) -> None:
    rng = np.random.default_rng(4)
    lanewise.set_num_threads(threads)
    (k,), (v,) = (random_rows(rng, [600], 2, 32) for _ in range(2))
    k, v = k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None]
    q = rng.standard_normal((40, 6, 32)).astype(np.float32)
    for how in ({}, {"window": 100}, {"soft_cap": 3.0}):
        together = lanewise.extend_attention(q, k, v, None, [600], [0, 40], **how)
        for i in (0, 17, 39):
            alone = lanewise.decode_attention(q[i : i + 1], k, v, None, [600 - 39 + i], **how)
            assert alone.tobytes() == together[i].tobytes()


@pytest.mark.parametrize("prefix", [255, 256, 600, 767, 768])
def test_a_shared_prefix_is_read_once_and_changes_no_bit(prefix: int) -> None:
    rng = np.random.default_rng(5)
    lengths = [800, 790, 1000]
    table = np.arange(3 * 63).reshape(3, 63)
    table[1:, :48] = table[0, :48]  # 768 tokens
    k, v = rng.standard_normal((2, 3 * 63, 2, 16, 32)).astype(np.float32)
    q = rng.standard_normal((3, 8, 32)).astype(np.float32)
    plain = lanewise.decode_attention(q, k, v, table, lengths, return_lse=True)
    cascade = lanewise.decode_attention(q, k, v, table, lengths, return_lse=True, shared_prefix=prefix)
    assert [a.tobytes() for a in cascade] == [a.tobytes() for a in plain]


def test_no_look_at_the_table_behind_a_shared_prefix_that_no_window_reaches() -> None:
    table = np.zeros((2, 2000), np.int64)
    table[0, 500:] = 10**12  # behind the length of row 0, within that of row 1
    k, scales = np.ones((1, 1, 1, 16), np.int8), np.ones((1, 1, 1, 2), np.float32)
    how: dict[str, Any] = {"k_scales": scales, "v_scales": scales, "window": 100}
    q = np.ones((2, 1, 16), np.float32)
    want = lanewise.decode_attention(q, k, k, table, [500, 2000], **how)
    got = lanewise.decode_attention(q, k, k, table, [500, 2000], shared_prefix=256, **how)
    assert got.tobytes() == want.tobytes()


def test_a_plan_serves_every_layer_and_thread() -> None:
    rng = np.random.default_rng(6)
    plan = lanewise.AttentionPlan([[0, 2]], [30], num_heads=4, num_kv_heads=2, block_size=16)
    layers = [(rng.standard_normal((1, 4, 32)), *rng.standard_normal((2, 3, 2, 16, 32)).astype("f")) for _ in range(9)]
    want = [lanewise.decode_attention(q, k, v, [[0, 2]], [30]).tobytes() for q, k, v in layers]
    with ThreadPoolExecutor(3) as pool:
        got = [out.tobytes() for out in pool.map(lambda layer: plan.run(*layer), layers)]
    assert got == want


def test_a_plan_is_made_once_and_whole() -> None:
    """Nothing that kernels follow unseen is missing, or of another plan that was refused halfway."""
    with pytest.raises(TypeError):
        lanewise.AttentionPlan.__new__(lanewise.AttentionPlan)
    cache = np.random.default_rng(1).normal(size=(4, 1, 4, 8)).astype(np.float32)
    plan = lanewise.AttentionPlan([[3, 1, 2]], [12], num_heads=1, num_kv_heads=1, block_size=4)
    wanted = plan.run(cache[:1, :, 0], cache, cache)
    plan.__init__([[0]], [12], num_heads=1, num_kv_heads=1, block_size=4)
    np.testing.assert_array_equal(plan.run(cache[:1, :, 0], cache, cache), wanted)


def test_a_plan_keeps_what_was_checked() -> None:
    rng = np.random.default_rng(10)
    k, v = rng.standard_normal((2, 2, 2, 16, 8)).astype(np.float32)
    q = rng.standard_normal((1, 4, 8)).astype(np.float32)
    table, lengths, starts = np.array([[0]], np.int64), np.array([16], np.int64), np.array([0, 1], np.int64)
    plan = lanewise.AttentionPlan(table, lengths, num_heads=4, num_kv_heads=2, block_size=16, query_start=starts)
    want = plan.run(q, k, v).tobytes()
    table[:], lengths[:], starts[:] = 1, 3, 7
    assert plan.run(q, k, v).tobytes() == want


# ---- what is not seen ----


@pytest.mark.parametrize("bad", [np.nan, INF, -INF])
def test_what_is_not_seen_does_not_matter(bad: float, isa: str) -> None:
    rng = np.random.default_rng(7)
    k, v = rng.standard_normal((2, 1, 1, 300, 32)).astype(np.float32)
    q = rng.standard_normal((3, 2, 32)).astype(np.float32)
    mask = rng.random((3, 300)) < 0.5
    mask[:, 77] = False
    spoilt_k, spoilt_v = k.copy(), v.copy()
    spoilt_k[..., 77, :] = spoilt_v[..., 77, :] = bad
    spoilt_v[..., 299, 3] = bad  # which only the last query sees
    for how in ({"mask": mask}, {"mask": np.where(mask, 0, -INF).astype(np.float32)}):
        want = lanewise.extend_attention(q, k, v, None, [300], [0, 3], **how)
        got = lanewise.extend_attention(q, spoilt_k, spoilt_v, None, [300], [0, 3], **how)
        assert got[:2].tobytes() == want[:2].tobytes()
    v[..., 299, 3] = bad
    live = lanewise.extend_attention(q, k, v, None, [300], [0, 3])
    expected = np.ones(live.shape, bool)
    expected[2, :, 3] = False
    np.testing.assert_array_equal(np.isfinite(live), expected)


def test_hidden_blocks_and_a_window_that_has_left_them() -> None:
    rng = np.random.default_rng(8)
    k, v = rng.standard_normal((2, 8, 1, 16, 16)).astype(np.float32)
    q = rng.standard_normal((1, 1, 16)).astype(np.float32)
    table = np.array([[0, -1, 2, 3]])
    with pytest.raises(ValueError, match=r"block_table\[0, 1\] must not be negative"):
        lanewise.decode_attention(q, k, v, table, [60])
    rows = k[[0, 2, 3], 0].reshape(-1, 1, 16), v[[0, 2, 3], 0].reshape(-1, 1, 16)
    want, _ = reference.attention(q, rows[0][:44], rows[1][:44])
    got = lanewise.decode_attention(q, k, v, table, [60], hide_null=True)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    lanewise.decode_attention(q, k, v, table, [60], window=20)  # does not reach it


def test_no_query_no_sequence_no_key() -> None:
    kv = np.zeros((1, 2, 16, 8), np.float32)
    empty = np.empty((0, 4, 8), np.float32)
    assert lanewise.decode_attention(empty, kv, kv, np.empty((0, 1), int), np.empty(0, int)).shape == (0, 4, 8)
    out, lse = lanewise.extend_attention(empty, kv, kv, [[0]], [3], [0, 0], return_lse=True)
    assert out.shape == (0, 4, 8) and lse.shape == (0, 4)
    out, lse = lanewise.decode_attention(np.ones((1, 4, 8), np.float32), kv, kv, [[0]], [0], return_lse=True)
    assert not out.any() and (lse == -INF).all()


# ---- bad input ----

K = np.zeros((4, 2, 16, 8), np.float32)
Q = np.zeros((1, 4, 8), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"block_table": [[4]]}, ValueError, r"block_table\[0, 0\] must be in \[0, 3\], got 4"),
        ({"block_table": [[2**40]]}, ValueError, r"block_table\[0, 0\] must be in \[0, 3\]"),
        ({"block_table": [[0.5]]}, TypeError, "block_table must be integers"),
        ({"block_table": [0]}, ValueError, "block_table must have 2 axes"),
        ({"block_table": [[0], [1]]}, ValueError, "block_table must have a row a sequence"),
        ({"lengths": [17]}, ValueError, r"lengths\[0\] must be in \[0, 16\], what its blocks hold, got 17"),
        ({"lengths": [-1]}, ValueError, r"lengths\[0\] must be in"),
        (
            {"q": np.zeros((1, 3, 8), np.float32)},
            ValueError,
            "num_heads must be a multiple of num_kv_heads, got 3 and 2",
        ),
        ({"q": np.zeros((1, 4, 7), np.float32)}, ValueError, "q must have shape"),
        ({"q": np.zeros((2, 4, 8), np.float32)}, ValueError, "q must have shape"),
        ({"q": np.zeros((4, 8), np.float32)}, ValueError, "q must have shape"),
        ({"q": np.zeros((1, 4, 8), int)}, TypeError, "q must be float32"),
        ({"k_cache": np.zeros((4, 2, 16, 8))}, TypeError, "k_cache must be float32, float16, bfloat16 or int8"),
        ({"k_cache": np.zeros((4, 2, 8), np.float32)}, ValueError, "k_cache must have 4 axes"),
        ({"v_cache": np.zeros((4, 1, 16, 8), np.float32)}, ValueError, "must agree but for head_dim"),
        ({"v_cache": np.zeros((4, 2, 16, 0), np.float32)}, ValueError, "head_dim of at least 1"),
        ({"k_cache": K.astype(np.int8)}, ValueError, "k_scales is missing"),
        ({"k_scales": np.zeros((4, 2, 16, 2), np.float32)}, ValueError, "k_scales is for int8 caches"),
        ({"layout": "DHN"}, ValueError, "layout 'DHN' must have either N and T, blocks and their tokens, or S, slots"),
        ({"layout": 3}, TypeError, "layout must be a string or two"),
        ({"layout": "NTD"}, ValueError, "k_cache must have 3 axes for layout 'NTD'"),
        ({"v_cache": None}, ValueError, "v_cache is missing: layout 'HND' has keys alone in k_cache"),
        ({"layout": "N2TD"}, ValueError, "has keys and values in k_cache, so v_cache must be None"),
        ({"layout": "N2TD", "k_cache": K[:, :1], "v_cache": None}, ValueError, "axis 2 of k_cache must have 2 entries"),
        ({"layout": "LHTD", "v_cache": K}, ValueError, "layout 'LHTD' must have either N and T"),
        ({"layout": "LSHD"}, ValueError, r"k_cache must be of one layer, got 4 of them: layout 'LSHD'"),
        ({"scale": np.nan}, ValueError, "scale must be in"),
        ({"soft_cap": -1.0}, ValueError, "soft_cap must be in"),
        ({"window": -1}, ValueError, "window must be in"),
        ({"slopes": [1.0]}, ValueError, r"slopes must have shape \(4,\)"),
        ({"sinks": [0, 0, np.nan, 0]}, ValueError, r"sinks\[2\]"),
        ({"mask": np.ones((1, 9), bool)}, ValueError, "K at least 16"),
        ({"mask": np.ones((1, 16), int)}, TypeError, "mask must be bool"),
        ({"lse_base": "10"}, ValueError, "lse_base must be 'e' or '2'"),
        ({"shared_prefix": 17}, ValueError, "shared_prefix must be at most the shortest"),
        ({"out": np.zeros((1, 4, 7), np.float32)}, ValueError, "out must have shape"),
        ({"out": np.zeros((1, 4, 8))}, TypeError, "out must be float32"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], said: str) -> None:
    good: dict[str, Any] = {"q": Q, "k_cache": K, "v_cache": K, "block_table": [[1]], "lengths": [16]}
    lanewise.decode_attention(**good)
    with pytest.raises(error, match=said):
        lanewise.decode_attention(**(good | change))


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ([0], "query_start must be 2"),
        ([1, 1], "query_start must be 2"),
        ([0, -1], r"query_start\[1\]"),
        ([0, 2], "q must have"),
    ],
)
def test_bad_query_start(starts: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lanewise.extend_attention(Q, K, K, [[1]], [16], starts)


def test_bad_states() -> None:
    v, s = np.zeros((1, 2, 3, 4), np.float32), np.zeros((1, 2, 3), np.float32)
    with pytest.raises(ValueError, match="s must have shape"):
        lanewise.merge_states(v, s[:, :1])
    with pytest.raises(ValueError, match="at least one state"):
        lanewise.merge_states(v[:, :0], s[:, :0])
    with pytest.raises(ValueError, match="same shape"):
        lanewise.merge_state(v[:, 0], s[:, 0], v[:, 0, :, :2], s[:, 0])
    with pytest.raises(TypeError, match="pair"):
        lanewise.merge_states(v, s, out=v)


def test_out_may_lie_in_the_inputs() -> None:
    rng = np.random.default_rng(9)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 4, 8), (4, 2, 16, 8), (4, 2, 16, 8)))
    want = lanewise.decode_attention(q, k, v, [[1]], [16])
    assert lanewise.decode_attention(q, k, v, [[1]], [16], out=q) is q
    assert q.tobytes() == want.tobytes()
    a, s = rng.standard_normal((2, 1, 3, 8)).astype(np.float32), np.zeros((2, 1, 3), np.float32)
    merged = lanewise.merge_state(a[0], s[0], a[1], s[1])
    lanewise.merge_state(a[0], s[0], a[1], s[1], out=(a[0], s[0]))
    assert (a[0].tobytes(), s[0].tobytes()) == (merged[0].tobytes(), merged[1].tobytes())
