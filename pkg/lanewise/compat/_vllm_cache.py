"""vLLM's functions of the KV-cache, and its CPU attention, for tensors in CPU memory, which stay where they are.

Names and arguments are those of vllm._custom_ops, and of torch.ops._C_cache_ops before copy_blocks was taken out there.
Errors are raised before anything is written.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

import lanewise

from .. import layouts, moves
from ._tensors import array, plain, tensor, torch, writable

Tensor = Any  # torch.Tensor: torch has types only where it is installed

FLOATS = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}


def named(error: Exception, theirs: str, ours: str) -> Exception:
    """An error of lanewise's that calls the argument what it is called here."""
    return type(error)(re.sub(rf"\b{ours}(?=\[| must)", theirs, str(error)))


# ---- new tokens ----


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Writes token i of key and value, (tokens or more, heads, head_dim), to slot slot_mapping[i]; below 0 to none.

    key_cache: (blocks, heads, head_dim / x, block, x). value_cache: (blocks, heads, head_dim, block).
    """
    append(key, value, key_cache, value_cache, slot_mapping, ("NHDTx", "NHDT"), kv_cache_dtype, k_scale, v_scale)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """reshape_and_cache for two caches of (blocks, block, heads, head_dim), with any strides."""
    append(key, value, key_cache, value_cache, slot_mapping, "NTHD", kv_cache_dtype, k_scale, v_scale)


def cpu_attn_reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """reshape_and_cache for two caches of (blocks, heads, block, head_dim). A row is a token's, whatever the isa."""
    append(key, value, key_cache, value_cache, slot_mapping, "NHTD", kv_cache_dtype, k_scale, v_scale)


