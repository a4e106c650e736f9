"""The Case of chains: programs of all steps, on rows as they lie and on what few candidates are left."""

from __future__ import annotations

from typing import Any

import numpy as np

from lanewise import reference
from lanewise.chain import Program, run_chain

Results = dict[str, np.ndarray]

LLAMA = [
    ("top_n_sigma", 4.0),
    ("top_k", 40),
    ("typical", 0.97),
    ("top_p", 0.95),
    ("min_p", 0.01),
    ("xtc", 0.9, 0.1),
    ("temperature", 0.8),
]


def chain_settings(n: int) -> list[dict[str, Any]]:
    history = [0, n // 2, n // 2, n - 1]
    few: list[dict[str, Any]] = [
        {"steps": [("temperature", 0.8), ("mirostat_v2", 3.0, 0.1)], "state": (4.5, 0.0)},
        {"steps": [("top_n_sigma", 1.2), ("xtc", 1, 0.01), ("adaptive_p", 0.3)], "state": (3.0, 10.0)},
        {"steps": [("temperature", 1.5), ("typical", 0.9)]},
        {
            "steps": LLAMA,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.2,
            "presence_penalty": 0.1,
            "prompt_ids": history,
            "output_ids": history[1:],
            "bias": {0: 2.5, n - 1: -np.inf},
            "added": [(0, -1.5), (n // 3, 2.0), (n // 3, 0.25), (n // 2, -np.inf)],
            "mask": np.arange(n) % 7 != 3,
        },
    ]
    many: list[dict[str, Any]] = [
        {"steps": [("dynamic_temperature", 1.0, 0.5, 1.2), ("eta", 0.01), ("top_a", 0.1), ("mirostat", 4.0, 0.1, 50)]},
        {
            "steps": [
                ("quadratic", 0.2, 1.5),
                ("epsilon", 1e-3),
                ("tail_free", 0.95),
                ("temperature", 0.5),
                ("top_h", 0.7),
            ]
        },
        {
            "steps": [
                ("typical", 0.4, 3),
                ("top_k", 5, "all"),
                ("top_p", 0.8, 2, "all"),
                ("xtc", 1, 0.05, 2),
                "renormalise",
            ]
        },
        {"steps": [("xtc", 1, 0.01), ("quadratic", 0.3), ("temperature", 0.0)], "mask": np.arange(n) % 3 != 1},
        {"steps": [("top_h", 0.9), ("typical", 0.8), ("adaptive_p", 0.05, 0.5)], "state": (0.1, 2.0)},
        {"steps": [("top_p", 0.9), ("temperature", 1.3), ("min_p", 0.02), ("top_n_sigma", 1.0, 1)]},
    ]
    return few + many if n <= 5000 else few


def run_chains(x: np.ndarray, settings: dict[str, Any], alloc: Any) -> Results:
    told, count = dict(settings), len(x)
    program = Program(told.pop("steps"))
    state = alloc((count, 2), np.float64)
    state[...] = told.pop("state", program.state)
    for name in ("prompt_ids", "output_ids"):
        if name in told:
            told[name] = [told[name]] * count
    if "added" in told:
        ids, values = zip(*told["added"], strict=True)
        told["added"] = ids * count, values * count, np.arange(count + 1) * len(ids)
    tokens, support = run_chain(
        x,
        program,
        state=state,
        **told,
        seed=5,
        step=9,
        keys=[9] * count,
        return_support=True,
        on_invalid="mark",
        out=alloc((count,), np.int64),
    )
    return {"tokens": tokens, **support._asdict(), "state": state}


def chain_reference(x: np.ndarray, settings: dict[str, Any]) -> Results:
    told = dict(settings)
    program = Program(told.pop("steps"))
    found = [reference.chain(row, program, seed=5, step=9, key=9, **told) for row in x]
    return {
        "tokens": np.array([token for token, *_ in found]),
        "ids": np.concatenate([kept for _, kept, *_ in found]).astype(np.int64),
        "logprobs": np.concatenate([logprobs for _, _, logprobs, _ in found]),
        "indptr": np.cumsum([0, *(len(kept) for _, kept, *_ in found)]),
        "state": np.array([state for *_, state in found]),
    }
