"""How many CPUs this process may use: those it is pinned to, and of those as many as its control group has time for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cpus() -> int:
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        cpus = os.process_cpu_count()
    elif hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count()
    cpus = cpus or 1
    return min(cpus, group_cpus(Path("/")) or cpus)


def group_cpus(root: Path) -> int | None:
    """The smallest quota of this process's control groups and of those around them, rounded up; None without one."""
    try:
        return min(filter(None, map(quota, groups(root))), default=None)
    except (ValueError, IndexError):  # files that are not what the kernel writes
        return None


def groups(root: Path) -> Iterator[Path]:
    """Folders that may limit CPU time: of the process's own group up to the outermost one that is mounted.

    Of version 1 and version 2 of control groups; a system may have both. Formats: proc(5), cgroups(7).
    """
    own: dict[str, str] = {}
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    for line in text(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            controller = ""
        elif kind.startswith("cgroup ") and "cpu" in kind.split(" ")[2].split(","):
            controller = "cpu"
        else:
            continue
        top, place = mount.split(" ")[3:5]
        group, outer = PurePosixPath(own.get(controller, "/")).parts, PurePosixPath(top).parts
        inner = group[len(outer) :] if group[: len(outer)] == outer else ()  # a container may see other names
        yield from (root.joinpath(place.lstrip("/"), *inner[:depth]) for depth in range(len(inner) + 1))


def quota(group: Path) -> int | None:
    words = text(group / "cpu.max").split()
    words = words or [text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(map(str.isdigit, words)):  # "max", -1, or no such files
        return None
    return -(-int(words[0]) // max(int(words[1]), 1))


def text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
