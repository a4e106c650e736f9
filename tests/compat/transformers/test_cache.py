"""generate() with PagedCache, and with lanewise's attention, beside DynamicCache and torch's: the same texts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import lanewise.compat.transformers as compat
from lanewise.compat import _transformers_cache

IDS = torch.tensor([[5, 17, 80, 3, 9, 44, 21], [0, 0, 0, 7, 33, 60, 8], [90, 12, 5, 5, 71, 30, 2]])
MASK = (IDS != 0).long()
HOW: list[dict[str, Any]] = [
    {"max_new_tokens": 20},
    {"max_new_tokens": 300},  # the blocks grow
    {"max_new_tokens": 20, "num_beams": 4, "num_return_sequences": 3},
]


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that these few and small rows outgrow their blocks."""
    monkeypatch.setattr(_transformers_cache, "MIN_BYTES", 0)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes, **heads, eos_token_id=None, pad_token_id=0)).eval()


def text(model: Any, attention: str = "sdpa", rows: int = 3, **how: Any) -> Any:
    model.set_attn_implementation(attention)
    return model.generate(IDS[:rows], attention_mask=MASK[:rows], do_sample=False, **how)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_texts_are_those_of_dynamic_cache(model: Any, how: dict[str, Any], dtype: torch.dtype) -> None:
    model = model.to(dtype)
    assert torch.equal(text(model, **how), text(model, past_key_values=compat.PagedCache(model.config), **how))


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("how", HOW, ids=str)
def test_texts_by_lanewise_attention_are_torchs(model: Any, how: dict[str, Any]) -> None:
    model = model.to(torch.float32)
    want = text(model, **how)
    assert torch.equal(want, text(model, "lanewise", **how))
    assert torch.equal(want, text(model, "lanewise", past_key_values=compat.PagedCache(model.config), **how))


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_rejected_drafts_are_cropped(model: Any) -> None:
    how = {"max_new_tokens": 20, "prompt_lookup_num_tokens": 3, "rows": 1}
    model = model.to(torch.float32)
    assert torch.equal(text(model, **how), text(model, past_key_values=compat.PagedCache(model.config), **how))


def states(seed: int, count: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(3, 2, count, 8, generator=generator) for _ in range(2))  # type: ignore[return-value]


def test_rows_are_chosen_repeated_cropped_and_reset_as_in_dynamic_cache() -> None:
    ours, theirs = compat.PagedCache(), DynamicCache()
    steps = [
        lambda cache: cache.update(*states(1, 5), 0),
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
        lambda cache: cache.update(*states(2, 1), 0),
        lambda cache: cache.crop(-2),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(3),
        lambda cache: cache.update(*states(3, 300), 0),
        lambda cache: cache.reset(),
        lambda cache: cache.update(*states(4, 2), 0),
    ]
    for i, step in enumerate(steps):
        for cache in (ours, theirs):
            step(cache)
        assert ours.get_seq_length() == theirs.get_seq_length(), i
        if theirs.get_seq_length():
            assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys), i
            assert torch.equal(ours.layers[0].values, theirs.layers[0].values), i


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tokens_are_written_behind_the_last_and_seen_in_place(dtype: torch.dtype) -> None:
    ours, theirs = compat.PagedCache(), DynamicCache()
    generator = torch.Generator().manual_seed(6)
    given = [torch.randn(2, count, 3, 8, generator=generator).to(dtype) for count in [5, *[1] * 8, 300, *[2] * 120]]
    for i, each in enumerate(given):
        by_token, by_head = each.transpose(1, 2), each.transpose(1, 2).contiguous()
        was = ours.layers[0].keys if i else None
        seen = ours.update(by_token, by_head, 0)
        assert all(map(torch.equal, seen, theirs.update(by_token, by_head, 0))), i
        if was is not None and len(given[i][0]) == 1:
            assert was.data_ptr() == seen[0].data_ptr() and was.shape[2] == seen[0].shape[2] - 1
            assert torch.equal(was, theirs.layers[0].keys[:, :, :-1])
    ours.layers[0].cache.check()
    assert [row.length for row in ours.layers[0].rows] == [553, 553]


def test_a_fork_of_a_row_keeps_what_it_had() -> None:
    ours = compat.PagedCache()
    ours.update(*states(1, 5), 0)
    layer = ours.layers[0]
    with layer.rows[1].fork() as fork:
        ours.update(*states(2, 2), 0)
        fork.append(*(np.full((1, 1, 2, 8), 7, np.float32),) * 2)
        ours.update(*states(3, 1), 0)
        want = torch.cat([states(seed, count)[0] for seed, count in ((1, 5), (2, 2), (3, 1))], 2)[1]
        assert torch.equal(layer.keys[1], want)
        keys, _ = layer.cache.gather([fork])
        assert np.array_equal(keys[0, :5], want[:, :5].transpose(0, 1)) and (keys[0, 5:] == 7).all()


def test_all_may_be_cropped() -> None:
    ours, theirs = compat.PagedCache(), DynamicCache()
    for step in (lambda cache: cache.update(*states(1, 5), 0), lambda cache: cache.crop(-5)) * 2:
        for cache in (ours, theirs):
            step(cache)
        assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_a_prompt_goes_on_in_several_ways() -> None:
    """As transformers' guides have it: a copy of the cache for each."""
    ours, theirs, wide = compat.PagedCache(), DynamicCache(), compat.PagedCache()
    wide.update(*(each.double() for each in states(1, 5)), 0)  # no dtype of PagedKVCache: kept as DynamicCache keeps it
    assert torch.equal(copy.deepcopy(wide).layers[0].keys, wide.layers[0].keys)
    for cache in (ours, theirs):
        cache.update(*states(1, 5), 0)
    others = [
        (copy.deepcopy(ours), copy.deepcopy(theirs)),
        (copy.deepcopy(ours), copy.deepcopy(theirs)),
        (ours, theirs),
    ]
    for seed, pair in enumerate(others):
        for cache in pair:
            cache.update(*states(seed, 2 + seed), 0)
    for mine, its in others:
        assert torch.equal(mine.layers[0].keys, its.layers[0].keys)
        assert torch.equal(mine.layers[0].values, its.layers[0].values)
    ours.crop(-8)
    assert copy.deepcopy(ours).get_seq_length() == ours.get_seq_length() == 1
