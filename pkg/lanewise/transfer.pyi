from collections.abc import Sequence
from typing import Any, Literal, final

from numpy.typing import DTypeLike, NDArray
from typing_extensions import Self

from lanewise._types import Array, Ints
from lanewise.layouts import Layout

__test__: dict[str, str]  # added by Cython

def append_kv(
    k: Array,
    v: Array | None,
    k_cache: Array | Sequence[Array],
    v_cache: Array | Sequence[Array] | None,
    slots: Ints,
    *,
    layout: Layout,
    k_scales: Array | Sequence[Array] | None = None,
    v_scales: Array | Sequence[Array] | None = None,
    rope: Literal["neox", "interleaved"] | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    positions: Ints | None = None,
    duplicates: Literal["raise", "last"] = "raise",
) -> None: ...
def gather_kv(
    k_cache: Array | Sequence[Array],
    v_cache: Array | Sequence[Array] | None,
    slots: Ints | None = None,
    *,
    layout: Layout,
    block_table: Array | None = None,
    lengths: Ints | None = None,
    k_scales: Array | Sequence[Array] | None = None,
    v_scales: Array | Sequence[Array] | None = None,
    dtype: DTypeLike | None = None,
    out: tuple[NDArray[Any], NDArray[Any] | None] | None = None,
) -> tuple[NDArray[Any], NDArray[Any] | None]: ...
def relayout(
    src: Array | Sequence[Array] | tuple[Any, Any],
    src_layout: Layout,
    dst: Array | Sequence[Array] | tuple[Any, Any],
    dst_layout: Layout,
    *,
    pairs: Array | None = None,
    src_scales: Array | Sequence[Array] | tuple[Any, Any] | None = None,
    dst_scales: Array | Sequence[Array] | tuple[Any, Any] | None = None,
) -> None: ...

@final
class KVTarget:
    def __new__(cls, keys: NDArray[Any], values: NDArray[Any]) -> Self: ...
    def write(self, k: Array, v: Array, slots: Ints, layer: int = -1) -> bool: ...
    def write_states(self, k: Array, v: Array, first: int, step: int, start: int) -> bool: ...

@final
class KVRoom:
    def __new__(cls, target: KVTarget, first: int, step: int, rows: int, tensor: type) -> Self: ...
    def extend(self, k: Array, v: Array, length: int) -> tuple[Any, Any] | None: ...
    def upto(self, length: int) -> tuple[Any, Any]: ...
