"""Each processor beside transformers' own: constructors, what is kept, and all that is left to the class above."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import lanewise.compat.transformers as compat

import page

NAMES = [name for name in compat.__all__ if hasattr(transformers, name)]
CONSTRUCTORS: dict[str, list[tuple[Any, ...]]] = {
    "TemperatureLogitsWarper": [(0.7,), (1,), (0.0,), (-1.0,), (math.nan,), ("warm",), ()],
    "TopKLogitsWarper": [(3,), (3, -1e4), (3, -1e4, 7), (0,), (-1,), (2.0,), (True,), ("3",), ()],
    "TopPLogitsWarper": [(0.9,), (0,), (1,), ("0.5",), (-0.1,), (1.1,), (math.nan,), (0.5, -1.0, 0), (0.5, -1.0, 2.0)],
    "MinPLogitsWarper": [(0.1,), (0,), (1,), (-0.1,), (1.1,), (math.nan,), ("a",), (0.1, 0.0, 0), (0.1, 0.0, 3)],
    "EpsilonLogitsWarper": [(0.01,), (0,), (1,), (math.nan,), ("0.1",), (0.1, 0.0, 0), (0.1, 0.0, 2.5)],
    "EtaLogitsWarper": [(0.01,), (0,), (1,), ("0.1",), (0.1, 0.0, 0), (0.1, 0.0, 2.5), (0.1, 0.0, 1, "nowhere")],
    "RepetitionPenaltyLogitsProcessor": [
        *[(1.2,), (1,), (0.0,), (-1.0,), (math.inf,), (1.2, 3), (1.2, -3), (1.2, None)],
        *[(1.2, torch.tensor([1, 2])), (1.2, torch.ones(2, 2, dtype=torch.int64))],
    ],
}


def made(kind: type, arguments: tuple[Any, ...]) -> Any:
    """The attributes, or the error."""
    try:
        return {name: str(value) for name, value in vars(kind(*arguments)).items()}
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", NAMES)
def test_constructors_take_and_refuse_what_transformers_does(name: str) -> None:
    ours, theirs = getattr(compat, name), getattr(transformers, name)
    assert issubclass(ours, theirs)
    assert inspect.signature(ours) == inspect.signature(theirs)
    for arguments in CONSTRUCTORS[name]:
        assert made(ours, arguments) == made(theirs, arguments), arguments


# ---- what is kept ----

ROWS, VOCAB = 10_000, 300
KINDS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "peaked": lambda rng: rng.normal(0, 4, (ROWS // 4, VOCAB)),
    "flat": lambda rng: rng.normal(20, 0.3, (ROWS // 4, VOCAB)),
    "forbidden": lambda rng: np.where(rng.random((ROWS // 4, VOCAB)) < 0.9, -np.inf, rng.normal(0, 3, VOCAB)),
    "tied": lambda rng: np.round(rng.normal(0, 3, (ROWS // 4, VOCAB))),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def rows(request: pytest.FixtureRequest) -> torch.Tensor:
    rng = np.random.default_rng(1)
    made = np.concatenate([make(rng) for make in KINDS.values()]).astype(np.float32)
    made[:, 0] = made.max(1)  # no row is without an id
    made[made[:, 0] == -np.inf, 0] = 0
    return torch.from_numpy(made).to(getattr(torch, request.param))


IDS = torch.from_numpy(np.random.default_rng(2).integers(0, VOCAB, (ROWS, 20)))


def test_the_same_bits(rows: torch.Tensor) -> None:
    """Nothing here is rounded otherwise, and ties have no say."""
    ends = torch.arange(ROWS) % 25
    for name, arguments in [
        *[("TopKLogitsWarper", a) for a in [(1,), (5,), (50,), (VOCAB,), (VOCAB + 9,), (2, -math.inf, 9)]],
        *[
            ("RepetitionPenaltyLogitsProcessor", a)
            for a in [(1.3,), (0.6,), (1.3, 7), (1.3, 0), (1.3, 99), (1.3, ends)]
        ],
        ("TemperatureLogitsWarper", (0.6,)),
    ]:
        before = rows.clone()
        got = getattr(compat, name)(*arguments)(IDS, rows)
        want = getattr(transformers, name)(*arguments)(IDS, rows)
        assert got.dtype == rows.dtype and torch.equal(got, want), (name, arguments)
        assert torch.equal(rows, before)


def undecided(name: str, setting: float, row: torch.Tensor) -> bool:
    """Whether float64 cannot tell either, within float32's rounding, where the truncation is to end."""
    p = torch.sort(torch.softmax(row.double(), -1), descending=True)[0]
    if name == "TopPLogitsWarper":
        return bool((p.cumsum(-1) - setting).abs().min() < 1e-5)
    entropy = -torch.special.xlogy(p, p).sum()
    least = {
        "MinPLogitsWarper": setting * p[0],
        "EpsilonLogitsWarper": torch.tensor(setting),
        "EtaLogitsWarper": torch.minimum(torch.tensor(setting), math.sqrt(setting) * torch.exp(-entropy)),
    }[name]
    return bool(((p - least).abs() < 2e-5 * least).any())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *[
            ("TopPLogitsWarper", a)
            for a in [(0.1,), (0.5,), (0.9,), (0.99,), (0.9, -math.inf, 40), (0.0, -math.inf, 2)]
        ],
        *[("MinPLogitsWarper", a) for a in [(0.0,), (0.05,), (0.3,), (0.3, -math.inf, 40)]],
        *[("EpsilonLogitsWarper", a) for a in [(0.003,), (0.2,), (0.01, -math.inf, 3)]],
        *[("EtaLogitsWarper", a) for a in [(0.003,), (0.2,), (0.01, -math.inf, 3)]],
    ],
)
def test_as_many_and_the_same_values(name: str, arguments: tuple[Any, ...], rows: torch.Tensor) -> None:
    """Which of two equal ones is kept is up to transformers' sort; 16 bits are judged in 32, as in generate()."""
    got = getattr(compat, name)(*arguments)(IDS, rows)
    want = getattr(transformers, name)(*arguments)(IDS, rows.float()).to(rows.dtype)
    assert got.dtype == rows.dtype and got.shape == rows.shape
    assert bool(((got == rows) | (got == -math.inf)).all())
    differing = (got.float().sort()[0] != want.float().sort()[0]).any(1).nonzero()[:, 0].tolist()
    assert len(differing) <= 3
    assert all(undecided(name, arguments[0], rows[r]) for r in differing), differing


