"""flashinfer.sampling for CPU tensors: the names, arguments, defaults and returns of flashinfer-python 0.7.4.

And, out of flashinfer itself, its paged KV-cache and attention over it: _flashinfer_cache.

flashinfer itself runs on GPUs only and need not be installed. Where its kernels and its reference functions disagree,
this follows the kernels: docs/compat.md.
"""

from __future__ import annotations

from numbers import Real
from operator import index
from typing import Any

import numpy as np

import lanewise
from lanewise.compat._flashinfer_cache import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from lanewise.compat._tensors import array, entropy, tensor, torch

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "chain_speculative_sampling",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

Array = np.ndarray[Any, Any]
Tensor = Any  # torch.Tensor: torch has types only where it is installed
_RENORMED = (torch.float32, torch.float16, torch.bfloat16)
_TEMPERATURES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# ---- what is given -------------------------------------------------------------------------------------------------


def _matrix(given: Tensor, name: str) -> Tensor:
    if given.device.type != "cpu":
        raise ValueError(f"{name} must be a CPU tensor, got device={given.device}: flashinfer itself takes the others")
    if given.ndim != 2:
        raise RuntimeError(f"{name} must be 2D, got {given.ndim}D")
    return given.detach().resolve_neg()


def _probs(probs: Tensor, check_nan: bool) -> Array:
    """float32 rows, the tensor's own memory if it is float32."""
    rows = array(_matrix(probs, "probs").float())
    if check_nan and np.isnan(rows).any():
        raise ValueError("Input probs contains NaN.")
    return rows


def _logits(logits: Tensor) -> Tensor:
    rows = _matrix(logits, "logits")
    return rows if rows.is_floating_point() else rows.float()


def _each(parameter: Tensor | float, rows: int, dtype: Any) -> Array:
    """One value a row of the distributions, as the kernels read them: float32 or int32."""
    if not isinstance(parameter, torch.Tensor):
        return array(torch.full((rows,), parameter, dtype=dtype))
    if parameter.ndim != 1:
        raise ValueError(f"a sampling parameter must be a scalar or a 1D tensor, got {parameter.ndim}D")
    if parameter.shape[0] != rows:
        raise ValueError(f"a sampling parameter must have one value for each of {rows} rows, got {parameter.shape[0]}")
    return array(parameter.to(dtype))


def _counts(top_k: Tensor | int, rows: int) -> Array:
    """Kernels read k as an unsigned number: below 0 it is off. At 0 their search ends on the most probable."""
    counts = _each(top_k, rows, torch.int32)
    return np.where(counts == 0, 1, counts)


def _noise(seed: Any, offset: Any, generator: Any, rows: int) -> dict[str, Any]:
    """Which noise each output row draws with. The row is part of it, as it is of flashinfer's Philox sequence."""
    if seed is None or offset is None:
        seed = entropy((1,), generator)
        offset = torch.zeros(1, dtype=torch.int64)
    if isinstance(seed, torch.Tensor) != isinstance(offset, torch.Tensor):
        raise ValueError("seed and offset must both be tensors or both be scalars")
    seeds, offsets = _words(seed, "seed", rows), _words(offset, "offset", rows)
    high = np.uint64(2**64 - 2**32)  # a step has 32 bits, an offset 64: the key takes the others
    return {
        "seed": seeds,
        "step": (offsets & ~high).astype(np.int64),
        "keys": (offsets & high) | np.arange(rows, dtype=np.uint64),
    }


def _words(given: Any, name: str, rows: int) -> Array:
    """64 bits a row."""
    if not isinstance(given, torch.Tensor):
        return np.full(rows, index(given) % 2**64, np.uint64)
    if given.device.type != "cpu":
        raise ValueError(f"{name} tensor must be on cpu")
    if given.dtype not in (torch.int64, torch.uint64):
        raise ValueError(f"{name} tensor must be int64/uint64")
    if given.ndim != 1:
        raise ValueError(f"{name} tensor must be 1D")
    if given.shape[0] not in (1, rows):
        raise ValueError(f"{name} tensor length must be 1 or {rows}")
    return np.broadcast_to(array(given).view(np.uint64), rows)


# ---- what is kept --------------------------------------------------------------------------------------------------


def _nucleus(rows: Array, top_p: Tensor | float) -> Array:
    p = _each(top_p, len(rows), torch.float32)
    return lanewise.top_p_renorm(rows, p, ties="all", on_invalid="mark")


def _largest(rows: Array, top_k: Tensor | int) -> Array:
    return lanewise.top_k_renorm(rows, _counts(top_k, len(rows)), ties="all", on_invalid="mark")


def _near_the_best(rows: Array, min_p: Tensor | float) -> Array:
    bound = rows.max(axis=1, initial=0) * _each(min_p, len(rows), torch.float32)
    return np.where(rows >= bound[:, None], rows, np.float32(0))


