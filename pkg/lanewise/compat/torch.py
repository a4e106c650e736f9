"""lanewise's functions on CPU tensors: tensors in, tensors out, no copies (docs/compat.md, section torch).

A plain call goes straight to lanewise. Under torch.compile, and where a gradient is to be passed on, it is a custom op,
which costs some 150 us (_torch_ops). What is of the KV-cache, attention, beams and drafts is in _torch_cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

import lanewise

from ..errors import InvalidLogitsError
from ..sampling import Support
from ..scoring import Logprobs
from . import _fakes, _gradients
from ._tensors import Tensor, as_arrays, as_tensors, entropy, from_numpy, torch
from ._torch_cache import (
    AttentionPlan,
    append_kv,
    attention_step,
    beam_step,
    copy_blocks,
    decode_attention,
    extend_attention,
    gather_blocks,
    gather_kv,
    merge_state,
    merge_states,
    permute_blocks,
    relayout,
    scatter_blocks,
    swap_blocks,
    verify_draft,
    zero_blocks,
)
from ._torch_ops import define

__all__ = [
    "AttentionPlan",
    "append_kv",
    "apply_bias",
    "apply_penalties",
    "apply_token_bitmask",
    "argmax",
    "attention_step",
    "beam_step",
    "copy_blocks",
    "decode_attention",
    "extend_attention",
    "gather_blocks",
    "gather_kv",
    "log_softmax",
    "logprobs",
    "logsumexp",
    "merge_state",
    "merge_states",
    "min_p_mask",
    "permute_blocks",
    "relayout",
    "sample",
    "sample_from_probs",
    "sample_n",
    "scale",
    "scatter_blocks",
    "softmax",
    "swap_blocks",
    "top_k",
    "top_k_mask",
    "top_k_renorm",
    "top_p_mask",
    "top_p_renorm",
    "verify",
    "verify_draft",
    "zero_blocks",
]

is_compiling, array_type = torch.compiler.is_compiling, np.ndarray
PLAIN = frozenset({int, float, bool, str, type(None)})


def on_tensors(
    name: str,
    fake: Callable[..., list[Any]] = _fakes.rows,
    gradient: Callable[..., Any] | None = None,
    assembled: Callable[..., Any] = lambda results, **_: results[0],
) -> Callable[..., Any]:
    """lanewise's function of that name, on tensors. `assembled` makes of an op's tensors what the function returns."""
    core = getattr(lanewise, name)
    parameters = inspect.signature(core).parameters
    first, *positional = (each.name for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD)
    positional += ["axis"] if "axis" in parameters else []
    has_gradient = fake not in (_fakes.ids, _fakes.sample, _fakes.margins)
    op = define(name, core, fake, gradient)

    @functools.wraps(core)
    def call(logits: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        if args or first in kwargs or "dim" in kwargs:
            logits, kwargs = named(logits, args, kwargs)
        if is_compiling() or type(logits) is not Tensor or logits.requires_grad:
            return dispatched(logits, kwargs)
        if "temperature" in kwargs and getattr(kwargs["temperature"], "requires_grad", False):
            if gradient and torch.is_grad_enabled():
                raise RuntimeError("only the logits have a derivative; detach() the temperature")
            kwargs["temperature"] = kwargs["temperature"].detach()
        if "out" in kwargs:
            return written(logits, kwargs.pop("out"), kwargs)
        try:
            result = core(logits, **kwargs)
        except InvalidLogitsError as error:
            error.tokens = as_tensors(error.tokens)
            raise
        if type(result) is array_type:
            return from_numpy(result)
        return result if type(result) is int else as_tensors(result)

    def written(logits: Any, out: Any, kwargs: dict[str, Any]) -> Any:
        arrays = as_arrays(out)
        try:
            result = core(logits, out=arrays, **kwargs)
        except InvalidLogitsError as error:
            error.tokens = as_tensors(error.tokens)
            raise
        finally:  # autograd sees no write but torch's own
            torch.autograd.graph.increment_version(
                [out] if isinstance(out, Tensor) else [x for x in out or () if x is not None]
            )
        if arrays is None:
            return as_tensors(result)
        return (out, as_tensors(result[1])) if isinstance(arrays, np.ndarray) and isinstance(result, tuple) else out

    def named(logits: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "dim" in kwargs and "axis" in parameters and "axis" not in kwargs:
            kwargs["axis"] = kwargs.pop("dim")
        bound = dict(zip(positional, args, strict=False))
        if len(bound) < len(args) or bound.keys() & kwargs.keys() or (logits is not None and first in kwargs):
            raise TypeError(f"{name}() takes {', '.join([first, *positional])}, each once, and the rest by name")
        return kwargs.pop(first, logits), {**bound, **kwargs}

    def dispatched(logits: Any, kwargs: dict[str, Any]) -> Any:
        if not isinstance(logits, Tensor):
            raise TypeError(f"{first} must be a torch.Tensor, got {type(logits).__name__}")
        if logits.requires_grad and not (has_gradient and torch.is_grad_enabled()) and not is_compiling():
            return call(logits.detach(), **kwargs)
        out = kwargs.pop("out", None)
        if "rng" in parameters:
            name_noise(kwargs)
        result = assembled(op(logits, kwargs), **kwargs)
        return result if out is None else copied(result, out, logits.dtype)

    return call


def copied(result: Any, out: Any, also: Any) -> Any:
    if isinstance(out, Tensor):
        result, *support = result if isinstance(result, tuple) else (result,)
        if out.shape != result.shape:
            raise ValueError(f"out must have shape {tuple(result.shape)}, got {tuple(out.shape)}")
        if out.dtype not in (result.dtype, also):
            raise TypeError(f"out must be {result.dtype}, got {out.dtype}")
        out.copy_(result)
        return (out, *support) if support else out
    for field, to in zip(result, out, strict=True):
        if field is not None:
            copied(field, to, field.dtype)
    return out


def name_noise(kwargs: dict[str, Any]) -> None:
    """Says which noise a draw has, as an operator must not have a state: entropy is torch's."""
    if kwargs.get("rng") is not None:
        raise TypeError("a graph cannot count the steps of rng=; give seed= and step=")
    if all(kwargs.get(key) is None for key in ("seed", "step", "u")):
        kwargs["seed"], kwargs["step"] = entropy(), 0


