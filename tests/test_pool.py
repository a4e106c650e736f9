"""BlockPool and PrefixCache against a model that knows only lists and dicts, and the faults other caches had.

The names in brackets are faults of others, as in test_faults.py.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lanewise import BlockError, BlockPool, OutOfBlocksError, PrefixCache, reference

KEYS: list[dict[str, Any]] = [
    {},
    {"adapter": "X"},
    {"salt": "X"},
    {"salt": b"X"},
    {"adapter": "X", "salt": "X"},
    {"adapter": 88},
    {"images": [("X", 0)]},
    {"images": [("X", 1)]},
    {"images": [("Y", 3), ("X", 0)]},
]


def pool_and_cache(blocks: int, block_size: int = 2, **kw: Any) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(blocks)
    return pool, PrefixCache(pool, block_size, **kw)


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


# ---- against a model ----

BLOCKS, SIZE = 7, 2
SMALL = st.integers(0, 1)  # tokens so few that prompts often begin alike
PROMPTS = st.lists(SMALL, max_size=11)
MOST_PINNED = 3


class Machine(RuleBasedStateMachine):
    """Sequences live and die over one pool and cache. A block's contents are all tokens up to its end, and the keys."""

    operations = 0  # of all examples

    @initialize(bits=st.sampled_from([0, 1, 63]), null_block=st.booleans())
    def begin(self, bits: int, null_block: bool) -> None:
        self.null = null_block
        self.pool = BlockPool(BLOCKS, null_block=null_block)
        self.cache = PrefixCache(self.pool, SIZE, max_pinned=MOST_PINNED, max_events=4)
        self.cache._keep_hash_bits(bits)
        self.refs: Counter[int] = Counter()  # of handles
        self.dead: list[int] = []
        self.sequences: list[tuple[list[int], list[int], int]] = []  # handles, tokens, which keys
        self.pinned: set[int] = set()
        self.written: dict[int, Any] = {}  # block: its contents, as long as the cache may know them

    def available(self) -> int:
        return BLOCKS - self.null - len(self.held())

    def held(self) -> set[int]:
        return set(map(self.block, self.refs)) | self.pinned

    @staticmethod
    def block(handle: int) -> int:
        return handle & 0xFFFFFFFF

    def contents(self, tokens: list[int], end: int, keys: int) -> Any:
        images = [image for image in KEYS[keys].get("images", ()) if image[1] < end]
        rest = {name: value for name, value in KEYS[keys].items() if name != "images"}
        return repr((tokens[:end], rest, sorted(images, key=str)))

    def hold(self, handles: list[int]) -> None:
        self.refs.update(handles)

    def drop(self, handles: list[int]) -> None:
        for handle in handles:
            self.refs[handle] -= 1
            if not self.refs[handle]:
                del self.refs[handle]
                self.dead.append(handle)

    @rule(tokens=PROMPTS, keys=st.integers(0, len(KEYS) - 1), whole=st.booleans(), cap=st.booleans())
    def prompt(self, tokens: list[int], keys: int, whole: bool, cap: bool) -> None:
        """Takes what is known, allocates the rest, commits what is full; or only looks."""
        longest = self.cache.longest(tokens, **KEYS[keys], cap=cap)
        matched, n = self.cache.match(tokens, **KEYS[keys], cap=cap)
        found = matched.tolist()
        assert n == longest == len(found) * SIZE <= max(len(tokens) - cap, 0)
        for i, handle in enumerate(found):
            assert self.written[self.block(handle)] == self.contents(tokens, (i + 1) * SIZE, keys)
        self.hold(found)
        needed, free = -(-len(tokens) // SIZE) - len(found), self.available()
        new = self.pool.try_allocate(needed)
        assert (new is None) == (needed > free)
        if new is None:
            with pytest.raises(OutOfBlocksError, match=f"{needed} block.*needed, {free} of {BLOCKS} free"):
                self.pool.allocate(needed)
            self.pool.free(matched)
            self.drop(found)
            return
        for handle in new.tolist():
            assert self.block(handle) not in self.held()
            self.written.pop(self.block(handle), None)
        self.hold(new.tolist())
        handles = found + new.tolist()
        self.sequences.append((handles, tokens, keys))
        if whole or not found:
            self.cache.commit(handles, tokens, **KEYS[keys])
        else:
            self.cache.commit(new, tokens[n:], parent=found[-1], **KEYS[keys])
        for i in range(len(tokens) // SIZE):
            self.written[self.block(handles[i])] = self.contents(tokens, (i + 1) * SIZE, keys)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), part=st.booleans())
    def fork(self, data: st.DataObject, part: bool) -> None:
        handles, tokens, keys = data.draw(st.sampled_from(self.sequences))
        kept = handles[: len(handles) // 2] if part else handles
        assert self.pool.fork(kept).tolist() == kept
        self.hold(kept)
        self.sequences.append((list(kept), tokens[: len(kept) * SIZE], keys))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), way=st.sampled_from([list, tuple, np.array]))
    def end(self, data: st.DataObject, way: Any) -> None:
        handles, _, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.free(way(handles) if handles else [])
        self.drop(handles)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        """A window leaves the first block behind."""
        at = data.draw(st.integers(0, len(self.sequences) - 1))
        handles, _, _ = self.sequences.pop(at)
        if handles:
            self.pool.free(handles[0])
            self.drop(handles[:1])
            self.pool.free([-1, *handles[1:]])
            self.drop(handles[1:])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        handles, _, _ = data.draw(st.sampled_from(self.sequences))
        self.cache.forget(handles)
        for handle in handles:
            self.written.pop(self.block(handle), None)
            self.pinned = self.pinned - {self.block(handle)}

    @rule(tokens=PROMPTS, on=st.booleans())
    def pin(self, tokens: list[int], on: bool) -> None:
        before, known = self.cache.num_pinned, self.cache.longest(tokens, cap=False) // SIZE
        try:
            change = self.cache.pin(tokens) if on else -self.cache.unpin(tokens)
        except ValueError:
            assert on and before + known > MOST_PINNED
            change = 0
        assert self.cache.num_pinned == before + change
        handles, _ = self.cache.match(tokens, cap=False)  # which these are
        if change:
            blocks = set(map(self.block, handles.tolist()))
            self.pinned = self.pinned | blocks if on else self.pinned - blocks
        self.pool.free(handles)
        self.dead.extend(handle for handle in handles.tolist() if handle not in self.refs)

    @rule()
    def clear(self) -> None:
        cached = self.pool.num_cached
        assert self.cache.clear() == cached and self.pool.num_cached == 0

    @rule(data=st.data())
    def wrong(self, data: st.DataObject) -> None:
        """A handle at fault among good ones: nothing changes."""
        good = list(self.refs.elements())
        bad = [*self.dead[-20:], -2, 2**62, 1, BLOCKS, *good]
        one = data.draw(st.sampled_from(bad))
        where = data.draw(st.integers(0, len(good)))
        several = [*good[:where], one, *good[where:]]
        for call in (self.pool.free, self.pool.fork, self.pool.ids, self.cache.forget):
            if one in self.refs and call != self.pool.free:
                continue
            with pytest.raises(BlockError) as caught:
                call(several)
            assert caught.value.handle == one

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        Machine.operations += 1
        self.cache.check()
        self.pool.check()
        assert sum(counts(self.pool)) == BLOCKS
        assert self.pool.num_used == len(self.held()) + self.null
        assert self.cache.num_pinned == len(self.pinned) <= MOST_PINNED
        for handle, refs in self.refs.items():
            assert self.pool.ref_count(handle) == refs
        assert self.pool.all_own(list(self.refs)) == all(self.pool.sharers(handle) == 1 for handle in self.refs)
        assert len(self.cache.events()) <= 5

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for handles, _, _ in self.sequences:
                self.pool.free(handles)
            self.cache.check()
            assert self.pool.num_used == len(self.pinned) + self.null


