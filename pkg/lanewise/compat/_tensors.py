"""CPU tensors as the arrays that lanewise takes, and its results as tensors. Nothing is copied."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._arrays import BFLOAT16, as_array
from ._host import need

torch: Any = need("torch", package="torch", works="2.13")
need("torch.library", package="torch", works="2.13", names=("custom_op", "get_ctx"))

Tensor, from_numpy = torch.Tensor, torch.from_numpy


def as_arrays(out: Any) -> Any:
    """The memory of a tensor, or of each in a tuple, as arrays to write to."""
    if isinstance(out, tuple | list):
        return mapped(as_arrays, out)
    if out is None:
        return None
    if not isinstance(out, Tensor) or out.is_neg():
        raise TypeError(f"out must be a tensor that can be written to, got {type(out).__name__}")
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("out requires a gradient; call without out=, or under torch.no_grad()")
    return as_array(out.detach() if out.requires_grad else out, "out")


def as_tensors(result: Any, known: dict[int, Any] | None = None) -> Any:
    """What lanewise returned, its arrays as tensors; Python's numbers and None as they are.

    known: the tensors of arrays, by their ids, that are to be given back themselves.
    """
    if isinstance(result, np.ndarray | np.generic):
        if known and id(result) in known:
            return known[id(result)]
        if result.dtype == BFLOAT16:
            return from_numpy(np.asarray(result).view(np.int16)).view(torch.bfloat16)
        return from_numpy(np.asarray(result))
    return mapped(lambda field: as_tensors(field, known), result) if isinstance(result, tuple) else result


def mapped(function: Any, fields: Any) -> Any:
    done = [function(field) for field in fields]
    return type(fields)(*done) if hasattr(fields, "_fields") else tuple(done)


def plain(tensor: Any) -> Any:
    """The tensor, without what autograd knows of it."""
    return tensor.detach() if tensor.requires_grad else tensor


def writable(tensor: Any, name: str) -> Any:
    """`plain`, and its memory is what it shows."""
    if tensor.is_neg():
        raise TypeError(f"{name} must be a tensor that can be written to, and not a negated view of another")
    return plain(tensor)


def array(tensor: Any) -> np.ndarray[Any, Any]:
    """The tensor's own memory as an array; of a dtype NumPy has."""
    return np.asarray(tensor.detach())


def tensor(values: Any, dtype: Any = None) -> Any:
    """The array as a tensor: its own memory, unless `dtype` is another."""
    made = from_numpy(values)
    return made if dtype is None else made.to(dtype)


def entropy(shape: tuple[int, ...] = (), generator: Any = None) -> Any:
    """63 random bits each, from the generator, else from torch's own; on the CPU, whatever torch's default device."""
    return torch.randint(2**63 - 1, shape, generator=generator, device="cpu")


def seeds(rows: int, generators: dict[int, Any] | None = None) -> list[int]:
    """A seed a row: from the generator named for the row, from torch's own for the others.

    Each generator that is named is advanced once; torch.manual_seed repeats the others.
    """
    drawn = entropy((rows,))
    for row, generator in (generators or {}).items():
        drawn[row] = entropy((), generator)
    return drawn.tolist()  # type: ignore[no-any-return]