def _in_order(filter_apply_order: str) -> bool:
    """Whether top-k comes first and top-p sees what it left, renormalised."""
    if filter_apply_order not in ("top_k_first", "joint"):
        raise ValueError(f"Invalid filter_apply_order: {filter_apply_order}")
    return filter_apply_order == "top_k_first"


# ---- what is drawn -------------------------------------------------------------------------------------------------


def _chosen(kept: Array, indices: Tensor | None) -> Array:
    return kept if indices is None else array(torch.from_numpy(kept).index_select(0, indices))


def _samples(ids: Array, indices: Tensor | None) -> Tensor:
    """Where nothing could be drawn, 0."""
    return tensor(np.maximum(ids, 0), torch.int32 if indices is None else indices.dtype)


def _draw(
    kept: Array, indices: Tensor | None, generator: Any, seed: Any, offset: Any, return_valid: bool
) -> Tensor | tuple[Tensor, Tensor]:
    rows = _chosen(kept, indices)
    ids = lanewise.sample_from_probs(rows, **_noise(seed, offset, generator, len(rows)), on_invalid="mark")
    return (_samples(ids, indices), tensor(ids >= 0)) if return_valid else _samples(ids, indices)


def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """An id a row, drawn with the probability it has there."""
    return _draw(_probs(probs, check_nan), indices, generator, seed, offset, return_valid)


def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Among the ids with less than `top_p` above them."""
    return _draw(_nucleus(_probs(probs, check_nan), top_p), indices, generator, seed, offset, return_valid)


def top_k_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Among the ids with fewer than `top_k` above them."""
    return _draw(_largest(_probs(probs, check_nan), top_k), indices, generator, seed, offset, return_valid)


def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Among the ids with at least `min_p` times the probability of the most probable."""
    return _draw(_near_the_best(_probs(probs, check_nan), min_p), indices, generator, seed, offset, return_valid)


def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
    top_k_max: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Top-k, then top-p over what it left; or both ("joint") over the probabilities as they are."""
    if _in_order(filter_apply_order):
        kept = _nucleus(_largest(_probs(probs, check_nan), top_k), top_p)
    else:  # either keeps a prefix of one order, so the one within the other is both
        kept = _largest(_nucleus(_probs(probs, check_nan), top_p), top_k)
    return _draw(kept, indices, generator, seed, offset, return_valid)


def sampling_from_logits(
    logits: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
) -> Tensor:
    """An id a row of softmax(logits)."""
    if check_nan and torch.isnan(logits).any():
        raise ValueError("Input logits contains NaN.")
    rows = _logits(logits)
    off = np.zeros(len(rows), np.int32), np.ones(len(rows))
    return _draw_logits(rows, *off, "transformers", indices, generator, seed, offset)


def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    top_k_max: int | None = None,
) -> Tensor:
    """Top-k, then top-p over what it left; or both ("joint") over softmax(logits)."""
    steps = ("top_k", "temperature", "top_p") if _in_order(filter_apply_order) else ("temperature", "top_p", "top_k")
    rows = _logits(logits)
    if check_nan and not np.isfinite(lanewise.logsumexp(rows)).all():  # then softmax has a NaN
        raise ValueError("Input probs contains NaN.")
    k, p = _counts(top_k, len(rows)), _each(top_p, len(rows), torch.float32)
    return _draw_logits(rows, k, p, steps, indices, generator, seed, offset)


def _draw_logits(
    rows: Tensor,
    top_k: Array,
    top_p: Array,
    preset: Any,
    indices: Tensor | None,
    generator: Any,
    seed: Any,
    offset: Any,
) -> Tensor:
    if indices is not None:
        rows, top_k, top_p = rows.index_select(0, indices), _chosen(top_k, indices), _chosen(top_p, indices)
    noise = _noise(seed, offset, generator, len(rows))
    ids = lanewise.sample(rows, top_k=top_k, top_p=top_p, **noise, preset=preset, ties="all", on_invalid="mark")
    return _samples(np.asarray(ids), indices)


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: Any = None,
    seed: Any = None,
    offset: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The drafted ids up to the first that the target refuses, one id of the target's own, then -1."""
    ids = draft_token_ids.long()
    rows, drafted = ids.shape
    drafts, targets = draft_probs.detach().float(), target_probs.detach().float()
    noise = _noise(seed, offset, generator, rows)
    q, p = (array(probs.gather(2, ids[..., None])[..., 0]) for probs in (targets[:, :-1], drafts))
    passes = _uniforms(noise, drafted) * p < q
    emitted = passes.cumprod(axis=1).sum(axis=1)

    output = np.full((rows, drafted + 1), -1, np.int32)
    output[:, :-1] = np.where(np.arange(drafted) < emitted[:, None], array(ids), -1)
    rest = _left_to_target(array(drafts), array(targets), emitted)
    noise["keys"] ^= np.uint64(2**63)  # the draft may have been drawn with this seed and offset
    output[np.arange(rows), emitted] = np.maximum(lanewise.sample_from_probs(rest, **noise, on_invalid="mark"), 0)
    accepted = _added(maybe_output_accepted_token_num, passes.sum(axis=1))
    return tensor(output), accepted, _added(maybe_output_emitted_draft_token_num, emitted)


