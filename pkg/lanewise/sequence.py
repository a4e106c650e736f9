"""Sequence: the table of one text's blocks."""

from __future__ import annotations

import operator
import threading
import weakref
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ._tables import DROPPED, Slots, ids_of, packed, slots_of
from ._types import Array, Int, Ints

if TYPE_CHECKING:
    from .kvcache import PagedKVCache


class Sequence:
    """The keys and values of one text: a table of blocks and a length. PagedKVCache.sequence and fork make them.

    `length` tokens lie in the blocks `handles` (-1: dropped), of which the last may be part filled. free() gives the
    blocks back, and so does leaving a `with` block, or the last reference to the sequence.
    One thread at a time: a second one gets a RuntimeError. Use after free() is ValueError.

    >>> import numpy as np, lanewise
    >>> cache = lanewise.PagedKVCache(1, 8, 1, 2, block_size=4)
    >>> with cache.sequence() as first:
    ...     first.append(np.ones((1, 6, 1, 2), np.float32), np.ones((1, 6, 1, 2), np.float32))
    ...     second = first.fork()
    ...     first.length, second.length, cache.pool.num_used
    (6, 6, 2)
    >>> second.free()
    """

    __slots__ = ("__weakref__", "_cache", "_committed", "_extra", "_freed", "_handles", "_length", "_lock", "_tokens")

    def __init__(
        self,
        cache: PagedKVCache,
        handles: array[int],
        length: int,
        tokens: array[int],
        extra: dict[str, Any],
        committed: int = 0,
    ) -> None:
        self._cache = cache
        self._handles = handles
        self._length = length
        self._tokens = tokens  # ids as far as known, which may be beyond length
        self._extra = extra
        self._committed = committed  # blocks from the beginning on, as far as this sequence knows
        self._freed = False
        self._lock = threading.Lock()
        cache._live[id(self)] = weakref.ref(self)

    @property
    def cache(self) -> PagedKVCache:
        """The cache that it is in."""
        return self._cache

    @property
    def length(self) -> int:
        """Tokens in it, dropped ones included."""
        return self._length

    @property
    def handles(self) -> Slots:
        """The handles of its blocks, int64; -1 for a dropped one."""
        return np.array(self._handles, np.int64)

    @property
    def tokens(self) -> Slots:
        """The ids known of it, int64: those it was made with and those told to commit."""
        return np.array(self._tokens, np.int64)

    @property
    def extra(self) -> dict[str, Any]:
        """What its prefixes are known under besides tokens, as sequence() was told."""
        return dict(self._extra)

    def append(self, k: Array, v: Array) -> None:
        """Appends n tokens: k is (layers, n, heads, head_dim), v likewise; as PagedKVCache.append."""
        self._cache.append([self], k, v, counts=None)

    def reserve(self, count: Int = 1) -> Slots:
        """Makes room for `count` more tokens, counts them as there, and gives their slots: as PagedKVCache.reserve."""
        return self._cache.reserve([self], [count])

    def slots(self, start: Int = 0, stop: Int | None = None) -> Slots:
        """Where the tokens start .. stop - 1 (default: to the end) lie, int64; -1 for a dropped one."""
        with alone(self._cache, [self]):
            first = operator.index(start)
            last = self._length if stop is None else operator.index(stop)
            if not 0 <= first <= last <= self._length:
                raise ValueError(f"start and stop must be in [0, {self._length}], in order, got {first} and {last}")
            return slots_of(self._handles, first, last, self._cache.geometry.block_size)

    def commit(self, tokens: Ints = ()) -> int:
        """Makes its full blocks known to the prefix cache, once they are filled, and gives the number of tokens known.

        tokens: the ids that follow those known so far (`tokens`). Blocks whose ids are not known, that are not full,
        or that follow a dropped one, wait.
        """
        cache = self._cache
        with alone(cache, [self]):
            ids, size = self._tokens + ids_of(tokens, "tokens"), cache.geometry.block_size
            start, full = self._committed, min(self._length, len(ids)) // size
            if DROPPED in self._handles[:full]:
                full = self._handles.index(DROPPED)
            if cache.prefix is not None and start < full:
                parent = self._handles[start - 1] if start else None
                known = np.array(ids[start * size : full * size], np.int64)
                cache.prefix.commit(np.array(self._handles[start:full]), known, parent=parent, **self._extra)
                self._committed = full
            self._tokens = ids
            return self._committed * size

    def truncate(self, length: Int) -> None:
        """Forgets the tokens from `length` on, as after a draft was refused, and gives their blocks back."""
        cache = self._cache
        with alone(cache, [self]):
            wanted, size = operator.index(length), cache.geometry.block_size
            if not 0 <= wanted <= self._length:
                raise ValueError(f"length must be in [0, {self._length}], got {wanted}")
            kept = -(-wanted // size)
            if wanted % size and self._handles[kept - 1] == DROPPED:
                raise ValueError(
                    f"length {wanted} ends in a dropped block: tokens {(kept - 1) * size}..{kept * size - 1}"
                )
            cache._give_back(self._handles[kept:])
            del self._handles[kept:]
            if wanted < self._length:
                del self._tokens[wanted:]
            self._committed = min(self._committed, wanted // size)
            self._length = wanted

    def drop_before(self, position: Int, sinks: Int = 0) -> int:
        """Gives back the blocks that lie wholly before `position` and behind the first `sinks` tokens; their number.

        A window of w tokens is drop_before(length - w). Length and positions stay; in the table the block is -1.
        """
        cache = self._cache
        with alone(cache, [self]):
            size, end, kept = cache.geometry.block_size, operator.index(position), operator.index(sinks)
            if kept < 0:
                raise ValueError(f"sinks must be at least 0, got {kept}")
            first, last = -(-kept // size), max(0, min(end, self._length)) // size
            dropped = array("q", (h for h in self._handles[first:last] if h != DROPPED))
            cache._give_back(dropped)
            for i in range(first, last):
                self._handles[i] = DROPPED
            return len(dropped)

    def fork(self) -> Sequence:
        """Another sequence with the same tokens, in the same blocks: a reference to each, no copy."""
        cache = self._cache
        with alone(cache, [self]):
            cache._take(self._handles)
            return Sequence(cache, self._handles[:], self._length, self._tokens[:], self._extra, self._committed)

    def to(self, other: PagedKVCache) -> Sequence:
        """A sequence with the same tokens in another cache, of any layout, block size and dtype; this one stays.

        To swap out, free this one afterwards. Layers, heads and head_dim must be equal; with dropped blocks,
        block_size too.
        """
        cache = self._cache
        with alone(cache, [self]):
            if not isinstance(other, type(cache)):
                raise TypeError(f"other must be a PagedKVCache, got {type(other).__name__}")
            for name in ("num_layers", "num_kv_heads", "head_dim", "v_head_dim"):
                ours, theirs = getattr(cache.geometry, name), getattr(other.geometry, name)
                if ours != theirs:
                    raise ValueError(f"{name} is {ours} here, {theirs} in the other cache")
            size, its_size = cache.geometry.block_size, other.geometry.block_size
            here = np.array(self._handles, np.int64) != DROPPED
            if size != its_size:
                if not here.all():
                    raise ValueError(f"blocks have been dropped, and block_size is {size} here, {its_size} there")
                here = np.ones(-(-self._length // its_size), bool)
            there = np.full(len(here), DROPPED, np.int64)
            with other._allocated(int(here.sum())) as there[here]:
                table = packed(there)
                sources = slots_of(self._handles, 0, self._length, size)
                targets = slots_of(table, 0, self._length, its_size)
                other._storage.move_rows(cache._storage, sources[sources >= 0], targets[targets >= 0])
            return Sequence(other, table, self._length, self._tokens[:], self._extra)

    def free(self) -> None:
        """Gives its blocks back. A second time is ValueError."""
        with alone(self._cache, [self]):
            self._release()

    def _release(self) -> None:
        self._freed = True
        self._cache._live.pop(id(self), None)
        self._cache._give_back(self._handles)
        self._handles, self._length = array("q"), 0

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._freed:
            self.free()

    def __del__(self) -> None:
        if not self._freed:
            self._release()

    def __repr__(self) -> str:
        state = "freed" if self._freed else f"length={self._length}, blocks={len(self._handles)}"
        return f"<lanewise.Sequence {state}>"


@contextmanager
def alone(cache: PagedKVCache, seqs: list[Sequence]) -> Iterator[None]:
    """The sequences are of this cache, alive, each there once, and in no other call until this is left."""
    taken: list[Sequence] = []
    try:
        for i, seq in enumerate(seqs):
            if not isinstance(seq, Sequence):
                raise TypeError(f"seqs[{i}] must be a Sequence, got {type(seq).__name__}")
            if seq._cache is not cache:
                raise ValueError(f"seqs[{i}] is of another cache")
            if not seq._lock.acquire(False):
                if any(seq is other for other in taken):
                    raise ValueError(f"seqs[{i}] is there a second time")
                raise RuntimeError(f"seqs[{i}] is in use by a call that is not over; give each thread its own fork")
            taken.append(seq)
            if seq._freed:
                raise ValueError(f"seqs[{i}] has been freed")
        yield
    finally:
        for seq in taken:
            seq._lock.release()
