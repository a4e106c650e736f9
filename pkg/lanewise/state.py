"""SampleState: the token of a row that comes in pieces."""

from __future__ import annotations

import math
import operator
import threading
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._arrays import as_array
from ._types import Array, Float, Int, Preset, SampleTies, Ties
from .drawing import draw_tile
from .errors import InvalidLogitsError
from .params import SamplingParams
from .sampling import PARAMETERS, PRESETS, sample, top_k
from .values import scale

F32: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = slice | NDArray[np.int64]
MAX_VOCAB = 1 << 20
FRACTIONS = ("temperature", "top_p", "min_p")


class SampleState:
    """A row in pieces, as they leave a matrix product or lie on several machines: the token sample gives for the whole.

    The numbers are those of sample; `key` is its keys. feed(tile, first_id) takes the logits of the ids from first_id
    on, in any order, each id once; bias, penalties and masks are applied to a tile before. merge(other) takes what
    another state of the same numbers was fed; states can be pickled. finish() is the token, once all ids are there.

    Kept meanwhile: the best score, if nothing truncates; with top-k the k largest logits; with min-p those that can
    still reach it; with a top-p that no top-k precedes all logits, as float32.
    One thread at a time: a second one gets a RuntimeError. Raises ValueError, TypeError, InvalidLogitsError.

    >>> import numpy as np, lanewise
    >>> row = np.linspace(-3, 3, 1000, dtype=np.float32)
    >>> state = lanewise.SampleState(1000, top_k=50, seed=1, step=0)
    >>> state.feed(row[600:], 600)
    >>> state.feed(row[:600], 0)
    >>> state.finish() == lanewise.sample(row, top_k=50, seed=1, step=0)
    True
    """

    def __init__(
        self,
        vocab_size: Int,
        params: SamplingParams | None = None,
        *,
        temperature: Float = 1.0,
        top_k: Int = 0,
        top_p: Float = 1.0,
        min_p: Float = 0.0,
        min_keep: Int = 1,
        seed: Int,
        step: Int,
        key: Int = 0,
        ties: SampleTies = "lowest",
        preset: Preset = "transformers",
    ) -> None:
        self.vocab_size = int(one_number("vocab_size", vocab_size))
        if not 1 <= self.vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size must be in [1, {MAX_VOCAB}], got {vocab_size}")
        given: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, min_keep=min_keep)
        noise: dict[str, Any] = dict(seed=seed, step=step, keys=key)
        sample(
            np.zeros(1, np.float32), params, **given, **noise, ties=ties, preset=preset
        )  # objects to whatever it would object to later
        if params is not None:
            given = {name: getattr(params, name) for name in given}
            default = SamplingParams()
            if any(getattr(params, name) != getattr(default, name) for name in set(PARAMETERS) - set(given)):
                raise ValueError("params has penalties: apply them to the tiles before these are fed")
        numbers = {name: one_number(name, value) for name, value in {**given, **noise}.items()}
        steps = tuple(PRESETS[preset] if isinstance(preset, str) else preset)
        self._settings = {**numbers, "ties": ties, "preset": steps}
        self._seen: list[tuple[int, int]] = []  # first id and end of what was fed, ascending, with gaps between
        self._kept: Any = kept_for(self.vocab_size, self._settings)
        self._lock = threading.Lock()

    def feed(self, tile: Array, first_id: Int) -> None:
        """Takes the logits of the ids first_id .. first_id + len(tile) - 1."""
        with self._alone():
            logits, first = as_array(tile, "tile"), int(one_number("first_id", first_id))
            if logits.ndim != 1:
                raise ValueError(f"tile must have one axis, got shape {logits.shape}")
            if not 0 <= first <= self.vocab_size - len(logits):
                raise ValueError(f"ids must be in 0..{self.vocab_size - 1}, got {first}..{first + len(logits) - 1}")
            seen = joined(self._seen, [(first, first + len(logits))])
            self._kept = self._kept.with_tile(logits, first)
            self._seen = seen

    def merge(self, other: SampleState) -> None:
        """Takes what `other`, which stays as it is, was fed."""
        if not isinstance(other, SampleState):
            raise TypeError(f"other must be a SampleState, got {type(other).__name__}")
        if other is self:
            raise ValueError("a state cannot be merged with itself: it would be fed its ids again")
        with self._alone(), other._alone():
            mine, its = ({"vocab_size": s.vocab_size, **s._settings} for s in (self, other))
            for name in mine:
                if mine[name] != its[name]:
                    raise ValueError(f"states must be of one draw, but {name} is {mine[name]} here, {its[name]} there")
            self._seen = joined(self._seen, other._seen)
            self._kept = self._kept.with_kept(other._kept)

    def finish(self) -> int:
        """The token, as sample gives it for the row in one piece."""
        with self._alone():
            start = self._seen[0][1] if self._seen and self._seen[0][0] == 0 else 0
            if start < self.vocab_size:
                end = next((first for first, _ in self._seen if first > start), self.vocab_size)
                raise ValueError(f"the ids {start}..{end - 1} have not been fed")
            token: int = self._kept.token()
            return token

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this SampleState is in use by a call that is not over; give each thread its own")
        try:
            yield
        finally:
            self._lock.release()

    def __getstate__(self) -> dict[str, Any]:
        with self._alone():
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()


def one_number(name: str, value: Any) -> float | int:
    try:
        return float(value) if name in FRACTIONS else operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be one number, got {value!r}") from None


