"""Token bitmasks as grammar engines write them, applied in place to what holds the logits: CPU tensors and arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lanewise
from lanewise._arrays import BFLOAT16, as_array

_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)


def logits_rows(x: Any) -> NDArray[Any] | None:
    """The memory of float32, float16 or bfloat16 logits, as (B, V); None for what the host must do or refuse."""
    array = _rows(x)
    return array if array is not None and (array.dtype in _FLOATS or array.dtype.name == "bfloat16") else None


def words_rows(x: Any) -> NDArray[np.int32] | None:
    array = _rows(x)
    return array if array is not None and array.dtype == np.int32 else None


def forbid(logits: NDArray[Any], words: NDArray[np.int32]) -> None:
    """-inf where the words forbid, in place. What they do not reach is forbidden."""
    if logits.shape[1]:
        lanewise.apply_token_bitmask(logits, words, out=logits)


def forbidden(logits: Any, words: Any) -> bool:
    """Does the same, if there is a row of words for each row of logits. Whether it has done so."""
    x, w = logits_rows(logits), words_rows(words)
    if x is None or w is None or len(x) != len(w):
        return False
    forbid(x, w)
    return True


def applying(host: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """llguidance's function for one kind of logits, done here where it can be."""

    def apply_token_bitmask_inplace(logits: Any, mask: Any) -> None:
        """-inf for the logits whose bit is 0, or that lie beyond the mask: (V,) or (B, V), and int32 words a row."""
        if not forbidden(logits, mask):
            host(logits, mask)

    return apply_token_bitmask_inplace


def _rows(x: Any) -> NDArray[Any] | None:
    array = x if isinstance(x, np.ndarray) else _memory(x)
    if array is None or array.ndim not in (1, 2):
        return None
    return array.reshape(1, -1) if array.ndim == 1 else array


def _memory(tensor: Any) -> NDArray[Any] | None:
    if not hasattr(tensor, "__dlpack__") or tensor.device.type != "cpu" or tensor.requires_grad or tensor.is_neg():
        return None  # another device's, or autograd has to know, or its memory has the other sign
    try:
        array: NDArray[Any] = tensor.numpy()  # a tenth of the time
    except TypeError:  # bfloat16
        array = as_array(tensor, "tensor")
    return array
