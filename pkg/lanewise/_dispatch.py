"""Which ISA each operation runs on."""

from __future__ import annotations

from . import _ops


def usable() -> tuple[str, ...]:
    return tuple(isa for isa in _ops.compiled() if _ops.allowed(isa))


def resolve() -> None:
    for op in _ops.NAMES:
        _ops.bind(op, usable()[0])


def use(isa: str) -> None:
    for op in _ops.NAMES:
        _ops.bind(op, isa)


_ops.set_resolver(resolve)


from contextlib import contextmanager


@contextmanager
def using(isa: str):
    before = _ops.bindings()
    use(isa)
    try:
        yield
    finally:
        for op, name in before.items():
            if name:
                _ops.bind(op, name)
