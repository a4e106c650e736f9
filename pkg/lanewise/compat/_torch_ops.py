"""lanewise's functions as custom ops, for what a plain call cannot serve: torch.compile, autograd, fake tensors.

All ops have one schema. What a call is told besides its logits goes in four parts: the tensors, the integers and the
floats among its arguments, each in a list (so that torch.compile can keep them variable), and the rest as a text that
says where those stand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidLogitsError
from ..params import SamplingParams
from ._tensors import Tensor, as_tensors, from_numpy, torch

SCHEMA = "(Tensor logits, Tensor[] tensors, SymInt[] integers, float[] floats, str arguments) -> Tensor[]"
PARAMETERS = tuple(SamplingParams.__dataclass_fields__)


def define(
    name: str, core: Callable[..., Any], fake: Callable[..., list[Any]], gradient: Callable[..., Any] | None
) -> Callable[[Any, dict[str, Any]], list[Any]]:
    """The op lanewise::name, called as op(logits, arguments).

    `fake` gives tensors with the shapes and dtypes of its results; `gradient` is a rule of _gradients.
    """

    def run(logits: Any, *packed: Any) -> list[Any]:
        tensors, *rest = packed
        arguments = unpacked([tensor.detach() for tensor in tensors], *rest)
        try:
            return flat(as_tensors(core(logits.detach(), **arguments)))
        except InvalidLogitsError as error:
            error.tokens = as_tensors(error.tokens)
            raise

    op = torch.library.custom_op(f"lanewise::{name}", run, mutates_args=(), schema=SCHEMA)
    op.register_fake(lambda logits, *packed: fake(logits, **unpacked(*packed)))
    if gradient is not None:
        op.register_autograd(backward_of(gradient), setup_context=remember)
    return lambda logits, arguments: op(logits, *pack(arguments))


def remember(ctx: Any, inputs: tuple[Any, ...], output: list[Any]) -> None:
    logits, tensors, *ctx.rest = inputs
    ctx.save_for_backward(logits, output[0], *tensors)


def backward_of(gradient: Callable[..., Any]) -> Callable[..., Any]:
    def backward(ctx: Any, gradients: list[Any]) -> tuple[Any, ...]:
        logits, result, *tensors = ctx.saved_tensors
        if any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError("only the logits have a derivative; detach() the temperature")
        to_logits = gradient(gradients[0], logits, result, **unpacked(tensors, *ctx.rest))
        others = [None if part else part for part in ctx.rest]  # an empty list counts as one of tensors
        return to_logits, [None] * len(tensors), *others

    return backward


def flat(results: Any, real: Any = torch.float64) -> list[Any]:
    """All of the results as tensors, in a row; numbers too, as the same call with a batch would have them."""
    if isinstance(results, tuple):
        return [tensor for field in results for tensor in flat(field, torch.float32)]
    if isinstance(results, Tensor):
        return [results]
    return [] if results is None else [torch.tensor(results, dtype=torch.int64 if isinstance(results, int) else real)]


# ---- arguments in four parts ----


def pack(arguments: dict[str, Any]) -> tuple[list[Any], list[int], list[float], str]:
    parts: tuple[list[Any], list[int], list[float]] = ([], [], [])
    text = ", ".join([f'"{name}": {packed(value, *parts)}' for name, value in arguments.items()])
    return (*parts, "{" + text + "}")


def packed(value: Any, tensors: list[Any], integers: list[int], floats: list[float]) -> str:
    """`value` as JSON, where "tensor", "integer" and "float" are the next of each, and strings begin with =."""
    parts = tensors, integers, floats
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            return str(value)
        integers.append(value)
        return '"integer"'
    if isinstance(value, float):
        floats.append(value)
        return '"float"'
    if isinstance(value, (Tensor, np.ndarray)):
        tensors.append(value if isinstance(value, Tensor) else from_numpy(value))
        return '"tensor"'
    if isinstance(value, str):
        return f'"={value}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([packed(item, *parts) for item in value]) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join([f'"{key}": {packed(item, *parts)}' for key, item in value.items()]) + "}"
    if isinstance(value, SamplingParams):
        return "{" + ", ".join([f'"{name}": {packed(getattr(value, name), *parts)}' for name in PARAMETERS]) + "}"
    raise TypeError(f"a {type(value).__name__} cannot be an argument of an operator")


def unpacked(
    tensors: Sequence[Any], integers: Sequence[int], floats: Sequence[float], arguments: str
) -> dict[str, Any]:
    parts = {"tensor": iter(tensors), "integer": iter(integers), "float": iter(floats)}

    def value(item: Any) -> Any:
        if isinstance(item, str):
            return item[1:] if item.startswith("=") else next(parts[item])
        if isinstance(item, list):
            return [value(each) for each in item]
        if isinstance(item, dict) and item.keys() == set(PARAMETERS):
            return SamplingParams(**{name: value(each) for name, each in item.items()})
        if isinstance(item, dict):  # a bias: ids and what is added
            return {int(key): value(each) for key, each in item.items()}
        return item

    return {name: value(item) for name, item in json.loads(arguments).items()}
