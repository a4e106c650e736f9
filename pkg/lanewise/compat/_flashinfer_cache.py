"""flashinfer's paged KV-cache, its merging of attention states, and two of its attention wrappers, for CPU tensors."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, ClassVar, Literal

import numpy as np

import lanewise

from ._tensors import array, plain, tensor, torch, writable

Array = np.ndarray[Any, Any]
Tensor = Any  # torch.Tensor: torch has types only where it is installed

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def checked_layout(kv_layout: str) -> Literal["NHD", "HND"]:
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"Invalid kv_layout {kv_layout}")
    return kv_layout  # type: ignore[return-value]


def halves(paged_kv_cache: Any) -> tuple[Tensor, Tensor]:
    """Keys and values, four axes each."""
    if isinstance(paged_kv_cache, tuple):
        keys, values = paged_kv_cache
    elif isinstance(paged_kv_cache, torch.Tensor):
        if paged_kv_cache.ndim != 5:
            raise ValueError(f"paged_kv_cache must be 5D, or a tuple of two, got {paged_kv_cache.ndim}D")
        keys, values = paged_kv_cache.unbind(1)
    else:
        raise KeyError(f"Unrecognized paged_kv_cache type {type(paged_kv_cache)}, expect a tensor or a tuple of two")
    return plain(keys), plain(values)


# ---- page tables ----


class Pages:
    """Which pages each request has: CSR as flashinfer keeps it, checked."""

    def __init__(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, prefix: str = ""
    ) -> None:
        self.prefix = prefix
        self.starts, last = integers(indptr, prefix + "indptr"), integers(last_page_len, prefix + "last_page_len")
        if len(self.starts) != len(last) + 1 or self.starts[0] != 0:
            raise ValueError(f"{prefix}indptr must be {len(last) + 1} numbers from 0 on, got {self.starts.tolist()}")
        self.counts = np.diff(self.starts)
        refuse(self.counts < 0, prefix + "indptr", self.starts, "must not be above the next")
        found = integers(indices, prefix + "indices")
        self.indices = found[: self.starts[-1]]
        if len(self.indices) < self.starts[-1]:
            raise ValueError(f"{prefix}indptr ends at {self.starts[-1]}, but there are {len(found)} {prefix}indices")
        self.lowest, self.highest = self.indices.min(initial=0), self.indices.max(initial=-1)
        has = self.counts > 0
        refuse(has & ((last < 1) | (last > page_size)), prefix + "last_page_len", last, f"must be in [1, {page_size}]")
        self.lengths = np.where(has, (self.counts - 1) * page_size + last, 0)

    def check(self, pages: int) -> None:
        if self.lowest < 0 or self.highest >= pages:
            bad = (self.indices < 0) | (self.indices >= pages)
            refuse(bad, self.prefix + "indices", self.indices, f"must be in [0, {pages - 1}]")

    def table(self) -> Array:
        """(requests, pages of the longest): what is behind a request's own is 0, and looked at by nobody."""
        width = max(1, self.counts.max(initial=0))
        table = np.zeros((len(self.counts), width), np.int64)
        table[np.arange(width) < self.counts[:, None]] = self.indices
        return table


def integers(given: Tensor, name: str) -> Array:
    numbers = array(given)
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {given.dtype}")
    if numbers.ndim != 1:
        raise ValueError(f"{name} must be 1D, got {numbers.ndim}D")
    return numbers.astype(np.int64)


