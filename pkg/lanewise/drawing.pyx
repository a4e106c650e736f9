# cython: language_level=3, freethreading_compatible=True
"""Draws beside sample, with its noise: from probabilities, several ids at once, a draw once more, a part of a row."""
cimport numpy as cnp
from libc.float cimport DBL_MAX
from libc.stdint cimport UINT32_MAX, UINT64_MAX, int64_t
from libc.string cimport memset

import numpy as np

from lanewise._arguments cimport check_on_invalid, fill_integers, integer, is_scalar, number, ties_of_steps
from lanewise._arrays cimport as_array, check_out, is_direct, logits_rows, rows_span, rows_t, whole
from lanewise._ops cimport *
from lanewise._settings cimport draw, fill_edits, fill_numbers, fill_steps, from_params
from lanewise.errors import REASON, InvalidLogitsError
from lanewise.values import scale

cnp.import_array()

PROBS_REASON = "a NaN, a negative or +inf among the probabilities, or nothing above 0"


# ---- what the calls have in common ----


cdef object rows_of(object x, rows_t *r, str name, object vocab_size):
    owner = logits_rows(x, r, name)
    if vocab_size is not None:
        r.cols = integer(vocab_size, "vocab_size", 1, r.cols)
    if r.cols > SAMPLE_MAX_VOCAB:
        raise ValueError(f"{name} may have up to {SAMPLE_MAX_VOCAB} ids a row, got {r.cols}")
    return owner


# Numbers for each row, zero; NumPy sees when there are too many.
cdef cnp.ndarray params_of(rows_t *r, span *params):
    cdef cnp.ndarray made = np.zeros((r.rows, sizeof(sample_params)), np.uint8)
    params[0] = whole(made)
    return made


# What sample_n and verify are told as sample is; returns what the spans point into.
cdef list fill_sample(sample_args *a, rows_t *r, object logits, object params, list numbers, list edits,
                      object vocab_size, object ties, object preset):
    memset(a, 0, sizeof(a[0]))
    a.ties_all = ties_of_steps(ties)
    fill_steps(a.steps, preset)
    kept = [rows_of(logits, r, "logits", vocab_size), params_of(r, &a.params)]
    if params is not None:
        numbers = from_params(params, numbers, r.rows)
    (temperature, top_k, top_p, min_p, min_keep, repetition_penalty, frequency_penalty, presence_penalty) = numbers
    fill_numbers(<sample_params *>a.params.ptr, r.rows, temperature, top_k, top_p, min_p, min_keep,
                 repetition_penalty, frequency_penalty, presence_penalty)
    a.x, a.rows, a.cols, a.dtype, a.x_stride = rows_span(r), r.rows, r.cols, r.dtype, r.stride
    a.force_exact = force_exact()
    prompt_ids, output_ids, bias, mask = edits
    return kept + fill_edits(a, r, prompt_ids, output_ids, bias, mask)


# Where a kernel writes its results: `out`, if it will do.
cdef cnp.ndarray room_for(object out, rows_t *r, tuple columns, int dtype):
    cdef tuple shape = columns if r.single else (r.rows,) + columns
    if out is not None:
        if not shape:
            raise ValueError("out is for (B, V); (V,) gives a number")
        check_out(out, shape, dtype, "out")
        if is_direct(out, r):
            return out
    return np.empty(shape, np.int64 if dtype == cnp.NPY_INT64 else np.float64)


# Rows whose first result is an id of -1, or a NaN.
cdef list invalid_rows(cnp.ndarray results, int64_t rows):
    cdef int64_t i, width = cnp.PyArray_SIZE(results) // rows if rows else 0
    cdef int64_t *ids = <int64_t *>cnp.PyArray_DATA(results)
    cdef double *values = <double *>cnp.PyArray_DATA(results)
    if cnp.PyArray_TYPE(results) == cnp.NPY_INT64:
        return [i for i in range(rows) if ids[i * width] < 0]
    return [i for i in range(rows) if values[i] != values[i]]


cdef object delivered(cnp.ndarray results, object out, rows_t *r, object on_invalid, str reason):
    result = results
    if out is not None:
        if results is not out:
            out[...] = results
        result = out
    elif cnp.PyArray_NDIM(results) == 0:
        result = results.item()
    if on_invalid == "raise":
        invalid = invalid_rows(results, r.rows)
        if invalid:
            raise InvalidLogitsError(invalid, result, reason)
    return result


