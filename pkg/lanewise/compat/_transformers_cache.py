"""A cache for transformers' models over PagedKVCache: one block a row, copied when it is shared and written to."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np

from .. import PagedKVCache, Sequence
from ..transfer import KVRoom
from ._host import need
from ._tensors import array, tensor, torch

host: Any = need(
    "transformers.cache_utils",
    package="transformers",
    works="5.0 to 5.24",
    names=("Cache", "DynamicCache", "DynamicLayer"),
)

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
LEAST_ROOM = 256  # tokens of a row that has few
MIN_BYTES = 2 << 20  # a huge page, which even a row with one token would take whole
LENDS = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
CROPS_TO_A_LENGTH = "max_length" in inspect.signature(host.DynamicLayer.crop).parameters  # before 5.20


class PagedLayer(host.DynamicLayer):
    """One layer's keys and values. `keys` and `values` are views of the blocks, or copies once beams have mixed them.

    What is not on the CPU, or needs gradients, is kept as DynamicLayer keeps it.
    """

    cache: PagedKVCache | None = None
    room: KVRoom | None = None  # if no row's block is another's: tokens are then written without asking the pool

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        super().lazy_initialization(key_states, value_states)
        self.rows: list[Sequence] = []
        if takes(key_states) and takes(value_states) and key_states.dtype == value_states.dtype:
            self.kind = (key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype)
            self._make(key_states.shape[0], key_states.shape[2])

    def _make(self, count: int, length: int) -> None:
        heads, width, v_width, dtype = self.kind
        blocks = 2 * max(count, 1)  # a row that is shared and written to takes a new one before it leaves the old
        one_page = MIN_BYTES // (blocks * heads * (width + v_width) * dtype.itemsize)
        room = max(LEAST_ROOM, 1 << (length - 1).bit_length(), 1 << one_page.bit_length() >> 1)
        self.cache = PagedKVCache(
            1, blocks, heads, width, v_head_dim=v_width, block_size=room, dtype=NAMES[dtype], prefix_cache=False
        )
        self.rows = [self.cache.sequence() for _ in range(count)]

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if (
            self.room is not None
            and key_states.is_cpu
            and value_states.is_cpu
            and not (key_states.requires_grad or value_states.requires_grad)
            and (seen := self.room.extend(key_states, value_states, self.rows[0]._length)) is not None
        ):
            self.keys, self.values = seen
            more = key_states.shape[2]
            for row in self.rows:
                row._length += more
            return seen
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.cache is None:
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        count, _, more, _ = key_states.shape
        if not self.rows:
            self.rows = [self.cache.sequence() for _ in range(count)]
        self._make_room(self.rows[0].length + more, 2 * count)
        slots = self.cache.reserve(self.rows, [more] * count)
        self.cache.write(slots, by_token(key_states), by_token(value_states), layer=0)
        self._look(own=True)
        return self.keys, self.values

    def _make_room(self, length: int, blocks: int) -> None:
        assert self.cache is not None
        geometry, had = self.cache.geometry, self.rows[0].length
        if length <= geometry.block_size and blocks <= geometry.num_blocks:
            return
        keys, values = self.keys, self.values
        self._make(len(self.rows), max(length, geometry.block_size))
        if had:
            slots = self.cache.reserve(self.rows, [had] * len(self.rows))
            if not self.cache._storage.target.write_states(keys, values, 0, 1, 0):  # a new pool's blocks are in order
                self.cache.write(slots, by_token(keys), by_token(values), layer=0)

    def _look(self, own: bool = False) -> None:
        """Sets keys and values, (rows, heads, tokens, head_dim), to what the cache has; and room, if no row's block is
        another's too."""
        assert self.cache is not None
        length, sides = self.rows[0].length, (self.cache.keys(0), self.cache.values(0))
        chosen = evenly(self.cache.block_tables(self.rows)[:, 0]) if length else slice(len(self.rows))
        self.room = None
        if own and length and isinstance(chosen, slice) and LENDS:
            place = chosen.start, chosen.step, len(self.rows)
            self.room = KVRoom(self.cache._storage.target, *place, torch.Tensor)
            self.keys, self.values = self.room.upto(length)
        else:
            self.keys, self.values = (as_states(side[chosen, :, :length], self.kind[3]) for side in sides)

    def reset(self) -> None:
        self._keep([])
        super().reset()
        self.cache = self.room = None

    def crop(self, tokens_to_remove: int) -> None:
        if self.cache is None or not self.rows:
            super().crop(tokens_to_remove)
            return
        if tokens_to_remove > 0 and not CROPS_TO_A_LENGTH:
            super().crop(tokens_to_remove)  # has the error for it
        length = tokens_to_remove if tokens_to_remove > 0 else self.rows[0].length + tokens_to_remove
        if 0 <= length < self.rows[0].length:
            for row in self.rows:
                row.truncate(length)
            self._look(own=self.room is not None)

    def reorder_cache(self, beam_idx: Any) -> None:
        if self.cache is None or not self.rows:
            super().reorder_cache(beam_idx)
        else:
            self.cache.reorder(self.rows, array(beam_idx.to("cpu")))
            self._look()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is None or not self.rows:
            super().batch_repeat_interleave(repeats)
        else:
            self._choose([i for i in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Any) -> None:
        if self.cache is None or not self.rows:
            super().batch_select_indices(indices)
        else:
            self._choose(torch.arange(len(self.rows))[indices.to("cpu")].tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedLayer:
        """The same tokens in a cache of its own, so that a prompt may go on in several ways."""
        other = memo[id(self)] = type(self)()
        if self.cache is None:
            other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        elif self.rows:
            other.update(self.keys, self.values)
        return other

    def _choose(self, chosen: list[int]) -> None:
        self._keep([self.rows[i].fork() for i in chosen])
        self._look()

    def _keep(self, rows: list[Sequence]) -> None:
        for row in self.__dict__.get("rows", []):
            row.free()
        self.rows = rows


class PagedCache(host.Cache):
    """Keys and values of a model's layers in blocks that grow in place: generate(..., cache=PagedCache(config)).

    In place of DynamicCache, which copies all it has for each token. Layers of another kind than full attention
    (sliding windows, states) are DynamicCache's own.
    """

    def __init__(self, config: Any = None) -> None:
        if config is None:
            super().__init__(layer_class_to_replicate=PagedLayer)
        else:
            layers = host.DynamicCache(config=config).layers
            super().__init__(layers=[PagedLayer() if type(each) is host.DynamicLayer else each for each in layers])


def takes(states: Any) -> bool:
    return states.is_cpu and states.dtype in NAMES and not states.requires_grad and states.dim() == 4


def by_token(states: Any) -> Any:
    """(tokens, heads, head_dim), the tokens of the first row first."""
    rows, heads, count, width = states.shape
    return states.transpose(1, 2).reshape(rows * count, heads, width)


def evenly(blocks: Any) -> Any:
    """The blocks as a slice, which needs no copy, if one step leads from each to the next."""
    first, last = int(blocks[0]), int(blocks[-1])
    step = int(blocks[1]) - first if len(blocks) > 1 else 1
    return slice(first, last + 1, step) if step > 0 and (np.diff(blocks) == step).all() else blocks


def as_states(found: Any, dtype: Any) -> Any:
    return tensor(found.view(np.int16)).view(dtype) if dtype == torch.bfloat16 else tensor(found)
