"""The same work through other libraries, where they are installed: their own best composition, on one thread."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from lanewise._measure import Call, Operation, Ready, always, prompt
from lanewise._rows import realistic

Setting = dict[str, Any]  # of sample


def draws(setting: Setting) -> bool:
    return setting.get("temperature") != 0


class Peer(NamedTuple):
    values: Mapping[str, Ready] = MappingProxyType({})  # by the name of the operation
    sampler: Callable[[Setting, int], Call] | None = None  # of a setting and a vocabulary size
    takes: Callable[[Setting], bool] = draws  # which settings


def scipy() -> Peer:
    from scipy import special

    return Peer({name: always(getattr(special, name)) for name in ("softmax", "log_softmax", "logsumexp")})


def onnxruntime() -> Peer:
    import onnx  # builds the model
    import onnxruntime as ort

    def ready(operator: str, vocab: int) -> Call:
        """One node, one thread, input and output bound where they lie: the least onnxruntime can be asked to do."""
        x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, vocab]) for name in "xy")
        node = onnx.helper.make_node(operator, ["x"], ["y"], axis=-1)
        graph = onnx.helper.make_graph([node], operator, [x], [y])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        out: np.ndarray = np.empty((1, vocab), np.float32)
        binding.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        bound = None

        def call(row: np.ndarray) -> np.ndarray:
            nonlocal bound
            if row is not bound:
                binding.bind_input("x", "cpu", 0, np.float32, (1, vocab), row.ctypes.data)
                bound = row
            session.run_with_iobinding(binding)
            return out.reshape(vocab)

        return call

    return Peer({"softmax": partial(ready, "Softmax"), "log_softmax": partial(ready, "LogSoftmax")})


def zeros_model(folder: str, vocab: int) -> None:
    """For onnxruntime-genai, which makes no generator without a model: a row of zeros for every id."""
    from onnx import TensorProto, helper

    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "ids"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "ids", vocab])
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["rows"]),
        helper.make_node("Concat", ["rows", "columns"], ["shape"], axis=0),
        helper.make_node("ConstantOfShape", ["shape"], ["logits"]),
    ]
    columns = helper.make_tensor("columns", TensorProto.INT64, [1], [vocab])
    graph = helper.make_graph(nodes, "zeros", [ids], [logits], [columns])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    decoder = {
        "filename": "zeros.onnx",
        "session_options": {"intra_op_num_threads": 1},
        "num_hidden_layers": 0,
        **dict.fromkeys(("head_size", "hidden_size", "num_attention_heads", "num_key_value_heads"), 1),
        "inputs": {"input_ids": "input_ids"},
        "outputs": {"logits": "logits"},
    }
    special = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": vocab - 1}
    config = {"type": "llama", "vocab_size": vocab, "context_length": 4096, "decoder": decoder, **special}
    Path(folder, "zeros.onnx").write_bytes(model.SerializeToString())
    Path(folder, "genai_config.json").write_text(json.dumps({"model": config, "search": {}}))


def onnxruntime_genai() -> Peer:
    import onnxruntime_genai as genai

    class Draw:
        """Timed from the logits lying in the generator to the token in Python; what puts them there is not."""

        def __init__(self, setting: Setting, vocab: int) -> None:
            with tempfile.TemporaryDirectory() as folder:
                zeros_model(folder, vocab)
                self.model = genai.Model(folder)
            parameters = genai.GeneratorParams(self.model)
            parameters.set_search_options(**{"do_sample": True, "max_length": 4096, "top_k": 0, **setting})
            self.generator = genai.Generator(self.model, parameters)
            ids = prompt(vocab)[None, : 512 if "repetition_penalty" in setting else 1].astype(np.int32)
            self.most, self.last = ids[:, :-1], ids[:, -1:]
            for start in range(0, self.most.size, 8):  # few at a time: the model gives a row of logits for each
                self.generator.append_tokens(self.most[:, start : start + 8])

        def prepare(self, row: np.ndarray) -> None:
            self.generator.rewind_to(self.most.size)
            self.generator.append_tokens(self.last)
            self.generator.set_logits(row[None])

        def __call__(self, row: np.ndarray) -> int:
            self.generator.generate_next_token()
            return int(self.generator.get_next_tokens()[0])

    return Peer(sampler=Draw, takes=lambda setting: "top_k" in setting and "min_p" not in setting)


def torch() -> Peer:
    import torch

    torch.set_num_threads(1)

    def sampler(setting: Setting, vocab: int) -> Call:
        """Sorts only where top-p needs it, and only what top-k has left; draws by inverse CDF."""
        temperature, penalty = setting.get("temperature", 1.0), setting.get("repetition_penalty", 1.0)
        top_k, top_p, min_p = setting.get("top_k", 0), setting.get("top_p", 1.0), setting.get("min_p", 0.0)
        seen = torch.from_numpy(prompt(vocab))

        def call(row: np.ndarray) -> int:
            x, ids = torch.from_numpy(row), None
            if penalty != 1:
                some = x[seen]
                x = x.index_copy(0, seen, torch.where(some > 0, some / penalty, some * penalty))
            if temperature == 0:
                return int(x.argmax())
            if top_k:
                x, ids = torch.topk(x, top_k)
            elif top_p < 1:
                x, ids = torch.sort(x, descending=True)
            p = torch.softmax(x / temperature, -1)
            if min_p > 0:
                p = torch.where(p >= min_p * p.max(), p, 0)
            mass = p.cumsum(-1)
            if top_p < 1:
                mass = mass[: int(torch.searchsorted(mass, top_p)) + 1]
            drawn = torch.searchsorted(mass, torch.rand(1) * mass[-1], right=True)
            return int(drawn if ids is None else ids[drawn])

        return call

    def over(function: Callable[..., Any]) -> Ready:
        return always(lambda row: function(torch.from_numpy(row)))

    def logprobs(x: Any) -> tuple[Any, ...]:
        y = torch.log_softmax(x, -1)
        return *torch.topk(y, 20), float(y[17]), int((y > y[17]).sum()) + 1

    values = {
        "softmax": over(partial(torch.softmax, dim=-1)),
        "log_softmax": over(partial(torch.log_softmax, dim=-1)),
        "logsumexp": over(partial(torch.logsumexp, dim=-1)),
        "scale": over(lambda x: x / 0.7),
        "argmax": over(torch.argmax),
        "top_k, k = 5": over(lambda x: torch.topk(x, 5)),
        "top_k, k = 50": over(lambda x: torch.topk(x, 50)),
        "logprobs, top 20": over(logprobs),
    }
    return Peer(values, sampler, takes=lambda setting: True)


def torch_multinomial() -> Peer:
    import torch

    def sampler(setting: Setting, vocab: int) -> Call:
        temperature = setting.get("temperature", 1.0)
        return lambda row: int(torch.multinomial(torch.softmax(torch.from_numpy(row) / temperature, -1), 1))

    return Peer(sampler=sampler, takes=lambda setting: draws(setting) and not set(setting) - {"temperature"})


def transformers() -> Peer:
    import torch
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    steps = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }

    def sampler(setting: Setting, vocab: int) -> Call:
        process = LogitsProcessorList(step(setting[name]) for name, step in steps.items() if name in setting)
        seen = torch.from_numpy(prompt(vocab))[None]

        def call(row: np.ndarray) -> int:
            scores = process(seen, torch.from_numpy(row)[None])
            return int(torch.multinomial(torch.softmax(scores, -1), 1))

        return call

    return Peer(sampler=sampler)


def llama_cpp() -> Peer:
    """Its C functions, as llama-cpp-python (0.3.36) binds them."""
    import llama_cpp

    def sampler(setting: Setting, vocab: int) -> Call:
        steps: dict[str, Callable[[Any], Any]] = {  # top-k first: every later step has less to do
            "repetition_penalty": lambda penalty: llama_cpp.llama_sampler_init_penalties(vocab, 512, penalty, 0.0, 0.0),
            "top_k": llama_cpp.llama_sampler_init_top_k,
            "temperature": llama_cpp.llama_sampler_init_temp,
            "top_p": lambda p: llama_cpp.llama_sampler_init_top_p(p, 1),
            "min_p": lambda p: llama_cpp.llama_sampler_init_min_p(p, 1),
        }
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for name, step in steps.items():
            if name in setting:
                llama_cpp.llama_sampler_chain_add(chain, step(setting[name]))
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(1))
        for token in prompt(vocab).tolist():
            llama_cpp.llama_sampler_accept(chain, token)
        fresh = np.zeros((vocab, 3), np.int32)  # id, logit, p
        fresh[:, 0] = np.arange(vocab)
        candidates = fresh.copy()
        logits = candidates.view(np.float32)[:, 1]
        data = candidates.ctypes.data_as(llama_cpp.llama_token_data_p)
        array = llama_cpp.llama_token_data_array(data, vocab, -1, False)

        def call(row: np.ndarray) -> int:
            np.copyto(candidates, fresh)  # the chain sorts and shortens what it is given
            logits[:] = row
            array.size, array.selected, array.sorted = vocab, -1, False
            llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
            return int(candidates[array.selected, 0])

        return call

    return Peer(sampler=sampler)


PEERS = {
    "SciPy": scipy,
    "torch": torch,
    "torch.multinomial": torch_multinomial,
    "transformers": transformers,
    "onnxruntime": onnxruntime,
    "onnxruntime-genai": onnxruntime_genai,
    "llama.cpp": llama_cpp,
}


@functools.cache
def installed() -> dict[str, Peer]:
    found = {}
    for name, load in PEERS.items():
        with contextlib.suppress(ImportError):
            found[name] = load()
    return found


def absent() -> str:
    missing = [name for name in PEERS if name not in installed()]
    return f"not installed here, and so left out: {', '.join(missing)}" if missing else ""


# ---- that they do the same work ----


def first(result: Any) -> Any:
    """The values of (values, ids): ids of equal values differ between libraries."""
    return result[0] if isinstance(result, tuple) else result


def check_values(operation: Operation, ready: Ready) -> None:
    row = realistic(5000, np.random.default_rng(1))
    found, expected = (first(way(row.size)(row)) for way in (ready, operation.lanewise))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def check_draws(operation: Operation, ready: Ready) -> None:
    """What it draws is what lanewise may draw, about as often."""
    vocab, times = 1000, 2000
    row = np.random.default_rng(1).normal(0, 3, vocab).astype(np.float32)
    _, support = operation.lanewise(vocab)(row, return_support=True)
    law = np.zeros(vocab)
    law[support.ids] = np.exp(support.logprobs)
    call = ready(vocab)
    counts = np.bincount([drawn(call, row) for _ in range(times)], minlength=vocab)
    if counts[law == 0].any() or abs(counts / times - law).sum() / 2 > 0.1:
        raise AssertionError(f"{operation.name}: does not draw what lanewise draws")


def drawn(call: Call, row: np.ndarray) -> int:
    if prepare := getattr(call, "prepare", None):
        prepare(row)
    return int(call(row))


CHECKED: dict[str, dict[str, Ready]] = {}  # by the name of the operation


def ways(operation: Operation) -> dict[str, Ready]:
    """The other ways to do it, once each has been seen to do the same."""
    if operation.name not in CHECKED:
        found = {"NumPy": operation.numpy, **offered(operation)}
        for ready in found.values():
            (check_values if operation.setting is None else check_draws)(operation, ready)
        CHECKED[operation.name] = found
    return CHECKED[operation.name]


def offered(operation: Operation) -> dict[str, Ready]:
    name, setting = operation.name, operation.setting
    if setting is None:
        return {peer: its.values[name] for peer, its in installed().items() if name in its.values}
    return {
        peer: partial(its.sampler, setting)
        for peer, its in installed().items()
        if its.sampler is not None and its.takes(setting)
    }
