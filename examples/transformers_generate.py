"""transformers' generate(), sampling with lanewise. The model is a small random one: take your own."""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lanewise.compat.transformers import installed


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32_000, pad_token_id=0, **sizes)).eval()


def timed(model: LlamaForCausalLM, prompt: torch.Tensor, **how: float) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    text = model.generate(prompt, max_new_tokens=20, eos_token_id=None, **how)
    return text, (time.perf_counter() - start) / 20 * 1e3


model, prompt = new_model(), torch.tensor([[1, 5, 9], [1, 6, 10]])
sampling = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95}

timed(model, prompt, do_sample=False)  # the first call is slow
_, before = timed(model, prompt, **sampling)
greedy, _ = timed(model, prompt, do_sample=False)
with installed():
    torch.manual_seed(1)
    text, after = timed(model, prompt, **sampling)
    torch.manual_seed(1)
    assert torch.equal(text, timed(model, prompt, **sampling)[0])  # the seed is torch's, as before
    assert torch.equal(greedy, timed(model, prompt, do_sample=False)[0])

print(f"two tokens: {before:.1f} ms, with lanewise {after:.1f} ms, the forward pass included")
