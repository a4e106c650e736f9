"""lanewise.compat.torch against torch, and against lanewise itself on arrays."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lanewise
import lanewise.compat.torch as tensors
from lanewise._arrays import as_array
from lanewise.compat import _torch_cache

import page

ROWS, VOCAB = 3, 96
NOISE = {"seed": 5, "step": 2}
MASK = torch.arange(VOCAB) % 3 != 0
# every function, with arguments of every kind that a graph must carry: numbers, strings, tensors, lists, dicts
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {"temperature": 0.7}),
    "softmax of columns": ("softmax", {"temperature": 0.7, "axis": 0}),
    "softmax, one temperature a row": ("softmax", {"temperature": torch.tensor([0.5, 0.0, 2.0])}),
    "log_softmax": ("log_softmax", {"axis": 0}),
    "logsumexp": ("logsumexp", {"axis": 0}),
    "scale": ("scale", {"temperature": 3.0}),
    "argmax": ("argmax", {}),
    "top_k": ("top_k", {"k": 5}),
    "top_k, ties": ("top_k", {"k": 5, "ties": "all"}),
    "logprobs": ("logprobs", {"tokens": torch.tensor([1, 2, 5]), "top_n": 3, "mask": MASK, "temperature": 0.5}),
    "logprobs of ids": ("logprobs", {"ids": [4, 8, 1], "entropy": True}),
    "sample": ("sample", {"temperature": [0.7, 0.0, 1.5], "top_k": 20, "top_p": 0.9, "keys": [7, 2**63, 1], **NOISE}),
    "sample, edited": (
        "sample",
        {
            "bias": {3: 2.5, 8: -1.0},
            "prompt_ids": [[1, 2], [], [3]],
            "repetition_penalty": 1.3,
            "preset": "vllm",
            **NOISE,
        },
    ),
    "sample, params": ("sample", {"params": [lanewise.SamplingParams(top_k=k) for k in (1, 5, 9)], **NOISE}),
    "sample, support": ("sample", {"top_p": 0.5, "return_support": True, **NOISE}),
    "sample, u": ("sample", {"u": torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), "vocab_size": 50}),
    "sample_n": ("sample_n", {"n": 4, "mask": MASK, **NOISE}),
    "sample_from_probs": ("sample_from_probs", dict(NOISE)),
    "verify": ("verify", {"token": torch.tensor([1, 2, 3]), "top_k": 40, **NOISE}),
    "top_k_mask": ("top_k_mask", {"k": [3, 5, 0]}),
    "top_p_mask": ("top_p_mask", {"p": 0.6, "temperature": 1.5}),
    "min_p_mask": ("min_p_mask", {"min_p": 0.1}),
    "top_k_renorm": ("top_k_renorm", {"k": 7}),
    "top_p_renorm": ("top_p_renorm", {"p": torch.tensor([0.2, 0.5, 0.9])}),
    "apply_penalties": (
        "apply_penalties",
        {"frequency_penalty": 0.5, "output_ids": torch.tensor([[1, 1, 5], [2, -1, -1], [-1, -1, -1]])},
    ),
    "apply_bias": ("apply_bias", {"bias": torch.linspace(-1, 1, VOCAB)}),
    "apply_token_bitmask": ("apply_token_bitmask", {"mask": torch.tensor([5, -1, 77], dtype=torch.int32)}),
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "padded rows": lambda x: torch.cat([x, x], 1)[:, :VOCAB],
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "one row, expanded": lambda x: x[:1].expand(ROWS, VOCAB),
}
each_call = pytest.mark.parametrize("case", CALLS)


def rows(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    return (x.abs() if "renorm" in name or "probs" in name.split("_")[-1:] else x).to(dtype)


def as_arrays(value: Any) -> Any:
    return as_array(value, "") if isinstance(value, torch.Tensor) else value


def same(found: Any, expected: Any) -> None:
    """Equal, bit for bit, NaN to NaN; tensors where lanewise has arrays."""
    if isinstance(expected, tuple):
        assert type(found) is type(expected)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    elif isinstance(expected, np.ndarray | np.generic):
        assert isinstance(found, torch.Tensor) and found.dtype == torch.from_numpy(np.array(expected)).dtype
        np.testing.assert_array_equal(found.numpy(), expected)
    else:
        assert type(found) is type(expected) and found == expected


def leaves(result: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if leaf is not None]


# ---- plain calls ----


@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_tensors_give_what_arrays_give(case: str, layout: str, dtype: torch.dtype) -> None:
    name, arguments = CALLS[case]
    x = LAYOUTS[layout](rows(name, dtype))
    expected = getattr(lanewise, name)(as_arrays(x), **{key: as_arrays(value) for key, value in arguments.items()})
    same(getattr(tensors, name)(x, **arguments), expected)


def test_nothing_public_is_missing() -> None:
    operators = {name for name in tensors.__all__ if not hasattr(_torch_cache, name)}  # the others: test_cache.py
    assert {name for name, _ in CALLS.values()} == operators
    assert set(lanewise.__all__) - set(tensors.__all__) == {
        *("InvalidLogitsError", "Logprobs", "SampleState", "SamplingParams", "Stream", "Support"),
        *("get_num_threads", "set_num_threads", "info", "tune", "use", "using"),
        *("BeamMove", "BeamSearch", "BeamStep", "Hypothesis", "Verified"),
        *("BlockError", "BlockPool", "DamagedSaveError", "OutOfBlocksError", "PagedKVCache", "PrefixCache", "Saving"),
        *("Sequence", "get_stream_threshold", "prefix_cut", "set_stream_threshold", "softmax_stats"),
        *("HostOffload", "Transfer", "Sampler", "apply_steps", "steps"),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_memory_is_shared(dtype: torch.dtype) -> None:
    x = rows("", dtype)[:, 5:]
    array = as_array(x, "x")
    assert array.ctypes.data == x.data_ptr() and array.strides == tuple(step * x.element_size() for step in x.stride())
    edited = tensors.apply_token_bitmask(x, torch.zeros(1, dtype=torch.int32), out=x)
    assert edited is x and torch.isneginf(x).all()


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_values_are_torchs(name: str, dtype: torch.dtype, dim: int) -> None:
    x = (torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    expected = getattr(torch, name)(x.double(), dim)
    for found in (
        getattr(tensors, name)(x, dim),
        getattr(tensors, name)(x, dim=dim),
        getattr(tensors, name)(x, axis=dim),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)


def test_truncations_are_torchs() -> None:
    x = rows("")
    values, ids = tensors.top_k(x, 9)
    expected = torch.topk(x, 9)
    assert torch.equal(values, expected.values) and torch.equal(ids, expected.indices)
    kept = torch.isfinite(tensors.top_k_mask(x, 9))
    assert torch.equal(kept, torch.zeros_like(kept).scatter(1, ids, True))
    assert torch.equal(tensors.argmax(x), x.argmax(-1))
    drawn = tensors.sample_from_probs(torch.tensor([0.0, 3.0, 1.0]).expand(4000, 3), seed=1, step=0)
    assert drawn.bincount().tolist() == pytest.approx([0, 3000, 1000], abs=110)  # 4 standard deviations


def test_one_row_gives_a_number() -> None:
    x = rows("")[0]
    assert type(tensors.sample(x, temperature=0.0)) is int and type(tensors.argmax(x)) is int
    assert type(tensors.verify(x, token=1, **NOISE)) is float
    total = tensors.logsumexp(x)
    assert total.shape == () and total.dtype == torch.float32


def test_out_is_filled_and_returned() -> None:
    x = rows("")
    out = torch.full((ROWS, 2 * VOCAB), 7.0)[:, ::2]
    assert tensors.softmax(x, out=out) is out and torch.equal(out, tensors.softmax(x))
    tokens = torch.zeros(ROWS, dtype=torch.int64)
    found, support = tensors.sample(x, **NOISE, return_support=True, out=tokens)
    assert found is tokens and torch.equal(tokens, tensors.sample(x, **NOISE)) and len(support.ids) == ROWS * VOCAB
    pair = torch.zeros(ROWS, 2), torch.zeros(ROWS, 2, dtype=torch.int64)
    assert tensors.top_k(x, 2, out=pair) is pair and torch.equal(pair[1], torch.topk(x, 2).indices)
    assert tensors.softmax(x, out=None).shape == x.shape


def test_autograd_sees_a_write_to_out() -> None:
    x = rows("").requires_grad_()
    square = x.exp()
    total = square.sum()
    tensors.softmax(square.detach(), out=square.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward(), square.pow(2).sum().backward()


def test_invalid_rows_are_named_in_tensors() -> None:
    x = rows("")
    x[1, 3] = float("nan")
    with pytest.raises(lanewise.InvalidLogitsError) as caught:
        tensors.argmax(x)
    assert caught.value.rows == [1] and torch.equal(caught.value.tokens < 0, torch.tensor([False, True, False]))
    with pytest.raises(lanewise.InvalidLogitsError) as caught:
        torch.compile(tensors.argmax, fullgraph=True, backend="aot_eager")(x)
    assert caught.value.rows == [1] and isinstance(caught.value.tokens, torch.Tensor)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "logits must be a torch.Tensor, got ndarray", lambda x: tensors.softmax(x.numpy())),
        (TypeError, "probs must be a torch.Tensor, got list", lambda x: tensors.top_k_renorm([1.0], 1)),
        (TypeError, "logits must be float32, .* got int64", lambda x: tensors.softmax(x.long())),
        (TypeError, "logits: no NumPy dtype", lambda x: tensors.softmax(x.to(torch.complex64))),
        (TypeError, "logits: no NumPy dtype", lambda x: tensors.softmax(x.to(torch.float8_e4m3fn))),
        (TypeError, "logits must be a dense array in CPU memory", lambda x: tensors.softmax(x.to_sparse())),
        (TypeError, "logits must be a dense array in CPU memory", lambda x: tensors.argmax(x.to("meta"))),
        (TypeError, "out must be float32", lambda x: tensors.softmax(x, out=x.double())),
        (TypeError, "out must be a tensor", lambda x: tensors.softmax(x, out=x.numpy())),
        (ValueError, "out must have shape", lambda x: tensors.softmax(x, out=x[:1])),
        (RuntimeError, "out requires a gradient", lambda x: tensors.softmax(x, out=x.clone().requires_grad_())),
        (TypeError, "takes logits, k, each once", lambda x: tensors.top_k(x, 1, 2)),
        (TypeError, "takes logits, k, each once", lambda x: tensors.top_k(x, 1, k=2)),
        (TypeError, "'dim'", lambda x: tensors.softmax(x, axis=1, dim=0)),
        (ValueError, "temperature must be in", lambda x: tensors.softmax(x, temperature=-1.0)),
    ],
)
def test_what_is_wrong_is_said(error: type[Exception], message: str, call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(error, match=message):
        call(rows(""))


def test_a_negation_still_to_be_done_is_done() -> None:
    x = torch.imag(torch.complex(rows(""), rows("")).conj())
    assert x.is_neg() and torch.equal(tensors.softmax(x), tensors.softmax(x.resolve_neg()))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_temperature_with_a_gradient_is_refused_where_it_would_be_lost(shape: tuple[int, ...]) -> None:
    x, temperature = torch.arange(15.0).reshape(3, 5), torch.full(shape, 2.0, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"detach\(\) the temperature"):
        tensors.softmax(x, temperature=temperature)
    with torch.no_grad():
        assert torch.equal(tensors.softmax(x, temperature=temperature), tensors.softmax(x, temperature=2.0))
    drawn = [tensors.sample(x, temperature=t, seed=1, step=0) for t in (temperature, 2.0)]
    assert torch.equal(*drawn)


def test_another_default_device_changes_nothing() -> None:
    x = torch.zeros(4, 8)
    with torch.device("meta"):
        drawn = tensors.sample(torch._neg_view(x))  # by the operator, which takes its seed from torch
    assert drawn.device.type == "cpu" and ((drawn >= 0) & (drawn < 8)).all()


# ---- in graphs ----


def tensors_among(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


@each_call
def test_a_graph_holds_every_call(case: str) -> None:
    name, arguments = CALLS[case]
    x = rows(name, torch.bfloat16)
    call = functools.partial(getattr(tensors, name), **arguments)
    for rows_or_row in (x, x[0]) if case in ("sample_n", "argmax", "sample_from_probs", "min_p_mask") else (x,):
        torch._dynamo.reset()
        found = torch.compile(lambda z: call(z), fullgraph=True, backend="aot_eager")(rows_or_row)
        for a, b in zip(leaves(found), leaves(call(rows_or_row)), strict=True):
            torch.testing.assert_close(a, torch.as_tensor(b), rtol=0, atol=0, equal_nan=True)


@each_call
def test_opcheck(case: str) -> None:
    from lanewise.compat._torch_ops import pack

    name, arguments = CALLS[case]
    given = dict(arguments)
    x = rows(name)
    differentiable = name in ("softmax", "log_softmax", "logsumexp", "scale")
    torch.library.opcheck(getattr(torch.ops.lanewise, name).default, (x.requires_grad_(differentiable), *pack(given)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_inductor_compiles_it() -> None:
    def step(x: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = tensors.sample(x * 2, top_k=20, top_p=0.9, seed=1, step=at)
        return tokens, x.gather(1, tokens[:, None]) + 1

    x = rows("")
    compiled = torch.compile(step, fullgraph=True)
    for at in range(3):
        assert all(torch.equal(a, b) for a, b in zip(compiled(x, at), step(x, at), strict=True))


def test_a_step_that_changes_compiles_twice() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    draw = torch.compile(
        lambda x, at: tensors.sample(x, temperature=0.8, seed=1, step=at), fullgraph=True, backend=counter
    )
    x = rows("")
    drawn = [draw(x, at).tolist() for at in range(10)]
    assert drawn == [tensors.sample(x, temperature=0.8, seed=1, step=at).tolist() for at in range(10)]
    assert counter.frame_count == 2


def test_a_stream_counts_but_in_no_graph() -> None:
    x, rng = rows(""), lanewise.Stream(3)
    drawn = [tensors.sample(x, rng=rng).tolist() for _ in range(2)]
    assert drawn == [tensors.sample(x, seed=3, step=step).tolist() for step in range(2)] and rng.step == 2
    draw = torch.compile(lambda: tensors.sample(x, rng=rng), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="a graph cannot count the steps"):
        draw()
    assert rng.step == 2


def test_draws_in_a_graph_without_a_seed_differ() -> None:
    x = torch.zeros(2, 4096)
    draw = torch.compile(
        lambda: (tensors.sample(x), tensors.sample(x), tensors.sample_n(x, 2)), fullgraph=True, backend="aot_eager"
    )
    first, second, several = draw()
    assert not torch.equal(first, second) and not torch.equal(first, draw()[0]) and several.shape == (2, 2)


def test_out_in_a_graph() -> None:
    x = rows("")
    fill = torch.compile(lambda x, out: tensors.softmax(x, out=out), fullgraph=True, backend="aot_eager")
    out = torch.zeros_like(x)
    assert fill(x, out) is out and torch.equal(out, tensors.softmax(x))
    with pytest.raises(ValueError, match="shape"):
        tensors.softmax(x.clone().requires_grad_(), out=torch.zeros(1, VOCAB))
    with pytest.raises(TypeError, match="out must be"):
        tensors.softmax(x.clone().requires_grad_(), out=torch.zeros(ROWS, VOCAB, dtype=torch.float64))


def test_fake_tensors_have_shapes() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 1000)
        assert tensors.softmax(x).shape == (4, 1000) and tensors.sample(x, **NOISE).dtype == torch.int64


# ---- gradients ----


@pytest.mark.parametrize("temperature", [1.0, 0.5, torch.tensor([0.5, 1.0, 3.0])], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_gradients_are_torchs(name: str, axis: int, temperature: Any) -> None:
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(2), requires_grad=True)
    t = temperature.unsqueeze(axis) if isinstance(temperature, torch.Tensor) else temperature
    found = getattr(tensors, name)(x, temperature=temperature, axis=axis)
    expected = getattr(torch, name)(x / t, axis)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    a, b = (torch.autograd.grad((result * weights).sum(), x)[0] for result in (found, expected))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# lanewise computes in float32: differences over 1e-2 are good to about 1e-4
@pytest.mark.filterwarnings("ignore:Input #1 requires gradient and is not a double")
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "scale"])
def test_gradcheck(name: str) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64, requires_grad=True)
    call = functools.partial(getattr(tensors, name), temperature=1.5, axis=0)
    assert torch.autograd.gradcheck(call, x, eps=1e-2, atol=1e-3, rtol=1e-3)
    if name != "scale":  # whose second derivative is nothing
        assert torch.autograd.gradgradcheck(call, x, eps=1e-2, atol=5e-3, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_gradient_has_the_dtype_of_its_logits(dtype: torch.dtype) -> None:
    x = rows("", dtype).requires_grad_()
    tensors.log_softmax(x)[:, 0].sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype and x.grad.abs().sum() > 0


def test_no_gradient_at_temperature_0() -> None:
    x = rows("").requires_grad_()
    tensors.softmax(x, temperature=0.0)[:, 0].sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))


def test_a_gradient_through_a_graph() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return tensors.log_softmax(x, temperature=2.0)[:, 1].sum()

    x = rows("").requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    (found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(found, expected)


def test_what_has_no_gradient_says_so() -> None:
    x = rows("").requires_grad_()
    assert not tensors.sample(x, **NOISE).requires_grad
    with torch.no_grad():
        assert not tensors.top_p_mask(x, 0.5).requires_grad
    with pytest.raises(RuntimeError, match="no autograd formula"):
        tensors.top_p_mask(x, 0.5).sum().backward()
    t = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="only the logits have a derivative"):
        tensors.softmax(x, temperature=t).sum().backward()


# ---- the rest ----


def test_without_torch_an_error_says_what_is_needed() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport lanewise\nimport lanewise.compat.torch"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: torch 2.13 is needed" in ran.stderr


def test_the_page() -> None:
    page.run_section("torch")


def test_the_example() -> None:
    page.run_example("torch_tensors")
