# cython: language_level=3, freethreading_compatible=True
"""Logprobs of tokens: a distribution looked at, nothing drawn."""
cimport numpy as cnp
from cpython.long cimport PyLong_Check
from libc.stdint cimport INT64_MAX, UINT32_MAX, int64_t
from libc.string cimport memset

from typing import NamedTuple

import numpy as np

from lanewise._arguments cimport integer
from lanewise._arrays cimport as_array, check_out, is_direct, logits_rows, outs_of, rows_span, rows_t, whole
from lanewise._ops cimport *
from lanewise._settings cimport fill_edits, fill_numbers

cnp.import_array()


class Logprobs(NamedTuple):
    """What was asked of each row, natural logarithms; None for what was not. For (V,) logits without the B axis."""

    chosen: np.ndarray | float | None  # float32 (B,): of tokens
    rank: np.ndarray | int | None  # int64 (B,): how many logits are greater than the token's, and 1
    top_ids: np.ndarray | None  # int64 (B, n): descending, ties by ascending id
    top_logprobs: np.ndarray | None  # float32 (B, n)
    given: np.ndarray | None  # float32 (B, m): of ids
    entropy: np.ndarray | float | None  # float32 (B,): in nats


cdef cnp.ndarray empty(tuple shape, int dtype):
    cdef cnp.npy_intp sizes[2]
    cdef int axes = len(shape), i
    for i in range(axes):
        sizes[i] = shape[i]
    return cnp.PyArray_EMPTY(axes, sizes, dtype, 0)


# A copy of ids as int64, each in 0..vocab-1 or -1, of the one of two shapes that has its number of axes.
cdef cnp.ndarray checked(object ids, str name, tuple shape, tuple other, int64_t vocab):
    cdef cnp.ndarray copy
    cdef int64_t *id_
    cdef int64_t i
    if PyLong_Check(ids) and shape == ():
        copy = empty((), cnp.NPY_INT64)
        (<int64_t *>cnp.PyArray_DATA(copy))[0] = integer(ids, name, -1, vocab - 1)
        return copy
    array = as_array(ids, name)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.shape != (shape if array.ndim == len(shape) else other):
        shapes = f"{shape}" if shape == other else f"{shape} or {other}"
        raise ValueError(f"{name} must have shape {shapes}, got {array.shape}")
    copy = np.array(np.minimum(array, INT64_MAX) if array.dtype == np.uint64 else array, np.int64, order="C")
    id_ = <int64_t *>cnp.PyArray_DATA(copy)
    for i in range(cnp.PyArray_SIZE(copy)):
        if not -1 <= id_[i] < vocab:
            at = np.unravel_index(i, array.shape)
            where = "".join([f"[{axis}]" for axis in at])
            raise ValueError(f"{name}{where} is {array[at]}, not an id in 0..{vocab - 1}, or -1 for none")
    return copy


# An array for a field that has a shape, out's own where the kernel can write to it; None for one that is not asked for.
cdef object place(tuple shape, int dtype, tuple out, int field, rows_t *r, span *to):
    if out is not None:
        name = "out." + Logprobs._fields[field]
        if (shape is None) != (out[field] is None):
            raise ValueError(f"{name} must be {'None, as it is not asked for' if shape is None else 'an array'}")
        if shape is not None and is_direct(check_out(out[field], shape, dtype, name), r):
            to[0] = whole(out[field])
            return out[field]
    if shape is None:
        return None
    array = empty(shape, dtype)
    to[0] = whole(array)
    return array


cdef object finished(list fields, tuple places, object out):
    if places is None:
        for i, field in enumerate(fields):
            if field is not None and cnp.PyArray_NDIM(field) == 0:
                fields[i] = field.item()
        return tuple.__new__(Logprobs, fields)
    for written, field in zip(fields, places):
        if written is not field:
            field[...] = written
    return out


cdef void set_edits(logprobs_args *a, const sample_args *edits) noexcept:
    a.mask, a.mask_kind, a.mask_stride, a.mask_width = edits.mask, edits.mask_kind, edits.mask_stride, edits.mask_width
    a.bias_ids, a.bias_values, a.bias_offsets = edits.bias_ids, edits.bias_values, edits.bias_offsets
    a.bias_dense, a.bias_stride = edits.bias_dense, edits.bias_stride
    a.prompt_ids, a.prompt_offsets = edits.prompt_ids, edits.prompt_offsets
    a.output_ids, a.output_offsets = edits.output_ids, edits.output_offsets


