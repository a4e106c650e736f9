from collections.abc import Sequence
from typing import SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from lanewise._types import (
    Array,
    Bias,
    Float,
    Floats,
    Ids,
    Int,
    Ints,
    Margins,
    Mask,
    OnInvalid,
    Preset,
    SampleTies,
    Seeds,
    Tokens,
)
from lanewise.params import SamplingParams
from lanewise.stream import Stream

__test__: dict[str, str]  # added by Cython
REASON: str
PROBS_REASON: str

def sample_n(
    logits: Array,
    n: SupportsIndex,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    temperature: Floats = 1.0,
    top_k: Ints = 0,
    top_p: Floats = 1.0,
    min_p: Floats = 0.0,
    min_keep: Ints = 1,
    repetition_penalty: Floats = 1.0,
    frequency_penalty: Floats = 0.0,
    presence_penalty: Floats = 0.0,
    prompt_ids: Ids | None = None,
    output_ids: Ids | None = None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    seed: Seeds | None = None,
    step: Ints | None = None,
    keys: Ints | None = None,
    rng: Stream | None = None,
    vocab_size: SupportsIndex | None = None,
    ties: SampleTies = "lowest",
    preset: Preset = "transformers",
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]: ...
def verify(
    logits: Array,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    token: Ints,
    temperature: Floats = 1.0,
    top_k: Ints = 0,
    top_p: Floats = 1.0,
    min_p: Floats = 0.0,
    min_keep: Ints = 1,
    repetition_penalty: Floats = 1.0,
    frequency_penalty: Floats = 0.0,
    presence_penalty: Floats = 0.0,
    prompt_ids: Ids | None = None,
    output_ids: Ids | None = None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    seed: Ints,
    step: Ints,
    keys: Ints | None = None,
    vocab_size: SupportsIndex | None = None,
    ties: SampleTies = "lowest",
    preset: Preset = "transformers",
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.float64] | None = None,
) -> Margins: ...
@overload
def sample_from_probs(
    probs: Array,
    *,
    n: None = None,
    seed: Seeds | None = None,
    step: Ints | None = None,
    keys: Ints | None = None,
    rng: Stream | None = None,
    u: Floats | None = None,
    noise: Array | None = None,
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.int64] | None = None,
) -> Tokens: ...
@overload
def sample_from_probs(
    probs: Array,
    *,
    n: SupportsIndex,
    seed: Seeds | None = None,
    step: Ints | None = None,
    keys: Ints | None = None,
    rng: Stream | None = None,
    u: None = None,
    noise: None = None,
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]: ...
def draw_tile(
    tile: Array, first_id: SupportsIndex, *, temperature: Float, seed: Int, step: Int, key: Int = 0
) -> tuple[float, float, int]: ...
