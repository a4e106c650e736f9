"""Sampler: each step beside a few lines of NumPy, rows beside themselves alone, and what sequences remember."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import pickle
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import lanewise
from lanewise import InvalidLogitsError, Sampler, SamplingParams, _ops, reference, steps
from lanewise._plan import groups, program_of, unpacked
from lanewise.chain import Program

INF = np.inf
VOCAB = 40


def row_of(seed: int, vocab: int = VOCAB) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def text_of(seed: int, length: int, vocab: int = 12) -> list[int]:
    """Of few ids, so that it repeats itself."""
    return np.random.default_rng([7, seed]).integers(0, vocab, length).tolist()


def followed(
    found: Sequence[steps.Step], row: np.ndarray, prompt: Sequence[int] = (), output: Sequence[int] = (), **call: Any
) -> np.ndarray:
    """The row that is left by steps, seen by one behind them."""
    seen = []

    def look(ids: np.ndarray, given: np.ndarray) -> np.ndarray:
        assert ids.tolist() == [*prompt, *output]
        seen.append(given.copy())
        return np.zeros_like(given)

    sampler = Sampler([*found, steps.Custom(look)], seed=1)
    sampler.add(0, prompt, output_ids=output)
    sampler(row, **call)
    return seen[0]


# ---- edits, beside a few lines each ----

TEXTS = [([], []), ([3], []), (text_of(0, 7), text_of(1, 0)), (text_of(2, 9), text_of(3, 30)), ([], text_of(4, 25))]


def over(which: str, prompt: list[int], output: list[int], last_n: int | None = None) -> list[int]:
    ids = {"both": prompt + output, "output": output, "prompt": prompt}[which]
    return ids if last_n is None else ids[len(ids) - min(last_n, len(ids)) :]


def penalised(z: np.ndarray, prompt: list[int], output: list[int], step: steps.Penalties) -> np.ndarray:
    z = z.copy()
    seen, counted = over(step.over, prompt, output, step.last_n), over(step.counts_over, prompt, output, step.last_n)
    f, p, r = np.float32(step.frequency), np.float32(step.presence), np.float32(step.repetition)

    def counts(v: np.float32, i: int) -> np.float32:
        n = np.float32(counted.count(i))
        if not n:
            return v
        if step.away:
            v = v - p if v >= 0 else v + p
            return v - f * n if v >= 0 else v + f * n
        return v - (f * n + p) if step.summed else v - f * n - p

    for i in dict.fromkeys(seen + counted):
        if step.repetition_last:
            z[i] = counts(z[i], i)
        if i in seen:
            z[i] = z[i] / r if z[i] > 0 else z[i] * r
        if not step.repetition_last:
            z[i] = counts(z[i], i)
    return z


@pytest.mark.parametrize(
    "step",
    [
        steps.Penalties(1.3),
        steps.Penalties(0.7, 0.4, 0.2),
        steps.Penalties(1.2, 0.3, 0.1, over="output"),
        steps.Penalties(1.2, 0.3, 0.1, last_n=8, counts_over="both"),
        steps.Penalties(1.2, 0.3, 0.1, last_n=0),
        steps.Penalties(1.2, 0.3, 0.1, repetition_last=True),
        steps.Penalties(1.2, 0.3, 0.1, summed=True, counts_over="both"),
        steps.Penalties(1.2, 0.3, 0.1, away=True),
        steps.Penalties(1.0, 0.0, -0.5, counts_over="prompt"),
    ],
    ids=str,
)
def test_penalties(step: steps.Penalties) -> None:
    for seed, (prompt, output) in enumerate(TEXTS):
        row = row_of(seed)
        assert followed([step], row, prompt, output).tobytes() == penalised(row, prompt, output, step).tobytes()


def test_penalties_are_those_of_sample() -> None:
    row, prompt, output = row_of(1), text_of(2, 9), text_of(3, 30)
    told = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1}
    mine = followed([steps.Penalties(1.2, 0.3, 0.1)], row, prompt, output)
    assert mine.tobytes() == lanewise.apply_penalties(row, prompt_ids=prompt, output_ids=output, **told).tobytes()


def test_penalties_that_fade() -> None:
    """Walked from the end, as exllamav2 has it: full for last_n ids, then linearly less over `decay`."""
    step = steps.Penalties(1.5, 0.4, 0.3, last_n=5, decay=10)
    for seed, (prompt, output) in enumerate(TEXTS):
        row, text = row_of(seed), prompt + output
        z, done = row.copy(), set()
        strength = [np.float32(v) for v in (1.5, 0.4, 0.3)]
        for back, i in enumerate(reversed(text)):
            if back >= 15:
                break
            if i not in done:
                z[i] = (z[i] / strength[0] if z[i] > 0 else z[i] * strength[0]) - strength[2]
                done.add(i)
            z[i] -= strength[1]
            if back >= 5:
                goals = zip(strength, (1.5, 0.4, 0.3), (1.0, 0.0, 0.0), strict=True)
                strength = [np.float32(s + (np.float32(to) - np.float32(was)) / np.float32(10)) for s, was, to in goals]
        np.testing.assert_allclose(followed([step], row, prompt, output), z, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("which", ["both", "output"])
def test_no_repeat_ngram(n: int, which: str) -> None:
    for seed, (prompt, output) in enumerate(TEXTS):
        row, text = row_of(seed), over(which, prompt, output)
        end = text[len(text) - n + 1 :]
        banned = {text[i + n - 1] for i in range(len(text) - n + 1) if text[i : i + n - 1] == end}
        wanted = row.copy()
        wanted[sorted(banned)] = -INF
        assert np.array_equal(followed([steps.NoRepeatNgram(n, which)], row, prompt, output), wanted)


@pytest.mark.parametrize("ids", [None, text_of(9, 20)])
def test_encoder_steps(ids: list[int] | None) -> None:
    for seed, (prompt, output) in enumerate(TEXTS):
        row, source, text = row_of(seed), prompt if ids is None else ids, prompt + output
        wanted = row.copy()
        for i in set(source):
            wanted[i] = row[i] / np.float32(1 / 1.7) if row[i] > 0 else row[i] * np.float32(1 / 1.7)
        assert np.array_equal(followed([steps.EncoderRepetition(1.7, ids)], row, prompt, output), wanted)
        end = text[len(text) - 1 :]
        banned = [source[i + 1] for i in range(len(source) - 1) if source[i : i + 1] == end]
        wanted = row.copy()
        wanted[banned] = -INF
        assert np.array_equal(followed([steps.EncoderNoRepeatNgram(2, ids)], row, prompt, output), wanted)


def test_biases_and_bans() -> None:
    row, prompt, output = row_of(5), [1, 2], [3, 4, 3]
    sequences = {(7,): 1.5, (4, 3, 8): -2.0, (1, 2, 3, 4, 3, 9): 0.25, (0, 4, 3, 9): 9.0, (4, 3, 7): 0.5, (9,): -INF}
    wanted = row.copy()
    wanted[7] += np.float32(2.0)
    wanted[8] += np.float32(-2.0)
    wanted[9] = -INF
    assert np.array_equal(followed([steps.SequenceBias(sequences)], row, prompt, output), wanted)
    words = steps.BadWords([[3, 8], [2, 3, 4, 3, 9], [5], [11]], eos_ids=[11])
    wanted = row.copy()
    wanted[[8, 9, 5]] = -INF
    assert np.array_equal(followed([words], row, prompt, output), wanted)
    wanted[9] = row[9]  # its beginning is in the prompt
    of_output = steps.BadWords(words.words, "output", words.eos_ids)
    assert np.array_equal(followed([of_output], row, prompt, output), wanted)
    wanted = row.copy()
    wanted[0] += np.float32(1.25)
    wanted[30] = -INF
    assert np.array_equal(followed([steps.LogitBias({0: 1.25, 30: -INF})], row, prompt, output), wanted)
    wanted = row.copy()
    wanted[[2, 20]] = -INF
    assert np.array_equal(followed([steps.Suppress([2, 20])], row, prompt, output), wanted)


def banned(found: steps.Step, prompt: list[int], output: list[int]) -> bool:
    return bool(np.isinf(followed([found], row_of(0), prompt, output)[2]))


def test_lengths() -> None:
    for n in range(6):
        assert banned(steps.MinTokens(3, [2]), [1, 1], [1] * n) == (n < 3)
        assert banned(steps.MinTokens(3, 2, "both"), [1, 1], [1] * n) == (n < 1)
        assert banned(steps.SuppressAtBegin([2]), [1], [1] * n) == (n == 0)
        assert banned(steps.SuppressAtBegin([2], 3, "both"), [1], [1] * n) == (n == 2)
    row = row_of(3)
    for n in range(6):
        wanted = row.copy()
        if n > 2:
            for i in (4, 5):
                wanted[i] += abs(row[i]) * np.float32(1.3 ** (n - 2) - 1)
        decay = steps.LengthDecay(2, 1.3, [4, 5])
        np.testing.assert_allclose(followed([decay], row, [1], [1] * n), wanted, rtol=3e-7)


def test_forced_ids() -> None:
    def tokens(step: steps.Step, prompt: list[int], n: int) -> list[int]:
        sampler = Sampler([step, steps.Temperature(0.7)], seed=3)
        sampler.add(0, prompt)
        return [sampler(row_of(9)) for _ in range(n)]

    free = tokens(steps.LogitBias({}), [5], 6)
    forced = tokens(steps.ForcedIds({1: 30, 4: [31, 32]}), [5], 6)
    assert forced[1] == 30 and forced[4] in (31, 32)
    assert [forced[i] for i in (0, 2, 3, 5)] == [free[i] for i in (0, 2, 3, 5)]  # the noise of a step is its own
    assert tokens(steps.ForcedBOS(6), [5], 2) == [6, free[1]]
    assert tokens(steps.ForcedBOS(6), [5, 5], 2) == free[:2]
    assert tokens(steps.ForcedEOS(4, 7), [5], 4) == [free[0], free[1], 7, free[3]]
    assert tokens(steps.ForcedEOS(2, 7, "output"), [5], 3) == [free[0], 7, free[2]]
    row = followed([steps.LogitBias({1: 5.0}), steps.ForcedIds({0: [3]}), steps.LogitBias({3: 2.0, 4: 2.0})], row_of(1))
    assert row[3] == 2 and (np.delete(row, 3) == -INF).all()
    drawn = [tokens(steps.ForcedIds({0: [31, 32]}), [i], 1)[0] for i in range(1)]
    assert set(drawn) <= {31, 32}


def repeats(text: list[int], step: steps.DRY) -> dict[int, int]:
    """{id: the longest match that it would go on with}, the way the method is told."""
    ids = text[len(text) - min(len(text), len(text) if step.last_n is None else step.last_n) :]
    limit = len(ids)
    for k in range(len(ids)):
        fits = [len(b) for b in step.breakers if len(b) <= k + 1 and tuple(ids[len(ids) - 1 - k :][: len(b)]) == b]
        if fits:
            limit = k + 1 - max(fits)
            break
    if step.max_match is not None:
        limit = min(limit, step.max_match) if limit >= step.allowed_length else 0
    found: dict[int, int] = {}
    for at in range(len(ids) - 1):  # the match ends there, and ids[at + 1] followed it
        n = 0
        while n <= at and n < limit and ids[at - n] == ids[len(ids) - 1 - n]:
            n += 1
        if n >= step.allowed_length and (ids[at + 1],) not in step.breakers:
            found[ids[at + 1]] = max(n, found.get(ids[at + 1], 0))
    return found


@pytest.mark.parametrize(
    "step",
    [
        steps.DRY(0.8),
        steps.DRY(1.5, 2.0, 1),
        steps.DRY(0.8, allowed_length=3, last_n=20),
        steps.DRY(0.8, breakers=[3, [1, 2]]),
        steps.DRY(0.8, breakers=[[0, 1, 2], [2], [0, 1]], last_n=24),
        steps.DRY(0.8, max_match=3),
        steps.DRY(0.8, last_n=0),
        steps.DRY(0.8, over="output"),
    ],
    ids=str,
)
def test_dry(step: steps.DRY) -> None:
    lowered = 0
    for seed in range(12):
        part = text_of(seed, 9, 4)
        text = text_of(seed, 12, 3) + part + text_of(seed + 50, 3, 4) + part
        prompt, output = (text[:5], text[5:]) if seed % 3 else (text, [])
        found = repeats(over(step.over, prompt, output), step)
        row = row_of(seed)
        wanted = row.copy()
        for i, n in found.items():
            wanted[i] -= np.float32(np.float32(step.multiplier) * step.base ** (n - step.allowed_length))
        assert np.array_equal(followed([step], row, prompt, output), wanted)
        lowered += len(found)
    assert bool(lowered) == (step.last_n != 0)


def test_dry_against_repeats_without_end() -> None:
    """The exponent stops where float32 does, and the search is linear."""
    row = followed([steps.DRY(1.0, 2.0)], row_of(0), [7] * 30_000)
    assert np.isfinite(row).all() and row[7] < -1e37
    assert np.array_equal(np.delete(row, 7), np.delete(row_of(0), 7))


def test_edits_act_in_the_order_of_the_list() -> None:
    row = np.full(VOCAB, 2.0, np.float32)
    bias, penalty = steps.LogitBias({3: 4.0}), steps.Penalties(2.0)
    assert followed([bias, penalty], row, [3])[3] == 3
    assert followed([penalty, bias], row, [3])[3] == 5
    assert followed([penalty, penalty, steps.LengthDecay(0, 2.0, 3)], row, [3], [1])[3] == 1


def test_edits_without_a_state() -> None:
    found = [steps.Penalties(1.2, 0.3, 0.1), steps.DRY(0.8, allowed_length=1), steps.NoRepeatNgram(2)]
    rows = np.stack([row_of(i) for i in range(len(TEXTS))])
    prompts, outputs = [list(part) for part in zip(*TEXTS, strict=True)]
    wanted = np.stack([followed(found, row, *text) for row, text in zip(rows, TEXTS, strict=True)])
    mine = lanewise.apply_steps(rows, found, prompt_ids=prompts, output_ids=outputs)
    assert mine.tobytes() == wanted.tobytes()
    wide = np.zeros((2 * len(rows), 2 * VOCAB), np.float32)
    for out in (rows.copy(), wide[::2, :VOCAB], wide[::-2, ::-2]):
        out[...] = rows
        assert lanewise.apply_steps(out, found, prompt_ids=prompts, output_ids=outputs, out=out) is out
        assert np.array_equal(out, wanted)
    padded = np.concatenate([rows, rows[:1]])
    over = padded[1:]
    lanewise.apply_steps(padded[:-1], found, prompt_ids=prompts, output_ids=outputs, out=over)
    assert np.array_equal(over, wanted)
    out = np.empty_like(rows)
    lanewise.apply_steps(rows.astype(np.float16), found, prompt_ids=prompts, output_ids=outputs, out=out)
    half = rows.astype(np.float16).astype(np.float32)
    assert np.array_equal(out, lanewise.apply_steps(half, found, prompt_ids=prompts, output_ids=outputs))
    forced = lanewise.apply_steps(rows[0], [steps.ForcedIds({0: 3})])
    assert forced[3] == 0 and (np.delete(forced, 3) == -INF).all()
    assert np.array_equal(lanewise.apply_steps(rows[0], []), rows[0])
    for wrong, match in [
        (lambda: lanewise.apply_steps(rows, [steps.TopK(3), steps.Temperature()]), "got TopK, Temperature"),
        (lambda: lanewise.apply_steps(rows, [steps.Suppress(VOCAB)]), "names the id 40"),
        (lambda: lanewise.apply_steps(rows[0], found, output_ids=[VOCAB]), "not an id in 0..39"),
        (lambda: lanewise.apply_steps(rows, found, output_ids=[[1]]), "one list a row"),
        (lambda: lanewise.apply_steps(rows, found, out=rows[0]), "out must have shape"),
    ]:
        with pytest.raises(ValueError, match=match):
            wrong()


# ---- whole rows ----


def test_guidance_and_contrast() -> None:
    row, guide = row_of(1), row_of(2)
    given, free = (z - np.log(np.exp(z.astype(float)).sum()) for z in (row, guide))
    out = followed([steps.Guidance(1.5)], row, guides=guide)
    np.testing.assert_allclose(out, free + 1.5 * (given - free), rtol=1e-5, atol=1e-5)
    out = followed([steps.Contrastive(0.2, 0.4)], row, guides=guide)
    kept = row >= row.max() + np.log(0.2)
    assert np.array_equal(np.isfinite(out), kept)
    np.testing.assert_allclose(out[kept], (1.4 * row - 0.4 * guide)[kept], rtol=1e-6)
    row[3] = -INF
    guide[3] = -INF
    assert followed([steps.Guidance(1.5)], row, guides=guide)[3] == -INF
    sampler = Sampler([steps.Guidance(2.0)], seed=1)
    sampler.add("a")
    with pytest.raises(ValueError, match=r"sequence 'a' has a step that needs guides\[0\]"):
        sampler(row)
    with pytest.raises(ValueError, match=r"guides\[0\] must have shape"):
        sampler(row, guides=guide[:5])
    sampler.add("b", steps=[steps.Temperature(0.0)])
    assert sampler(np.stack([row, row]), guides=[guide, None])[1] == row.argmax()


def test_infill() -> None:
    def left(p: dict[int, float], pieces: Any = None) -> list[int]:
        row = np.full(8, -INF, np.float32)
        row[list(p)] = np.log(np.float32(list(p.values())))
        return np.flatnonzero(np.isfinite(followed([steps.Infill([6, 7], pieces)], row))).tolist()

    assert left({1: 0.7, 6: 0.3}) == [6]  # the end is likely
    assert left({1: 0.66, 2: 0.33, 6: 0.01}) == [1, 6]  # of two texts and an end, a third is asked of each
    texts = {1: 0.4, 2: 0.3, 3: 0.299, 7: 0.001}
    assert left(texts) == [1, 2, 3, 7]
    pieces = ["", "a", "ab", "b", "", "", "", ""]
    assert left(texts, pieces) == [1, 7]  # "ab" joins "a"; now a third is asked
    many = {i: 0.19 for i in range(5)} | {6: 0.001}
    assert left(many) == [6]  # none reaches a fifth


def test_watermark() -> None:
    step, vocab = steps.Watermark(0.3, 2.5), 20_000
    row = np.zeros(vocab, np.float32)
    green = step.green_ids([4, 9], vocab)
    assert abs(len(green) / vocab - 0.3) < 0.02
    marked = followed([step], row, [4, 9])
    assert np.array_equal(np.flatnonzero(marked == 2.5), green) and (np.delete(marked, green) == 0).all()
    assert np.array_equal(green, step.green_ids([9], vocab))  # the last id alone counts
    other = steps.Watermark(0.3, 2.5, key=1).green_ids([9], vocab)
    assert abs(np.isin(other, green).mean() - 0.3) < 0.03
    assert np.array_equal(step.green_ids([9], 50), green[green < 50])
    assert not followed([steps.Watermark(context=2)], row, [4]).any()
    told = steps.Watermark(bias=1.0, greens=lambda ids: [int(ids[-1]), 3])
    assert np.flatnonzero(followed([told], row, [4])).tolist() == [3, 4]


def test_custom_steps() -> None:
    row = row_of(4)
    double = steps.Custom(lambda ids, z: 2 * z)
    assert np.array_equal(
        followed([double, steps.Penalties(2.0)], row, [1]), penalised(2 * row, [1], [], steps.Penalties(2.0))
    )
    as_double = steps.Custom(lambda ids, z: z.astype(np.float64))
    assert followed([as_double], row).dtype == np.float32
    for wrong in (lambda ids, z: z[:-1], lambda ids, z: None, lambda ids, z: z > 0):
        sampler = Sampler([steps.Custom(wrong)], seed=1)
        sampler.add(0)
        with pytest.raises(ValueError, match="custom step must give a float row of shape"):
            sampler(row)
        assert not len(sampler.output(0))


def test_steps_behind_a_truncation_see_what_is_left() -> None:
    row = row_of(8)
    out = followed([steps.TopK(5), steps.Renormalise()], row)
    top = np.sort(np.argsort(-row)[:5])
    assert np.flatnonzero(np.isfinite(out)).tolist() == top.tolist()
    p = np.exp(row[top].astype(float))
    np.testing.assert_allclose(np.exp(out[top]), p / p.sum(), rtol=1e-5)
    turned = steps.Custom(lambda ids, z: np.where(np.isfinite(z), -z, z))
    sampler = Sampler([steps.TopK(2), turned, steps.TopK(1)], seed=1)  # the second becomes the likeliest
    sampler.add(0)
    assert sampler(row) == np.argsort(-row)[1]


def test_renormalised_logits_for_penalties() -> None:
    row = row_of(8)
    logp = lanewise.log_softmax(row)
    mine = followed([steps.Renormalise(), steps.Penalties(1.5)], row, [3, 4])
    assert np.array_equal(mine, penalised(logp, [3, 4], [], steps.Penalties(1.5)))


# ---- programs: edits by lists are the edits as written, whatever the dtype ----

PLANS: list[tuple[steps.Step, ...]] = [
    (),
    (steps.Temperature(0.0),),
    steps.llama_cpp(dry_multiplier=0.8, penalty_repeat=1.1, xtc_probability=0.5, logit_bias={3: 1.0, 4: -INF}),
    steps.vllm(
        min_tokens=3, stop_token_ids=[1, 2], repetition_penalty=1.2, presence_penalty=0.3, top_p=0.9, min_p=0.01
    ),
    steps.transformers(no_repeat_ngram_size=2, bad_words_ids=[[3, 4], [5]], typical_p=0.9, eta_cutoff=0.01),
    steps.mlx_lm(temp=0.8, repetition_penalty=1.3, frequency_penalty=0.2, top_k=12),
    (steps.Smoothing(0.3, 1.5), steps.TopNSigma(1.5), steps.DynamicTemperature(0.5, 1.5), steps.TopA(0.1)),
    (steps.TailFree(0.9), steps.Epsilon(0.001), steps.TopH(0.8)),
    (steps.Penalties(1.5, 0.2, 0.1, last_n=20, decay=10), steps.LengthDecay(5, 1.1, 7), steps.Temperature(0.9)),
    (steps.ForcedIds({2: 5, 4: [6, 7]}), steps.Temperature(0.9)),
    (steps.Custom(lambda ids, z: z + len(ids) % 3), steps.TopK(3)),
    (steps.Watermark(0.5, 1.0), steps.TopP(0.9)),
    (steps.TopK(9), steps.Penalties(1.5, 0.2, 0.1), steps.TopP(0.9)),
]
STATEFUL = [
    (steps.Mirostat(),),
    (steps.Temperature(0.9), steps.MirostatV2(3.0, 0.2)),
    (steps.TopK(30), steps.AdaptiveP(0.3)),
]


@pytest.mark.parametrize("plan", PLANS[:10], ids=lambda plan: ", ".join(type(step).__name__ for step in plan) or "none")
def test_a_plan_is_its_edits_and_its_program(plan: tuple[steps.Step, ...]) -> None:
    for seed, (prompt, output) in enumerate(TEXTS):
        row = row_of(seed)
        row[20] = -INF
        sampler = Sampler(plan, seed=5)
        sampler.add("x", prompt, output_ids=output, key=seed)
        edits = [step for step in plan if step._kind == "edit"]
        program = groups(tuple(step for step in plan if step._kind != "edit"))
        told = steps_of_program(program)
        z = followed(edits, row, prompt, output)
        wanted, *_ = reference.chain(z, told, seed=5, key=seed, step=len(output))
        assert sampler(row, record=False) == wanted


def steps_of_program(found: list[Any]) -> Any:
    return program_of(found[0]) if found else Program(())


def test_dtypes_and_layouts() -> None:
    row, text = row_of(6, 300), text_of(5, 40)
    sampler = Sampler(PLANS[2], seed=2)
    sampler.add(0, text)
    for kind in (np.float16, ml_dtypes.bfloat16):
        narrow = row.astype(kind)
        assert sampler(narrow, record=False) == sampler(narrow.astype(np.float32), record=False)
    wanted = sampler(row, record=False)
    assert sampler(row.astype(np.float64), record=False) == wanted
    assert sampler(np.repeat(row, 3)[::3], record=False) == wanted
    padded = np.append(row, np.float32([INF, np.nan]))
    cut = Sampler(PLANS[2], seed=2, vocab_size=300)
    cut.add(0, text)
    assert cut(padded) == wanted
    torch_like = np.stack([row, row])[:, ::-1][:, ::-1]
    assert sampler(torch_like[0], record=False) == wanted


def test_a_mask_is_applied_before_truncation() -> None:
    row = row_of(6)
    allowed = np.random.default_rng(0).random(VOCAB) < 0.4
    words = np.packbits(np.pad(allowed, (0, -VOCAB % 32)), bitorder="little").view(np.int32)
    for plan in (PLANS[2], PLANS[4], PLANS[11], PLANS[12]):
        sampler = Sampler(plan, seed=2)
        sampler.add(0, text_of(5, 10))
        tokens = [(sampler(row, mask=allowed, record=False), sampler(row, mask=words)) for _ in range(20)]
        assert all(a == b and allowed[a] for a, b in tokens)
    sampler.add(1)
    masks = np.stack([allowed, ~allowed])
    tokens = sampler(np.stack([row, row]), mask=masks)
    assert allowed[tokens[0]] and not allowed[tokens[1]]


EDITS: list[steps.Step] = [
    steps.LogitBias({3: 4.0, 5: -1.0}),
    steps.LogitBias([(3, 0.1), (3, 0.2), (4, -INF)]),
    steps.SequenceBias({(3,): 1.0, (2, 3): -0.7, (1,): -INF}),
    steps.BadWords([[3, 4], [5]]),
    steps.Suppress([0, 9]),
    steps.MinTokens(4, [2]),
    steps.NoRepeatNgram(2),
    steps.EncoderNoRepeatNgram(2),
    steps.EncoderRepetition(1.3),
    steps.DRY(0.8, allowed_length=1, breakers=[4]),
    steps.LengthDecay(1, 1.2, [3, 5]),
    steps.ForcedIds({3: [1, 2]}),
    steps.Penalties(1.3),
    steps.Penalties(1.3, 0.3, 0.2),
    steps.Penalties(1.0, 0.3, 0.2, counts_over="prompt"),
    steps.Penalties(1.3, 0.3, over="output", last_n=3),
    steps.Penalties(1.3, 0.3, 0.2, counts_over="both", last_n=5, summed=True),
    steps.Penalties(1.3, 0.3, 0.2, last_n=2, decay=4),
]


@given(
    st.lists(st.sampled_from(EDITS), max_size=5),
    st.lists(st.integers(0, 9), max_size=9),
    st.lists(st.integers(0, 9), max_size=9),
    st.integers(0, 99),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_edits_are_as_if_the_row_were_written_out(
    edits: list[steps.Step], prompt: list[int], output: list[int], seed: int
) -> None:
    """Whoever does them: the kernel, lists for it, or row by row where a step wants the whole of it."""
    row = row_of(seed, 12)
    tokens = []
    for between in ((), (steps.Custom(lambda ids, z: z),)):
        for end in ((steps.Temperature(0.0),), (steps.Temperature(1.5),)):
            sampler = Sampler([*edits, *between, *end], seed=seed)
            sampler.add(0, prompt, output_ids=output)
            tokens.append(sampler(row, on_invalid="mark", record=False))
    assert tokens[:2] == tokens[2:]


# ---- a batch ----


def test_every_isa_gives_the_same_tokens() -> None:
    plans = PLANS + STATEFUL
    logits = np.stack([row_of(i, 500) for i in range(len(plans))])
    found = []
    for name in lanewise.info()["usable"]:
        with lanewise.using(name):
            sampler = Sampler((), seed=9)
            for i, plan in enumerate(plans):
                sampler.add(i, text_of(i, 5 + i), steps=plan)
            found.append([sampler(np.roll(logits, step, 1)).tolist() for step in range(6)])
            found[-1].append([sampler.state(i) for i in sampler.ids])
    assert all(one == found[0] for one in found)


def test_rows_do_not_touch_one_another(isa: str) -> None:
    """A row's token is the same alone, in any batch and at any place, whatever the others' steps are."""
    rng = np.random.default_rng(4)
    plans = PLANS + STATEFUL
    alone = [Sampler((), seed=9) for _ in plans]
    together = Sampler((), seed=9)
    for i, plan in enumerate(plans):
        prompt = text_of(i, 5 + i)
        alone[i].add(i, prompt, steps=plan, key=i)
        together.add(i, prompt, steps=plan, key=i)
    for _ in range(3):
        order = rng.permutation(len(plans)).tolist()
        logits = np.stack([row_of(int(rng.integers(99))) for _ in plans])
        wanted = [alone[i](logits[at]) for at, i in enumerate(order)]
        assert together(logits, order).tolist() == wanted
    assert [together.state(i) for i in range(len(plans))] == [alone[i].state(i) for i in range(len(plans))]
    part = [7, 2, len(plans) - 1]
    logits = np.stack([row_of(i) for i in part])
    assert together(logits, part).tolist() == [alone[i](row_of(i)) for i in part]


def test_threads_change_nothing() -> None:
    rng = np.random.default_rng(0)
    plans = (PLANS + STATEFUL) * 2
    logits = (3 * rng.standard_normal((len(plans), 20_000))).astype(np.float32)
    found = []
    before = lanewise.get_num_threads()
    for threads in (1, 2, 3):
        lanewise.set_num_threads(threads)
        try:
            sampler = Sampler((), seed=9)
            for i, plan in enumerate(plans):
                sampler.add(i, text_of(i, 5 + i), steps=plan)
            found.append([sampler(np.roll(logits, step, 1)).tolist() for step in range(2)])
        finally:
            lanewise.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_errors_name_the_sequence_and_change_nothing() -> None:
    sampler = Sampler(STATEFUL[1], seed=1)
    sampler.add("a", [1, 2])
    sampler.add("b", [39])
    before = pickle.dumps(sampler)
    rows = np.stack([row_of(0), row_of(1)])
    bad = rows.copy()
    bad[1, 5] = np.nan
    with pytest.raises(InvalidLogitsError, match="of sequence 'b'") as caught:
        sampler(bad)
    assert caught.value.rows == [1] and caught.value.tokens[0] >= 0 and caught.value.tokens[1] == -1
    for wrong, match in [
        (lambda: sampler(rows[0]), "2 sequences, got 1 rows"),
        (lambda: sampler(rows[:, :39]), "sequence 'b' has the id 39, but logits are of 39 ids"),
        (lambda: sampler(rows, ["a", "a"]), "ids name sequence 'a' twice"),
        (lambda: sampler(rows, on_invalid="no"), "on_invalid"),
        (lambda: sampler(rows, out=np.empty(3, np.int64)), "out must have shape"),
        (lambda: sampler.add("a"), "there is a sequence 'a' already"),
        (lambda: sampler.add("c", [1, -1]), r"prompt_ids\[1\] is -1"),
        (lambda: sampler.add("c", seed=-1), "seed must be"),
        (lambda: sampler.add("c", steps=(), params={}), "steps or params"),
        (lambda: sampler.add("c", params={}), "params go with a Sampler of a project's name"),
        (lambda: sampler.fork("a", "b"), "there is a sequence 'b' already"),
        (lambda: sampler.rollback("a", 1), "n must be in"),
        (lambda: sampler.accept("a", [3, -2]), r"tokens\[1\] is -2"),
        (lambda: sampler.swap(0, 2), "j must be in"),
        (lambda: Sampler("nobody"), "preset must be one of"),
        (lambda: Sampler([steps.Mirostat(), steps.TopK(3)]), "draws"),
        (lambda: Sampler([steps.Mirostat(), steps.LogitBias({})]), "draws"),
    ]:
        with pytest.raises(ValueError, match=match):
            wrong()
    for wrong in (lambda: sampler(rows, ["a", "z"]), lambda: sampler.remove("z"), lambda: sampler.output("z")):
        with pytest.raises(KeyError, match="no sequence 'z'"):
            wrong()
    for wrong in (
        lambda: sampler.add("c", [1.5]),
        lambda: Sampler(["top_k"]),
        lambda: Sampler(None),
        lambda: sampler(rows.astype(int)),
    ):
        with pytest.raises(TypeError):
            wrong()
    assert pickle.dumps(sampler) == before
    assert sampler(bad, on_invalid="mark").tolist() == [sampler.output("a")[0], -1]
    assert len(sampler.output("b")) == 0 and sampler.state("b") == (6.0, 0.0)
    sampler.add("named", steps=[steps.LogitBias({50: 1.0})])
    with pytest.raises(ValueError, match="a step of sequence 'named' names the id 50"):
        sampler(np.stack([row_of(0)] * 3))


def test_edges_of_a_batch() -> None:
    sampler = Sampler("llama.cpp", seed=1)
    assert sampler(np.zeros((0, 9), np.float32)).shape == (0,)
    assert sampler(np.zeros((0, 9), np.float32), []).shape == (0,)
    sampler.add("a", np.array([3], np.uint8))
    out = np.empty(1, np.int64)
    assert sampler(row_of(0)[None], out=out) is out and sampler.output("a").tolist() == out.tolist()
    bare = Sampler.__new__(Sampler)
    assert bare.steps == () and bare.ids == [] and len(bare) == 0
    with pytest.raises(ValueError, match="at least one column"):
        sampler(np.zeros((1, 0), np.float32))
    with pytest.raises(ValueError, match="up to 1048576 ids"):
        sampler(np.zeros((1, 2**20 + 1), np.float32))
    for i in range(3000):  # plans are kept for a while only
        sampler.add(i, steps=[steps.Temperature(1 + i)])
        sampler.remove(i)
    assert sampler(row_of(1)) == sampler.output("a")[1]


def test_a_step_that_fails_leaves_the_others_as_they_were() -> None:
    def fail(ids: np.ndarray, row: np.ndarray) -> np.ndarray:
        raise ArithmeticError("mine")

    sampler = Sampler(STATEFUL[0], seed=1)
    sampler.add("a")
    sampler.add("b", steps=[steps.Custom(fail)])
    with pytest.raises(ArithmeticError, match="mine"):
        sampler(np.stack([row_of(0)] * 2))
    assert not len(sampler.output("a")) and sampler.state("a") == (10.0, 0.0)


def test_one_thread_at_a_time() -> None:
    inside, go = threading.Event(), threading.Event()

    def wait(ids: np.ndarray, row: np.ndarray) -> np.ndarray:
        inside.set()
        go.wait(10)
        return row

    sampler = Sampler([steps.Custom(wait)], seed=1)
    sampler.add(0)
    worker = threading.Thread(target=sampler, args=(row_of(0),))
    worker.start()
    inside.wait(10)
    for use in (
        lambda: sampler(row_of(0)),
        lambda: sampler.add(1),
        lambda: sampler.remove(0),
        lambda: sampler.state_dict(),
    ):
        with pytest.raises(RuntimeError, match="in use by another thread"):
            use()
    go.set()
    worker.join()
    assert len(sampler.output(0)) == 1 and sampler.ids == [0]


def test_a_step_that_uses_its_own_sampler_is_told_so() -> None:
    told: list[str] = []

    def again(ids: np.ndarray, row: np.ndarray) -> np.ndarray:
        for use in (lambda: sampler(row, 0), lambda: sampler.accept(0, 1), lambda: sampler.remove(0)):
            with pytest.raises(RuntimeError, match="in use already: what one of its calls runs, such as a step"):
                use()
            told.append("told")
        return row

    sampler = Sampler([steps.Custom(again)], seed=1)
    sampler.add(0)
    sampler(row_of(0))
    assert len(told) == 3 and len(sampler.output(0)) == 1 and sampler.ids == [0]


def test_a_stream_in_use_says_by_whom() -> None:
    rng = lanewise.Stream(1)
    with rng, pytest.raises(RuntimeError, match="this Stream is in use already"):
        lanewise.sample(row_of(0), rng=rng)
    with pytest.raises(RuntimeError, match="was not entered by this thread"):
        rng.__exit__(None, None, None)
    assert (lanewise.sample(row_of(0), rng=rng) >= 0, rng.step) == (True, 1)


def test_a_step_may_fill_the_same_array_for_each_row() -> None:
    buffer = np.empty(VOCAB, np.float32)

    def doubled(ids: np.ndarray, row: np.ndarray) -> np.ndarray:
        np.multiply(row, 2, out=buffer)
        return buffer

    def fresh(ids: np.ndarray, row: np.ndarray) -> np.ndarray:
        return row * 2

    rows = np.stack([row_of(i) for i in range(6)])
    tokens = []
    for function in (doubled, fresh):
        sampler = Sampler([steps.Custom(function), steps.Temperature(0.0)], seed=1)
        for i in range(6):
            sampler.add(i)
        tokens.append(sampler(rows).tolist())
    assert tokens[0] == tokens[1] == rows.argmax(1).tolist()


# ---- sequences ----


def test_noise_belongs_to_the_sequence() -> None:
    sampler = Sampler([steps.Temperature(1.0)], seed=4)
    sampler.add("a")
    sampler.add("b", seed=8)
    sampler.add("c", seed=8, key=3, step=10)
    sampler.add("d")
    assert [sampler.noise(i) for i in "abcd"] == [(4, 0, 0), (8, 0, 0), (8, 3, 10), (4, 3, 0)]
    row = row_of(1)
    tokens = sampler(np.stack([row] * 4)).tolist()
    for i, token in zip("abcd", tokens, strict=True):
        seed, key, step = sampler.noise(i)
        assert token == lanewise.sample(row, seed=seed, keys=[key], step=step - 1)
    again = [sampler(np.stack([row] * 4), record=False).tolist() for _ in range(3)]
    assert again[0] == again[1] == again[2]


def test_fork_and_rollback() -> None:
    for plan in STATEFUL + PLANS[2:4]:
        sampler = Sampler(plan, seed=4)
        sampler.add("a", text_of(0, 8))
        rows = [row_of(i) for i in range(9)]
        first = [sampler(row) for row in rows[:4]]
        middle = sampler.state("a")
        rest = [sampler(row) for row in rows[4:]]
        sampler.rollback("a", 5)
        assert sampler.state("a") == middle and sampler.output("a").tolist() == first
        assert [sampler(row) for row in rows[4:]] == rest
        sampler.rollback("a", 5)
        sampler.fork("a", "same", seed=4, key=0)
        sampler.fork("a", "b", index=0)
        sampler.fork("a", "c")
        assert sampler.ids == ["b", "a", "same", "c"]
        assert len({sampler.noise(i) for i in "abc"}) == 3 and sampler.noise("same") == sampler.noise("a")
        for i in sampler.ids:
            assert sampler.state(i) == middle and sampler.output(i).tolist() == first
        tokens = [sampler(np.stack([row] * 4)).tolist() for row in rows[4:]]
        assert [t[1] for t in tokens] == [t[2] for t in tokens] == rest


def test_accepted_tokens_are_history() -> None:
    a, b = Sampler(PLANS[2], seed=4), Sampler(PLANS[2], seed=4)
    a.add(0, [1, 2])
    b.add(0, [1, 2], output_ids=[3, 4, 3])
    a.accept(0, 3)
    a.accept(0, np.array([4, 3]))
    assert a.noise(0) == b.noise(0) and a.output(0).tolist() == [3, 4, 3] and a.prompt(0).tolist() == [1, 2]
    assert a(row_of(1)) == b(row_of(1))


def test_a_row_of_many_calls(isa: str) -> None:
    """Text grows beyond any room it was given."""
    sampler = Sampler(steps.vllm(repetition_penalty=1.1), seed=1)
    sampler.add(0, steps=STATEFUL[1])
    sampler.add(1)
    rows = np.stack([row_of(0), row_of(1)])
    tokens = np.array([sampler(rows) for _ in range(300)])
    assert sampler.output(0).tolist() == tokens[:, 0].tolist()
    assert sampler.output(1).tolist() == tokens[:, 1].tolist()


def test_params_and_presets() -> None:
    sampler = Sampler("vllm", seed=1)
    sampler.add("a", params=SamplingParams(temperature=0.0))
    sampler.add("b", params={"top_k": 1, "temperature": 1.5})
    sampler.add("c")
    assert sampler.steps_of("a") == (steps.Temperature(0.0),) and sampler.steps_of("c") == steps.vllm()
    row = row_of(3)
    assert sampler(np.stack([row] * 3))[:2].tolist() == [row.argmax()] * 2


def names(found: tuple[steps.Step, ...]) -> list[str]:
    return [type(step).__name__ for step in found]


def test_orders_of_projects() -> None:
    """As docs/samplers.md has them."""
    hf = steps.transformers(
        guidance_scale=2.0,
        sequence_bias={(1,): 1.0},
        encoder_repetition_penalty=1.1,
        repetition_penalty=1.1,
        no_repeat_ngram_size=2,
        encoder_no_repeat_ngram_size=2,
        bad_words_ids=[[1]],
        min_length=1,
        min_new_tokens=1,
        forced_bos_token_id=1,
        forced_eos_token_id=2,
        max_length=9,
        exponential_decay_length_penalty=(2, 1.1),
        suppress_tokens=[1],
        begin_suppress_tokens=[1],
        top_h=0.5,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.9,
        epsilon_cutoff=0.1,
        eta_cutoff=0.1,
        watermark=steps.Watermark(),
        eos_token_id=2,
    )
    assert " ".join(names(hf)) == (
        "Guidance SequenceBias EncoderRepetition Penalties NoRepeatNgram EncoderNoRepeatNgram BadWords MinTokens "
        "MinTokens ForcedBOS ForcedEOS LengthDecay Suppress SuppressAtBegin Temperature TopH TopK TopP MinP Typical "
        "Epsilon Eta Watermark"
    )
    ours: dict[str, Any] = dict(logit_bias={1: 1}, repetition_penalty=2, min_p=0.1, top_k=1, top_p=0.9)
    vllm = steps.vllm(bad_words_token_ids=[[1]], min_tokens=1, **ours)
    assert " ".join(names(vllm)) == "BadWords MinTokens LogitBias Penalties Temperature MinP TopK TopP"
    theirs: dict[str, Any] = dict(logit_bias={1: 1}, penalty_repeat=2, dry_multiplier=1, top_n_sigma=1, typ_p=0.9)
    llama = steps.llama_cpp(**theirs, xtc_probability=0.5)
    assert " ".join(names(llama)) == "LogitBias Penalties DRY TopNSigma TopK Typical TopP MinP XTC Temperature"
    dynamic = steps.llama_cpp(dynatemp_range=0.2, adaptive_target=0.5)
    assert " ".join(names(dynamic)) == "TopK TopP MinP DynamicTemperature AdaptiveP"
    assert names(steps.llama_cpp(mirostat=1)) == ["Temperature", "Mirostat"]
    assert names(steps.llama_cpp(mirostat=2)) == ["Temperature", "MirostatV2"]
    mlx: Any = steps.mlx_lm(**ours, presence_penalty=1, frequency_penalty=1, xtc_probability=0.5)
    assert " ".join(names(mlx)) == "LogitBias Penalties Penalties Penalties TopP MinP XTC TopK Temperature"
    assert (mlx[1].repetition, mlx[2].presence, mlx[3].frequency) == (2, 1, 1)
    told = SamplingParams(0.5, 3, 0.9, 0.1, 2, 1.1, 0.2, 0.3)
    for name in steps.PRESETS:
        found = steps.preset(name, told)
        assert steps.Penalties in map(type, found) and any(
            isinstance(step, steps.TopK) and step.k == 3 for step in found
        )
        with pytest.raises(ValueError, match="given in params and as a keyword"):
            steps.preset(name, told, top_k=3)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: steps.Temperature(-1), ValueError, r"Temperature: value must be in \[0, inf\), got -1"),
        (lambda: steps.Temperature(math.nan), ValueError, "nan"),
        (lambda: steps.Temperature("a"), TypeError, "must be a number, got 'a'"),
        (lambda: steps.TopK(1.5), TypeError, "k must be an integer"),
        (lambda: steps.TopK(3, ties="some"), ValueError, "ties must be one of 'lowest', 'all'"),
        (lambda: steps.TopP(math.nan), ValueError, "p must be in"),
        (lambda: steps.MinP(1.5), ValueError, r"p must be in \[0, 1\], got 1.5"),
        (lambda: steps.Typical(0), ValueError, r"p must be in \(0, inf"),
        (lambda: steps.DynamicTemperature(2, 1), ValueError, "high must be at least low"),
        (lambda: steps.XTC(2), ValueError, "probability"),
        (lambda: steps.Mirostat(m=1), ValueError, "m must be in"),
        (lambda: steps.LogitBias({-1: 1.0}), ValueError, "id must be an id, got -1"),
        (lambda: steps.LogitBias({1: math.nan}), ValueError, "the bias of 1"),
        (lambda: steps.LogitBias([1]), TypeError, "bias must be a dict"),
        (lambda: steps.SequenceBias({(): 1.0}), ValueError, "at least one id"),
        (lambda: steps.BadWords([[]]), ValueError, r"words\[0\] must have at least one id"),
        (lambda: steps.BadWords("a"), TypeError, "words must be a list"),
        (lambda: steps.Penalties(0), ValueError, "repetition"),
        (lambda: steps.Penalties(last_n=-1), ValueError, "last_n"),
        (lambda: steps.Penalties(decay=3, summed=True), ValueError, "decay has no"),
        (lambda: steps.Penalties(over="all"), ValueError, "over must be one of"),
        (lambda: steps.NoRepeatNgram(0), ValueError, "n must be in"),
        (lambda: steps.DRY(1, breakers=[[]]), ValueError, "a breaker must have"),
        (lambda: steps.DRY(1, 0.5), ValueError, "base"),
        (lambda: steps.ForcedIds({1: []}), ValueError, r"at\[1\] must have at least one id"),
        (lambda: steps.Watermark(0), ValueError, "share"),
        (lambda: steps.Watermark(greens=3), TypeError, "greens must be a function"),
        (lambda: steps.Custom(3), TypeError, "must be callable"),
        (lambda: steps.Infill([]), ValueError, "eog_ids"),
        (lambda: steps.Infill([0], 3), TypeError, "Infill: pieces must be a list of str or bytes, one an id, got 3"),
        (lambda: steps.Infill([0], "ab"), TypeError, "Infill: pieces must be a list"),
        (lambda: steps.Infill([0], [1]), TypeError, "Infill: pieces must be a list"),
        (lambda: steps.LengthDecay(1, 0, 2), ValueError, "factor"),
        (lambda: steps.llama_cpp(mirostat=3), ValueError, "mirostat must be 0, 1 or 2"),
        (lambda: steps.llama_cpp(penalty_last_n=-2), ValueError, "penalty_last_n must be at least -1"),
    ],
)
def test_steps_check_their_numbers(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_steps_are_values() -> None:
    for plan in PLANS[:10]:
        assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan) and hash(plan) == hash(
            copy.deepcopy(plan)
        )
    with pytest.raises(AttributeError):
        steps.TopK(3).k = 4  # type: ignore[misc]


# ---- saved ----


def test_pickles_and_state_dicts() -> None:
    sampler = Sampler("llama.cpp", seed=6)
    for i, plan in enumerate(PLANS[:10] + STATEFUL):
        sampler.add(("id", i), text_of(i, i), steps=plan)
    sampler.add("own", seed=3)
    for step in range(3):
        sampler(np.stack([row_of(i + step) for i in range(len(sampler))]))
    sampler.fork("own", "fork")
    loaded = Sampler([steps.TopK(1)])
    loaded.load_state_dict(pickle.loads(pickle.dumps(sampler.state_dict())))
    others = [pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler), loaded]
    for other in others:
        assert other.ids == sampler.ids and other.seed == 6 and other.steps == sampler.steps
        other.fork("own", "next")
        other.add("new", params=SamplingParams(temperature=0.5))
    sampler.fork("own", "next")
    sampler.add("new", params=SamplingParams(temperature=0.5))
    for step in range(3):
        rows = np.stack([row_of(i + step) for i in range(len(sampler))])
        wanted = sampler(rows).tolist()
        for other in others:
            assert other(rows).tolist() == wanted
            assert [other.noise(i) for i in other.ids] == [sampler.noise(i) for i in sampler.ids]
            assert [other.state(i) for i in other.ids] == [sampler.state(i) for i in sampler.ids]
    with pytest.raises(ValueError, match="state_dict"):
        sampler.load_state_dict({})


@pytest.mark.parametrize(
    ("of_sampler", "of_sequence", "match"),
    [
        ({"serial": -1}, {}, "serial must be in"),
        ({"preset": "none"}, {}, "preset must be one of"),
        ({"steps": [("math", {})]}, {}, "no step is called 'math'"),
        ({"version": 2}, {}, "this version"),
        ({}, {"forks": -1}, "forks must be in"),
        ({}, {"states": np.float64([[np.nan, 0]])}, "'a': states must be numbers, got nan"),
        ({}, {"states": np.zeros((2, 2))}, "states have shape"),
        ({"sequences": [{"id": "a"}]}, {}, "'steps' is missing"),
    ],
)
def test_a_state_that_is_refused_changes_nothing(
    of_sampler: dict[str, Any], of_sequence: dict[str, Any], match: str
) -> None:
    saved = Sampler([steps.MirostatV2()], seed=1)
    saved.add("a")
    state = saved.state_dict()
    state["sequences"][0].update(of_sequence)
    sampler = Sampler([steps.TopK(1)], seed=2)
    sampler.add("b")
    before = pickle.dumps(sampler)
    with pytest.raises(ValueError, match=match):
        sampler.load_state_dict(state | of_sampler)
    assert pickle.dumps(sampler) == before


@pytest.mark.parametrize(
    ("step", "guides", "match"),
    [
        (steps.Infill([0], ["a"]), None, "pieces has 1 texts, but id 2 is left"),
        (steps.Infill([3]), None, r"eog_ids\[0\] is 3, but logits are of 3 ids"),
        (steps.Watermark(greens=lambda ids: [1, 3]), None, "greens gave 3, not an id in 0..2"),
        (steps.Watermark(greens=lambda ids: -1), None, "greens gave -1, not an id in 0..2"),
        (steps.Guidance(2.0), 5.0, r"guides\[0\] must have shape \(3,\), got \(\)"),
        (steps.Guidance(2.0), [["a", "b", "c"]], r"guides\[0\] must be float32, float16, bfloat16 or float64, got <U1"),
    ],
)
def test_what_a_step_for_the_whole_row_cannot_use_is_said(step: steps.Step, guides: Any, match: str) -> None:
    sampler = Sampler([step], seed=1)
    sampler.add("a", [1])
    with pytest.raises((ValueError, TypeError), match=match):
        sampler(np.float32([1, 2, 3]), guides=guides)
    assert len(sampler.output("a")) == 0


def test_a_sampler_whose_state_is_infinite_pickles() -> None:
    sampler = Sampler([steps.AdaptiveP(-math.inf)], seed=1)
    sampler.add("a")
    assert pickle.loads(pickle.dumps(sampler)).state("a") == sampler.state("a")


@pytest.mark.parametrize("name", steps.PRESETS)
def test_presets_name_what_is_no_number(name: str) -> None:
    """A NaN too: as no comparison is true of it, its step would be left out in silence."""
    make = steps.PRESETS[name]
    numbers = [p.name for p in inspect.signature(make).parameters.values() if type(p.default) in (int, float)]
    assert len(numbers) >= 8
    for number in numbers:
        for value in (None, "0.5", [], np.ones(2)):
            with pytest.raises(TypeError, match=f"{make.__name__}: {number} must be a number, got"):
                make(**{number: value})
        with pytest.raises(ValueError, match=f"{make.__name__}: {number} must be a number, got nan"):
            make(**{number: math.nan})


def test_steps_of_other_classes_are_refused() -> None:
    class Mine(steps.TopK):
        pass

    for step in (Mine(2), steps.Step(), steps._Row()):
        with pytest.raises(TypeError, match=r"steps\[1\] must be one of lanewise.steps"):
            Sampler([steps.TopK(1), step])


def test_what_is_masked_may_overflow(isa: str) -> None:
    """An edited logit of +inf that the mask forbids: on the exact way too."""
    plan = [steps.LengthDecay(0, 1e300, [1]), steps.TopK(2)]
    logits, mask = np.float32([1, 2, 3]), np.bool_([True, False, True])
    for exact in (False, True):
        sampler = Sampler(plan, seed=1)
        sampler.add("a", output_ids=[0])
        _ops.set_force_exact(exact)
        try:
            assert sampler(logits, mask=mask) in (0, 2)
        finally:
            _ops.set_force_exact(False)


# ---- golden tokens ----

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_sampler.json").read_text())


def golden_tokens(plan: Sequence[steps.Step]) -> list[list[int]]:
    """Four calls on three rows of exact numbers, as in test_sample.py."""
    i = np.arange(150000, dtype=np.uint64)
    rows = ((i * np.uint64(2654435761) % np.uint64(2**32)) / 2**28 - 8).astype(np.float32).reshape(3, -1)
    rows[:, :16] += np.float32(9)  # so that texts repeat
    sampler = Sampler(plan, seed=11)
    for key in range(3):
        sampler.add(key, [1, 2, 3, 1, 2, 3, 7, 7, key], key=key)
    return [sampler(np.roll(rows, step, 0)).tolist() for step in range(4)]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: ", ".join(name for name, _ in case["steps"]))
def test_tokens_are_what_they_were(case: dict[str, Any], isa: str) -> None:
    """The file is the algorithm, version 1: to change a token in it is a major version."""
    assert GOLDEN["version"] == 1
    assert golden_tokens(unpacked(case["steps"])) == case["tokens"]


# ---- rows by vLLM's rules ----


def test_rows_move_with_their_steps() -> None:
    sampler = Sampler([steps.Temperature(1.0)], seed=2)
    for i in range(5):
        sampler.add(i, steps=[steps.Suppress([i]), steps.Temperature(0.5 + i)])
    sampler.update_rows(removed=[1, 3], added=[(1, "x", {"steps": [steps.Suppress([30])]})], moved=[(4, 3, "move")])
    assert sampler.ids == [0, "x", 2, 4]
    sampler.update_rows(moved=[(0, 3, "swap"), (1, 1, "swap")])
    assert sampler.ids == [4, "x", 2, 0] and sampler.steps_of(4)[0] == steps.Suppress([4])
    sampler.update_rows(added=[(4, "end", {}), (0, "instead", {"prompt_ids": [3]})])
    assert sampler.ids == ["instead", "x", 2, 0, "end"] and 4 not in sampler
    sampler.update_rows(removed=[0], moved=[(4, 0, "move")])
    assert sampler.ids == ["end", "x", 2, 0]
    before = pickle.dumps(sampler)
    for told, match in [
        ({"removed": [0]}, "rows are left empty"),
        ({"removed": [9]}, "there is no row 9"),
        ({"moved": [(9, 0, "move")]}, "there is no row 9"),
        ({"moved": [(0, 1, "copy")]}, "'move' or 'swap'"),
        ({"added": [(0, "x", {})]}, "there is a sequence 'x' already"),
        ({"added": [(4, "new", {}), (9, "far", {})]}, "rows are left empty"),
    ]:
        with pytest.raises(ValueError, match=match):
            sampler.update_rows(**told)
    with pytest.raises(TypeError, match="'colour' is no argument of add"):
        sampler.update_rows(added=[(4, "new", {"colour": 1})])
    assert pickle.dumps(sampler) == before


# ---- against a model ----

SOME = [PLANS[2], PLANS[3], PLANS[8], STATEFUL[0], STATEFUL[2], (steps.NoRepeatNgram(2), steps.TopK(4))]
TOKENS = st.integers(0, 9)


class Machine(RuleBasedStateMachine):
    """Sequences come, fork, go back and go; each draws what a Sampler of its own draws, rebuilt from its text."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = Sampler((), seed=3)
        # id: prompt, output, the state after each of it, plan, noise at the start
        self.known: dict[int, tuple[list[int], list[int], list[Any], Any, tuple[int, int]]] = {}
        self.rows: list[int] = []
        self.count = self.serial = 0

    def new_id(self) -> int:
        self.count += 1
        return self.count

    @rule(prompt=st.lists(TOKENS, max_size=12), plan=st.sampled_from(SOME), at=st.integers(0, 9), own=st.booleans())
    def add(self, prompt: list[int], plan: Any, at: int, own: bool) -> None:
        new, at = self.new_id(), min(at, len(self.rows))
        self.sampler.add(new, prompt, steps=plan, index=at, **({"seed": new} if own else {}))
        state = self.sampler.state(new)
        self.known[new] = (prompt, [], [state], plan, (new, 0) if own else (3, self.serial))
        self.rows.insert(at, new)
        self.serial += 1

    @precondition(lambda self: self.rows)
    @rule(at=st.integers(0, 99))
    def remove(self, at: int) -> None:
        gone = self.rows.pop(at % len(self.rows))
        self.sampler.remove(gone)
        del self.known[gone]

    @precondition(lambda self: self.rows)
    @rule(at=st.integers(0, 99))
    def fork(self, at: int) -> None:
        parent, new = self.rows[at % len(self.rows)], self.new_id()
        prompt, output, states, plan, _ = self.known[parent]
        self.sampler.fork(parent, new)
        seed, key, _ = self.sampler.noise(new)
        assert all((seed, key) != noise for *_, noise in self.known.values())
        self.known[new] = (list(prompt), list(output), list(states), plan, (seed, key))
        self.rows.append(new)

    @precondition(lambda self: self.rows)
    @rule(at=st.integers(0, 99), n=st.integers(0, 3))
    def rollback(self, at: int, n: int) -> None:
        one = self.rows[at % len(self.rows)]
        _, output, states, *_ = self.known[one]
        n = min(n, len(output))
        self.sampler.rollback(one, n)
        del output[len(output) - n :], states[len(states) - n :]

    @precondition(lambda self: self.rows)
    @rule(at=st.integers(0, 99), tokens=st.lists(TOKENS, max_size=4))
    def accept(self, at: int, tokens: list[int]) -> None:
        one = self.rows[at % len(self.rows)]
        self.sampler.accept(one, tokens)
        self.known[one][1].extend(tokens)
        self.known[one][2].extend([self.known[one][2][-1]] * len(tokens))

    @precondition(lambda self: self.rows)
    @rule(i=st.integers(0, 99), j=st.integers(0, 99))
    def swap(self, i: int, j: int) -> None:
        i, j = i % len(self.rows), j % len(self.rows)
        self.sampler.swap(i, j)
        self.rows[i], self.rows[j] = self.rows[j], self.rows[i]

    @rule()
    def save(self) -> None:
        self.sampler = pickle.loads(pickle.dumps(self.sampler))

    @precondition(lambda self: self.rows)
    @rule(seed=st.integers(0, 50))
    def draw(self, seed: int) -> None:
        logits = np.stack([row_of(seed + i, 12) for i in range(len(self.rows))])
        tokens = self.sampler(logits)
        for row, one, token in zip(logits, self.rows, tokens.tolist(), strict=True):
            prompt, output, states, plan, (noise, key) = self.known[one]
            alone = Sampler(plan, seed=0)
            alone.add(0, prompt + output[:0], output_ids=output, seed=noise, key=key)
            if states[-1] is not None:
                saved = alone.state_dict()
                saved["sequences"][0]["states"][-1] = states[-1]
                alone.load_state_dict(saved)
            assert alone(row) == token
            output.append(token)
            states.append(alone.state(0))

    @invariant()
    def the_same(self) -> None:
        assert self.sampler.ids == self.rows and len(self.sampler) == len(self.rows)
        for one, (prompt, output, states, plan, (seed, key)) in self.known.items():
            assert self.sampler.prompt(one).tolist() == prompt and self.sampler.output(one).tolist() == output
            assert self.sampler.state(one) == states[-1] and self.sampler.steps_of(one) == tuple(plan)
            assert self.sampler.noise(one) == (seed, key, len(output))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=12, stateful_step_count=25, deadline=None, derandomize=True)


def test_laws_are_kept(isa: str) -> None:
    """The draw of a chain is that of sample where both can say it, at every step of the text."""
    params = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2}
    for name in ("vllm", "llama.cpp", "mlx-lm"):
        sampler = Sampler(steps.preset(name, SamplingParams(**params)), seed=2)
        sampler.add(0, [1, 2, 3])
        for step, row in itertools.islice(enumerate(map(row_of, itertools.count())), 12):
            whole = sampler.prompt(0).tolist() + sampler.output(0).tolist()
            mine = sampler(row)
            ties = "top_k" if name == "vllm" else "lowest"
            last = {"vllm": whole, "llama.cpp": whole[-64:], "mlx-lm": whole[-20:]}[name]
            assert mine == lanewise.sample(
                row, seed=2, keys=[0], step=step, preset=name, ties=ties, output_ids=last, **params
            )
