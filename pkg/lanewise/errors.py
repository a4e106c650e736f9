"""What lanewise raises beyond ValueError, TypeError and RuntimeError."""

from __future__ import annotations

from typing import Any

REASON = "a NaN or +inf among the allowed ids, or nothing allowed"


class InvalidLogitsError(ValueError):
    """Rows from which nothing can be chosen: a NaN or +inf among the allowed ids, or nothing allowed.

    Raised after every other row is done. `rows` are the numbers of the invalid rows, `tokens` the result with -1 in
    them: an array, -1 for (V,) logits, top_k's ids; of functions that give rows, the rows, NaN there.

    >>> import numpy as np, lanewise
    >>> try:
    ...     lanewise.argmax(np.float32([[1, 2], [np.nan, 0]]))
    ... except lanewise.InvalidLogitsError as error:
    ...     error.rows, error.tokens.tolist()
    ([1], [1, -1])
    """

    def __init__(self, rows: list[int], tokens: Any, reason: str = REASON) -> None:
        shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        super().__init__(f"{len(rows)} invalid row(s): {shown}: {reason}")
        self.rows = rows
        self.tokens = tokens
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rows, self.tokens, self.reason)


class OutOfBlocksError(MemoryError):
    """A pool has fewer free blocks than a call asked for. Nothing was allocated.

    `needed`, `free` (the cached ones, which may be evicted, among them) and `total` are numbers of blocks.

    >>> import lanewise
    >>> try:
    ...     lanewise.BlockPool(4).allocate(5)
    ... except lanewise.OutOfBlocksError as error:
    ...     error.needed, error.free, error.total
    (5, 4, 4)
    """

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(f"{needed} block(s) needed, {free} of {total} free")
        self.needed, self.free, self.total = needed, free, total

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.needed, self.free, self.total)


class BlockError(ValueError):
    """A handle that is no block of the pool, is stale, or is freed more often than it is held. Nothing was changed.

    `index` is its place in the call, `handle` the handle.

    >>> import lanewise
    >>> pool = lanewise.BlockPool(4)
    >>> one = pool.allocate()
    >>> try:
    ...     pool.free([one, one])
    ... except lanewise.BlockError as error:
    ...     error.index, str(error)
    (1, 'handles[1]: block 0 is freed 2 times in one call and held 1 time(s)')
    """

    def __init__(self, message: str, index: int, handle: int) -> None:
        super().__init__(message)
        self.index, self.handle = index, handle

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.index, self.handle)
