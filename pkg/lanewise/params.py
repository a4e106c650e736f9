"""What a call of sample is told: SamplingParams, and Stream, the seed that counts its steps."""

from __future__ import annotations

import operator
import threading
from dataclasses import dataclass
from typing import Any


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


class Stream:
    """A seed that counts: each call of sample that is given it uses the next step.

    One thread at a time: a second one that uses it during a call gets a RuntimeError.

    >>> import numpy as np, lanewise
    >>> rng, logits = lanewise.Stream(42), np.zeros(1000, np.float32)
    >>> first = lanewise.sample(logits, rng=rng)
    >>> first == lanewise.sample(logits, seed=42, step=0), rng.step
    (True, 1)
    """

    __slots__ = ("_lock", "seed", "step")

    def __init__(self, seed: int, step: int = 0) -> None:
        try:
            self.seed, self.step = operator.index(seed), operator.index(step)
        except TypeError:
            raise TypeError(f"seed and step must be integers, got {seed!r} and {step!r}") from None
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {seed}")
        if not 0 <= self.step <= 2**32:  # the last is a stream that has used up its steps
            raise ValueError(f"step must be in [0, 2**32), got {step}")
        self._lock = threading.Lock()

    def __enter__(self) -> Stream:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this Stream is in use by another thread; give each thread its own")
        return self

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def __repr__(self) -> str:
        return f"Stream(seed={self.seed}, step={self.step})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.seed, self.step)
