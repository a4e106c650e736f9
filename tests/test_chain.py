"""Programs of sampling steps: every path beside the reference, rows beside one another, laws of draws, bad input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import lanewise
from lanewise import _dispatch, _ops, reference
from lanewise._program import CODES, LAST, STEPS
from lanewise.chain import Program, run_chain

from laws import chi_square

ISAS = _dispatch.runnable()

SOME = [
    *[("temperature", t) for t in (0.0, 0.05, 0.8, 1.7)],
    *[("top_k", 1), ("top_k", 40), ("top_k", 3, "all"), ("top_k", 0)],
    *[("top_p", 0.9), ("top_p", 0.5, 4), ("top_p", 0.7, 1, "all"), ("top_p", 0.0)],
    *[("min_p", 0.05), ("min_p", 0.5, 5), ("min_p", 1)],
    *[("dynamic_temperature", 1, 0.5), ("dynamic_temperature", 1.2, 1.2, 2), ("dynamic_temperature", 0.9, 0)],
    *[("quadratic", 0.3), ("quadratic", 0.2, 2.0), ("quadratic", 0)],
    *[("typical", 0.9), ("typical", 0.3), ("typical", 0.1), ("typical", 0.6, 7)],
    *[("epsilon", 3e-3), ("epsilon", 0.2, 3), ("eta", 3e-3), ("eta", 0.1, 2)],
    *[("top_h", 0.4), ("top_h", 1), ("top_a", 0.2), ("top_a", 1)],
    *[("tail_free", 0.9), ("tail_free", 0.5, 3), ("top_n_sigma", 1.0), ("top_n_sigma", 2.5, 1)],
    *[("xtc", 1, 0.02), ("xtc", 0.5, 0.1), ("xtc", 1, 0.001, 3), "renormalise"],
]
ENDS: list[Any] = [
    *[("mirostat_v2", 5, 0.1), ("mirostat_v2", 1.0, 0.3), ("mirostat", 3, 0.1), ("mirostat", 5, 0.2, 10)],
    *[("adaptive_p", 0.3), ("adaptive_p", -1.0), ("adaptive_p", 0.05, 0.5), None, None],
]


def any_row(rng: np.random.Generator, n: int) -> np.ndarray:
    z = rng.standard_normal(n)
    rows = (
        rng.normal(3, 7) + 3.4 * (z + 0.25 * np.maximum(z - 1.5, 0) ** 2),
        np.round(z),
        np.full(n, -3.25),
        np.where(rng.random(n) < 0.2, 3 * z, -np.inf),
        rng.choice([0.0, -0.0, 1e-40, -1e-40, 1e-45, -87.3, -87.4, -104.0, -1e30, -np.inf, 3.5], n),
        8 * z,
    )
    return rows[rng.integers(len(rows))].astype(np.float32)


def any_program(rng: np.random.Generator) -> Program:
    end = ENDS[rng.integers(len(ENDS))]
    return Program([*(SOME[i] for i in rng.integers(len(SOME), size=rng.integers(1, 5))), *([end] if end else [])])


@pytest.fixture
def ways() -> Iterator[Any]:
    """Every ISA, lazily and exactly."""

    def each() -> Iterator[tuple[str, bool]]:
        for isa in ISAS:
            for exact in (False, True):
                _ops.set_force_exact(exact)
                with lanewise.using(isa):
                    yield isa, exact

    yield each
    _ops.set_force_exact(False)


@pytest.mark.parametrize(
    ("seed", "trials"), [(1, 150), pytest.param(2, 5000, marks=[pytest.mark.slow, pytest.mark.native])]
)
def test_any_program_on_any_row_is_the_reference(seed: int, trials: int, ways: Any) -> None:
    rng = np.random.default_rng(seed)
    for trial in range(trials):
        n = int(rng.choice([1, 2, 5, 17, 64, 65, 300, 1000, 4099]))
        row, program, told = any_row(rng, n), any_program(rng), {}
        if rng.random() < 0.4:
            told = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "output_ids": rng.integers(0, n, 5).tolist()}
        if rng.random() < 0.3:
            told["mask"] = np.arange(n) % 7 != 3
        ids, values = rng.integers(0, n, 3).tolist(), rng.normal(size=3).astype(np.float32)
        start = program.state if rng.random() < 0.5 else np.array([rng.normal(3, 2), rng.uniform(1, 10)])
        draw = {"seed": trial, "step": 2}
        want = reference.chain(
            row, program, state=start, key=9, added=list(zip(ids, values, strict=True)), **draw, **told
        )
        for way in ways():
            state = start.copy()
            token, support = run_chain(
                row,
                program,
                state=state,
                added=(ids, values),
                keys=[9],
                return_support=True,
                on_invalid="mark",
                **draw,
                **told,
            )
            got = token, support.ids.tolist(), support.logprobs.tobytes(), tuple(state)
            assert got == (want[0], want[1].tolist(), want[2].tobytes(), want[3]), (way, trial, n, program)


def test_every_step_is_tried() -> None:
    names = {step if isinstance(step, str) else step[0] for step in [*SOME, *ENDS] if step}
    assert names == set(STEPS) == set(CODES)


# ---- beside others ----


def test_programs_of_the_steps_of_sample_draw_what_sample_draws() -> None:
    rng = np.random.default_rng(3)
    rows = np.stack([any_row(rng, 3000) for _ in range(40)])
    numbers = {"temperature": 0.7, "top_k": 60, "top_p": 0.9, "min_p": 0.02}
    for preset, order in reference.PRESETS.items():
        for left_out in ((), ("top_k",), ("top_k", "min_p"), ("top_k", "top_p"), ("top_p",)):
            told = {name: number for name, number in numbers.items() if name not in left_out}
            program = Program([(name, told[name]) for name in order if name in told])
            want = lanewise.sample(rows, preset=preset, seed=1, step=0, on_invalid="mark", **told)
            assert run_chain(rows, program, seed=1, step=0, on_invalid="mark").tolist() == want.tolist()


def test_rows_have_programs_of_their_own_and_do_not_touch_one_another() -> None:
    rng = np.random.default_rng(4)
    rows = np.stack([any_row(rng, 700) for _ in range(24)])
    programs = [any_program(rng) for _ in range(8)] * 3
    rows[5], rows[9, 3], rows[13, 0] = -np.inf, np.nan, np.inf
    added = rng.integers(0, 700, 48), rng.normal(size=48), np.arange(25) * 2
    start = np.array([program.state for program in programs])
    states = start.copy()
    tokens, support = run_chain(
        rows, programs, state=states, added=added, seed=1, step=0, return_support=True, on_invalid="mark"
    )
    assert (tokens[[5, 9, 13]] == -1).all()
    assert (states[[5, 9, 13]] == start[[5, 9, 13]]).all()
    for i, (row, program) in enumerate(zip(rows, programs, strict=True)):
        state, own = start[i].copy(), slice(2 * i, 2 * i + 2)
        told = {"state": state, "added": (added[0][own], added[1][own]), "seed": 1, "step": 0, "keys": [i]}
        token, alone = run_chain(row, program, return_support=True, on_invalid="mark", **told)
        assert (token, state.tolist()) == (tokens[i], states[i].tolist())
        assert alone.ids.tolist() == support.ids[support.indptr[i] : support.indptr[i + 1]].tolist()
    _ops.set_crossover(1)
    try:
        again = start.copy()
        shared = run_chain(rows, programs, state=again, added=added, seed=1, step=0, on_invalid="mark")
    finally:
        _ops.set_crossover(None)
    assert shared.tolist() == tokens.tolist()
    assert again.tolist() == states.tolist()


def test_an_invalid_row_is_an_error_after_the_others_are_done() -> None:
    rows, out = np.zeros((3, 5), np.float32), np.zeros(3, np.int64)
    rows[1] = -np.inf
    with pytest.raises(lanewise.InvalidLogitsError) as caught:
        run_chain(rows, Program([("temperature", 0.0)]), out=out)
    assert caught.value.rows == [1]
    assert out.tolist() == [0, -1, 0]
    with pytest.raises(lanewise.InvalidLogitsError):
        run_chain(rows[1], Program([]))
    assert run_chain(rows[:0], []).shape == (0,)


# ---- what is exact ----


@pytest.mark.parametrize("n", [4, 64, 4096])
def test_a_share_that_is_met_exactly_is_met(n: int, ways: Any) -> None:
    """Where sums that are only close cannot tell."""
    row = np.float32([0.0] * n + [-np.inf])
    for way in ways():

        def kept(*steps: Any) -> int:
            return len(run_chain(row, Program(steps), seed=0, step=0, return_support=True)[1].ids)

        assert kept(("epsilon", 1 / n)) == n, way
        assert kept(("epsilon", math.nextafter(1 / n, 1))) == 1, way
        assert kept(("mirostat_v2", math.log2(n) / 2 + 1e-9, 0.1)) == n, way
        assert kept(("typical", 0.5)) == n / 2, way
        assert kept(("top_a", 1.0)) == n, way
        assert kept(("xtc", 1, 1 / n)) == (1 if n > 1 else n), way
        assert kept(("top_p", 0.75)) == 3 * n / 4, way


def test_typical_keeps_the_nearest_on_both_sides(ways: Any) -> None:
    p = np.float64([0.4, 0.2, 0.2, 0.1, 0.05, 0.05])
    for way in ways():
        _, support = run_chain(
            np.log(p).astype(np.float32), Program([("typical", 0.45)]), seed=0, step=0, return_support=True
        )
        nearest = np.argsort(np.abs(-np.log(p) + (p * np.log(p)).sum()), kind="stable")
        count = int(np.searchsorted(np.cumsum(p[nearest]), 0.45)) + 1
        assert support.ids.tolist() == sorted(nearest[:count].tolist()), way


# ---- laws ----


@pytest.mark.parametrize(
    "steps",
    [
        [("xtc", 1, 0.2), ("temperature", 1.5)],
        [("typical", 0.7)],
        [("adaptive_p", 0.2)],
        [("quadratic", 0.5), ("min_p", 0.05)],
        [("temperature", 0.8), ("mirostat_v2", 1.2, 0.1)],
    ],
    ids=lambda steps: steps[0][0],
)
def test_draws_follow_the_law_of_what_is_left(steps: list[Any]) -> None:
    row, count = np.log(np.float32([0.3, 0.25, 0.15, 0.12, 0.1, 0.05, 0.03])), 4000
    rows, program = np.broadcast_to(row, (count, len(row))), Program(steps)
    _, support = run_chain(row, program, seed=0, step=0, return_support=True)
    tokens = run_chain(rows, program, seed=1, step=0)
    seen = np.bincount(tokens, minlength=len(row))
    assert seen.sum() == seen[support.ids].sum()
    assert len(support.ids) > 1
    assert chi_square(seen[support.ids], np.exp(support.logprobs.astype(np.float64))) > 1e-4


def test_xtc_acts_as_often_as_it_is_told_and_by_coins_of_its_own() -> None:
    row, program = np.float32([3.0, 2.9, 0.0]), Program([("xtc", 0.3, 0.1), ("xtc", 0.3, 0.1), ("temperature", 0.0)])
    tokens = run_chain(np.broadcast_to(row, (4000, 3)), program, seed=2, step=0)
    assert 0.51 - 0.03 < np.mean(tokens == 1) < 0.51 + 0.03  # 1 - 0.7^2


@pytest.mark.parametrize("step", [("mirostat_v2", 3.0, 0.1), ("mirostat", 3.0, 0.1)], ids=lambda step: step[0])
def test_mirostat_learns_to_surprise_as_told(step: Any) -> None:
    program, rng = Program([step]), np.random.default_rng(5)
    row = (2 * rng.standard_normal(2000)).astype(np.float32)
    state, surprises = program.state.copy(), []
    assert state.tolist() == [6.0, 0.0]
    for i in range(600):
        before = state[0]
        run_chain(row, program, state=state, seed=7, step=i)
        surprises.append(3.0 + (before - state[0]) / 0.1)
    assert abs(np.mean(surprises[100:]) - 3.0) < 0.1


def test_adaptive_p_learns_to_take_what_is_as_likely_as_told() -> None:
    row, program = np.log(np.float32([0.5, 0.3, 0.12, 0.05, 0.03])), Program([("adaptive_p", 0.3, 0.9)])
    state, taken = program.state.copy(), []
    assert state.tolist() == pytest.approx([3.0, 10.0])
    for i in range(600):
        taken.append(np.exp(row[run_chain(row, program, state=state, seed=7, step=i)]))
    assert abs(np.mean(taken) - 0.3) < 0.03


# ---- what is told ----


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ([("top_q", 1)], ValueError, r"step 0: no step is called 'top_q'"),
        ([("top_k", 1.5)], TypeError, r"step 0 \('top_k'\): k must be an integer, got 1.5"),
        ([("top_k", 4, "some")], ValueError, r"ties must be 'lowest' or 'all', got 'some'"),
        ([("top_k", 4, {"k": 4})], ValueError, r"k is given twice"),
        ([("top_k", {"j": 4})], ValueError, r"has no 'j'"),
        (["top_k"], ValueError, r"step 0 \('top_k'\) needs k"),
        ([("temperature", 1, 2)], ValueError, r"takes 1 numbers, got 2"),
        ([("temperature", 0.5), ("temperature", -0.1)], ValueError, r"step 1 .* must be in \[0, .*, got -0.1"),
        ([("temperature", math.nan)], ValueError, r"temperature must be in .*, got nan"),
        ([("temperature", "1")], TypeError, r"temperature must be a number, got '1'"),
        ([("top_p", math.nan)], ValueError, r"p must be in .*, got nan"),
        ([("min_p", 1.5)], ValueError, r"p must be in \[0, 1\], got 1.5"),
        ([("min_p", 0.5, -1)], ValueError, r"min_keep must be in \[0, .*\], got -1"),
        ([("quadratic", 1, 4)], ValueError, r"curve must be in \[1, 3\], got 4"),
        (
            [("mirostat_v2", 5, 0.1), ("top_k", 3)],
            ValueError,
            r"step 0 \('mirostat_v2'\) draws, so it must be the last",
        ),
        ([7], TypeError, r"step 0 must be a name and its numbers"),
    ],
)
def test_programs_say_what_is_wrong_with_them(steps: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Program(steps)


def test_programs_are_values() -> None:
    import pickle

    program = Program([("top_k", 40), ["xtc", {"threshold": 0.1, "probability": 0.5}], ("adaptive_p", 0.3)])
    assert program == Program([("top_k", 40, "lowest"), ("xtc", 0.5, 0.1, 1), ("adaptive_p", 0.3, 0.9)])
    assert pickle.loads(pickle.dumps(program)) == program
    assert len({program, Program(program.steps), Program([])}) == 2
    assert all(program.codes[-1, 0] in map(CODES.get, LAST) for program in [program])


ROWS = np.zeros((2, 8), np.float32)


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({"programs": [Program([])]}, ValueError, r"programs must be one or one a row: 2 rows, got 1"),
        ({"programs": ("top_k", 3)}, TypeError, r"programs must be a Program, or a list of them"),
        ({"state": np.zeros((2, 2), np.float32)}, TypeError, r"state must be a float64 array, got float32"),
        ({"state": np.zeros((2, 3))}, ValueError, r"state must be C-contiguous, of shape \(2, 2\), got \(2, 3\)"),
        ({"state": np.float64([[0, 0], [0, np.nan]])}, ValueError, r"state\[1, 1\] is nan"),
        ({"state": np.frombuffer(bytes(32)).reshape(2, 2)}, ValueError, r"state is read-only"),
        ({"added": ([0], [1.0])}, TypeError, r"added must be \(ids, values, offsets\)"),
        ({"added": ([8], [1.0], [0, 1, 1])}, ValueError, r"added: ids\[0\] is 8, not an id in 0..7"),
        ({"added": ([2**63], [1.0], [0, 1, 1])}, ValueError, r"added: ids\[0\]"),
        ({"added": ([1.0], [1.0], [0, 1, 1])}, TypeError, r"added\[0\] must be integers"),
        ({"added": ([1], [np.nan], [0, 1, 1])}, ValueError, r"added: values\[0\] is nan"),
        ({"added": ([1], [1.0], [0, 2, 1])}, ValueError, r"added: offsets must rise from 0 to 1 in 3 entries"),
        ({"added": ([1], [1.0, 2.0], [0, 1, 1])}, ValueError, r"ids and values must be \(n,\) each"),
        ({"vocab_size": 9}, ValueError, r"vocab_size"),
        ({"seed": 1}, ValueError, r"seed needs step="),
        ({"on_invalid": "ignore"}, ValueError, r"on_invalid"),
    ],
)
def test_calls_say_what_is_wrong_with_them(told: dict[str, Any], error: type[Exception], message: str) -> None:
    out = np.full(2, 7)
    with pytest.raises(error, match=message):
        run_chain(ROWS, **{"programs": Program([]), "out": out, **told})
    assert out.tolist() == [7, 7]
