"""llguidance.numpy, with its token bitmask applied by lanewise. Every other name is llguidance's own."""

from __future__ import annotations

from typing import Any

from lanewise.compat import _bitmask, _host

_llguidance = _host.need(
    "llguidance.numpy", package="llguidance", works="1.9.1", names=("apply_token_bitmask_inplace",)
)


def __getattr__(name: str) -> Any:
    return getattr(_llguidance, name)


apply_token_bitmask_inplace = _bitmask.applying(_llguidance.apply_token_bitmask_inplace)
