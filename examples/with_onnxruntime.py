"""A model of word pairs, made here, run by onnxruntime; its logits go to lanewise where they lie."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession, OrtValue

import lanewise
from lanewise.compat.onnxruntime import sample

text = "the cat sees the dog and the dog sees the bird and the bird sings and the cat sleeps and the end ."
words = sorted(set(text.split()))
pairs = np.zeros((len(words), len(words)), np.float32)
for first, second in zip(text.split(), text.split()[1:], strict=False):
    pairs[words.index(first), words.index(second)] += 1

ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])
logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", len(words)])
gather = helper.make_node("Gather", ["pairs", "input_ids"], ["logits"])
graph = helper.make_graph([gather], "pairs", [ids], [logits], [numpy_helper.from_array(2 * pairs, "pairs")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
session = InferenceSession(model.SerializeToString())

rng = lanewise.Stream(1)
tokens = np.full(4, words.index("the"))  # four texts at once
lines = [tokens]
for _ in range(12):
    feeds = {"input_ids": OrtValue.ortvalue_from_numpy(tokens[:, None].astype(np.int64))}
    outputs = session.run_with_ort_values(["logits"], feeds)
    tokens = sample(outputs[0], temperature=[0.0, 0.5, 1.0, 1.0], top_k=5, rng=rng)
    lines.append(tokens)
for line in np.transpose(lines):
    print(*(words[token] for token in line))
