"""llguidance.torch, with its token bitmask applied by lanewise. Every other name is llguidance's own."""

from __future__ import annotations

from typing import Any

from lanewise.compat import _bitmask, _host

_llguidance = _host.need(
    "llguidance.torch", package="llguidance", works="1.9.1", names=("apply_token_bitmask_inplace",)
)


def __getattr__(name: str) -> Any:
    return getattr(_llguidance, name)


def apply_token_bitmask_inplace(logits: Any, mask: Any) -> None:
    """-inf for the logits whose bit is 0, or that lie beyond the mask: (V,) or (B, V), and int32 words for each row."""
    if not _bitmask.forbidden(logits, mask):
        _llguidance.apply_token_bitmask_inplace(logits, mask)
