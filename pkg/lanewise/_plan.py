"""A list of steps, sorted out: runs of edits, programs for the kernel, and steps that want the whole row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import steps as s
from ._program import LAST
from .chain import Program

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]

OVER = {"both": 0, "output": 1, "prompt": 2}  # as in csrc/history.h, like the kinds below
(
    ADD,
    FORBID,
    FORBID_TILL,
    FORBID_AT,
    SEQUENCES,
    PENALTIES,
    FADING_PENALTIES,
    ENCODER_PENALTY,
    NGRAM,
    ENCODER_NGRAM,
    DRY,
    LENGTH_DECAY,
    FORCE,
) = range(13)
REPETITION_LAST, SUMMED, AWAY = 1, 2, 4
LOG_LARGEST = 88.7228391  # of float32: DRY's exponents go no further, as in llama.cpp


class Edit(NamedTuple):
    """An edit_step of csrc/history.h."""

    kind: int
    over: int = 0
    counts_over: int = 0
    last_n: int = -1
    n: int = 0
    flags: int = 0
    limit: int = -1
    numbers: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ids: tuple[int, ...] | None = None
    values: tuple[float, ...] = ()
    offsets: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.offsets) - 1 if self.offsets else len(self.ids or ())


def _sequences(
    kind: int, over: str, sequences: Iterable[tuple[int, ...]], values: Iterable[float], **more: Any
) -> Edit:
    found = list(sequences)
    offsets = (0, *itertools.accumulate(map(len, found)))
    ids = tuple(itertools.chain.from_iterable(found))
    return Edit(kind, OVER[over], ids=ids, values=tuple(values), offsets=offsets, **more)


def _window(last_n: int | None) -> int:
    return -1 if last_n is None else last_n


def _penalties(step: s.Penalties) -> Edit:
    flags = step.repetition_last * REPETITION_LAST + step.summed * SUMMED + step.away * AWAY
    return Edit(
        FADING_PENALTIES if step.decay else PENALTIES,
        OVER[step.over],
        OVER[step.counts_over],
        _window(step.last_n),
        step.decay,
        flags,
        numbers=(step.repetition, step.frequency, step.presence),
    )


def _dry(step: s.DRY) -> Edit:
    base = float(np.float32(step.base))
    most = float(int(LOG_LARGEST / math.log(base))) if base > 1.000001 else 0.0
    return _sequences(
        DRY,
        step.over,
        step.breakers,
        (),
        last_n=_window(step.last_n),
        n=step.allowed_length,
        limit=_window(step.max_match),
        numbers=(float(np.float32(step.multiplier)), base, most),
    )


def _bad_words(step: s.BadWords) -> Edit:
    words = [word for word in step.words if not (len(word) == 1 and word[0] in step.eos_ids)]
    return _sequences(SEQUENCES, step.over, words, [-math.inf] * len(words))


def _sequence_bias(step: s.SequenceBias) -> Edit:
    """Single ids first, then by length, which is the order in which transformers adds them."""
    by_length = sorted(dict(step.bias).items(), key=lambda item: len(item[0]) > 1)
    return _sequences(SEQUENCES, step.over, (ids for ids, _ in by_length), (value for _, value in by_length))


def _forced(over: str, at: Iterable[tuple[int, tuple[int, ...]]]) -> Edit:
    found = list(at)
    return _sequences(FORCE, over, (ids for _, ids in found), (float(length) for length, _ in found))


_EDITS: dict[type, Callable[[Any], Edit]] = {
    s.LogitBias: lambda t: Edit(ADD, ids=tuple(i for i, _ in t.bias), values=tuple(v for _, v in t.bias)),
    s.SequenceBias: _sequence_bias,
    s.BadWords: _bad_words,
    s.Suppress: lambda t: Edit(FORBID, ids=t.ids),
    s.SuppressAtBegin: lambda t: Edit(FORBID_AT, OVER[t.over], n=t.at, ids=t.ids),
    s.MinTokens: lambda t: Edit(FORBID_TILL, OVER[t.over], n=t.n, ids=t.ids),
    s.Penalties: _penalties,
    s.EncoderRepetition: lambda t: Edit(ENCODER_PENALTY, numbers=(1.0 / t.penalty, 0.0, 0.0), ids=t.ids),
    s.NoRepeatNgram: lambda t: Edit(NGRAM, OVER[t.over], n=t.n),
    s.EncoderNoRepeatNgram: lambda t: Edit(ENCODER_NGRAM, n=t.n, ids=t.ids),
    s.DRY: _dry,
    s.LengthDecay: lambda t: Edit(LENGTH_DECAY, OVER[t.over], n=t.start, numbers=(t.factor, 0.0, 0.0), ids=t.ids),
    s.ForcedIds: lambda t: _forced(t.over, t.at),
    s.ForcedBOS: lambda t: _forced("both", [(1, (t.id,))]),
    s.ForcedEOS: lambda t: _forced(t.over, [(t.max_length - 1, t.ids)]),
}

_PROGRAM: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    s.Temperature: lambda t: ("temperature", t.value),
    s.DynamicTemperature: lambda t: (
        "dynamic_temperature",
        (t.low + t.high) / 2,
        (t.high - t.low) / 2,
        t.exponent,
    ),
    s.Smoothing: lambda t: ("quadratic", t.factor, t.curve),
    s.TopK: lambda t: ("top_k", max(t.k, t.min_keep) if t.k > 0 else 0, t.ties),
    s.TopP: lambda t: ("top_p", t.p, t.min_keep, t.ties),
    s.MinP: lambda t: ("min_p", t.p, t.min_keep),
    s.Typical: lambda t: ("typical", t.p, t.min_keep),
    s.Epsilon: lambda t: ("epsilon", t.cutoff, t.min_keep),
    s.Eta: lambda t: ("eta", t.cutoff, t.min_keep),
    s.TopH: lambda t: ("top_h", t.h),
    s.TopA: lambda t: ("top_a", t.a),
    s.TailFree: lambda t: ("tail_free", t.z, t.min_keep),
    s.TopNSigma: lambda t: ("top_n_sigma", t.n, t.ddof),
    s.XTC: lambda t: ("xtc", t.probability, min(t.threshold, 1.0), t.min_keep),
    s.Mirostat: lambda t: ("mirostat", t.tau, t.eta, t.m),
    s.MirostatV2: lambda t: ("mirostat_v2", t.tau, t.eta),
    s.AdaptiveP: lambda t: ("adaptive_p", t.target, t.decay),
}
_ROWS = (s.Guidance, s.Contrastive, s.Infill, s.Watermark, s.Renormalise, s.Custom)


class Group(NamedTuple):
    """Steps that act together: edits, the lines of a program, or one step for the whole row."""

    kind: str
    steps: tuple[Any, ...]


def checked(steps: Any) -> tuple[s.Step, ...]:
    found = tuple(steps) if isinstance(steps, Iterable) and not isinstance(steps, (str, bytes)) else None
    if found is None:
        raise TypeError(f"steps must be a list of steps, got {steps!r}")
    for i, step in enumerate(found):
        if type(step) not in _EDITS and type(step) not in _PROGRAM and not isinstance(step, _ROWS):
            raise TypeError(f"steps[{i}] must be one of lanewise.steps, got {step!r}")
    return found


def _changes_nothing(found: tuple[s.Step, ...], i: int) -> bool:
    """Log-softmax, if no later step looks at more than differences of logits, or if a program has just given it."""
    later = found[i + 1 :]
    return isinstance(found[i], s.Renormalise) and (
        all(step._kind == "program" for step in later) or any(step._kind == "program" for step in found[:i])
    )


def groups(found: tuple[s.Step, ...]) -> list[Group]:
    """In the order of the list."""
    needed = [step for i, step in enumerate(found) if not _changes_nothing(found, i)]
    made = []
    for kind, some in itertools.groupby(needed, key=lambda step: step._kind):
        if kind == "row":
            made += [Group("row", (step,)) for step in some]
        elif kind == "edit":
            made.append(Group("edit", tuple(_EDITS[type(step)](step) for step in some)))
        else:
            made.append(Group("program", tuple(_PROGRAM[type(step)](step) for step in some)))
    for i, group in enumerate(made[:-1]):
        drawing = [line[0] for line in group.steps if line[0] in LAST] if group.kind == "program" else []
        if drawing:
            raise ValueError(f"{drawing[0]} draws, so its step must be the last; {made[i + 1].kind} steps follow it")
    return made


def program_of(group: Group) -> Program:
    return Program(group.steps)


# ---- edits that the kernel does itself ----

BANS = (FORBID, FORBID_TILL, FORBID_AT, NGRAM, ENCODER_NGRAM)
ADDERS = (ADD, SEQUENCES, DRY)


class Split(NamedTuple):
    """Edits as the kernel takes them: what is added, penalties, what is added then."""

    before: tuple[Edit, ...]
    penalties: Edit | None
    behind: tuple[Edit, ...]


def _only_adds(edits: tuple[Edit, ...]) -> bool:
    """Whether nothing depends on a logit's value, and what is added to it is one number."""
    adders = [e for e in edits if e.kind in ADDERS and not (e.values and max(e.values) == -math.inf)]
    once = all(e.kind != ADD or len(set(e.ids or ())) == e.size for e in adders)
    return all(e.kind in BANS + ADDERS for e in edits) and len(adders) <= 1 and once


