from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, SupportsIndex, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lanewise.params import SamplingParams, Stream

class _SupportsDLPack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...

_Array: TypeAlias = ArrayLike | _SupportsDLPack
_Float: TypeAlias = float | np.floating[Any] | np.integer[Any]
_Int: TypeAlias = int | np.integer[Any]
_Floats: TypeAlias = _Float | Sequence[_Float] | NDArray[np.floating[Any] | np.integer[Any]] | _SupportsDLPack
_Ints: TypeAlias = _Int | Sequence[_Int] | NDArray[np.integer[Any]] | _SupportsDLPack
_Seeds: TypeAlias = _Int | Sequence[_Int | None] | NDArray[np.integer[Any]] | _SupportsDLPack
_Ids: TypeAlias = (
    Sequence[_Int | Sequence[_Int] | NDArray[np.integer[Any]]] | NDArray[np.integer[Any]] | _SupportsDLPack
)
_Bias: TypeAlias = (
    Mapping[int, float] | Sequence[float | Mapping[int, float] | None] | NDArray[np.floating[Any]] | _SupportsDLPack
)
_Mask: TypeAlias = NDArray[np.bool_] | NDArray[np.int32] | NDArray[np.uint32] | Sequence[bool] | _SupportsDLPack
_Ties: TypeAlias = Literal["lowest", "all"]
_OnInvalid: TypeAlias = Literal["raise", "mark"]
_Step: TypeAlias = Literal["temperature", "top_k", "top_p", "min_p"]
_Preset: TypeAlias = Literal["transformers", "vllm", "llama.cpp", "mlx-lm"] | Sequence[_Step]
_Tokens: TypeAlias = int | NDArray[np.int64]  # an int for logits (V,), an array for (B, V): a type cannot tell

__test__: dict[str, str]  # added by Cython
PRESETS: dict[str, tuple[str, ...]]
PARAMETERS: tuple[str, ...]

def set_force_exact(on: bool) -> None: ...
def softmax(
    logits: _Array, *, temperature: _Floats = 1.0, axis: SupportsIndex = -1, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]: ...
def log_softmax(
    logits: _Array, *, temperature: _Floats = 1.0, axis: SupportsIndex = -1, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]: ...
@overload
def logsumexp(
    logits: _Array, *, temperature: _Floats = 1.0, axis: SupportsIndex = -1, out: None = None
) -> np.float32 | NDArray[np.float32]: ...
@overload
def logsumexp(
    logits: _Array, *, temperature: _Floats = 1.0, axis: SupportsIndex = -1, out: NDArray[np.float32]
) -> NDArray[np.float32]: ...
def scale(
    logits: _Array, temperature: _Floats, *, axis: SupportsIndex = -1, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]: ...
@overload
def argmax(logits: _Array, *, on_invalid: _OnInvalid = "raise", out: None = None) -> _Tokens: ...
@overload
def argmax(logits: _Array, *, on_invalid: _OnInvalid = "raise", out: NDArray[np.int64]) -> NDArray[np.int64]: ...
def top_k(
    logits: _Array,
    k: SupportsIndex,
    *,
    ties: _Ties = "lowest",
    out: tuple[NDArray[np.float32], NDArray[np.int64]] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]: ...

class Support(NamedTuple):
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    indptr: NDArray[np.int64]

@overload
def sample(
    logits: _Array,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    temperature: _Floats = 1.0,
    top_k: _Ints = 0,
    top_p: _Floats = 1.0,
    min_p: _Floats = 0.0,
    min_keep: _Ints = 1,
    repetition_penalty: _Floats = 1.0,
    frequency_penalty: _Floats = 0.0,
    presence_penalty: _Floats = 0.0,
    prompt_ids: _Ids | None = None,
    output_ids: _Ids | None = None,
    bias: _Bias | None = None,
    mask: _Mask | None = None,
    seed: _Seeds | None = None,
    step: _Ints | None = None,
    keys: _Ints | None = None,
    rng: Stream | None = None,
    u: _Floats | None = None,
    vocab_size: SupportsIndex | None = None,
    ties: _Ties = "lowest",
    preset: _Preset = "transformers",
    return_support: Literal[False] = False,
    on_invalid: _OnInvalid = "raise",
    out: NDArray[np.int64] | None = None,
) -> _Tokens: ...
@overload
def sample(
    logits: _Array,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    temperature: _Floats = 1.0,
    top_k: _Ints = 0,
    top_p: _Floats = 1.0,
    min_p: _Floats = 0.0,
    min_keep: _Ints = 1,
    repetition_penalty: _Floats = 1.0,
    frequency_penalty: _Floats = 0.0,
    presence_penalty: _Floats = 0.0,
    prompt_ids: _Ids | None = None,
    output_ids: _Ids | None = None,
    bias: _Bias | None = None,
    mask: _Mask | None = None,
    seed: _Seeds | None = None,
    step: _Ints | None = None,
    keys: _Ints | None = None,
    rng: Stream | None = None,
    u: _Floats | None = None,
    vocab_size: SupportsIndex | None = None,
    ties: _Ties = "lowest",
    preset: _Preset = "transformers",
    return_support: Literal[True],
    on_invalid: _OnInvalid = "raise",
    out: NDArray[np.int64] | None = None,
) -> tuple[_Tokens, Support]: ...
