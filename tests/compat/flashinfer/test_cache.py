"""The paged KV-cache and attention over it, against flashinfer's own reference functions in torch and restatements."""

import inspect
import math
import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what flashinfer says of a machine without a GPU
    import flashinfer
    from flashinfer.trace.templates import attention as attention_reference
    from flashinfer.trace.templates import cascade as cascade_reference
    from flashinfer.trace.templates import page as page_reference

import lanewise
from lanewise.compat import flashinfer as ours

inf = float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAGES, PAGE, HEADS, DIM = 12, 8, 2, 32


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


class Tables:
    """Requests of 20, 8, 0 and 3 tokens, their pages in no order."""

    indptr, last = ints(0, 3, 4, 4, 5), ints(4, 8, 0, 3)
    indices = ints(7, 2, 11, 0, 5)
    lengths = (20, 8, 0, 3)

    def tokens(self, cache, layout):
        """Of each request, (tokens, heads, head_dim), out of keys or values."""
        cache = cache if layout == "NHD" else cache.transpose(1, 2)
        rows = [self.indices[a:b].long() for a, b in zip(self.indptr[:-1], self.indptr[1:], strict=True)]
        return [cache[row].flatten(0, 1)[:length] for row, length in zip(rows, self.lengths, strict=True)]

    @property
    def told(self):
        return self.indptr, self.indices, self.last


TABLES = Tables()


def caches(layout, form, dtype=torch.float32, seed=1):
    """As a tuple of two or as one tensor; and its keys and values."""
    sizes = (PAGE, HEADS) if layout == "NHD" else (HEADS, PAGE)
    both = made(PAGES, 2, *sizes, DIM, dtype=dtype, seed=seed)
    return both if form == "one" else tuple(both.unbind(1)), both.unbind(1)