def refuse(bad: Array, name: str, numbers: Array, rule: str) -> None:
    if bad.any():
        at = int(np.argmax(bad))
        raise ValueError(f"{name}[{at}] {rule}, got {numbers[at]}")


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """How many tokens each request has."""
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of each new token its request, and its position there: the new ones of a request are its last. int32, (nnz,).

    Behind the last token the request is -1 and the position 0.
    """
    starts, lengths = integers(append_indptr, "append_indptr"), integers(seq_lens, "seq_lens")
    counts = np.diff(starts)
    if len(counts) != len(lengths) or starts[0] != 0 or (counts < 0).any() or starts[-1] > nnz:
        raise ValueError(
            f"append_indptr must rise from 0 to {nnz} at most, {len(lengths)} requests, got {starts.tolist()}"
        )
    made = []
    for given, name, fill in ((batch_indices, "batch_indices", -1), (positions, "positions", 0)):
        if given is None:
            given = torch.empty(nnz, dtype=torch.int32, device="cpu")
        checked_out(given, (nnz,), torch.int32, name)
        made.append(given.fill_(fill))
    total = int(starts[-1])
    requests = np.repeat(np.arange(len(counts)), counts)
    made[0][:total] = tensor(requests, torch.int32)
    made[1][:total] = tensor(np.arange(total) + (lengths - starts[1:])[requests], torch.int32)
    return made[0], made[1]


def checked_out(given: Tensor, shape: tuple[int, ...], dtype: Any, name: str) -> None:
    if given.shape != shape:
        raise ValueError(f"Invalid shape of {name}: expected {shape}, got {tuple(given.shape)}")
    if given.dtype != dtype:
        raise ValueError(f"Invalid dtype of {name}: expected {dtype}, got {given.dtype}")
    if given.device.type != "cpu":
        raise ValueError(f"Invalid device of {name}: expected cpu, got {given.device}")


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Any,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes token i of append_key and append_value, (nnz, heads, head_dim), to where positions[i] of its request is.

    Of a request below 0, as get_batch_indices_positions pads with, to nowhere. The tables have the new tokens already.
    """
    keys, values = halves(paged_kv_cache)
    size = keys.shape[1 if checked_layout(kv_layout) == "NHD" else 2]
    pages = Pages(kv_indptr, kv_indices, kv_last_page_len, size, "kv_")
    pages.check(len(keys))
    requests, at = integers(batch_indices, "batch_indices"), integers(positions, "positions")
    if not len(requests) == len(at) == len(append_key) == len(append_value):
        raise ValueError(
            "append_key, append_value, batch_indices and positions must be as many, got "
            f"{len(append_key)}, {len(append_value)}, {len(requests)} and {len(at)}"
        )
    refuse(requests >= len(pages.counts), "batch_indices", requests, f"must be below {len(pages.counts)}")
    counted = requests >= 0
    room = np.zeros(len(requests), np.int64)
    room[counted] = pages.counts[requests[counted]] * size
    refuse(counted & ((at < 0) | (at >= room)), "positions", at, "must be on a page that its request has")
    slots = np.full(len(requests), -1, np.int64)
    entry = pages.starts[requests[counted]] + at[counted] // size
    slots[counted] = pages.indices[entry] * size + at[counted] % size
    keys, values = writable(keys, "paged_kv_cache"), writable(values, "paged_kv_cache")
    lanewise.append_kv(plain(append_key), plain(append_value), keys, values, slots, layout=kv_layout, duplicates="last")


