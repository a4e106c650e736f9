# cython: language_level=3, freethreading_compatible=True
"""What calls of sample are told besides logits, checked: numbers, one for all rows or one a row; ids, biases, masks.

Errors name the argument, the row and the value.
"""
cimport numpy as cnp
from cpython.float cimport PyFloat_Check
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_Check
from libc.float cimport FLT_MAX
from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint64_t

import operator
from collections.abc import Mapping

import numpy as np

from lanewise._arrays cimport as_array, rows_t
from lanewise._ops cimport TIES_TOP_K, TIES_TOP_P, to_float32

cnp.import_array()

cdef double BELOW_ONE = 1.0 - 2.0 ** -53


# ---- numbers ----


cdef double number(object value, str name, double low, double high) except? -1:
    cdef double v
    try:
        v = value
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    except OverflowError:
        v = INFINITY if value > 0 else -INFINITY
    if not low <= v <= high:
        if low == -INFINITY and high == INFINITY:
            raise ValueError(f"{name} must not be NaN")
        below = "1)" if high == BELOW_ONE else f"{high:g}]"
        raise ValueError(f"{name} must be in [{low:g}, {below}, got {value}")
    return v


# An integer in low .. high as its 64 bits. high is for unsigned ones, where low is 0.
cdef uint64_t integer(object value, str name, int64_t low, uint64_t high) except? 0xdead:
    cdef int64_t signed
    cdef int overflow = 0
    if not PyLong_Check(value):
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be an integer, got {value!r}") from None
    signed = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow > 0 and value <= high:
        return value
    if overflow or signed < low or (signed >= 0 and <uint64_t>signed > high):
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
    return <uint64_t>signed


cdef bint is_scalar(object value):
    return PyFloat_Check(value) or PyLong_Check(value) or isinstance(value, np.generic) or getattr(value, "ndim", 1) == 0


cdef list per_row(object value, str name, int64_t rows):
    cdef list values
    if isinstance(value, (list, tuple)):
        values = list(value)
    else:
        array = None if value is None else as_array(value, name)
        if array is None or array.ndim != 1 or array.dtype.kind not in "biuf":
            raise TypeError(f"{name} must be a number or one a row, got {value!r}")
        values = array.tolist()
    if len(values) != rows:
        raise ValueError(f"{name} must be one value or one a row: {rows} rows, got {len(values)} values")
    return values


# Writes value to a double that recurs every `step` bytes, rows times.
cdef int fill_doubles(void *to, int64_t step, int64_t rows, object value, str name, double low, double high) except -1:
    cdef int64_t i
    cdef double v
    if is_scalar(value):
        v = number(value, name, low, high)
        for i in range(rows):
            (<double *>(<char *>to + i * step))[0] = v
    else:
        for i, item in enumerate(per_row(value, name, rows)):
            (<double *>(<char *>to + i * step))[0] = number(item, f"{name}[{i}]", low, high)
    return 0


cdef int fill_integers(void *to, int64_t step, int64_t rows, object value, str name, int64_t low,
                       uint64_t high) except -1:
    cdef int64_t i
    cdef uint64_t v
    if is_scalar(value):
        v = integer(value, name, low, high)
        for i in range(rows):
            (<uint64_t *>(<char *>to + i * step))[0] = v
    else:
        for i, item in enumerate(per_row(value, name, rows)):
            (<uint64_t *>(<char *>to + i * step))[0] = integer(item, f"{name}[{i}]", low, high)
    return 0


# Which of some words it is. Nothing but a str is compared with them: an array would answer with an array.
cdef int word(object value, str name, tuple words) except -1:
    cdef int i, count = len(words)
    for i in range(count):
        if value is words[i] or isinstance(value, str) and value == words[i]:
            return i
    raise ValueError(f"{name} must be {', '.join(map(repr, words[:count - 1]))} or {words[count - 1]!r}, got {value!r}")


