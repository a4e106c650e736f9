"""The same work through other libraries, where they are installed: {library: {operation: ready(vocab) -> call}}."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import numpy as np

from lanewise._measure import Call, Ready, always


def scipy() -> dict[str, Ready]:
    from scipy import special

    return {name: always(getattr(special, name)) for name in ("softmax", "log_softmax", "logsumexp")}


def onnxruntime() -> dict[str, Ready]:
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

    return {"softmax": partial(ready, "Softmax"), "log_softmax": partial(ready, "LogSoftmax")}


def first(result: Any) -> Any:
    """The values of (values, ids): ids of equal values differ between libraries."""
    return result[0] if isinstance(result, tuple) else result


def installed() -> dict[str, dict[str, Ready]]:
    peers = {}
    for name, peer in (("SciPy", scipy), ("onnxruntime", onnxruntime)):
        with contextlib.suppress(ImportError):
            peers[name] = peer()
    return peers
