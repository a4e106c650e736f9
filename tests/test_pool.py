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
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import lanewise
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

    @initialize(bits=st.sampled_from([0, 1, 63]), null_block=st.booleans())
    def begin(self, bits: int, null_block: bool) -> None:
        self.null = null_block
        self.pool = BlockPool(BLOCKS, null_block=null_block)
        self.cache = PrefixCache(self.pool, SIZE, max_pinned=MOST_PINNED, max_events=4)
        self.cache._keep_hash_bits(bits)
        self.refs: Counter[int] = Counter()  # of handles
        self.dead: list[int] = []
        self.sequences: list[tuple[list[int], list[int], int]] = []  # handles, tokens, which keys
        self.written: dict[int, Any] = {}  # block: its contents, as long as the cache may know them

    def available(self) -> int:
        return BLOCKS - self.null - len(self.held())

    def held(self) -> set[int]:
        return set(map(self.block, self.refs)) | self.pinned

    pinned: set[int]
    pinned = set()

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
        self.cache.check()
        self.pool.check()
        assert sum(counts(self.pool)) == BLOCKS
        assert self.pool.num_used == len(self.held()) + self.null
        assert self.cache.num_pinned == len(self.pinned) <= MOST_PINNED
        for handle, refs in self.refs.items():
            assert self.pool.ref_count(handle) == refs
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
    settings = profile(1000, 100)