cdef int check_on_invalid(object on_invalid) except -1:
    return word(on_invalid, "on_invalid", ("raise", "mark"))


cdef int check_ties(object ties) except -1:
    return word(ties, "ties", ("lowest", "all"))


cdef int ties_of_steps(object ties) except -1:
    cdef int which = word(ties, "ties", ("lowest", "all", "top_k"))
    return 0 if which == 0 else TIES_TOP_K | TIES_TOP_P if which == 1 else TIES_TOP_K


# ---- ids, biases, masks ----


cdef object id_array(object ids, str name):
    array = as_array(ids, name)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array


cdef int refuse_id(object value, str name, Py_ssize_t at, int64_t vocab) except -1:
    raise ValueError(f"{name}[{at}] is {value}, not an id in 0..{vocab - 1}")


cdef cnp.ndarray checked_ids(object ids, str name, int64_t vocab, bint padded):
    """int64 ids of one row, each in 0..vocab-1; -1 is padding where `padded`."""
    cdef Py_ssize_t i
    if not padded and is_id_row(ids):
        return checked_row(ids, name, vocab, 0)
    array = id_array(ids, name)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind == "u" and array.size and array.max() >= vocab:  # before any of them wraps
        i = int(np.argmax(array >= vocab))
        refuse_id(array[i], name, i, vocab)
    row = checked_row(array.astype(np.int64), name, vocab, -1 if padded else 0)
    return row[row >= 0] if padded else row


# The commonest kind: no look at its dtype object is needed.
cdef inline bint is_id_row(object ids):
    return type(ids) is np.ndarray and cnp.PyArray_NDIM(<cnp.ndarray>ids) == 1 and \
        cnp.PyArray_TYPE(<cnp.ndarray>ids) == cnp.NPY_INT64 and cnp.PyArray_ISBEHAVED_RO(<cnp.ndarray>ids)


# A copy in which all is in least..vocab-1: what is checked is what is used, whoever writes to `ids` meanwhile.
cdef cnp.ndarray checked_row(cnp.ndarray ids, str name, int64_t vocab, int64_t least):
    cdef cnp.npy_intp count = cnp.PyArray_DIM(ids, 0), step = cnp.PyArray_STRIDE(ids, 0), i
    cdef const char *from_ = <const char *>cnp.PyArray_DATA(ids)
    cdef cnp.ndarray copy = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
    cdef int64_t *to = <int64_t *>cnp.PyArray_DATA(copy)
    cdef uint64_t furthest = 0  # from least, as unsigned: what is below it is far away
    for i in range(count):
        to[i] = (<const int64_t *>(from_ + i * step))[0]
        furthest = max(furthest, <uint64_t>to[i] - <uint64_t>least)
    if furthest >= <uint64_t>vocab - <uint64_t>least:
        for i in range(count):
            if not least <= to[i] < vocab:
                refuse_id(to[i], name, i, vocab)
    return copy


# A ragged list, a padded 2-D array, or for single rows a flat one: as (ids, offsets), all int64.
cdef tuple ragged_ids(object ids, str name, rows_t *r):
    if r.single and is_id_row(ids):
        return one_list(checked_row(ids, name, r.cols, 0))
    if isinstance(ids, (list, tuple)) and not (r.single and not any(isinstance(row, (list, tuple)) or
                                                                    getattr(row, "ndim", 0) for row in ids)):
        lists, padded = list(ids), False
    else:
        array = id_array(ids, name)
        padded = array.ndim == 2
        if array.ndim == 1 and not r.single:
            raise ValueError(f"{name} must have one list a row for {r.rows} rows, got shape {array.shape}")
        if array.ndim > 2:
            raise ValueError(f"{name} must be a list a row or a padded 2-D array, got shape {array.shape}")
        lists = list(array) if padded else [array]
    if len(lists) != r.rows:
        raise ValueError(f"{name} must have one list a row: {r.rows} rows, got {len(lists)}")
    lists = [checked_ids(row, name if r.single and not padded else f"{name}[{i}]", r.cols, padded)
             for i, row in enumerate(lists)]
    if len(lists) == 1:
        return one_list(lists[0])
    offsets = np.zeros(r.rows + 1, np.int64)
    np.cumsum([len(row) for row in lists], out=offsets[1:])
    return np.concatenate(lists) if lists else np.empty(0, np.int64), offsets


