from typing import SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from lanewise._types import Array, Floats

__test__: dict[str, str]  # added by Cython

def softmax(
    logits: Array, *, temperature: Floats = 1.0, axis: SupportsIndex = -1, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]: ...
def log_softmax(
    logits: Array, *, temperature: Floats = 1.0, axis: SupportsIndex = -1, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]: ...
@overload
def logsumexp(
    logits: Array, *, temperature: Floats = 1.0, axis: SupportsIndex = -1, out: None = None
) -> np.float32 | NDArray[np.float32]: ...
@overload
def logsumexp(
    logits: Array, *, temperature: Floats = 1.0, axis: SupportsIndex = -1, out: NDArray[np.float32]
) -> NDArray[np.float32]: ...
def scale(
    logits: Array, temperature: Floats, *, axis: SupportsIndex = -1, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]: ...
