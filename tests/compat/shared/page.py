"""What docs/compat.md and examples/ say about one package, run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def run_section(heading: str) -> None:
    """The python blocks under that heading of docs/compat.md, as a reader who types them in would have it."""
    page = (ROOT / "docs/compat.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert section, f"docs/compat.md has no section {heading}"
    blocks = list(re.finditer(r"^```python\n(.*?)^```", section[1], re.M | re.S))
    assert blocks, f"no example under {heading}"
    names: dict[str, Any] = {}
    for block in blocks:
        line = page[: section.start(1) + block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], "docs/compat.md", "exec"), names)


def run_example(name: str) -> None:
    """examples/NAME.py, as a program."""
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
