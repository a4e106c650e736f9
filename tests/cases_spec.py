"""The Cases of beams and drafts: an input's rows, in turn, are beams, or places of sequences of 0, 1, 2, 3 drafts."""

from __future__ import annotations

from typing import Any

import numpy as np

import lanewise
from lanewise import reference

Results = dict[str, np.ndarray]


def neutral(n: int) -> np.ndarray:
    return np.arange(n) % 7 != 3


# ---- beams ----


def beam_settings(n: int) -> list[dict[str, Any]]:
    few: list[dict[str, Any]] = [
        {"beams": 2},
        {"beams": 2, "mask": neutral(n), "eos_ids": [0, n - 1], "bias": {0: 2.5}},
        {"beams": 2, "seed": 5, "step": 9},
    ]
    many: list[dict[str, Any]] = [
        {"beams": 1},
        {"beams": 1, "seed": 2**64 - 1, "step": 3},
        {"beams": 1, "groups": 2, "diversity_penalty": 1.5},
        {"beams": 5, "n": min(5 * n, 70), "equal": True},
        {"beams": 1, "n": n, "repetition_penalty": 1.3, "output_ids": [0, n // 2]},
    ]
    return few + many if n <= 5000 else few


def beam_scores(count: int, settings: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    """Scores of all rows, and the settings without what is the Case's own."""
    told = {name: value for name, value in settings.items() if name not in ("beams", "equal")}
    scores = np.zeros(count) if settings.get("equal") else -(np.arange(count) * 0.37 % 1.1)
    if count > 5:
        scores[4] = -np.inf  # a beam that is not there
    return scores, told


def run_beam_step(x: np.ndarray, settings: dict[str, Any], *_: Any) -> Results:
    scores, told = beam_scores(len(x), settings)
    shape = (-1, settings["beams"])
    if "output_ids" in told:
        told["output_ids"] = [told["output_ids"]] * len(x)
    if "seed" in told:
        told |= {"perturbed": (scores * 0.5).reshape(shape), "keys": range(3, 3 + len(x))}
    found = lanewise.beam_step(scores.reshape(shape), x, on_invalid="mark", **told)
    return {name: array for name, array in found._asdict().items() if array is not None}


def beam_reference(x: np.ndarray, settings: dict[str, Any]) -> Results:
    scores, told = beam_scores(len(x), settings)
    edits = {name: told.pop(name) for name in ("mask", "bias", "repetition_penalty", "output_ids") if name in told}
    z = np.stack([reference.processed(row, **edits) for row in x])
    beams, groups = settings["beams"], told.get("groups", 1)
    most = min(beams * x.shape[1], max(512, x.shape[1]))
    told["n"] = told.get("n", min((1 + max(1, len(told.get("eos_ids", ())))) * beams, most))
    found = []
    for first in range(0, len(x), beams * groups):
        own = slice(first, first + beams * groups)
        noise = {"perturbed": scores[own] * 0.5, "keys": range(3 + own.start, 3 + own.stop)} if "seed" in told else {}
        found.append(reference.beam_step(scores[own], z[own], **told, **noise))
    names = ("scores", "beams", "tokens", "perturbed")[: 4 if "seed" in told else 3]
    return {name: np.concatenate(arrays) for name, arrays in zip(names, zip(*found, strict=True), strict=False)}


# ---- drafts ----

PARENTS = {0: [], 1: [-1], 2: [-1, -1], 3: [-1, -1, 1]}


def draft_settings(n: int) -> list[dict[str, Any]]:
    noise = {"seed": 3, "step": 2**32 - 4}
    few: list[dict[str, Any]] = [
        {"temperature": 0.3, **noise},
        {"method": "ratio", "with_q": True, "probs": True, **noise},
        {"method": "block", "with_q": True, "probs": True, **noise},
        {"method": "ratio", "temperature": 0.7, "top_p": 0.9, "top_k": 50, **noise},
    ]
    many: list[dict[str, Any]] = [
        {"temperature": 0.0, **noise},
        {"temperature": 0.5, "output_ids": [0], "repetition_penalty": 1.2, "mask": neutral(n), **noise},
        {"tree": True, "temperature": 0.3, **noise},
        {"tree": True, "method": "ratio", "with_q": True, "probs": True, **noise},
        {"tree": True, "method": "ratio", "probs": True, "thresholds": (0.9, 0.8), **noise},
        {"method": "ratio", "with_q": True, "temperature": 0.7, "min_p": 0.01, "u": True},
        {"method": "ratio", "temperature": 0.0, **noise},
        {"method": "block", "with_q": True, "temperature": 0.7, "top_k": 9, **noise},
        {"method": "block", "probs": True, "u": True},
        {"method": "typical", "temperature": 0.6, "thresholds": (0.09, 0.31), **noise},
        {"probs": True, "u": True},
    ]
    return few + many if n <= 5000 else few


class Drafts:
    """What a Case's rows are about: sequences of 0 to 3 drafts, as many rows as there are."""

    def __init__(self, x: np.ndarray, settings: dict[str, Any]) -> None:
        wide = x.astype(np.float64)
        self.target = probabilities(wide) if settings.get("probs") else x
        self.counts: list[int] = []
        while sum(self.counts) + len(self.counts) < len(x):
            left = len(x) - sum(self.counts) - len(self.counts)
            self.counts.append(min(len(self.counts), left - 1) if len(x) > 3 else left - 1)
        self.draft: list[list[int]] = []
        self.first = [int(i) for i in np.cumsum([0] + [count + 1 for count in self.counts])]
        n = x.shape[1]
        for first, count in zip(self.first, self.counts, strict=False):
            tops = [int(np.nan_to_num(wide[first + i], posinf=0).argmax()) for i in range(count)]
            self.draft.append([top if i % 3 < 2 else n // 2 for i, top in enumerate(tops)])
            if settings.get("tree") and count > 1:  # two that follow nothing, different where there are two ids
                self.draft[-1][1] = (self.draft[-1][0] + 1) % n
        self.valid = n > 1 or not settings.get("tree")
        rows = [first + i for first, count in zip(self.first, self.counts, strict=False) for i in range(count)]
        with np.errstate(all="ignore"):
            self.q = probabilities(np.roll(wide, 1, axis=1) * 0.8 + wide * 0.2)[rows]
        self.u = np.arange(len(x)) * 0.618 % 1
        self.parents = [PARENTS[count] for count in self.counts]


def probabilities(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(1, keepdims=True))
        return (e / e.sum(1, keepdims=True)).astype(np.float32)


OWN = ("with_q", "tree", "u")


def run_verify_draft(x: np.ndarray, settings: dict[str, Any], *_: Any) -> Results:
    d, told = Drafts(x, settings), {name: value for name, value in settings.items() if name not in OWN}
    if "output_ids" in told:
        told["output_ids"] = [told["output_ids"]] * len(d.draft)
    if settings.get("with_q"):
        told["q"] = d.q
    if settings.get("tree") and d.valid:
        told["parents"] = d.parents
    told |= {"u": d.u} if "u" in settings else {"keys": range(7, 7 + len(d.draft))}
    return lanewise.verify_draft(d.target, d.draft, on_invalid="mark", **told)._asdict()


def draft_reference(x: np.ndarray, settings: dict[str, Any]) -> Results:
    d, told = Drafts(x, settings), {name: value for name, value in settings.items() if name not in OWN}
    width = max(d.counts) + 1
    tokens = np.full((len(d.draft), width), -1)
    path, accepted = tokens[:, 1:].copy(), np.zeros(len(d.draft), np.int64)
    for r, draft in enumerate(d.draft):
        rows = slice(d.first[r], d.first[r] + len(draft) + 1)
        own = {"u": d.u[rows].tolist()} if "u" in settings else {"key": 7 + r}
        if settings.get("with_q"):
            own["q"] = d.q[sum(d.counts[:r]) : sum(d.counts[: r + 1])]
        if settings.get("tree") and d.valid:
            own["parents"] = d.parents[r]
        found, stand = reference.verify_draft(d.target[rows], draft, **told, **own)
        tokens[r, : len(found)], path[r, : len(stand)], accepted[r] = found, stand, len(stand)
    return {"tokens": tokens, "accepted": accepted, "path": path}
