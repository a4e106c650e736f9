"""`python -m lanewise demo`: what a real model would say next in eight places, and what is drawn from it."""

from __future__ import annotations

import sys
import unicodedata
from functools import partial
from typing import Any

import numpy as np

import lanewise

from . import _numpy_way
from ._measure import SETTINGS, always, compare, times
from ._rows import RealRow, real_rows

CANDIDATES = 5
SEEDS = 1, 2, 3


def columns(text: str) -> int:
    """How wide a terminal shows it: East Asian characters take two columns, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str, width: int) -> str:
    """In quotes, shortened and padded to `width` columns."""
    text = printable(text).replace('"', '\\"')
    if columns(text) > width - 2:
        while columns(text) > width - 5:
            text = text[:-1]
        text += "..."
    return f'"{text}"' + " " * (width - 2 - columns(text))


def ending(text: str, width: int) -> str:
    """The last `width` columns."""
    text = printable(text)
    if columns(text) <= width:
        return text
    while columns(text) > width - 3:
        text = text[1:]
    return "..." + text


def show_candidates(row: RealRow) -> None:
    probabilities = lanewise.softmax(row.logits)
    _, ids = lanewise.top_k(row.logits, CANDIDATES)
    block = "\u2588" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    for token in ids.tolist():
        p = float(probabilities[token])
        print(f"  {quoted(row.text(token), 14)} {p:6.1%}  {block * round(60 * p)}".rstrip())
    _, nucleus = lanewise.sample(row.logits, top_p=0.9, seed=0, step=0, return_support=True)
    print(f"  90 % of the mass is on {nucleus.ids.size:,} of {row.logits.size:,} tokens\n")


def show_draws(row: RealRow) -> None:
    logits = row.logits.astype(np.float32)  # what a model on a CPU gives
    print(f"  {'setting':<30} {'drawn with seeds ' + ', '.join(map(str, SEEDS)):<38}{'lanewise':>9}{'NumPy':>10}")
    for name, setting in SETTINGS.items():
        prompt: dict[str, Any] = {"prompt_ids": row.prompt_ids} if "repetition_penalty" in setting else {}
        draw = partial(lanewise.sample, **setting, **prompt)
        drawn = [int(draw(logits, seed=seed, step=0)) for seed in SEEDS]
        numpy_way = partial(_numpy_way.sample, rng=np.random.default_rng(0), **setting, **prompt)
        ways = {"lanewise": always(partial(draw, seed=1, step=0)), "NumPy": always(numpy_way)}
        took = compare((), ways, [logits], seconds=0.02)
        print(
            f"  {name:<30} {' '.join(quoted(row.text(token), 12) for token in drawn)}"
            f"{took.microseconds('lanewise'):7.1f} us{took.microseconds('NumPy'):7.0f} us"
            f"{times(took.ratio('NumPy', to='lanewise')):>7}"
        )


def show_isas(rows: list[RealRow]) -> bool:
    """All rows as one batch, drawn on every ISA this machine runs."""
    logits = np.stack([row.logits for row in rows])
    print(f"The same {len(rows)} draws on every ISA that runs here (T 1, top-p 0.9, seed 1), as token ids")
    tokens = {}
    for isa in lanewise.info()["usable"]:
        with lanewise.using(isa):
            tokens[isa] = np.array(lanewise.sample(logits, top_p=0.9, seed=1, step=0)).tolist()
        print(f"  {isa:<8}" + "".join(f"{token:>8}" for token in tokens[isa]))
    equal = len({tuple(drawn) for drawn in tokens.values()}) == 1
    print(f"  {'equal' if equal else 'DIFFERENT: this is a fault, please report it'} on {', '.join(tokens)}")
    return equal


def main() -> int:
    rows = real_rows()
    isa = lanewise.info()["operations"]["sample"]["isa"]
    print(f"lanewise {lanewise.__version__}, sampling on {isa} from real logits of SmolLM2-135M-Instruct\n")
    for row in rows:
        print(ending(row.prompt, 98))
        show_candidates(row)
        show_draws(row)
        print()
    return 0 if show_isas(rows) else 1