def profile(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class TestPoolShort(Machine.TestCase):
    settings = profile(40, 40)


@pytest.mark.slow
@pytest.mark.native
class TestPoolLong(Machine.TestCase):
    settings = profile(1300, 100)

    def runTest(self) -> None:
        before = Machine.operations
        super().runTest()
        assert Machine.operations - before >= 100_000


# ---- the faults of others ----


def test_a_table_may_hold_a_block_twice() -> None:
    """[KV01] A sliding window reuses blocks: each occurrence counts."""
    pool = BlockPool(4)
    a, b = pool.allocate(2).tolist()
    table = [a, b, *pool.fork([a, b])]
    child = pool.fork(table)
    assert pool.ref_count(a) == 4
    pool.free(table)
    pool.free(child)
    pool.check()
    assert counts(pool) == (4, 0, 0)


def test_a_block_freed_twice_in_one_call_is_refused() -> None:
    """[KV02] Also among good handles, and in two calls."""
    pool = BlockPool(4)
    a, b = pool.allocate(2).tolist()
    for handles in ([b, b], [a, b, b], [b, a, -1, b]):
        with pytest.raises(BlockError, match=r"block 1 is freed 2 times in one call and held 1 time"):
            pool.free(handles)
        assert pool.num_used == 2
    pool.free(b)
    with pytest.raises(BlockError, match=r"handles: stale: block 1 is in generation \d+, the handle is of"):
        pool.free(b)
    assert len(set(pool.ids(pool.allocate(3)).tolist())) == 3
    pool.check()


def test_a_fork_keeps_its_parents_blocks() -> None:
    """[KV03] Whichever is freed first."""
    for order in (0, 1):
        pool = BlockPool(4)
        parent = pool.allocate(3)
        both = [parent, pool.fork(parent)]
        pool.free(both[order])
        assert pool.num_used == 3
        pool.free(both[1 - order])
        pool.check()
        assert pool.num_free == 4


@pytest.mark.parametrize("bits", [0, 63])
def test_equal_hashes_are_no_hit(bits: int) -> None:
    """[KV04] Nor are equal tokens after other ones."""
    pool, cache = pool_and_cache(200, 4)
    cache._keep_hash_bits(bits)
    cache.commit(pool.allocate(2), [1, 2, 3, 4, 9, 9, 9, 9])
    assert cache.longest([5, 6, 7, 8], cap=False) == 0
    cache.commit(pool.allocate(), [5, 6, 7, 8])
    assert cache.longest([5, 6, 7, 8, 9, 9, 9, 9], cap=False) == 4
    assert cache.longest([1, 2, 3, 4, 9, 9, 9, 9], cap=False) == 8
    for token in range(100):
        cache.commit(pool.allocate(), [token, 0, 0, 0])
    assert len(cache) == (103 if bits else 64)  # a flood of equal hashes ends
    assert cache.longest([1, 2, 3, 4, 9, 9, 9, 9], cap=False) == 8
    cache.check()


def test_kinds_and_types_of_keys_are_apart() -> None:
    """[KV05]"""
    pool, cache = pool_and_cache(64)
    hashes = [cache.hashes([1, 2, 3, 4, 5, 6], **keys).tolist() for keys in KEYS]
    assert len({one[-1] for one in hashes}) == len(KEYS)
    assert hashes[8][0] != hashes[0][0] and hashes[6][0] == hashes[8][0]  # an image enters at its block
    cache._keep_hash_bits(0)
    for keys in KEYS:
        assert cache.commit(pool.allocate(3), [1, 2, 3, 4, 5, 6], **keys) == (2 if keys == KEYS[8] else 3)
    cache.check()


def test_hashes_are_those_of_the_reference_in_every_process() -> None:
    """[KV06] Whatever PYTHONHASHSEED is; another seed gives others."""
    tokens = np.random.default_rng(0).integers(0, 2**31, 40)
    for size in (1, 3, 8):
        for keys in (*KEYS, {"adapter": "\ud800" * 7, "salt": -(2**70), "images": [(b"\0" * 9, 30), ("é", 2)]}):
            for seed in (0, 2**64 - 1):
                cache = PrefixCache(BlockPool(1), size, seed=seed)
                assert cache.hashes(tokens, **keys).tolist() == reference.prefix_hashes(tokens, size, seed, **keys)
    assert cache.hashes(tokens)[0] != PrefixCache(BlockPool(1), 8).hashes(tokens)[0]


@pytest.mark.native
def test_hashes_are_equal_in_every_process() -> None:
    """[KV06]"""
    code = "import lanewise as l; print(l.PrefixCache(l.BlockPool(1), 4).hashes(range(40), adapter='X', salt=None)[-1])"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("0", "random")
    }
    assert said == {f"{reference.prefix_hashes(range(40), 4, adapter='X')[-1]}\n"}


