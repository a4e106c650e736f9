"""A model of word pairs, made here, run by onnxruntime-genai, with lanewise as its sampler."""

import json
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai
from onnx import TensorProto, helper, numpy_helper

import lanewise
from lanewise.compat.onnxruntime_genai import generate_next_token

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
sizes = dict.fromkeys(("head_size", "hidden_size", "num_attention_heads", "num_key_value_heads"), 1)
decoder = {"filename": "pairs.onnx", "num_hidden_layers": 0, "inputs": {"input_ids": "input_ids"}, **sizes}
special = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": words.index("."), "context_length": 64}
config = {"model": {"type": "llama", "vocab_size": len(words), "decoder": decoder, **special}, "search": {}}

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "pairs.onnx").write_bytes(model.SerializeToString())
    Path(folder, "genai_config.json").write_text(json.dumps(config))
    parameters = genai.GeneratorParams(genai.Model(folder))
    parameters.set_search_options(max_length=16)
    generator = genai.Generator(genai.Model(folder), parameters)

rng = lanewise.Stream(1)
generator.append_tokens([words.index("the")])
while not generator.is_done():
    generate_next_token(generator, temperature=0.8, top_p=0.9, rng=rng)  # was: generator.generate_next_token()
print(*(words[token] for token in generator.get_sequence(0)))
