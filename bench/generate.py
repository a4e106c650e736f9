"""`python -m bench.generate step` and `... text`: what lanewise.compat.transformers saves, with transformers in turns.

step: 32 rows of 151,936 logits, T 0.7, top-k 50, top-p 0.9, from the logits to the tokens; hot rows, and cold ones.
text: generate() on SmolLM2-135M (examples/generate), T 0.8, top-p 0.95: the time outside the forward pass.
Needs what tests/compat/transformers has installed; --threads sets those of both sides, else each has its default.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import lanewise
from lanewise._caches import last_level_cache
from lanewise._rows import realistic
from lanewise.compat.transformers import Sampler, installed

ROWS, VOCAB = 32, 151_936
EXAMPLE = Path(__file__).parents[1] / "examples" / "generate"


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


# ---- the step ----


def step(turns: int) -> None:
    rng = np.random.default_rng(1)
    scores = torch.from_numpy(np.stack([realistic(VOCAB, rng) for _ in range(ROWS)]))
    ids = torch.zeros(ROWS, 8, dtype=torch.int64)
    processors = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopKLogitsWarper(50),
            transformers.TopPLogitsWarper(0.9),
        ]
    )
    sampler = Sampler(processors)

    def theirs() -> Any:
        return torch.multinomial(torch.softmax(processors(ids, scores), -1), 1)

    flushed = np.zeros(3 * last_level_cache(), np.uint8)
    for kind in ("hot", "cold"):
        taken: dict[str, list[float]] = {"transformers": [], "lanewise": []}
        for _ in range(turns):
            for name, call, times in (("transformers", theirs, 1), ("lanewise", lambda: sampler(ids, scores), 20)):
                for _ in range(times):  # of the short ones many, the first of which find what the others left
                    if kind == "cold":
                        flushed += 1
                    taken[name].append(milliseconds(call))
        before, after = (float(np.median(some)) for some in taken.values())
        print(
            f"{kind:>5}: transformers {before:8.1f} ms, lanewise {after:6.3f} ms, {before / after:5.0f} times",
            flush=True,
        )


# ---- the text ----


class Forward:
    """Adds up the time that a model's forward pass takes."""

    def __init__(self, model: Any) -> None:
        self.spent = 0.0
        model.register_forward_pre_hook(self.begin)
        model.register_forward_hook(self.end)

    def begin(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def end(self, *_: Any) -> None:
        self.spent += (time.perf_counter() - self.began) * 1e3


def smollm2() -> tuple[Any, Any]:
    sys.path.insert(0, str(EXAMPLE))
    from as_transformers import as_transformers
    from model import Model
    from text import chat, tokenizer_of

    own = Model(runpy.run_path(str(EXAMPLE / "__main__.py"))["weights"]())
    question = chat("Tell me a story about a lighthouse.")
    return as_transformers(own), torch.tensor([tokenizer_of(own.fields).encode(question).ids])


def text(turns: int) -> None:
    model, prompt = smollm2()
    forward = Forward(model)
    tokens = 24
    for rows in (1, 8):
        outside: dict[str, list[float]] = {"greedy": [], "transformers": [], "lanewise": []}
        for _ in range(turns):
            for name, times in outside.items():
                times.append(one_text(model, forward, prompt.repeat(rows, 1), tokens, name))
        greedy, before, after = (float(np.median(some)) / tokens for some in outside.values())
        print(
            f"{rows} rows, outside the forward pass, a step: greedy {greedy:.2f} ms, transformers {before:.2f} ms, "
            f"lanewise {after:.2f} ms, {before / after:.1f} times less",
            flush=True,
        )


def one_text(model: Any, forward: Forward, prompt: Any, tokens: int, way: str) -> float:
    """Milliseconds outside the forward pass."""
    how: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95}
    how = {"do_sample": False} if way == "greedy" else how
    forward.spent = 0.0
    with installed() if way == "lanewise" else contextlib.nullcontext():
        total = milliseconds(lambda: model.generate(prompt, max_new_tokens=tokens, eos_token_id=None, **how))
    return total - forward.spent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generate", description=__doc__)
    parser.add_argument("part", choices=("step", "text"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
        lanewise.set_num_threads(asked.threads)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, ", end="")
    print(f"threads: torch {torch.get_num_threads()}, lanewise {lanewise.get_num_threads()}")
    {"step": step, "text": text}[asked.part](asked.turns)


if __name__ == "__main__":
    main()