cdef tuple one_list(cnp.ndarray ids):
    cdef cnp.npy_intp two = 2
    cdef cnp.ndarray offsets = cnp.PyArray_EMPTY(1, &two, cnp.NPY_INT64, 0)
    (<int64_t *>cnp.PyArray_DATA(offsets))[0] = 0
    (<int64_t *>cnp.PyArray_DATA(offsets))[1] = cnp.PyArray_DIM(ids, 0)
    return ids, offsets


cdef tuple sparse_bias(object bias, rows_t *r):
    """{id: value} for all rows, or one a row: (ids, values, offsets)."""
    dicts = [bias] * r.rows if isinstance(bias, Mapping) else list(bias)
    if len(dicts) != r.rows:
        raise ValueError(f"bias must have one dict a row: {r.rows} rows, got {len(dicts)}")
    ids, values, offsets = [], [], np.zeros(r.rows + 1, np.int64)
    for i, row in enumerate(dicts):
        if row is not None and not isinstance(row, Mapping):
            raise TypeError(f"bias[{i}] must be a dict or None, got {row!r}")
        for id_, value in (row or {}).items():
            at = integer(id_, f"bias[{i}]: id", 0, r.cols - 1)
            ids.append(at)
            values.append(number(value, f"bias[{i}][{at}]", -INFINITY, FLT_MAX))
        offsets[i + 1] = len(ids)
    return np.array(ids, np.int64), to_float32(values), offsets


cdef object dense_bias(object bias, rows_t *r):
    array = as_array(bias, "bias")
    if array.dtype.kind != "f":
        raise TypeError(f"bias must be {{id: value}} or a float array, got {array.dtype}")
    array = np.require(to_float32(array), requirements=["C", "A"])
    if array.shape not in ((r.cols,), (r.rows, r.cols)):
        raise ValueError(f"bias must have shape ({r.cols},) or ({r.rows}, {r.cols}), got {array.shape}")
    bad = ~(array <= FLT_MAX)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"bias{list(at)} is {array[at]}; it must be a number or -inf")
    return array


cdef cnp.ndarray mask_array(object mask, rows_t *r):
    if type(mask) is np.ndarray and is_plain_mask(<cnp.ndarray>mask, r):
        return mask
    array = as_array(mask, "mask")
    if array.dtype not in (np.bool_, np.int32, np.uint32):
        raise TypeError(f"mask must be bool, or int32 or uint32 words, got {array.dtype}")
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[0] != r.rows):
        raise ValueError(f"mask must have shape (V,) or ({r.rows}, V), or words (V/32,) or ({r.rows}, V/32), "
                         f"got {array.shape}")
    return np.require(array, requirements=["C", "A"])


cdef inline bint is_plain_mask(cnp.ndarray mask, rows_t *r):
    cdef int type_ = cnp.PyArray_TYPE(mask), axes = cnp.PyArray_NDIM(mask)
    return ((type_ == cnp.NPY_BOOL or type_ == cnp.NPY_INT32 or type_ == cnp.NPY_UINT32)
            and (axes == 1 or (axes == 2 and cnp.PyArray_DIM(mask, 0) == r.rows))
            and cnp.PyArray_ISCARRAY_RO(mask))


cdef bint is_sparse(object bias):
    return isinstance(bias, Mapping) or (isinstance(bias, (list, tuple))
                                         and (not bias or any(row is None or isinstance(row, Mapping) for row in bias)))
