"""What lanewise raises beyond ValueError, TypeError and RuntimeError."""

from __future__ import annotations

from typing import Any


class InvalidLogitsError(ValueError):
    """Rows from which nothing can be chosen: a NaN or +inf among the allowed ids, or nothing allowed.

    Raised after every other row is done. `rows` are the numbers of the invalid rows, `tokens` the result with -1 in
    them.

    >>> import numpy as np, lanewise
    >>> try:
    ...     lanewise.argmax(np.float32([[1, 2], [np.nan, 0]]))
    ... except lanewise.InvalidLogitsError as error:
    ...     error.rows, error.tokens.tolist()
    ([1], [1, -1])
    """

    def __init__(self, rows: list[int], tokens: Any) -> None:
        shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        super().__init__(
            f"nothing to choose from in {len(rows)} row(s): {shown} "
            "(a NaN or +inf among the allowed ids, or nothing allowed)"
        )
        self.rows = rows
        self.tokens = tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rows, self.tokens)
