"""engine.py MODEL ANSWERS [drafts]: a vLLM engine on a small random model, kept in MODEL; what it says into ANSWERS.

Tokens and logits; with drafts, the greedy tokens of an engine that speculates, and how many drafts there were.
"""

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


def speculate(settings):
    """In this process: so the patch is made here, and the drafts are counted here."""
    import vllm.v1.sample.rejection_sampler as sampler
    from vllm import LLM, SamplingParams

    if os.environ["LANEWISE_VLLM"] == "1":
        import lanewise.compat.vllm as patch

        patch.install()
    counts, chosen = [], sampler.rejection_sample

    def counted(ids, counts_of_requests, *args, **kwargs):
        counts.extend(counts_of_requests)
        return chosen(ids, counts_of_requests, *args, **kwargs)

    sampler.rejection_sample = counted
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    engine = LLM(**settings, speculative_config=drafts)
    prompts = [{"prompt_token_ids": ids} for ids in ([1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 5, 6, 5])]
    made = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=40, detokenize=False))
    tokens = [list(each.outputs[0].token_ids) for each in made]
    return {"tokens": tokens, "drafts": sum(counts), "by": chosen.__module__}


def main(path, answers_to, drafts=""):
    from vllm import LLM, SamplingParams

    if not os.path.exists(path):
        write_model(path)
    settings = {"model": path, "skip_tokenizer_init": True, "enforce_eager": True}
    settings |= {"dtype": "bfloat16", "max_model_len": 64}
    if drafts:
        with open(answers_to, "w") as file:
            json.dump(speculate(settings), file)
        return
    engine = LLM(
        **settings,
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