def test_a_block_is_hit_after_its_commit_only() -> None:
    """[KV07] And its holder's own blocks stay its own: the second with the same contents is not entered."""
    pool, cache = pool_and_cache(8, 1)
    first, second = pool.allocate(4), pool.allocate(4)
    assert cache.longest([65, 66, 67, 69], cap=False) == 0
    assert cache.commit(first, [65, 66, 67, 68]) == 4
    assert cache.longest([65, 66, 67, 69], cap=False) == 3
    assert cache.commit(second, [65, 66, 67, 69]) == 1
    assert cache.match([65, 66, 67, 69], cap=False)[0].tolist() == [*first[:3], second[3]]
    cache.check()


def test_a_prompt_shorter_than_a_block_leaks_nothing() -> None:
    """[KV09]"""
    pool, cache = pool_and_cache(4, 16)
    for _ in range(1000):
        handles, n = cache.match([1, 2, 3])
        assert n == len(handles) == 0
        table = pool.allocate(1)
        assert cache.commit(table, [1, 2, 3]) == 0
        pool.free(table)
    cache.check()
    assert counts(pool) == (4, 0, 0)


def test_the_counters_always_add_up() -> None:
    """[KV11] Shared blocks count once, wherever they are."""
    pool, cache = pool_and_cache(8)
    table = pool.allocate(5)
    cache.commit(table, range(10))
    other = cache.match(range(10), cap=False)[0]
    assert counts(pool) == (3, 0, 5)
    pool.free(table)
    assert counts(pool) == (3, 0, 5)
    pool.free(other)
    assert counts(pool) == (3, 5, 0)
    assert len(cache.match(range(10), cap=False)[0]) == 5 and counts(pool) == (3, 0, 5)


