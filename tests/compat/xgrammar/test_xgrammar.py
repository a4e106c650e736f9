from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import engines
import numpy as np
import pytest
import torch
import xgrammar

import lanewise
import lanewise.compat.xgrammar as ours

import page

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def bits(x: Any) -> list[Any]:
    flat = x.view(torch.uint8) if isinstance(x, torch.Tensor) else x.view(np.uint8)
    return flat.tolist()


def outcome(apply: Callable[..., None], logits: Any, bitmask: Any, settings: dict[str, Any]) -> tuple[Any, ...]:
    """What becomes of the memory in which the logits lie, what is warned of, and what is raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = None
        try:
            assert apply(logits, bitmask, **settings) is None
        except Exception as raised:
            error = type(raised)
    memory = torch.as_strided(logits, (logits.untyped_storage().nbytes() // logits.element_size(),), (1,), 0)
    return bits(memory), error, [(w.category, w.filename) for w in caught]


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def words(*shape: int) -> torch.Tensor:
    values = torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(2), dtype=torch.int64)
    return values.to(torch.int32)


CASES: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], Any], dict[str, Any]]] = {
    "one row": (lambda: logits(70), lambda: words(3), {}),
    "rows": (lambda: logits(3, 70), lambda: words(3, 3), {}),
    "a row of words for (1, V)": (lambda: logits(1, 70), lambda: words(3), {}),
    "(1, words) for (V,)": (lambda: logits(70), lambda: words(1, 3), {}),
    "too few rows of words": (lambda: logits(3, 70), lambda: words(3), {}),
    "too many rows of words": (lambda: logits(70), lambda: words(2, 3), {}),
    "short": (lambda: logits(2, 70), lambda: words(2, 1), {}),
    "no words": (lambda: logits(2, 70), lambda: words(2, 0), {}),
    "short, vocab_size beyond": (lambda: logits(2, 70), lambda: words(2, 1), {"vocab_size": 70}),
    "long": (lambda: logits(2, 70), lambda: words(2, 9), {}),
    "vocab_size": (lambda: logits(2, 70), lambda: words(2, 9), {"vocab_size": 33}),
    "vocab_size in the last word": (lambda: logits(2, 70), lambda: words(2, 3), {"vocab_size": 69}),
    "vocab_size beyond": (lambda: logits(2, 70), lambda: words(2, 9), {"vocab_size": 71}),
    "vocab_size 0": (lambda: logits(2, 70), lambda: words(2, 3), {"vocab_size": 0}),
    "vocab_size negative": (lambda: logits(2, 70), lambda: words(2, 3), {"vocab_size": -1}),
    "vocab_size float": (lambda: logits(2, 70), lambda: words(2, 3), {"vocab_size": 3.0}),
    "vocab_size of NumPy": (lambda: logits(2, 70), lambda: words(2, 3), {"vocab_size": np.int64(40)}),
    "indices": (lambda: logits(3, 70), lambda: words(3, 3), {"indices": [2, 0]}),
    "indices, short": (lambda: logits(3, 70), lambda: words(3, 1), {"indices": [2, 0]}),
    "indices, vocab_size": (lambda: logits(3, 70), lambda: words(3, 3), {"indices": [2], "vocab_size": 40}),
    "indices in a tensor": (lambda: logits(3, 70), lambda: words(3, 3), {"indices": torch.tensor([1])}),
    "indices repeated": (lambda: logits(3, 70), lambda: words(3, 3), {"indices": [1, 1]}),
    "no indices": (lambda: logits(3, 70), lambda: words(3, 3), {"indices": []}),
    "indices into fewer words": (lambda: logits(3, 70), lambda: words(2, 3), {"indices": [1]}),
    "indices beyond the words": (lambda: logits(3, 70), lambda: words(2, 3), {"indices": [2]}),
    "indices beyond the logits": (lambda: logits(3, 70), lambda: words(4, 3), {"indices": [3]}),
    "indices negative": (lambda: logits(3, 70), lambda: words(3, 3), {"indices": [-1]}),
    "indices float": (lambda: logits(3, 70), lambda: words(3, 3), {"indices": [1.0]}),
    "indices bool": (lambda: logits(3, 70), lambda: words(3, 3), {"indices": [True, False]}),
    "index": (lambda: logits(3, 70), lambda: words(3, 3), {"indices": torch.tensor(1)}),
    "every other row": (lambda: logits(4, 70)[::2], lambda: words(4, 3)[1::2], {}),
    "rows of something wider": (lambda: logits(4, 99)[:, 5:75], lambda: words(4, 9)[:, 2:5], {}),
    "float64": (lambda: logits(2, 70).double(), lambda: words(2, 3), {}),
    "integers": (lambda: logits(2, 70).int(), lambda: words(2, 3), {}),
    "int64 words": (lambda: logits(2, 70), lambda: words(2, 3).long(), {}),
    "three axes": (lambda: logits(2, 1, 70), lambda: words(2, 3), {}),
    "no axis": (lambda: logits(1)[0], lambda: words(1, 1), {}),
    "no rows": (lambda: logits(0, 70), lambda: words(0, 3), {}),
    "no columns": (lambda: logits(2, 0), lambda: words(2, 3), {}),
    "words of nothing": (lambda: logits(2, 70), lambda: None, {}),
    "cpu": (lambda: logits(2, 70), lambda: words(2, 3), {"backend": "cpu"}),
    "torch_native": (lambda: logits(2, 70), lambda: words(2, 3), {"backend": "torch_native"}),
    "no such backend": (lambda: logits(2, 70), lambda: words(2, 3), {"backend": "cpu "}),
    "gradient": (lambda: logits(2, 70).requires_grad_(), lambda: words(2, 3), {}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_same_as_xgrammar(case: str, dtype: torch.dtype) -> None:
    make_logits, make_words, settings = CASES[case]
    results = []
    for apply in (xgrammar.apply_token_bitmask_inplace, ours.apply_token_bitmask_inplace):
        x = make_logits()
        x = x.to(dtype) if x.dtype == torch.float32 and x.is_leaf and x.is_contiguous() else x
        results.append(outcome(apply, x, make_words(), settings))
    assert results[1] == results[0]
    if results[0][1] is None and case not in UNTOUCHED:
        assert results[0][0] != bits(make_logits().to(dtype)), "the case masks nothing"


UNTOUCHED = {"no words", "vocab_size 0", "vocab_size negative", "no indices", "no rows", "no columns"}


def test_what_is_forbidden_may_be_anything() -> None:
    special = torch.tensor([float("nan"), float("inf"), -0.0, -float("inf"), 1e-45, 3.0] * 20)
    results = [
        outcome(apply, special.clone(), words(4), {})
        for apply in (xgrammar.apply_token_bitmask_inplace, ours.apply_token_bitmask_inplace)
    ]
    assert results[0] == results[1]


def test_a_negation_to_be_done_is_xgrammars() -> None:
    results = []
    for apply in (xgrammar.apply_token_bitmask_inplace, ours.apply_token_bitmask_inplace):
        x = torch._neg_view(logits(2, 70))
        apply(x, words(2, 3))
        results.append(bits(x.resolve_neg()))
    assert results[1] == results[0] != bits(-logits(2, 70))


def test_columns_that_are_not_adjacent() -> None:
    """xgrammar writes to the wrong ones."""
    expected = logits(5, 70)
    xgrammar.apply_token_bitmask_inplace(expected, words(5, 3))
    x = logits(5, 70).T.contiguous().T
    ours.apply_token_bitmask_inplace(x, words(5, 3))
    assert bits(x.contiguous()) == bits(expected)


def test_nothing_beyond_vocab_size() -> None:
    """xgrammar masks the first forbidden id of a row even there, if none comes before it."""
    x = torch.zeros(1, 70)
    ours.apply_token_bitmask_inplace(x, torch.tensor([[0b1111, 0, 0]], dtype=torch.int32), vocab_size=3)
    assert not x.isinf().any()


def test_indices_in_a_tuple_or_array() -> None:
    """xgrammar masks every row then."""
    expected = logits(3, 70)
    xgrammar.apply_token_bitmask_inplace(expected, words(3, 3), indices=[2])
    for indices in ((2,), np.array([2])):
        x = logits(3, 70)
        ours.apply_token_bitmask_inplace(x, words(3, 3), indices=indices)
        assert bits(x) == bits(expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays(dtype: str) -> None:
    import ml_dtypes

    expected = logits(3, 70, dtype=getattr(torch, dtype))
    x = expected.float().numpy().astype(getattr(ml_dtypes, dtype, dtype))
    xgrammar.apply_token_bitmask_inplace(expected, words(3, 3), indices=[0, 2])
    ours.apply_token_bitmask_inplace(x, words(3, 3).numpy(), indices=[0, 2])
    assert bits(x) == bits(expected)


def test_arrays_are_refused_as_tensors_are() -> None:
    with pytest.raises(ValueError):
        ours.apply_token_bitmask_inplace(np.zeros((2, 70)), np.zeros((2, 3), np.int32))
    with pytest.raises(RuntimeError):
        ours.apply_token_bitmask_inplace(np.zeros((2, 70), np.float32), np.zeros((3, 3), np.int32))
    frozen = np.zeros(70, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ours.apply_token_bitmask_inplace(frozen, np.zeros(3, np.int32))


def test_allocate_and_reset() -> None:
    for shape in ((2, 70), (0, 0), (1, 64)):
        bitmask = ours.allocate_token_bitmask(*shape)
        assert bitmask.equal(xgrammar.allocate_token_bitmask(*shape)) and bitmask.dtype == ours.bitmask_dtype
        bitmask.zero_()
        assert ours.reset_token_bitmask(bitmask) is None
        assert bitmask.equal(xgrammar.allocate_token_bitmask(*shape))
    array = np.zeros((2, 3), np.int32)
    ours.reset_token_bitmask(array)
    assert (array == -1).all()
    with pytest.raises(RuntimeError):
        ours.allocate_token_bitmask(-1, 70)
    with pytest.raises(AttributeError):
        ours.reset_token_bitmask([0])


def test_every_other_name_is_xgrammars() -> None:
    assert all(getattr(ours, name) is not None for name in xgrammar.__all__)
    assert ours.GrammarMatcher is xgrammar.GrammarMatcher
    with pytest.raises(AttributeError):
        _ = ours.no_such_name


def test_without_xgrammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.delitem(sys.modules, "lanewise.compat.xgrammar")
    with pytest.raises(ImportError, match=r"xgrammar 0\.2\.8 is needed"):
        importlib.import_module("lanewise.compat.xgrammar")


@pytest.mark.parametrize("model", engines.VOCABULARIES)
def test_json_by_grammar(model: str) -> None:
    """Two sequences, sampled until both are whole; after every step both ways to mask leave the same bits."""
    tokenizer, width = engines.tokenizer(model), engines.PADDED[model]
    compiled = engines.xgrammar_compiled(model)
    matchers = [xgrammar.GrammarMatcher(compiled) for _ in range(2)]
    bitmask = ours.allocate_token_bitmask(2, width)
    texts: list[list[int]] = [[], []]
    rng = np.random.default_rng(3)
    for step in range(80):
        live = [i for i, matcher in enumerate(matchers) if not matcher.is_terminated()]
        if not live:
            break
        ours.reset_token_bitmask(bitmask)
        for i in live:
            matchers[i].fill_next_token_bitmask(bitmask, i)
        x = torch.from_numpy(rng.normal(0, 3, (2, width)).astype(np.float32)).to(DTYPES[step % 3])
        expected, masked = x.clone(), x.clone()
        xgrammar.apply_token_bitmask_inplace(expected, bitmask, indices=live)
        ours.apply_token_bitmask_inplace(masked, bitmask, indices=live)
        assert masked.view(torch.uint8).equal(expected.view(torch.uint8))
        tokens = lanewise.sample(x, mask=bitmask, top_p=0.9, seed=1, step=step)
        assert tokens.tolist() == lanewise.sample(masked, top_p=0.9, seed=1, step=step).tolist()
        for i in live:
            assert matchers[i].accept_token(int(tokens[i]))
            texts[i].append(int(tokens[i]))
    assert all(matcher.is_terminated() for matcher in matchers)
    assert all(text[-1] == tokenizer.im_end_id for text in texts)
    assert all(engines.is_fulfilled(tokenizer.decode(text[:-1])) for text in texts)


def test_page_and_example(capsys: pytest.CaptureFixture[str]) -> None:
    page.run_section("xgrammar, llguidance")
    page.run_example("with_xgrammar")
    assert engines.is_fulfilled(capsys.readouterr().out.splitlines()[-1])