def append(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    layout: layouts.Layout,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    count = slot_mapping.shape[0]
    key, value = (plain(each if each.shape[0] == count else each[:count]) for each in (key, value))
    scales = checked_dtype(kv_cache_dtype, (key_cache, value_cache), (k_scale, v_scale))
    try:
        lanewise.append_kv(
            key,
            value,
            writable(key_cache, "key_cache"),
            writable(value_cache, "value_cache"),
            slot_mapping,
            layout=layout,
            k_scales=scales[0],
            v_scales=scales[1],
            duplicates="last",
        )
    except (TypeError, ValueError) as error:
        raise named(error, "slot_mapping", "slots") from error


def checked_dtype(name: str, caches: tuple[Tensor, Tensor], scales: tuple[Any, Any]) -> tuple[Any, Any]:
    """What append_kv takes as scales: those of an int8 cache; of others there are none, and theirs must be 1."""
    if name == "int8":
        for side, cache in zip(("key_cache", "value_cache"), caches, strict=True):
            if cache.dtype != torch.int8:
                raise ValueError(f"{side} must be torch.int8 for kv_cache_dtype 'int8', got {cache.dtype}")
        return scales
    if name not in FLOATS:
        raise NotImplementedError(f"kv_cache_dtype must be one of {', '.join(FLOATS)} or int8, got {name!r}")
    for side, cache, scale in zip("kv", caches, scales, strict=True):
        if cache.dtype == torch.int8 or FLOATS[name] not in (None, cache.dtype):
            raise ValueError(f"kv_cache_dtype {name!r} does not go with a {side} cache of {cache.dtype}")
        if scale is not None and float(scale) != 1.0:
            raise NotImplementedError(f"{side}_scale must be 1.0 for a cache of {cache.dtype}, got {float(scale)}")
    return None, None


# ---- blocks ----


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    """In each layer's keys and values, writes block block_mapping[i, 0] to block block_mapping[i, 1], all at once."""
    try:
        lanewise.copy_blocks([plain(cache) for cache in (*key_caches, *value_caches)], block_mapping)
    except (TypeError, ValueError) as error:
        raise named(error, "block_mapping", "pairs") from error


def swap_blocks(src: Tensor, dst: Tensor, block_size_in_bytes: Any = None, block_mapping: Any = None) -> None:
    """Writes block block_mapping[i, 0] of src to block block_mapping[i, 1] of dst, all as if at once; both on the CPU.

    Blocks lie one after another, block_size_in_bytes each. Without it, as older versions have it, a block is what one
    index of the first axis selects, with any strides; the mapping is then the third argument.
    """
    if block_mapping is None:
        block_size_in_bytes, block_mapping = None, block_size_in_bytes
    if block_mapping is None:
        raise TypeError("swap_blocks() needs a block_mapping")
    if not len(block_mapping):
        return
    src, dst = plain(src), writable(dst, "dst")
    if block_size_in_bytes is not None:
        src, dst = (in_blocks(side, name, block_size_in_bytes) for side, name in ((src, "src"), (dst, "dst")))
    try:
        lanewise.swap_blocks(src, dst, block_mapping)
    except (TypeError, ValueError) as error:
        raise named(error, "block_mapping", "pairs") from error


def in_blocks(side: Tensor, name: str, size: int) -> Tensor:
    """The memory of a tensor as (blocks, bytes of one)."""
    reach = 1 + sum((n - 1) * step for n, step in zip(side.shape, side.stride(), strict=True))
    if side.numel() and reach != side.numel():
        raise ValueError(f"{name} must be of blocks that lie one after another, got strides {side.stride()}")
    total = side.numel() * side.element_size()
    if size < 1 or total % size:
        raise ValueError(f"block_size_in_bytes must divide the {total} bytes of {name}, got {size}")
    return side.as_strided((side.numel(),), (1,)).view(torch.uint8).view(-1, size)


def swap_blocks_batch(src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, is_src_access_order_any: bool = False) -> None:
    """Copies sizes[i] bytes from address src_ptrs[i] to address dst_ptrs[i]: of CPU memory, which nobody can check.

    What is written to must not overlap anything else that is read or written.
    """
    numbers = array(sizes)
    for name, given in (("src_ptrs", array(src_ptrs)), ("dst_ptrs", array(dst_ptrs))):
        if given.shape == numbers.shape and ((given == 0) & (numbers > 0)).any():
            raise ValueError(f"{name}[{np.argmax((given == 0) & (numbers > 0))}] is 0, which is no address")
    moves.copy_addresses(src_ptrs, dst_ptrs, numbers)


# ---- attention ----


class SchedulerMetadata:
    """What a step's attention was told, and the plans made of it once a layer has brought its block table."""

    def __init__(self, num_heads: int, num_kv_heads: int, seq_lens: Tensor, query_start_loc: Tensor) -> None:
        self.heads = num_heads, num_kv_heads
        self.seq_lens, self.query_start_loc = seq_lens.clone(), query_start_loc.clone()
        self.plans: list[tuple[Any, Tensor, lanewise.AttentionPlan, Any]] = []

    def plan(self, block_table: Tensor, block_size: int, causal: bool, window: int) -> tuple[Any, Any]:
        """The plan, and the mask that goes with it."""
        kind = block_size, causal, window
        for known, table, *made in self.plans:
            if known == kind and torch.equal(table, block_table):
                return tuple(made)
        plan = lanewise.AttentionPlan(
            block_table,
            self.seq_lens,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            block_size=block_size,
            query_start=self.query_start_loc,
            causal=causal,
            window=window - 1 if window > 0 else None,  # vLLM's counts the query's own position
        )
        mask = None if causal or window <= 0 else self.not_far_ahead(window)
        self.plans.append((kind, block_table.clone(), plan, mask))
        return plan, mask

    def not_far_ahead(self, window: int) -> Any:
        """(queries, keys): without causality vLLM's window reaches as far ahead as back, and a plan's only back."""
        counts = self.query_start_loc.diff()
        if not len(counts) or counts.max() <= window:
            return None
        behind = torch.repeat_interleave(self.seq_lens - self.query_start_loc[1:], counts)
        positions = behind + torch.arange(len(behind), device="cpu")
        return torch.arange(int(self.seq_lens.max()), device="cpu") < positions[:, None] + window


def cpu_attn_get_scheduler_metadata(
    num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seq_lens: Tensor,
    dtype: Any,
    query_start_loc: Tensor,
    causal: bool,
    sliding_window_size: int,
    isa: str,
    enable_kv_split: bool,
    dynamic_causal: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> SchedulerMetadata:
    """What cpu_attention_with_kv_cache is to be given in each layer of this step."""
    return SchedulerMetadata(num_heads, num_kv_heads, seq_lens[:num_reqs], query_start_loc[: num_reqs + 1])


def cpu_attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: Tensor | None,
    sliding_window: int,
    block_table: Tensor,
    softcap: float,
    scheduler_metadata: Any,
    s_aux: Tensor | None,
    dynamic_causal: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """Writes to output the attention of sequences' last tokens over caches that cpu_attn_reshape_and_cache wrote.

    query, output: (tokens, heads, head_dim). Caches: (blocks, kv_heads, block, head_dim), with any strides.
    """
    if not isinstance(scheduler_metadata, SchedulerMetadata):
        raise TypeError(
            "scheduler_metadata must come from lanewise's cpu_attn_get_scheduler_metadata, "
            f"got {type(scheduler_metadata).__name__}"
        )
    metadata = scheduler_metadata
    scales = checked_dtype(kv_cache_dtype, (key_cache, value_cache), (k_scale, v_scale))
    count = int(metadata.query_start_loc[-1])
    sequences = len(metadata.seq_lens)
    for name, given, planned in (
        ("seq_lens", seq_lens[:sequences], metadata.seq_lens),
        ("query_start_loc", query_start_loc[: sequences + 1], metadata.query_start_loc),
    ):
        if not torch.equal(given, planned):
            raise ValueError(f"{name} must be that of scheduler_metadata, {planned.tolist()}, got {given.tolist()}")
    if dynamic_causal is not None:
        causal = of_all(dynamic_causal[:sequences])
    plan, mask = metadata.plan(block_table[:sequences], key_cache.shape[2], causal, sliding_window)
    query, output = plain(query)[:count], plain(output)[:count]
    if output.shape != (*query.shape[:2], value_cache.shape[-1]):
        raise ValueError(
            f"output must have shape {(*query.shape[:2], value_cache.shape[-1])}, got {tuple(output.shape)}"
        )
    direct = output.dtype == torch.float32
    found = plan.run(
        query,
        plain(key_cache),
        plain(value_cache),
        layout="HND",
        scale=scale,
        soft_cap=softcap or None,
        slopes=alibi_slopes,
        mask=mask,
        sinks=None if s_aux is None else plain(s_aux).float(),
        k_scales=scales[0],
        v_scales=scales[1],
        out=array(output) if direct else None,
    )
    if not direct:
        output.copy_(tensor(found))


def of_all(dynamic_causal: Tensor) -> bool:
    """One answer for all sequences."""
    if bool(dynamic_causal.any()) != bool(dynamic_causal.all()):
        raise NotImplementedError(f"dynamic_causal must be the same for all sequences, got {dynamic_causal.tolist()}")
    return bool(dynamic_causal.all())
