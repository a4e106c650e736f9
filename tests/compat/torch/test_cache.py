"""What lanewise.compat.torch has of the KV-cache, attention, beams and drafts, against lanewise on the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import lanewise
import lanewise.compat.torch as tensors
from lanewise._arrays import as_array
from lanewise.compat import _torch_cache

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCKS, HEADS, BLOCK, DIM = 6, 2, 16, 32


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pool(dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return made(BLOCKS, HEADS, BLOCK, DIM, dtype=dtype, seed=seed)


def of_memory(value: Any) -> Any:
    """Arrays over copies of the tensors' memory, for lanewise itself."""
    if isinstance(value, torch.Tensor):
        return as_array(value.clone(), "")
    return type(value)(map(of_memory, value)) if isinstance(value, (list, tuple)) else value


def bits(value: Any) -> Any:
    """Of tensors and of arrays alike."""
    if isinstance(value, torch.Tensor):
        value = as_array(value, "")
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    return [bits(each) for each in value] if isinstance(value, (list, tuple)) else value


def calls(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Arguments of each function; those that are written to are fresh."""
    key, value, caches = pool(dtype), pool(dtype, 2), {"k_cache": pool(dtype), "v_cache": pool(dtype, 2)}
    attended = caches | {"block_table": torch.tensor([[0, 1], [4, 2]]), "lengths": torch.tensor([20, 7])}
    tokens = made(3, HEADS, DIM, dtype=dtype, seed=3)
    state = {
        "v_a": made(2, 4, DIM, dtype=dtype),
        "s_a": made(2, 4),
        "v_b": made(2, 4, DIM, dtype=dtype),
        "s_b": made(2, 4),
    }
    return {
        "append_kv": {"k": tokens, "v": tokens.flip(0), **caches, "slots": torch.tensor([9, -1, 40]), "layout": "HND"},
        "attention_step": {"q": made(4, DIM, dtype=dtype), "k": tokens, "v": tokens, "state": (made(4, DIM), made(4))},
        "beam_step": {"scores": torch.zeros(1, 2), "logits": made(2, 100, dtype=dtype), "n": 3},
        "copy_blocks": {"pool": [key, value], "pairs": torch.tensor([[0, 1], [1, 0]])},
        "decode_attention": {"q": made(2, 4, DIM, dtype=dtype), **attended, "window": 5, "sinks": made(4)},
        "extend_attention": {
            "q": made(5, 4, DIM, dtype=dtype),
            **attended,
            "query_start": torch.tensor([0, 3, 5]),
            "return_lse": True,
            "lse_base": "2",
            "mask": torch.arange(20) % 3 > 0,
        },
        "gather_blocks": {"pool": key, "ids": torch.tensor([5, 0, 5])},
        "gather_kv": {**caches, "slots": torch.tensor([95, 0, -1]), "layout": "HND"},
        "merge_state": {**state, "lse_base": "2"},
        "merge_states": {"v": made(2, 3, 4, DIM, dtype=dtype), "s": made(2, 3, 4)},
        "permute_blocks": {"pool": key, "order": torch.tensor([3, 4, 5, 0, 1, 2])},
        "relayout": {
            "src": (key, value),
            "src_layout": "HND",
            "dst": torch.zeros(BLOCKS, 2, BLOCK, HEADS, DIM, dtype=dtype),
            "dst_layout": "N2THD",
            "pairs": torch.tensor([[0, 95], [17, 3]]),
        },
        "scatter_blocks": {"blocks": value[:2], "ids": torch.tensor([4, 1]), "pool": key},
        "swap_blocks": {"src": value, "dst": key, "pairs": torch.tensor([[0, 5], [3, 0]])},
        "verify_draft": {
            "target": made(5, 100, dtype=dtype),
            "draft": [[1, 2], torch.tensor([3])],
            "method": "ratio",
            "q": torch.softmax(made(3, 100), 1),
            "seed": 5,
            "step": 2,
        },
        "zero_blocks": {"pool": key, "ids": torch.tensor([2, 3])},
    }


NAMES = sorted(calls(torch.float32))
WRITTEN = {"append_kv", "copy_blocks", "permute_blocks", "relayout", "scatter_blocks", "swap_blocks", "zero_blocks"}
each_name = pytest.mark.parametrize("name", NAMES)


def test_each_is_called_here() -> None:
    assert {*NAMES, "AttentionPlan"} == {name for name in tensors.__all__ if hasattr(_torch_cache, name)}


@each_name
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_give_and_hold_what_arrays_do(name: str, dtype: torch.dtype) -> None:
    given = calls(dtype)[name]
    arrays = {key: of_memory(value) for key, value in given.items()}
    before = bits(list(given.values()))
    found, expected = getattr(tensors, name)(**given), getattr(lanewise, name)(**arrays)
    assert bits(found) == bits(expected)
    assert bits(list(given.values())) == bits(list(arrays.values()))
    assert (bits(list(given.values())) != before) == (name in WRITTEN)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(found) if leaf is not None]
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert (found is None) == (name in WRITTEN)


@each_name
def test_arguments_may_stand_without_their_names(name: str) -> None:
    given, again = (calls(torch.float32)[name] for _ in range(2))
    first = next(iter(given))
    found, expected = getattr(tensors, name)(given.pop(first), **given), getattr(tensors, name)(**again)
    assert bits(found) == bits(expected)
    assert bits(list(given.values())) == bits(list(again.values())[1:])
    with pytest.raises(TypeError):
        getattr(tensors, name)(*range(30))
    with pytest.raises(TypeError):
        getattr(tensors, name)(again[first], **again)


OUTS = {
    "decode_attention": lambda: made(2, 4, DIM),
    "gather_blocks": lambda: pool(torch.bfloat16)[:3],
    "gather_kv": lambda: (made(3, HEADS, DIM).half(), made(3, HEADS, DIM)),
    "merge_state": lambda: (made(2, 4, DIM), made(2, 4)),
    "merge_states": lambda: (made(2, 4, DIM), made(2, 4)),
}


@pytest.mark.parametrize("name", OUTS)
def test_out_is_given_back(name: str) -> None:
    out = OUTS[name]()
    outs = out if isinstance(out, tuple) else (out,)
    counted = [each._version for each in outs]
    expected = getattr(lanewise, name)(
        **{k: of_memory(v) for k, v in calls(torch.bfloat16)[name].items()}, out=of_memory(out)
    )
    found = getattr(tensors, name)(**calls(torch.bfloat16)[name], out=out)
    assert all(a is b for a, b in zip(found if isinstance(found, tuple) else (found,), outs, strict=True))
    assert bits(found) == bits(expected)
    assert all(each._version > count for each, count in zip(outs, counted, strict=True))


def test_autograd_is_told_of_a_write() -> None:
    cache = torch.zeros(2, BLOCKS, HEADS, BLOCK, DIM)
    weight = torch.ones(2, 1, 1, 1, 1, requires_grad=True)
    loss = (cache * weight).sum()
    tensors.append_kv(*made(2, 1, HEADS, DIM), *cache, [0], layout="HND")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        cache = torch.zeros(2, BLOCKS, HEADS, BLOCK, DIM)
        tensors.append_kv(*made(2, 1, HEADS, DIM), *cache, [0], layout="HND")
        assert cache[0, 0, :, 0].any()


def test_gradients_are_refused_not_lost() -> None:
    given = calls(torch.float32)["decode_attention"]
    tracked = given | {"q": given["q"].clone().requires_grad_()}
    with pytest.raises(RuntimeError, match="q requires a gradient, and none is passed on"):
        tensors.decode_attention(**tracked)
    with torch.no_grad():
        assert torch.equal(tensors.decode_attention(**tracked), tensors.decode_attention(**given))


def test_a_negated_view_is_read_and_not_written() -> None:
    given = calls(torch.float32)["decode_attention"]
    negated = given | {"q": torch._neg_view(-given["q"])}
    assert torch.equal(tensors.decode_attention(**negated), tensors.decode_attention(**given))
    with pytest.raises(TypeError, match="pool must be a tensor that can be written to"):
        tensors.zero_blocks(torch._neg_view(pool(torch.float32)))


def test_dtypes_are_torchs() -> None:
    for dtype in DTYPES:
        found = tensors.gather_kv(**calls(torch.float32)["gather_kv"], dtype=dtype)
        assert [each.dtype for each in found] == [dtype, dtype]


def test_a_plan() -> None:
    given = calls(torch.bfloat16)["decode_attention"]
    plan = tensors.AttentionPlan(
        given["block_table"], given["lengths"], num_heads=4, num_kv_heads=HEADS, block_size=BLOCK
    )
    assert (plan.num_queries, plan.num_heads, plan.num_kv_heads, plan.block_size) == (2, 4, HEADS, BLOCK)
    q, caches = given["q"], (given["k_cache"], given["v_cache"])
    out = torch.empty(2, 4, DIM)
    found, lse = plan.run(q, *caches, return_lse=True, out=out)
    expected = lanewise.decode_attention(q, *caches, given["block_table"], given["lengths"], return_lse=True)
    assert found is out
    assert bits((found, lse)) == bits(expected)


def test_rows_that_cannot_be_chosen_from() -> None:
    target = torch.zeros(2, 10)
    target[0] = torch.nan
    with pytest.raises(lanewise.InvalidLogitsError) as error:
        tensors.verify_draft(target, [1], temperature=0.0)
    assert isinstance(error.value.tokens.tokens, torch.Tensor)


def test_a_graph_is_left_and_taken_up_again() -> None:
    given = calls(torch.float32)["decode_attention"]
    q = given.pop("q")

    def step(q: torch.Tensor) -> torch.Tensor:
        return tensors.decode_attention(q * 2, **given) + 1

    assert torch.equal(torch.compile(step, backend="eager")(q), step(q))


def test_what_is_written_is_no_negated_view() -> None:
    rows, cache = made(1, HEADS, DIM), torch._neg_view(pool(torch.float32))
    with pytest.raises(TypeError, match="k_cache must not be a negated view"):
        lanewise.append_kv(rows, None, cache, None, [0], layout="NHTD")
    with pytest.raises(TypeError, match=r"out\[0\] must not be a negated view"):
        lanewise.gather_kv(pool(torch.float32), None, [0], layout="NHTD", out=(torch._neg_view(rows), None))
    with pytest.raises(TypeError, match="dst must not be a negated view"):
        lanewise.relayout(pool(torch.float32), "NHTD", cache, "NHTD")
    with pytest.raises(TypeError, match="buffer must not be a negated view"):
        lanewise.PagedKVCache(1, 1, 1, 1, buffer=torch._neg_view(torch.zeros(4096)))
