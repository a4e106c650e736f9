"""generate() within installed(), on a small random model: what is the same, what is drawn, what goes on as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import lanewise
import lanewise.compat.transformers as compat

import page

VOCAB = 96
PROMPT = torch.tensor([[5, 17, 80, 3]])


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def text(model: Any, seed: int = 1, **how: Any) -> Any:
    torch.manual_seed(seed)
    return model.generate(PROMPT, **{"do_sample": True, "max_new_tokens": 12, **how})


# ---- the law ----


def limit(freedom: int) -> float:
    """Chi-square of that many degrees of freedom exceeds it once in a million (Wilson and Hilferty)."""
    if not freedom:
        return 1e-9
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + 4.753 * part**0.5) ** 3)


def chi_square(drawn: np.ndarray, law: np.ndarray) -> tuple[float, int]:
    """Cells of fewer than 10 expected are one cell."""
    counts, expected = np.bincount(drawn, minlength=len(law)), law * len(drawn)
    assert counts.sum() == counts[law > 0].sum(), "something impossible was drawn"
    few = expected < 10
    if expected[few].sum() > 0:
        counts = np.append(counts[~few], counts[few].sum())
        expected = np.append(expected[~few], expected[few].sum())
    else:
        counts, expected = counts[~few], expected[~few]
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


def first_law(model: Any, prompt: torch.Tensor, **how: Any) -> np.ndarray:
    """What transformers' own processors leave of the first token."""
    result = model.generate(
        prompt, do_sample=True, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, **how
    )
    return torch.softmax(result.scores[0][0].double(), -1).numpy()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "temperature, top-p": {"temperature": 0.7, "top_k": 0, "top_p": 0.9},
    "all": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
    "what is not fused": {"temperature": 0.9, "top_k": 30, "typical_p": 0.9, "epsilon_cutoff": 0.01},
    "both": {"no_repeat_ngram_size": 2, "temperature": 0.9, "top_k": 30, "renormalize_logits": True},
}
DRAWS = 20_000


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_text_has_the_law_of_transformers(name: str, model: Any) -> None:
    """Two tokens deep. If the law were off by a total variation of 0.04, chi-square would have a noncentrality of at
    least 4 * 20,000 * 0.04^2 = 128, which for up to 30 degrees of freedom passes the limit with 99.8 % or more."""
    how = SETTINGS[name]
    torch.manual_seed(5)
    with compat.installed():
        drawn = model.generate(PROMPT, do_sample=True, max_new_tokens=2, num_return_sequences=DRAWS, **how)
    first, second = drawn[:, -2:].numpy().T
    law = first_law(model, PROMPT, **how)
    statistic, freedom = chi_square(first, law)
    assert statistic < limit(freedom)
    assert chi_square(first, off_by(law, 0.04))[0] > limit(freedom)  # it can fail
    often = int(np.bincount(first).argmax())
    law = first_law(model, torch.cat([PROMPT, torch.tensor([[often]])], 1), **how)
    statistic, freedom = chi_square(second[first == often], law)
    assert statistic < limit(freedom)


def off_by(law: np.ndarray, variation: float) -> np.ndarray:
    """Some probability moved from the likeliest to the rest of what is possible."""
    moved = np.where(law > 0, law, 0.0)
    top = int(law.argmax())
    moved[top] = 0
    moved *= 1 + variation / moved.sum()
    moved[top] = law[top] - variation
    return moved


def test_rows_and_steps_have_noise_of_their_own(model: Any) -> None:
    with compat.installed():
        drawn = text(model, num_return_sequences=50, top_k=0, temperature=3.0)
    new = drawn[:, PROMPT.shape[1] :]
    assert len(torch.unique(new, dim=0)) == 50
    assert len(torch.unique(new[0])) > 3


# ---- seeds ----


def test_the_seed_is_torchs(model: Any) -> None:
    with compat.installed():
        once, again, other = text(model), text(model), text(model, seed=2)
        more = model.generate(PROMPT, do_sample=True, max_new_tokens=12)
    assert torch.equal(once, again)
    assert not torch.equal(other[:, :8], once[:, :8]) and not torch.equal(more[:, :8], other[:, :8])


