"""Every Case on every ISA that runs here: bits equal to the scalar ISA, the scalar ISA equal to the reference."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pytest

import lanewise
from lanewise import _dispatch, _ops

from cases import ATTENTION, CASES, DTYPES, KV, SIZES, TRANSFER, Case
from guarded import Guarded

ISAS = _dispatch.runnable()
FEW = (1, 17, 64, 1000, 4099, 40001)
BY_NAME = {case.name: case for case in CASES}
# At the largest size these are slow: their rows are short, however many; or they read a long one as sample does.
SMALL = {case.name for case in ATTENTION + KV + TRANSFER}
AS_SAMPLE = {"verify", "sample_n", "chain", "beam_step", "verify_draft", "top_k_renorm", "top_p_renorm"}


@functools.lru_cache(maxsize=1)  # the next test is of the same
def runs(case: Case, n: int, dtype: str) -> tuple[np.ndarray, list[dict[str, Any]]]:
    rng = np.random.default_rng([n, len(case.name), *map(ord, dtype)])
    x = case.inputs(rng, n, DTYPES[dtype])
    x.flags.writeable = False
    return x, case.settings(n)


def run_guarded(case: Case, x: np.ndarray, settings: dict[str, Any], at_end: bool) -> dict[str, np.ndarray]:
    guarded = Guarded(at_end)
    placed = guarded.place(x)
    got = case.run(placed, settings, guarded)
    guarded.check()
    assert placed.tobytes() == x.tobytes(), "a kernel wrote to its input"
    return {name: np.array(array) for name, array in got.items()}


@functools.cache
def scalar_results(name: str, n: int, dtype: str) -> list[dict[str, np.ndarray]]:
    x, settings = runs(BY_NAME[name], n, dtype)
    with lanewise.using("scalar"):
        return [run_guarded(BY_NAME[name], x, s, at_end=i % 2 == 1) for i, s in enumerate(settings)]


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray], what: Any) -> None:
    assert got.keys() == want.keys()
    for name in want:
        a, b = got[name], want[name]
        assert a.dtype == b.dtype and a.shape == b.shape, (what, name, a.dtype, b.dtype, a.shape, b.shape)
        if a.tobytes() != b.tobytes():
            at = np.flatnonzero(a.reshape(-1).view(f"u{a.itemsize}") != b.reshape(-1).view(f"u{b.itemsize}"))
            raise AssertionError(
                f"{what}: {name}[{at[0]}] is {a.flat[at[0]]!r}, not {b.flat[at[0]]!r} ({len(at)} differ)"
            )


def parameters(
    names: Iterable[str] = BY_NAME,
    halves: Collection[int] = FEW,
    native: Collection[int] = (),
    slow_sizes: Collection[int] = (),
) -> list[Any]:
    """Cases at every size and dtype; float16 and bfloat16 are slow beside some sizes, since test_replay.py compares the
    bits at all up to 1000 on every ISA."""

    def marks(name: str, n: int, dtype: str) -> list[pytest.MarkDecorator]:
        slow = (dtype != "f32" and n not in halves) or (n == SIZES[-1] and name in SMALL | AS_SAMPLE) or n in slow_sizes
        return [pytest.mark.slow] * slow + [pytest.mark.native] * (n in native)

    return [
        pytest.param(BY_NAME[name], n, dtype, id=f"{name}-{n}-{dtype}", marks=marks(name, n, dtype))
        for name in names
        for n in SIZES
        for dtype in BY_NAME[name].dtypes
    ]


def last_alone(n: int, dtype: str) -> bool:
    """Where the reference is slow, it is beside the last settings here and beside the others in a slow test."""
    return n == SIZES[-1] or (n > 5000 and dtype != "f32")


BESIDE_BOUNDARIES = (15, 16, 31, 32, 63, 127)  # where ISAs differ, if they do: the reference has 17, 33, 64 and 65


@pytest.mark.parametrize(
    ("case", "n", "dtype"),
    parameters(halves=(17, 1000, 40001), native={*SIZES} - {*FEW}, slow_sizes=BESIDE_BOUNDARIES),
)
def test_scalar_agrees_with_the_reference(case: Case, n: int, dtype: str) -> None:
    assert_agrees(case, n, dtype, slice(-1 if last_alone(n, dtype) else None, None))


def others() -> list[Any]:
    cells = ((param, *param.values) for param in parameters())
    return [param for param, case, n, dtype in cells if last_alone(n, dtype) and len(case.settings(n)) > 1]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "n", "dtype"), others())
def test_scalar_agrees_with_the_reference_in_other_settings(case: Case, n: int, dtype: str) -> None:
    assert_agrees(case, n, dtype, slice(-1))


def assert_agrees(case: Case, n: int, dtype: str, which: slice) -> None:
    x, settings = runs(case, n, dtype)
    wide = x if case.name == "widen" or x.dtype == np.float64 else x.astype(np.float32)
    results = scalar_results(case.name, n, dtype)
    assert len(results) == len(settings)
    for s, got in zip(settings[which], results[which], strict=True):
        want = case.reference(wide, s)
        for name in want:
            if case.tolerance is None or want[name].dtype.kind in "iu":
                assert_same({name: got[name]}, {name: want[name].astype(got[name].dtype)}, (n, s))
                continue
            finite = np.isfinite(want[name])
            np.testing.assert_array_equal(got[name][~finite], want[name][~finite].astype(np.float32))
            with np.errstate(invalid="ignore"):
                error, allowed = np.abs(got[name] - want[name]), case.tolerance(wide, s, want[name])
            assert (error <= allowed)[finite].all(), (n, s, name, np.nanmax((error / allowed)[finite]))
        assert got.keys() == want.keys()


@pytest.mark.parametrize("isa", ISAS[:-1] or ISAS)  # scalar is the last; with itself only where it is alone
@pytest.mark.parametrize(("case", "n", "dtype"), parameters())
def test_bits_equal_scalar(case: Case, n: int, dtype: str, isa: str) -> None:
    x, settings = runs(case, n, dtype)
    results = scalar_results(case.name, n, dtype)
    with lanewise.using(isa):
        for i, (s, want) in enumerate(zip(settings, results, strict=True)):
            assert_same(run_guarded(case, x, s, at_end=i % 2 == 0), want, (isa, n, s))


TWO_PATHS = (
    "top_k",
    "sample",
    "top_k_mask",
    "top_p_mask",
    "min_p_mask",
    "top_k_renorm",
    "logprobs",
    "chain",
    "beam_step",
    "verify_draft",
)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("case", "n", "dtype"), parameters(TWO_PATHS))
def test_exact_path_equals_fast_path(case: Case, n: int, dtype: str, isa: str) -> None:
    x, settings = runs(case, n, dtype)
    results = scalar_results(case.name, n, dtype)
    _ops.set_force_exact(True)
    try:
        with lanewise.using(isa):
            for i, (s, want) in enumerate(zip(settings, results, strict=True)):
                assert_same(run_guarded(case, x, s, at_end=i % 2 == 1), want, (isa, n, s))
    finally:
        _ops.set_force_exact(False)


@pytest.mark.parametrize("case", [case for case in CASES if case.inputs.__name__ == "make"], ids=lambda case: case.name)
@pytest.mark.parametrize("n", [n for n in SIZES if n <= 1000])
def test_a_row_alone_is_the_row_in_a_batch(case: Case, n: int) -> None:
    x, settings = runs(case, n, "f32")
    for s in settings:
        batch = case.run(x, s, np.empty)
        for r in range(len(x)):
            alone = case.run(x[r : r + 1], s, np.empty)
            if "indptr" in batch:
                own = slice(*batch["indptr"][r : r + 2])
                want = {
                    "tokens": batch["tokens"][r : r + 1],
                    "ids": batch["ids"][own],
                    "logprobs": batch["logprobs"][own],
                    **{name: array[r : r + 1] for name, array in batch.items() if name == "state"},
                }
                alone.pop("indptr")
            else:
                want = {name: array[r : r + 1] for name, array in batch.items()}
            if "ties" in s and case.name == "top_k":  # the widest row decides how wide a batch is
                want = {name: array[:, : alone[name].shape[1]] for name, array in want.items()}
            assert_same(alone, want, (n, r, s))


def test_every_operation_has_a_case() -> None:
    floors = {name for name, group in _ops.GROUPS.items() if group == "floors"}
    assert {case.name for case in CASES} == set(_ops.NAMES) - floors
