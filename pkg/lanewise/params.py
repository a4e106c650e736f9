"""SamplingParams, the numbers that a call of sample is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The numbers of one sequence, as `sample(logits, params)` takes them: one for all rows, or a list, one a row.

    They are checked when they are used.

    >>> import numpy as np, lanewise
    >>> lanewise.sample(np.float32([1, 9, 2]), lanewise.SamplingParams(temperature=0.0))
    1
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_keep: int = 1
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