# ---- attention states ----


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, (L, heads, head_dim) with log2 of its sums, (L, heads), as if over both."""
    v, s = lanewise.merge_state(*map(plain, (v_a, s_a, v_b, s_b)), lse_base="2")
    return tensor(v, v_a.dtype), tensor(s)


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """merge_state, written to v and s; with a mask, (L,), in the rows where it is True."""
    merged, sums = merge_state(v, s, v_other, s_other)
    if mask is not None:
        rows = mask.bool()
        if rows.shape != s.shape[:1]:
            raise ValueError(f"mask must have shape {tuple(s.shape[:1])}, got {tuple(mask.shape)}")
        merged, sums = torch.where(rows[:, None, None], merged, v), torch.where(rows[:, None], sums, s)
    plain(v).copy_(merged)
    plain(s).copy_(sums)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """merge_state for any number of sets: (L, sets, heads, head_dim) and (L, sets, heads)."""
    if v.ndim == 4 and v.shape[1] == 0:
        return v.new_zeros((v.shape[0], *v.shape[2:])), s.new_full((v.shape[0], v.shape[2]), -torch.inf).float()
    merged, sums = lanewise.merge_states(plain(v), plain(s), lse_base="2")
    return tensor(merged, v.dtype), tensor(sums)


# ---- attention ----


class Planned:
    """What both wrappers do: a plan is made once a step, of tables and settings, and run once a layer."""

    def __init__(self, kv_layout: str, use_cuda_graph: bool) -> None:
        self._kv_layout = checked_layout(kv_layout)
        if use_cuda_graph:
            raise NotImplementedError("use_cuda_graph must be False: a CPU has no CUDA graphs")
        self._plan: lanewise.AttentionPlan | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Nothing: there are no workspaces."""

    def end_forward(self) -> None:
        """Nothing, as in flashinfer."""

    def _make(
        self,
        pages: Pages,
        query_start: Array,
        *,
        heads: tuple[int, int],
        width: int,
        page_size: int,
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        dtypes: tuple[Any, Any, Any],
    ) -> None:
        if pos_encoding_mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
            raise KeyError(f"Invalid pos_encoding_mode {pos_encoding_mode}")
        if pos_encoding_mode != "NONE":
            raise NotImplementedError(
                f"pos_encoding_mode must be 'NONE', got {pos_encoding_mode!r}: keys are read as they were appended"
            )
        dtypes = as_dtypes(*dtypes)
        self._plan = lanewise.AttentionPlan(
            pages.table(),
            pages.lengths,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            block_size=page_size,
            query_start=query_start,
            causal=causal,
            window=window_left if window_left >= 0 else None,
        )
        self._pages, self._dtypes, self._window_left = pages, dtypes, window_left
        self._soft_cap = logits_soft_cap or None
        self._scale = 1 / math.sqrt(max(1, width)) if sm_scale is None else float(sm_scale)
        self._mask: Any = None

    def _attend(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *,
        q_scale: Any,
        k_scale: Any,
        v_scale: Any,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        window_left: int | None,
        sinks: Tensor | None,
        lse_base: Literal["2", "e"] = "2",
    ) -> tuple[Tensor, Tensor | None]:
        if self._plan is None:
            raise RuntimeError("plan() must be called before run()")
        assert window_left is None or window_left == self._window_left, "window_left must be that of plan()"
        keys, values = halves(paged_kv_cache)
        self._pages.check(len(keys))
        for name, side, given, planned in zip("qk", ("q", "kv"), (q, keys), self._dtypes, strict=False):
            if given.dtype != planned:
                raise ValueError(
                    f"The dtype of {name} {given.dtype} does not match the {side}_data_type {planned} "
                    "specified in plan function."
                )
        shape = (*q.shape[:2], values.shape[-1])
        if out is not None:
            checked_out(out, shape, self._dtypes[2], "out")
        if lse is not None and return_lse:
            checked_out(lse, shape[:2], torch.float32, "lse")
        scale = self._scale
        for factor in (q_scale, k_scale):
            scale *= 1.0 if factor is None else float(factor)
        direct = out is not None and out.dtype == torch.float32
        found = self._plan.run(
            plain(q),
            keys,
            values,
            layout=self._kv_layout,
            scale=scale,
            soft_cap=self._soft_cap,
            sinks=None if sinks is None else plain(sinks).float(),
            mask=self._mask,
            return_lse=return_lse,
            lse_base=lse_base,
            out=array(out) if direct else None,
        )
        mixed, sums = found if return_lse else (found, None)
        if v_scale is not None and float(v_scale) != 1.0:
            mixed *= np.float32(v_scale)
        if out is None:
            out = tensor(mixed, self._dtypes[2])
        elif not direct:
            out.copy_(tensor(mixed))
        if sums is None:
            return out, None
        return out, tensor(sums) if lse is None else lse.copy_(tensor(sums))