each_layout = pytest.mark.parametrize("layout", ["NHD", "HND"])
each_form = pytest.mark.parametrize("form", ["one", "two"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# ---- page tables ----


def test_get_seq_lens():
    mine, theirs = (f(TABLES.indptr, TABLES.last, PAGE) for f in (ours.get_seq_lens, flashinfer.get_seq_lens))
    assert torch.equal(mine, theirs)
    assert (mine.dtype, mine.tolist()) == (torch.int32, [20, 8, 0, 3])


def test_get_batch_indices_positions_of_flashinfers_page():
    requests, positions = ours.get_batch_indices_positions(ints(0, 1, 3, 6, 10), torch.tensor([5, 5, 5, 5]), 10)
    assert requests.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert positions.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4]
    assert requests.dtype == positions.dtype == torch.int32


def test_get_batch_indices_positions_pads_and_writes_to_what_it_is_given():
    outs = [torch.full((6,), 9, dtype=torch.int32) for _ in range(2)]
    found = ours.get_batch_indices_positions(ints(0, 2, 2, 3), ints(7, 4, 1), 6, *outs)
    assert all(a is b for a, b in zip(found, outs, strict=True))
    assert outs[0].tolist() == [0, 0, 2, -1, -1, -1]
    assert outs[1].tolist() == [5, 6, 0, 0, 0, 0]
    for wrong in (torch.empty(5, dtype=torch.int32), torch.empty(6, dtype=torch.int64)):
        with pytest.raises(ValueError, match="batch_indices"):
            ours.get_batch_indices_positions(ints(0, 2), ints(7), 6, wrong)
    for wrong in (ints(0, 7), ints(1, 2), ints(0, 1, 2), ints()):
        with pytest.raises(ValueError, match="append_indptr"):
            ours.get_batch_indices_positions(wrong, ints(7), 6)


# ---- append ----

NEW = ints(0, 5, 7, 7, 10)  # 5, 2, 0 and 3 new tokens, and two that pad


@each_layout
@each_form
@each_dtype
def test_append_paged_kv_cache(layout, form, dtype):
    requests, positions = ours.get_batch_indices_positions(NEW, ours.get_seq_lens(TABLES.indptr, TABLES.last, PAGE), 12)
    key, value = made(12, HEADS, DIM, dtype=dtype, seed=5), made(12, 3, HEADS, DIM, dtype=dtype, seed=6)[:, 1]
    given, halves = caches(layout, form, dtype)
    expected = tuple(half.clone() for half in halves)
    told = TABLES.indices, TABLES.indptr, TABLES.last, layout
    page_reference._append_paged_kv_cache_reference(
        key[:10], value[:10], requests[:10], positions[:10], expected, *told
    )
    assert ours.append_paged_kv_cache(key, value, requests, positions, given, *told) is None
    for found, half in zip(halves, expected, strict=True):
        assert torch.equal(found, half)
    for tokens, half in zip((key, value), halves, strict=True):
        assert torch.equal(TABLES.tokens(half, layout)[0][-5:], tokens[:5])


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"positions": ints(3, 24)}, r"positions\[1\] must be on a page that its request has, got 24"),
        ({"positions": ints(-1, 3)}, r"positions\[0\]"),
        ({"batch_indices": ints(0, 4)}, r"batch_indices\[1\] must be below 4, got 4"),
        ({"batch_indices": ints(0, 2)}, r"positions\[1\]"),  # a request without pages
        ({"batch_indices": ints(0)}, "as many"),
        ({"kv_indices": ints(7, 2, 12, 0, 5)}, r"kv_indices\[2\] must be in \[0, 11\], got 12"),
        ({"kv_indices": ints(7, -2, 1, 0, 5)}, r"kv_indices\[1\]"),
        ({"kv_indices": ints(7, 2)}, "kv_indptr ends at 5, but there are 2 kv_indices"),
        ({"kv_indptr": ints(0, 3, 2, 4, 5)}, r"kv_indptr\[1\] must not be above the next, got 3"),
        ({"kv_indptr": ints(1, 3, 4, 4, 5)}, "kv_indptr must be 5 numbers from 0 on"),
        ({"kv_last_page_len": ints(4, 9, 0, 3)}, r"kv_last_page_len\[1\] must be in \[1, 8\], got 9"),
        ({"kv_last_page_len": ints(0, 8, 0, 3)}, r"kv_last_page_len\[0\]"),
        ({"append_key": torch.zeros(2, HEADS, DIM + 1)}, "head_dim"),
        ({"append_key": torch.zeros(2, HEADS + 1, DIM)}, "heads"),
    ],
)
def test_append_refuses_before_it_writes(changed, match):
    given, halves = caches("NHD", "two")
    before = [half.clone() for half in halves]
    told = {"append_key": made(2, HEADS, DIM), "append_value": made(2, HEADS, DIM), "batch_indices": ints(0, 1)}
    told |= {"positions": ints(3, 4), "kv_indices": TABLES.indices, "kv_indptr": TABLES.indptr}
    told |= {"kv_last_page_len": TABLES.last, "paged_kv_cache": given}
    with pytest.raises(ValueError, match=match):
        ours.append_paged_kv_cache(**(told | changed))
    assert all(torch.equal(a, b) for a, b in zip(halves, before, strict=True))
    ours.append_paged_kv_cache(**told)
    assert not torch.equal(halves[0], before[0])


def test_append_refuses_what_is_no_integer_or_cannot_be_written_to():
    told = made(1, HEADS, DIM), made(1, HEADS, DIM)
    tables = TABLES.indices, TABLES.indptr, TABLES.last
    given, _ = caches("NHD", "one")
    with pytest.raises(TypeError, match="positions must be integers"):
        ours.append_paged_kv_cache(*told, ints(0), torch.zeros(1), given, *tables)
    with pytest.raises(TypeError, match="paged_kv_cache must be a tensor that can be written to"):
        ours.append_paged_kv_cache(*told, ints(0), ints(0), torch._neg_view(given), *tables)
    before = given.clone()
    ours.append_paged_kv_cache(told[0][:0], told[1][:0], ints(), ints(), given, *tables)
    assert torch.equal(given, before)


def test_a_batch_of_nobody():
    wrapper = ours.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(ints(0), ints(), ints(), QUERY_HEADS, HEADS, DIM, PAGE, q_data_type="float32")
    out, lse = wrapper.run(torch.empty(0, QUERY_HEADS, DIM), caches("NHD", "one")[0], return_lse=True)
    assert (out.shape, lse.shape) == ((0, QUERY_HEADS, DIM), (0, QUERY_HEADS))


def test_layouts_and_caches_of_another_kind_are_flashinfers_errors():
    told = made(1, HEADS, DIM), made(1, HEADS, DIM), ints(0), ints(0)
    with pytest.raises(KeyError, match="Invalid kv_layout DNH"):
        ours.append_paged_kv_cache(*told, caches("NHD", "one")[0], TABLES.indices, TABLES.indptr, TABLES.last, "DNH")
    with pytest.raises(KeyError, match="Unrecognized paged_kv_cache type"):
        ours.append_paged_kv_cache(*told, [1], TABLES.indices, TABLES.indptr, TABLES.last)


