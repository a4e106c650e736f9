"""PagedKVCache beside a model without blocks: a sequence is the list of its tokens, keys and values follow from it.

The rules drive cache, prefix cache and sequences at random; after each step everything must add up and all keys and
values be there.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import lanewise
from lanewise import DamagedSaveError, OutOfBlocksError, PagedKVCache, saving, storage
from lanewise.sequence import alone

LAYERS, HEADS, DIM, V_DIM = 2, 2, 3, 5
KINDS = [
    ("float32", "HND", "block"),
    ("float16", "NHD", "layer"),
    (ml_dtypes.bfloat16, "HND", "layer"),
    ("int8", "NHD", "block"),
]


def rows_of(tokens: list[int], extra: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a text, as a model gives them: those of a token follow from it and all before it.

    Each row has a 0, a 255 and integers between them, which every dtype holds exactly.
    """
    state, states = sum(map(ord, str(sorted(extra.items())))) % 251, []
    for token in tokens:
        state = (3 * state + token + 1) % 251
        states.append(state)
    made = []
    for width in (DIM, V_DIM):
        own = np.arange(LAYERS * HEADS * width).reshape(LAYERS, 1, HEADS, width)
        rows = (np.array(states, np.int64)[:, None, None] + own) % 256
        rows[..., 0], rows[..., -1] = 0, 255
        made.append(rows.astype(np.float32))
    return made[0], made[1]


@dataclass
class Model:
    """What a sequence is to hold."""

    tokens: list[int]
    extra: dict[str, Any]
    dropped: set[int] = field(default_factory=set)  # positions

    def copy(self) -> Model:
        return Model(self.tokens[:], self.extra, set(self.dropped))


