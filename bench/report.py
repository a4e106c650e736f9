"""A view is a table that is measured: printed line by line, saved as JSON, plotted, and rendered as Markdown."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import lanewise

from . import peers

PLOT = "performance-{}.png"


class View(NamedTuple):
    title: str
    about: str
    row: Callable[..., Any]  # the NamedTuple of a row
    measured: Callable[[bool], Iterator[Any]]  # of `quick`
    heading: str
    line: Callable[[Any], str]
    markdown: Callable[[Sequence[Any]], str]
    plot: Callable[[Sequence[Any], Path], None] | None = None


def run(name: str, view: View, folder: Path, quick: bool) -> None:
    print(view.heading)
    rows = []
    for row in view.measured(quick):
        rows.append(row)
        print(view.line(row), flush=True)
    notes = peers.absent()
    if notes:
        print(f"\n{notes}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    content = {
        "machine": {"quick": "run, so no figures"} if quick else machine(),
        "notes": notes,
        "rows": [row._asdict() for row in rows],
    }
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


def latest(name: str, folder: Path) -> Path | None:
    return max(folder.glob(f"{name}-*.json"), default=None)


def markdown(name: str, view: View, result: Path) -> str:
    saved = json.loads(result.read_text())
    command = "python -m bench" if name == "table" else f"python -m bench --{name}"
    where = ", ".join(f"{key} {value}" for key, value in saved["machine"].items() if key != "isas")
    plot = f"![{view.about}]({PLOT.format(name)})" if result.with_suffix(".png").exists() else ""
    parts = f"### {view.title}", f"`{command}`: {where}.", view.markdown([view.row(**row) for row in saved["rows"]])
    return "\n\n".join(filter(None, (*parts, saved["notes"], plot)))


def document(views: dict[str, View], folder: Path, page: Path) -> None:
    """The latest result of each view into the page, between its marks, and the plots beside it."""
    results = {name: result for name in views if (result := latest(name, folder))}
    before, begin, rest = page.read_text().partition("<!-- begin: measured -->\n")
    _, end, after = rest.partition("<!-- end: measured -->\n")
    measured = "\n\n".join(markdown(name, views[name], result) for name, result in results.items())
    page.write_text(f"{before}{begin}{measured}\n{end}{after}")
    for name, result in results.items():
        if result.with_suffix(".png").exists():
            shutil.copy(result.with_suffix(".png"), page.parent / PLOT.format(name))


def grid(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows))