# ---- attention states ----


@each_dtype
def test_merging(dtype):
    v, s = made(5, 3, HEADS, DIM, dtype=dtype), made(5, 3, HEADS, seed=1) * 4
    bound = {"rtol": 0, "atol": {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]}
    mine, theirs = ours.merge_states(v, s), cascade_reference._merge_states_reference(v, s)
    torch.testing.assert_close(mine, theirs, **bound)
    two = v[:, 0], s[:, 0], v[:, 1], s[:, 1]
    mine = ours.merge_state(*two)
    assert (mine[0].dtype, mine[1].dtype) == (dtype, torch.float32)
    theirs = cascade_reference._merge_state_reference(*two)  # which gives float32
    torch.testing.assert_close(mine, (theirs[0].to(dtype), theirs[1]), **bound)
    for mask in (None, torch.tensor([True, False, False, True, True])):
        into = v[:, 0].clone(), s[:, 0].clone()
        assert ours.merge_state_in_place(*into, *two[2:], mask) is None
        kept = torch.ones(5, dtype=torch.bool) if mask is None else mask
        assert torch.equal(into[0], torch.where(kept[:, None, None], mine[0], two[0]))
        assert torch.equal(into[1], torch.where(kept[:, None], mine[1], two[1]))
        expected = cascade_reference._merge_state_in_place_reference(*two, mask)
        torch.testing.assert_close(into, (expected[0].to(dtype), expected[1]), **bound)


def test_sums_are_to_base_2():
    """Two states of a key each: the sum of two equal numbers is one more."""
    v, s = ours.merge_state(torch.ones(1, 1, 4), torch.zeros(1, 1), 3 * torch.ones(1, 1, 4), torch.zeros(1, 1))
    assert (v == 2).all()
    assert s.tolist() == [[1.0]]


def test_empty_states():
    """Two empty ones stay empty, where flashinfer before 0.6 gave NaN (flashinfer-ai/flashinfer#4051)."""
    empty = torch.full((1, 1, 4), torch.nan), torch.full((1, 1), -inf)
    v, s = ours.merge_state(*empty, *empty)
    assert (v.tolist(), s.tolist()) == ([[[0.0] * 4]], [[-inf]])
    v, s = ours.merge_state(*empty, torch.ones(1, 1, 4), torch.full((1, 1), 2.0))
    assert ((v == 1).all(), s.tolist()) == (True, [[2.0]])
    v, s = ours.merge_states(torch.empty(2, 0, 1, 4), torch.empty(2, 0, 1))
    assert (v.tolist(), s.tolist()) == ([[[0.0] * 4]] * 2, [[-inf]] * 2)
    with pytest.raises(ValueError, match="mask"):
        ours.merge_state_in_place(v, s, v.clone(), s.clone(), torch.tensor([True]))


# ---- attention ----

