"""What each function gives, without its values: tensors of the shapes, dtypes and strides, for torch.compile."""

from __future__ import annotations

from typing import Any

from ._tensors import torch


def rows(logits: Any, **_: Any) -> list[Any]:
    return [logits.new_empty(logits.shape, dtype=torch.float32)]


def along(logits: Any, *, axis: int = -1, **_: Any) -> list[Any]:
    """As `rows`; another axis than the last is computed as the last, and moved back without a copy."""
    return [rows(logits.movedim(axis, -1))[0].movedim(-1, axis)]


def without_axis(logits: Any, *, axis: int = -1, **_: Any) -> list[Any]:
    shape = logits.movedim(axis, -1).shape[:-1]
    return [logits.new_empty(shape, dtype=torch.float32)]


def ids(logits: Any, n: Any = None, **_: Any) -> list[Any]:
    shape = logits.shape[:-1] if n is None else (*logits.shape[:-1], n)
    return [logits.new_empty(shape, dtype=torch.int64)]


def margins(logits: Any, **_: Any) -> list[Any]:
    return [logits.new_empty(logits.shape[:-1], dtype=torch.float64)]


def sample(logits: Any, *_: Any, return_support: bool = False, **__: Any) -> list[Any]:
    if not return_support:
        return ids(logits)
    kept = torch.library.get_ctx().new_dynamic_size()
    starts = logits.shape[0] + 1 if logits.ndim == 2 else 2
    support = [((kept,), torch.int64), ((kept,), torch.float32), ((starts,), torch.int64)]
    return ids(logits) + [logits.new_empty(shape, dtype=dtype) for shape, dtype in support]


def top_k(logits: Any, k: Any, *, ties: str = "lowest") -> list[Any]:
    width = k if ties == "lowest" else torch.library.get_ctx().new_dynamic_size()
    shape = (*logits.shape[:-1], width)
    return [logits.new_empty(shape, dtype=dtype) for dtype in (torch.float32, torch.int64)]


def logprobs(
    logits: Any, tokens: Any = None, *, top_n: Any = 0, ids: Any = None, entropy: bool = False, **_: Any
) -> list[Any]:
    one = logits.shape[:-1]
    fields = [(one, torch.float32), (one, torch.int64)] if tokens is not None else []
    if top_n:
        fields += [((*one, top_n), torch.int64), ((*one, top_n), torch.float32)]
    if ids is not None:
        width = ids.shape[-1] if isinstance(ids, torch.Tensor) else len(ids[0] if isinstance(ids[0], list) else ids)
        fields.append(((*one, width), torch.float32))
    if entropy:
        fields.append((one, torch.float32))
    return [logits.new_empty(shape, dtype=dtype) for shape, dtype in fields]
