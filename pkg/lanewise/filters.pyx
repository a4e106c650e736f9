# cython: language_level=3, freethreading_compatible=True
"""Rows in, rows out: truncations as masks of logits or renormalised probabilities; bias, penalties, masks written out."""
cimport numpy as cnp
from libc.float cimport DBL_MAX, FLT_MAX, FLT_MIN
from libc.math cimport INFINITY
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t
from libc.string cimport memset

import numpy as np

from lanewise._arguments cimport check_on_invalid, check_ties, fill_doubles, fill_integers
from lanewise._arrays cimport check_out, is_bfloat16, logits_rows, rows_span, rows_t, target, whole
from lanewise._ops cimport *
from lanewise._settings cimport fill_edits
from lanewise.errors import InvalidLogitsError

cnp.import_array()


cdef tuple shape_of(rows_t *r):
    cdef tuple shape = () if r.single else (r.rows,)
    return shape + (r.cols,)


# ---- truncations ----


# One a row, all zeros; `one` serves a single row. Returns what owns the memory.
cdef object fresh_params(span *params, sample_params *one, rows_t *r):
    owner = None
    params.ptr, params.bytes = one, sizeof(sample_params)
    if r.rows != 1:
        owner = np.empty((r.rows, sizeof(sample_params)), np.uint8)  # NumPy sees when that is too much
        params[0] = whole(owner)
    memset(params.ptr, 0, params.bytes)
    return owner


cdef object truncated(int op, str name, object x, object k, object p, object min_p, object temperature,
                      object min_keep, object ties, object on_invalid, object out):
    cdef rows_t r
    cdef filter_args a
    cdef sample_params one
    cdef sample_params *params
    cdef int64_t status, size = sizeof(sample_params)
    cdef cnp.ndarray result, written
    cdef bint probabilities = op == OP_top_k_renorm or op == OP_top_p_renorm
    memset(&a, 0, sizeof(a))
    check_on_invalid(on_invalid)
    a.ties_all = check_ties(ties)
    owner = logits_rows(x, &r, "probs" if probabilities else "logits")
    if r.cols > SAMPLE_MAX_VOCAB:
        raise ValueError(f"{name} takes up to {SAMPLE_MAX_VOCAB} ids, got {r.cols}")
    params_owner = fresh_params(&a.params, &one, &r)
    params = <sample_params *>a.params.ptr
    fill_integers(&params.top_k, size, r.rows, k, "k", INT64_MIN, INT64_MAX)
    fill_doubles(&params.top_p, size, r.rows, p, "p", -INFINITY, INFINITY)
    fill_doubles(&params.min_p, size, r.rows, min_p, "min_p", 0.0, 1.0)
    fill_doubles(&params.temperature, size, r.rows, temperature, "temperature", 0.0, DBL_MAX)
    fill_integers(&params.min_keep, size, r.rows, min_keep, "min_keep", 0, INT64_MAX)
    shape = shape_of(&r)
    result = np.empty(shape, np.float32) if out is None else check_out(out, shape, cnp.NPY_FLOAT32, "out")
    written = result if out is None else target(result, &r)
    a.x, a.out = rows_span(&r), whole(written)
    a.out_stride = 0 if r.single else cnp.PyArray_STRIDE(written, 0)
    a.rows, a.cols, a.dtype, a.x_stride, a.force_exact = r.rows, r.cols, r.dtype, r.stride, force_exact()
    statuses = None
    if r.rows == 1:
        a.status.ptr, a.status.bytes = &status, sizeof(status)
    else:
        statuses = np.empty(r.rows, np.int64)
        a.status = whole(statuses)
    run(op, &a, r.cols, (20 if op == OP_top_p_mask or probabilities else 6) * r.cols + 1000)
    if written is not result:
        result[...] = written
    if on_invalid == "raise":
        invalid = np.flatnonzero(statuses).tolist() if statuses is not None else [0] if status else []
        if invalid and probabilities:
            raise InvalidLogitsError(invalid, result, "a NaN, +inf or negative number, or none above 0")
        if invalid:
            raise InvalidLogitsError(invalid, result)
    return result