# ---- the calls ----


def sample_n(logits, n, params=None, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, min_keep=1,
             repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, prompt_ids=None, output_ids=None,
             bias=None, mask=None, seed=None, step=None, keys=None, rng=None, vocab_size=None, ties="lowest",
             preset="transformers", on_invalid="raise", out=None):
    """n different ids a row, 1 <= n <= V, drawn one after the other without replacement: int64 (n,) or (B, n).

    They are the n highest scores in descending order, so the first is the token of sample. Where truncations and mask
    leave fewer, -1 follows them. At temperature 0 they are the n largest logits. Arguments and errors as in sample;
    out: int64, the shape of the result.
    Gumbel-top-k: Kool, van Hoof & Welling, arXiv 1903.06059.

    >>> logits = np.log(np.float32([0.1, 0.2, 0.7]))
    >>> lanewise.sample_n(logits, 3, top_k=2, seed=1, step=0)
    array([ 2,  1, -1])
    """
    cdef rows_t r
    cdef sample_args a
    check_on_invalid(on_invalid)
    owners = fill_sample(&a, &r, logits, params, [temperature, top_k, top_p, min_p, min_keep, repetition_penalty,
                                                  frequency_penalty, presence_penalty],
                         [prompt_ids, output_ids, bias, mask], vocab_size, ties, preset)
    a.n = integer(n, "n", 1, r.cols)
    ids = room_for(out, &r, (a.n,), cnp.NPY_INT64)
    a.tokens = whole(ids)
    draw(OP_sample_n, &a, a.params.ptr, &r, 0, seed, step, keys, None, rng)
    return delivered(ids, out, &r, on_invalid, REASON)


def verify(logits, params=None, *, token, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, min_keep=1,
           repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, prompt_ids=None, output_ids=None,
           bias=None, mask=None, seed, step, keys=None, vocab_size=None, ties="lowest", preset="transformers",
           on_invalid="raise", out=None):
    """Draws again and tells by how much `token` won, or, if negative, lost: a float for (V,), float64 (B,) for (B, V).

    The margin is the token's score, logit / temperature + noise, less the best score of the other ids that the
    truncations leave: +inf if there are none, -inf if the token is not left itself; 0 is a tie, which the lowest id
    wins. At temperature 0 scores are logits, of all that is allowed. token: one or one a row. Other arguments and
    errors as in sample; an invalid row has the margin NaN.

    >>> logits = np.log(np.float32([0.1, 0.2, 0.7]))
    >>> token = lanewise.sample(logits, seed=1, step=0)
    >>> lanewise.verify(logits, token=token, seed=1, step=0) > 0
    True
    """
    cdef rows_t r
    cdef sample_args a
    check_on_invalid(on_invalid)
    if seed is None or not is_scalar(seed) and isinstance(seed, (list, tuple)) and None in seed:
        raise ValueError("verify needs the seed of every row, got None")
    owners = fill_sample(&a, &r, logits, params, [temperature, top_k, top_p, min_p, min_keep, repetition_penalty,
                                                  frequency_penalty, presence_penalty],
                         [prompt_ids, output_ids, bias, mask], vocab_size, ties, preset)
    tokens = np.empty(r.rows, np.int64)
    a.tokens = whole(tokens)
    fill_integers(a.tokens.ptr, sizeof(int64_t), r.rows, token, "token", 0, r.cols - 1)
    margins = room_for(out, &r, (), cnp.NPY_FLOAT64)
    a.margins = whole(margins)
    draw(OP_verify, &a, a.params.ptr, &r, 0, seed, step, keys, None, None)
    return delivered(margins, out, &r, on_invalid, REASON)


