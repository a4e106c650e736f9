from collections.abc import Sequence
from typing import Literal, NamedTuple, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from lanewise._types import Array, Bias, Floats, Ids, Ints, Mask, OnInvalid, Preset, SampleTies, Seeds, Ties, Tokens
from lanewise.params import SamplingParams
from lanewise.stream import Stream

__pyx_capi__: dict[str, object]  # added by Cython, and so is __test__
__test__: dict[str, str]
PRESETS: dict[str, tuple[str, ...]]
PARAMETERS: tuple[str, ...]

@overload
def argmax(logits: Array, *, on_invalid: OnInvalid = "raise", out: None = None) -> Tokens: ...
@overload
def argmax(logits: Array, *, on_invalid: OnInvalid = "raise", out: NDArray[np.int64]) -> NDArray[np.int64]: ...
def top_k(
    logits: Array,
    k: SupportsIndex,
    *,
    ties: Ties = "lowest",
    out: tuple[NDArray[np.float32], NDArray[np.int64]] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]: ...

class Support(NamedTuple):
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    indptr: NDArray[np.int64]

@overload
def sample(
    logits: Array,
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
    u: Floats | None = None,
    vocab_size: SupportsIndex | None = None,
    ties: SampleTies = "lowest",
    preset: Preset = "transformers",
    return_support: Literal[False] = False,
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.int64] | None = None,
) -> Tokens: ...
@overload
def sample(
    logits: Array,
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
    u: Floats | None = None,
    vocab_size: SupportsIndex | None = None,
    ties: SampleTies = "lowest",
    preset: Preset = "transformers",
    return_support: Literal[True],
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.int64] | None = None,
) -> tuple[Tokens, Support]: ...
