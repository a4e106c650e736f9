"""The steps that want the whole row, on float32 in NumPy and the package's kernels: each gives the row that follows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import steps as s
from .values import log_softmax

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


def guided(step: s.Guidance, row: F32, guide: F32) -> F32:
    if step.scale == 1:
        return np.asarray(log_softmax(row))
    given, free = log_softmax(row), log_softmax(guide)
    with np.errstate(invalid="ignore"):
        mixed = free + np.float32(step.scale) * (given - free)
    return np.where(given == -np.inf, given, mixed)  # what is forbidden stays so: -inf - -inf is no number


def contrasted(step: s.Contrastive, row: F32, guide: F32) -> F32:
    with np.errstate(divide="ignore"):
        least = np.float32(np.log(np.float64(step.alpha)))
    beta = np.float32(step.beta)
    with np.errstate(invalid="ignore"):
        mixed = (1 + beta) * row - beta * guide
        out = (row < row.max() + least) | (row == -np.inf)
    return np.where(out, np.float32(-np.inf), mixed)


def infilled(step: s.Infill, row: F32) -> F32:
    """llama.cpp's infill, over what is left of the row: in descending order of it."""
    if step.eog_ids[0] >= len(row):
        raise ValueError(f"Infill: eog_ids[0] is {step.eog_ids[0]}, but logits are of {len(row)} ids")
    ids = np.argsort(-row, kind="stable")
    ids = ids[row[ids] > -np.inf]
    if step.pieces is not None and (strange := ids[ids >= len(step.pieces)]).size:
        raise ValueError(f"Infill: pieces has {len(step.pieces)} texts, but id {strange[0]} is left")
    p = np.exp(log_softmax(row)[ids]).astype(np.float32)
    eog = np.isin(ids, step.eog_ids)
    if 3 * p[eog].sum() * len(ids) > p[~eog].sum():
        return _only(row, ids[eog])
    alive = np.ones(len(ids), bool)
    if step.pieces is not None:
        _merge([step.pieces[i] for i in ids.tolist()], p, alive)
    alive &= (p >= np.float32(0.2)) | eog
    texts = int((alive & ~eog).sum())
    if not texts:
        end = np.full(row.shape, -np.inf, np.float32)
        end[step.eog_ids[0]] = 1.0
        return end
    p = p / p[alive].sum()
    alive &= (p >= np.float32(1.0 / (texts + 1))) | eog
    return _only(row, ids[alive])


def _merge(pieces: list[bytes], p: F32, alive: NDArray[np.bool_]) -> None:
    """A token that begins another joins it, at the likelier of the two."""
    for i, piece in enumerate(pieces):
        for j, other in enumerate(pieces):
            if not alive[i]:
                break
            if i != j and alive[j] and piece and other.startswith(piece):
                to, gone = (j, i) if p[j] > p[i] else (i, j)
                p[to] += p[gone]
                p[gone], alive[gone] = 0, False


def _only(row: F32, ids: Any) -> F32:
    kept = np.full(row.shape, -np.inf, np.float32)
    kept[ids] = row[ids]
    return kept


def marked(step: s.Watermark, row: F32, ids: I64) -> F32:
    if len(ids) >= step.context:
        green = np.atleast_1d(step.green_ids(ids, len(row)))
        if step.greens is not None and (bad := green[(green < 0) | (green >= len(row))]).size:
            raise ValueError(f"Watermark: greens gave {bad[0]}, not an id in 0..{len(row) - 1}")
        row[green] += np.float32(step.bias)
    return row


def custom(step: s.Custom, row: F32, ids: I64) -> F32:
    given = np.asarray(step.function(ids, row))
    if given.shape != row.shape or given.dtype.kind != "f":
        raise ValueError(f"a custom step must give a float row of shape {row.shape}, got {given.dtype} {given.shape}")
    return np.array(given, np.float32)  # a copy: the function may fill the same array for the next row


def applied(step: s.Step, row: F32, ids: I64, guide: F32 | None) -> F32:
    """ids: prompt and output. row may be written to, and be what comes back."""
    if isinstance(step, (s.Guidance, s.Contrastive)):
        assert guide is not None
        return guided(step, row, guide) if isinstance(step, s.Guidance) else contrasted(step, row, guide)
    if isinstance(step, s.Infill):
        return infilled(step, row)
    if isinstance(step, s.Watermark):
        return marked(step, row, ids)
    if isinstance(step, s.Custom):
        return custom(step, row, ids)
    assert isinstance(step, s.Renormalise)
    return np.asarray(log_softmax(row))