def joined(seen: list[tuple[int, int]], more: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Intervals of both lists, ascending, those that touch made one. Overlapping ones are ValueError."""
    result = list(seen)
    for first, end in more:
        at = bisect(result, (first, end))
        left, right = result[at - 1] if at else (0, 0), result[at] if at < len(result) else (end, end)
        if left[1] > first or right[0] < end:
            double = max(first, left[0]) if left[1] > first else right[0]
            raise ValueError(f"id {double} was fed before; each id is fed once")
        start, stop = at, at
        if at and left[1] == first:
            start, first = at - 1, left[0]
        if at < len(result) and right[0] == end:
            stop, end = at + 1, right[1]
        result[start:stop] = [(first, end)]
    return result


# ---- what is kept: immutable, so that a call that fails changes nothing ----


class BestScore:
    """For a draw that nothing truncates."""

    def __init__(self, settings: dict[str, Any], best: tuple[float, float, int] = (-math.inf, 0.0, 1)) -> None:
        self.settings, self.best = settings, best  # hi, lo, minus the id: the greatest wins

    def with_tile(self, logits: NDArray[Any], first: int) -> BestScore:
        s = self.settings
        noise = {"seed": s["seed"], "step": s["step"], "key": s["keys"]}
        hi, lo, id_ = draw_tile(logits, first, temperature=s["temperature"], **noise)
        return self.with_kept(BestScore(s, (hi, lo, -id_)))

    def with_kept(self, other: BestScore) -> BestScore:
        either = [self.best, other.best]
        invalid = [best for best in either if math.isnan(best[0])]
        return BestScore(self.settings, invalid[0] if invalid else max(either))

    def token(self) -> int:
        if not self.best[0] > -math.inf:
            raise InvalidLogitsError([0], -1)
        return -self.best[2]


class Logits:
    """All of them, and their ids: sample will do."""

    def __init__(self, vocab_size: int, settings: dict[str, Any], *pieces: tuple[Ids, F32]) -> None:
        self.vocab_size, self.settings, self.pieces = vocab_size, settings, pieces

    def with_tile(self, logits: NDArray[Any], first: int) -> Logits:
        z = scale(logits, 1.0)  # as float32, and a copy
        piece = self.needed(slice(first, first + len(z)), z)
        return self.with_kept(type(self)(self.vocab_size, self.settings, piece))

    def with_kept(self, other: Logits) -> Logits:
        return type(self)(self.vocab_size, self.settings, *self.pieces, *other.pieces)

    def needed(self, ids: Ids, z: F32) -> tuple[Ids, F32]:
        return ids, z

    def token(self) -> int:
        row = np.full(self.vocab_size, -np.inf, np.float32)
        for ids, z in self.pieces:
            row[ids] = z
        return int(sample(row, **self.settings))


class SomeLogits(Logits, ABC):
    """Those that may be left by truncations which do not look at the others: sample will do, the rest at -inf."""

    def with_kept(self, other: Logits) -> Logits:
        ids, z = (np.concatenate(parts) for parts in zip(*self.pieces, *other.pieces, strict=True))
        return type(self)(self.vocab_size, self.settings, self.needed(ids, z))

    def needed(self, ids: Ids, z: F32) -> tuple[Ids, F32]:
        ids = np.arange(ids.start, ids.stop) if isinstance(ids, slice) else ids
        invalid = np.flatnonzero(~(z < np.inf))
        left = invalid[:1] if len(invalid) else self.left(ids, z)
        return ids[left], z[left]

    @abstractmethod
    def left(self, ids: NDArray[np.int64], z: F32) -> NDArray[np.int64]:
        """Where in z what is left stands."""


class LargestLogits(SomeLogits):
    """What top-k leaves."""

    def left(self, ids: NDArray[np.int64], z: F32) -> NDArray[np.int64]:
        k, by_id = max(self.settings["top_k"], self.settings["min_keep"]), np.argsort(ids)
        ties: Ties = "lowest" if self.settings["ties"] == "lowest" else "all"
        return by_id if k >= len(ids) else by_id[top_k(z[by_id], k, ties=ties)[1]]


class LikelyLogits(SomeLogits):
    """What min-p may leave: the bound is that of sample but for its rounding, and a little lower."""

    def left(self, ids: NDArray[np.int64], z: F32) -> NDArray[np.int64]:
        s = self.settings
        highest = float(z.max(initial=-np.inf))
        below = min(max(s["temperature"], 1.0), 1e30) * math.log(max(s["min_p"], 1e-308))
        bound = highest + below - 1e-6 * (abs(highest) - below)
        if s["min_keep"] > 1 and len(z):
            bound = min(bound, float(top_k(z, min(s["min_keep"], len(z)))[0][-1]))
        return np.flatnonzero((z >= np.float64(bound)) & (z > -np.inf))


def kept_for(vocab_size: int, settings: dict[str, Any]) -> BestScore | Logits:
    steps = settings["preset"] if settings["temperature"] >= 1e-30 else ()
    nothing = np.empty(0, np.int64), np.empty(0, np.float32)
    for step in steps:
        if step == "top_k" and settings["top_k"] > 0 and max(settings["top_k"], settings["min_keep"]) < vocab_size:
            return LargestLogits(vocab_size, settings, nothing)
        if step == "top_p" and settings["top_p"] < 1:  # it needs the mass of all
            return Logits(vocab_size, settings)
    likely = "min_p" in steps and settings["min_p"] > 0
    return LikelyLogits(vocab_size, settings, nothing) if likely else BestScore(settings)