def test_a_seed_of_its_own_leaves_torchs_alone(model: Any) -> None:
    def two() -> list[list[int]]:
        with compat.installed(seed=7):
            return [model.generate(PROMPT, do_sample=True, max_new_tokens=12)[0].tolist() for _ in range(2)]

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second = two()
    assert torch.equal(torch.rand(3), expected)
    assert two() == [first, second] and first[:9] != second[:9]


def test_a_text_does_not_depend_on_its_batch(model: Any) -> None:
    with compat.installed(seed=3):
        alone = model.generate(PROMPT, do_sample=True, max_new_tokens=8)
    with compat.installed(seed=3):
        together = model.generate(PROMPT.repeat(3, 1), do_sample=True, max_new_tokens=8)
    assert torch.equal(alone[0], together[0][: alone.shape[1]])


# ---- as before ----


@pytest.mark.parametrize(
    "how", [{}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 1}, {"output_scores": True}], ids=str
)
def test_greedy_text_is_identical(how: dict[str, Any], model: Any) -> None:
    before = text(model, do_sample=False, **how)
    with compat.installed():
        assert torch.equal(text(model, do_sample=False, **how), before)


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_beams_go_on_as_before(how: dict[str, Any], model: Any) -> None:
    before = text(model, **how)
    with compat.installed():
        assert torch.equal(text(model, **how), before)


def test_an_assistant_drafts(model: Any) -> None:
    with compat.installed():
        once = text(model, assistant_model=model)
        assert torch.equal(once, text(model, assistant_model=model))
    assert once.shape[1] > PROMPT.shape[1]


class Counting(LogitsProcessor):
    """Has state: each step it is asked once, or it is wrong."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.asked, self.change = 0, change

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return self.change(scores)


@pytest.mark.parametrize("kept", [False, True])
def test_a_processor_of_ones_own_runs_first_and_once(kept: bool, model: Any) -> None:
    odd = Counting(lambda scores: torch.where(torch.arange(VOCAB) % 2 == 1, scores, -torch.inf))
    more = {"output_scores": kept, "return_dict_in_generate": True}
    with compat.installed():
        result = text(model, logits_processor=LogitsProcessorList([odd]), top_p=0.8, temperature=1.5, **more)
    assert odd.asked == result.sequences.shape[1] - PROMPT.shape[1] > 3
    assert (result.sequences[:, PROMPT.shape[1] :] % 2 == 1).all()


def test_what_multinomial_refuses_is_refused_alike(model: Any) -> None:
    for change in (lambda scores: scores * torch.nan, lambda scores: scores + torch.inf):
        errors = []
        for context in (compat.installed, lambda: torch.no_grad()):
            with context(), pytest.raises(RuntimeError) as error:
                text(model, logits_processor=LogitsProcessorList([Counting(change)]))
            errors.append(str(error.value))
        assert errors[0] == errors[1]


def test_scores_and_logits_are_those_of_transformers(model: Any) -> None:
    more = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, "top_k": 9, "top_p": 0.9}
    before = text(model, **more)
    with compat.installed():
        result, bare = text(model, **more), text(model, top_k=9, top_p=0.9)
    assert type(result) is type(before)
    assert torch.equal(result.scores[0], before.scores[0]) and torch.equal(result.logits[0], before.logits[0])
    assert {type(scores) for scores in result.scores} == {torch.Tensor}
    steps = zip(result.scores, result.sequences[0, PROMPT.shape[1] :], strict=True)
    assert all(scores[0, token] > -torch.inf for scores, token in steps)
    assert torch.equal(bare, result.sequences)  # asking for scores changes no token


# ---- putting it in place ----


def test_it_is_taken_back(model: Any) -> None:
    before, method = text(model), GenerationMixin._sample
    with compat.installed(), compat.installed(seed=1):
        assert not torch.equal(text(model)[:, :9], before[:, :9])
    with pytest.raises(ZeroDivisionError), compat.installed():
        raise ZeroDivisionError
    assert GenerationMixin._sample is method
    assert torch.equal(text(model), before)


def test_blocks_may_end_in_any_order(model: Any) -> None:
    before = GenerationMixin._sample
    first, second = compat.installed(seed=1), compat.installed(seed=2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    asked = {"do_sample": True, "max_new_tokens": 8}
    among = model.generate(PROMPT, **asked)
    second.__exit__(None, None, None)
    assert GenerationMixin._sample is before
    with compat.installed(seed=2):
        assert torch.equal(model.generate(PROMPT, **asked), among)


def test_another_question_than_argmax_is_refused() -> None:
    drawn = torch.zeros(1, 3).as_subclass(compat.Drawn)
    drawn.tokens = torch.tensor([2])
    with pytest.raises(RuntimeError, match=r"asks the scores for softmax, not argmax: use 5\."):
        torch.softmax(drawn, -1)
    assert torch.argmax(drawn, -1).tolist() == [2] and type(drawn) is torch.Tensor
    assert torch.argmax(drawn, -1).tolist() == [0]


# ---- the step alone ----


def test_one_call_keeps_what_the_processors_keep() -> None:
    """Rows as bfloat16 models give them: most have ties where top-k ends."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.normal(0, 3, (10_000, 500)).astype(np.float32)).bfloat16().float()
    ids = torch.from_numpy(rng.integers(0, 500, (10_000, 9)))
    own = [
        transformers.RepetitionPenaltyLogitsProcessor(1.2),
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(40),
        transformers.TopPLogitsWarper(0.9),
        transformers.MinPLogitsWarper(0.03),
    ]
    sampler = compat.Sampler(own)
    assert not sampler.before
    penalty = sampler.penalties(ids, rows)
    assert penalty is not None
    _, kept = lanewise.sample(rows.numpy(), **sampler.told, **penalty, return_support=True)
    counts = (LogitsProcessorList(own)(ids, rows) > -torch.inf).sum(1).numpy()
    assert (np.diff(kept.indptr) != counts).sum() <= 5  # where top-p ends within float32's rounding of the sums
    tied = (LogitsProcessorList(own[:3])(ids, rows) > -torch.inf).sum(1)
    assert (tied > 40).float().mean() > 0.2


