from collections.abc import Iterable, Sequence
from typing import Any, Literal, SupportsIndex, final, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from lanewise._types import Array, Bias, Floats, Ids, Ints, Mask, OnInvalid, Seeds, Tokens
from lanewise.sampling import Support
from lanewise.stream import Stream

__test__: dict[str, str]  # added by Cython

@final
class Program:
    @property
    def steps(self) -> tuple[Any, ...]: ...
    @property
    def codes(self) -> NDArray[np.float64]: ...
    @property
    def state(self) -> NDArray[np.float64]: ...
    def __new__(cls, steps: Iterable[Any]) -> Self: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@overload
def run_chain(
    logits: Array,
    programs: Program | Sequence[Program],
    *,
    state: NDArray[np.float64] | None = None,
    repetition_penalty: Floats = 1.0,
    frequency_penalty: Floats = 0.0,
    presence_penalty: Floats = 0.0,
    prompt_ids: Ids | None = None,
    output_ids: Ids | None = None,
    bias: Bias | None = None,
    added: tuple[Any, ...] | None = None,
    mask: Mask | None = None,
    seed: Seeds | None = None,
    step: Ints | None = None,
    keys: Ints | None = None,
    rng: Stream | None = None,
    vocab_size: SupportsIndex | None = None,
    return_support: Literal[False] = False,
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.int64] | None = None,
) -> Tokens: ...
@overload
def run_chain(
    logits: Array,
    programs: Program | Sequence[Program],
    *,
    state: NDArray[np.float64] | None = None,
    repetition_penalty: Floats = 1.0,
    frequency_penalty: Floats = 0.0,
    presence_penalty: Floats = 0.0,
    prompt_ids: Ids | None = None,
    output_ids: Ids | None = None,
    bias: Bias | None = None,
    added: tuple[Any, ...] | None = None,
    mask: Mask | None = None,
    seed: Seeds | None = None,
    step: Ints | None = None,
    keys: Ints | None = None,
    rng: Stream | None = None,
    vocab_size: SupportsIndex | None = None,
    return_support: Literal[True],
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.int64] | None = None,
) -> tuple[Tokens, Support]: ...
