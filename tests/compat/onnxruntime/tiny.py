"""The least that is a language model: the logits of the next token are a row of a table, chosen by the last token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

END = 49
FLOATS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def table(seed: int = 0) -> np.ndarray:
    """Logits of 50 tokens after each of them; 7 is followed by END, and nothing else is."""
    rows = np.random.default_rng(seed).normal(0, 3, (50, 50)).astype(np.float32)
    rows[:, END] = -50
    rows[7] = -50
    rows[7, END] = 5
    return rows


def model(rows: np.ndarray, dtype: str = "float32") -> bytes:
    kind = FLOATS[dtype]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "ids"])
    logits = helper.make_tensor_value_info("logits", kind, ["batch", "ids", rows.shape[1]])
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["wide"]),
        helper.make_node("Cast", ["wide"], ["logits"], to=kind),
    ]
    graph = helper.make_graph(nodes, "bigrams", [ids], [logits], [numpy_helper.from_array(rows, "table")])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(made.SerializeToString())


def genai_model(folder: Path, rows: np.ndarray, dtype: str = "float32") -> Any:
    import onnxruntime_genai

    config = {
        "type": "llama",
        "vocab_size": rows.shape[1],
        "context_length": 64,
        "bos_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": END,
        "decoder": {
            "filename": "model.onnx",
            "num_hidden_layers": 0,
            **dict.fromkeys(("head_size", "hidden_size", "num_attention_heads", "num_key_value_heads"), 1),
            "inputs": {"input_ids": "input_ids"},
            "outputs": {"logits": "logits"},
        },
    }
    (folder / "model.onnx").write_bytes(model(rows, dtype))
    (folder / "genai_config.json").write_text(json.dumps({"model": config, "search": {}}))
    return onnxruntime_genai.Model(str(folder))
