"""llguidance.numpy, with its token bitmask applied by lanewise. Every other name is llguidance's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lanewise.compat import _bitmask, _host

_llguidance = _host.need(
    "llguidance.numpy", package="llguidance", works="1.9.1", names=("apply_token_bitmask_inplace",)
)


def __getattr__(name: str) -> Any:
    return getattr(_llguidance, name)


def apply_token_bitmask_inplace(logits: NDArray[Any], mask: NDArray[np.int32]) -> None:
    """-inf for the logits whose bit is 0, or that lie beyond the mask: (V,) or (B, V), and int32 words for each row."""
    if not _bitmask.forbidden(logits, mask):
        _llguidance.apply_token_bitmask_inplace(logits, mask)