def _uniforms(noise: dict[str, Array], each: int) -> Array:
    """In (0, 1], float64; from NumPy's Philox, which shares no number with that of lanewise's draws."""
    rows = [
        np.random.Philox(key=np.array([seed, key]), counter=int(step)).random_raw(each)
        for seed, key, step in zip(noise["seed"], noise["keys"], noise["step"], strict=True)
    ]
    return ((np.array(rows, np.uint64).reshape(len(rows), each) >> np.uint64(11)) + 1.0) * 2.0**-53


def _left_to_target(drafts: Array, targets: Array, emitted: Array) -> Array:
    """What the one id of the target's own is drawn from: where a draft was refused, the excess over the draft."""
    rows, drafted = drafts.shape[:2]
    rest = targets[np.arange(rows), emitted]
    refused = np.flatnonzero(emitted < drafted)
    excess = np.maximum(rest[refused] - drafts[refused, emitted[refused]], 0)
    some = excess.any(axis=1)  # none: the two are equal, and the target itself is as right
    rest[refused[some]] = excess[some]
    return rest


def _added(total: Tensor | None, counts: Array) -> Tensor:
    return tensor(counts, torch.int32) if total is None else total.add_(tensor(counts))


# ---- without a draw ------------------------------------------------------------------------------------------------


def softmax(logits: Tensor, temperature: Tensor | float | None = None, enable_pdl: bool | None = None) -> Tensor:
    """softmax(logits / temperature), float32."""
    rows = _logits(logits)
    return tensor(lanewise.softmax(rows, temperature=_temperature(temperature, len(rows))))


def _temperature(temperature: Tensor | float | None, rows: int) -> Any:
    if temperature is None:
        return 1.0
    if not isinstance(temperature, torch.Tensor):
        if isinstance(temperature, bool) or not isinstance(temperature, Real):
            raise TypeError(f"temperature must be None, a real number or a 1D tensor, got {temperature!r}")
        return float(np.float32(temperature))
    if temperature.shape != (rows,):
        raise ValueError(f"temperature must be 1D with {rows} values, one a row, got {tuple(temperature.shape)}")
    if temperature.device.type != "cpu":
        raise ValueError(f"temperature must be on the same device as logits (cpu), got {temperature.device}")
    if temperature.dtype not in _TEMPERATURES:
        raise ValueError(f"temperature must be of a floating dtype, got {temperature.dtype}")
    return array(temperature.float())


def top_p_renorm_probs(probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False) -> Tensor:
    """The nucleus over its sum, 0 elsewhere; float32."""
    rows = _probs(probs, check_nan=False)
    return tensor(_empty_to_zero(rows, _nucleus(rows, top_p)))


def top_k_renorm_probs(probs: Tensor, top_k: Tensor | int, is_deterministic: bool = False) -> Tensor:
    """The k largest over their sum, 0 elsewhere, in the dtype of `probs`."""
    assert probs.dtype in _RENORMED, f"Unsupported dtype {probs.dtype}, expected float32, float16, or bfloat16"
    rows = _probs(probs, check_nan=False)
    return tensor(_empty_to_zero(rows, _largest(rows, top_k)), probs.dtype)


def _empty_to_zero(rows: Array, renormed: Array) -> Array:
    """lanewise marks a row of zeros, which has no sum to divide by, with NaN; the kernels leave it 0."""
    for row in np.flatnonzero(np.isnan(renormed[:, 0])):
        if not rows[row].any():
            renormed[row] = 0
    return renormed


def top_k_mask_logits(logits: Tensor, top_k: Tensor | int) -> Tensor:
    """The k largest logits, -inf elsewhere, in the dtype of `logits`."""
    assert logits.dtype in _RENORMED, f"Unsupported dtype {logits.dtype}, expected float32, float16, or bfloat16"
    rows = _matrix(logits, "logits")
    masked = lanewise.top_k_mask(rows, _counts(top_k, len(rows)), ties="all", on_invalid="mark")
    made = tensor(masked, logits.dtype)
    unjudged = torch.isnan(made[:, 0]) & ~torch.isnan(rows).any(dim=1)  # all -inf, or a +inf, which is no error here
    for row in unjudged.nonzero()[:, 0].tolist():
        made[row] = rows[row]
    return made


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs
