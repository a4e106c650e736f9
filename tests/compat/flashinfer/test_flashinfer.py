"""Against flashinfer's signatures and reference functions, which need no GPU, and against its kernels' rule."""

import inspect

import numpy as np
import pytest
import torch
from flashinfer import sampling
from flashinfer.trace.templates import sampling as reference

from lanewise.compat import flashinfer as ours

import page

DRAWS = 20_000
inf, nan = float("inf"), float("nan")


def peaked(rows=4, ids=1000, seed=0):
    return torch.softmax(torch.randn(rows, ids, generator=torch.Generator().manual_seed(seed)) * 3, -1)


def nucleus_by_kernel(row, p):
    """Kept is what has less than p strictly above it, by its own value: equals are kept together."""
    row = np.asarray(row, np.float64)
    return np.array([row[row > value].sum() < np.float32(p) for value in row]) | (row == row.max())


def largest_by_kernel(row, k):
    row = np.asarray(row)
    return np.array([(row > value).sum() < k for value in row])


def drawn(function, row, *args, **kwargs):
    """How often each id is drawn from one row, in DRAWS output rows of one call."""
    rows = torch.as_tensor(row, dtype=torch.float32)[None]
    ids = function(rows, *args, indices=torch.zeros(DRAWS, dtype=torch.int32), seed=1, offset=0, **kwargs)
    return np.bincount(ids.numpy(), minlength=rows.shape[1])


def assert_law(counts, law):
    """Nothing outside the law's support, all of it drawn, and chi-square within five of its standard deviations."""
    law = np.asarray(law, np.float64)
    law = law / law.sum()
    kept = law > 0
    assert np.array_equal(counts > 0, kept)
    statistic = ((counts[kept] - DRAWS * law[kept]) ** 2 / (DRAWS * law[kept])).sum()
    freedom = kept.sum() - 1
    assert abs(statistic - freedom) <= 5 * np.sqrt(2 * freedom) + 1e-9


# ---- names ----


OF_SAMPLING = [name for name in ours.__all__ if getattr(ours, name).__module__ == ours.__name__]


@pytest.mark.parametrize("name", OF_SAMPLING)
def test_arguments_and_defaults_are_those_of_flashinfer(name):
    theirs = inspect.signature(getattr(sampling, name)).parameters.values()
    mine = inspect.signature(getattr(ours, name)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]


def test_nothing_public_of_flashinfer_sampling_is_missing():
    defined = {
        name
        for name, value in vars(sampling).items()
        if inspect.isfunction(value) and value.__module__ == sampling.__name__ and not name.startswith("_")
    }
    at_work_inside = {name for name in defined if name.startswith("get_")}
    assert defined - at_work_inside == set(OF_SAMPLING)


# ---- values: flashinfer's reference functions ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masks_and_renormalised_rows_are_those_of_the_references(dtype):
    probs = peaked().to(dtype)
    logits = torch.randperm(2000, generator=torch.Generator().manual_seed(1)).reshape(4, 500).to(dtype)
    assert ours.top_k_mask_logits(logits[:, :200], 1).dtype == dtype
    if dtype == torch.float32:  # the references cut equals, the kernels do not: 16-bit rows have some
        theirs = reference._top_k_mask_logits_reference(logits, 50)
        assert torch.equal(ours.top_k_mask_logits(logits, 50), theirs)
        theirs = reference._top_k_renorm_probs_reference(probs, 50)
        torch.testing.assert_close(ours.top_k_renorm_probs(probs, 50), theirs, rtol=1e-6, atol=0)
        theirs = reference._top_p_renorm_probs_reference(probs, 0.9)
        mine = ours.top_p_renorm_probs(probs, 0.9)
        assert torch.equal(mine > 0, theirs > 0)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    mine = ours.top_k_renorm_probs(probs, 50)
    assert mine.dtype == dtype
    kept = np.stack([largest_by_kernel(row, 50) for row in probs.float().numpy()])
    assert np.array_equal(mine.float().numpy() > 0, kept & (probs.float().numpy() > 0))
    assert ours.top_p_renorm_probs(probs, 0.5).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [None, 0.7, 2, torch.tensor([0.5, 1.0, 1.5, 3.0])])
def test_softmax_is_that_of_the_reference(dtype, temperature):
    logits = (torch.randn(4, 1000, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    mine = ours.softmax(logits, temperature)
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, reference._softmax_reference(logits.float(), temperature), rtol=1e-5, atol=1e-9)


def test_one_value_a_row_is_that_value_for_its_row():
    probs, p, k = peaked(), torch.tensor([0.1, 0.5, 0.9, 1.0]), torch.tensor([1, 5, 50, -1])
    for row in range(4):
        one = probs[row : row + 1]
        assert torch.equal(ours.top_p_renorm_probs(probs, p)[row], ours.top_p_renorm_probs(one, p[row].item())[0])
        assert torch.equal(ours.top_k_renorm_probs(probs, k)[row], ours.top_k_renorm_probs(one, k[row].item())[0])
        assert torch.equal(ours.top_k_mask_logits(probs, k)[row], ours.top_k_mask_logits(one, k[row].item())[0])
    assert torch.equal(ours.top_k_mask_logits(probs, -1), probs)


# ---- values: the kernels' rule, where the reference has another ----

HALF = [0.5, 0.25, 0.125, 0.125]
EQUALS = [0.125, 0.25, 0.125, 0.25, 0.25]


@pytest.mark.parametrize("row", [HALF, EQUALS], ids=["a sum that is p", "equals at the bound"])
@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
def test_top_p_keeps_what_has_less_than_p_strictly_above_it(row, p):
    kept = nucleus_by_kernel(row, p) if p > 0 else np.array(row) == max(row)
    law = np.where(kept, row, 0)
    assert np.array_equal(ours.top_p_renorm_probs(torch.tensor([row]), p)[0].numpy() > 0, kept)
    assert_law(drawn(ours.top_p_sampling_from_probs, row, p), law)


def test_the_sampling_reference_keeps_one_more_where_a_sum_is_p():
    torch.manual_seed(0)
    rows = torch.tensor([HALF]).repeat(500, 1)
    theirs = set(reference._top_p_sampling_reference(rows, torch.full((500,), 0.5)).tolist())
    mine = set(ours.top_p_sampling_from_probs(rows, 0.5, seed=1, offset=0).tolist())
    assert (theirs, mine) == ({0, 1}, {0})  # the kernel: id 1 has 0.5 above it, which is not less than 0.5


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 9, -1])
def test_top_k_keeps_equals(k):
    kept = largest_by_kernel(EQUALS, k) if k > 0 else np.full(5, True)
    assert np.array_equal(ours.top_k_renorm_probs(torch.tensor([EQUALS]), k)[0].numpy() > 0, kept)
    assert np.array_equal(torch.isfinite(ours.top_k_mask_logits(torch.tensor([EQUALS]), k))[0].numpy(), kept)
    assert_law(drawn(ours.top_k_sampling_from_probs, EQUALS, k), np.where(kept, EQUALS, 0))


def test_top_k_of_nothing_is_the_most_probable():
    assert ours.top_k_sampling_from_probs(torch.tensor([HALF]), 0).tolist() == [0]


@pytest.mark.parametrize("min_p", [0.0, 0.25, 0.5, 0.6, 1.0])
def test_min_p_keeps_from_its_share_of_the_most_probable(min_p):
    assert_law(drawn(ours.min_p_sampling_from_probs, HALF, min_p), np.where(np.array(HALF) >= min_p * 0.5, HALF, 0))


@pytest.mark.parametrize("order", ["top_k_first", "joint"])
@pytest.mark.parametrize(("k", "p"), [(2, 0.6), (2, 0.75), (3, 0.5), (1, 1.0), (4, 0.8)])
def test_top_k_and_top_p_in_either_order(order, k, p):
    row = np.array(HALF)
    first = np.where(largest_by_kernel(row, k), row, 0)
    judged = first / first.sum() if order == "top_k_first" else row
    law = np.where(nucleus_by_kernel(judged, p), first, 0)
    assert_law(drawn(ours.top_k_top_p_sampling_from_probs, HALF, k, p, filter_apply_order=order), law)
    counts = drawn(ours.top_k_top_p_sampling_from_logits, np.log2(HALF) * np.log(2), k, p, filter_apply_order=order)
    assert_law(counts, law)


def test_the_two_orders_differ_where_top_p_sees_what_top_k_left():
    row = torch.tensor([HALF])
    kept = {
        order: np.count_nonzero(drawn(ours.top_k_top_p_sampling_from_probs, HALF, 2, 0.6, filter_apply_order=order))
        for order in ("top_k_first", "joint")
    }
    assert kept == {"top_k_first": 1, "joint": 2}  # 0.5 is 2/3 of what top-k left
    assert row.sum() == 1


def test_plain_draws_have_the_law_of_the_row():
    assert_law(drawn(ours.sampling_from_probs, HALF), HALF)
    assert_law(drawn(ours.sampling_from_logits, np.log(HALF)), HALF)


# ---- what a call gives and takes ----

SAMPLERS = [
    (ours.sampling_from_probs, ()),
    (ours.top_p_sampling_from_probs, (0.9,)),
    (ours.top_k_sampling_from_probs, (20,)),
    (ours.min_p_sampling_from_probs, (0.1,)),
    (ours.top_k_top_p_sampling_from_probs, (20, 0.9)),
    (ours.sampling_from_logits, ()),
    (ours.top_k_top_p_sampling_from_logits, (20, 0.9)),
]
FROM_PROBS = [case for case in SAMPLERS if "return_valid" in inspect.signature(case[0]).parameters]
names = lambda value: getattr(value, "__name__", "")  # noqa: E731


@pytest.mark.parametrize(("function", "args"), SAMPLERS, ids=names)
def test_ids_are_int32_or_of_the_dtype_of_indices(function, args):
    probs = peaked()
    assert function(probs, *args).dtype == torch.int32
    for dtype in (torch.int32, torch.int64):
        indices = torch.tensor([3, 0, 0], dtype=dtype)
        ids = function(probs, *args, indices)
        assert ids.dtype == dtype
        assert ids.shape == (3,)


@pytest.mark.parametrize(("function", "args"), SAMPLERS, ids=names)
def test_indices_choose_the_row_and_with_it_the_parameters(function, args):
    probs = torch.eye(4) if "logits" not in function.__name__ else torch.where(torch.eye(4) > 0, 0.0, -inf)
    args = tuple(torch.full((4,), value) for value in args)
    assert function(probs, *args, torch.tensor([2, 0, 3, 3, 1])).tolist() == [2, 0, 3, 3, 1]
    with pytest.raises(IndexError):
        function(probs, *args, torch.tensor([4]))


@pytest.mark.parametrize(("function", "args"), SAMPLERS, ids=names)
def test_the_same_noise_the_same_ids_other_noise_others(function, args):
    rows = peaked(ids=50_000).repeat(8, 1)
    same = function(rows, *args, seed=7, offset=3)
    assert torch.equal(same, function(rows, *args, seed=7, offset=3, deterministic=False))
    each = {"seed": torch.tensor([7]), "offset": torch.tensor([3], dtype=torch.uint64)}
    assert torch.equal(same, function(rows, *args, **each))
    each = {"seed": torch.full((32,), 7), "offset": torch.full((32,), 3)}
    assert torch.equal(same, function(rows, *args, **each))
    for other in ({"seed": 8, "offset": 3}, {"seed": 7, "offset": 4}, {"seed": 7, "offset": 3 + 2**32}):
        assert not torch.equal(same, function(rows, *args, **other))
    drawn = [function(rows, *args, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*drawn)
    generator = torch.Generator().manual_seed(5)
    assert not torch.equal(*[function(rows, *args, generator=generator) for _ in range(2)])
    torch.manual_seed(9)
    first = function(rows, *args)
    torch.manual_seed(9)
    assert torch.equal(first, function(rows, *args))


@pytest.mark.parametrize(("function", "args"), SAMPLERS, ids=names)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_give_what_their_float32_gives(function, args, dtype):
    rows = peaked().to(dtype)
    assert torch.equal(function(rows, *args, seed=1, offset=0), function(rows.float(), *args, seed=1, offset=0))


@pytest.mark.parametrize(("function", "args"), FROM_PROBS, ids=names)
def test_a_row_nothing_can_be_drawn_from_is_0_and_not_valid(function, args):
    rows = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [nan, nan, nan]])
    ids, valid = function(rows, *args, return_valid=True)
    assert ids.tolist() == [2, 0, 0]
    assert valid.dtype == torch.bool
    assert valid.tolist() == [True, False, False]


@pytest.mark.parametrize("function", [ours.sampling_from_logits, ours.top_k_top_p_sampling_from_logits])
def test_logits_nothing_can_be_drawn_from_give_0(function):
    args = () if function is ours.sampling_from_logits else (2, 0.9)
    assert function(torch.tensor([[-inf, -inf, 5.0], [-inf] * 3, [nan] * 3]), *args).tolist() == [2, 0, 0]


@pytest.mark.parametrize(("function", "args"), SAMPLERS, ids=names)
def test_check_nan(function, args):
    rows = peaked()
    function(rows, *args, check_nan=True)
    rows[1, 3] = nan
    with pytest.raises(ValueError, match=r"Input (probs|logits) contains NaN\."):
        function(rows, *args, check_nan=True)


def test_noncontiguous_and_tracked_tensors_are_taken():
    wide = peaked(4, 2000)
    rows = wide[:, ::2]
    same = ours.top_p_sampling_from_probs(rows.contiguous(), 0.9, seed=1, offset=0)
    assert torch.equal(ours.top_p_sampling_from_probs(rows, 0.9, seed=1, offset=0), same)
    same = ours.sampling_from_probs(wide, seed=1, offset=0)
    assert torch.equal(ours.sampling_from_probs(wide.clone().requires_grad_(), seed=1, offset=0), same)


@pytest.mark.parametrize("prepared", [lambda x: x.clone().requires_grad_(), lambda x: torch._neg_view(-x)])
def test_gradients_and_negations_change_nothing(prepared):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    noise = {"seed": 1, "offset": 2}
    for function in (
        lambda x: ours.sampling_from_logits(x, **noise),
        lambda x: ours.top_k_top_p_sampling_from_logits(x, 5, 0.9, **noise),
        lambda x: ours.sampling_from_probs(x.exp() if x.requires_grad else torch._neg_view(-x.exp()), **noise),
        lambda x: ours.top_k_mask_logits(x, 5),
        ours.softmax,
    ):
        assert torch.equal(function(prepared(logits)), function(logits))


def test_seeds_are_integers_of_any_kind():
    probs = torch.full((2, 50), 0.02)
    same = ours.sampling_from_probs(probs, seed=2**40 + 1, offset=3)
    assert torch.equal(ours.sampling_from_probs(probs, seed=np.int64(2**40 + 1), offset=np.int32(3)), same)
    with pytest.raises(TypeError):
        ours.sampling_from_probs(probs, seed=1.5, offset=0)


def test_a_chain_of_no_drafts_is_a_draw_from_the_target():
    target = torch.tensor([[[0.0, 1.0, 0.0]], [[1.0, 0.0, 0.0]]])
    ids, accepted, emitted = ours.chain_speculative_sampling(
        target[:, :0], torch.empty(2, 0, dtype=torch.int32), target, seed=1, offset=0
    )
    assert ids.tolist() == [[1], [0]] and accepted.tolist() == emitted.tolist() == [0, 0]


def test_renormalised_rows_without_mass_stay_zero_and_infinite_logits_stay():
    zeros = torch.zeros(1, 3)
    assert ours.top_k_renorm_probs(zeros, 2).tolist() == [[0, 0, 0]]
    assert ours.top_p_renorm_probs(zeros, 0.5).tolist() == [[0, 0, 0]]
    assert ours.top_k_mask_logits(torch.tensor([[-inf, -inf]]), 1).tolist() == [[-inf, -inf]]


# ---- errors ----


def test_errors_are_those_of_flashinfer():
    probs = peaked()
    with pytest.raises(ValueError, match="Invalid filter_apply_order: p_first"):
        ours.top_k_top_p_sampling_from_probs(probs, 1, 0.5, filter_apply_order="p_first")
    with pytest.raises(ValueError, match="Invalid filter_apply_order"):
        ours.top_k_top_p_sampling_from_logits(probs, 1, 0.5, filter_apply_order="p_first")
    for wrong in (torch.tensor(0.5), torch.full((4, 1), 0.5), torch.full((3,), 0.5)):
        with pytest.raises(ValueError, match="parameter"):
            ours.top_p_sampling_from_probs(probs, wrong)
    for function in (ours.top_k_renorm_probs, ours.top_k_mask_logits):
        with pytest.raises(AssertionError, match="Unsupported dtype"):
            function(probs.double(), 3)
    with pytest.raises(RuntimeError, match="2D"):
        ours.sampling_from_probs(probs[0])
    with pytest.raises(ValueError, match="CPU"):
        ours.sampling_from_probs(torch.empty(2, 3, device="meta"))


@pytest.mark.parametrize(
    ("seed", "offset"),
    [
        (torch.tensor([1]), 0),
        (1, torch.tensor([0])),
        (torch.tensor([1], dtype=torch.int32), torch.tensor([0])),
        (torch.tensor([[1]]), torch.tensor([0])),
        (torch.tensor([1, 2]), torch.tensor([0])),
        (torch.tensor([1]), torch.tensor([0, 1, 2])),
    ],
)
def test_seeds_are_checked_as_flashinfer_checks_them(seed, offset):
    with pytest.raises(ValueError) as theirs:
        sampling._validate_and_convert_seed_offset(seed, offset, torch.device("cpu"), 4)
    with pytest.raises(ValueError) as mine:
        ours.sampling_from_probs(peaked(), seed=seed, offset=offset)
    assert str(mine.value) == str(theirs.value)


@pytest.mark.parametrize("temperature", [True, "1", torch.ones(4, 1), torch.ones(3), torch.ones(4, dtype=torch.int32)])
def test_temperatures_are_checked_as_flashinfer_checks_them(temperature):
    with pytest.raises((TypeError, ValueError)) as theirs:
        sampling._validate_softmax_temperature(peaked(), temperature)
    with pytest.raises(theirs.type):
        ours.softmax(peaked(), temperature)


# ---- speculation ----


def test_chain_accepts_up_to_the_first_refusal():
    """The case of flashinfer's own page: one id accepted, one refused and drawn from what the target has more of."""
    draft = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]])
    target = torch.tensor([[[0.0, 0.1, 0.6, 0.3], [1.0, 0.0, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1]]])
    ids = torch.tensor([[2, 1]], dtype=torch.int32)
    for seed in range(20):
        output, accepted, emitted = ours.chain_speculative_sampling(draft, ids, target, seed=seed, offset=0)
        assert output.tolist() == [[2, 0, -1]]
        assert (accepted.tolist(), emitted.tolist()) == ([1], [1])
        assert output.dtype == accepted.dtype == emitted.dtype == torch.int32


def test_chain_adds_to_the_counts_it_is_given():
    probs = peaked(2 * 3, 16).reshape(2, 3, 16)
    counts = torch.tensor([10, 20], dtype=torch.int32), torch.tensor([30, 40], dtype=torch.int32)
    ids = torch.zeros(2, 2, dtype=torch.int32)
    output, accepted, emitted = ours.chain_speculative_sampling(probs[:, :2], ids, probs, *counts)
    assert accepted is counts[0]
    assert emitted is counts[1]
    assert (accepted.tolist(), emitted.tolist()) == ([12, 22], [32, 42])  # draft and target agree
    assert (output >= 0).all()


def test_chain_gives_the_law_of_the_target():
    """Whatever was drafted, and even with the noise it was drafted with, the first id has the target's law."""
    rows = DRAWS
    draft, target = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.05, 0.25])
    ids = ours.sampling_from_probs(draft[None], torch.zeros(rows, dtype=torch.int32), seed=1, offset=0)
    output, accepted, emitted = ours.chain_speculative_sampling(
        draft.expand(rows, 1, 4), ids[:, None], target.expand(rows, 2, 4), seed=1, offset=0
    )
    assert_law(np.bincount(output[:, 0].numpy(), minlength=4), target)
    expected = torch.minimum(draft, target).sum().item()
    assert abs(emitted.float().mean().item() - expected) < 5 * (expected * (1 - expected) / rows) ** 0.5
    assert torch.equal(accepted, emitted)
    assert torch.equal(output[:, 1] >= 0, emitted == 1)


def test_chain_counts_what_would_be_accepted_past_the_first_refusal():
    draft = torch.full((1, 3, 2), 0.5)
    target = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.5, 0.5]]])
    ids = torch.zeros(1, 3, dtype=torch.int32)
    output, accepted, emitted = ours.chain_speculative_sampling(draft, ids, target)
    assert output.tolist() == [[1, -1, -1, -1]]
    assert (accepted.tolist(), emitted.tolist()) == ([2], [0])


# ---- pages ----


def test_page():
    page.run_section("flashinfer")


def test_example(capsys):
    page.run_example("sampling_like_flashinfer")
    assert "rows" in capsys.readouterr().out
