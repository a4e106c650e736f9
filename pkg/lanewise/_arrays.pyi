from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

__pyx_capi__: dict[str, object]  # added by Cython, and so is __test__
__test__: dict[str, str]
BFLOAT16: np.dtype[np.void]

def as_array(x: object, name: str) -> NDArray[Any]: ...
def in_place(x: object, name: str) -> Any: ...

@disjoint_base
class Lender:
    def __new__(cls, array: NDArray[Any], tensor: type) -> Self: ...
    def upto(self, length: int) -> Any: ...