def as_dtypes(q: Any, kv: Any, o: Any) -> tuple[Any, Any, Any]:
    """Those of the query, the cache (the query's by default) and the output (likewise)."""
    found: list[Any] = []
    for name, given in (("q_data_type", q), ("kv_data_type", kv), ("o_data_type", o)):
        if given is None and found:
            given = found[0]
        dtype = DTYPES.get(given, given) if isinstance(given, str) else given
        if dtype not in DTYPES.values():
            raise NotImplementedError(f"{name} must be one of {', '.join(DTYPES)}, got {given}")
        found.append(dtype)
    return found[0], found[1], found[2]


def only(name: str, given: Any, default: Any, why: str) -> None:
    if given is not default and (default is None or given != default):
        raise NotImplementedError(f"{name} must be {default}, got {given!r}: {why}")


class BatchDecodeWithPagedKVCacheWrapper(Planned):
    """Attention of one query a request, or of its last few, over its pages."""

    OLD_POSITIONS: ClassVar[tuple[str, ...]] = (
        *("pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type"),
        *("data_type", "sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens"),
        *("fixed_split_size", "disable_split_kv", "q_len_per_req"),
    )

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(kv_layout, use_cuda_graph)
        only("jit_args", jit_args, None, "there is one kernel")
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        """Of tables and settings what run does in each layer."""
        if deprecated_positional_args:
            kwargs = self._by_name(deprecated_positional_args, kwargs)
        self._decode(
            Pages(indptr, indices, last_page_len, page_size),
            (num_qo_heads, num_kv_heads),
            head_dim,
            page_size,
            **kwargs,
        )

    begin_forward = plan

    def _by_name(self, given: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if len(given) > len(self.OLD_POSITIONS):
            raise TypeError(
                f"plan() takes at most {len(self.OLD_POSITIONS)} arguments behind page_size, got {len(given)}"
            )
        named = dict(zip(self.OLD_POSITIONS, given, strict=False))
        if named.keys() & kwargs.keys():
            raise TypeError(f"plan() got multiple values for argument {min(named.keys() & kwargs.keys())!r}")
        warnings.warn("arguments of plan() behind page_size are to be given by name", DeprecationWarning, stacklevel=3)
        return named | kwargs

    def _decode(
        self,
        pages: Pages,
        heads: tuple[int, int],
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        only("window_right", window_right, 0, "no query is followed by keys that it sees")
        only("use_token_head_sf", use_token_head_sf, False, "there are no fp8 caches")
        if is_causal not in (None, q_len_per_req > 1):
            raise NotImplementedError(f"is_causal must be {q_len_per_req > 1} for q_len_per_req={q_len_per_req}")
        if data_type is not None:
            q_data_type, kv_data_type = q_data_type or data_type, kv_data_type or data_type
        self._make(
            pages,
            np.arange(len(pages.lengths) + 1) * q_len_per_req,
            heads=heads,
            width=head_dim,
            page_size=page_size,
            causal=True,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            dtypes=(q_data_type, kv_data_type, o_data_type),
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of q, (requests * q_len_per_req, heads, head_dim): as wide; with return_lse also the lse."""
        only("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor, None, "all keys count")
        only("kv_cache_sf", kv_cache_sf, None, "there are no fp4 and fp8 caches")
        found, sums = self._attend(
            q,
            paged_kv_cache,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
            window_left=window_left,
            sinks=sinks,
        )
        return (found, sums) if return_lse else found

    run_return_lse = functools.partialmethod(run, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(Planned):
    """Attention of the last tokens of each request, as many as it has new, over its pages."""

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        super().__init__(kv_layout, use_cuda_graph)
        only("jit_args", jit_args, None, "there is one kernel")

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Of tables and settings what run does in each layer."""
        for name, given in (
            ("prefix_len_ptr", prefix_len_ptr),
            ("token_pos_in_items_ptr", token_pos_in_items_ptr),
            ("max_item_len_ptr", max_item_len_ptr),
        ):
            if given is not None:
                raise NotImplementedError(f"{name} must be None: several items in one request are not told apart")
        only("use_token_head_sf", use_token_head_sf, False, "there are no fp8 caches")
        pages = Pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, "paged_kv_")
        starts = integers(qo_indptr, "qo_indptr")
        masked = custom_mask is not None or packed_custom_mask is not None
        self._make(
            pages,
            starts,
            heads=(num_qo_heads, num_kv_heads),
            width=head_dim_qk,
            page_size=page_size,
            causal=causal and not masked,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            dtypes=(q_data_type, kv_data_type, o_data_type),
        )
        if masked:
            self._mask = by_query(custom_mask, packed_custom_mask, np.diff(starts), pages.lengths)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attention of q, (tokens, heads, head_dim_qk): (tokens, heads, head_dim_vo); with return_lse also the lse."""
        only("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor, None, "all keys count")
        only("kv_cache_sf", kv_cache_sf, None, "there are no fp4 and fp8 caches")
        if lse_base not in ("log2", "ln") or lse_layout not in ("NH", "HN"):
            raise ValueError(
                f"lse_base must be 'log2' or 'ln', lse_layout 'NH' or 'HN', got {lse_base!r}, {lse_layout!r}"
            )
        turned = lse_layout == "HN"
        found, sums = self._attend(
            q,
            paged_kv_cache,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse.t() if turned and lse is not None else lse,
            return_lse=return_lse,
            window_left=window_left,
            sinks=sinks,
            lse_base="2" if lse_base == "log2" else "e",
        )
        if sums is None:
            return found
        return found, (sums.t().contiguous() if lse is None else lse) if turned else sums

    run_return_lse = functools.partialmethod(run, return_lse=True)


class MultiLevelCascadeAttentionWrapper:
    """Attention over keys in levels, of which the first are shared by more queries, and read once for all of them."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        if num_levels < 1:
            raise ValueError(f"num_levels must be at least 1, got {num_levels}")
        self._levels = [BatchPrefillWithPagedKVCacheWrapper(None, kv_layout, use_cuda_graph) for _ in range(num_levels)]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffers: Any) -> None:
        """Nothing: there are no workspaces."""

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        """Of each level's tables, and settings for all, what run does in each layer; causal is for the last level."""
        tables = list(
            zip(qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, strict=True)
        )
        if len(tables) != len(self._levels):
            raise ValueError(f"there must be tables for each of {len(self._levels)} levels, got {len(tables)}")
        for level, told in zip(self._levels, tables, strict=True):
            level.plan(
                *told,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level is self._levels[-1],
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                o_data_type="float32",  # until all levels are merged
            )

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: Any) -> Tensor:
        """Attention of q, (tokens, heads, head_dim), over all levels: as wide."""
        parts = [level.run(q, paged_kv_cache, return_lse=True) for level in self._levels]
        out, _ = merge_states(torch.stack([v for v, _ in parts], 1), torch.stack([s for _, s in parts], 1))
        return out.to(q.dtype)

    forward = run


def by_query(mask: Tensor | None, packed: Tensor | None, counts: Array, lengths: Array) -> Array:
    """flashinfer's mask, of each request its queries times its keys, one behind the other: as (queries, keys) of all.

    Packed, the bits of a request begin with a byte of their own, the lowest bit first.
    """
    seen = np.zeros((int(counts.sum()), int(lengths.max(initial=1))), bool)
    sizes = counts * lengths
    if packed is not None:
        given, ends = np.unpackbits(array(packed), bitorder="little"), (sizes + 7) // 8 * 8
    else:
        given, ends = array(mask.bool()).reshape(-1), sizes  # type: ignore[union-attr]
    if len(given) != ends.sum():
        raise ValueError(f"custom_mask must have one entry for each query and key: {ends.sum()}, got {len(given)}")
    row = first = 0
    for count, length, size, end in zip(counts, lengths, sizes, ends, strict=True):
        seen[row : row + count, :length] = given[first : first + size].reshape(count, length)
        row, first = row + count, first + end
    return seen
