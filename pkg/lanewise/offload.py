"""HostOffload: a second tier, in host memory, for the blocks of a device's cache."""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import storage
from ._arrays import as_array
from ._types import Array, Int
from .moves import gather_blocks, scatter_blocks
from .pool import BlockPool


class Transfer:
    """Blocks that are on their way into a HostOffload or out of it, held until done.

    keys: of what is moved. ids: their rows of HostOffload.blocks, int64. evicted: keys that had to go for them.
    As a context manager it is done at the end of `with`, and undone if an exception ends it.
    """

    def __init__(self, tier: HostOffload, kind: Literal["store", "load"], keys: list[Any], handles: list[int]) -> None:
        self._tier, self._kind, self._handles, self._open = tier, kind, handles, True
        self.keys = keys
        self.ids: NDArray[np.int64] = np.array(handles, np.int64) & 0xFFFFFFFF  # a handle's low half is the block
        self.evicted: list[Any] = []

    def write(self, blocks: Array) -> None:
        """Puts the contents of a store, (blocks, block_bytes) uint8 or one array of as many bytes a block, in order."""
        if self._kind != "store":
            raise RuntimeError("a load is read from, not written to")
        self._moves()
        rows = np.ascontiguousarray(as_array(blocks, "blocks"))
        if rows.nbytes != len(self.keys) * self._tier.block_bytes:
            wanted = f"{len(self.keys)} blocks of {self._tier.block_bytes} bytes"
            raise ValueError(f"blocks must have {wanted}, got shape {rows.shape} of {rows.dtype}")
        scatter_blocks(
            rows.reshape(-1).view(np.uint8).reshape(len(self.keys), self._tier.block_bytes), self.ids, self._tier.blocks
        )

    def read(self, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """The contents, (blocks, block_bytes) uint8, C-contiguous: what a device can be sent as one run."""
        if self._kind != "load":
            raise RuntimeError("a store is written to, not read from")
        self._moves()
        rows: NDArray[np.uint8] = gather_blocks(self._tier.blocks, self.ids, out=out)
        return rows

    def done(self) -> None:
        """What was stored can be found from now on; what was loaded may be evicted. Once, else RuntimeError."""
        self._tier._end(self, True)

    def undo(self) -> None:
        """As if it had not begun, but that what was evicted is gone. Once, else RuntimeError."""
        self._tier._end(self, False)

    def _moves(self) -> None:
        if not self._open:
            raise RuntimeError(f"this {self._kind} has ended")

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._open:
            self._tier._end(self, kind is None)


class HostOffload:
    """num_blocks blocks of block_bytes bytes in host memory, kept by key; who was not used for longest goes first.

    Keys are whatever hashes and means the contents, as PrefixCache.hashes gives them. blocks is (num_blocks,
    block_bytes) uint8: where a device copies to and from. buffer, huge_pages, touch: as PagedKVCache has them.
    Any thread may call; each call is all or nothing. Raises ValueError, TypeError, KeyError, MemoryError.
    Source of the protocol: vLLM's CPU offloading (prepare, complete; look-up of a pending block is no hit).

    >>> import numpy as np, lanewise
    >>> tier = lanewise.HostOffload(num_blocks=2, block_bytes=64)
    >>> with tier.store(["a", "b"]) as store:
    ...     store.write(np.arange(128, dtype=np.uint8))
    >>> tier.lookup(["a", "b", "c"])
    2
    >>> with tier.load(["b"]) as load:
    ...     int(load.read()[0, 0])
    64
    >>> with tier.store(["c"]) as store:
    ...     store.evicted
    ['a']
    """

    def __init__(
        self, num_blocks: Int, block_bytes: Int, *, buffer: Any = None, huge_pages: bool = True, touch: bool = False
    ) -> None:
        self._pool = BlockPool(num_blocks)
        try:
            self.block_bytes = operator.index(block_bytes)
        except TypeError:
            raise TypeError(f"block_bytes must be an integer, got {block_bytes!r}") from None
        if not 1 <= self.block_bytes * self._pool.num_blocks < storage.MOST_BYTES:
            raise ValueError(f"block_bytes must be at least 1, and a process address all blocks, got {block_bytes}")
        size = self._pool.num_blocks * self.block_bytes
        region = storage.allocate(size, huge_pages, touch) if buffer is None else storage.over_buffer(buffer, size)
        self.blocks: NDArray[np.uint8] = region.reshape(self._pool.num_blocks, self.block_bytes)
        self._ready: OrderedDict[Hashable, int] = OrderedDict()  # handles, the longest unused first
        self._pending: dict[Hashable, int] = {}
        self._lock = threading.Lock()

    def lookup(self, keys: Iterable[Hashable]) -> int:
        """How many of the first keys are here, whole; one that is still being stored ends the count."""
        known, wanted = 0, list(keys)  # not under the lock: a generator may ask this tier
        with self._lock:
            for key in wanted:
                if key not in self._ready:
                    break
                known += 1
        return known

    def store(self, keys: Iterable[Hashable]) -> Transfer | None:
        """Room for those of the keys that are neither here nor on their way; None if there is none, nothing changed.

        What is here of them counts as used. Nothing that is being moved, or is among the keys, is evicted.
        """
        wanted = list(dict.fromkeys(keys))
        with self._lock:
            new = [key for key in wanted if key not in self._ready and key not in self._pending]
            gone = self._to_evict(len(new) - self._pool.num_free, set(wanted))
            if gone is None:
                return None
            for key in gone:
                self._pool.free(self._ready.pop(key))
            for key in wanted:
                if key in self._ready:
                    self._ready.move_to_end(key)
            handles = self._pool.allocate(len(new)).tolist()
            self._pending.update(zip(new, handles, strict=True))
        transfer = Transfer(self, "store", new, handles)
        transfer.evicted = gone
        return transfer

    def load(self, keys: Iterable[Hashable]) -> Transfer:
        """The blocks of the keys, which stay until it is done, and count as used. KeyError names one not here."""
        wanted = list(keys)
        with self._lock:
            for i, key in enumerate(wanted):
                if key not in self._ready:
                    raise KeyError(f"keys[{i}]: {key!r} is {'being stored' if key in self._pending else 'not here'}")
            handles = [self._pool.fork(self._ready[key]) for key in wanted]
            for key in wanted:
                self._ready.move_to_end(key)
        return Transfer(self, "load", wanted, handles)

    def discard(self, keys: Iterable[Hashable]) -> int:
        """Forgets those of the keys that are here; blocks being loaded stay until that is done. Gives how many."""
        wanted = dict.fromkeys(keys)
        with self._lock:
            gone = [key for key in wanted if key in self._ready]
            for key in gone:
                self._pool.free(self._ready.pop(key))
        return len(gone)

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing; store evicts when they do not suffice."""
        with self._lock:
            return self._pool.num_free

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._ready

    def check(self) -> None:
        """AssertionError unless keys, blocks and counters add up."""
        with self._lock:
            self._pool.check()
            held = [*self._ready.values(), *self._pending.values()]
            assert len(set(held)) == len(held), "two keys have one block"
            assert not self._ready.keys() & self._pending.keys(), "a key is here and on its way"
            assert all(self._pool.ref_count(handle) >= 1 for handle in held), "a key has no block"

    def _to_evict(self, count: int, spared: set[Any]) -> list[Any] | None:
        if count <= 0:
            return []
        gone: list[Any] = []
        for key, handle in self._ready.items():
            if key not in spared and self._pool.ref_count(handle) == 1:
                gone.append(key)
                if len(gone) == count:
                    return gone
        return None

    def _end(self, transfer: Transfer, well: bool) -> None:
        with self._lock:
            transfer._moves()
            transfer._open = False
            if transfer._kind == "load":
                self._pool.free(transfer._handles)
                return
            for key, handle in zip(transfer.keys, transfer._handles, strict=True):
                del self._pending[key]
                if well:
                    self._ready[key] = handle
            if not well:
                self._pool.free(transfer._handles)
