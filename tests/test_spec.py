"""verify_draft: the laws of what comes out, the text of plain decoding, sequences alone and together, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lanewise

from laws import chi_square

V = 6
P = np.float32([[0.1, 0.3, 0.2, 0.05, 0.25, 0.1], [0.4, 0.1, 0.1, 0.2, 0.1, 0.1], [0.2, 0.2, 0.2, 0.2, 0.15, 0.05]])
Q = np.float32([[0.3, 0.1, 0.1, 0.3, 0.1, 0.1], [0.1, 0.1, 0.5, 0.1, 0.1, 0.1]])
TRIALS = [pytest.param(4000, id="few"), pytest.param(200_000, id="many", marks=pytest.mark.slow)]


def text_law(depth: int, first: np.ndarray = P[0]) -> np.ndarray:
    """Of the first `depth` tokens, when the law of a place does not depend on what came before it."""
    law = first.astype(np.float64)
    for p in P[1:depth]:
        law = np.multiply.outer(law, p.astype(np.float64))
    return law.reshape(-1)


def continued(found: lanewise.Verified, depth: int, rng: np.random.Generator) -> np.ndarray:
    """The text up to `depth`, what the call did not give drawn from the target."""
    tokens = found.tokens[:, :depth].copy()
    for i in range(depth):
        missing = tokens[:, i] < 0
        tokens[missing, i] = rng.choice(V, missing.sum(), p=P[i].astype(np.float64) / P[i].sum(dtype=np.float64))
    return tokens @ V ** np.arange(depth)[::-1]


def drawn(law: np.ndarray, count: int, seed: int, step: int = 0) -> np.ndarray:
    return lanewise.sample_from_probs(np.broadcast_to(law, (count, V)), seed=seed, step=step)


CHAINS: dict[str, dict[str, Any]] = {
    "ratio": {"method": "ratio", "probs": True},
    "block": {"method": "block", "probs": True},
    "ratio of logits": {"method": "ratio"},
    "block of logits": {"method": "block"},
}


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("kind", ["with q", "certain", "same seed"])
@pytest.mark.parametrize("name", CHAINS)
def test_output_of_a_chain_follows_p(name: str, kind: str, trials: int) -> None:
    """Whatever drafts: from q, from q with the noise of the call's own seed, or one that always says the same."""
    how, rng = CHAINS[name], np.random.default_rng(3)
    draft = np.stack([drawn(Q[i], trials, 11 if kind == "same seed" else 21, step=i) for i in range(2)], 1)
    draft = np.broadcast_to(np.int64([3, 2]), draft.shape) if kind == "certain" else draft
    target = np.broadcast_to(P if "probs" in how else np.log(P), (trials, 3, V))
    q = None if kind == "certain" else np.broadcast_to(Q, (trials, 2, V))
    found = lanewise.verify_draft(target, draft, q=q, seed=11, step=0, **how)
    assert chi_square(np.bincount(continued(found, 3, rng), minlength=V**3), text_law(3)) > 1e-4