# ---- what is left to the class above ----


@pytest.mark.parametrize("name", ["TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"])
def test_everything_else_is_as_before(name: str) -> None:
    setting = {"TopKLogitsWarper": 3, "TopPLogitsWarper": 0.7, "MinPLogitsWarper": 0.2}[name]
    row = torch.tensor([[3.0, 1.0, -math.inf, 2.0, 0.5, 2.5]])
    nan = torch.where(row == 2.0, math.nan, row)
    for scores, arguments in [
        (row, (setting, -1e4)),
        (row.double(), (setting,)),
        (nan, (setting,)),
        (torch.where(row == 2.0, math.inf, row), (setting,)),
        (torch.full_like(row, -math.inf), (setting,)),
        (torch.cat([row, nan]), (setting,)),
        (row.clone().requires_grad_(), (setting,)),
        (row[:0], (setting,)),
        (row.T.contiguous().T.repeat(2, 1)[:, ::2], (setting,)),
    ]:
        got = getattr(compat, name)(*arguments)(IDS[:1], scores)
        want = getattr(transformers, name)(*arguments)(IDS[:1], scores)
        assert got.dtype == want.dtype and got.requires_grad == want.requires_grad
        assert torch.allclose(got, want, rtol=0, atol=0, equal_nan=True), (scores, arguments)


@pytest.mark.parametrize("negate", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_negation_to_be_done_and_another_default_device(device: str, negate: bool) -> None:
    scores = torch.tensor([[1.0, -2.0, 3.0], [-5.0, 1.0, 0.5]])
    given = torch._neg_view(-scores) if negate else scores
    ids = torch.tensor([[0, 1], [1, 2]])
    with torch.device(device):
        kept = compat.TopKLogitsWarper(2)(ids, given)
        tokens = compat.Sampler([compat.TopKLogitsWarper(1)], torch.Generator("cpu"))(ids, given)
    assert torch.equal(kept, transformers.TopKLogitsWarper(2)(ids, scores))
    assert tokens.tolist() == [2, 1]


def test_top_p_of_one_is_transformers_own() -> None:
    row = torch.tensor([[0.0, -200.0, -1.0]])  # the second rounds to a probability of 0, and is dropped
    assert torch.equal(compat.TopPLogitsWarper(1.0)(IDS[:1], row), transformers.TopPLogitsWarper(1.0)(IDS[:1], row))


@pytest.mark.parametrize("ids", [torch.tensor([[0, -1]]), torch.tensor([0, 1]), torch.tensor([[0.5, 1.5]])])
def test_penalties_refuse_what_transformers_refuses(ids: torch.Tensor) -> None:
    outcomes = []
    for module in (compat, transformers):
        for more in ((), (torch.tensor([1, 1, 1]),)):
            processor = module.RepetitionPenaltyLogitsProcessor(1.5, *more)
            try:
                outcomes.append(processor(ids, torch.tensor([[3.0, -1.0, 2.0]])).tolist())
            except Exception as error:
                outcomes.append(type(error))
    assert outcomes[:2] == outcomes[2:]
    assert any(isinstance(outcome, type) for outcome in outcomes)


def test_ids_beyond_the_logits_are_skipped() -> None:
    ids, scores = torch.tensor([[0, 7, 2]]), torch.tensor([[3.0, -1.0, -2.0]])
    got = compat.RepetitionPenaltyLogitsProcessor(2.0)(ids, scores)
    assert torch.equal(got, transformers.RepetitionPenaltyLogitsProcessor(2.0)(ids, scores))
    assert got.tolist() == [[1.5, -1.0, -4.0]]


def test_a_list_of_them() -> None:
    ids, scores = IDS[:8], torch.from_numpy(np.random.default_rng(3).normal(0, 3, (8, VOCAB)).astype(np.float32))
    results = []
    for module in (compat, transformers):
        steps = [
            module.RepetitionPenaltyLogitsProcessor(1.3),
            module.TemperatureLogitsWarper(0.7),
            module.TopKLogitsWarper(50),
            module.TopPLogitsWarper(0.9),
            module.MinPLogitsWarper(0.02),
        ]
        results.append(transformers.LogitsProcessorList(steps)(ids, scores))
    assert torch.equal(*results)


def test_the_page() -> None:
    page.run_section("transformers")
