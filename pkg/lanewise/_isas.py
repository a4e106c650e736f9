"""One record an instruction set, best first."""

from __future__ import annotations

from typing import NamedTuple


class Isa(NamedTuple):
    name: str
    machine: str  # as csrc/isa_NAME.c tests it: x86_64, aarch64, or any
    cpu_flags: frozenset[str]  # in py-cpuinfo's spelling; all must be there


ISAS = (
    Isa("avx512", "x86_64", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    Isa("avx2", "x86_64", frozenset({"avx2", "fma", "f16c"})),
    Isa("neon", "aarch64", frozenset()),  # the baseline there: py-cpuinfo's flags are empty on Apple silicon
    Isa("scalar", "any", frozenset()),
)
