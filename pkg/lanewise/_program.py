"""Steps as data: what `chain` does to a row between its edits and the draw, as the lines of a Program, checked."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

INFINITY = math.inf
LARGEST = float(np.finfo(np.float64).max)


class Number(NamedTuple):
    """A parameter of a step: between low and high, and whole, or one of two words."""

    name: str
    low: float
    high: float
    default: float | None = None
    whole: bool = False


KEEP = Number("min_keep", 0, 2**53, 1, whole=True)
TIES = Number("ties", 0, 1, 0)  # "lowest" or "all"
WORDS = ("lowest", "all")

# In the order of csrc/ops.h, from 1 on.
STEPS: dict[str, tuple[Number, ...]] = {
    "temperature": (Number("temperature", 0, LARGEST),),
    "top_k": (Number("k", -(2**53), 2**53, whole=True), TIES),
    "top_p": (Number("p", -INFINITY, INFINITY), KEEP, TIES),
    "min_p": (Number("min_p", 0, 1), KEEP),
    "dynamic_temperature": (
        Number("temperature", 0, 1e30),
        Number("delta", -1e30, 1e30),
        Number("exponent", 0, 1e30, 1),
    ),
    "quadratic": (Number("factor", 0, 1e30), Number("curve", 1, 3, 1)),
    "typical": (Number("p", -INFINITY, INFINITY), KEEP),
    "epsilon": (Number("epsilon", 0, 1), KEEP),
    "eta": (Number("epsilon", 0, 1), KEEP),
    "top_h": (Number("h", 0, 1),),
    "top_a": (Number("a", 0, 1),),
    "tail_free": (Number("z", 0, INFINITY), KEEP),
    "top_n_sigma": (Number("n", -INFINITY, LARGEST), Number("ddof", 0, 1, 0, whole=True)),
    "xtc": (Number("probability", 0, 1), Number("threshold", 0, 1), KEEP),
    "renormalise": (),
    "mirostat": (Number("tau", -1e30, 1e30), Number("eta", -1e30, 1e30), Number("m", 1, 2**20, 100, whole=True)),
    "mirostat_v2": (Number("tau", -1e30, 1e30), Number("eta", -1e30, 1e30)),
    "adaptive_p": (Number("target", -INFINITY, 1), Number("decay", 0, 1, 0.9)),
}
CODES = {name: code for code, name in enumerate(STEPS, 1)}
LAST = ("mirostat", "mirostat_v2", "adaptive_p")  # they learn from the draw, so nothing may come between
WIDTH = 4  # float64 a compiled step: its code, then its numbers


def _number(value: Any, of: Number, where: str) -> float:
    if of is TIES:
        if value not in WORDS:
            raise ValueError(f"{where}: ties must be 'lowest' or 'all', got {value!r}")
        return float(WORDS.index(value))
    try:
        v = float(operator.index(value) if of.whole else value + 0.0)  # float() alone would read a str
    except (TypeError, ValueError):
        raise TypeError(
            f"{where}: {of.name} must be {'an integer' if of.whole else 'a number'}, got {value!r}"
        ) from None
    except OverflowError:
        v = INFINITY if value > 0 else -INFINITY
    if not of.low <= v <= of.high:
        ends = f"[{of.low:g}, {of.high:g}]"
        raise ValueError(f"{where}: {of.name} must be in {ends}, got {value}")
    return v


def _compiled(step: Any, where: str) -> list[float]:
    if isinstance(step, str):
        step = (step,)
    if not isinstance(step, (tuple, list)) or not step or not isinstance(step[0], str):
        raise TypeError(f"{where} must be a name and its numbers, such as ('top_k', 40), got {step!r}")
    name, *given = step
    if name not in STEPS:
        raise ValueError(f"{where}: no step is called {name!r}; there are {', '.join(STEPS)}")
    numbers, where = STEPS[name], f"{where} ({name!r})"
    named = dict(given.pop()) if given and isinstance(given[-1], Mapping) else {}
    if len(given) > len(numbers):
        raise ValueError(f"{where} takes {len(numbers)} numbers, got {len(given)}")
    values = dict(zip((n.name for n in numbers), given, strict=False))
    if twice := values.keys() & named.keys():
        raise ValueError(f"{where}: {min(twice)} is given twice")
    if strange := named.keys() - {n.name for n in numbers}:
        raise ValueError(f"{where} has no {min(strange)!r}")
    values.update(named)
    made = [float(CODES[name])]
    for number in numbers:
        if number.name in values:
            made.append(_number(values[number.name], number, where))
        elif number.default is None:
            raise ValueError(f"{where} needs {number.name}")
        else:
            made.append(number.default)
    return made + [0.0] * (WIDTH - len(made))


def compiled(steps: Sequence[Any]) -> tuple[list[list[float]], list[float]]:
    """Each step's code and numbers, WIDTH of them, and the state that a sequence begins with. ValueError, TypeError."""
    lines = [_compiled(step, f"step {i}") for i, step in enumerate(steps)]
    names = [list(STEPS)[int(line[0]) - 1] for line in lines]
    for i, name in enumerate(names[:-1]):
        if name in LAST:
            raise ValueError(f"step {i} ({name!r}) draws, so it must be the last of the {len(names)}")
    return lines, _first_state(names[-1] if names else "", lines[-1] if lines else [])


def _first_state(name: str, numbers: Sequence[float]) -> list[float]:
    """mirostat's mu; adaptive-p's sum of probabilities drawn and of what they count for, decaying."""
    if name in ("mirostat", "mirostat_v2"):
        return [2.0 * numbers[1], 0.0]
    if name == "adaptive_p":
        left = 1.0 - min(numbers[2], 0.99)
        return [numbers[1] / left, 1.0 / left]
    return [0.0, 0.0]