QUERY_HEADS, SCALE = 6, 1 / math.sqrt(DIM)
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def attend(q, keys, values, visible, scale=SCALE, soft_cap=0.0, sinks=None):
    """One request: queries (n, heads, dim) over keys (tokens, kv_heads, dim), float64; visible: (n, tokens)."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("nhd,thd->nht", q.double(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible[:, None], -inf)
    shown = scores if sinks is None else torch.cat([scores, sinks.double()[None, :, None].expand(len(q), -1, 1)], -1)
    lse = shown.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -inf, 0)[..., None])
    return torch.einsum("nht,thd->nhd", weights, values), lse / math.log(2)


def expected_of(q, halves, layout, new, causal, window=-1, masks=None, **how):
    """All requests; what their last `new` tokens see."""
    found, first = [], 0
    keys, values = (TABLES.tokens(half, layout) for half in halves)
    for i, (length, n) in enumerate(zip(TABLES.lengths, new, strict=True)):
        at, to = torch.arange(length - n, length)[:, None], torch.arange(length)[None]
        visible = (to <= at) | (not causal)
        visible = visible & (to >= at - window) if window >= 0 else visible
        visible = visible if masks is None else visible & masks[i]
        found.append(attend(q[first : first + n], keys[i], values[i], visible.expand(n, length), **how))
        first += n
    return tuple(torch.cat(part) for part in zip(*found, strict=True))


def decoding(layout="NHD", dtype=torch.float32, **told):
    wrapper = ours.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8), layout)
    wrapper.plan(*TABLES.told, QUERY_HEADS, HEADS, DIM, PAGE, **({"q_data_type": dtype} | told))
    return wrapper


def close(found, expected, dtype=torch.float32):
    for mine, theirs, bound in zip(found, expected, (BOUNDS[dtype], 4e-6), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=bound)


@each_layout
@each_form
@each_dtype
def test_decoding(layout, form, dtype):
    given, halves = caches(layout, form, dtype)
    q = made(4, QUERY_HEADS, DIM, dtype=dtype, seed=3)
    wrapper = decoding(layout, dtype)
    found = wrapper.run(q, given, return_lse=True)
    close(found, expected_of(q, halves, layout, (1, 1, 1, 1), True), dtype)
    assert (found[0].dtype, found[1].dtype) == (dtype, torch.float32)
    assert not found[0][2].any()  # a request without keys
    assert (found[1][2] == -inf).all()
    assert torch.equal(wrapper.run(q, given), found[0])
    assert torch.equal(wrapper.run_return_lse(q, given)[1], found[1])


def test_decoding_is_flashinfers_reference():
    """Which rounds to bfloat16, and takes all of each page."""
    given, halves = caches("NHD", "two", torch.bfloat16)
    q = made(4, QUERY_HEADS, DIM, dtype=torch.bfloat16)
    full = ints(PAGE, PAGE, 0, PAGE)
    wrapper = ours.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(TABLES.indptr, TABLES.indices, full, QUERY_HEADS, HEADS, DIM, PAGE, q_data_type="bfloat16")
    told = q, *halves, TABLES.indptr, TABLES.indices, SCALE
    theirs = attention_reference._gqa_paged_decode_reference(*told)
    torch.testing.assert_close(wrapper.run(q, given, return_lse=True), theirs, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("told", "how", "run"),
    [
        ({"window_left": 5}, {"window": 5}, {}),
        ({"window_left": 0}, {"window": 0}, {"window_left": 0}),
        ({"logits_soft_cap": 1.5}, {"soft_cap": 1.5}, {}),
        ({"sm_scale": 0.5}, {"scale": 0.5}, {}),
        ({"sm_scale": 0.5}, {"scale": 0.5 * 2 * 0.25}, {"q_scale": 2.0, "k_scale": 0.25}),
        ({}, {"sinks": made(QUERY_HEADS, seed=9)}, {"sinks": made(QUERY_HEADS, seed=9)}),
        ({"fixed_split_size": 1, "disable_split_kv": True, "non_blocking": False, "rope_theta": 1e5}, {}, {}),
    ],
    ids=["window", "window of itself", "soft cap", "scale", "scales", "sinks", "nothing"],
)
def test_settings_of_decoding(told, how, run):
    given, halves = caches("NHD", "one")
    q = made(4, QUERY_HEADS, DIM, seed=3)
    found = decoding(**told).run(q, given, return_lse=True, **run)
    close(found, expected_of(q, halves, "NHD", (1, 1, 1, 1), True, **how))


def test_values_are_scaled_and_dtypes_mixed():
    given, halves = caches("NHD", "one", torch.bfloat16)
    q = made(4, QUERY_HEADS, DIM, seed=3)
    wrapper = decoding(kv_data_type=torch.bfloat16, o_data_type="float16")
    expected = expected_of(q, halves, "NHD", (1, 1, 1, 1), True)[0]
    found = wrapper.run(q, given, v_scale=2.0)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), 2 * expected, rtol=0, atol=4e-3)


@each_dtype
def test_outputs_are_written_to(dtype):
    given, _ = caches("NHD", "one", dtype)
    q = made(4, QUERY_HEADS, DIM, dtype=dtype, seed=3)
    wrapper = decoding(dtype=dtype)
    expected = wrapper.run(q, given, return_lse=True)
    outs = torch.empty_like(q), torch.empty(4, QUERY_HEADS)
    found = wrapper.run(q, given, out=outs[0], lse=outs[1], return_lse=True)
    for mine, out, value in zip(found, outs, expected, strict=True):
        assert mine is out
        assert torch.equal(out, value)
    assert torch.equal(wrapper.run(q, given, out=q), expected[0])  # over the queries themselves
    assert torch.equal(q, expected[0])


def test_several_queries_a_request_are_causal():
    tables = TABLES.indptr[:3], TABLES.indices, TABLES.last[:2]
    wrapper = ours.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*tables, QUERY_HEADS, HEADS, DIM, PAGE, q_data_type=torch.float32, q_len_per_req=3, is_causal=True)
    given, halves = caches("NHD", "one")
    q = made(6, QUERY_HEADS, DIM)
    expected = expected_of(q, halves, "NHD", (3, 3, 0, 0), True)
    close(wrapper.run(q, given, return_lse=True), expected)


def test_a_plan_serves_all_layers_and_gives_lanewises_bits():
    wrapper, q = decoding(), made(4, QUERY_HEADS, DIM, seed=3)
    table = torch.tensor([[7, 2, 11], [0, 0, 0], [0, 0, 0], [5, 0, 0]])
    for seed in range(3):
        given, halves = caches("NHD", "one", seed=seed)
        expected = lanewise.decode_attention(q, *halves, table, torch.tensor(TABLES.lengths), layout="NHD")
        assert torch.equal(wrapper.run(q, given), torch.from_numpy(expected))


def test_positional_settings_are_deprecated_as_in_flashinfer():
    wrapper = ours.BatchDecodeWithPagedKVCacheWrapper(None)
    told = *TABLES.told, QUERY_HEADS, HEADS, DIM, PAGE
    with pytest.warns(DeprecationWarning, match="by name"):
        wrapper.plan(*told, "NONE", 5, None, torch.float32)
    given, _ = caches("NHD", "one")
    q = made(4, QUERY_HEADS, DIM)
    assert torch.equal(wrapper.run(q, given), decoding(window_left=5).run(q, given))
    with pytest.warns(DeprecationWarning), pytest.raises(NotImplementedError):
        wrapper.plan(*told, "ALIBI")
    with pytest.raises(TypeError, match="multiple values for argument 'window_left'"):
        wrapper.plan(*told, "NONE", 5, window_left=5)
    with pytest.raises(TypeError, match="at most 16"):
        wrapper.plan(*told, *range(17))


@pytest.mark.parametrize(
    ("told", "raised", "match"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, NotImplementedError, "pos_encoding_mode must be 'NONE'"),
        ({"pos_encoding_mode": "ROPE"}, KeyError, "Invalid pos_encoding_mode ROPE"),
        ({"window_right": 1}, NotImplementedError, "window_right"),
        ({"is_causal": True}, NotImplementedError, "is_causal must be False for q_len_per_req=1"),
        ({"use_token_head_sf": True}, NotImplementedError, "use_token_head_sf"),
        ({"kv_data_type": torch.float8_e4m3fn}, NotImplementedError, "kv_data_type must be one of"),
        ({"q_data_type": "float64"}, NotImplementedError, "q_data_type must be one of"),
        ({"flavour": 1}, TypeError, "flavour"),
    ],
)
def test_what_plan_refuses(told, raised, match):
    with pytest.raises(raised, match=match):
        decoding(**told)


def test_what_run_refuses():
    given, _ = caches("NHD", "one")
    q = made(4, QUERY_HEADS, DIM)
    wrapper = decoding()
    for wrong, raised, match in (
        ({"q": q.half()}, ValueError, "The dtype of q torch.float16 does not match the q_data_type torch.float32"),
        ({"paged_kv_cache": given.half()}, ValueError, "The dtype of k torch.float16 does not match the kv_data_type"),
        ({"q": q[:3]}, ValueError, "q must have shape"),
        ({"q": q[..., :16]}, ValueError, "q must have shape"),
        ({"paged_kv_cache": given[:11]}, ValueError, r"indices\[2\] must be in \[0, 10\], got 11"),
        ({"paged_kv_cache": given[:, :, :4]}, ValueError, "tokens a block as planned"),
        ({"paged_kv_cache": given[:, 0]}, ValueError, "must be 5D"),
        ({"out": torch.empty(4, QUERY_HEADS, DIM).half()}, ValueError, "Invalid dtype of out"),
        ({"lse": torch.empty(4, 1), "return_lse": True}, ValueError, "Invalid shape of lse"),
        ({"window_left": 3}, AssertionError, "window_left"),
        ({"kv_cache_sf": given}, NotImplementedError, "kv_cache_sf"),
        ({"skip_softmax_threshold_scale_factor": 0.1}, NotImplementedError, "skip_softmax"),
    ):
        with pytest.raises(raised, match=match):
            wrapper.run(**({"q": q, "paged_kv_cache": given} | wrong))
    with pytest.raises(RuntimeError, match="plan"):
        ours.BatchDecodeWithPagedKVCacheWrapper(None).run(q, given)
    with pytest.raises(NotImplementedError, match="use_cuda_graph"):
        ours.BatchDecodeWithPagedKVCacheWrapper(None, use_cuda_graph=True)
    with pytest.raises(KeyError, match="Invalid kv_layout"):
        ours.BatchDecodeWithPagedKVCacheWrapper(None, "NDH")


# ---- several new tokens a request ----

FRESH = (4, 8, 0, 1)
STARTS = ints(0, 4, 12, 12, 13)


def extending(layout="NHD", dtype=torch.float32, **told):
    wrapper = ours.BatchPrefillWithPagedKVCacheWrapper(None, layout)
    wrapper.plan(STARTS, *TABLES.told, QUERY_HEADS, HEADS, DIM, PAGE, **({"q_data_type": dtype} | told))
    return wrapper


@each_layout
@each_dtype
@pytest.mark.parametrize("causal", [True, False])
def test_extending(layout, dtype, causal):
    given, halves = caches(layout, "one", dtype)
    q = made(13, QUERY_HEADS, DIM, dtype=dtype, seed=4)
    found = extending(layout, dtype, causal=causal).run(q, given, return_lse=True)
    close(found, expected_of(q, halves, layout, FRESH, causal), dtype)


def test_extending_is_flashinfers_reference():
    given, halves = caches("NHD", "two", torch.bfloat16)
    q = made(13, QUERY_HEADS, DIM, dtype=torch.bfloat16)
    wrapper = ours.BatchPrefillWithPagedKVCacheWrapper(None)
    full = ints(PAGE, PAGE, 0, PAGE)
    told = STARTS, TABLES.indptr, TABLES.indices
    wrapper.plan(*told, full, QUERY_HEADS, HEADS, DIM, PAGE, causal=True, q_data_type="bfloat16")
    theirs = attention_reference._gqa_paged_prefill_reference(q, *halves, *told, SCALE)
    torch.testing.assert_close(wrapper.run(q, given, return_lse=True), theirs, rtol=0, atol=1e-2)


@pytest.mark.parametrize("packed", [False, True])
def test_custom_masks(packed):
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(n, length, generator=generator) < 0.5 for n, length in zip(FRESH, TABLES.lengths, strict=True)]
    masks[0][1] = False  # a query that sees nothing
    given, halves = caches("NHD", "one")
    q = made(13, QUERY_HEADS, DIM, seed=4)
    flat = torch.cat([mask.flatten() for mask in masks])
    told = {"custom_mask": flat}
    if packed:
        bits = [torch.nn.functional.pad(m.flatten(), (0, -m.numel() % 8)).view(-1, 8).int() for m in masks if m.numel()]
        told = {"packed_custom_mask": (torch.cat(bits) << torch.arange(8)).sum(1).to(torch.uint8)}
    found = extending(causal=True, **told).run(q, given, return_lse=True)
    close(found, expected_of(q, halves, "NHD", FRESH, False, masks=masks))
    assert not found[0][1].any()
    with pytest.raises(ValueError, match="custom_mask must have one entry for each query and key: 147, got 146"):
        extending(custom_mask=flat[1:])


def test_sums_in_either_base_and_layout():
    given, _ = caches("NHD", "one")
    q = made(13, QUERY_HEADS, DIM, seed=4)
    wrapper = extending(causal=True)
    out, lse = wrapper.run(q, given, return_lse=True)
    natural = wrapper.run(q, given, return_lse=True, lse_base="ln", lse_layout="HN")
    assert torch.equal(natural[0], out)
    assert natural[1].is_contiguous()
    torch.testing.assert_close(natural[1].t(), lse * math.log(2), rtol=1e-6, atol=1e-6)
    given_lse = torch.empty(QUERY_HEADS, 13)
    assert wrapper.run(q, given, return_lse=True, lse=given_lse, lse_layout="HN")[1] is given_lse
    assert torch.equal(given_lse.t(), lse)
    with pytest.raises(ValueError, match="lse_base"):
        wrapper.run(q, given, lse_base="log10")


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"prefix_len_ptr": ints(1)}, "prefix_len_ptr"),
        ({"token_pos_in_items_ptr": ints(1)}, "token_pos_in_items_ptr"),
        ({"max_item_len_ptr": ints(1)}, "max_item_len_ptr"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode"),
        ({"use_token_head_sf": True}, "use_token_head_sf"),
    ],
)
def test_what_extending_refuses(told, match):
    with pytest.raises(NotImplementedError, match=match):
        extending(**told)


# ---- levels ----


@each_dtype
@pytest.mark.parametrize("causal", [True, False])
def test_levels_are_as_one(dtype, causal):
    """A prefix of two pages for all, one of a page for the first two requests, and each request's own pages."""
    given, halves = caches("NHD", "one", dtype)
    q = made(9, QUERY_HEADS, DIM, dtype=dtype, seed=4)
    starts, own = ints(0, 4, 6, 9), ints(4, 2, 3)
    levels = (
        ([0, 9], [0, 2], [3, 8], [PAGE]),
        ([0, 6, 9], [0, 1, 1], [1], [PAGE, 0]),
        (starts.tolist(), [0, 1, 3, 4], [7, 2, 11, 0], [6, 5, 3]),
    )
    wrapper = ours.MultiLevelCascadeAttentionWrapper(3, None, "NHD")
    told = QUERY_HEADS, HEADS, DIM, PAGE
    tables = [[ints(*part) for part in each] for each in zip(*levels, strict=True)]
    wrapper.plan(*tables, *told, causal=causal, q_data_type=dtype)
    found = wrapper.run(q, given)
    assert found.dtype == dtype
    pages = (([3, 8, 1, 7], 30), ([3, 8, 1, 2, 11], 37), ([3, 8, 0], 19))
    for i, (chosen, length) in enumerate(pages):
        n, rows = int(own[i]), q[starts[i] : starts[i + 1]]
        keys, values = (half[chosen].flatten(0, 1)[:length] for half in halves)
        visible = torch.arange(length)[None] <= torch.arange(length - n, length)[:, None]
        expected, _ = attend(rows, keys, values, visible if causal else visible | True)
        mine = found[starts[i] : starts[i + 1]]
        torch.testing.assert_close(mine.double(), expected, rtol=0, atol=BOUNDS[dtype])


