"""The memory of a paged cache: one region, aligned, in which each block is one run (or one a layer)."""

from __future__ import annotations

import mmap
import operator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ._arrays import BFLOAT16, as_array, in_place
from ._types import Array, Ints
from .moves import swap_blocks
from .transfer import KVTarget, append_kv, gather_kv, relayout

Ids = NDArray[np.int64]

RUN_ALIGNMENT = 64  # a cache line, and the widest vector
REGION_ALIGNMENT = 2 << 20  # a huge page
MOST_BYTES = 1 << 47  # of a process's addresses
DTYPES = ("float32", "float16", "bfloat16", "int8")
LAYOUTS = ("HND", "NHD")
ORDERS = ("block", "layer")
SCALES = ("k_scales", "v_scales")
SCALE_BYTES = 8  # float32 scale and zero point of a token and head


def rounded(size: int) -> int:
    return -(-size // RUN_ALIGNMENT) * RUN_ALIGNMENT


@dataclass(frozen=True)
class Geometry:
    """The numbers that say where each key and value of a cache lies.

    A layer's part of a block is keys, values and, for int8, the scales of both, each rounded up to 64 bytes. Order
    "block" puts the parts of all layers of a block side by side: one run of `run_bytes`. Order "layer" puts the parts
    of all blocks of a layer side by side: num_layers runs a block.
    """

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    v_head_dim: int
    dtype: str = "float32"
    layout: str = "HND"
    order: str = "block"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_blocks", "num_kv_heads", "block_size", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise TypeError(f"{name} must be an integer, got {value!r}") from None
            if not 1 <= getattr(self, name) < 1 << 31:
                raise ValueError(f"{name} must be in [1, {(1 << 31) - 1}], got {value}")
        for name, allowed in (("dtype", DTYPES), ("layout", LAYOUTS), ("order", ORDERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.total_bytes >= MOST_BYTES:
            raise ValueError(f"such a cache takes {self.total_bytes} bytes, more than a process can address")

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "int8": 1}.get(self.dtype, 2)

    @property
    def key_bytes(self) -> int:
        return rounded(self.num_kv_heads * self.block_size * self.head_dim * self.itemsize)

    @property
    def value_bytes(self) -> int:
        return rounded(self.num_kv_heads * self.block_size * self.v_head_dim * self.itemsize)

    @property
    def scale_bytes(self) -> int:
        """Of the keys, and as many of the values."""
        return rounded(self.num_kv_heads * self.block_size * SCALE_BYTES) if self.dtype == "int8" else 0

    @property
    def part_bytes(self) -> int:
        return self.key_bytes + self.value_bytes + 2 * self.scale_bytes

    @property
    def run_bytes(self) -> int:
        return self.part_bytes * (self.num_layers if self.order == "block" else 1)

    @property
    def block_bytes(self) -> int:
        return self.part_bytes * self.num_layers

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def staging(self, num_blocks: int) -> Geometry:
        """That of as many blocks, in order, each one run: how blocks are saved."""
        return replace(self, num_blocks=num_blocks, order="block")


class Storage:
    """A geometry and its memory: `region`, uint8, and its views.

    keys and values are (layers, blocks, heads, tokens, head_dim) whatever the layout; scales are None or (layers,
    blocks, heads, tokens, 2), float32; runs is (1 or layers, blocks, run_bytes), uint8.
    """

    def __init__(self, geometry: Geometry, region: NDArray[np.uint8], element: np.dtype[Any]) -> None:
        self.geometry = geometry
        self.region = region
        self.element = element

    @classmethod
    def new(cls, geometry: Geometry, element: np.dtype[Any], huge_pages: bool = True, touch: bool = False) -> Storage:
        return cls(geometry, allocate(geometry.total_bytes, huge_pages, touch), element)

    @cached_property
    def keys(self) -> NDArray[Any]:
        return self._view(self.element, self.geometry.head_dim, 0)

    @cached_property
    def values(self) -> NDArray[Any]:
        return self._view(self.element, self.geometry.v_head_dim, self.geometry.key_bytes)

    @cached_property
    def key_scales(self) -> NDArray[np.float32] | None:
        return self._scales(0)

    @cached_property
    def value_scales(self) -> NDArray[np.float32] | None:
        return self._scales(self.geometry.scale_bytes)

    @cached_property
    def target(self) -> KVTarget:
        return KVTarget(self.keys, self.values)

    @cached_property
    def parts(self) -> NDArray[np.uint8]:
        """A layer's part of a block, as bytes: (layers, blocks, part_bytes)."""
        g = self.geometry
        if g.order == "layer":
            return self.region.reshape(g.num_layers, g.num_blocks, g.part_bytes)
        return self.region.reshape(g.num_blocks, g.num_layers, g.part_bytes).swapaxes(0, 1)

    def copy_from(self, other: Storage, sources: Ids, targets: Ids) -> None:
        """Blocks, as they are, from a storage that differs in number of blocks, layout and order alone. No target is a
        source."""
        if other.geometry.layout == self.geometry.layout:
            swap_blocks(other.parts, self.parts, np.stack([sources, targets], 1), axis=1)
            return
        for mine, its in zip(self._views, other._views, strict=True):
            mine[:, targets] = its[:, sources]

    def write(self, slots: Ints, k: Array, v: Array, layer: int | None = None, **turn: Any) -> None:
        """Rows (layers, tokens, heads, width), without the layers if there is one, to slots; a negative one is none."""
        if layer is not None and not 0 <= layer < self.geometry.num_layers:
            raise ValueError(f"layer must be in [0, {self.geometry.num_layers - 1}], got {layer}")
        if not turn and self.target.write(k, v, slots, -1 if layer is None else layer):
            return
        if layer is None:
            views, layout = self._views, "LNHTD"
        else:
            views, layout = [view[layer] for view in self._views], "NHTD"
        keys, values, *scales = views
        turn.update(zip(SCALES, scales, strict=False))
        append_kv(k, v, keys, values, slots, layout=layout, **turn)

    def read(self, slots: Ids) -> tuple[NDArray[Any], NDArray[Any]]:
        """Rows (layers, tokens, heads, width) of keys and of values; of int8, what the codes stand for."""
        keys, values, *scales = self._views
        given: Any = dict(zip(SCALES, scales, strict=False))
        rows: Any = gather_kv(keys, values, slots, layout="LNHTD", **given)
        return rows[0], rows[1]

    def move_rows(self, other: Storage, sources: Ids, targets: Ids) -> None:
        """Rows from slots of a storage of any block size, layout and dtype."""
        mine, its = self._views, other._views
        relayout(
            (its[0], its[1]),
            "LNHTD",
            (mine[0], mine[1]),
            "LNHTD",
            pairs=np.stack([sources, targets], 1),
            src_scales=tuple(its[2:]) or None,
            dst_scales=tuple(mine[2:]) or None,
        )

    @property
    def _views(self) -> list[NDArray[Any]]:
        views = [self.keys, self.values, self.key_scales, self.value_scales]
        return [view for view in views if view is not None]

    def _scales(self, offset: int) -> NDArray[np.float32] | None:
        g = self.geometry
        if not g.scale_bytes:
            return None
        return self._view(np.dtype(np.float32), 2, g.key_bytes + g.value_bytes + offset)

    def _view(self, element: np.dtype[Any], width: int, offset: int) -> NDArray[Any]:
        g = self.geometry
        row = width * element.itemsize
        head, token = (g.block_size * row, row) if g.layout == "HND" else (row, g.num_kv_heads * row)
        if g.order == "block":
            layer, block = g.part_bytes, g.block_bytes
        else:
            layer, block = g.part_bytes * g.num_blocks, g.part_bytes
        return np.ndarray(
            (g.num_layers, g.num_blocks, g.num_kv_heads, g.block_size, width),
            element,
            self.region,
            offset,
            (layer, block, head, token, element.itemsize),
        )


def element_of(dtype: DTypeLike) -> tuple[str, np.dtype[Any]]:
    """The name of a cache's dtype, and how NumPy has it: "bfloat16" as BFLOAT16, ml_dtypes.bfloat16 as itself."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        return dtype, BFLOAT16
    try:
        element = np.dtype(dtype).newbyteorder("=")
    except TypeError:
        element = None
    name = "bfloat16" if element == BFLOAT16 else str(element)
    if element is None or name not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return name, element


def allocate(size: int, huge_pages: bool = True, touch: bool = False) -> NDArray[np.uint8]:
    """Zeros at a multiple of 2 MiB, on huge pages where the system has them. Without `touch` they take no memory
    before they are written."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        pages = mmap.mmap(-1, size + REGION_ALIGNMENT, **private)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"the system gives no {size} bytes for the cache: {error}") from error
    everything = np.frombuffer(pages, np.uint8)
    start = -everything.ctypes.data % REGION_ALIGNMENT
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE, start, size)
    region: NDArray[np.uint8] = everything[start : start + size]
    if touch:
        region[:: mmap.PAGESIZE] = 0
    return region


def over_buffer(buffer: Any, size: int) -> NDArray[np.uint8]:
    """The first `size` bytes of what the user has: an array, a tensor, or whatever has the buffer protocol."""
    if not isinstance(buffer, np.ndarray) and not hasattr(buffer, "__dlpack__"):
        try:
            buffer = memoryview(buffer)  # what else NumPy takes it might copy
        except TypeError:
            raise TypeError(f"buffer must be an array, a tensor or a buffer, got {type(buffer).__name__}") from None
    array = as_array(in_place(buffer, "buffer"), "buffer")
    if not array.flags.writeable:
        raise ValueError("buffer is read-only")
    if not array.flags.c_contiguous:
        raise ValueError(f"buffer must be contiguous, got shape {array.shape} with strides {array.strides}")
    if array.nbytes < size:
        raise ValueError(f"buffer must have {size} bytes for this cache, got {array.nbytes}")
    region: NDArray[np.uint8] = array.reshape(-1).view(np.uint8)[:size]
    if region.ctypes.data % RUN_ALIGNMENT:
        raise ValueError(f"buffer must begin at a multiple of {RUN_ALIGNMENT} bytes, got address {region.ctypes.data}")
    return region