def sample_from_probs(probs, *, n=None, seed=None, step=None, keys=None, rng=None, u=None, noise=None,
                      on_invalid="raise", out=None):
    """One id a row from probabilities, which need not sum to 1: an int for (V,), int64 (B,) for (B, V).

    With n, that many different ids, drawn without replacement, -1 behind them where fewer are above 0: int64 (n,) or
    (B, n). An id of probability 0 is never drawn. seed, step, keys, rng and u as in sample; u draws one id.
    noise: exponentials of your own, (V,) or as probs; the largest p / noise wins, what is below 2^-126 counting as that.
    A row with a NaN, a negative or +inf, or with nothing above 0, is InvalidLogitsError, or -1 with on_invalid="mark".
    Raises ValueError, TypeError.

    >>> lanewise.sample_from_probs(np.float32([0.0, 3.0, 1.0]), u=0.8)
    2
    """
    cdef rows_t r
    cdef probs_args a
    check_on_invalid(on_invalid)
    if u is not None and n is not None:
        raise ValueError("u draws one id; give one of n and u")
    owner = rows_of(probs, &r, "probs", None)
    if noise is not None:
        if not (n is None and seed is None and step is None and keys is None and rng is None and u is None):
            raise ValueError("noise draws one id by itself; give it without n, seed, step, keys, rng and u")
        ids = room_for(out, &r, (), cnp.NPY_INT64)
        race(ids, owner, &r, noise)
        return delivered(ids, out, &r, on_invalid, PROBS_REASON)
    params = params_of(&r, &a.params)
    a.x, a.rows, a.first_row, a.cols, a.dtype, a.x_stride = rows_span(&r), r.rows, 0, r.cols, r.dtype, r.stride
    a.n, a.has_u = 1 if n is None else integer(n, "n", 1, r.cols), u is not None
    ids = room_for(out, &r, () if n is None else (a.n,), cnp.NPY_INT64)
    a.ids = whole(ids)
    draw(OP_sample_from_probs, &a, a.params.ptr, &r, 0, seed, step, keys, u, rng)
    return delivered(ids, out, &r, on_invalid, PROBS_REASON)


# The winners of p / noise; -1 for rows that are no probabilities. In float64 nothing above 0 becomes 0.
cdef int race(cnp.ndarray ids, object owner, rows_t *r, object noise) except -1:
    times = as_array(noise, "noise")
    if times.dtype.kind != "f":
        raise TypeError(f"noise must be floats, got {times.dtype}")
    if times.shape not in ((r.cols,), owner.shape):
        raise ValueError(f"noise must have shape {(r.cols,)} or {owner.shape}, got {times.shape}")
    if not (times >= 0).all():
        at = tuple(int(i) for i in np.argwhere(~(times >= 0))[0])
        raise ValueError(f"noise{list(at)} is {times[at]}; it must be at least 0")
    for i in range(r.rows):
        p = scale(owner if r.single else owner[i], 1.0).astype(np.float64)
        if not ((p >= 0).all() and 0 < p.max() < np.inf):
            ids[() if r.single else i] = -1
            continue
        speeds = p / np.maximum((times if times.ndim == 1 else times[i]).astype(np.float64), 2.0 ** -126)
        ids[() if r.single else i] = np.where(p > 0, speeds, -1.0).argmax()
    return 0


def draw_tile(tile, first_id, *, temperature, seed, step, key=0):
    """SampleState's: (hi, lo, id) of the best score among the ids that `tile` has the logits of, from first_id on.

    The score is hi + lo; of several tiles the best one's id is the row's token. A tile with nothing above -inf gives
    (-inf, 0, -1), one with a NaN or +inf gives (nan, 0, -1).

    >>> hi, lo, id_ = lanewise.drawing.draw_tile(np.zeros(3, np.float32), 100, temperature=1.0, seed=1, step=0)
    >>> id_ in (100, 101, 102)
    True
    """
    cdef rows_t r
    cdef tile_args a
    cdef double score[2]
    cdef int64_t token
    owner = logits_rows(tile, &r, "tile")
    if not r.single:
        raise ValueError(f"tile must have one axis, got shape {owner.shape}")
    a.first = integer(first_id, "first_id", 0, SAMPLE_MAX_VOCAB)
    if a.first + r.cols > SAMPLE_MAX_VOCAB:
        raise ValueError(f"ids must be below {SAMPLE_MAX_VOCAB}, got {r.cols} from {first_id} on")
    a.temperature = number(temperature, "temperature", 0.0, DBL_MAX)
    a.seed, a.key = integer(seed, "seed", 0, UINT64_MAX), integer(key, "key", 0, UINT64_MAX)
    a.step = integer(step, "step", 0, UINT32_MAX)
    a.x, a.rows, a.first_row, a.cols, a.dtype = rows_span(&r), 1, 0, a.first + r.cols, r.dtype
    a.score.ptr, a.score.bytes, a.token.ptr, a.token.bytes = score, sizeof(score), &token, sizeof(token)
    run(OP_draw_tile, &a, a.cols)
    return score[0], score[1], token
