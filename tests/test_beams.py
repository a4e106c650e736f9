"""beam_step beside the whole matrix, BeamSearch beside an exhaustive one, stochastic beams by their law, bad input."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import lanewise

from laws import chi_square


def model(prefix: tuple[int, ...], vocab: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, len(prefix), *prefix])
    return (1.5 * rng.standard_normal(vocab)).astype(np.float32)


def rows_of(search: lanewise.BeamSearch, vocab: int, seed: int = 0) -> np.ndarray:
    return np.stack([model(tuple(tokens), vocab, seed) for tokens in search.tokens.tolist()])


def searched(search: lanewise.BeamSearch, vocab: int, seed: int = 0) -> list[list[lanewise.Hypothesis]]:
    """Runs it to the end, and holds its moves to what it says of its rows."""
    while not search.done:
        before = search.tokens
        move = search.step(rows_of(search, vocab, seed))
        assert search.tokens[:, :-1].tolist() == before[move.rows].tolist()
        assert search.tokens[:, -1].tolist() == move.tokens.tolist()
    return search.finish()


def every_text(vocab: int, length: int, eos: int, seed: int = 0) -> dict[tuple[int, ...], float]:
    """The logprob of each text that ends with eos or at `length`."""
    found: dict[tuple[int, ...], float] = {}
    open_ = {(): 0.0}
    for depth in range(length):
        longer = {}
        for prefix, total in open_.items():
            logp = lanewise.log_softmax(model(prefix, vocab, seed)).astype(np.float64)
            for token in range(vocab):
                text = (*prefix, token)
                (found if token == eos or depth == length - 1 else longer)[text] = total + logp[token]
        open_ = longer
    return found


def test_a_step_is_the_best_of_the_matrix(isa: str) -> None:
    rng = np.random.default_rng(1)
    for beams, vocab, n in itertools.product((1, 3, 8), (5, 64, 300, 9000), (1, 7, 40)):
        logits = np.round(3 * rng.standard_normal((2 * beams, vocab)), 1).astype(np.float32)  # with ties
        scores = np.round(-rng.random((2, beams)), 1)
        n = min(n, beams * vocab)
        found = lanewise.beam_step(scores, logits, n=n)
        every = scores[:, :, None] + lanewise.log_softmax(logits).astype(np.float64).reshape(2, beams, vocab)
        order = np.argsort(-every.reshape(2, -1), axis=1, kind="stable")[:, :n]
        assert found.tokens.tolist() == (order % vocab).tolist()
        assert found.beams.tolist() == (order // vocab).tolist()
        assert found.scores.tobytes() == np.take_along_axis(every.reshape(2, -1), order, 1).tobytes()


@pytest.mark.parametrize("kind", ["equal", "ascending", "one block"])
def test_a_step_on_rows_that_are_hard(kind: str, isa: str) -> None:
    row = {
        "equal": np.zeros(9000),
        "ascending": np.arange(9000) * 1e-5,
        "one block": np.where(np.arange(9000) // 64 == 7, 5.0, -50.0),
    }[kind].astype(np.float32)
    logits = np.stack([row] * 4)
    found = lanewise.beam_step([0.0, 0.0, -0.001, 0.0], logits, n=90)
    every = np.float64([0, 0, -0.001, 0])[:, None] + lanewise.log_softmax(logits).astype(np.float64)
    order = np.argsort(-every.reshape(-1), kind="stable")[:90]
    assert (found.beams * 9000 + found.tokens).tolist() == order.tolist()


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5, 2.0])
@pytest.mark.parametrize("early_stopping", ["never", False, True])
def test_a_wide_search_finds_the_best_text(length_penalty: float, early_stopping: Any) -> None:
    vocab, length, eos = 4, 4, 1
    texts = every_text(vocab, length, eos)
    scored = {text: total / len(text) ** length_penalty for text, total in texts.items()}
    search = lanewise.BeamSearch(
        200, max_length=length, eos_ids=[eos], length_penalty=length_penalty, early_stopping=early_stopping
    )
    found = searched(search, vocab)[0]
    best = max(scored, key=lambda text: scored[text])
    assert tuple(found[0].tokens.tolist()) == best
    assert found[0].score == pytest.approx(scored[best], abs=1e-6)
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)


def test_searches_do_not_touch_one_another() -> None:
    vocab, told = 12, {"max_length": 5, "eos_ids": [3], "length_penalty": 0.7}
    both = lanewise.BeamSearch(3, batch=2, **told)
    while not both.done:
        rows = rows_of(both, vocab, 1)
        rows[3:] = rows_of(both, vocab, 2)[3:]
        both.step(rows)
    for seed, found in enumerate(both.finish(), 1):
        alone = searched(lanewise.BeamSearch(3, **told), vocab, seed)[0]
        assert [(h.tokens.tolist(), h.score) for h in alone] == [(h.tokens.tolist(), h.score) for h in found]


def test_a_penalty_makes_groups_differ() -> None:
    vocab = 30

    def firsts(penalty: float) -> list[int]:
        search = lanewise.BeamSearch(6, groups=3, diversity_penalty=penalty, max_length=1)
        search.step(np.broadcast_to(model((), vocab), (6, vocab)))
        return [int(h.tokens[0]) for h in search.finish()[0]]

    assert len(set(firsts(0.0))) == 2
    assert len(set(firsts(100.0))) == 6
    logits = np.float32([[2.0, 1.5, 0.0]] * 3)
    found = lanewise.beam_step(np.zeros((3, 1)), logits, n=1, groups=3, diversity_penalty=0.6)
    assert found.tokens[:, 0].tolist() == [0, 1, 0]  # 2 - 0.6 < 1.5; then both have been taken once
    assert found.scores[2, 0] == pytest.approx(found.scores[0, 0] - 0.6)


def test_what_ended_is_charged_to_nobody() -> None:
    found = lanewise.beam_step(
        np.zeros((2, 1)), np.float32([[2.0, 1.5, 0.0]] * 2), n=2, groups=2, diversity_penalty=9.0, eos_ids=[0]
    )
    assert found.tokens.tolist() == [[0, 1], [0, 2]]


@pytest.mark.parametrize("trials", [4000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_law_of_stochastic_beams(trials: int) -> None:
    """The first of the sequences is a sample, and so are both, without replacement (Kool et al. 2019)."""
    vocab, length, eos = 3, 2, 0
    texts = every_text(vocab, length, eos)
    names, p = list(texts), np.exp(list(texts.values()))
    pairs = {(a, b): p[a] * p[b] / (1 - p[a]) for a in range(len(p)) for b in range(len(p)) if a != b}
    count = dict.fromkeys(pairs, 0)
    search = lanewise.BeamSearch(2, batch=trials, max_length=length, eos_ids=[eos], seed=5)
    while not search.done:
        known = {tokens: model(tokens, vocab) for tokens in set(map(tuple, search.tokens.tolist()))}
        search.step(np.stack([known[tuple(tokens)] for tokens in search.tokens.tolist()]))
    for found in search.finish():
        first, second = (names.index(tuple(h.tokens.tolist())) for h in found)
        assert found[0].sum == pytest.approx(texts[names[first]], abs=1e-6)
        count[first, second] += 1
    assert chi_square(np.array([*count.values()]), np.array([*pairs.values()])) > 1e-4


def test_a_mask_ends_a_beam_not_the_search() -> None:
    masks = np.ones((2, 10), bool)
    masks[1] = False
    found = lanewise.beam_step([0.0, 0.0], np.zeros((2, 10), np.float32), mask=masks, n=12)
    assert found.beams.tolist() == [0] * 10 + [-1] * 2 and found.tokens.tolist() == [*range(10), -1, -1]
    assert (found.scores[10:] == -np.inf).all()
    search = lanewise.BeamSearch(2, max_length=9)
    search.step(np.zeros((2, 10), np.float32), mask=np.zeros(10, bool))
    assert search.done and search.finish() == [[]]


def test_an_invalid_search() -> None:
    logits = np.zeros((4, 5), np.float32)
    logits[1, 3] = np.nan
    with pytest.raises(lanewise.InvalidLogitsError) as caught:
        lanewise.beam_step(np.zeros((2, 2)), logits)
    found = caught.value.tokens
    assert caught.value.rows == [0] and np.isnan(found.scores[0]).all() and (found.tokens[0] == -1).all()
    assert found.tokens[1].tolist() == lanewise.beam_step([0.0, 0.0], logits[2:]).tokens.tolist()
    dead = lanewise.beam_step([[0.0, -np.inf], [0.0, 0.0]], logits)  # a beam that is not there
    assert (dead.beams[0] == [0] * 4).all()


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"scores": [0.0, np.nan]}, r"scores\[1\] is nan"),
        ({"scores": [0.0, np.inf]}, r"scores\[1\] is inf"),
        ({"scores": []}, "scores must have shape"),
        ({"scores": [0.0]}, "a row for each of 1 x 1 scores"),
        ({"logits": np.zeros(5, np.float32)}, "a row for each"),
        ({"logits": np.zeros((2, 5), int)}, "logits must be float32"),
        ({"n": 0}, "n must be in"),
        ({"n": 11}, "n must be in"),
        ({"groups": 2}, "groups is 2"),
        ({"eos_ids": [5]}, "eos_ids must be in"),
        ({"diversity_penalty": -1.0}, "diversity_penalty"),
        ({"seed": 1, "step": 0}, "stochastic beams"),
        ({"perturbed": [0.0, 0.0], "seed": 1}, "seed needs step"),
        ({"perturbed": [0.0]}, "perturbed must have shape"),
        ({"mask": np.ones((3, 5), bool)}, "mask must have shape"),
    ],
)
def test_bad_input_to_a_step_is_refused(told: dict[str, Any], says: str) -> None:
    told = {"scores": [0.0, -1.0], "logits": np.zeros((2, 5), np.float32)} | told
    with pytest.raises((ValueError, TypeError), match=says):
        lanewise.beam_step(told.pop("scores"), told.pop("logits"), **told)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"beams": 0}, "beams must be at least 1"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"groups": 2}, "groups must divide beams"),
        ({"early_stopping": "always"}, "early_stopping must be"),
        ({"length_penalty": np.inf}, "length_penalty must be"),
        ({"seed": 1, "length_penalty": 2.0}, "stochastic beams have no"),
        ({"prompt_ids": [[1], [2]]}, "one list a search"),
    ],
)
def test_bad_searches_are_refused(told: dict[str, Any], says: str) -> None:
    told = {"beams": 3, "max_length": 4} | told
    with pytest.raises(ValueError, match=says):
        lanewise.BeamSearch(told.pop("beams"), **told)


def test_a_search_that_is_done_takes_no_step() -> None:
    search = lanewise.BeamSearch(2, max_length=1)
    search.step(np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="the search is done"):
        search.step(np.zeros((2, 4), np.float32))
