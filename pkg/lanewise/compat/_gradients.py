"""From the gradient of a result to that of the logits: softmax and its kin, in torch's own operations.

They are written in terms of the result and of the logits, so they can be differentiated again.
"""

from __future__ import annotations

from typing import Any

from ._tensors import torch


def softmax(gradient: Any, logits: Any, result: Any, *, temperature: Any = 1.0, axis: int = -1) -> Any:
    inner = result * (gradient - (gradient * result).sum(axis, keepdim=True))
    return over(inner, temperature, axis).to(logits.dtype)


def log_softmax(gradient: Any, logits: Any, result: Any, *, temperature: Any = 1.0, axis: int = -1) -> Any:
    inner = gradient - result.exp() * gradient.sum(axis, keepdim=True)
    return over(inner, temperature, axis).to(logits.dtype)


def logsumexp(gradient: Any, logits: Any, result: Any, *, temperature: Any = 1.0, axis: int = -1) -> Any:
    weights = (over(logits.float(), temperature, axis) - result.unsqueeze(axis)).exp()
    return over(weights * gradient.unsqueeze(axis), temperature, axis).to(logits.dtype)


def scale(gradient: Any, logits: Any, result: Any, *, temperature: Any, axis: int = -1) -> Any:
    return over(gradient, temperature, axis).to(logits.dtype)


def over(values: Any, temperature: Any, axis: int) -> Any:
    """values / temperature; zeros at temperature 0, where results are constant almost everywhere."""
    t = torch.as_tensor(temperature, dtype=torch.float64).clamp(max=1e30).to(values.dtype)
    t = t.unsqueeze(axis) if t.ndim else t
    return torch.where(t < 1e-30, torch.zeros_like(values), values / t)