def test_levels_are_checked():
    with pytest.raises(ValueError, match="num_levels"):
        ours.MultiLevelCascadeAttentionWrapper(0)
    wrapper = ours.MultiLevelCascadeAttentionWrapper(2)
    with pytest.raises(ValueError, match="for each of 2 levels, got 1"):
        wrapper.plan([STARTS], [TABLES.indptr], [TABLES.indices], [TABLES.last], QUERY_HEADS, HEADS, DIM, PAGE)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(made(1, QUERY_HEADS, DIM), caches("NHD", "one")[0])


# ---- names ----


def parameters(function):
    return inspect.signature(inspect.unwrap(function)).parameters


def test_signatures_are_flashinfers():
    for name in (
        *("append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
        *("merge_state", "merge_state_in_place", "merge_states"),
    ):
        mine, theirs = parameters(getattr(ours, name)), parameters(getattr(flashinfer, name))
        assert list(mine) == list(theirs)
        assert [each.default for each in mine.values()] == [each.default for each in theirs.values()]
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        mine, theirs = getattr(ours, name), getattr(flashinfer, name)
        assert list(parameters(mine.__init__)) == list(parameters(theirs.__init__))
        assert list(parameters(mine.plan)) == list(parameters(theirs.plan))
        extra = [each for each in parameters(theirs.run) if each != "args"]  # those of kernels of one's own
        assert list(parameters(mine.run)) == extra
        for member in ("begin_forward", "end_forward", "run_return_lse", "reset_workspace_buffer"):
            assert callable(getattr(mine, member))
    for member in ("__init__", "plan", "run"):
        mine, theirs = (parameters(getattr(of.MultiLevelCascadeAttentionWrapper, member)) for of in (ours, flashinfer))
        assert list(mine) == list(theirs)
    mine = parameters(ours.BatchDecodeWithPagedKVCacheWrapper._decode)
    theirs = parameters(flashinfer.BatchDecodeWithPagedKVCacheWrapper._plan_impl)
    settings = [name for name, each in theirs.items() if each.kind is each.KEYWORD_ONLY]
    assert [name for name, each in mine.items() if each.kind is each.KEYWORD_ONLY] == settings
    assert all(mine[name].default == theirs[name].default for name in settings)
