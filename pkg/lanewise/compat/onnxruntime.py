"""Tokens from the OrtValue that a session has left its logits in, without a copy of them.

>>> outputs = session.run_with_ort_values(["logits"], feeds)
>>> tokens = lanewise.compat.onnxruntime.sample(outputs[0], temperature=0.7, top_p=0.9)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import lanewise
from lanewise._arrays import BFLOAT16, as_array
from lanewise.compat import _host

_host.need("onnxruntime", package="onnxruntime", works="1.20 to 1.32", names=("OrtValue",))

_FLOATS: dict[int, np.dtype[Any]] = {  # by ONNX's numbers
    1: np.dtype(np.float32),
    10: np.dtype(np.float16),
    11: np.dtype(np.float64),
    16: BFLOAT16,
}


class _Memory:
    """Lends an OrtValue's memory to NumPy; what NumPy makes of it keeps the value alive."""

    def __init__(self, value: Any, dtype: np.dtype[Any]) -> None:
        self.value = value
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(value.shape()),
            "typestr": dtype.str,
            "data": (value.data_ptr(), False),
        }


def logits(value: Any, *, position: Any = -1) -> NDArray[Any]:
    """The logits in an OrtValue (or an array) of shape (V,), (B, V) or (B, S, V), as NumPy sees them in its memory.

    position: which of the S, for all rows, as a view; or a list with one a row, which is copied. bfloat16 has a dtype
    that lanewise's functions take. Raises TypeError for a value that is no tensor of floats in CPU memory.
    """
    array = _array(value)
    if array.ndim != 3:
        return array
    chosen: NDArray[Any] = array[:, position] if np.ndim(position) == 0 else array[np.arange(len(array)), position]
    return chosen


def sample(value: Any, params: Any = None, *, position: Any = -1, **settings: Any) -> Any:
    """`lanewise.sample` of these logits, with all its parameters: an int, or an int64 array of B tokens."""
    return lanewise.sample(logits(value, position=position), params, **settings)


def _array(value: Any) -> NDArray[Any]:
    if not hasattr(value, "data_ptr") or not hasattr(value, "element_type"):
        return as_array(value, "value")
    if not value.is_tensor():
        raise TypeError(f"value must be a tensor, got {value.data_type()}")
    if value.device_name().lower() != "cpu":
        raise TypeError(f"value must be in CPU memory, got {value.device_name()}")
    dtype = _FLOATS.get(value.element_type())
    if dtype is None:
        raise TypeError(f"value must have floats, got {value.data_type()}")
    memory: NDArray[Any] = np.asarray(_Memory(value, dtype))
    return memory.view(dtype)
