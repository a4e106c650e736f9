"""What is known of this CPU: the flags py-cpuinfo lists and the winners of lanewise.tune(), kept in the user's cache.

py-cpuinfo takes 50 ms to 2 s and starts programs, so it is asked once a machine. No answer of it, late or missing, is
needed for a working package: C's own look at the registers stands in.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from contextlib import suppress
from typing import Any

from . import _ops
from ._isas import ISAS

# ---- the cache: one small JSON file for each CPU and version of lanewise and py-cpuinfo ----


def cache_file() -> str:
    from . import __version__

    key = f"lanewise-{__version__}_{cpuinfo_version()}_{_ops.MACHINE}_{_ops.cpu_signature()}"
    return os.path.join(cache_folder(), f"{key}.json")


def cache_folder() -> str:
    folder = os.environ.get("LANEWISE_CACHE_DIR")
    if folder:
        return folder
    if sys.platform == "darwin":
        base = "~/Library/Caches"
    elif os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return os.path.join(os.path.expanduser(base), "lanewise")


def cpuinfo_version() -> str:
    """As the installed metadata's folder is named: importlib.metadata would take 10 ms to say the same."""
    from importlib.util import find_spec

    try:
        site: str = os.path.dirname(os.path.dirname(find_spec("cpuinfo").origin))  # type: ignore[union-attr, arg-type]
        return next(os.path.splitext(name)[0] for name in os.listdir(site) if name.startswith("py_cpuinfo-"))
    except Exception:
        return "py_cpuinfo-unknown"


def recall() -> dict[str, Any]:
    """What remember() has kept for this CPU and these versions."""
    import json

    try:
        with open(cache_file(), encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def remember(**entries: Any) -> None:
    """Adds entries to the cache, whole or not at all; a cache that cannot be written only costs time."""
    import json

    path = cache_file()
    if path.startswith("~"):  # no home to put it in
        return
    draft = f"{path}.{os.getpid()}-{threading.get_ident()}"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(recall() | entries, file)
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            os.unlink(draft)


def tuned() -> dict[str, str]:
    """{operation: isa} as lanewise.tune() has measured here."""
    winners = recall().get("tuned")
    return winners if isinstance(winners, dict) else {}


# ---- the flags ----


@functools.cache
def detect(limit: float = 5.0) -> tuple[frozenset[str], str]:
    """The CPU's flags in py-cpuinfo's spelling, and where they are from. Takes `limit` seconds at most."""
    kept = recall()
    flags = kept.get("flags")
    if isinstance(flags, list) and all(isinstance(flag, str) for flag in flags):
        return frozenset(flags), f"cache of {kept.get('flags_from')}"
    flags, source = ask_in_time(limit)
    remember(flags=sorted(flags), flags_from=source)
    return flags, source


def ask_in_time(limit: float) -> tuple[frozenset[str], str]:
    """py-cpuinfo's answer, or C's with what was wrong with py-cpuinfo's."""
    answers: list[Any] = [f"no answer in {limit:g} s"]

    def ask() -> None:
        try:
            answers.append(ask_cpuinfo())
        except BaseException as error:  # whatever it is, this thread ends with it and C answers
            answers.append(f"{type(error).__name__}: {error}")

    if getattr(sys, "frozen", False):
        answers.append("a frozen application must not start programs: it may start itself")
    else:
        try:
            thread = threading.Thread(target=ask, name="lanewise-cpuinfo", daemon=True)
            thread.start()
            thread.join(limit)
        except RuntimeError as error:  # no threads on this system, or no longer at its exit
            answers.append(str(error))
    answer = answers[-1]
    return answer if isinstance(answer, tuple) else (c_flags(), f"C, in place of py-cpuinfo ({answer})")


def c_flags() -> frozenset[str]:
    return frozenset[str]().union(*(isa.cpu_flags for isa in ISAS if _ops.allowed(isa.name)))


def ask_cpuinfo() -> tuple[frozenset[str], str]:
    """The flags of the first part of py-cpuinfo that lists any."""
    from cpuinfo import cpuinfo  # type: ignore[import-untyped]

    for name, part in PARTS.items():
        with suppress(Exception):  # most parts are private, and the public one raises too
            flags = frozenset(filter(None, part(cpuinfo)))
            if flags:
                return flags, f"py-cpuinfo, {name}"
    raise LookupError("no part of it lists flags")


def by_cpuid(cpuinfo: Any) -> Any:
    if _ops.MACHINE != "x86_64":  # it is machine code
        return ()
    cpuid = cpuinfo.CPUID()
    return () if cpuid.is_selinux_enforcing else cpuid.get_flags(cpuid.get_max_extension_support())


def by_another_python(cpuinfo: Any) -> Any:
    """Starts sys.executable and sleeps a second: only if that is a Python, and if flags decide anything here."""
    if "py" not in os.path.basename(sys.executable) or not any(
        isa.cpu_flags for isa in ISAS if isa.machine == _ops.MACHINE
    ):
        return ()
    return cpuinfo.get_cpu_info().get("flags") or ()


PARTS = {
    "/proc/cpuinfo": lambda cpuinfo: cpuinfo._get_cpu_info_from_proc_cpuinfo().get("flags") or (),
    "sysctl": lambda cpuinfo: cpuinfo._get_cpu_info_from_sysctl().get("flags") or (),
    "CPUID": by_cpuid,
    "get_cpu_info()": by_another_python,
}