def top_k_mask(logits, k, *, min_keep=1, ties="lowest", on_invalid="raise", out=None):
    """The logits as float32, -inf where top-k does not keep them: all but the k largest, ties by ascending id.

    logits: (V,) or (B, V), V up to 1,048,576. k, min_keep: one value or one a row; the larger counts, k <= 0 is off.
    ties="all" also keeps what equals the last kept. out: float32 of the same shape; may be logits itself. A row with
    a NaN or +inf, or all -inf, becomes all NaN; InvalidLogitsError follows the other rows, unless on_invalid="mark".
    Raises ValueError, TypeError.

    >>> lanewise.top_k_mask(np.float32([1.0, 5.0, 3.0, 5.0]), 2)
    array([-inf,   5., -inf,   5.], dtype=float32)
    """
    return truncated(OP_top_k_mask, "top_k_mask", logits, k, 1.0, 0.0, 1.0, min_keep, ties, on_invalid, out)


def top_p_mask(logits, p, *, temperature=1.0, min_keep=1, ties="lowest", on_invalid="raise", out=None):
    """The logits as float32, -inf outside the nucleus: an id is kept while the probability before it is less than p.

    Probabilities are softmax(logits / temperature), counted in integers; the logits kept are not divided. p <= 0
    keeps one, p >= 1 all; temperature 0 keeps the first maximum alone. Every number is one value or one a row.
    The rest as in top_k_mask.

    >>> lanewise.top_p_mask(np.log(np.float32([0.5, 0.2, 0.3])), 0.6).round(1)
    array([-0.7, -inf, -1.2], dtype=float32)
    """
    return truncated(OP_top_p_mask, "top_p_mask", logits, 0, p, 0.0, temperature, min_keep, ties, on_invalid, out)


def min_p_mask(logits, min_p, *, temperature=1.0, min_keep=1, on_invalid="raise", out=None):
    """The logits as float32, -inf where the probability is less than min_p times the largest.

    min_p is in [0, 1]; 0 keeps all. temperature as in top_p_mask, the rest as in top_k_mask.

    >>> lanewise.min_p_mask(np.float32([-1.0, -2.0, -30.0]), 0.1)
    array([ -1.,  -2., -inf], dtype=float32)
    """
    return truncated(OP_min_p_mask, "min_p_mask", logits, 0, 1.0, min_p, temperature, min_keep, "lowest",
                     on_invalid, out)


def top_k_renorm(probs, k, *, ties="lowest", on_invalid="raise", out=None):
    """The k largest probabilities over their sum, as float32, 0 elsewhere; ties by ascending id.

    probs: (V,) or (B, V), not negative; they need not sum to 1. A row with a NaN, +inf or a negative number, or
    without one above 0, is invalid. The rest as in top_k_mask.

    >>> lanewise.top_k_renorm(np.float32([0.125, 0.5, 0.25, 0.125]), 2).round(3)
    array([0.   , 0.667, 0.333, 0.   ], dtype=float32)
    """
    return truncated(OP_top_k_renorm, "top_k_renorm", probs, k, 1.0, 0.0, 1.0, 1, ties, on_invalid, out)


def top_p_renorm(probs, p, *, ties="lowest", on_invalid="raise", out=None):
    """The probabilities of the nucleus over their sum, as float32, 0 elsewhere.

    An id is kept while the mass before it is less than p of the row's, in descending order, ties by ascending id;
    p <= 0 keeps one, p >= 1 all. The mass is counted in integers. The rest as in top_k_renorm.

    >>> lanewise.top_p_renorm(np.float32([0.125, 0.5, 0.25, 0.125]), 0.5)
    array([0., 1., 0., 0.], dtype=float32)
    """
    return truncated(OP_top_p_renorm, "top_p_renorm", probs, 0, p, 0.0, 1.0, 1, ties, on_invalid, out)


# ---- edits ----


# `out` checked, or new. Float32, or for a mask what the logits are.
cdef object rows_out(object out, rows_t *r, edit_args *a, bint any_dtype):
    shape = shape_of(r)
    a.out_dtype = DTYPE_F32
    if out is None:
        return np.empty(shape, np.float32)
    if any_dtype and isinstance(out, np.ndarray) and (out.dtype == np.float16 if r.dtype == DTYPE_F16 else
                                                      r.dtype == DTYPE_BF16 and is_bfloat16(out.dtype)):
        a.out_dtype = r.dtype
        check_out(np.asarray(out).view(np.uint16), shape, cnp.NPY_UINT16, "out")
        return out
    return check_out(out, shape, cnp.NPY_FLOAT32, "out")


