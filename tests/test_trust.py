"""What C follows without a look is its own: nobody can change it, or lie about it, from Python.

What once crashed runs in a process of its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import lanewise
from lanewise import Sampler, steps
from lanewise.chain import Program, run_chain

ROW = np.linspace(-3, 3, 100, dtype=np.float32)
PRELUDE = """
import numpy as np, lanewise
from lanewise import steps
def refused(call, *errors):
    try:
        call()
    except errors or (ValueError, TypeError) as error:
        return str(error)
    raise AssertionError("it was taken")
"""


def survives(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PRELUDE + textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ---- what is made stays as it is ----


def test_a_program_cannot_be_changed() -> None:
    program = Program([("top_k", 1)])
    for name in ("codes", "state", "steps"):
        with pytest.raises(AttributeError):
            setattr(program, name, None)
    with pytest.raises(ValueError, match="WRITEABLE"):
        program.codes.flags.writeable = True
    program.state[:] = np.nan
    assert program.state.tolist() == [0, 0]
    with pytest.raises(TypeError):
        type("Sub", (Program,), {})
    with pytest.raises(TypeError):
        Program.__new__(Program)
    assert run_chain(ROW, program, seed=0, step=0) == 99


def test_steps_that_were_altered_do_no_harm() -> None:
    survives("""
    rows = np.zeros((1, 8), np.float32)
    ids = [(-(10**9),), (-5, 2**40), (((),), (1,))]
    changes = [("bias", ((id_[0], 1.0),)) for id_ in ids] + [("n", 0), ("n", -(10**6)), ("words", ((), (1,)))]
    changes += [(name, some) for name in ("ids", "words") for some in ids] + [("at", ((0, (-7,)),))]
    for kind, *told in [(steps.LogitBias, {1: 2.0}), (steps.SequenceBias, {(1, 2): 2.0}), (steps.NoRepeatNgram, 2),
                        (steps.Suppress, [1]), (steps.BadWords, [[1, 2]]), (steps.ForcedIds, [(0, [1])]),
                        (steps.EncoderNoRepeatNgram, 2, [1, 2, 3]), (steps.LengthDecay, 1, 2.0, [1]),
                        (steps.MinTokens, 2, [1])]:
        for name, value in changes:
            step = kind(*told)
            if not hasattr(step, name):
                continue
            object.__setattr__(step, name, value)
            for use in (lambda: lanewise.Sampler([step], seed=1),
                        lambda: lanewise.apply_steps(rows, [step], output_ids=[[1, 2, 1]])):
                try:
                    sampler = use()
                    if type(sampler) is lanewise.Sampler:
                        sampler.add(0, [1, 2, 3], output_ids=[1, 2])
                        sampler(rows)
                except (ValueError, TypeError):
                    pass
    """)


def test_an_altered_step_is_named() -> None:
    step = steps.NoRepeatNgram(2)
    object.__setattr__(step, "n", 0)
    with pytest.raises(ValueError, match="steps must stay as they were made: one was altered"):
        Sampler([step])
    with pytest.raises(ValueError, match="one was altered"):
        Sampler([pickle.loads(pickle.dumps(step))])


def test_what_a_cache_shows_is_not_what_it_uses() -> None:
    cache = lanewise.PagedKVCache(1, 4, 2, 8, block_size=4)
    for view in (cache.keys(), cache.values()):
        view.shape = (1, 4, 8, 1, 8)
    seq = cache.sequence()
    seq.append(np.ones((1, 6, 2, 8), np.float32), np.ones((1, 6, 2, 8), np.float32))
    assert cache.keys().shape == (1, 4, 2, 4, 8) and (cache.gather([seq])[0] == 1).all()


# ---- what lies about itself ----


def test_a_subclass_cannot_lie_about_its_shape() -> None:
    survives("""
    class Liar(np.ndarray):
        told = ()
        shape = property(lambda self: self.told)
        ndim = property(lambda self: len(self.told))
        size = property(lambda self: int(np.prod(self.told)))
        def view(self, *args): return np.zeros(self.told, np.uint16)
        def __getitem__(self, at): return np.zeros(1, np.float32)

    def liar(dtype, *told):
        array = np.zeros(1 if len(told) == 1 else (1, 1), dtype).view(Liar)
        array.told = told
        return array

    n = 300_000
    row, rows = np.zeros(n, np.float32), np.zeros((2, n), np.float32)
    f, i = np.float32, np.int64
    refused(lambda: lanewise.softmax(row, out=liar(f, n)))
    refused(lambda: lanewise.softmax(rows, axis=0, out=liar(f, 2, n)))
    refused(lambda: lanewise.top_p_mask(row, 0.9, out=liar(f, n)))
    refused(lambda: lanewise.apply_bias(row, {1: 1.0}, out=liar(f, n)))
    refused(lambda: lanewise.apply_token_bitmask(row.astype(np.float16), np.ones(n, bool), out=liar(np.float16, n)))
    refused(lambda: lanewise.argmax(np.zeros((n, 1), f), out=liar(i, n)))
    refused(lambda: lanewise.sample(np.zeros((n, 1), f), out=liar(i, n)))
    refused(lambda: lanewise.sample_n(row, 1000, out=liar(i, 1000)))
    refused(lambda: lanewise.top_k(row, 1000, out=(liar(f, 1000), liar(i, 1000))))
    found = lanewise.logprobs(row, top_n=1000)
    refused(lambda: lanewise.logprobs(row, top_n=1000, out=found._replace(top_ids=liar(i, 1000))))
    kv = np.zeros((1, 1, 16, 8), f)
    plan = lanewise.AttentionPlan([[0]] * 9000, [1] * 9000, num_heads=1, num_kv_heads=1, block_size=16)
    refused(lambda: plan.run(np.zeros((9000, 1, 8), f), kv, kv, out=liar(f, 9000, 1, 8)))
    own = liar(f, n)
    refused(lambda: lanewise.apply_steps(own, [steps.LogitBias({n - 1: 1.0})], out=own))
    """)


@pytest.mark.parametrize("changed", ["k", "v"])
def test_a_cache_cannot_change_its_shape_while_other_arguments_are_read(changed: str) -> None:
    survives(f"""
    class Meanwhile:
        def __init__(self, act, array):
            self.act, self.array = act, array
        def __array__(self, dtype=None, copy=None):
            self.act()
            return self.array
    n, f = 1 << 14, np.float32
    k, v = (np.zeros((n, 1, 16, 16), np.int8) for _ in range(2))
    scales, table, q = np.ones((n, 1, 16, 2), f), np.arange(n)[None], np.zeros((1, 1, 16), f)
    plan = lanewise.AttentionPlan(table, [n * 16], num_heads=1, num_kv_heads=1, block_size=16)
    want = plan.run(q, k, v, k_scales=scales, v_scales=scales).tobytes()
    for shape in ((1, 1, 16, n * 16), (n * 256,)):
        def change():
            {changed}.shape = shape
        assert plan.run(q, k, v, k_scales=Meanwhile(change, scales), v_scales=scales).tobytes() == want
        k.shape = v.shape = n, 1, 16, 16
        assert plan.run(q, k, v, k_scales=scales, v_scales=Meanwhile(change, scales)).tobytes() == want
        k.shape = v.shape = n, 1, 16, 16
        out = lanewise.decode_attention(q, k, v, Meanwhile(change, table), [n * 16], k_scales=scales, v_scales=scales)
        assert out.tobytes() == want
        k.shape = v.shape = n, 1, 16, 16
    n = 1 << 20
    k, v = (np.zeros((1, 1, n, 1), f) for _ in range(2))
    def change():
        {changed}.shape = 1, 1, n
    plan = lanewise.AttentionPlan([[0]], [n], num_heads=1, num_kv_heads=1, block_size=n)
    refused(lambda: plan.run(np.zeros((1, 1, 4 * n), f), k, Meanwhile(change, v)))
    """)


def test_a_tuple_cannot_give_another_array_when_asked_again() -> None:
    survives("""
    class Twice(tuple):
        def __getitem__(self, at):
            return np.zeros(1, np.float32 if at in (0, 3) else np.int64)
    class TwiceList(list):
        __getitem__ = Twice.__getitem__

    n = 100_000
    row = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    for kind in (Twice, TwiceList):
        values, ids = np.zeros(n, np.float32), np.zeros(n, np.int64)
        lanewise.top_k(row, n, out=kind((values, ids)))
        assert (row[ids] == values).all() and len(set(ids.tolist())) == n
    lanewise.logprobs(row, top_n=n, out=Twice((None, None, ids, values, None, None)))
    """)


# ---- what others write to meanwhile ----


def test_slots_are_copied_before_they_are_checked() -> None:
    survives("""
    import threading, time
    cache = lanewise.PagedKVCache(2, 64, 2, 64, block_size=16, touch=True)
    slots = np.arange(1024)
    rows, over = np.ones((2, 1024, 2, 64), np.float32), threading.Event()
    def spoil():
        while not over.is_set():
            slots[:] = 2**50
            slots[:] = np.arange(1024)
    threads = [threading.Thread(target=spoil) for _ in range(2)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        for how in (lambda: cache.write(slots, rows, rows),
                    lambda: lanewise.append_kv(rows, rows, cache.keys(), cache.values(), slots, layout="LNHTD"),
                    lambda: lanewise.gather_kv(cache.keys(), cache.values(), slots, layout="LNHTD")):
            try:
                how()
            except ValueError:
                pass
    over.set()
    """)


def test_places_beyond_a_target_are_left_alone() -> None:
    survives("""
    from lanewise.transfer import KVTarget
    keys = np.zeros((1, 4, 2, 8, 16), np.float32)
    target = KVTarget(keys, keys.copy())
    rows = np.ones((3, 2, 2, 16), np.float32)
    for place in [(0, 2**62, 0), (0, 2**63 - 1, 0), (2**63 - 1, 1, 0), (0, 1, 2**63 - 1), (0, 2, 0), (1, 2**61 + 1, 7)]:
        assert not target.write_states(rows, rows, *place), place
    assert target.write_states(rows[:1], rows[:1], 3, 2**62, 6) and not keys[0, :3].any()
    """)


def test_what_is_made_half_or_twice_does_no_harm() -> None:
    survives("""
    import gc
    for kind in (lanewise.AttentionPlan, lanewise.BlockPool, lanewise.PrefixCache):
        refused(lambda: kind.__new__(kind), TypeError)
    pool = lanewise.BlockPool(4)
    cache = lanewise.PrefixCache(pool, block_size=4)
    plan = lanewise.AttentionPlan([[0]], [4], num_heads=1, num_kv_heads=1, block_size=4)
    for made, names in ((pool, ["num_blocks"]), (cache, ["pool", "seed"]), (plan, ["num_heads", "block_size"])):
        for name in names:
            refused(lambda: setattr(made, name, 99), AttributeError)
    for made in (pool, cache, plan):
        try:
            made.__init__()
        except TypeError:
            pass
    sampler = lanewise.Sampler.__new__(lanewise.Sampler)
    sampler.add("a", [1, 2])
    sampler(np.zeros((1, 8), np.float32))
    sampler.__init__([steps.Mirostat(), ], vocab_size=4)
    sampler.add("b")
    refused(lambda: sampler(np.zeros((2, 2), np.float32)))
    assert sampler(np.zeros((2, 8), np.float32)).max() < 4
    stream = lanewise.Stream.__new__(lanewise.Stream)
    lanewise.sample(np.zeros(8, np.float32), rng=stream)
    for kind in (lanewise.SampleState, lanewise.PagedKVCache, lanewise.BeamSearch, lanewise.HostOffload):
        empty = kind.__new__(kind)
        for name in ("finish", "check", "sequence", "step", "lookup"):
            if hasattr(kind, name):
                refused(getattr(empty, name), AttributeError, TypeError, ValueError)
    gc.collect()
    """)
