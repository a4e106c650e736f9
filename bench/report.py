"""A view is a table that is measured: printed line by line, saved as JSON, plotted, and rendered as Markdown."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import lanewise

from . import peers


class View(NamedTuple):
    about: str
    row: Callable[..., Any]  # the NamedTuple of a row
    measured: Callable[[bool], Iterator[Any]]  # of `quick`
    heading: str
    line: Callable[[Any], str]
    markdown: Callable[[Sequence[Any]], str]
    plot: Callable[[Sequence[Any], Path], None] | None = None
    notes: Callable[[], str] = peers.absent


def run(name: str, view: View, folder: Path, quick: bool) -> None:
    print(view.heading)
    rows = []
    for row in view.measured(quick):
        rows.append(row)
        print(view.line(row), flush=True)
    notes = view.notes()
    if notes:
        print(f"\n{notes}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    content = {"machine": machine(), "notes": notes, "rows": [row._asdict() for row in rows]}
    path.write_text(json.dumps(content, indent=1))
    print(f"\n{path}")
    if view.plot and find_spec("matplotlib"):
        view.plot(rows, path.with_suffix(".png"))
        print(path.with_suffix(".png"))


def machine() -> dict[str, Any]:
    import cpuinfo

    found = {
        "cpu": cpuinfo.get_cpu_info().get("brand_raw", platform.processor()),
        "isas": lanewise.info()["usable"],
        "python": sys.version.split()[0],
        "lanewise": lanewise.__version__,
        "at": time.strftime("%Y-%m-%d %H:%M"),
    }
    for package in ("numpy", "scipy", "torch", "transformers", "onnxruntime", "onnxruntime-genai", "llama-cpp-python"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def markdown(name: str, view: View, folder: Path) -> str:
    """The latest result of a view."""
    results = sorted(folder.glob(f"{name}-*.json"))
    if not results:
        return f"## {name}\n\nnothing in {folder}: python -m bench --{name}"
    saved = json.loads(results[-1].read_text())
    where = ", ".join(f"{key} {value}" for key, value in saved["machine"].items() if key != "isas")
    parts = f"## {name}", f"{where}.", view.markdown([view.row(**row) for row in saved["rows"]]), saved["notes"]
    return "\n\n".join(filter(None, parts))


def grid(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows))
