# cython: language_level=3, freethreading_compatible=True
"""Logits to tokens. Thin: checks, fills an args struct, runs one kernel for the whole batch."""
cimport numpy as cnp
from libc.stdint cimport UINT32_MAX, int64_t
from libc.string cimport memset

from typing import NamedTuple

import numpy as np

from lanewise._arguments cimport check_on_invalid, check_ties, integer, ties_of_steps
from lanewise._arrays cimport check_out, is_direct, logits_rows, outs_of, rows_span, rows_t, whole
from lanewise._ops cimport *
from lanewise._settings cimport draw, fill_edits, fill_numbers, fill_steps, from_params
from lanewise._settings import PARAMETERS, PRESETS
from lanewise.errors import InvalidLogitsError

cnp.import_array()


# ---- choosing ----

cdef object chosen(object tokens, int64_t token, object out, bint single, object on_invalid):
    if tokens is None:
        if token < 0 and on_invalid == "raise":
            raise InvalidLogitsError([0], -1)
        return token
    if out is not None and tokens is not out:
        out[...] = tokens
    tokens = tokens if out is None else out
    if on_invalid == "raise":
        if single:
            if tokens[0] < 0:
                raise InvalidLogitsError([0], -1)
        elif tokens.size and tokens.min() < 0:
            raise InvalidLogitsError(np.flatnonzero(tokens < 0).tolist(), tokens)
    return int(tokens[0]) if single else tokens


cdef object tokens_out(object out, rows_t *r):
    if out is None:
        return np.empty(r.rows, np.int64)
    if r.single:
        raise ValueError("out is for (B, V) logits; (V,) gives an int")
    check_out(out, (r.rows,), cnp.NPY_INT64, "out")
    return out if is_direct(out, r) else np.empty(r.rows, np.int64)


def argmax(logits, *, on_invalid="raise", out=None):
    """The first of the largest logits: an int for (V,), int64 (B,) for (B, V).

    A row with a NaN or +inf, or all -inf, is InvalidLogitsError, or -1 with on_invalid="mark". out: int64 (B,).
    Raises ValueError, TypeError.

    >>> lanewise.argmax(np.float32([1.0, 3.0, 3.0]))
    1
    """
    cdef rows_t r
    cdef top_k_args a
    check_on_invalid(on_invalid)
    owner = logits_rows(logits, &r, "logits")
    tokens = tokens_out(out, &r)
    status = np.empty(r.rows, np.int64)
    memset(&a, 0, sizeof(a))
    a.x, a.ids, a.status = rows_span(&r), whole(tokens), whole(status)
    a.rows, a.cols, a.dtype, a.x_stride, a.k, a.width = r.rows, r.cols, r.dtype, r.stride, 1, 1
    run(OP_argmax, &a, r.cols)
    return chosen(tokens, -1, out, r.single, on_invalid)


def top_k(logits, k, *, ties="lowest", out=None):
    """The k largest logits, 1 <= k <= V, descending, ties by ascending id: (values float32, ids int64), (k,) or (B, k).

    ties="all" also gives whatever equals the k-th value; rows with fewer such end in (-inf, -1). -inf and +inf are
    values like others; a row with a NaN has no order: its ids are -1 and InvalidLogitsError follows the other rows.
    out: (values, ids), k wide.
    Raises ValueError, TypeError.

    >>> values, ids = lanewise.top_k(np.float32([1.0, 5.0, 3.0, 5.0]), 2)
    >>> values.tolist(), ids.tolist()
    ([5.0, 5.0], [1, 3])
    """
    cdef rows_t r
    cdef top_k_args a
    cdef int64_t width, widest
    cdef tuple shape
    memset(&a, 0, sizeof(a))
    a.ties_all = check_ties(ties)
    owner = logits_rows(logits, &r, "logits")
    width = integer(k, "k", 1, r.cols)
    if r.cols > UINT32_MAX:
        raise ValueError(f"top_k takes up to {UINT32_MAX} columns, got {r.cols}")
    if out is not None:
        out = outs_of(out, 2, "(values, ids)")
        shape = () if r.single else (r.rows,)
        shape += (width,)
        check_out(out[0], shape, cnp.NPY_FLOAT32, "out[0]")
        check_out(out[1], shape, cnp.NPY_INT64, "out[1]")
    a.x = rows_span(&r)
    a.rows, a.cols, a.dtype, a.x_stride, a.k, a.force_exact = r.rows, r.cols, r.dtype, r.stride, width, force_exact()
    direct = out is not None and not a.ties_all and is_direct(out[0], &r) and is_direct(out[1], &r)
    values, ids, widest = run_top_k(&a, width, r.single, out if direct else None)
    if widest > width:
        if out is not None:
            raise ValueError(f"out holds {width} entries a row, but with ties='all' a row has {widest}")
        values, ids, widest = run_top_k(&a, widest, r.single, None)
    if out is not None and not direct:
        out[0][...], out[1][...] = values, ids
        values, ids = out
    if widest < 0:
        invalid = [0] if r.single else np.flatnonzero(ids[:, 0] < 0).tolist()
        raise InvalidLogitsError(invalid, ids, "a NaN has no place in the order")
    return values, ids


