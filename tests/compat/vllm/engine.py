"""engine.py MODEL ANSWERS: a vLLM engine on a small random model, kept in MODEL; its tokens and logits into ANSWERS."""

import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 500


def write_model(path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def main(path, answers_to):
    from vllm import LLM, SamplingParams

    if not os.path.exists(path):
        write_model(path)
    engine = LLM(
        path,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        logprobs_mode="raw_logits",
        max_logprobs=VOCABULARY,
        logits_processors=["lanewise.compat.vllm:SeededDraw"],
    )
    common = dict(max_tokens=12, detokenize=False, logprobs=VOCABULARY)
    sampled = dict(temperature=0.7, top_k=50, top_p=0.9)
    requests = {
        "greedy": SamplingParams(temperature=0, **common),
        "seeded": SamplingParams(**sampled, seed=5, **common),
        "lanewise": SamplingParams(**sampled, extra_args={"lanewise_seed": 42}, **common),
        "plain": SamplingParams(**sampled, presence_penalty=0.5, repetition_penalty=1.1, **common),
    }
    prompts = [{"prompt_token_ids": [1, 2, 3 + i]} for i in range(len(requests))]
    answers = {}
    for name, made in zip(requests, engine.generate(prompts, list(requests.values())), strict=True):
        rows = [[step[i].logprob for i in range(VOCABULARY)] for step in made.outputs[0].logprobs]
        answers[name] = {"tokens": list(made.outputs[0].token_ids), "logits": rows}
    with open(answers_to, "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