def present(cache: PagedKVCache, seq: lanewise.Sequence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions that have not been dropped, their keys and values, read through the views."""
    slots = seq.slots()
    at = np.flatnonzero(slots >= 0)
    block, token = np.divmod(slots[at], cache.geometry.block_size)
    found = [view[:, block, :, token].swapaxes(0, 1).astype(np.float32) for view in (cache.keys(), cache.values())]
    for rows, scales in zip(found, cache.scales() or (), strict=False):
        scale, zero = np.moveaxis(scales[:, block, :, token].swapaxes(0, 1), -1, 0)[..., None]
        rows[...] = scale * (rows - zero)
    return at, found[0], found[1]


def assert_holds(cache: PagedKVCache, seq: lanewise.Sequence, model: Model) -> None:
    assert seq.length == len(model.tokens)
    at, k, v = present(cache, seq)
    assert at.tolist() == [i for i in range(seq.length) if i not in model.dropped]
    keys, values = rows_of(model.tokens, model.extra)
    assert k.tolist() == keys[:, at].tolist()
    assert v.tolist() == values[:, at].tolist()


def feed(cache: PagedKVCache, seqs: list[lanewise.Sequence], models: list[Model], more: list[list[int]]) -> None:
    """Appends to sequences what the models say of them with these tokens."""
    rows = [rows_of(model.tokens + ids, model.extra) for model, ids in zip(models, more, strict=True)]
    new = [
        (k[:, k.shape[1] - len(ids) :], v[:, v.shape[1] - len(ids) :]) for (k, v), ids in zip(rows, more, strict=True)
    ]
    k, v = (np.concatenate(parts, 1) for parts in zip(*new, strict=True))
    cache.append(seqs, k, v, counts=[len(ids) for ids in more])
    for model, ids in zip(models, more, strict=True):
        model.tokens += ids


TOKENS = st.lists(st.integers(0, 2), max_size=11)


class Machine(RuleBasedStateMachine):
    """A cache, a second one of another kind, and the sequences in both with their models."""

    operations = 0  # of all examples

    @initialize(kind=st.sampled_from(KINDS), block_size=st.integers(1, 5), num_blocks=st.integers(1, 14))
    def begin(self, kind: tuple[Any, str, str], block_size: int, num_blocks: int) -> None:
        dtype, layout, order = kind
        make = lambda blocks, size, **kw: PagedKVCache(  # noqa: E731
            LAYERS, blocks, HEADS, DIM, v_head_dim=V_DIM, block_size=size, huge_pages=False, **kw
        )
        self.cache = make(num_blocks, block_size, dtype=dtype, layout=layout, order=order)
        self.other = make(6, 4)
        self.seqs: list[tuple[lanewise.Sequence, Model]] = []
        self.others: list[tuple[lanewise.Sequence, Model]] = []
        self.savings: list[lanewise.Saving] = []

    def pick(self, data: st.DataObject, most: int = 1) -> list[tuple[lanewise.Sequence, Model]]:
        if not self.seqs:
            return []
        numbers = data.draw(st.lists(st.integers(0, len(self.seqs) - 1), min_size=1, max_size=most, unique=True))
        return [self.seqs[i] for i in numbers]

    def seen(self) -> Any:
        """All that a call that fails must leave alone, but what it may evict."""
        pool = self.cache.pool
        return [pool.num_used, *((s.length, s.handles.tolist(), s.tokens.tolist()) for s, _ in self.seqs)]

    @rule(tokens=TOKENS, adapter=st.sampled_from([None, "a", "b"]))
    def start(self, tokens: list[int], adapter: str | None) -> None:
        extra = {} if adapter is None else {"adapter": adapter}
        seq = self.cache.sequence(tokens, **extra)
        assert seq.length <= max(0, len(tokens) - 1)
        model = Model(tokens[: seq.length], extra)
        self.seqs.append((seq, model))
        before = self.seen()
        try:
            feed(self.cache, [seq], [model], [tokens[seq.length :]])
        except OutOfBlocksError:
            assert self.seen() == before
            seq.truncate(seq.length)  # and what was to come is not forgotten
            assert seq.tokens.tolist() == tokens
            self.seqs.pop()
            seq.free()

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        chosen = self.pick(data, 3)
        more = [data.draw(TOKENS) for _ in chosen]
        before = self.seen()
        if not chosen:
            return
        seqs, models = map(list, zip(*chosen, strict=True))
        try:
            feed(self.cache, seqs, models, more)
        except OutOfBlocksError:
            assert self.seen() == before

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        for seq, model in self.pick(data):
            known = seq.commit(model.tokens[len(seq.tokens) :])
            assert known <= seq.length and known % self.cache.geometry.block_size == 0

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        for seq, model in self.pick(data):
            length, size = data.draw(st.integers(0, seq.length)), self.cache.geometry.block_size
            if length % size and length // size * size in model.dropped:
                with pytest.raises(ValueError, match="dropped block"):
                    seq.truncate(length)
            else:
                seq.truncate(length)
                del model.tokens[length:]
                model.dropped = {i for i in model.dropped if i < length}

    @rule(data=st.data(), sinks=st.integers(0, 6))
    def drop(self, data: st.DataObject, sinks: int) -> None:
        for seq, model in self.pick(data):
            position, size = data.draw(st.integers(-1, seq.length + 3)), self.cache.geometry.block_size
            seq.drop_before(position, sinks)
            blocks = range(-(-sinks // size), min(position, seq.length) // size)
            model.dropped |= {block * size + i for block in blocks for i in range(size)}

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        for seq, model in self.pick(data):
            self.seqs.append((seq.fork(), model.copy()))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        for pair in self.pick(data):
            pair[0].free()
            self.seqs.remove(pair)

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        chosen = self.pick(data, 4)
        beams = data.draw(st.lists(st.integers(0, max(0, len(chosen) - 1)), min_size=len(chosen), max_size=len(chosen)))
        self.cache.reorder([seq for seq, _ in chosen], beams)
        copies = [chosen[beam][1].copy() for beam in beams]
        for (_, model), copy in zip(chosen, copies, strict=True):
            vars(model).update(vars(copy))

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        for seq, model in self.pick(data):
            before = self.other.pool.num_used
            try:
                self.others.append((seq.to(self.other), model.copy()))
            except OutOfBlocksError:
                assert self.other.pool.num_used == before
            except ValueError as error:
                assert model.dropped and "dropped" in str(error)

    @rule()
    def leave_the_other(self) -> None:
        self.others.clear()  # which frees them

    @rule()
    def compact(self) -> None:
        used, blank = self.cache.pool.num_used, self.cache.pool.num_free
        moves = self.cache.compact()
        assert (moves[:, 0] > moves[:, 1]).all() and len(np.unique(moves)) == moves.size
        assert (self.cache.pool.num_used, self.cache.pool.num_free) == (used, blank)
        assert len(self.cache.compact()) == 0

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        chosen = self.pick(data, 3)
        saved = self.cache.save(seqs=[seq for seq, _ in chosen])
        assert saved is not None
        for seq, _ in chosen:
            self.seqs = [pair for pair in self.seqs if pair[0] is not seq]
        models = [model for _, model in chosen]
        for seq, _ in chosen:
            seq.free()
        chosen.clear()
        with suppress(OutOfBlocksError):
            self.seqs += zip(self.cache.restore(saved), models, strict=True)

    @rule(data=st.data())
    def save_meanwhile(self, data: st.DataObject) -> None:
        self.savings.append(self.cache.save_async(seqs=[seq for seq, _ in self.pick(data, 2)]))

    @invariant()
    def all_is_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        Machine.operations += 1
        for under_way in self.savings:
            under_way.result()
        self.savings.clear()
        self.cache.check()
        self.other.check()
        for seq, model in self.seqs:
            assert_holds(self.cache, seq, model)
        for seq, model in self.others:
            assert_holds(self.other, seq, model)


def run_machine(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    profile = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Machine, settings=profile)


def test_cache_beside_its_model() -> None:
    run_machine(15, 30)


@pytest.mark.slow
def test_cache_beside_its_model_for_long() -> None:
    before = Machine.operations
    run_machine(1300, 100)
    assert Machine.operations - before >= 100_000


# ---- one thing at a time ----


def small(**kw: Any) -> PagedKVCache:
    settings: dict[str, Any] = dict(num_layers=LAYERS, num_blocks=8, num_kv_heads=HEADS, head_dim=DIM, v_head_dim=V_DIM)
    return PagedKVCache(**(settings | dict(block_size=4, huge_pages=False) | kw))


def filled(cache: PagedKVCache, tokens: list[int], **extra: Any) -> tuple[lanewise.Sequence, Model]:
    seq, model = cache.sequence(tokens, **extra), Model([], extra)
    model.tokens = tokens[: seq.length]
    feed(cache, [seq], [model], [tokens[seq.length :]])
    return seq, model


@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", ["float32", np.float16, "bfloat16", ml_dtypes.bfloat16, "int8"])
def test_views_cover_the_region_without_overlap(dtype: Any, layout: str, order: str) -> None:
    cache = small(dtype=dtype, layout=layout, order=order)
    views = [cache.keys(), cache.values(), *(cache.scales() or ())]
    seen = np.zeros(cache.geometry.total_bytes, np.int8)
    at = cache._storage.region.ctypes.data
    for view in views:
        offsets = np.indices(view.shape).reshape(view.ndim, -1).T @ view.strides + view.ctypes.data - at
        for byte in range(view.itemsize):
            np.add.at(seen, offsets + byte, 1)
    assert seen.max() == 1
    assert seen.sum() == sum(view.nbytes for view in views)
    assert at % storage.REGION_ALIGNMENT == 0
    assert all(
        size % 64 == 0 for size in (cache.geometry.run_bytes, cache.geometry.block_bytes, cache.keys().strides[1])
    )
    assert cache.keys(1).ctypes.data == cache.keys()[1].ctypes.data
    assert not cache._storage.region.any()


def test_a_cache_lies_in_memory_of_the_users(tmp_path: Path) -> None:
    size = small().geometry.total_bytes
    (tmp_path / "cache").write_bytes(bytes(size))
    shared = shared_memory.SharedMemory(create=True, size=size)
    with open(tmp_path / "cache", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), size)
    room = np.zeros(size + 64, np.uint8)
    aligned = room[-room.ctypes.data % 64 :][:size]
    try:
        for buffer in (aligned, aligned.view(np.float32).reshape(2, -1), shared.buf, mapped):
            cache = small(buffer=buffer)
            seq, model = filled(cache, [1, 2, 1, 2, 0])
            assert_holds(cache, seq, model)
            assert bytes(memoryview(buffer).cast("B")) == cache._storage.region.tobytes() != bytes(size)
            del cache, seq
        there = shared_memory.SharedMemory(shared.name)  # as another process would have it
        assert bytes(there.buf[:size]) == aligned.tobytes()
        there.close()
    finally:
        shared.close()
        shared.unlink()
    mapped.flush()
    assert (tmp_path / "cache").read_bytes() == aligned.tobytes()


def test_memory_that_will_not_do_is_refused() -> None:
    size = small().geometry.total_bytes
    room = np.zeros(size + 128, np.uint8)
    aligned = room[-room.ctypes.data % 64 :]
    frozen = aligned[:size].copy()
    frozen.flags.writeable = False
    for buffer, error, words in [
        (aligned[: size - 1], ValueError, f"must have {size} bytes for this cache, got {size - 1}"),
        (aligned[1 : size + 1], ValueError, "multiple of 64 bytes"),
        (np.zeros((size, 2), np.uint8)[:, 0], ValueError, "contiguous"),
        (frozen, ValueError, "read-only"),
        (bytes(size), ValueError, "read-only"),
        ([0] * size, TypeError, "must be an array, a tensor or a buffer, got list"),
        (7, TypeError, "got int"),
    ]:
        with pytest.raises(error, match=words):
            small(buffer=buffer)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"num_layers": 0}, ValueError, r"num_layers must be in \[1, .*got 0"),
        ({"num_blocks": -1}, ValueError, "num_blocks"),
        ({"head_dim": 2.5}, TypeError, "head_dim must be an integer, got 2.5"),
        ({"block_size": 1 << 40}, ValueError, "block_size"),
        ({"num_blocks": 1 << 30, "num_layers": 1 << 20}, ValueError, "more than a process can address"),
        ({"dtype": "float64"}, TypeError, "dtype must be one of float32, float16, bfloat16, int8, got 'float64'"),
        ({"dtype": "no dtype"}, TypeError, "dtype must be one of"),
        ({"layout": "hnd"}, ValueError, "layout must be one of HND, NHD, got 'hnd'"),
        ({"order": "head"}, ValueError, "order must be one of block, layer, got 'head'"),
    ],
)
def test_a_cache_of_impossible_numbers_is_refused(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        small(**given)


def test_memory_the_system_does_not_give_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="the system gives no"):
        small(num_layers=1 << 12, num_blocks=1 << 26)


def test_huge_pages_and_touch_change_nothing_to_see() -> None:
    for given in ({"huge_pages": True}, {"touch": True}, {"huge_pages": True, "touch": True}):
        cache = small(**given)
        assert_holds(cache, *filled(cache, [1, 2, 2, 1, 0, 0, 1]))


def test_layer_by_layer_is_the_same_as_all_at_once() -> None:
    cache, model = small(), Model([1, 2, 0, 1, 1, 2], {})
    seq = cache.sequence()
    slots = seq.reserve(6)
    keys, values = rows_of(model.tokens, {})
    for layer in range(LAYERS):
        padded = np.concatenate([slots[:3], [-1], slots[3:]])
        k, v = (np.insert(rows[layer], 3, np.nan, axis=0) for rows in (keys, values))
        cache.write(padded, k, v, layer)
    assert_holds(cache, seq, model)
    k, v = cache.gather([seq])
    assert k.tolist() == keys.tolist() and v.tolist() == values.tolist()


def test_a_freed_sequence_is_an_error_and_a_lost_one_no_leak() -> None:
    cache = small()
    with cache.sequence() as seq:
        seq.reserve(5)
        assert cache.pool.num_used == 2
    assert cache.pool.num_used == 0
    for use in (seq.free, seq.fork, lambda: seq.reserve(1), lambda: seq.truncate(0), lambda: seq.commit(), seq.slots):
        with pytest.raises(ValueError, match=r"seqs\[0\] has been freed"):
            use()
    cache.sequence().reserve(9)
    assert cache.pool.num_used == 0
    cache.check()
    with pytest.raises(ValueError, match="freed"), cache.sequence() as seq:
        seq.free()
        seq.reserve(1)


def test_sequences_of_elsewhere_or_twice_are_refused() -> None:
    cache, other = small(), small()
    mine, its = cache.sequence(), other.sequence()
    with pytest.raises(ValueError, match=r"seqs\[1\] is of another cache"):
        cache.reserve([mine, its])
    with pytest.raises(ValueError, match=r"seqs\[1\] is there a second time"):
        cache.reserve([mine, mine])
    with pytest.raises(TypeError, match=r"seqs\[0\] must be a Sequence, got int"):
        cache.reserve([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="num_layers is 2 here, 3 in the other cache"):
        mine.to(small(num_layers=3))
    with pytest.raises(ValueError, match="one number a sequence: 1 sequences, got 2"):
        cache.reserve([mine], [1, 2])
    with pytest.raises(ValueError, match=r"counts\[0\] must be at least 0, got -1"):
        mine.reserve(-1)
    with pytest.raises(ValueError, match=r"beams\[1\] must be in \[0, 1\], got 2"):
        cache.reorder([mine, cache.sequence()], [0, 2])
    with pytest.raises(ValueError, match=r"length must be in \[0, 0\], got 1"):
        mine.truncate(1)
    with pytest.raises(ValueError, match="layer must be in"):
        cache.keys(2)
    mine.reserve(3)
    cache.check()


def test_a_sequence_in_two_threads_is_an_error() -> None:
    cache = small()
    seq = cache.sequence()
    with alone(cache, [seq]):
        for use in (seq.free, seq.fork, lambda: cache.reserve([seq])):
            with pytest.raises(RuntimeError, match=r"seqs\[0\] is in use by a call that is not over"):
                use()
    seq.reserve(1)


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    cache = small()
    a, model = filled(cache, [1] * 6)
    b, other = filled(cache, [2] * 6)
    with pytest.raises(OutOfBlocksError):
        feed(cache, [a, b], [model.copy(), other.copy()], [[1] * 6, [2] * 20])
    assert (a.length, b.length, cache.pool.num_used) == (6, 6, 4)
    assert_holds(cache, a, model)
    cache.check()


def test_the_last_of_forks_needs_no_copy() -> None:
    cache = small()
    a, model = filled(cache, [1] * 6)
    b = a.fork()
    feed(cache, [a, b], [model.copy(), model.copy()], [[1], [2]])
    assert cache.pool.num_used == 3
    cache.check()


def test_what_is_known_is_never_written_over() -> None:
    cache = small()
    seq, model = filled(cache, [1, 2, 1, 2, 0])
    assert seq.commit() == 4
    seq.truncate(2)
    del model.tokens[2:]
    feed(cache, [seq], [model], [[0, 0]])
    again, found = filled(cache, [1, 2, 1, 2, 1])
    assert_holds(cache, seq, model)
    assert_holds(cache, again, found)
    assert again.handles[0] != seq.handles[0]


# ---- saving ----


def test_a_save_that_was_changed_or_cut_is_found_out() -> None:
    cache, target = small(num_layers=1), small(num_layers=1, num_blocks=3)
    seq = cache.sequence([1, 2, 0, 1, 1])
    seq.reserve(5)
    saved = cache.save()
    assert saved is not None
    for i in range(len(saved)):
        wrong = bytearray(saved)
        wrong[i] ^= 1 << i % 8
        with pytest.raises(ValueError, match="save"):
            target.restore(wrong)
        with pytest.raises(DamagedSaveError, match=r"cut off|go on for"):
            target.restore(saved[:i])
    with pytest.raises(DamagedSaveError, match="go on for"):
        target.restore(saved + b"\0")
    target.check()
    assert target.pool.num_used == 0


def test_parts_of_two_saves_do_not_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "CHUNK_BYTES", 1)
    saves = []
    for token in (0, 1):
        cache = small()
        seq = filled(cache, [token] * 8)[0]
        saves.append(cache.save(seqs=[seq]) or b"")
    chunk = small().geometry.block_bytes + 4
    mixed = saves[0][:-chunk] + saves[1][-chunk:]
    with pytest.raises(DamagedSaveError, match="chunk 1 has checksum"):
        small().restore(mixed)


def forged(header: bytes, rest: bytes = b"") -> bytes:
    return saving.PROLOGUE.pack(saving.MAGIC, saving.VERSION, len(header), zlib.crc32(header)) + header + rest


def test_a_header_that_lies_is_refused_before_memory_is_taken() -> None:
    cache = small()
    whole = cache.save(seqs=[filled(cache, [1] * 5)[0]]) or b""
    size = saving.PROLOGUE.unpack_from(whole)[2]
    start = saving.PROLOGUE.size
    header, rest = json.loads(whole[start : start + size]), whole[start + size :]
    assert small().restore(forged(json.dumps(header).encode(), rest))[0].length == 5
    changes: list[dict[str, Any]] = [
        {"blocks": 1 << 40},
        {"blocks": -1},
        {"blocks": 2.0},
        {"blocks": None},
        {"parts": [[5, 2, 1 << 60, {}]]},
        {"parts": [[5, 2, 5]]},
        {"parts": [[1 << 99, 2, 5, {}]]},
        {"parts": [[4, 2, 5, {}]]},
        {"parts": {}},
        {"parts": [[5, 2, 5, {"adapter": [[]]}]]},
        {"geometry": header["geometry"] | {"num_blocks": 1 << 30}},
        {"geometry": header["geometry"] | {"num_layers": True}},
        {"geometry": header["geometry"] | {"other": 1}},
        {"geometry": []},
    ]
    for change in changes:
        with pytest.raises(ValueError, match="save"):
            small().restore(forged(json.dumps(header | change).encode(), rest))
    for text in (b"", b"{", b"[]", b"1", b"\xff", b"[" * 100_000, b"9" * 10_000):
        with pytest.raises(DamagedSaveError, match="makes no sense"):
            small().restore(forged(text))
    with pytest.raises(DamagedSaveError, match="not a save"):
        small().restore(b"\0" * 100)
    with pytest.raises(DamagedSaveError, match="cut off"):
        small().restore(b"")


def test_extra_keys_of_each_type_are_saved() -> None:
    cache = small(num_blocks=20)
    for extra in ({"adapter": "x"}, {"adapter": b"x"}, {"salt": 7}, {"images": [("a", 0), (b"b", 2)], "salt": "s"}):
        seq = cache.sequence([1] * 5, **extra)
        seq.reserve(5)
        seq.commit()
        target = small()
        (restored,) = target.restore(cache.save(seqs=[seq]) or b"")
        assert restored.extra == seq.extra == extra
        assert target.sequence([1] * 5, **extra).length == 4 and target.sequence([1] * 5).length == 0


def test_compaction_leaves_what_others_hold_and_is_found_by_prompts() -> None:
    cache = small(num_blocks=10)
    pairs = [filled(cache, [i] * 4 + [1, 2]) for i in range(3)]
    for seq, _ in pairs:
        seq.commit()
    store = Waiting()
    under_way = cache.save_async(store, [pairs[2][0]], key="x")
    pairs.pop(0)[0].free()
    assert cache.compact().tolist() == [[3, 1]]  # block 0 is cached, and 4 and 5 are the save's, too
    store.go.set()
    under_way.result()
    assert cache.compact().tolist() == [[5, 3]]
    for i, (seq, model) in enumerate(pairs, 1):
        assert_holds(cache, seq, model)
        found = cache.sequence([i] * 4 + [0])
        assert found.length == 4 and found.handles[0] == seq.handles[0]
        feed(cache, [seq], [model], [[1, 1]])
        assert seq.commit([1, 2, 1, 1][len(seq.tokens) - 4 :]) == 8
    cache.check()


def test_a_save_of_another_shape_is_refused() -> None:
    cache = small()
    saved = cache.save(seqs=[filled(cache, [1] * 5)[0]]) or b""
    for other, words in [
        (small(num_layers=3), "num_layers 2, this cache 3"),
        (small(dtype="float16"), "dtype float32, this cache float16"),
        (small(block_size=8), "block_size 4, this cache 8"),
        (small(head_dim=4), "head_dim 3, this cache 4"),
    ]:
        with pytest.raises(ValueError, match=words):
            other.restore(saved)
        assert other.pool.num_used == 0
    later = bytearray(saved)
    later[8] = 9
    with pytest.raises(ValueError, match="version 9, this lanewise reads version 1"):
        cache.restore(later)
    full = small(num_blocks=1)
    with pytest.raises(OutOfBlocksError):
        full.restore(saved)
    full.check()


class Store(dict[str, bytes]):
    def put(self, key: str, data: bytes) -> None:
        self[key] = data

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def test_files_and_stores_hold_the_same_bytes(tmp_path: Path) -> None:
    cache, store = small(), Store()
    pairs = [filled(cache, [1] * 9), filled(cache, [1] * 4 + [2] * 3, adapter="x")]
    pairs.append((pairs[0][0].fork(), pairs[0][1]))
    seqs = [seq for seq, _ in pairs]
    cache.save(tmp_path / "a", seqs)
    cache.save(str(tmp_path / "a"), seqs)
    cache.save(store, seqs, key="b")
    assert (tmp_path / "a").read_bytes() == store["b"] == cache.save(seqs=seqs)
    assert os.listdir(tmp_path) == ["a"]
    for kind in ({}, {"layout": "NHD", "order": "layer", "num_blocks": 20}):
        for source in (tmp_path / "a", store):
            target = small(**kind)
            restored = target.restore(source, key="b" if source is store else None)
            assert target.pool.num_used == cache.pool.num_used
            for seq, (old, model) in zip(restored, pairs, strict=True):
                assert_holds(target, seq, model)
                assert seq.tokens.tolist() == old.tokens.tolist() and seq.extra == old.extra
            assert target.sequence([1] * 9).length == 8
            assert target.sequence([1] * 9, adapter="x").length == 4
            target.check()
    with pytest.raises(TypeError, match="key must be a str"):
        cache.save(store)
    with pytest.raises(TypeError, match="need a path or an object with put, got int"):
        cache.save(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key is for an object"):
        cache.save("a", key="b")
    with pytest.raises(KeyError):
        cache.restore(store, key="c")
    with pytest.raises(FileNotFoundError):
        cache.restore(tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "no" / "b")
    cache.check()


class Waiting(Store):
    """A store that takes its time, until it is told to fail or not."""

    def __init__(self) -> None:
        self.go, self.fail = threading.Event(), False

    def put(self, key: str, data: bytes) -> None:
        self.go.wait()
        if self.fail:
            raise OSError("no room")
        super().put(key, data)


def test_a_save_in_the_background_has_what_was_there_when_it_began() -> None:
    cache, store = small(num_blocks=12), Waiting()
    seq, model = filled(cache, [1, 2, 0, 1, 2])
    then = model.copy()
    first = cache.save_async(store, [seq], key="first")
    second = cache.save_async(store, [seq], key="second")
    feed(cache, [seq], [model], [[0]])
    cache.check()
    assert second.cancel()
    other, _ = filled(cache, [2, 2, 2])
    seq.free()
    assert not first.done() and cache.pool.num_used == 3
    store.go.set()
    assert first.result() is None
    with pytest.raises(CancelledError):
        second.result()
    third = cache.save_async(seqs=[other])
    assert len(third.result()) == third.progress[0] == third.progress[1]
    assert_holds(cache, cache.restore(store, key="first")[0], then)
    assert store.keys() == {"first"}
    cache.check()
    store.fail = True
    broken = cache.save_async(store, [other], key="third")
    with pytest.raises(OSError, match="no room"):
        broken.result()
    cache.check()


KILLED = """
import sys, numpy as np, lanewise
cache = lanewise.PagedKVCache(4, 64, 2, 64, huge_pages=False)
seq = cache.sequence()
number = 0
while True:
    seq.truncate(0)
    number += 1
    rows = np.full((4, 1000, 2, 64), number, np.float32)
    seq.append(rows, rows)
    cache.save(sys.argv[1])
    print(number, flush=True)
"""


def kill_in_the_middle(path: Path, delay: float) -> None:
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        acknowledged = [1, *map(int, process.stdout.read().split())][-1]
    cache = PagedKVCache(4, 64, 2, 64, huge_pages=False)
    (seq,) = cache.restore(path)
    keys, values = cache.gather([seq])
    assert keys.min() == keys.max() == values.min() == values.max() >= acknowledged


@pytest.mark.native
def test_what_was_saved_survives_a_kill(tmp_path: Path) -> None:
    kill_in_the_middle(tmp_path / "saved", 0.05)


@pytest.mark.slow
def test_what_was_saved_survives_many_kills(tmp_path: Path) -> None:
    for delay in np.linspace(0, 0.1, 40):
        kill_in_the_middle(tmp_path / "saved", delay)


# ---- threads ----


def use_from_threads(seconds: float) -> None:
    cache = small(num_blocks=64)
    until, failures = time.monotonic() + seconds, []

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        try:
            while time.monotonic() < until:
                # one prompt in two is one that other threads use as well
                tokens = random.integers(0, 3, random.integers(1, 12)).tolist()
                with cache.sequence(tokens, adapter=str(number % 2)) as seq:
                    model = Model(tokens[: seq.length], {"adapter": str(number % 2)})
                    feed(cache, [seq], [model], [tokens[seq.length :]])
                    seq.commit()
                    with seq.fork() as fork:
                        other = model.copy()
                        feed(cache, [fork, seq], [other, model], [[0, 1], [2]])
                        fork.commit([0, 1])
                        assert_holds(cache, fork, other)
                    assert_holds(cache, seq, model)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    cache.check()
    assert cache.pool.num_used == 0


@pytest.mark.native
def test_threads_with_sequences_of_their_own() -> None:
    use_from_threads(1)


@pytest.mark.slow
def test_threads_with_sequences_of_their_own_for_a_minute() -> None:
    use_from_threads(60)
