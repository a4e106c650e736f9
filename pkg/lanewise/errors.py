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


class DamagedSaveError(ValueError):
    """What was to be restored is no save of a cache, or one that was cut off or changed. Nothing was restored.

    >>> import lanewise
    >>> try:
    ...     lanewise.PagedKVCache(1, 1, 1, 1).restore(b"text")
    ... except lanewise.DamagedSaveError as error:
    ...     print(error)
    the save is cut off: 24 bytes were to follow, 4 do
    """
