"""Calls that once crashed, gave another answer than the reference, or named nothing in their error."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lanewise
from lanewise import _arrays, _ops, reference

ROW = np.arange(10, dtype=np.float32)


def unaligned(x: np.ndarray) -> np.ndarray:
    memory = np.zeros(x.nbytes + 1, np.uint8)
    memory[1:] = np.frombuffer(x.tobytes(), np.uint8)
    return memory[1:].view(x.dtype).reshape(x.shape)


@pytest.mark.parametrize("name", ["prompt_ids", "output_ids"])
def test_what_a_masked_array_hides_is_checked_too(name: str) -> None:
    hidden = np.ma.array([1, 10**12], mask=[False, True])
    kw: dict[str, Any] = {name: hidden, "repetition_penalty": 2.0}
    with pytest.raises(ValueError, match=rf"{name}\[1\] is 1000000000000, not an id in 0..9"):
        lanewise.sample(ROW, **kw)


def test_more_rows_than_memory_has_parameters_for() -> None:
    rows = np.broadcast_to(np.zeros(2, np.float32), (2**59, 2))  # 96 bytes of parameters a row: 0 modulo 2**64
    with pytest.raises((MemoryError, ValueError)):
        lanewise.sample(rows)


def test_min_p_rounds_down_past_zero(isa: str) -> None:
    row = np.float32([0, -1e-45])
    how: dict[str, Any] = {"temperature": 1e-30, "min_p": 1 - 2.0**-53}  # a bound of -1.1e-46
    _, kept, _ = reference.sample(row, **how, u=0.5)
    _, support = lanewise.sample(row, **how, u=0.5, return_support=True)
    assert support.ids.tolist() == kept.tolist() == [0, 1]


@pytest.mark.parametrize("top_k", [0, 2])
def test_min_p_of_one_keeps_the_largest_alone(isa: str, top_k: int) -> None:
    row = np.tile(np.float32([-1, np.nextafter(np.float32(1), 0), 1]), 50)
    _, support = lanewise.sample(row, min_p=1.0, top_k=top_k, u=0.5, return_support=True)
    assert support.ids.tolist() == [2 + 3 * i for i in range(top_k or 50)]


def test_min_p_below_the_normal_numbers_counts_as_their_least(isa: str) -> None:
    row = np.float32([0, -708.3, -708.6, -709.5])  # log(2.2e-308) is -708.396
    _, support = lanewise.sample(row, min_p=5e-324, u=0.5, return_support=True)
    assert support.ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"temperature": 10**400}, "temperature must be in .* got 10000"),
        ({"temperature": -(10**400)}, "temperature must be in .* got -10000"),
        ({"bias": {3: 10**400}}, r"bias\[0\]\[3\] must be in .* got 10000"),
        ({"min_p": [10**400]}, r"min_p\[0\] must be in .* got 10000"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_integers_beyond_float64_are_out_of_range(kw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lanewise.sample(ROW, **kw)


def test_integers_beyond_float64_switch_top_p_off() -> None:
    assert lanewise.sample(ROW, top_p=10**400, seed=1, step=0) == lanewise.sample(ROW, seed=1, step=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, _arrays.BFLOAT16], ids=str)
def test_odd_addresses_are_copied(dtype: Any) -> None:
    row = ROW.astype(ml_dtypes.bfloat16 if dtype is _arrays.BFLOAT16 else dtype).view(dtype)
    odd = unaligned(row)
    assert odd.ctypes.data % 2 == 1 and not odd.flags.aligned
    assert lanewise.softmax(odd).tobytes() == lanewise.softmax(row).tobytes()


def test_odd_addresses_of_masks_and_biases_are_copied() -> None:
    kw: dict[str, Any] = {"seed": 1, "step": 0, "return_support": True}
    words, bias = np.array([0b1111100111], np.uint32), np.linspace(0, 1, 10, dtype=np.float32)
    want = lanewise.sample(ROW, mask=words, bias=bias, **kw)
    got = lanewise.sample(ROW, mask=unaligned(words), bias=unaligned(bias), **kw)
    assert got[0] == want[0] and got[1].logprobs.tobytes() == want[1].logprobs.tobytes()


def test_an_empty_batch_takes_an_empty_list_of_biases() -> None:
    assert lanewise.sample(np.empty((0, 5), np.float32), bias=[]).shape == (0,)


@pytest.mark.parametrize(("shape", "axis"), [((2, 3, 0), -1), ((0, 3), 0)])
def test_an_axis_of_nothing_is_named(shape: tuple[int, ...], axis: int) -> None:
    with pytest.raises(ValueError, match=r"logits must have at least one element along axis -?\d, got shape"):
        lanewise.softmax(np.zeros(shape, np.float32), axis=axis)


def test_penalties_round_one_after_another(isa: str) -> None:
    row = np.random.default_rng(1).standard_normal(200).astype(np.float32)
    frequency, presence = np.float32(0.1), np.float32(0.3)
    assert ((row - frequency) - presence != row - (frequency + presence)).any()
    how: dict[str, Any] = {"frequency_penalty": 0.1, "presence_penalty": 0.3, "output_ids": list(range(200)), "u": 0.5}
    _, support = lanewise.sample(row, **how, return_support=True)
    _, kept, logprobs = reference.sample(row, **how)
    assert support.ids.tolist() == kept.tolist() and support.logprobs.tobytes() == logprobs.tobytes()


def test_the_least_temperature_is_not_greedy(isa: str) -> None:
    row = np.float32([1, 3, 3])
    assert lanewise.softmax(row, temperature=1e-30).tolist() == [0, 0.5, 0.5]
    assert lanewise.softmax(row, temperature=np.nextafter(1e-30, 0)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("n", [200, 3 * 4096])
def test_noise_decides_where_temperature_drowns_it(isa: str, n: int) -> None:
    """At T = 1e-20 the sums of z / T and noise round to one float64; what was rounded off decides, in any node."""
    row = (np.arange(n) % 3 == 0).astype(np.float32)
    for step in range(12):
        how: dict[str, Any] = {"temperature": 1e-20, "seed": 5, "step": step}
        assert lanewise.sample(row, **how) == reference.sample(row, **how)[0]


BLOCKS = 16
FEW_ROWS = {
    "realistic": lambda rng, n: 3 * rng.standard_normal(n),
    "tied": lambda rng, n: np.round(rng.standard_normal(n)),
    "equal": lambda rng, n: np.full(n, -3.25),
    "five": lambda rng, n: np.where(np.arange(n) % 200 == 7, np.arange(n) / 300, -np.inf),
}


@functools.cache  # the next test is the same on another ISA
def at_every_boundary(kind: str) -> tuple[np.ndarray, list[tuple[dict[str, Any], Any]]]:
    """A row; settings and what the reference says: top-k at, below and above the number of blocks, and min_keep above
    and below both."""
    rng, n = np.random.default_rng(3), 64 * BLOCKS - 5
    row = FEW_ROWS[kind](rng, n).astype(np.float32)
    orders, found = list(reference.PRESETS), []
    for top_k, min_keep, top_p, min_p in product(
        (1, 3, BLOCKS - 1, BLOCKS, BLOCKS + 1), (0, 1, 5, BLOCKS, BLOCKS + 1), (1.0, 0.4, 1e-12), (0.0, 0.3, 1.0)
    ):
        how: dict[str, Any] = {"top_k": top_k, "min_keep": min_keep, "top_p": top_p, "min_p": min_p}
        how |= {"preset": orders[rng.integers(4)], "temperature": rng.choice([1e-30, 0.7, 1.0, 2.5, 1e30])}
        how |= {"seed": int(rng.integers(2**63)), "step": 1}
        found.append((how, reference.sample(row, **how)))
    return row, found


@pytest.mark.parametrize("kind", FEW_ROWS)
def test_what_follows_top_k_at_every_boundary(kind: str, isa: str) -> None:
    row, found = at_every_boundary(kind)
    for how, (token, kept, logprobs) in found:
        for exact in (False, True):
            _ops.set_force_exact(exact)
            try:
                got, support = lanewise.sample(row, **how, return_support=True)
            finally:
                _ops.set_force_exact(False)
            assert (got, support.ids.tolist()) == (token, kept.tolist()), how
            assert support.logprobs.tobytes() == logprobs.tobytes(), how


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lanewise.argmax(ROW, on_invalid=np.zeros(2)), ValueError, "on_invalid must be 'raise' or 'mark', got"),
        (lambda: lanewise.top_k(ROW, 1, ties=ROW), ValueError, "ties must be 'lowest' or 'all', got"),
        (lambda: lanewise.sample(ROW, ties=ROW), ValueError, "ties must be 'lowest', 'all' or 'top_k', got"),
        (
            lambda: lanewise.verify_draft(np.stack([ROW, ROW]), [1], method=[]),
            ValueError,
            "method must be one of noise",
        ),
        (lambda: lanewise.argmax([[1.0], [1.0, 2.0]]), ValueError, "logits must be an array of numbers: setting"),
        (lambda: lanewise.beam_step([0.0], ROW[None], eos_ids=[1.7]), TypeError, "eos_ids must be .* integers"),
        (lambda: lanewise.beam_step([0.0], ROW[None], eos_ids=3), TypeError, "eos_ids must be one-dimensional"),
        (lambda: lanewise.zero_blocks(ROW.copy(), axis=0.5), TypeError, "axis must be an integer, got 0.5"),
        (lambda: lanewise.zero_blocks(ROW.copy(), axis=2**70), ValueError, "axis must be in"),
        (lambda: lanewise.HostOffload(1.5, 64), TypeError, "num_blocks must be an integer, got 1.5"),
        (lambda: lanewise.HostOffload(1, "64"), TypeError, "block_bytes must be an integer, got '64'"),
        (lambda: lanewise.SampleState(2.5, seed=1, step=0), TypeError, "vocab_size must be one number, got 2.5"),
        (
            lambda: lanewise.sample_from_probs(ROW[None], noise=ROW + 1, out=np.zeros(1, np.float32)),
            TypeError,
            "out must be int64, got float32",
        ),
        (
            lambda: lanewise.sample_from_probs(ROW[None], noise=ROW + 1, out=np.zeros(2, np.int64)),
            ValueError,
            r"out must have shape \(1,\), got \(2,\)",
        ),
    ],
)
def test_what_another_said_or_let_through(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
