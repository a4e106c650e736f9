"""Against llama.cpp's functions, on rows of numbers: no model."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from chain import Chain

import lanewise
import lanewise.compat.llama_cpp as ours
from lanewise._rows import flat, real_rows, realistic

ROWS = [row.logits.astype(np.float32) for row in real_rows()[::4]]
ROWS += [realistic(32_000, np.random.default_rng(seed)) for seed in range(12)]
ROWS += [flat(2_000, np.random.default_rng(seed)) for seed in range(3)]
ROWS += [np.round(row[:4_000] * 4) / 4 for row in ROWS[:6]]  # full of ties
SETTINGS = [
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    {"top_k": 0, "top_p": 0.9, "min_p": 0.0, "temperature": 1.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.1, "temperature": 2.0},
    {"top_k": 300, "top_p": 0.5, "min_p": 0.0, "temperature": 0.3},
    {"top_k": 1, "top_p": 0.5, "min_p": 0.0, "temperature": 5.0},
    {"top_k": 10, "top_p": 0.0, "min_p": 0.0, "temperature": 1.0},
    {"top_k": -1, "top_p": 2.0, "min_p": 1.0, "temperature": 1.0},
]


def chain_of(settings: dict[str, float]) -> Chain:
    return Chain(
        ("top_k", settings["top_k"]),
        ("top_p", settings["top_p"], 1),
        ("min_p", settings["min_p"], 1),
        ("temp", settings["temperature"]),
        ("dist", 1),
    )


def is_a_near_thing(row: np.ndarray, settings: dict[str, float], count: int, other: int) -> bool:
    """Whether the two counts differ by ids whose mass before is so near top_p that float32 sums cannot tell."""
    ordered = np.sort(row.astype(float))[::-1][: settings["top_k"] if settings["top_k"] > 0 else None]
    mass = np.exp(ordered - ordered[0])
    before = np.cumsum(mass / mass.sum()) - mass / mass.sum()
    between = before[min(count, other) : max(count, other)]
    return bool((abs(between - settings["top_p"]) < 2e-6 * np.sqrt(len(ordered))).all())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_is_kept_and_how_probable(settings: dict[str, float]) -> None:
    """Values, as llama.cpp does not say which of equal logits it keeps."""
    same = 0
    for row in ROWS:
        theirs, _ = chain_of(settings).apply(row)
        _, kept = lanewise.sample(row, preset="llama.cpp", seed=1, step=0, return_support=True, **settings)
        values = np.sort(row[kept.ids])
        if len(values) != len(theirs):
            assert is_a_near_thing(row, settings, len(values), len(theirs))
            continue
        same += 1
        assert np.array_equal(values, np.sort(row[theirs["id"]]))
        assert np.allclose(np.sort(np.exp(kept.logprobs)), np.sort(theirs["p"]), rtol=2e-4, atol=1e-9)
    assert same >= len(ROWS) - 1


def test_the_greedy_one() -> None:
    for row in ROWS:
        theirs, chosen = Chain(("greedy",)).apply(row)
        assert lanewise.sample(row, temperature=0.0, preset="llama.cpp") == theirs["id"][chosen]


@pytest.mark.parametrize(
    "penalties", [(1.3, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 0.4, 0.0), (1.0, 0.0, 0.9), (1.2, 0.3, 0.7)]
)
@pytest.mark.parametrize("last_n", [0, 5, 64])
def test_penalties(penalties: tuple[float, float, float], last_n: int) -> None:
    """The same bits, but where frequency and presence meet: there the sum of both is rounded, and here each."""
    row = ROWS[0]
    drawn = np.random.default_rng(3).integers(0, 40, 100).tolist()
    theirs, _ = Chain(("penalties", len(row), last_n, *penalties)).accept(*drawn).apply(row)
    repeat, frequency, presence = penalties
    mine = lanewise.apply_penalties(
        row,
        repetition_penalty=repeat,
        frequency_penalty=frequency,
        presence_penalty=presence,
        output_ids=drawn[len(drawn) - last_n :],
    )
    assert (np.count_nonzero(mine != row) > 4) == bool(last_n)
    if frequency and presence:
        assert np.allclose(mine, theirs["logit"], rtol=3e-7, atol=1e-6)
    else:
        assert np.array_equal(mine, theirs["logit"])


def test_the_logits_of_candidates() -> None:
    """A field of 12-byte records, which a chain hands to its custom samplers: read, and edited in place."""
    candidates = np.zeros(len(ROWS[0]), [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    candidates["logit"] = ROWS[0]
    field = candidates["logit"]
    assert field.strides == (12,)
    draw = {"top_p": 0.9, "seed": 4, "step": 2}
    assert lanewise.sample(field, **draw) == lanewise.sample(ROWS[0], **draw)
    lanewise.apply_penalties(field, repetition_penalty=1.5, output_ids=[1, 2], out=field)
    assert np.array_equal(
        candidates["logit"], lanewise.apply_penalties(ROWS[0], repetition_penalty=1.5, output_ids=[1, 2])
    )
    assert not candidates["id"].any() and not candidates["p"].any()


def test_processor() -> None:
    row = ROWS[0].copy()
    process = llama_cpp.LogitsProcessorList(
        [ours.processor(lanewise.apply_bias, {7: 100.0}), ours.processor(lanewise.min_p_mask, 0.05)]
    )
    ids = np.array([1, 2, 3], np.intc)
    scores = process(ids, row)
    assert scores.dtype == np.single and np.flatnonzero(np.isfinite(scores)).tolist() == [7]
    assert np.array_equal(row, ROWS[0])


def test_drawing() -> None:
    row, ids = ROWS[0], np.arange(100, dtype=np.intc)
    draw = ours.drawing(temperature=0.9, top_p=0.9, rng=lanewise.Stream(6))
    for step in range(5):
        scores = draw(ids, row)
        token = lanewise.sample(row, temperature=0.9, top_p=0.9, seed=6, step=step, preset="llama.cpp")
        assert np.flatnonzero(np.isfinite(scores)).tolist() == [token] and scores[token] == 0
    greedy = {"temperature": 0.0, "presence_penalty": 1000.0}
    top = np.argsort(-row, kind="stable")[:3].astype(np.intc)
    for last_n, winner in ((-1, top[2]), (64, top[2]), (2, top[2]), (1, top[0]), (0, top[0])):
        assert np.isfinite(ours.drawing(last_n=last_n, **greedy)(top[:2], row)).nonzero()[0] == [winner]
    assert np.isfinite(ours.drawing(preset=("temperature",), **greedy)(top[:1], row)).nonzero()[0] == [top[1]]