# (values, ids, the widest row's entries; -1 if a row is invalid)
cdef tuple run_top_k(top_k_args *a, int64_t width, bint single, object out):
    cdef int64_t widest = 0, one = 0, i
    cdef cnp.npy_intp shape[2]
    cdef int64_t *entries = &one
    shape[0], shape[1] = a.rows, width
    if out is None:
        values = cnp.PyArray_EMPTY(1 if single else 2, &shape[single], cnp.NPY_FLOAT32, 0)
        ids = cnp.PyArray_EMPTY(1 if single else 2, &shape[single], cnp.NPY_INT64, 0)
    else:
        values, ids = out
    a.width, a.values, a.ids = width, whole(values), whole(ids)
    if a.rows != 1:
        status = cnp.PyArray_EMPTY(1, shape, cnp.NPY_INT64, 0)
        entries = <int64_t *>cnp.PyArray_DATA(<cnp.ndarray>status)
    a.status.ptr, a.status.bytes = entries, a.rows * sizeof(int64_t)
    run(OP_top_k, a, a.cols, 2 * a.cols + 20000)
    for i in range(a.rows):
        if entries[i] < 0:
            return values, ids, -1
        widest = max(widest, entries[i])
    return values, ids, widest


# ---- sample ----

class Support(NamedTuple):
    """What truncation left of each row: row r has ids[indptr[r]:indptr[r + 1]], ascending, with logprobs."""

    ids: np.ndarray
    logprobs: np.ndarray
    indptr: np.ndarray


def sample(logits, params=None, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, min_keep=1, repetition_penalty=1.0,
           frequency_penalty=0.0, presence_penalty=0.0, prompt_ids=None, output_ids=None, bias=None, mask=None,
           seed=None, step=None, keys=None, rng=None, u=None, vocab_size=None, ties="lowest", preset="transformers",
           return_support=False, on_invalid="raise", out=None):
    """One token a row: an int for logits (V,), int64 (B,) for (B, V); V up to 1,048,576.

    Bias, penalties and mask are applied first, then the steps of `preset`; every parameter is one value or one a row.
    temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: probabilities. min_keep: what every truncation leaves.
    prompt_ids, output_ids: a list of ids a row, or a 2-D array padded with -1. bias: {id: value} or an array.
    mask: bool, or words of 32 ids, 1 = allowed. seed (with step, keys), rng=Stream(seed) or u in [0, 1); else fresh
    entropy. return_support: also Support(ids, logprobs, indptr). on_invalid: "raise" InvalidLogitsError, or "mark"
    such rows with -1. Raises ValueError, TypeError before anything is written.
    Gumbel-max, lazily from a tree of maxima: Maddison, Tarlow & Minka, arXiv 1411.0030.

    >>> logits = np.log(np.float32([0.1, 0.2, 0.7]))
    >>> lanewise.sample(logits, temperature=0.7, top_p=0.9, seed=1, step=0)
    2
    """
    cdef rows_t r
    cdef sample_args a
    cdef sample_params one
    cdef sample_params *p = &one
    cdef int64_t token
    check_on_invalid(on_invalid)
    memset(&a, 0, sizeof(a))
    a.ties_all = ties_of_steps(ties)
    fill_steps(a.steps, preset)
    owner = logits_rows(logits, &r, "logits")
    if vocab_size is not None:
        r.cols = integer(vocab_size, "vocab_size", 1, r.cols)
    if r.cols > SAMPLE_MAX_VOCAB:
        raise ValueError(f"sample takes up to {SAMPLE_MAX_VOCAB} ids, got {r.cols}")
    if r.rows != 1:
        rows_params = np.empty((r.rows, sizeof(sample_params)), np.uint8)  # NumPy sees when that is too much
        p = <sample_params *>cnp.PyArray_DATA(rows_params)
    if params is not None:
        (temperature, top_k, top_p, min_p, min_keep, repetition_penalty, frequency_penalty,
         presence_penalty) = from_params(params, [temperature, top_k, top_p, min_p, min_keep, repetition_penalty,
                                                  frequency_penalty, presence_penalty], r.rows)
    fill_numbers(p, r.rows, temperature, top_k, top_p, min_p, min_keep, repetition_penalty, frequency_penalty,
                 presence_penalty)
    a.x, a.params.ptr, a.params.bytes = rows_span(&r), p, r.rows * sizeof(sample_params)
    a.rows, a.cols, a.dtype, a.x_stride = r.rows, r.cols, r.dtype, r.stride
    a.has_u, a.force_exact = u is not None, force_exact()
    edits = fill_edits(&a, &r, prompt_ids, output_ids, bias, mask)
    tokens = None
    if r.single and out is None:
        a.tokens.ptr, a.tokens.bytes = &token, sizeof(token)
    else:
        tokens = tokens_out(out, &r)
        a.tokens = whole(tokens)
    room = None
    if return_support:  # for everything; only what is kept is ever touched
        room = np.empty((r.rows, r.cols), np.int64), np.empty((r.rows, r.cols), np.float32), np.empty(r.rows, np.int64)
        a.support_ids, a.support_logprobs, a.support_counts = whole(room[0]), whole(room[1]), whole(room[2])
    draw(OP_sample, &a, p, &r, 2 * r.cols + 20000, seed, step, keys, u, rng)
    result = chosen(tokens, token, out, r.single, on_invalid)
    return result if room is None else (result, support_of(room))


cdef object support_of(tuple room):
    ids, logprobs, counts = room
    indptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    return Support(packed(ids, counts), packed(logprobs, counts), indptr)


# The first counts[r] entries of every row, one after the other; those of a single row as they lie, if they are a
# quarter of it: a copy of many takes as long as finding them.
cdef object packed(object rows, object counts):
    if len(counts) == 1 and 4 * counts[0] >= rows.shape[1]:
        return rows[0, :counts[0]]
    return np.concatenate([row[:count] for row, count in zip(rows, counts.tolist())] or [rows.reshape(-1)])
