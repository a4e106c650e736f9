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
from lanewise._measure import Cell, beside


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
    """A line an operation and vocabulary, on the best ISA: Markdown, as docs/performance.md has it."""
    lines = [
        "| operation | V | us | floor | x floor | the worst kind of row | cold | others take, in lanewise's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    best = [cell for cell in cells if cell.isa == cells[0].isa]
    for main in (cell for cell in best if cell.kind in ("realistic", "real")):
        same = [cell for cell in best if (cell.operation, cell.vocab) == (main.operation, main.vocab)]
        hot = max((c for c in same if not c.kind.endswith("cold")), key=lambda c: c.over_floor)
        cold = next((f"{c.over_floor:.2f}" for c in same if c.kind.endswith("cold")), "")
        worst = f"{hot.over_floor:.2f} {hot.kind}"
        lines.append(
            f"| {main.operation} | {main.vocab:,} | {main.us:.1f} | {main.floor} | {main.over_floor:.2f} "
            f"| {worst} | {cold} | {beside(main, ', ')} |"
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
    ticks, multiples = (32000, 64000, 128000, 256000), (0.5, 1, 2, 5, 10, 20)
    grid = {"xscale": "log", "yscale": "log", "xlim": (28000, 300000), "ylim": (0.4, 30)}
    figure, axes = pyplot.subplots(-(-len(operations) // 4), 4, figsize=(16, 12), squeeze=False, subplot_kw=grid)
    for axis, operation in zip(axes.flat, operations, strict=False):
        mine = [cell for cell in cells if cell.operation == operation]
        for kind in dict.fromkeys(cell.kind for cell in cells):
            line = np.array([(cell.vocab, cell.over_floor) for cell in mine if cell.kind == kind]).T
            style = {"color": "black", "lw": 2} if kind == "realistic" else {"lw": 0.8}
            axis.plot(*line, marker=".", label=kind, **style)
        axis.axhline(1, color="grey", lw=0.8, ls=":")
        axis.set_title(f"{operation}: times {mine[0].floor}", fontsize=9)
        axis.set_xticks(ticks, [f"{tick // 1000}k" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.set_yticks(multiples, [f"{multiple:g}" for multiple in multiples])
    for axis in list(axes.flat)[len(operations) :]:
        axis.set_axis_off()
    figure.suptitle(f"{cells[0].isa}: multiples of the floor, by vocabulary size")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
