"""CPU tensors in and out, without a copy where lanewise reads or writes the memory itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from lanewise.compat import _host

torch: Any = _host.need("torch", package="torch", works="2.13", names=("from_numpy",))


def array(tensor: Any) -> np.ndarray[Any, Any]:
    """The tensor's own memory as an array; of a dtype NumPy has."""
    return np.asarray(tensor.detach())


def tensor(values: Any, dtype: Any = None) -> Any:
    """The array as a tensor: its own memory, unless `dtype` is another."""
    made = torch.from_numpy(values)
    return made if dtype is None else made.to(dtype)


def seeds(rows: int, generators: dict[int, Any] | None = None) -> list[int]:
    """A seed a row: from the generator named for the row, from torch's own for the others.

    63 bits each, and each generator that is named is advanced once; torch.manual_seed repeats the others.
    """
    drawn = torch.randint(0, 2**63 - 1, (rows,))
    for row, generator in (generators or {}).items():
        drawn[row] = torch.randint(0, 2**63 - 1, (1,), generator=generator)[0]
    return drawn.tolist()  # type: ignore[no-any-return]