def logprobs(logits, tokens=None, *, top_n=0, ids=None, entropy=False, temperature=1.0, repetition_penalty=1.0,
             frequency_penalty=0.0, presence_penalty=0.0, prompt_ids=None, output_ids=None, bias=None, mask=None,
             vocab_size=None, out=None):
    """What is asked of log_softmax(logits), as Logprobs; no array of V is made. At least one of these must be asked:

    tokens: int64 (B,), an int for (V,) logits, gives chosen and rank. top_n: gives top_ids and top_logprobs. ids: (m,)
    for all rows, or (B, m), gives given. entropy=True: in nats. -1 among tokens and ids is nobody: NaN, rank 0.
    Raw: called with nothing more. Processed: with the temperature, penalties, bias and mask of `sample`; what they
    forbid is -inf. A row with a NaN or +inf, or all -inf: NaN, ids -1, rank 0. out: a Logprobs of arrays.
    Raises ValueError, TypeError before anything is written.

    >>> found = lanewise.logprobs(np.log(np.float32([0.1, 0.2, 0.7])), 1, top_n=2)
    >>> round(found.chosen, 4), found.rank, found.top_ids.tolist()
    (-1.6094, 2, [2, 1])
    """
    cdef rows_t r
    cdef logprobs_args a
    cdef sample_args edits
    cdef sample_params one
    cdef sample_params *p = &one
    cdef tuple rows, chosen = None, tops = None, given = None, places = None
    memset(&a, 0, sizeof(a))
    memset(&edits, 0, sizeof(edits))
    owner = logits_rows(logits, &r, "logits")
    if vocab_size is not None:
        r.cols = integer(vocab_size, "vocab_size", 1, r.cols)
    if r.cols > UINT32_MAX:
        raise ValueError(f"logprobs takes up to {UINT32_MAX} ids, got {r.cols}")
    a.top_n = integer(top_n, "top_n", 0, r.cols)
    if tokens is None and not a.top_n and ids is None and not entropy:
        raise ValueError("nothing is asked for: give tokens, top_n, ids or entropy=True")
    if out is not None:
        places = outs_of(out, len(Logprobs._fields), "a Logprobs")
    rows = () if r.single else (r.rows,)
    if tokens is not None:
        chosen, tokens = rows, checked(tokens, "tokens", rows, rows, r.cols)
        a.tokens = whole(tokens)
    if a.top_n:
        tops = rows + (a.top_n,)
    if ids is not None:
        ids = as_array(ids, "ids")
        a.ids_width = ids.shape[ids.ndim - 1] if ids.ndim else 1
        a.ids_step = a.ids_width if ids.ndim == 2 else 0
        given = rows + (a.ids_width,)
        ids = checked(ids, "ids", given, given[-1:], r.cols)
        a.ids = whole(ids)
    if r.rows != 1:
        rows_params = np.empty((r.rows, sizeof(sample_params)), np.uint8)
        p = <sample_params *>cnp.PyArray_DATA(rows_params)
    fill_numbers(p, r.rows, temperature, 0, 1.0, 0.0, 1, repetition_penalty, frequency_penalty, presence_penalty)
    kept = fill_edits(&edits, &r, prompt_ids, output_ids, bias, mask)
    set_edits(&a, &edits)
    a.x, a.params.ptr, a.params.bytes = rows_span(&r), p, r.rows * sizeof(sample_params)
    a.rows, a.cols, a.dtype, a.x_stride, a.force_exact = r.rows, r.cols, r.dtype, r.stride, force_exact()
    fields = [place(chosen, cnp.NPY_FLOAT32, places, 0, &r, &a.chosen),
              place(chosen, cnp.NPY_INT64, places, 1, &r, &a.rank),
              place(tops, cnp.NPY_INT64, places, 2, &r, &a.top_ids),
              place(tops, cnp.NPY_FLOAT32, places, 3, &r, &a.top_logprobs),
              place(given, cnp.NPY_FLOAT32, places, 4, &r, &a.given),
              place(rows if entropy else None, cnp.NPY_FLOAT32, places, 5, &r, &a.entropy)]
    run(OP_logprobs, &a, r.cols, 8 * r.cols + 20000)
    return finished(fields, places, out)
