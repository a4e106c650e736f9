"""with_llama_cpp.py MODEL.gguf: llama-cpp-python with lanewise as its sampler, in three ways."""

import sys

import numpy as np

import lanewise
import lanewise.compat.llama_cpp as lanewise_llama
from lanewise.compat.llama_cpp import Llama  # was: from llama_cpp import Llama

llama = Llama(sys.argv[1], n_ctx=256, verbose=False)

# All that Llama does, as ever.
prompt = "The capital of France is"
print(prompt + llama.create_completion(prompt, temperature=0.0, max_tokens=8)["choices"][0]["text"])
chat = [{"role": "user", "content": "Name a colour."}]
answer = llama.create_chat_completion(chat, temperature=0.7, top_p=0.9, seed=1, max_tokens=16)
print(answer["choices"][0]["message"]["content"])

# A loop of one's own: the logits are read where llama.cpp has left them.
llama.reset()
llama.eval(llama.tokenize(b"Once upon a time"))
rng = lanewise.Stream(1)
text: list[int] = []
for _ in range(16):
    text.append(
        lanewise_llama.sample(llama, temperature=0.8, top_p=0.9, repetition_penalty=1.1, output_ids=text, rng=rng)
    )
    llama.eval(text[-1:])
print("Once upon a time" + llama.detokenize(text).decode(errors="replace"))

# What lanewise says of a token besides.
found = lanewise.logprobs(lanewise_llama.logits(llama), top_n=3, entropy=True)
print("next:", [llama.detokenize([token]).decode() for token in found.top_ids], np.exp(found.top_logprobs).round(2))
