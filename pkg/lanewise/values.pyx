# cython: language_level=3, freethreading_compatible=True
"""softmax and its kin: rows in, values out."""
cimport numpy as cnp
from libc.float cimport DBL_MAX
from libc.stdint cimport int64_t

import numpy as np

from lanewise._arguments cimport fill_doubles, integer, is_scalar, number
from lanewise._arrays cimport as_array, check_out, logits_rows, rows_span, rows_t, target, whole
from lanewise._ops cimport *

cnp.import_array()


cdef object map_rows(int op, object x, object temperature, object axis, object out, double low):
    cdef rows_t r
    cdef row_args a
    cdef double one
    cdef cnp.ndarray result, written
    cdef bint reduces = op == OP_logsumexp
    cdef tuple shape
    cdef int64_t at = <int64_t>integer(axis, "axis", -64, 63)
    if at != -1 or not isinstance(x, np.ndarray) or x.ndim > 2:
        x = as_array(x, "logits")
        if at != -1 or x.ndim > 2:
            return map_axis(op, x, temperature, at, out, low)
    owner = logits_rows(x, &r, "logits")
    if is_scalar(temperature):
        one = number(temperature, "temperature", low, DBL_MAX)
        a.temperature_step = 0
        a.temperature.ptr, a.temperature.bytes = &one, sizeof(double)
    else:
        temperatures = np.empty(r.rows, np.float64)
        a.temperature = whole(temperatures)
        a.temperature_step = 1
        fill_doubles(a.temperature.ptr, sizeof(double), r.rows, temperature, "temperature", low, DBL_MAX)
    shape = () if r.single else (r.rows,)
    if not reduces:
        shape += (r.cols,)
    result = np.empty(shape, np.float32) if out is None else check_out(out, shape, cnp.NPY_FLOAT32, "out")
    if reduces:
        written = np.empty(shape, np.float32) if out is not None else result
        a.out_stride = 4
    else:
        written = result if out is None else target(result, &r)
        a.out_stride = 0 if r.single else cnp.PyArray_STRIDE(written, 0)
    a.x, a.out = rows_span(&r), whole(written)
    a.rows, a.first_row, a.cols, a.dtype, a.x_stride = r.rows, 0, r.cols, r.dtype, r.stride
    run(op, &a, r.cols, 6 * r.cols + 1000)  # an exp for each
    if written is not result:
        result[...] = written
    return result[()] if out is None and reduces and r.single else result


# Any axis of any number of axes: the axis is moved last and the others are made rows.
cdef object map_axis(int op, object x, object temperature, object axis, object out, double low):
    if x.ndim == 0:
        raise ValueError("logits must have at least one axis, got a number")
    at = axis
    if not -x.ndim <= at < x.ndim:
        raise ValueError(f"axis must be in [{-x.ndim}, {x.ndim - 1}] for logits of shape {x.shape}, got {at}")
    if x.ndim != 2 and not is_scalar(temperature):
        raise ValueError(f"temperature must be one value for logits of shape {x.shape}")
    if x.shape[at] == 0:
        raise ValueError(f"logits must have at least one element along axis {at}, got shape {x.shape}")
    moved = np.moveaxis(x, at, -1)
    rows = moved.reshape(-1, moved.shape[-1]) if x.ndim != 1 else moved
    y = map_rows(op, rows, temperature, -1, None, low)
    y = np.moveaxis(y.reshape(moved.shape), -1, at) if op != OP_logsumexp else np.reshape(y, moved.shape[:-1])
    if out is None:
        return y[()] if y.ndim == 0 else y
    check_out(out, y.shape, cnp.NPY_FLOAT32, "out")[...] = y
    return out


def softmax(logits, *, temperature=1.0, axis=-1, out=None):
    """exp(logits / temperature), normalised along `axis`, as float32.

    logits: (V,), (B, V) or more axes; float32, float16, bfloat16, or float64 cast to float32. temperature: one value
    or one a row; 0 puts all mass on the first maximum. out: float32 of the same shape; may be logits itself.
    A row with a NaN or +inf, or all -inf, is all NaN. Raises ValueError, TypeError.
    Online softmax by blocks: Milakov & Gimelshein, arXiv 1805.02867.

    >>> lanewise.softmax(np.float32([0.0, 0.0]))
    array([0.5, 0.5], dtype=float32)
    """
    return map_rows(OP_softmax, logits, temperature, axis, out, 0.0)


def log_softmax(logits, *, temperature=1.0, axis=-1, out=None):
    """Natural logarithm of softmax, as float32; at temperature 0, 0 and -inf. Arguments and errors as in softmax.

    >>> lanewise.log_softmax(np.float32([0.0, 0.0]))
    array([-0.6931472, -0.6931472], dtype=float32)
    """
    return map_rows(OP_log_softmax, logits, temperature, axis, out, 0.0)


def logsumexp(logits, *, temperature=1.0, axis=-1, out=None):
    """log(sum(exp(logits / temperature))) along `axis`, as float32; that axis is gone from the shape.

    A row of -inf gives -inf, one with +inf gives +inf, one with a NaN gives NaN. temperature must be at least 1e-30, and
    above 1e30 counts as 1e30.
    Raises ValueError, TypeError.

    >>> lanewise.logsumexp(np.float32([-np.inf, 10.0, -np.inf]))
    np.float32(10.0)
    """
    return map_rows(OP_logsumexp, logits, temperature, axis, out, 1e-30)


def scale(logits, temperature, *, axis=-1, out=None):
    """logits / temperature in float32, the division IEEE's. temperature: at least 1e-30, above 1e30 counts as 1e30.

    Shapes, dtypes, out and errors as in softmax.

    >>> lanewise.scale(np.float32([1.0, 3.0]), 2.0)
    array([0.5, 1.5], dtype=float32)
    """
    return map_rows(OP_scale, logits, temperature, axis, out, 1e-30)
