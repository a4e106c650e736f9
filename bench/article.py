"""The table of the article that lanewise grew from, with the same steps through lanewise.

The article, on the CPU's part of inference after the model, gives for 32,000 logits on an Apple M2 Max the
microseconds of a scalar and of a SIMD version of each step, in Rust. Machines differ: what can be compared is ratios,
its SIMD to its scalar version, and lanewise to what else does the step in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import lanewise
from lanewise._measure import BY_NAME, beside, measure

from . import peers
from .report import View, grid
from .table import made

STEPS = {  # the operation, and the article's microseconds
    "softmax": ("softmax", 24.5, 6.8),
    "top-k, k = 50": ("top_k, k = 50", 18.3, 4.1),
    "top-p 0.9": ("sample: T 1, top-p 0.9", 8.7, 3.2),  # its list is sorted before the clock starts; ours is not
    "temperature": ("scale", 2.1, 0.5),
    "beam-search scoring": ("not here yet", 45.6, 28.9),
    "end to end": ("sample: T 0.8, top-k 50, top-p 0.9", 99.2, 43.5),
}


class Row(NamedTuple):
    step: str
    operation: str
    scalar_us: float
    simd_us: float
    us: float | None
    floor: str
    over_floor: float | None
    peers: dict[str, float]


def measured(quick: bool) -> Iterator[Row]:
    isa, rows = lanewise.info()["usable"][0], made("realistic", 4096 if quick else 32000, 2 if quick else 16)
    for step, (name, scalar_us, simd_us) in STEPS.items():
        row = Row(step, name, scalar_us, simd_us, None, "", None, {})
        if name in BY_NAME:
            others, seconds = peers.ways(BY_NAME[name]), 0.0 if quick else 1.0
            cell = measure(BY_NAME[name], "realistic", isa, rows, others, seconds=seconds)
            row = row._replace(us=cell.us, floor=cell.floor, over_floor=cell.over_floor, peers=cell.peers)
        yield row


def cells(row: Row) -> list[str]:
    gain = f"{row.scalar_us / row.simd_us:.1f}x"
    ours = ("", "", "") if row.us is None else (f"{row.us:.1f}", f"{row.over_floor:.2f} {row.floor}", beside(row, ", "))
    return [row.step, f"{row.scalar_us:g}", f"{row.simd_us:g}", gain, row.operation, *ours]


HEADINGS = "the article's step", "scalar us", "SIMD us", "gain", "lanewise", "us", "x floor", "others, in lanewise's"
FORMAT = "{:<20} {:>9} {:>8} {:>6}   {:<35} {:>7}  {:>8}   {}".format


def markdown(rows: Sequence[Row]) -> str:
    return grid(HEADINGS, [cells(row) for row in rows])


VIEW = View(
    "The article's table",
    "the article's table",
    Row,
    measured,
    FORMAT(*HEADINGS),
    lambda row: FORMAT(*cells(row)),
    markdown,
)
