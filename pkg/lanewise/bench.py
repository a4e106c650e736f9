"""`python -m lanewise bench`: every operation on this machine, beside its floor and the NumPy way.

The repository's bench/ has more kinds of rows, cold rows, other libraries and the bars; both measure with _measure.py.
"""

from __future__ import annotations

import numpy as np

import lanewise

from ._measure import HEADING, OPERATIONS, line, measure
from ._rows import realistic


def main(*, quick: bool = False) -> int:
    print(HEADING)
    for vocab in (4096,) if quick else (32000, 128256):
        rows = [realistic(vocab, np.random.default_rng(seed)) for seed in range(8)]
        for operation in OPERATIONS:
            for isa in lanewise.info()["usable"]:
                peers = {"NumPy": operation.numpy}
                cell = measure(operation, "realistic", isa, rows, peers, seconds=0.0 if quick else 0.2)
                print(line(cell), flush=True)
    print("\nFloors: F1 reads the row, F2 reads it and takes every exp, F3 copies it; same ISA, same turns.")
    return 0
