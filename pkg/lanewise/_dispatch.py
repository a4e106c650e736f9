"""Which instruction set each operation runs on.

Python chooses, C vetoes. An ISA is usable here if this build has it, if the CPU's flags list what it needs (_cpu.py,
from py-cpuinfo) and if C's own look at CPUID and XCR0 does not object (csrc/host.c). Every operation gets the best
usable one, unless a measurement says otherwise. That happens when the first operation runs, not at import; use() and
LANEWISE_ISA overrule the choice, never the veto. docs/dispatch.md tells the story.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import _cpu, _ops, _threads
from ._isas import ISAS, Isa

# Where a better ISA is known to lose: {(isa, operation): "measured on which chip, by how much"}.
SLOWER: dict[tuple[str, str], str] = {}

# ---- the choice: pure functions ----


def plan(
    flags: Collection[str],
    runnable: Collection[str],
    slower: Mapping[tuple[str, str], str] = SLOWER,
    tuned: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """{operation: isa} for a CPU with these flags, of the ISAs that are compiled in and not vetoed."""
    names = usable(flags, runnable)
    return {op: choose(op, names, slower, tuned or {})[0] for op in _ops.NAMES}


def usable(flags: Collection[str], runnable: Collection[str]) -> tuple[str, ...]:
    return tuple(isa.name for isa in ISAS if isa.name in runnable and isa.cpu_flags.issubset(flags))


def choose(
    op: str, names: tuple[str, ...], slower: Mapping[tuple[str, str], str], tuned: Mapping[str, str]
) -> tuple[str, str]:
    """The ISA for one operation, of the usable ones, best first, and why."""
    if tuned.get(op) in names:
        return tuned[op], "measured here by lanewise.tune()"
    losers = [isa for isa in names if (isa, op) in slower]
    best = next((isa for isa in names if isa not in losers), names[-1])
    passed = [f"; {isa} is slower: {slower[isa, op]}" for isa in losers if names.index(isa) < names.index(best)]
    return best, "best usable" + "".join(passed)


def runnable() -> tuple[str, ...]:
    """What this build has and C does not veto here: what use() accepts, best first."""
    return tuple(isa for isa in _ops.compiled() if _ops.allowed(isa))


def objection(isa: Isa, flags: Collection[str]) -> str | None:
    """Why an ISA is not usable here."""
    if isa.name not in _ops.compiled():
        return f"not compiled in: for {isa.machine}, this is {_ops.MACHINE}"
    if not _ops.allowed(isa.name):
        return f"vetoed by C: {veto(isa.name, _ops.registers())}"
    missing = sorted(isa.cpu_flags.difference(flags))
    return f"not listed by py-cpuinfo: {', '.join(missing)}" if missing else None


def veto(isa: str, registers: Mapping[str, int]) -> str:
    """Whose the fault is when registers do not allow an ISA."""
    willing = {**registers, "leaf1_ecx": registers["leaf1_ecx"] | 1 << 27, "xcr0": 2**64 - 1}
    if _ops.x86_allows(isa, **willing):
        return f"the operating system has not enabled its registers (XCR0 = {registers['xcr0']:#x})"
    return "the CPU does not have it"


# ---- the state of this process ----

_lock = threading.RLock()
_start: dict[str, tuple[str, str]] | None = None  # {operation: (isa, why)} before any use()
_forced: dict[str, str] = {}  # what use() has laid over it


def start() -> dict[str, tuple[str, str]]:
    """The choice that LANEWISE_ISA or the plan makes, made once."""
    global _start
    if _start is None:
        named = os.environ.get("LANEWISE_ISA", "")
        if named in ("", "auto"):
            names, tuned = usable(_cpu.detect()[0], runnable()), _cpu.tuned()
            _start = {op: choose(op, names, SLOWER, tuned) for op in _ops.NAMES}
        else:
            _start = dict.fromkeys(_ops.NAMES, (available(named, "LANEWISE_ISA"), "LANEWISE_ISA"))
    return _start


def choices() -> dict[str, tuple[str, str]]:
    forced = {op: (isa, "use()") for op, isa in _forced.items()}
    return forced if len(forced) == len(_ops.NAMES) else start() | forced


def resolve() -> None:
    """Binds every operation. _ops calls it when the first one runs."""
    with _lock:
        for op, (isa, _) in choices().items():
            _ops.bind(op, isa)


def available(isa: str, asker: str) -> str:
    here = ", ".join(runnable())
    record = next((record for record in ISAS if record.name == isa), None)
    if record is None:
        raise ValueError(f"{asker}: no instruction set is called {isa!r}; available here: {here}, and auto")
    if isa not in runnable():
        raise RuntimeError(f"{asker}: {isa} cannot run here, {objection(record, ())}; available: {here}, and auto")
    return isa


def reconsider() -> None:
    """Makes the choice again, after what it rests on has changed."""
    global _start
    with _lock:
        _start = None
        resolve()


def use(isa: str | None, operation: str | None = None) -> None:
    """Runs every operation, or one, on `isa` from now on, in the whole process; "auto" or None ends that.

    Results do not change, only the time they take. Raises ValueError for a name that does not exist and RuntimeError
    for an ISA that cannot run here; it never takes another in silence.

    >>> import lanewise
    >>> lanewise.use("scalar")
    >>> lanewise.use("scalar", "softmax")
    >>> lanewise.use("auto")
    """
    global _forced
    if operation is not None and operation not in _ops.NAMES:
        raise ValueError(f"operation must be one of {', '.join(_ops.NAMES)}, got {operation!r}")
    operations = _ops.NAMES if operation is None else (operation,)
    with _lock:
        forced = {op: isa for op, isa in _forced.items() if op not in operations}
        if isa is not None and isa != "auto":
            forced |= dict.fromkeys(operations, available(isa, "use()"))
        _forced = forced
        resolve()


@contextmanager
def using(isa: str | None, operation: str | None = None) -> Iterator[None]:
    """use(isa, operation) inside a with block, and what was in use before after it.

    >>> import lanewise
    >>> with lanewise.using("scalar"):
    ...     lanewise.info()["operations"]["softmax"]["isa"]
    'scalar'
    """
    global _forced
    before = _forced
    use(isa, operation)
    try:
        yield
    finally:
        with _lock:
            _forced = before
            resolve()


def info() -> dict[str, Any]:
    """What was detected, what can run and why not, and what each operation runs on and why.

    >>> import lanewise
    >>> lanewise.info()["usable"][-1]
    'scalar'
    """
    from . import __version__

    with _lock:
        resolve()
        flags, source = _cpu.detect()
        objections = {isa.name: objection(isa, flags) for isa in ISAS}
        bound, why = _ops.bindings(), choices()
    return {
        "version": __version__,
        "machine": _ops.MACHINE,
        "flags": sorted(flags),
        "flags_from": source,
        "cache": _cpu.cache_file(),
        "compiled": _ops.compiled(),
        "usable": tuple(isa for isa, reason in objections.items() if reason is None),
        "unusable": {isa: reason for isa, reason in objections.items() if reason is not None},
        "environment": os.environ.get("LANEWISE_ISA"),
        "threads": _threads.get_num_threads(),
        "operations": {op: {"isa": bound[op], "why": why[op][1]} for op in _ops.NAMES},
    }


def after_fork() -> None:
    """The thread that held the lock does not exist in the child."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)
_ops.set_resolver(resolve)
