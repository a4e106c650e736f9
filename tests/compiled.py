"""csrc compiled apart from the package, by tests/replay/Makefile: the objects, and the replay driver linked of them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lanewise import _ops

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".build" / "replay"


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@functools.cache
def obstacle(*tools: str) -> str | None:
    """Why this machine cannot compile and look at what it compiled."""
    missing = [tool for tool in ("make", "cc", *tools) if not shutil.which(tool)]
    if missing:
        return f"no {', '.join(missing)} here"
    target = run("cc", "-dumpmachine").strip()
    return None if target.startswith(_ops.MACHINE) else f"cc compiles for {target}, this Python is for {_ops.MACHINE}"


@functools.cache
def making() -> subprocess.Popen[str]:
    """make, at work since the first call."""
    command = ["make", "-s", f"-j{os.cpu_count()}", "-f", "tests/replay/Makefile", f"BUILD={FOLDER}", "CC=cc"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


@functools.cache
def make() -> None:
    said, _ = making().communicate()
    assert making().returncode == 0, said


def compiled(*tools: str) -> Path:
    """The folder of objects and driver; skips the test where there are no tools."""
    reason = obstacle(*tools)
    if reason:
        pytest.skip(reason)
    make()
    return FOLDER