def test_an_evicted_block_is_no_hit() -> None:
    """[KV19] Evict and allocate in a loop: its entry is gone before it is handed out, and counters stay in bounds."""
    pool, cache = pool_and_cache(2, 1)
    for token in range(100):
        one = pool.allocate()
        assert cache.longest([token], cap=False) == 0 and (token < 2 or len(cache) == 1)
        cache.commit(one, [token])
        pool.free(one)
        cache.check()
        assert all(0 <= count <= 2 for count in counts(pool))


# ---- what else is promised ----


def test_tails_are_evicted_first_and_what_was_used_last() -> None:
    pool, cache = pool_and_cache(6)
    a, b = pool.allocate(3), pool.allocate(3)
    cache.commit(a, [1] * 6)
    cache.commit(b, [2] * 6)
    pool.free(a)
    pool.free(b)
    pool.free(cache.match([1] * 6)[0])  # its two first blocks are the last used
    order = [pool.ids(pool.allocate()) for _ in range(6)]
    assert order == [2, 5, 4, 3, 1, 0]


def test_blocks_without_contents_go_first() -> None:
    pool, cache = pool_and_cache(4)
    table = pool.allocate(2)
    cache.commit(table[:1], [1, 1])
    pool.free(table)
    assert pool.ids(pool.allocate(4)).tolist() == [2, 3, 1, 0]


def test_a_twin_continues_the_first_ones_sequence() -> None:
    pool, cache = pool_and_cache(8)
    a, b = pool.allocate(2), pool.allocate(2)
    assert cache.commit(a[0], [1, 2]) == 1 and cache.commit(b[0], [1, 2]) == 0
    assert cache.commit(b[1], [3, 4], parent=b[0]) == 1
    assert cache.match([1, 2, 3, 4], cap=False)[0].tolist() == [a[0], b[1]]
    pool.free([a[0], a[0]])
    pool.free(a[1])
    pool.allocate(6)  # evicts a[0]
    assert cache.commit(b[1], [3, 4], parent=b[0]) == 0  # what b[0] was equal to is gone
    assert cache.commit(b, [1, 2, 3, 4]) == 2 and cache.longest([1, 2, 3, 4], cap=False) == 4
    cache.check()


