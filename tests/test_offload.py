"""HostOffload beside a plain dictionary: what is stored is found until it is evicted, the longest unused first."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

import lanewise
from lanewise import HostOffload

BLOCKS, BYTES = 4, 96
KEYS = st.lists(st.integers(0, 7), max_size=5)


def contents(keys: list[int], salt: int) -> np.ndarray:
    """Of each block, from its key and the store that put it there."""
    return np.array([[(17 * key + salt + i) % 256 for i in range(BYTES)] for key in keys], np.uint8).reshape(-1, BYTES)


class OffloadMachine(RuleBasedStateMachine):
    stores, loads = Bundle("stores"), Bundle("loads")

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostOffload(BLOCKS, BYTES)
        self.there: dict[int, np.ndarray] = {}  # the longest unused first
        self.pending: dict[int, np.ndarray] = {}
        self.loading: list[tuple[int, ...]] = []
        self.salt = 0

    def use(self, keys: list[int]) -> None:
        for key in keys:
            if key in self.there:
                self.there[key] = self.there.pop(key)

    @rule(target=stores, keys=KEYS)
    def store(self, keys: list[int]) -> Any:
        wanted = list(dict.fromkeys(keys))
        new = [key for key in wanted if key not in self.there and key not in self.pending]
        busy = {key for load in self.loading for key in load}
        short = len(new) - (BLOCKS - len(self.there) - len(self.pending))
        free = [key for key in self.there if key not in wanted and key not in busy]
        transfer = self.tier.store(keys)
        if short > len(free):
            assert transfer is None
            return multiple()
        assert transfer is not None
        assert transfer.keys == new
        assert transfer.evicted == free[: max(short, 0)]
        for key in transfer.evicted:
            del self.there[key]
        self.use(wanted)
        self.salt += 1
        rows = contents(new, self.salt)
        transfer.write(rows)
        self.pending.update(zip(new, rows, strict=True))
        return transfer

    @rule(transfer=consumes(stores), well=st.booleans())
    def end_store(self, transfer: Any, well: bool) -> None:
        (transfer.done if well else transfer.undo)()
        for key in transfer.keys:
            rows = self.pending.pop(key)
            if well:
                self.there[key] = rows
        with pytest.raises(RuntimeError, match="ended"):
            transfer.done()

    @rule(target=loads, keys=KEYS)
    def load(self, keys: list[int]) -> Any:
        missing = [key for key in keys if key not in self.there]
        if missing:
            with pytest.raises(KeyError, match=rf"keys\[{keys.index(missing[0])}\]"):
                self.tier.load(keys)
            return multiple()
        transfer = self.tier.load(keys)
        self.use(keys)
        self.loading.append(tuple(keys))
        return transfer, [self.there[key] for key in keys]

    @rule(loaded=consumes(loads))
    def end_load(self, loaded: Any) -> None:
        transfer, rows = loaded
        assert np.array_equal(transfer.read(), np.array(rows, np.uint8).reshape(-1, BYTES))
        transfer.done()
        self.loading.remove(tuple(transfer.keys))

    @rule(keys=KEYS)
    def discard(self, keys: list[int]) -> None:
        busy = {key for load in self.loading for key in load}
        gone = [key for key in dict.fromkeys(keys) if key in self.there and key not in busy]
        assert self.tier.discard(gone) == len(gone)
        for key in gone:
            del self.there[key]

    @invariant()
    def adds_up(self) -> None:
        self.tier.check()
        assert list(self.tier._ready) == list(self.there)
        assert self.tier.lookup(self.there) == len(self.tier) == len(self.there)
        assert all(self.tier.lookup([key]) == 0 for key in self.pending)
        assert self.tier.num_free == BLOCKS - len(self.there) - len(self.pending)


TestOffload = OffloadMachine.TestCase


def test_a_block_that_is_loaded_outlives_its_key() -> None:
    tier = HostOffload(1, 64)
    with tier.store(["a"]) as store:
        store.write(np.full(64, 7, np.uint8))
    with tier.load(["a"]) as load:
        assert tier.discard(["a"]) == 1
        assert tier.store(["b"]) is None  # its block is still read
        assert (load.read() == 7).all()
    assert tier.num_free == 1


def test_an_exception_undoes_a_store() -> None:
    tier = HostOffload(2, 64)
    with pytest.raises(ZeroDivisionError), tier.store(["a"]):
        raise ZeroDivisionError
    assert (len(tier), tier.num_free, "a" in tier) == (0, 2, False)


def test_what_is_wrong_is_said() -> None:
    tier = HostOffload(2, 64)
    with pytest.raises(ValueError, match="block_bytes must be"):
        HostOffload(2, 0)
    with pytest.raises(ValueError, match="num_blocks"):
        HostOffload(0, 64)
    with pytest.raises(TypeError, match="unhashable"):
        tier.store([[]])
    with tier.store(["a"]) as store:
        with pytest.raises(ValueError, match=r"blocks must have 1 blocks of 64 bytes, got shape \(3,\)"):
            store.write(np.zeros(3, np.uint8))
        with pytest.raises(RuntimeError, match="not read from"):
            store.read()
        with pytest.raises(KeyError, match=r"keys\[0\]: 'a' is being stored"):
            tier.load(["a"])
        store.write(np.zeros(64, np.uint8))
    with tier.load(["a"]) as load, pytest.raises(RuntimeError, match="not written to"):
        load.write(np.zeros(64, np.uint8))
    tier.check()


def test_keys_may_come_from_a_generator_that_asks_the_tier() -> None:
    tier = HostOffload(2, 8)
    with tier.store(["a"]) as store:
        store.write(np.arange(8, dtype=np.uint8))
    assert tier.lookup(key for key in "ab" if tier.num_free) == 1
    assert tier.discard(key for key in "ab" if tier.lookup([key])) == 1


def test_over_a_buffer_of_the_user() -> None:
    memory = lanewise.PagedKVCache(1, 2, 1, 16).keys().base  # 64-byte aligned
    tier = HostOffload(2, 64, buffer=memory)
    assert np.shares_memory(tier.blocks, memory)


def test_threads_store_and_load() -> None:
    tier = HostOffload(8, 64)
    failed: list[BaseException] = []

    def work(own: int) -> None:
        try:
            for i in range(200):
                key = (own, i % 3)
                store = tier.store([key])
                if store is not None and store.keys:
                    with store:
                        store.write(np.full(64, own, np.uint8))
                if key in tier:
                    try:
                        with tier.load([key]) as load:
                            assert (load.read() == own).all()
                    except KeyError:
                        pass  # another thread evicted it meanwhile
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tier.check()
    assert not failed
