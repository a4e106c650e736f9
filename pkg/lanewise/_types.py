"""What the stubs call the things that calls take and give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray


class SupportsDLPack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...


Array: TypeAlias = ArrayLike | SupportsDLPack
Float: TypeAlias = float | np.floating[Any] | np.integer[Any]
Int: TypeAlias = int | np.integer[Any]
Floats: TypeAlias = Float | Sequence[Float] | NDArray[np.floating[Any] | np.integer[Any]] | SupportsDLPack
Ints: TypeAlias = Int | Sequence[Int] | NDArray[np.integer[Any]] | SupportsDLPack
Seeds: TypeAlias = Int | Sequence[Int | None] | NDArray[np.integer[Any]] | SupportsDLPack
Ids: TypeAlias = Sequence[Int | Sequence[Int] | NDArray[np.integer[Any]]] | NDArray[np.integer[Any]] | SupportsDLPack
Bias: TypeAlias = (
    Mapping[int, float] | Sequence[float | Mapping[int, float] | None] | NDArray[np.floating[Any]] | SupportsDLPack
)
Mask: TypeAlias = NDArray[np.bool_] | NDArray[np.int32] | NDArray[np.uint32] | Sequence[bool] | SupportsDLPack
Ties: TypeAlias = Literal["lowest", "all"]
SampleTies: TypeAlias = Literal["lowest", "all", "top_k"]
OnInvalid: TypeAlias = Literal["raise", "mark"]
DraftMethod: TypeAlias = Literal["noise", "ratio", "block", "typical"]
Step: TypeAlias = Literal["temperature", "top_k", "top_p", "min_p"]
Preset: TypeAlias = Literal["transformers", "vllm", "llama.cpp", "mlx-lm"] | Sequence[Step]
Tokens: TypeAlias = int | NDArray[np.int64]  # an int for logits (V,), an array for (B, V): a type cannot tell
Margins: TypeAlias = float | NDArray[np.float64]  # likewise
Handles: TypeAlias = NDArray[np.int64]  # of blocks
TokenIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Key: TypeAlias = str | bytes | int
Images: TypeAlias = Sequence[tuple[Key, int]]  # with positions
Floats32: TypeAlias = NDArray[np.float32]
Floats64: TypeAlias = NDArray[np.float64]
LseBase: TypeAlias = Literal["e", "2"]
KvLayout: TypeAlias = str | tuple[str, str]
