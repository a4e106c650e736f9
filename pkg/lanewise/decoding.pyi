from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._types import Array, Bias, DraftMethod, Float, Floats, Ids, Int, Ints, Mask, OnInvalid, Preset, SampleTies, Seeds
from .params import SamplingParams

class BeamStep(NamedTuple):
    scores: NDArray[np.float64]
    beams: NDArray[np.int64]
    tokens: NDArray[np.int64]
    perturbed: NDArray[np.float64] | None

class Verified(NamedTuple):
    tokens: NDArray[np.int64]
    accepted: NDArray[np.int64] | int
    path: NDArray[np.int64]

__test__: dict[str, str]  # added by Cython
METHODS: dict[str, int]
THRESHOLDS: dict[str, tuple[float, float]]
PROBS_REASON: str
REASON: str
NEUTRAL: list[float]

def beam_step(
    scores: Array,
    logits: Array,
    *,
    n: Int | None = None,
    groups: Int = 1,
    eos_ids: Sequence[Int] | NDArray[np.integer[Any]] = (),
    diversity_penalty: Float = 0.0,
    perturbed: Array | None = None,
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
    vocab_size: Int | None = None,
    on_invalid: OnInvalid = "raise",
) -> BeamStep: ...
def verify_draft(
    target: Array,
    draft: Ids,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    q: Array | None = None,
    method: DraftMethod = "noise",
    probs: bool = False,
    parents: Ids | None = None,
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
    u: Array | None = None,
    thresholds: tuple[float, float] | None = None,
    vocab_size: Int | None = None,
    ties: SampleTies = "lowest",
    preset: Preset = "transformers",
    on_invalid: OnInvalid = "raise",
) -> Verified: ...
