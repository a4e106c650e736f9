"""The same weights as a model of transformers."""

from __future__ import annotations

import numpy as np
import torch
from model import Model
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}


def as_transformers(model: Model) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(model.weights["token_embd"]),
        hidden_size=model.width,
        intermediate_size=len(model.weights["blk.0.ffn_gate"]),
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_heads,
        rms_norm_eps=float(model.epsilon),
        rope_parameters={"rope_type": "default", "rope_theta": model.fields["llama.rope.freq_base"].contents()},
        max_position_embeddings=model.fields["llama.context_length"].contents(),
        bos_token_id=model.fields["tokenizer.ggml.bos_token_id"].contents(),
        eos_token_id=model.fields["tokenizer.ggml.eos_token_id"].contents(),
        pad_token_id=model.fields["tokenizer.ggml.padding_token_id"].contents(),
        tie_word_embeddings="output" not in model.weights,
    )
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    made.to_empty(device="cpu")
    made.model.rotary_emb = type(made.model.rotary_emb)(config)  # its frequencies are in no file
    for name, weight in model.weights.items():
        made.get_parameter(renamed(name)).data = torch.from_numpy(reordered(name, weight, model))
    made.tie_weights()
    return made.eval()


def renamed(name: str) -> str:
    *block, last = name.split(".")
    return ".".join(["model", *(["layers", block[1]] if block else []), NAMES[last], "weight"])


def reordered(name: str, weight: np.ndarray, model: Model) -> np.ndarray:
    """transformers keeps the numbers that turn together half a head apart, not side by side."""
    if not name.endswith(("attn_q", "attn_k")):
        return np.require(weight, requirements="W")
    pairs = weight.reshape(-1, model.head_width // 2, 2, model.width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
