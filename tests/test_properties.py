"""Hypothesis looks for rows and settings on which a kernel and the reference disagree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import lanewise
from lanewise import _dispatch, _ops, reference

settings.register_profile(
    "lanewise", max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("lanewise")

SPECIAL = [0.0, -0.0, 1.0, 1e-45, -87.33, 3.4e38, -3.4e38, float("-inf")]
UNORDERED = [*SPECIAL, float("inf"), float("nan")]


def logits(special: list[float], most: int = 200) -> st.SearchStrategy[np.ndarray]:
    element = st.one_of(st.floats(-50, 50, width=32), st.integers(-3, 3).map(float), st.sampled_from(special))
    return arrays(np.float32, st.integers(1, most), elements=element.map(np.float32), fill=st.sampled_from([0.0, -1.5]))


def histories(n: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, n - 1), max_size=6)


@st.composite
def sampled(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, Any], dict[str, Any]]:
    row = draw(logits(UNORDERED))
    n = len(row)
    how = {
        "temperature": draw(st.one_of(st.sampled_from([0.0, 1.0, 1e-30, 1e30, 1e31]), st.floats(1e-3, 10))),
        "top_k": draw(st.one_of(st.just(0), st.integers(-1, n + 2))),
        "top_p": draw(st.one_of(st.just(1.0), st.floats(-0.1, 1.1))),
        "min_p": draw(st.one_of(st.just(0.0), st.floats(0, 1))),
        "min_keep": draw(st.integers(0, 5)),
        "ties": draw(st.sampled_from(["lowest", "all", "top_k"])),
        "preset": draw(st.sampled_from(list(reference.PRESETS))),
    }
    if draw(st.booleans()):
        how |= {
            "repetition_penalty": draw(st.floats(0.5, 2, width=32)),
            "frequency_penalty": draw(st.floats(-2, 2, width=32)),
            "presence_penalty": draw(st.floats(-2, 2, width=32)),
            "prompt_ids": draw(histories(n)),
            "output_ids": draw(histories(n)),
            "bias": draw(
                st.dictionaries(st.integers(0, n - 1), st.one_of(st.just(-np.inf), st.floats(-5, 5)), max_size=4)
            ),
        }
    if draw(st.booleans()):
        how["mask"] = draw(arrays(np.bool_, st.integers(1, n + 40), fill=st.just(True)))
    if draw(st.booleans()):
        noise: dict[str, Any] = {"u": draw(st.floats(0, 1, exclude_max=True))}
    else:
        noise = {"seed": draw(st.integers(0, 2**64 - 1)), "step": draw(st.integers(0, 2**32 - 1))}
    return row, how, noise


@given(sampled())
def test_sample_is_the_reference(case: tuple[np.ndarray, dict[str, Any], dict[str, Any]]) -> None:
    row, how, noise = case
    token, kept, logprobs = reference.sample(row, **how, **noise)
    for isa in _dispatch.runnable():
        for exact in (False, True):
            _ops.set_force_exact(exact)
            try:
                with lanewise.using(isa):
                    got, support = lanewise.sample(row, **how, **noise, return_support=True, on_invalid="mark")
            finally:
                _ops.set_force_exact(False)
            assert (got, support.ids.tolist()) == (token, kept.tolist())
            assert support.logprobs.tobytes() == logprobs.tobytes()


@given(logits([*SPECIAL, float("inf")]), st.data())
def test_top_k_is_the_reference(row: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(row)))
    values, ids = reference.top_k(row, k)
    for isa in _dispatch.runnable():
        with lanewise.using(isa):
            got = lanewise.top_k(row, k)
            everything = lanewise.top_k(row, k, ties="all")[1]
        assert got[1].tolist() == ids.tolist() and got[0].tobytes() == values.tobytes()
        assert everything.tolist() == reference.descending(row)[: (row >= values[-1]).sum()].tolist()


@given(logits(UNORDERED), st.data())
def test_masks_and_renorms_are_the_reference(row: np.ndarray, data: st.DataObject) -> None:
    k, p = data.draw(st.integers(-1, len(row) + 2)), data.draw(st.floats(-0.1, 1.1))
    ties = {"ties": data.draw(st.sampled_from(["lowest", "all"]))}
    some = {"min_keep": data.draw(st.integers(0, 5))}
    warm = {"temperature": data.draw(st.one_of(st.sampled_from([0.0, 1.0, 1e-30, 1e31]), st.floats(1e-3, 10)))}
    calls: list[tuple[str, np.ndarray, float, dict[str, Any]]] = [
        ("top_k_mask", row, k, ties | some),
        ("top_p_mask", row, p, ties | some | warm),
        ("min_p_mask", row, min(max(p, 0), 1), some | warm),
        ("top_k_renorm", abs(row), k, ties),
        ("top_p_renorm", abs(row), p, ties),
        ("top_p_renorm", row, p, ties),
    ]
    for name, x, number, how in calls:
        want = getattr(reference, name)(x, number, **how).tobytes()
        for isa in _dispatch.runnable():
            with lanewise.using(isa):
                assert getattr(lanewise, name)(x, number, **how, on_invalid="mark").tobytes() == want, (name, isa)


@given(logits(UNORDERED))
def test_softmax_family_holds_together(row: np.ndarray) -> None:
    p, logp, lse = lanewise.softmax(row), lanewise.log_softmax(row), lanewise.logsumexp(row)
    if np.isnan(row).any() or np.isposinf(row).any() or np.isneginf(row).all():
        assert np.isnan(p).all() and np.isnan(logp).all()
        assert np.isnan(lse) == np.isnan(row).any()
        return
    assert p.sum(dtype=np.float64) == pytest.approx(1, abs=2e-6)
    assert (p >= 0).all() and (p[np.isneginf(row)] == 0).all()
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(np.exp(logp), p, rtol=2e-4, atol=1e-37)
        # lse is rounded at its own size
        np.testing.assert_allclose(row - lse, logp, rtol=1e-5, atol=1e-4 + abs(float(lse)) * 2.0**-22)


@given(logits(UNORDERED), st.floats(0, 5))
def test_an_axis_is_a_row(row: np.ndarray, temperature: float) -> None:
    block = np.stack([row, row[::-1]]).T.reshape(len(row), 1, 2)
    for op in (lanewise.softmax, lanewise.log_softmax):
        got = op(block, axis=0, temperature=temperature)
        assert got.shape == block.shape
        for i, one in enumerate((row, row[::-1])):
            assert got[:, 0, i].tobytes() == op(one, temperature=temperature).tobytes()
    assert lanewise.logsumexp(block, axis=0)[0, 1].tobytes() == lanewise.logsumexp(row[::-1]).tobytes()


@pytest.mark.slow
def test_sample_is_the_reference_at_length() -> None:
    for seed in range(20):
        compare_random(np.random.default_rng(seed), 1500)


BATCH = 500  # rows
SIZES = {1: 10, 3: 10, 17: 15, 64: 15, 65: 10, 130: 20, 500: 17, 4200: 2, 9000: 1}  # columns, and of a hundred batches


def random_batch(rng: np.random.Generator, n: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Rows that differ in all they may differ in, most of them with something that makes edges."""
    scale = rng.choice([0.01, 1, 5, 50], (BATCH, 1))
    rows = (rng.standard_normal((BATCH, n)) * scale).astype(np.float32)
    rows = np.where(rng.random((BATCH, 1)) < 0.4, np.round(rows), rows)
    rows[rng.random((BATCH, n)) < rng.choice([0, 0, 0, 0.5, 0.99], (BATCH, 1))] = -np.inf
    rows = rows.astype(rng.choice([np.float32, np.float32, np.float16]))
    how: dict[str, Any] = {
        "temperature": rng.choice([0, 0.1, 0.7, 1, 1.5, 1e-20, 1e31], BATCH),
        "top_k": rng.choice([0, 0, 1, 3, 50, n // 64 + 1, n - 1], BATCH),
        "top_p": rng.choice([1, 1, 0, 0.1, 0.5, 0.9, 0.99, 1e-12, 1 - 1e-12], BATCH),
        "min_p": rng.choice([0, 0, 0.01, 0.1, 1], BATCH),
        "min_keep": rng.choice([1, 1, 1, 3], BATCH),
        "ties": str(rng.choice(["lowest", "lowest", "all", "top_k"])),
        "preset": str(rng.choice(list(reference.PRESETS))),
        "seed": int(rng.integers(2**63)),
        "step": int(rng.integers(2**32)),
    }
    if rng.random() < 0.4:
        ids = rng.integers(-1, n, (BATCH, 12))
        how |= {"prompt_ids": ids, "output_ids": ids[:, ::2], "repetition_penalty": rng.choice([0.7, 1, 1.3], BATCH)}
        how |= {"frequency_penalty": rng.choice([0, 0.3], BATCH), "bias": {int(i): 2.5 for i in rng.integers(0, n, 3)}}
    if rng.random() < 0.4:
        how["mask"] = rng.random((BATCH, n)) < rng.choice([0.05, 0.5, 0.95], (BATCH, 1))
    return rows, how


@pytest.mark.slow
def test_the_fast_path_is_the_exact_one_a_million_times() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1_000_000 // BATCH):
        n = int(rng.choice(list(SIZES), p=np.array(list(SIZES.values())) / 100))
        rows, how = random_batch(rng, n)
        results = []
        for isa in _dispatch.runnable():
            with lanewise.using(isa):
                for exact in (False, True):
                    _ops.set_force_exact(exact)
                    try:
                        results.append(lanewise.sample(rows, **how, on_invalid="mark").tobytes())
                    finally:
                        _ops.set_force_exact(False)
        assert len(set(results)) == 1, (rows.shape, rows.dtype, how)


def compare_random(rng: np.random.Generator, count: int) -> None:
    for _ in range(count):
        n = int(rng.choice([1, 2, 5, 16, 17, 63, 64, 65, 100, 1000, 5000, 20000]))
        row = (rng.standard_normal(n) * rng.choice([0.01, 1, 5, 50])).astype(np.float32)
        row = np.round(row) if rng.random() < 0.4 else row
        row[rng.random(n) < rng.choice([0, 0, 0.5, 0.99])] = -np.inf
        how = {
            "temperature": float(rng.choice([0, 0.1, 0.7, 1, 1.5, 1e-20, 1e31])),
            "top_k": int(rng.choice([0, 1, 3, 50, n, n - 1])),
            "top_p": float(rng.choice([1, 0, 0.1, 0.5, 0.9, 0.999, 1e-12, 1 - 1e-12])),
            "min_p": float(rng.choice([0, 0, 0.01, 0.1, 1])),
            "min_keep": int(rng.choice([1, 1, 3])),
            "ties": str(rng.choice(["lowest", "all", "top_k"])),
            "preset": str(rng.choice(list(reference.PRESETS))),
            "seed": int(rng.integers(2**63)),
            "step": int(rng.integers(2**32)),
        }
        token, kept, _ = reference.sample(row, **how)
        for isa in _dispatch.runnable():
            with lanewise.using(isa):
                got, support = lanewise.sample(row, **how, return_support=True, on_invalid="mark")
            assert (got, support.ids.tolist()) == (token, kept.tolist()), (isa, n, how)
