"""scipy.special's softmax, log_softmax and logsumexp, with lanewise's kernels for float32 and float16 arrays.

What the kernels have no answer for is SciPy's own: other dtypes and types, weights, empty arrays, arguments that are
wrong, and rows with a NaN or an infinity that shows (docs/compat.md, section scipy).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import values
from ._host import need

special = need("scipy.special", package="scipy", works="1.15 and later", names=("softmax", "log_softmax", "logsumexp"))

__all__ = ["log_softmax", "logsumexp", "softmax"]

Array: TypeAlias = NDArray[Any]


def softmax(x: Any, axis: Any = None) -> Any:
    """scipy.special.softmax: exp(x) over its sum, of all of x or along an axis or several.

    >>> softmax(np.float32([[0, 0], [0, 0]]), axis=1)
    array([[0.5, 0.5],
           [0.5, 0.5]], dtype=float32)
    """
    found = normalised(values.softmax, x, axis)
    return special.softmax(x, axis=axis) if found is None else found


def log_softmax(x: Any, axis: Any = None) -> Any:
    """scipy.special.log_softmax: the logarithm of softmax."""
    found = normalised(values.log_softmax, x, axis)
    return special.log_softmax(x, axis=axis) if found is None else found


def logsumexp(a: Any, axis: Any = None, b: Any = None, keepdims: bool = False, return_sign: bool = False) -> Any:
    """scipy.special.logsumexp: log(sum(b exp(a))), of all of a or along an axis or several; with return_sign its sign.

    >>> logsumexp(np.float32([[0, 0], [1, 1]]), axis=1, keepdims=True)
    array([[0.6931472],
           [1.6931472]], dtype=float32)
    """

    def scipys() -> Any:
        return special.logsumexp(a, axis=axis, b=b, keepdims=keepdims, return_sign=return_sign)

    axes = axes_of(a, axis) if b is None else None
    if axes is None:
        return scipys()
    result = np.asarray(values.logsumexp(as_rows(a, axes)[0]), a.dtype)
    if return_sign and not np.isfinite(result).all():
        return scipys()  # whose versions differ in the sign of 0
    if keepdims:
        result = np.expand_dims(result, axes)
    result = result[()]  # a number rather than an array without axes, as SciPy has it
    return (result, np.ones_like(result)[()]) if return_sign else result


def normalised(function: Callable[[Array], Array], x: Any, axis: Any) -> Array | None:
    """`function` of the rows along the axes; None where SciPy has to answer."""
    axes = axes_of(x, axis)
    if axes is None:
        return None
    rows, moved = as_rows(x, axes)
    result = function(rows)
    if np.isnan(result[..., 0]).any():  # a NaN or an infinity has made the whole row NaN
        return None
    last = tuple(range(-len(axes), 0))
    return np.moveaxis(result.reshape(moved), last, axes).astype(x.dtype, copy=False)


def axes_of(x: Any, axis: Any) -> tuple[int, ...] | None:
    """The axes as numbers >= 0, if x is an array for the kernels and they are axes of it."""
    if type(x) is not np.ndarray or x.dtype not in (np.float32, np.float16) or not x.size or not x.ndim:
        return None
    if axis is None:
        return tuple(range(x.ndim))
    given = axis if isinstance(axis, tuple) else (axis,)
    try:
        numbers = [operator.index(each) for each in given if not isinstance(each, bool)]
    except TypeError:
        return None
    axes = {number % x.ndim for number in numbers if -x.ndim <= number < x.ndim}
    return tuple(sorted(axes)) if len(axes) == len(given) > 0 else None


def as_rows(x: Array, axes: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """x with these axes last and made one, and the shape that it had before they were made one."""
    moved = np.moveaxis(x, axes, range(-len(axes), 0))
    return moved.reshape(*moved.shape[: x.ndim - len(axes)], -1), moved.shape