def _plain_penalties(e: Edit) -> bool:
    """Repetition, then frequency and presence, over the output and all of the text, or over one part of it."""
    repeats, counts = e.numbers[0] != 1, e.numbers[1:] != (0, 0)
    summed = e.flags & SUMMED and 0 not in e.numbers[1:]
    whole = e.over == OVER["both"] and e.counts_over == OVER["output"] and e.last_n < 0
    return not (e.flags & ~SUMMED or summed) and (e.over == e.counts_over or whole or not (repeats and counts))


def split(edits: tuple[Edit, ...]) -> Split | None:
    at = [i for i, e in enumerate(edits) if e.kind == PENALTIES]
    if len(at) > 1 or (at and not _plain_penalties(edits[at[0]])):
        return None
    before, behind = (edits[: at[0]], edits[at[0] + 1 :]) if at else ((), edits)
    if not (_only_adds(before) and _only_adds(behind)):
        return None
    return Split(before, edits[at[0]] if at else None, behind)


# ---- saved ----


def packed(found: tuple[s.Step, ...]) -> list[tuple[str, dict[str, Any]]]:
    return [(type(step).__name__, {field.name: getattr(step, field.name) for field in fields(step)}) for step in found]


def unpacked(saved: Any) -> tuple[s.Step, ...]:
    found = []
    for name, told in saved:
        kind = getattr(s, name, None)
        if not isinstance(kind, type) or not issubclass(kind, s.Step):
            raise ValueError(f"state: no step is called {name!r}")
        found.append(kind(**told))
    return tuple(found)


def restored(kind: Any, state: dict[str, Any]) -> Any:
    """What a Sampler's pickle calls."""
    sampler = kind(unpacked(state["steps"]), seed=state["seed"])
    sampler.load_state_dict(state)
    return sampler
