"""lanewise's functions of the KV-cache, attention, beams and drafts on CPU tensors, which stay where they are.

They are no operators: torch.compile leaves its graph for them, and they pass no gradients on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

import lanewise

from .._arrays import as_array
from ..errors import InvalidLogitsError
from ._tensors import Tensor, as_tensors, plain, torch, writable

DTYPES = {torch.float32: np.dtype(np.float32), torch.float16: np.dtype(np.float16), torch.bfloat16: "bfloat16"}


def on_tensors(core: Callable[..., Any], *written: str) -> Callable[..., Any]:
    """`core` for tensors: in all arguments, lists and tuples of them too; those named in `written` are written to."""
    parameters = inspect.signature(core).parameters.values()
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

    @functools.wraps(core)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(positional, args, strict=False))
        if len(args) > len(positional) or given.keys() & kwargs.keys():
            return core(*args, **kwargs)  # which says what is wrong
        given |= kwargs
        back: dict[int, Any] = {}  # the tensors that are written to, by the arrays of their memory
        arrays = {name: as_given(value, name, back if name in written else None) for name, value in given.items()}
        try:
            result = core(**arrays)
        except InvalidLogitsError as error:
            error.tokens = as_tensors(error.tokens)
            raise
        finally:  # autograd sees no write but torch's own
            if back:
                torch.autograd.graph.increment_version([out for out in back.values() if not out.is_inference()])
        return as_tensors(result, back)

    return call


def as_given(value: Any, name: str, back: dict[int, Any] | None) -> Any:
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{name} requires a gradient, and none is passed on; detach(), or torch.no_grad()")
        array = as_array(plain(value) if back is None else writable(value, name), name)
        if back is not None:
            back[id(array)] = value
        return array
    if type(value) in (list, tuple):
        return type(value)([as_given(each, name, back) for each in value])
    return DTYPES.get(value, value) if isinstance(value, torch.dtype) else value


append_kv = on_tensors(lanewise.append_kv, "k_cache", "v_cache", "k_scales", "v_scales")
attention_step = on_tensors(lanewise.attention_step)
beam_step = on_tensors(lanewise.beam_step)
copy_blocks = on_tensors(lanewise.copy_blocks, "pool")
decode_attention = on_tensors(lanewise.decode_attention, "out")
extend_attention = on_tensors(lanewise.extend_attention, "out")
gather_blocks = on_tensors(lanewise.gather_blocks, "out")
gather_kv = on_tensors(lanewise.gather_kv, "out")
merge_state = on_tensors(lanewise.merge_state, "out")
merge_states = on_tensors(lanewise.merge_states, "out")
permute_blocks = on_tensors(lanewise.permute_blocks, "pool")
relayout = on_tensors(lanewise.relayout, "dst", "dst_scales")
scatter_blocks = on_tensors(lanewise.scatter_blocks, "pool")
swap_blocks = on_tensors(lanewise.swap_blocks, "dst")
verify_draft = on_tensors(lanewise.verify_draft)
zero_blocks = on_tensors(lanewise.zero_blocks, "pool")


class AttentionPlan:
    """lanewise.AttentionPlan, whose run takes and gives tensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.plan = lanewise.AttentionPlan(*args, **kwargs)
        self.run = on_tensors(self.plan.run, "out")
        for name in ("num_queries", "num_heads", "num_kv_heads", "block_size"):
            setattr(self, name, getattr(self.plan, name))
