"""rejection_sample against vLLM's own, with its compiled kernels: greedy rows by equality, the others by their law."""

import inspect

import numpy as np
import pytest
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from lanewise.compat import vllm as ours

inf, nan = float("inf"), float("nan")
V = 1000
DRAWS = 20_000
TARGET, DRAFT = torch.tensor([0.4, 0.3, 0.05, 0.25]), torch.tensor([0.1, 0.2, 0.3, 0.4])


def told(temperature, generators=None):
    """What vLLM hands on of a batch's parameters; a temperature a request, 0 if it is greedy."""
    temperature = torch.as_tensor(temperature, dtype=torch.float32)
    greedy = temperature == 0
    return SamplingMetadata(
        temperature=None if greedy.all() else temperature,
        all_greedy=bool(greedy.all()),
        all_random=bool((~greedy).all()),
        top_p=None,
        top_k=None,
        generators=generators or {},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(0),
        presence_penalties=torch.zeros(0),
        repetition_penalties=torch.ones(0),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def batch(counts, seed=0, agreeing=0.7):
    """Drafts of which most are what the target thinks best: their ids, counts, longest, sums, logits and bonus ids."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(counts), V, generator=generator)
    ids = torch.randint(0, V, (sum(counts),), generator=generator, dtype=torch.int32)
    agrees = torch.rand(sum(counts), generator=generator) < agreeing
    ids[agrees] = logits[agrees].argmax(1).int()
    bonus = torch.randint(0, V, (len(counts), 1), generator=generator)
    return ids, counts, max(counts), torch.tensor(counts).cumsum(0).int(), logits, bonus


def run(function, drafts, metadata, draft_probs=None, **more):
    *first, logits, bonus = drafts
    return function(*first, draft_probs, logits, bonus, metadata, **more)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("counts", [[3], [1, 4, 0, 2, 3], [2] * 20], ids=str)
def test_greedy_requests_get_vllms_tokens(counts, seed):
    drafts, metadata = batch(counts, seed), told([0.0] * len(counts))
    mine, theirs = (run(f, drafts, metadata) for f in (ours.rejection_sample, ours._rejection_sample))
    assert torch.equal(mine, theirs)
    assert (mine.dtype, mine.shape) == (torch.int32, (len(counts), max(counts) + 1))
    assert (mine[:, -1] == -1).any() or counts == [3]


@pytest.mark.parametrize("with_probs", [True, False])
def test_greedy_requests_among_others(with_probs):
    counts = [3, 2, 0, 4]
    drafts, metadata = batch(counts), told([0.0, 1.0, 0.0, 0.7])
    probs = torch.softmax(torch.randn(sum(counts), V), 1) if with_probs else None
    mine, theirs = (run(f, drafts, metadata, probs) for f in (ours.rejection_sample, ours._rejection_sample))
    assert torch.equal(mine[[0, 2]], theirs[[0, 2]])
    assert (mine[[1, 3], 0] >= 0).all()


def test_the_bonus_stands_behind_all_drafts_and_nothing_behind_a_refusal():
    logits = torch.full((4, V), -inf)
    logits[[0, 1, 2, 3], [5, 6, 7, 8]] = 0.0
    ids, bonus = torch.tensor([5, 6, 1, 8], dtype=torch.int32), torch.tensor([[20], [21]])
    for temperature in (0.0, 1.0):
        drafts = ids, [2, 2], 3, torch.tensor([2, 4], dtype=torch.int32), logits, bonus
        found = run(ours.rejection_sample, drafts, told([temperature] * 2))
        assert found.tolist() == [[5, 6, 20, -1], [7, -1, -1, -1]]


def test_a_padded_draft_is_refused():
    """As vLLM's Triton kernel has it; its compiled one reads the probability before the row."""
    logits = torch.full((3, V), -inf)
    logits[[0, 1, 2], [5, 6, 7]] = 0.0
    ids, bonus = torch.tensor([5, -1, -1], dtype=torch.int32), torch.tensor([[20], [21]])
    drafts = ids, [2, 1], 2, torch.tensor([2, 3]), logits, bonus
    for temperature in (0.0, 1.0):
        for probs in (None, torch.full((3, V), 1 / V)):
            found = run(ours.rejection_sample, drafts, told([temperature] * 2), probs)
            assert found.tolist() == [[5, 6, -1], [7, -1, -1]]


def assert_law(counts, law, bound=5):
    """Nothing outside the law's support, and chi-square within five of its standard deviations."""
    law = np.asarray(law, np.float64)
    law, kept = law / law.sum(), law > 0
    assert not counts[~kept].any()
    n = counts.sum()
    statistic = ((counts[kept] - n * law[kept]) ** 2 / (n * law[kept])).sum()
    freedom = kept.sum() - 1
    assert abs(statistic - freedom) <= bound * np.sqrt(2 * freedom)


@pytest.mark.parametrize("with_probs", [True, False])
def test_what_is_emitted_has_the_law_of_the_target(with_probs):
    """The first id, whatever was drafted; the second, where the first draft was accepted; and as many are accepted as
    the two laws have in common."""
    torch.manual_seed(0)
    rows = DRAWS
    ids = torch.multinomial(DRAFT if with_probs else torch.tensor([0.5, 0.5, 0, 0]), 2 * rows, replacement=True).int()
    logits = TARGET.log().expand(2 * rows, 4).contiguous()
    probs = DRAFT.expand(2 * rows, 4).contiguous() if with_probs else None
    drafts = ids, [2] * rows, 2, torch.arange(2, 2 * rows + 2, 2), logits, torch.full((rows, 1), 3)
    for function in (ours.rejection_sample, ours._rejection_sample):
        found = run(function, drafts, told(torch.ones(rows)), probs).numpy()
        assert_law(np.bincount(found[:, 0], minlength=4), TARGET)
        follows = found[found[:, 1] >= 0]
        assert_law(np.bincount(follows[:, 1], minlength=4), TARGET)
        share = torch.minimum(TARGET, DRAFT).sum() if with_probs else 0.5 * (TARGET[0] + TARGET[1])
        assert abs(len(follows) / rows - share) < 5 * (share * (1 - share) / rows) ** 0.5
        assert (found[found[:, 2] >= 0, 2] == 3).all()


def test_a_generator_decides_and_is_advanced_where_there_are_drafts():
    drafts = batch([3, 0, 3], agreeing=0)

    def drawn(seed):
        torch.manual_seed(seed)
        made = {0: torch.Generator().manual_seed(5), 1: torch.Generator().manual_seed(6)}
        before = {i: each.get_state() for i, each in made.items()}
        found = run(ours.rejection_sample, drafts, told([1.0] * 3, made), torch.full((6, V), 1 / V))
        return found, [torch.equal(made[i].get_state(), before[i]) for i in made]

    (one, kept), (other, _) = drawn(1), drawn(2)
    assert kept == [False, True]
    assert torch.equal(one[0], other[0])
    assert not torch.equal(one[2], other[2])


@pytest.mark.parametrize("odd", [[nan] * V, [-inf] * V, [inf] + [0.0] * (V - 1)], ids=["nan", "nothing", "inf"])
def test_rows_that_cannot_be_judged_are_left_to_vllm(odd):
    drafts = batch([2, 3])
    drafts[4][1] = torch.tensor(odd)
    mine, theirs = (run(f, drafts, told([0.0, 0.0])) for f in (ours.rejection_sample, ours._rejection_sample))
    assert torch.equal(mine, theirs)
    made = {i: torch.Generator() for i in range(2)}
    results = []
    for function in (ours.rejection_sample, ours._rejection_sample):
        made[0].manual_seed(1), made[1].manual_seed(2)
        results.append(run(function, drafts, told([1.0, 1.0], made)))
    assert results[0].shape == results[1].shape


def test_other_tensors_are_vllms():
    drafts = batch([2, 1])
    double = (*drafts[:4], drafts[4].double(), drafts[5])
    mine, theirs = (run(f, double, told([0.0, 0.0])) for f in (ours.rejection_sample, ours._rejection_sample))
    assert torch.equal(mine, theirs)


def test_the_signature_is_vllms():
    mine, theirs = (inspect.signature(f).parameters for f in (ours.rejection_sample, ours._rejection_sample))
    assert list(mine) == list(theirs)
    assert [each.default for each in mine.values()] == [each.default for each in theirs.values()]


def test_vllms_rejection_sampler_on_lanewise():
    counts = [2, 0, 3]
    made = SpecDecodeMetadata.make_dummy([[5] * n for n in counts], device=torch.device("cpu"))
    logits = torch.randn(sum(counts) + len(counts), V, generator=torch.Generator().manual_seed(0))
    sampler = rejection_sampler.RejectionSampler(Sampler())
    theirs = sampler(made, None, logits.clone(), told([0.0] * 3)).sampled_token_ids
    with ours.installed():
        assert rejection_sampler.rejection_sample is ours.rejection_sample
        mine = sampler(made, None, logits.clone(), told([0.0] * 3)).sampled_token_ids
        drawn = sampler(made, None, logits.clone(), told([1.0] * 3)).sampled_token_ids
    assert rejection_sampler.rejection_sample is ours._rejection_sample
    assert torch.equal(mine, theirs)
    assert (drawn[:, 0] >= 0).all()