@pytest.mark.parametrize(
    ("steps", "before"),
    [
        ([transformers.TopKLogitsWarper(5, filter_value=-9.0), transformers.TopPLogitsWarper(0.5)], 1),
        ([transformers.TopPLogitsWarper(0.5, min_tokens_to_keep=2), transformers.TemperatureLogitsWarper(2.0)], 1),
        ([transformers.TemperatureLogitsWarper(2.0), transformers.TemperatureLogitsWarper(0.5)], 1),
        ([transformers.TemperatureLogitsWarper(1e-37)], 1),
        ([transformers.TopPLogitsWarper(0.5), transformers.TypicalLogitsWarper(0.5)], 2),
        ([compat.TopPLogitsWarper(0.5), compat.TopKLogitsWarper(3, min_tokens_to_keep=9)], 0),
        ([compat.RepetitionPenaltyLogitsProcessor(2.0), transformers.LogitNormalization()], 0),
        ([compat.RepetitionPenaltyLogitsProcessor(2.0), compat.RepetitionPenaltyLogitsProcessor(2.0)], 1),
        ([compat.TemperatureLogitsWarper(2.0), compat.RepetitionPenaltyLogitsProcessor(2.0)], 1),
    ],
)
def test_only_what_means_the_same_is_fused(steps: list[Any], before: int) -> None:
    """And what comes out has the law of the list."""
    sampler = compat.Sampler(steps)
    assert len(sampler.before) == before
    ids, row = torch.tensor([[3, 4]]), torch.linspace(-3, 3, 32)[None]
    law = torch.softmax(LogitsProcessorList(steps)(ids, row).double(), -1)[0].numpy()
    tokens = sampler(ids.repeat(20_000, 1), row.repeat(20_000, 1))
    assert tokens.dtype == torch.int64 and tokens.shape == (20_000,)
    statistic, freedom = chi_square(tokens.numpy(), law)
    assert statistic < limit(freedom)


def test_where_lanewise_cannot_transformers_draws() -> None:
    scores = torch.zeros(2, 4, dtype=torch.float64)
    scores[:, 1] = 50
    assert compat.Sampler([transformers.TopKLogitsWarper(2)])(PROMPT.repeat(2, 1), scores).tolist() == [1, 1]


def test_the_example() -> None:
    page.run_example("transformers_generate")
