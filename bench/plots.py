"""The plots of the views, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def figure(*args: Any, **kwargs: Any) -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot.subplots(*args, squeeze=False, **kwargs)


def save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def over_floors(cells: Sequence[Any], path: Path) -> None:
    """A panel an operation, on the best ISA: multiples of the floor over the vocabulary."""
    cells = [cell for cell in cells if cell.isa == cells[0].isa]
    operations = list(dict.fromkeys(cell.operation for cell in cells))
    ticks, multiples = (32000, 64000, 128000, 256000), (0.2, 0.5, 1, 2, 5, 10, 20)
    grid = {"xscale": "log", "yscale": "log", "xlim": (28000, 300000), "ylim": (0.15, 30)}
    plot, axes = figure(-(-len(operations) // 4), 4, figsize=(16, 12), subplot_kw=grid)
    for axis, operation in zip(axes.flat, operations, strict=False):
        mine = [cell for cell in cells if cell.operation == operation]
        for kind in dict.fromkeys(cell.kind for cell in cells):
            line = np.array([(cell.vocab, cell.over_floor) for cell in mine if cell.kind == kind]).T
            style = {"color": "black", "lw": 2} if kind == "realistic" else {"lw": 0.8}
            axis.plot(*line, marker=".", label=kind, ls="--" if "," in kind else "-", **style)
        axis.axhline(1, color="grey", lw=0.8, ls=":")
        axis.set_title(f"{operation}: times {mine[0].floor}", fontsize=9)
        axis.set_xticks(ticks, [f"{tick // 1000}k" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.set_yticks(multiples, [f"{multiple:g}" for multiple in multiples])
    for axis in list(axes.flat)[len(operations) :]:
        axis.set_axis_off()
    plot.suptitle(f"{cells[0].isa}: multiples of the floor, by vocabulary size")
    plot.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower right")
    save(plot, path)


def bars(axis: Any, microseconds: dict[str, float], title: str) -> None:
    """The first is lanewise's or what it is held to; the longest at the bottom."""
    names = sorted(microseconds, key=microseconds.__getitem__, reverse=True)
    colors = ["tab:blue" if name.startswith("lanewise") else "lightgrey" for name in names]
    drawn = axis.barh(names, [microseconds[name] for name in names], color=colors)
    axis.bar_label(
        drawn, [f"{us:,.0f}" if us >= 100 else f"{us:.3g}" for us in drawn.datavalues], padding=3, fontsize=8
    )
    axis.set_xscale("log")
    axis.set_xlim(min(microseconds.values()) / 2, max(microseconds.values()) * 4)
    axis.set_title(title, fontsize=9)


def beside(cells: Sequence[Any], path: Path) -> None:
    """A panel an operation, at the largest vocabulary: microseconds of each library."""
    cells = [cell for cell in cells if cell.vocab == cells[-1].vocab]
    plot, axes = figure(-(-len(cells) // 2), 2, figsize=(13, 2.2 * -(-len(cells) // 2)))
    for axis, cell in zip(axes.flat, cells, strict=False):
        others = {name: times * cell.us for name, times in cell.peers.items()}
        bars(axis, {f"reading ({cell.floor})": cell.floor_us, "lanewise": cell.us, **others}, cell.operation)
    for axis in list(axes.flat)[len(cells) :]:
        axis.set_axis_off()
    plot.suptitle(f"{cells[0].isa}, V = {cells[0].vocab:,}, one thread: microseconds a token")
    save(plot, path)


def batch(rows: Sequence[Any], path: Path) -> None:
    plot, axes = figure(1, 1, figsize=(10, 4.5))
    title = f"{rows[0].rows} rows x {rows[0].vocab:,}, cold, full pipeline: milliseconds"
    bars(axes[0, 0], {row.what: row.ms for row in rows}, title)
    save(plot, path)
