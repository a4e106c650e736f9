"""What is left of a run: a summary to read, a JSON file of everything, and a plot."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lanewise
from lanewise._measure import Cell


def machine() -> dict[str, Any]:
    import cpuinfo

    return {
        "cpu": cpuinfo.get_cpu_info().get("brand_raw", platform.processor()),
        "isas": lanewise.info()["usable"],
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "lanewise": lanewise.__version__,
        "at": time.strftime("%Y-%m-%d %H:%M"),
    }


def summary(cells: Sequence[Cell]) -> str:
    """A line an operation, vocabulary and ISA: Markdown, as docs/performance.md has it."""
    lines = [
        "| operation | V | ISA | us | floor | x floor | worst kind | cold | others, in lanewise's time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for main in (cell for cell in cells if cell.kind in ("realistic", "real")):
        same = [c for c in cells if (c.operation, c.vocab, c.isa) == (main.operation, main.vocab, main.isa)]
        hot = max((c for c in same if not c.kind.endswith("cold")), key=lambda c: c.over_floor)
        cold = next((f"{c.over_floor:.2f}" for c in same if c.kind.endswith("cold")), "")
        peers = ", ".join(f"{peer} {times:.1f}x" for peer, times in main.peers.items())
        worst = f"{hot.over_floor:.1f} {hot.kind}"
        lines.append(
            f"| {main.operation} | {main.vocab:,} | {main.isa} | {main.us:.1f} | {main.floor} | {main.over_floor:.2f} "
            f"| {worst} | {cold} | {peers} |"
        )
    return "\n".join(lines)


def save(folder: Path, name: str, content: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps({"machine": machine(), **content}, indent=1))
    return path


def plot(cells: Sequence[Cell], path: Path) -> None:
    """A panel an operation, on the best ISA: multiples of the floor over the vocabulary."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cells = [cell for cell in cells if cell.isa == cells[0].isa]
    operations = list(dict.fromkeys(cell.operation for cell in cells))
    rows = -(-len(operations) // 4)
    figure, axes = pyplot.subplots(rows, 4, figsize=(18, 3.6 * rows), sharex=True, squeeze=False)
    for axis, operation in zip(axes.flat, operations, strict=False):
        mine = [cell for cell in cells if cell.operation == operation]
        for kind in dict.fromkeys(cell.kind for cell in mine):
            sizes, times = np.array([(cell.vocab, cell.over_floor) for cell in mine if cell.kind == kind]).T
            style = {"color": "black", "lw": 2} if kind == "realistic" else {"lw": 0.8}
            axis.plot(sizes, times, marker=".", label=kind, **style)
        axis.axhline(1, color="grey", lw=0.8, ls=":")
        axis.set(title=f"{operation}: x {mine[0].floor}", xscale="log", yscale="log")
    axes.flat[0].legend(fontsize=7)
    for axis in list(axes.flat)[len(operations) :]:
        axis.set_axis_off()
    figure.suptitle(f"{cells[0].isa}: times the floor, by vocabulary size")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
