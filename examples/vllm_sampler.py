"""vLLM's own sampler on lanewise, without an engine: a step for a batch of requests, patched and not.

With an engine it is one line before it is built, `lanewise.compat.vllm.install()`, or LANEWISE_VLLM=1 in the
environment, which reaches the processes that vLLM starts.
"""

import time

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

import lanewise.compat.vllm

ROWS, VOCABULARY = 4, 32_000
logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
k = torch.full((ROWS,), 50, dtype=torch.int32)
p = torch.full((ROWS,), 0.9)


def step(sampler: TopKTopPSampler) -> tuple[list[int], float]:
    """Tokens, and milliseconds for them."""
    generators = {0: torch.Generator().manual_seed(42)}  # request 0 asked for a seed
    rows = logits.clone()  # vLLM's own sampler writes into it
    start = time.perf_counter()
    tokens, _ = sampler(rows, generators, k, p)
    return tokens.tolist(), 1e3 * (time.perf_counter() - start)


for _ in range(2):  # the first call of either pays for what it loads
    plain, plain_ms = step(TopKTopPSampler())
    with lanewise.compat.vllm.installed():
        patched, patched_ms = step(TopKTopPSampler())
print(f"vLLM's tokens {plain}, {plain_ms:.2f} ms")
print(f"lanewise's tokens {patched}, {patched_ms:.2f} ms")
