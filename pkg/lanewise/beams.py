"""BeamSearch: what a search by beams remembers from step to step."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._types import Array, Bias, Float, Ids, Int, Mask
from .decoding import beam_step

EarlyStopping: TypeAlias = bool | Literal["never"]
I64: TypeAlias = NDArray[np.int64]


class Hypothesis(NamedTuple):
    """A finished sequence. Its length, in score and here, counts what was generated, the EOS among it."""

    tokens: I64
    score: float  # sum / length ** length_penalty; of stochastic beams the perturbed sum
    sum: float  # of the logprobs


class BeamMove(NamedTuple):
    """What a step asks of the model: row i goes on from what was row rows[i], with tokens[i]."""

    rows: I64
    tokens: I64


class BeamSearch:
    """`batch` beam searches of `beams` beams each: step(logits) until done, then finish().

    Logits have batch * beams rows; all beams of a search start from its prompt. After a step the model's row i is what
    row move.rows[i] was (a cache is reordered so), followed by move.tokens[i]. Rows of a search that is done stay where
    they are, with the token `pad`, and are not looked at.
    A hypothesis ends with one of eos_ids or at max_length tokens, and scores sum / length ** length_penalty, its EOS
    counted. The `beams` best are kept. Stopping is transformers': early_stopping=True at that many; False once the best
    open sum, at its present length, does not beat the worst kept; "never": at max_length, if length_penalty > 0.
    groups: of diverse beam search; they divide the beams, and differ by diversity_penalty (beam_step).
    seed: stochastic beams; the kept ones are `beams` different sequences, drawn without replacement.
    Raises ValueError, TypeError, InvalidLogitsError.

    >>> import numpy as np, lanewise
    >>> search = lanewise.BeamSearch(2, max_length=3, eos_ids=[0])
    >>> logits = np.log(np.float32([[0.1, 0.2, 0.7]] * 2))
    >>> while not search.done:
    ...     move = search.step(logits)
    >>> [h.tokens.tolist() for h in search.finish()[0]]
    [[2, 2, 2], [2, 2, 1]]
    """

    def __init__(
        self,
        beams: Int,
        *,
        max_length: Int,
        batch: Int = 1,
        eos_ids: Sequence[Int] = (),
        length_penalty: Float = 1.0,
        early_stopping: EarlyStopping = False,
        groups: Int = 1,
        diversity_penalty: Float = 0.0,
        pad: Int | None = None,
        repetition_penalty: Float = 1.0,
        frequency_penalty: Float = 0.0,
        presence_penalty: Float = 0.0,
        prompt_ids: Ids | None = None,
        seed: Int | None = None,
    ) -> None:
        self.beams, self.batch = at_least("beams", beams, 1), at_least("batch", batch, 0)
        self.max_length, self.groups = at_least("max_length", max_length, 1), at_least("groups", groups, 1)
        if self.beams % self.groups:
            raise ValueError(f"groups must divide beams, got {groups} groups for {beams} beams")
        if early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping must be True, False or 'never', got {early_stopping!r}")
        if not math.isfinite(length_penalty):
            raise ValueError(f"length_penalty must be a finite number, got {length_penalty}")
        if seed is not None and (early_stopping is not False or length_penalty != 1.0 or self.groups > 1):
            raise ValueError("stochastic beams have no groups, length_penalty or early_stopping")
        self.eos_ids = [operator.index(id_) for id_ in eos_ids]
        self.pad = (self.eos_ids or [0])[0] if pad is None else operator.index(pad)
        self.length_penalty, self.early_stopping = float(length_penalty), early_stopping
        self.length = 0
        self._width = self.beams // self.groups  # of a group
        count = self.batch * self.groups
        self._sums = np.full((count, self._width), -np.inf)
        self._sums[:, 0] = 0.0  # one open beam: the others would say the same
        self._perturbed = None if seed is None else self._sums.copy()
        self._tokens = np.empty((count * self._width, self.max_length), np.int64)
        self._kept: list[list[Hypothesis]] = [[] for _ in range(count)]
        self._told: dict[str, Any] = dict(
            groups=self.groups, diversity_penalty=diversity_penalty, eos_ids=self.eos_ids, seed=seed
        )
        self._penalties: dict[str, Any] = dict(
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
        )
        self._penalised = (repetition_penalty, frequency_penalty, presence_penalty) != (1.0, 0.0, 0.0)
        self._prompts = None if prompt_ids is None else prompts(prompt_ids, self.batch, self.beams)

    @property
    def scores(self) -> NDArray[np.float64]:
        """The sums of the open beams, (batch, beams); -inf for none."""
        return self._sums.reshape(self.batch, self.beams).copy()

    @property
    def tokens(self) -> I64:
        """What each row has generated, (batch * beams, length)."""
        return self._tokens[:, : self.length].copy()

    @property
    def done(self) -> bool:
        """Whether no beam is open."""
        return not bool(np.isfinite(self._sums).any())

    def step(self, logits: Array, *, bias: Bias | None = None, mask: Mask | None = None) -> BeamMove:
        """Goes on by one token, which the logits, one row a beam, are of."""
        if self.done:
            raise ValueError("the search is done: there is no beam to go on with")
        edits: dict[str, Any] = {"bias": bias, "mask": mask}
        if self._penalised:
            edits |= self._penalties | {"prompt_ids": self._prompts, "output_ids": list(self.tokens)}
        step = None if self._perturbed is None else self.length
        found = beam_step(self._sums, logits, perturbed=self._perturbed, step=step, **self._told, **edits)
        self.length += 1
        orders = found.scores if found.perturbed is None else found.perturbed
        rows = np.arange(self._sums.size).reshape(self._sums.shape)
        move = BeamMove(rows.copy(), np.full(rows.shape, self.pad))
        before, self._sums = self._sums, np.full(self._sums.shape, -np.inf)
        noisy = None if self._perturbed is None else np.full(self._sums.shape, -np.inf)
        for g in np.flatnonzero(np.isfinite(before).any(1)).tolist():
            candidates = zip(found.beams[g], found.tokens[g], found.scores[g], orders[g], strict=True)
            going_on = self._stochastic(g, *candidates) if self._perturbed is not None else self._best(g, *candidates)
            for i, (beam, token, score, order) in enumerate(going_on):
                move.rows[g, i], move.tokens[g, i] = rows[g, beam], token
                self._sums[g, i] = score
                if noisy is not None:
                    noisy[g, i] = order
        self._perturbed = noisy
        self._tokens[:, : self.length - 1] = self._tokens[move.rows.reshape(-1), : self.length - 1]
        self._tokens[:, self.length - 1] = move.tokens.reshape(-1)
        return BeamMove(move.rows.reshape(-1), move.tokens.reshape(-1))

    def finish(self, n: Int | None = None) -> list[list[Hypothesis]]:
        """The n best hypotheses of each search, best first; all that are kept without n.

        Before the search is done, open beams count as they stand.
        """
        width = self.beams if n is None else at_least("n", n, 1)
        found: list[list[Hypothesis]] = []
        for r in range(self.batch):
            every: list[Hypothesis] = []
            for g in range(r * self.groups, (r + 1) * self.groups):
                kept = list(self._kept[g])
                for i in np.flatnonzero(np.isfinite(self._sums[g])).tolist():
                    tokens = self._tokens[g * self._width + i, : self.length].copy()
                    order = None if self._perturbed is None else float(self._perturbed[g, i])
                    kept.append(self._hypothesis(tokens, float(self._sums[g, i]), order))
                every += best(kept, self._width)
            found.append(best(every, width))
        return found

    # ---- one group: candidates are (beam, token, sum, what they are ordered by), best first ----

    def _hypothesis(self, tokens: I64, total: float, order: float | None) -> Hypothesis:
        score = total / max(len(tokens), 1) ** self.length_penalty if order is None else order
        return Hypothesis(tokens, score, total)

    def _ended(self, g: int, beam: int, token: int, total: float, order: float | None) -> Hypothesis:
        history = self._tokens[g * self._width + beam, : self.length - 1]
        return self._hypothesis(np.append(history, token), float(total), order)

    def _best(self, g: int, *candidates: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """What goes on; what ends among the first `width` enters the kept ones, which never are more than that."""
        last = self.length == self.max_length
        going_on: list[tuple[Any, ...]] = []
        for rank, (beam, token, total, order) in enumerate(candidates):
            if token < 0:
                break
            if token in self.eos_ids or last:
                if rank < self._width:
                    self._kept[g] = best([*self._kept[g], self._ended(g, beam, token, total, None)], self._width)
            elif len(going_on) < self._width:
                going_on.append((beam, token, total, order))
        return [] if self._is_done(g, going_on) else going_on

    def _is_done(self, g: int, going_on: list[tuple[Any, ...]]) -> bool:
        if not going_on or len(self._kept[g]) < self._width:
            return not going_on
        if self.early_stopping is True:
            return True
        grows = self.early_stopping == "never" and self.length_penalty > 0
        reach = going_on[0][2] / (self.max_length if grows else self.length) ** self.length_penalty
        return bool(self._kept[g][-1].score >= reach)

    def _stochastic(self, g: int, *candidates: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The first `width` of the candidates and of what has ended before, which stays in the draw."""
        last = self.length == self.max_length
        going_on: list[tuple[Any, ...]] = []
        places: list[tuple[float, int, Any]] = [(-h.score, 0, h) for h in self._kept[g]]
        places += [(-c[3], 1 + i, c) for i, c in enumerate(candidates) if c[1] >= 0]
        self._kept[g] = []
        for _, new, c in sorted(places, key=lambda place: place[:2])[: self._width]:
            if not new:
                self._kept[g].append(c)
            elif c[1] in self.eos_ids or last:
                self._kept[g].append(self._ended(g, c[0], c[1], c[2], float(c[3])))
            else:
                going_on.append(c)
        return going_on


def best(hypotheses: list[Hypothesis], n: int) -> list[Hypothesis]:
    """The n best; of equals what came first."""
    return sorted(hypotheses, key=lambda h: -h.score)[:n]


def prompts(prompt_ids: Any, batch: int, beams: int) -> list[Any]:
    rows = list(prompt_ids)
    if batch == 1 and not any(np.ndim(row) for row in rows):
        rows = [rows]
    if len(rows) != batch:
        raise ValueError(f"prompt_ids must have one list a search: {batch} searches, got {len(rows)}")
    return [[id_ for id_ in row if id_ != -1] for row in rows for _ in range(beams)]


def at_least(name: str, value: Int, least: int) -> int:
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return number
