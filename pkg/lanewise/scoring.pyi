from typing import NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lanewise._types import Array, Bias, Floats, Ids, Ints, Mask

__test__: dict[str, str]  # added by Cython

class Logprobs(NamedTuple):
    chosen: NDArray[np.float32] | float | None
    rank: NDArray[np.int64] | int | None
    top_ids: NDArray[np.int64] | None
    top_logprobs: NDArray[np.float32] | None
    given: NDArray[np.float32] | None
    entropy: NDArray[np.float32] | float | None

def logprobs(
    logits: Array,
    tokens: Ints | None = None,
    *,
    top_n: SupportsIndex = 0,
    ids: Ids | None = None,
    entropy: bool = False,
    temperature: Floats = 1.0,
    repetition_penalty: Floats = 1.0,
    frequency_penalty: Floats = 0.0,
    presence_penalty: Floats = 0.0,
    prompt_ids: Ids | None = None,
    output_ids: Ids | None = None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    vocab_size: SupportsIndex | None = None,
    out: Logprobs | None = None,
) -> Logprobs: ...
