from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from lanewise._types import Array, Bias, Floats, Ids, Ints, Mask, OnInvalid, Ties

_Rows = TypeVar("_Rows", bound=NDArray[Any])  # float32, or the dtype of the logits

__test__: dict[str, str]  # added by Cython

def top_k_mask(
    logits: Array,
    k: Ints,
    *,
    min_keep: Ints = 1,
    ties: Ties = "lowest",
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]: ...
def top_p_mask(
    logits: Array,
    p: Floats,
    *,
    temperature: Floats = 1.0,
    min_keep: Ints = 1,
    ties: Ties = "lowest",
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]: ...
def min_p_mask(
    logits: Array,
    min_p: Floats,
    *,
    temperature: Floats = 1.0,
    min_keep: Ints = 1,
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]: ...
def top_k_renorm(
    probs: Array,
    k: Ints,
    *,
    ties: Ties = "lowest",
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]: ...
def top_p_renorm(
    probs: Array,
    p: Floats,
    *,
    ties: Ties = "lowest",
    on_invalid: OnInvalid = "raise",
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]: ...
def apply_penalties(
    logits: Array,
    *,
    repetition_penalty: Floats = 1.0,
    frequency_penalty: Floats = 0.0,
    presence_penalty: Floats = 0.0,
    prompt_ids: Ids | None = None,
    output_ids: Ids | None = None,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]: ...
def apply_bias(logits: Array, bias: Bias, *, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]: ...
@overload
def apply_token_bitmask(logits: Array, mask: Mask, *, out: None = None) -> NDArray[np.float32]: ...
@overload
def apply_token_bitmask(logits: Array, mask: Mask, *, out: _Rows) -> _Rows: ...
