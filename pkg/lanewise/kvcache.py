"""PagedKVCache: keys and values in blocks, which sequences share, copy when they differ, give back and find again.

Blocks and their reference counts are BlockPool's, known prefixes PrefixCache's; here are the tables and the moves that
go with them. A call that fails has changed nothing.
"""

from __future__ import annotations

import operator
import os
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import saving, storage
from ._arrays import as_array
from ._tables import DROPPED, ID, Slots, held, ids_of, joined, next_slots, packed, slots_of
from ._types import Array, Images, Int, Ints, Key
from .pool import BlockPool, PrefixCache
from .saving import Saving, Store
from .sequence import Sequence, alone


class PagedKVCache:
    """Keys and values of num_blocks blocks of block_size tokens, for all layers, in one region of memory.

    dtype: float32, float16, bfloat16, or int8 with a scale and zero point for each token and head. layout: how heads
    and tokens lie in a block; order: "block" keeps all layers of a block together (one run, best for saving and
    swapping), "layer" all blocks of a layer. buffer: memory to use instead of new: an array, tensor or buffer,
    writable, 64-byte aligned, of at least geometry.total_bytes. huge_pages, touch: of new memory.
    keys, values and scales are views of it; pool and prefix its BlockPool and PrefixCache (None without prefix_cache).
    Raises ValueError, TypeError, MemoryError; what runs out of blocks OutOfBlocksError.

    >>> import numpy as np, lanewise
    >>> cache = lanewise.PagedKVCache(num_layers=2, num_blocks=8, num_kv_heads=1, head_dim=4, block_size=4)
    >>> a, b = cache.sequence(), cache.sequence()
    >>> rows = np.ones((2, 7, 1, 4), np.float32)
    >>> cache.append([a, b], rows, rows, counts=[2, 5])
    >>> cache.lengths([a, b])
    array([2, 5], dtype=int32)
    >>> cache.block_tables([a, b])
    array([[ 0, -1],
           [ 1,  2]], dtype=int32)
    """

    def __init__(
        self,
        num_layers: Int,
        num_blocks: Int,
        num_kv_heads: Int,
        head_dim: Int,
        *,
        v_head_dim: Int | None = None,
        block_size: Int = 16,
        dtype: DTypeLike = "float32",
        layout: str = "HND",
        order: str = "block",
        buffer: Any = None,
        huge_pages: bool = True,
        touch: bool = False,
        prefix_cache: bool = True,
    ) -> None:
        name, element = storage.element_of(dtype)
        numbers: dict[str, Any] = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "num_kv_heads": num_kv_heads,
            "block_size": block_size,
            "head_dim": head_dim,
            "v_head_dim": head_dim if v_head_dim is None else v_head_dim,
        }
        self.geometry = storage.Geometry(**numbers, dtype=name, layout=layout, order=order)
        size = self.geometry.total_bytes
        region = storage.allocate(size, huge_pages, touch) if buffer is None else storage.over_buffer(buffer, size)
        self._storage = storage.Storage(self.geometry, region, element)
        self.pool = BlockPool(self.geometry.num_blocks)
        self.prefix = PrefixCache(self.pool, self.geometry.block_size) if prefix_cache else None
        self._live: dict[int, weakref.ref[Sequence]] = {}  # each step on it is atomic, with or without the GIL
        self._saver_of = -1  # the process that _saver is of
        self._snapshots: dict[int, Slots] = {}  # handles that saves hold

    # ---- memory ----

    def keys(self, layer: Int | None = None) -> NDArray[Any]:
        """The keys of a layer, (blocks, heads, tokens, head_dim); of all, with the layers first."""
        return self._of_layer(self._storage.keys, layer)

    def values(self, layer: Int | None = None) -> NDArray[Any]:
        """The values of a layer, (blocks, heads, tokens, v_head_dim); of all, with the layers first."""
        return self._of_layer(self._storage.values, layer)

    def scales(self, layer: Int | None = None) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """Scale and zero point of an int8 cache's keys, and of its values, (blocks, heads, tokens, 2); else None."""
        keys, values = self._storage.key_scales, self._storage.value_scales
        if keys is None or values is None:
            return None
        return self._of_layer(keys, layer), self._of_layer(values, layer)

    def _of_layer(self, view: NDArray[Any], layer: Int | None) -> NDArray[Any]:
        if layer is None:
            return view[...]  # the caller's own: its shape or dtype can be set
        if not 0 <= operator.index(layer) < len(view):
            raise ValueError(f"layer must be in [0, {len(view) - 1}], got {layer}")
        found: NDArray[Any] = view[layer]
        return found

    # ---- sequences ----

    def sequence(
        self, tokens: Ints = (), *, adapter: Key | None = None, salt: Key | None = None, images: Images | None = None
    ) -> Sequence:
        """A new sequence. Of `tokens`, the prompt's ids, those that the prefix cache knows are in it: see its length.

        At least one is left to compute, so that there are logits. What follows is appended, then committed. adapter,
        salt and images must be equal, too, for a prefix to be found: PrefixCache explains them.
        """
        ids, given = ids_of(tokens, "tokens"), {"adapter": adapter, "salt": salt, "images": images}
        extra: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.prefix is None:
            return Sequence(self, array("q"), 0, ids, extra)
        handles, known = self.prefix.match(np.array(ids, np.int64), **extra)
        return Sequence(self, packed(handles), known, ids, extra, len(handles))

    def append(
        self,
        seqs: Iterable[Sequence],
        k: Array,
        v: Array,
        counts: Ints | None = None,
        *,
        rope: Literal["neox", "interleaved"] | None = None,
        cos: Array | None = None,
        sin: Array | None = None,
    ) -> None:
        """Appends to each sequence counts[i] tokens: k is (layers, tokens, heads, head_dim), the tokens of the first
        sequence first; v likewise.

        counts: default one each, or of one sequence all. Part filled blocks that are shared are copied first. rope,
        cos, sin: as append_kv has them, at each token's position in its sequence.
        """
        seqs = list(seqs)
        if counts is None:
            counts = [1] * len(seqs)
            if len(seqs) == 1:
                k = as_array(k, "k")
                counts = [k.shape[1] if k.ndim == 4 else 1]
        with alone(self, seqs), self._grown(seqs, counts) as slots:
            turn: dict[str, Any] = {}
            if rope is not None:
                new = zip(seqs, ids_of(counts, "counts"), strict=True)
                positions = joined(np.arange(seq._length, seq._length + count) for seq, count in new)
                turn = {"rope": rope, "cos": cos, "sin": sin, "positions": positions}
            self._storage.write(slots, k, v, **turn)

    def reserve(self, seqs: Iterable[Sequence], counts: Ints | None = None) -> Slots:
        """Makes room for counts[i] (default 1) more tokens in each sequence, counts them as there, and gives their
        slots, int64: for write or append_kv, layer by layer."""
        seqs = list(seqs)
        with alone(self, seqs), self._grown(seqs, [1] * len(seqs) if counts is None else counts) as slots:
            return slots

    def write(self, slots: Ints, k: Array, v: Array, layer: Int | None = None) -> None:
        """Writes keys and values to slots that reserve gave; a negative slot is skipped.

        k is (tokens, heads, head_dim) with a layer, else (layers, tokens, heads, head_dim); v likewise.
        """
        self._storage.write(slots, k, v, None if layer is None else operator.index(layer))

    def gather(self, seqs: Iterable[Sequence]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of all tokens of the sequences, (layers, tokens, heads, head_dim): those of the first one
        first. An int8 cache gives float32."""
        seqs = list(seqs)
        with alone(self, seqs):
            size = self.geometry.block_size
            for i, seq in enumerate(seqs):
                if DROPPED in seq._handles:
                    raise ValueError(f"seqs[{i}] has dropped tokens; its slots say which")
            return self._storage.read(joined(slots_of(seq._handles, 0, seq._length, size) for seq in seqs))

    def block_tables(self, seqs: Iterable[Sequence]) -> NDArray[np.int32]:
        """The blocks of each sequence, (sequences, most blocks), int32; -1 where dropped and behind the last."""
        seqs = list(seqs)
        with alone(self, seqs):
            tables = np.full((len(seqs), max((len(seq._handles) for seq in seqs), default=0)), -1, np.int32)
            for row, seq in zip(tables, seqs, strict=True):
                row[: len(seq._handles)] = np.array(seq._handles, np.int64)  # a handle's low half is the block
            return tables

    def lengths(self, seqs: Iterable[Sequence]) -> NDArray[np.int32]:
        """The lengths of the sequences, int32."""
        return np.array([seq._length for seq in seqs], np.int32)

    def reorder(self, seqs: Iterable[Sequence], beams: Ints) -> None:
        """seqs[i] becomes what seqs[beams[i]] was, as a beam search chooses. Only references move."""
        seqs = list(seqs)
        with alone(self, seqs):
            chosen = ids_of(beams, "beams")
            if len(chosen) != len(seqs):
                raise ValueError(f"beams must have one index a sequence: {len(seqs)} sequences, got {len(chosen)}")
            for i, beam in enumerate(chosen):
                if not 0 <= beam < len(seqs):
                    raise ValueError(f"beams[{i}] must be in [0, {len(seqs) - 1}], got {beam}")
            moves = [(seqs[i], seqs[beam]) for i, beam in enumerate(chosen) if i != beam]
            states = [(o._handles[:], o._length, o._tokens[:], o._extra, o._committed) for _, o in moves]
            gone = joined(seq._handles for seq, _ in moves)
            self._take(joined(handles for handles, *_ in states))
            for (seq, _), state in zip(moves, states, strict=True):
                seq._handles, seq._length, seq._tokens, seq._extra, seq._committed = state
            self._give_back(gone)

    def compact(self) -> NDArray[np.int32]:
        """Moves blocks from the end of the region into blank ones before them, and gives the moves, (n, 2): from, to.

        Each block moved to was blank, so the moves can be repeated elsewhere in any order. Blocks that a save or a
        handle of yours holds stay where they are. No sequence may be in use meanwhile.
        """
        seqs = self._sequences()
        with alone(self, seqs):
            handles, counts = np.unique(held(joined(seq._handles for seq in seqs)), return_counts=True)
            ours = np.array([self.pool.ref_count(int(h)) == n for h, n in zip(handles, counts, strict=True)], bool)
            handles, counts = handles[ours], counts[ours]
            last_first = np.argsort(handles & ID)[::-1]
            new = self.pool.take_below(handles[last_first])
            old, counts = handles[last_first][: len(new)], counts[last_first][: len(new)]
            self._storage.copy_from(self._storage, old & ID, new & ID)
            self.pool.fork(np.repeat(new, counts - 1))
            if self.prefix is not None:
                self.prefix.move(old, new)
            moved = dict(zip(old.tolist(), new.tolist(), strict=True))
            for seq in seqs:
                seq._handles = array("q", [moved.get(handle, handle) for handle in seq._handles])
                seq._committed = 0  # a block with the contents of a known one is to learn where that is now
            self.pool.free(np.repeat(old, counts))
            return np.stack([old & ID, new & ID], 1).astype(np.int32)

    # ---- saving ----

    def save(
        self,
        to: str | os.PathLike[str] | Store | None = None,
        seqs: Iterable[Sequence] | None = None,
        *,
        key: str | None = None,
    ) -> bytes | None:
        """Saves sequences (default: all) with tokens and keys: to a file, to an object by put(key, bytes), or for None
        as the bytes that it gives.

        A file of this name is whole at any moment: the old one, or the new one once save is back.
        """
        saving = self._snapshot(to, seqs, key)
        saving.run()
        result: bytes | None = saving.result()
        return result

    def save_async(
        self,
        to: str | os.PathLike[str] | Store | None = None,
        seqs: Iterable[Sequence] | None = None,
        *,
        key: str | None = None,
    ) -> Saving:
        """save() in another thread: a Future with `progress`. Saves of a cache are done in the order of the calls.

        What is saved is what is there now: until it is done the blocks are shared with it, so that appending copies.
        """
        saving = self._snapshot(to, seqs, key)
        if self._saver_of != os.getpid():  # threads do not come along into a forked process
            self._saver, self._saver_of = ThreadPoolExecutor(1, "lanewise-save"), os.getpid()
        try:
            self._saver.submit(saving.run)
        except RuntimeError:  # the interpreter ends
            saving.cancel()
            saving.run()
            raise
        return saving

    def restore(
        self, source: bytes | bytearray | memoryview | str | os.PathLike[str] | Store, *, key: str | None = None
    ) -> list[Sequence]:
        """The sequences of a save: bytes, a file, or what an object's get(key) gives. All of them, or none.

        Prefixes whose tokens are known are committed. Number of blocks, layout and order may be other than in the cache
        saved; what else differs is ValueError, what is damaged DamagedSaveError.
        """
        if not isinstance(source, bytes | bytearray | memoryview):
            saving.check_place(source, key, "get")
        with saving.opened(source, key) as data:
            plan, parts, crc = saving.read_index(data, self.geometry)
            with self._allocated(plan.blocks) as handles:
                saving.read_blocks(data, plan, crc, self._storage, handles & ID)
                tables = [np.append(handles, DROPPED)[part.table] for part in parts]
                blocks, holders = np.unique(held(joined(tables)), return_counts=True)
                self.pool.fork(np.repeat(blocks, holders - 1))
        seqs = [
            Sequence(self, packed(table), part.length, packed(part.tokens), part.extra)
            for part, table in zip(parts, tables, strict=True)
        ]
        try:
            for seq in seqs:
                seq.commit()
        except BaseException:
            for seq in seqs:
                seq.free()
            raise
        return seqs

    def _snapshot(self, to: Any, seqs: Iterable[Sequence] | None, key: str | None) -> Saving:
        if to is not None:
            saving.check_place(to, key, "put")
        chosen = self._sequences() if seqs is None else list(seqs)
        with alone(self, chosen):
            handles = np.array(list(dict.fromkeys(held(joined(seq._handles for seq in chosen)).tolist())), np.int64)
            number = {handle: i for i, handle in enumerate(handles.tolist())} | {DROPPED: DROPPED}
            parts = [
                saving.Part(seq._length, seq._extra, np.array([number[h] for h in seq._handles], np.int64), seq.tokens)
                for seq in chosen
            ]
            size, data = saving.pieces(self._storage, handles & ID, parts)
            self.pool.fork(handles)
        self._snapshots[id(handles)] = handles

        def release() -> None:
            del self._snapshots[id(handles)]
            self.pool.free(handles)

        return Saving(size, data, to, key, release)

    def check(self) -> None:
        """Proves that pool, prefix cache, tables and references add up; AssertionError says what does not.

        References that are not of sequences or saves count as wrong, and no sequence may be in use meanwhile.
        """
        self.pool.check()
        if self.prefix is not None:
            self.prefix.check()
        seqs = self._sequences()
        with alone(self, seqs):
            references: Counter[int] = Counter()
            for seq in seqs:
                blocks = -(-seq._length // self.geometry.block_size)
                if len(seq._handles) != blocks:
                    raise AssertionError(f"{seq.length} tokens in {len(seq._handles)} blocks, not {blocks}")
                references.update(h for h in seq._handles if h != DROPPED)
            for handles in list(self._snapshots.values()):
                references.update(handles.tolist())
            for handle, count in references.items():
                if self.pool.ref_count(handle) != count:
                    found = self.pool.ref_count(handle)
                    raise AssertionError(f"block {handle & ID} has {found} references, tables and saves {count}")
            pinned = 0 if self.prefix is None else self.prefix.num_pinned  # held or not
            if not len(references) <= self.pool.num_used <= len(references) + pinned:
                raise AssertionError(f"{self.pool.num_used} blocks are held, tables and saves have {len(references)}")

    # ---- references and room ----

    def _sequences(self) -> list[Sequence]:
        return [seq for ref in list(self._live.values()) if (seq := ref()) is not None]

    def _take(self, handles: array[int] | Slots) -> None:
        self.pool.fork(np.array(handles, np.int64))

    def _give_back(self, handles: array[int] | Slots) -> None:
        self.pool.free(np.array(handles, np.int64))

    @contextmanager
    def _grown(self, seqs: list[Sequence], counts: Ints) -> Iterator[Slots]:
        """The slots of counts[i] more tokens. Tables and lengths have them if what is done with them succeeds."""
        size, more = self.geometry.block_size, ids_of(counts, "counts")
        if len(more) != len(seqs):
            raise ValueError(f"counts must have one number a sequence: {len(seqs)} sequences, got {len(more)}")
        if more and min(more) < 0:
            raise ValueError(f"counts[{more.index(min(more))}] must be at least 0, got {min(more)}")
        if more.count(1) == len(more):
            places = [seq._length % size for seq in seqs]
            last = [seq._handles[-1] for seq, place in zip(seqs, places, strict=True) if place]
            if self.pool.all_own(last):  # most steps of decoding, for which what follows would take twice the time
                with self._next_slots(seqs, places) as slots:
                    yield slots
                return
        plans = self._plans(seqs, more)
        with self._allocated(sum(copies + blocks for copies, blocks in plans)) as new:
            fresh = iter(packed(new))
            tables, tails, copies_of = [], array("q"), array("q")
            for seq, (copies, blocks) in zip(seqs, plans, strict=True):
                table = seq._handles
                if copies or blocks:
                    table = table[:]
                    if copies:
                        tails.append(table.pop())
                        copies_of.append(next(fresh))
                        table.append(copies_of[-1])
                    table.extend(islice(fresh, blocks))
                tables.append(table)
            if tails:
                self._storage.copy_from(self._storage, np.array(tails) & ID, np.array(copies_of) & ID)
            yield next_slots(tables, [seq._length for seq in seqs], more, size)
        for seq, table, count in zip(seqs, tables, more, strict=True):
            seq._handles = table
            seq._length += count
        self._give_back(tails)

    @contextmanager
    def _next_slots(self, seqs: list[Sequence], places: list[int]) -> Iterator[Slots]:
        """The slots of a token more each, at these places of their last blocks; where it is 0, of a new block."""
        size = self.geometry.block_size
        with self._allocated(places.count(0)) as new:
            fresh = iter(new.tolist())
            handles = [seq._handles[-1] if place else next(fresh) for seq, place in zip(seqs, places, strict=True)]
            yield np.array([(h & ID) * size + place for h, place in zip(handles, places, strict=True)], np.int64)
        for seq, handle, place in zip(seqs, handles, places, strict=True):
            if not place:
                seq._handles.append(handle)
            seq._length += 1

    def _plans(self, seqs: list[Sequence], counts: array[int]) -> list[tuple[bool, int]]:
        """For each sequence, whether its last block is to be copied, and how many are to be added."""
        size, plans = self.geometry.block_size, []
        left: Counter[int] = Counter()  # references that this call will give up
        for seq, count in zip(seqs, counts, strict=True):
            room = -seq._length % size
            copies = bool(room and count) and self._is_shared(seq._handles[-1], left)
            plans.append((copies, -((room - count) // size) if count > room else 0))
        return plans

    @contextmanager
    def _allocated(self, count: int) -> Iterator[Slots]:
        """New blocks, which are given back if what is done with them fails."""
        new = np.asarray(self.pool.allocate(count), np.int64) if count else np.empty(0, np.int64)
        try:
            yield new
        except BaseException:
            self.pool.free(new)
            raise

    def _is_shared(self, handle: int, left: Counter[int]) -> bool:
        if self.pool.sharers(handle) - left[handle] == 1:
            return False
        left[handle] += 1
        return True
