from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engines
import llguidance.numpy
import llguidance.torch
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

import lanewise
import lanewise.compat.llguidance.numpy as ours_numpy
import lanewise.compat.llguidance.torch as ours_torch

import page


def logits(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 3, shape).astype(np.float32)


def words(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).integers(-(2**31), 2**31, shape).astype(np.int32)


def frozen(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "one row": (lambda: logits(70), lambda: words(3)),
    "rows": (lambda: logits(3, 70), lambda: words(3, 3)),
    "a row of words for (1, V)": (lambda: logits(1, 70), lambda: words(3)),
    "(1, words) for (V,)": (lambda: logits(70), lambda: words(1, 3)),
    "too few rows of words": (lambda: logits(3, 70), lambda: words(3)),
    "too many rows of words": (lambda: logits(3, 70), lambda: words(4, 3)),
    "short": (lambda: logits(3, 70), lambda: words(3, 1)),
    "no words": (lambda: logits(3, 70), lambda: words(3, 0)),
    "long": (lambda: logits(3, 70), lambda: words(3, 9)),
    "no rows": (lambda: logits(0, 70), lambda: words(0, 3)),
    "no columns": (lambda: logits(3, 0), lambda: words(3, 3)),
    "every other row": (lambda: logits(4, 70)[::2], lambda: words(4, 3)[1::2]),
    "every other column": (lambda: logits(3, 140)[:, ::2], lambda: words(3, 6)[:, ::2]),
    "float16": (lambda: logits(3, 70).astype(np.float16), lambda: words(3, 3)),
    "float64": (lambda: logits(3, 70).astype(float), lambda: words(3, 3)),
    "integers": (lambda: logits(3, 70).astype(int), lambda: words(3, 3)),
    "int64 words": (lambda: logits(3, 70), lambda: words(3, 3).astype(int)),
    "uint32 words": (lambda: logits(3, 70), lambda: words(3, 3).view(np.uint32)),
    "three axes": (lambda: logits(3, 1, 70), lambda: words(3, 3)),
    "words of three axes": (lambda: logits(3, 70), lambda: words(3, 3, 1)),
    "a list": (lambda: [1.0, 2.0], lambda: words(1)),
}
UNTOUCHED = {"no rows", "no columns"}


def outcome(apply: Callable[..., None], x: Any, mask: Any) -> tuple[Any, ...]:
    error = None
    try:
        assert apply(x, mask) is None
    except Exception as raised:
        error = type(raised)
    return (x if isinstance(x, list) else np.asarray(x).tolist()), error


@pytest.mark.parametrize("case", CASES)
def test_same_as_llguidance_numpy(case: str) -> None:
    make_logits, make_words = CASES[case]
    theirs, mine = (
        outcome(module.apply_token_bitmask_inplace, make_logits(), make_words())
        for module in (llguidance.numpy, ours_numpy)
    )
    assert mine == theirs
    if theirs[1] is None and case not in UNTOUCHED:
        assert theirs[0] != np.asarray(make_logits()).tolist(), "the case masks nothing"


def test_an_array_that_cannot_be_written() -> None:
    for module in (llguidance.numpy, ours_numpy):
        with pytest.raises(ValueError, match="read-only"):
            module.apply_token_bitmask_inplace(frozen(logits(70)), words(3))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What llguidance compiles, as it is written: so no C++ compiler is needed here."""
    kernel = llguidance.torch.apply_token_bitmask_inplace_kernel
    monkeypatch.setattr(llguidance.torch, "apply_token_bitmask_inplace_kernel", kernel._torchdynamo_orig_callable)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith(("float", "int", "uint", "a list"))])
def test_same_as_llguidance_torch(case: str, dtype: torch.dtype, eager: None) -> None:
    make_logits, make_words = CASES[case]
    results = []
    for module in (llguidance.torch, ours_torch):
        x = torch.from_numpy(np.ascontiguousarray(make_logits())).to(dtype)
        mask = torch.from_numpy(np.ascontiguousarray(make_words()))
        error = None
        try:
            module.apply_token_bitmask_inplace(x, mask)
        except Exception as raised:
            error = type(raised)
        results.append((x.float().tolist(), error))
    assert results[0] == results[1]


def test_gradients_go_the_way_of_the_host(eager: None) -> None:
    for module in (llguidance.torch, ours_torch):
        with pytest.raises(RuntimeError, match="leaf Variable"):
            module.apply_token_bitmask_inplace(torch.zeros(2, 70, requires_grad=True), torch.zeros(2, 3).int())
        leaf = torch.zeros(2, 70, requires_grad=True)
        x = leaf * 1
        module.apply_token_bitmask_inplace(x, torch.from_numpy(words(2, 3)))
        x[~x.isinf()].sum().backward()
        assert leaf.grad is not None and leaf.grad.equal((~x.isinf()).float())


def test_every_other_name_is_llguidances() -> None:
    for theirs, mine in ((llguidance.numpy, ours_numpy), (llguidance.torch, ours_torch)):
        assert mine.fill_next_token_bitmask is theirs.fill_next_token_bitmask
        assert mine.allocate_token_bitmask is theirs.allocate_token_bitmask
        with pytest.raises(AttributeError):
            _ = mine.no_such_name


@pytest.mark.parametrize("model", engines.VOCABULARIES)
def test_json_by_grammar(model: str) -> None:
    tokenizer, width = engines.tokenizer(model), engines.PADDED[model]
    matcher = LLMatcher(engines.llguidance_tokenizer(model), engines.llguidance_grammar())
    bitmask = ours_numpy.allocate_token_bitmask(1, width)
    text: list[int] = []
    rng = np.random.default_rng(4)
    while not matcher.is_stopped():
        assert len(text) < 80
        ours_numpy.fill_next_token_bitmask(matcher, bitmask)
        x = rng.normal(0, 3, (1, width)).astype(np.float32)
        expected, masked, tensor = x.copy(), x.copy(), torch.from_numpy(x.copy())
        llguidance.numpy.apply_token_bitmask_inplace(expected, bitmask)
        ours_numpy.apply_token_bitmask_inplace(masked, bitmask)
        ours_torch.apply_token_bitmask_inplace(tensor, torch.from_numpy(bitmask))
        assert np.array_equal(masked, expected) and np.array_equal(tensor.numpy(), expected)
        token = int(lanewise.sample(x, mask=bitmask, top_p=0.9, seed=1, step=len(text))[0])
        assert matcher.consume_token(token)
        text.append(token)
    assert engines.is_fulfilled(tokenizer.decode(text))  # it stops where nothing but the end may follow


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    page.run_example("with_llguidance")
    assert engines.is_fulfilled(capsys.readouterr().out.splitlines()[-1])