cdef object edited(int op, object logits, object repetition, object frequency, object presence, object prompt_ids,
                   object output_ids, object bias, object mask, object out):
    cdef rows_t r
    cdef edit_args a
    cdef sample_args edits
    cdef sample_params one
    cdef sample_params *params
    cdef int64_t size = sizeof(sample_params)
    cdef cnp.ndarray result, written
    memset(&a, 0, sizeof(a))
    memset(&edits, 0, sizeof(edits))
    owner = logits_rows(logits, &r, "logits")
    if op == OP_apply_penalties:
        params_owner = fresh_params(&a.params, &one, &r)
        params = <sample_params *>a.params.ptr
        fill_doubles(&params.repetition_penalty, size, r.rows, repetition, "repetition_penalty", FLT_MIN, FLT_MAX)
        fill_doubles(&params.frequency_penalty, size, r.rows, frequency, "frequency_penalty", -FLT_MAX, FLT_MAX)
        fill_doubles(&params.presence_penalty, size, r.rows, presence, "presence_penalty", -FLT_MAX, FLT_MAX)
    kept = fill_edits(&edits, &r, prompt_ids, output_ids, bias, mask)
    a.prompt_ids, a.prompt_offsets = edits.prompt_ids, edits.prompt_offsets
    a.output_ids, a.output_offsets = edits.output_ids, edits.output_offsets
    a.bias_ids, a.bias_values, a.bias_offsets = edits.bias_ids, edits.bias_values, edits.bias_offsets
    a.bias_dense, a.bias_stride = edits.bias_dense, edits.bias_stride
    a.mask, a.mask_kind, a.mask_stride, a.mask_width = edits.mask, edits.mask_kind, edits.mask_stride, edits.mask_width
    written = result = rows_out(out, &r, &a, op == OP_apply_token_bitmask)
    if out is not None:
        written = target(result, &r)
        if op != OP_apply_penalties and np.may_share_memory(written, kept[0]):  # a mask or a dense bias
            written = np.empty_like(written, order="C", subok=False)
    a.x, a.out = rows_span(&r), whole(written)
    a.out_stride = 0 if r.single else cnp.PyArray_STRIDE(written, 0)
    a.rows, a.cols, a.dtype, a.x_stride = r.rows, r.cols, r.dtype, r.stride
    run(op, &a, r.cols)
    if written is not result:
        result[...] = written
    return result


def apply_penalties(logits, *, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, prompt_ids=None,
                    output_ids=None, out=None):
    """The logits as float32, those of ids that have occurred lowered, as sample judges them.

    Each distinct id once: repetition_penalty for ids of prompt_ids and output_ids (positive logits are divided by it,
    others multiplied), then frequency_penalty times the count and presence_penalty for those of output_ids. Penalties:
    one value or one a row. Ids: a list a row, or a 2-D array padded with -1. out: float32 of the same shape; may be
    logits itself, and then only the penalised are written. Raises ValueError, TypeError before anything is written.

    >>> lanewise.apply_penalties(np.float32([2.0, -2.0, 1.0]), repetition_penalty=2.0, prompt_ids=[0, 1])
    array([ 1., -4.,  1.], dtype=float32)
    """
    return edited(OP_apply_penalties, logits, repetition_penalty, frequency_penalty, presence_penalty, prompt_ids,
                  output_ids, None, None, out)


def apply_bias(logits, bias, *, out=None):
    """The logits plus a bias, as float32. bias: {id: value}, one such a row, or a float array (V,) or (B, V).

    out: float32 of the same shape; may be logits itself, and then only the ids named are written. -inf forbids an id.
    Raises ValueError, TypeError before anything is written.

    >>> lanewise.apply_bias(np.float32([1.0, 2.0, 3.0]), {0: 0.5, 2: -np.inf})
    array([ 1.5,  2. , -inf], dtype=float32)
    """
    if bias is None:
        raise TypeError("bias must be {id: value} or a float array, got None")
    return edited(OP_apply_bias, logits, None, None, None, None, None, bias, None, out)


def apply_token_bitmask(logits, mask, *, out=None):
    """The logits as float32, -inf where the mask forbids them. What a short mask does not reach is forbidden.

    mask: bool (V,) or (B, V), True = allowed; or int32 or uint32 words, bit j of word w is id 32 w + j, 1 = allowed.
    out: of the same shape, float32 or the dtype of the logits; may be logits itself, and then nothing far from a
    forbidden id is written. Raises ValueError, TypeError before anything is written.

    >>> lanewise.apply_token_bitmask(np.float32([1.0, 2.0, 3.0]), np.uint32([0b101]))
    array([  1., -inf,   3.], dtype=float32)
    """
    if mask is None:
        raise TypeError("mask must be bool, or int32 or uint32 words, got None")
    return edited(OP_apply_token_bitmask, logits, None, None, None, None, None, None, mask, out)
