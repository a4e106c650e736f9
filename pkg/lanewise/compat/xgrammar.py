"""`import lanewise.compat.xgrammar as xgr`: xgrammar, with its token bitmask applied by lanewise on the CPU.

>>> bitmask = xgr.allocate_token_bitmask(1, 64)
>>> matcher.fill_next_token_bitmask(bitmask)
>>> xgr.apply_token_bitmask_inplace(logits, bitmask)

NumPy arrays are taken as CPU tensors are. Every other name is xgrammar's own.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lanewise.compat import _bitmask, _host

_xgrammar = _host.need(
    "xgrammar", package="xgrammar", works="0.2.8", names=("allocate_token_bitmask", "apply_token_bitmask_inplace")
)
_torch = _host.need("torch", package="torch", works="2.13.0")

allocate_token_bitmask = _xgrammar.allocate_token_bitmask


def __getattr__(name: str) -> Any:
    return getattr(_xgrammar, name)


def reset_token_bitmask(bitmask: Any) -> None:
    """Allow every token."""
    if isinstance(bitmask, np.ndarray):
        bitmask.fill(-1)
    else:
        _xgrammar.reset_token_bitmask(bitmask)


def apply_token_bitmask_inplace(
    logits: Any, bitmask: Any, *, vocab_size: int | None = None, indices: Any = None, backend: str = "auto"
) -> None:
    """-inf for the logits whose bit is 0. What lies beyond the bitmask, or `vocab_size`, stays as it is.

    logits: float32, float16 or bfloat16, (V,) or (B, V); bitmask: int32, (words,) or (B, words). indices: the rows to
    mask. What is not on the CPU, and what is not valid, is xgrammar's to do or to refuse.
    """
    x, words = _bitmask.logits_rows(logits), _bitmask.words_rows(bitmask)
    if backend in ("auto", "cpu") and x is not None and words is not None and _fits(x, words, vocab_size, indices):
        covered = min(x.shape[1], 32 * words.shape[1])
        if vocab_size is None and covered < x.shape[1]:
            warnings.warn(
                f"The bitmask covers {covered} of {x.shape[1]} logits: the others are left unmasked. Allocate it for "
                "the whole vocabulary, or pass vocab_size.",
                stacklevel=2,
            )
        width = covered if vocab_size is None else max(vocab_size, 0)
        _bitmask.forbid(x[:, :width], words if indices is None else _only(words, indices, len(x)))
    else:
        _xgrammar.apply_token_bitmask_inplace(
            _tensor(logits), _tensor(bitmask), vocab_size=vocab_size, indices=indices, backend=backend
        )


def _fits(x: NDArray[Any], words: NDArray[np.int32], vocab_size: int | None, indices: Any) -> bool:
    if vocab_size is not None and not (
        isinstance(vocab_size, int | np.integer) and vocab_size <= min(x.shape[1], 32 * words.shape[1])
    ):
        return False
    if indices is None:
        return len(x) == len(words)
    chosen = np.asarray(indices)
    return chosen.ndim == 1 and (
        chosen.size == 0 or (chosen.dtype.kind in "iu" and chosen.min() >= 0 and chosen.max() < min(len(x), len(words)))
    )


def _only(words: NDArray[np.int32], indices: Any, count: int) -> NDArray[np.int32]:
    """The words of these rows; all is allowed in the others."""
    chosen = np.asarray(indices, np.int64)
    only = np.full((count, words.shape[1]), -1, np.int32)
    only[chosen] = words[chosen]
    return only


def _tensor(x: Any) -> Any:
    return _torch.from_numpy(x) if isinstance(x, np.ndarray) else x
