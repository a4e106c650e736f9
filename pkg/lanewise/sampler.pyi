from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

from ._types import Array, Floats32, Ids, Int, Mask, OnInvalid, TokenIds, Tokens
from .params import SamplingParams
from .steps import Step

__test__: dict[str, str]  # added by Cython

@disjoint_base
class Sampler:
    def __new__(cls, *args: Any, **kwargs: Any) -> Self: ...
    def __init__(
        self, steps: str | Iterable[Step], *, seed: Int | None = None, vocab_size: Int | None = None
    ) -> None: ...
    def add(
        self,
        id: Hashable,
        prompt_ids: TokenIds = (),
        *,
        output_ids: TokenIds = (),
        steps: Iterable[Step] | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        seed: Int | None = None,
        key: Int | None = None,
        step: Int = 0,
        index: Int | None = None,
    ) -> None: ...
    def remove(self, id: Hashable) -> None: ...
    def fork(
        self,
        id: Hashable,
        new: Hashable,
        *,
        seed: Int | None = None,
        key: Int | None = None,
        index: Int | None = None,
    ) -> None: ...
    def accept(self, id: Hashable, tokens: Int | TokenIds) -> None: ...
    def rollback(self, id: Hashable, n: Int = 1) -> None: ...
    def swap(self, i: Int, j: Int) -> None: ...
    def update_rows(
        self,
        *,
        removed: Iterable[int] = (),
        added: Iterable[tuple[int, Hashable, Mapping[str, Any]]] = (),
        moved: Iterable[tuple[int, int, Literal["move", "swap"]]] = (),
    ) -> None: ...
    @property
    def seed(self) -> int: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def steps(self) -> tuple[Step, ...]: ...
    @property
    def ids(self) -> list[Any]: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: object, /) -> bool: ...
    def prompt(self, id: Hashable) -> NDArray[np.int64]: ...
    def output(self, id: Hashable) -> NDArray[np.int64]: ...
    def noise(self, id: Hashable) -> tuple[int, int, int]: ...
    def state(self, id: Hashable) -> tuple[float, float] | None: ...
    def steps_of(self, id: Hashable) -> tuple[Step, ...]: ...
    def __call__(
        self,
        logits: Array,
        ids: Sequence[Hashable] | NDArray[Any] | Hashable | None = None,
        *,
        mask: Mask | None = None,
        guides: Array | Sequence[Array | None] | None = None,
        record: bool = True,
        on_invalid: OnInvalid = "raise",
        out: NDArray[np.int64] | None = None,
    ) -> Tokens: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def apply_steps(
    logits: Array,
    steps: Iterable[Step],
    *,
    prompt_ids: Ids | None = None,
    output_ids: Ids | None = None,
    out: Floats32 | None = None,
) -> Floats32: ...