def test_a_commit_that_is_wrong_enters_nothing() -> None:
    pool, cache = pool_and_cache(8)
    a, b, c = pool.allocate(3).tolist()
    pool.free(c)
    for handles, tokens, keys, said in (
        ([a, a], [0, 0, 0, 0], {}, r"handles\[1\]: block 0 stands twice"),
        ([a, c], [0, 0, 0, 0], {}, r"handles\[1\]: stale: block 2"),
        ([a, -1], [0, 0, 0, 0], {}, r"handles\[1\]: -1 is no handle"),
        ([a], [0, 0, 0, 0], {}, r"handles must have one for each of the 2 full blocks of 4 tokens, got 1"),
        ([a, b], [0, 0, 0, -1], {}, r"tokens\[3\] is -1, not in"),
        ([a, b], [0, 0, 0, 2**31], {}, r"tokens\[3\] is 2147483648, not in"),
        ([a, b], np.uint64([0, 0, 0, 2**64 - 1]), {}, r"tokens\[3\] is 18446744073709551615, not in"),
        ([a, b], [[0, 0]], {}, r"tokens must be one-dimensional"),
        ([a], [0, 0], {"parent": c}, r"parent: stale: block 2"),
        ([a], [0, 0], {"parent": -1}, r"parent must be a handle"),
        ([a], [0, 0], {"salt": "x" * 1025}, r"salt may have up to 1024 bytes, got 1025"),
        ([a], [0, 0], {"images": [("x", 0), ("y", 0)]}, r"images\[1\]: there is another at position 0"),
        ([a], [0, 0], {"images": [("x", -1)]}, r"images\[0\]: position must be in \[0"),
    ):
        with pytest.raises(ValueError, match=said):
            cache.commit(handles, tokens, **keys)
        assert len(cache) == 0
    cache.commit(b, [7, 7])
    with pytest.raises(BlockError, match=r"handles\[1\]: block 1 is committed with other tokens or keys"):
        cache.commit([a, b], [0, 0, 7, 7])
    for keys in ({"adapter": 1.5}, {"salt": True}, {"images": ["x"]}, {"images": 5}):
        with pytest.raises(TypeError):
            cache.commit(a, [0, 0], **keys)
    assert len(cache) == 1
    cache.check()


def test_events_tell_of_entries_and_of_their_own_loss() -> None:
    pool, cache = pool_and_cache(4, 1, max_events=3)
    first, second = cache.hashes([1, 2]).tolist()
    table = pool.allocate(2)
    cache.commit(table, [1, 2])
    assert cache.events() == [("stored", first, 0, 0), ("stored", second, first, 1)]
    pool.free(table)
    cache.clear()
    assert cache.events() == [("removed", second, first, 1), ("removed", first, 0, 0)]
    cache.commit(pool.allocate(4), [1, 2, 3, 4])
    assert [event[:2] for event in cache.events()][:2] == [("lost", 1), ("stored", second)]
    assert cache.events() == []


def test_pinned_blocks_stay() -> None:
    pool, cache = pool_and_cache(4, max_pinned=2)
    table = pool.allocate(3)
    cache.commit(table, range(6))
    with pytest.raises(ValueError, match=r"3 more block\(s\) would be pinned, 0 of at most 2 are"):
        cache.pin(range(6))
    assert cache.pin(range(4)) == 2 and cache.pin(range(5)) == 0
    pool.free(table)
    assert counts(pool) == (1, 1, 2) and cache.clear() == 1
    assert pool.try_allocate(3) is None
    with pytest.raises(BlockError, match="stale"):
        pool.free(table[0])
    assert cache.unpin(range(6)) == 2 and counts(pool) == (2, 2, 0)
    cache.check()


def test_sizes_are_checked() -> None:
    for bad in (0, -1, 2**31, 2**70):
        with pytest.raises(ValueError, match=f"num_blocks must be in .*, got {bad}"):
            BlockPool(bad)
    for call in (lambda: BlockPool(1.0), lambda: BlockPool(), lambda: PrefixCache(None), lambda: PrefixCache(4)):
        with pytest.raises(TypeError):
            call()
    pool = BlockPool(3)
    for n in (4, 2**63 - 1):
        with pytest.raises(OutOfBlocksError, match=f"{n} block.s. needed, 3 of 3 free"):
            pool.allocate(n)
    with pytest.raises(ValueError, match=r"n must be in .*, got -1"):
        pool.try_allocate(-1)
    for kw in ({"block_size": 0}, {"block_size": 2**16 + 1}, {"seed": 2**64}, {"max_pinned": 4}, {"max_events": -1}):
        with pytest.raises(ValueError, match=next(iter(kw))):
            PrefixCache(pool, **kw)
    cache = PrefixCache(pool)
    with pytest.raises(ValueError, match="has a PrefixCache already"):
        PrefixCache(pool)
    del cache
    gc.collect()
    PrefixCache(pool).check()
    assert pool.allocate(0).tolist() == [] and BlockPool(2**24).num_free == 2**24  # untouched memory is not filled