def with_support(results: list[Any], return_support: bool = False, **_: Any) -> Any:
    return (results[0], Support(*results[1:])) if return_support else results[0]


def fields(
    results: list[Any], tokens: Any = None, top_n: Any = 0, ids: Any = None, entropy: bool = False, **_: Any
) -> Logprobs:
    left = iter(results)
    asked = [tokens is not None] * 2 + [top_n > 0] * 2 + [ids is not None, entropy]
    return Logprobs(*[next(left) if one else None for one in asked])


softmax = on_tensors("softmax", _fakes.along, _gradients.softmax)
log_softmax = on_tensors("log_softmax", _fakes.along, _gradients.log_softmax)
logsumexp = on_tensors("logsumexp", _fakes.without_axis, _gradients.logsumexp)
scale = on_tensors("scale", _fakes.along, _gradients.scale)
argmax = on_tensors("argmax", _fakes.ids)
top_k = on_tensors("top_k", _fakes.top_k, assembled=lambda results, **_: tuple(results))
sample = on_tensors("sample", _fakes.sample, assembled=with_support)
sample_n = on_tensors("sample_n", _fakes.ids)
sample_from_probs = on_tensors("sample_from_probs", _fakes.ids)
verify = on_tensors("verify", _fakes.margins)
top_k_mask = on_tensors("top_k_mask")
top_p_mask = on_tensors("top_p_mask")
min_p_mask = on_tensors("min_p_mask")
top_k_renorm = on_tensors("top_k_renorm")
top_p_renorm = on_tensors("top_p_renorm")
apply_penalties = on_tensors("apply_penalties")
apply_bias = on_tensors("apply_bias")
apply_token_bitmask = on_tensors("apply_token_bitmask")
logprobs = on_tensors("logprobs", _fakes.logprobs, assembled=fields)