def test_a_block_keeps_more_than_a_chain() -> None:
    draft = np.stack([drawn(Q[i], 20000, 21 + i) for i in range(2)], 1)
    target, q = np.broadcast_to(P, (20000, 3, V)), np.broadcast_to(Q, (20000, 2, V))
    kept = [
        lanewise.verify_draft(target, draft, q=q, probs=True, method=m, seed=1, step=0).accepted.mean()
        for m in ("ratio", "block")
    ]
    assert kept[1] > kept[0] + 0.02


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("kind", ["with q", "certain", "u"])
def test_output_of_a_tree_follows_p(kind: str, trials: int) -> None:
    """Two drafts follow the text, each followed by one; with q the two are drawn one beside the other."""
    rng = np.random.default_rng(4)
    parents = np.broadcast_to([-1, -1, 0, 1], (trials, 4))
    if kind == "certain":
        draft, q = np.broadcast_to(np.int64([3, 1, 0, 2]), (trials, 4)), None
    else:
        draft = np.stack([drawn(Q[i // 2], trials, 31 + i) for i in range(4)], 1)
        q = np.broadcast_to(Q[[0, 0, 1, 1]], (trials, 4, V))
    target = np.broadcast_to(P[[0, 1, 1, 2, 2]], (trials, 5, V))
    noise: dict[str, Any] = {"u": rng.random((trials, 5))} if kind == "u" else {"seed": 31, "step": 0}
    found = lanewise.verify_draft(target, draft, q=q, parents=parents, probs=True, method="ratio", **noise)
    assert chi_square(np.bincount(continued(found, 3, rng), minlength=V**3), text_law(3)) > 1e-4


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("probs", [False, True])
def test_output_with_shared_noise_follows_p(probs: bool, trials: int) -> None:
    draft = np.stack([drawn(Q[i], trials, 41 + i) for i in range(2)], 1)
    target = np.broadcast_to(P if probs else np.log(P), (trials, 3, V))
    found = lanewise.verify_draft(target, draft, probs=probs, seed=5, step=0)
    assert chi_square(np.bincount(continued(found, 3, np.random.default_rng(5)), minlength=V**3), text_law(3)) > 1e-4


# ---- the text of plain decoding ----


def model(history: list[int], vocab: int = 300) -> np.ndarray:
    """Logits of what follows: any function of the last two tokens."""
    rng = np.random.default_rng([7, *history[-2:]])
    return (3 * rng.standard_normal(vocab)).astype(np.float32)


@pytest.mark.parametrize(
    ("drafter", "tree"), [("good", False), ("bad", False), ("good", True)], ids=["good", "bad", "tree"]
)
@pytest.mark.parametrize(
    "steps", [pytest.param(200, id="few"), pytest.param(10_000, id="many", marks=pytest.mark.slow)]
)
def test_text_is_that_of_plain_decoding(drafter: str, tree: bool, steps: int) -> None:
    told: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.01}
    plain: list[int] = [5]
    while len(plain) <= steps:
        plain.append(lanewise.sample(model(plain), **told, output_ids=np.array(plain), seed=9, step=len(plain)))
    text, rng, stood = [5], np.random.default_rng(1), 0
    while len(text) <= steps:
        guesses: list[int] = []
        for _ in range(rng.integers(0, 5)):
            good = drafter == "good"
            guesses.append(int(model(text + guesses).argmax() if good else rng.integers(300)))
        parents = list(range(-1, len(guesses) - 1))
        if tree:  # beside each guess, in front of it, one that goes nowhere
            parents = [2 * i - 1 for i in range(len(guesses)) for _ in range(2)]
            guesses = [token for guess in guesses for token in (299 - guess, guess)]
        rows = [model(text)]
        for at in range(len(guesses)):
            path = []
            while at >= 0:
                path.insert(0, guesses[at])
                at = parents[at]
            rows.append(model(text + path))
        noise = {"seed": 9, "step": len(text)}
        found = lanewise.verify_draft(
            np.stack(rows), guesses, parents=parents, **told, output_ids=np.array(text), **noise
        )
        text += [int(token) for token in found.tokens if token >= 0]
        stood += int(found.accepted)
    assert text[: steps + 1] == plain[: steps + 1]
    assert (stood > steps // 8) == (drafter == "good")


def test_temperature_0_is_the_greedy_match() -> None:
    rows = np.stack([model([i]) for i in range(4)])
    best = rows.argmax(1)
    found = lanewise.verify_draft(rows, [best[0], best[1], 7], temperature=0.0, seed=1, step=0)
    assert found.tokens.tolist() == [best[0], best[1], best[2], -1] and found.accepted == 2
    for method in ("ratio", "block"):  # of which the certain draft is one as well
        told: dict[str, Any] = {"temperature": 0.0, "method": method, "seed": 3, "step": 9}
        assert lanewise.verify_draft(rows, [best[0], best[1], 7], **told).tokens.tolist() == found.tokens.tolist()


def test_typical_acceptance() -> None:
    """Cai et al. 2024: p > min(epsilon, alpha exp(-H))."""
    p = np.float64([0.5, 0.3, 0.15, 0.05])
    entropy = -(p * np.log(p)).sum()
    rows = np.log(np.float32([p, p]))
    for token in range(4):
        stands = p[token] > min(0.2, 0.6 * np.exp(-entropy))
        found = lanewise.verify_draft(rows, [token], method="typical", thresholds=(0.2, 0.6), seed=1, step=0)
        assert found.accepted == stands, token


# ---- sequences, alone and together ----


@pytest.mark.parametrize("method", ["noise", "ratio", "block"])
def test_a_sequence_alone_is_the_sequence_in_a_batch(method: str, isa: str) -> None:
    rng = np.random.default_rng(2)
    target = (2 * rng.standard_normal((6, 4, 70))).astype(np.float32)
    q = None if method == "noise" else lanewise.softmax(target[:, :3] * np.float32(0.7))
    counts = [0, 1, 3, 3, 2, 3]
    ragged = [target[i, :count].argmax(1).tolist() for i, count in enumerate(counts)]
    padded = np.array([row + [-1] * (3 - len(row)) for row in ragged])
    told: dict[str, Any] = {"method": method, "temperature": 0.8, "top_k": 40, "step": 3}
    batch = lanewise.verify_draft(target, padded, q=q, seed=8, **told)
    flat_q = None if q is None else np.concatenate([q[i, :count] for i, count in enumerate(counts)])
    flat = np.concatenate([target[i, : count + 1] for i, count in enumerate(counts)])
    other = lanewise.verify_draft(flat, ragged, q=flat_q, seed=8, **told)
    for a, b in zip(batch, other, strict=True):
        assert a.tolist() == b.tolist()
    for i, count in enumerate(counts):
        own_q = None if q is None else q[i, :count]
        alone = lanewise.verify_draft(target[i, : count + 1], ragged[i], q=own_q, seed=8, keys=i, **told)
        assert alone.tokens.tolist() == batch.tokens[i, : count + 1].tolist()
        assert alone.accepted == batch.accepted[i] and (batch.tokens[i, count + 1 :] == -1).all()


def test_edits_are_of_a_place() -> None:
    rows = np.zeros((3, 40), np.float32)
    masks = np.zeros((3, 40), bool)
    masks[[0, 1, 2], [7, 8, 9]] = True
    assert lanewise.verify_draft(rows, [7, 8], mask=masks, seed=1, step=0).tokens.tolist() == [7, 8, 9]
    two = lanewise.verify_draft(np.stack([rows] * 2), [[7, 8], [7, 3]], mask=np.stack([masks] * 2), seed=1, step=0)
    assert two.tokens.tolist() == [[7, 8, 9], [7, 8, -1]]
    biased = lanewise.verify_draft(np.stack([rows] * 2), [[], [5]], bias=[{4: 90.0}, {5: 90.0}], seed=1, step=0)
    assert biased.tokens.tolist() == [[4, -1, -1], [5, 5, -1]]
    greedy: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 2.0}
    row = np.float32([[3.0, 2.0, 1.9]] * 3)
    assert lanewise.verify_draft(row, [0, 1], output_ids=[], **greedy).tokens.tolist() == [0, 1, 2]


def test_nothing_is_nothing() -> None:
    found = lanewise.verify_draft(np.zeros((0, 1, 8), np.float32), np.zeros((0, 0), np.int64), seed=1, step=0)
    assert found.tokens.shape == (0, 1) and found.path.shape == (0, 0) and found.accepted.shape == (0,)
    one = lanewise.verify_draft(np.zeros((1, 8), np.float32), [], seed=4, step=2)
    assert one.tokens.tolist() == [lanewise.sample(np.zeros(8, np.float32), seed=4, step=2)]


# ---- what is refused ----

ROWS = np.zeros((3, 8), np.float32)
PROBS = np.full((3, 8), 0.125, np.float32)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"draft": [1, 8]}, r"draft\[1\] is 8, not an id in 0..7"),
        ({"draft": [1, -1]}, r"draft\[1\] is -1"),
        ({"draft": [1]}, "a row more than"),
        ({"draft": [[1], [9]], "target": np.zeros((4, 8), np.float32)}, r"draft\[1\]\[0\] is 9"),
        ({"draft": np.array([[-1, 1]]), "target": ROWS[None]}, "-1 behind all ids"),
        ({"draft": np.array([[1, 2, 3]]), "target": ROWS[None]}, "up to 2 drafts"),
        ({"draft": [1.5, 2.0]}, "draft must be"),
        ({"method": "magic"}, "method must be one of"),
        ({"q": PROBS[:2]}, "q is for method"),
        ({"q": PROBS, "method": "ratio"}, "q must have a row of 8 for each of 2 drafts"),
        ({"q": PROBS[:2, :7], "method": "ratio"}, "q must have a row of 8"),
        ({"parents": [-1, 1]}, r"parents\[1\] is 1"),
        ({"parents": [-2, 0]}, r"parents\[0\] is -2"),
        ({"parents": [-1]}, "parents must have one entry a draft"),
        ({"parents": [-1, 0], "method": "block"}, "a tree is for"),
        ({"parents": [-1, -1], "draft": [4, 4], "method": "ratio"}, "must differ"),
        ({"probs": True, "top_k": 3}, "probs=True takes the target as it is"),
        ({"probs": True, "mask": np.ones(8, bool)}, "probs=True takes the target as it is"),
        ({"probs": True, "method": "typical"}, "'typical' is for logits"),
        ({"thresholds": (0.1, 0.2)}, "thresholds are for"),
        ({"thresholds": (-0.1, 0.2), "method": "typical"}, r"thresholds\[0\]"),
        ({"u": [0.1, 0.2, 1.0], "seed": None, "step": None}, r"u\[2\] is 1.0"),
        ({"u": [0.1, 0.2], "seed": None, "step": None}, "u must have shape"),
        ({"u": [0.1, 0.2, 0.3]}, "do not go with u"),
        ({"step": 2**32 - 2}, "step must be in"),
        ({"output_ids": [[1], [2]], "draft": [1, 2]}, "output_ids must be"),
        ({"target": np.zeros(8, np.float32)}, "target must have shape"),
        ({"target": np.zeros((3, 0), np.float32)}, "at least one column"),
    ],
)
def test_bad_input_is_refused(told: dict[str, Any], says: str) -> None:
    told = {"target": ROWS, "draft": [1, 2], "seed": 1, "step": 0} | told
    with pytest.raises((ValueError, TypeError), match=says):
        lanewise.verify_draft(told.pop("target"), told.pop("draft"), **told)