def test_handles_of_any_form() -> None:
    pool, foreign = BlockPool(8), BlockPool(8).allocate(3)
    table = pool.allocate(4)
    for form in (table, table.tolist(), tuple(table), table[::-1], np.repeat(table, 2)[::2], table.astype(">i8")):
        pool.free(pool.fork(form))
    assert pool.ids(table[1]) == pool.ids(int(table[1])) == 1 and pool.ids([]).dtype == np.int32
    pool.free([]), pool.free(np.empty(0)), pool.free(-1)
    for bad in (foreign, foreign[0], 0, 5, 2**62, -2, -(2**63)):
        with pytest.raises(BlockError):
            pool.free(bad)
    for bad in (None, "x", table.astype(float), [1.5], [None], {}, object()):
        with pytest.raises(TypeError):
            pool.free(bad)
    with pytest.raises(ValueError, match=r"handles\[0\] must be in"):
        pool.free([2**63])
    with pytest.raises(ValueError, match=r"one-dimensional, got shape \(2, 2\)"):
        pool.free(table.reshape(2, 2))
    assert pool.num_used == 4
    pool.check()


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4, null_block=True)
    table = pool.allocate(3)
    assert pool.ids([0, *table]).tolist() == [0, 1, 2, 3] and pool.try_allocate() is None
    pool.free([0, *pool.fork([0, *table]), 0])
    pool.free(table)
    assert counts(pool) == (3, 0, 1)
    with pytest.raises(BlockError):
        pool.ref_count(0)
    pool.check()


def test_who_asks_whether_blocks_are_their_own_names_them() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    pool.free(table[1])
    with pytest.raises(BlockError, match=r"handles\[1\]: "):
        pool.all_own(table)
    assert pool.all_own(table[::2]) and pool.all_own([])


def test_neither_is_copied() -> None:
    pool, cache = pool_and_cache(2)
    for thing in (pool, cache):
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                call(thing)


def test_errors_survive_pickling() -> None:
    pool = BlockPool(1)
    for call in (lambda: pool.free(7), lambda: pool.allocate(2)):
        with pytest.raises((BlockError, OutOfBlocksError)) as caught:
            call()
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))


def test_a_cache_in_a_cycle_leaves_its_pool_before_that_goes() -> None:
    for _ in range(5):
        pool, cache = pool_and_cache(4)
        one = pool.allocate()
        cache.commit(one, [1, 2])
        pool.free(one)
        cycle: list[Any] = [cache, pool]
        cycle.append(cycle)
        del pool, cache, cycle
        gc.collect()


def test_a_pool_without_its_cache_goes_on() -> None:
    pool, cache = pool_and_cache(4, max_pinned=2)
    table = pool.allocate(3)
    cache.commit(table, range(6))
    cache.pin(range(4))
    pool.free(table[:2])
    del cache
    gc.collect()
    assert counts(pool) == (3, 0, 1)
    pool.free(table[2])
    assert len(pool.allocate(4)) == 4
    pool.check()


def test_a_forked_child_has_its_own() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    pool, cache = pool_and_cache(4)
    table = pool.allocate(2)
    cache.commit(table, range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which earlier tests left
        child = os.fork()
    if child == 0:
        pool.free(table)
        os._exit(0 if counts(pool) == (2, 2, 0) and cache.clear() == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert counts(pool) == (2, 0, 2)


def test_eight_threads_share_a_pool() -> None:
    pool, cache = pool_and_cache(64, max_events=16)
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                tokens = rng.integers(0, 2, 12)
                handles, _ = cache.match(tokens)
                new = pool.try_allocate(6 - len(handles))
                if new is not None:
                    cache.commit([*handles, *new], tokens)
                    pool.free(pool.fork(new))
                    pool.free(new)
                pool.free(handles)
                cache.events()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    cache.check()
    assert pool.num_used == 0
