# cython: language_level=3, freethreading_compatible=True
"""Logits to tokens. Thin: checks, fills an args struct, runs one kernel for the whole batch."""
cimport numpy as cnp
from libc.float cimport DBL_MAX, FLT_MAX, FLT_MIN
from libc.math cimport INFINITY
from libc.stdint cimport INT64_MAX, INT64_MIN, UINT32_MAX, UINT64_MAX, int64_t, uint64_t
from libc.string cimport memset

import os
from typing import NamedTuple

import numpy as np

from lanewise._arguments cimport (
    dense_bias,
    fill_doubles,
    fill_integers,
    integer,
    is_scalar,
    is_sparse,
    mask_array,
    number,
    per_row,
    ragged_ids,
    sparse_bias,
)
from lanewise._arrays cimport as_array, logits_rows, rows_t
from lanewise._ops cimport *
from lanewise.errors import InvalidLogitsError
from lanewise.params import SamplingParams, Stream

cnp.import_array()

cdef int64_t force_exact = 0


def set_force_exact(bint on):
    """Test hook: operations that have a fast path take the exact one."""
    global force_exact
    force_exact = on


# ---- arrays out ----

cdef inline span whole(cnp.ndarray a):
    cdef span s
    s.ptr, s.bytes = cnp.PyArray_DATA(a), cnp.PyArray_NBYTES(a)
    return s


cdef inline span rows_span(rows_t *r):
    cdef span s
    cdef int64_t width = r.cols * (4 if r.dtype == DTYPE_F32 else 2)
    s.ptr, s.bytes = r.ptr, (r.rows - 1) * abs(r.stride) + width if r.rows else 0
    return s


cdef cnp.ndarray check_out(object out, tuple shape, int dtype, str name):
    cdef cnp.ndarray a
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, got {type(out).__name__}")
    a = out
    if cnp.PyArray_TYPE(a) != dtype or not cnp.PyArray_ISNOTSWAPPED(a):
        raise TypeError(f"{name} must be {cnp.PyArray_DescrFromType(dtype)}, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {out.shape}")
    if not cnp.PyArray_ISWRITEABLE(a):
        raise ValueError(f"{name} is read-only")
    return a


# Whether a kernel may write C order to it as it is, and the logits lie elsewhere.
cdef bint is_direct(cnp.ndarray a, rows_t *r):
    cdef char *x = <char *>r.ptr
    cdef char *y = <char *>cnp.PyArray_DATA(a)
    cdef int64_t reach = (r.rows - 1) * r.stride, width = r.cols * (4 if r.dtype == DTYPE_F32 else 2)
    if not cnp.PyArray_IS_C_CONTIGUOUS(a) or not cnp.PyArray_ISALIGNED(a):
        return False
    return y + cnp.PyArray_NBYTES(a) <= x + min(reach, 0) or x + max(reach, 0) + width <= y


# Where a kernel may write rows of float32: out itself, unless its elements are not adjacent or it overlaps the input
# otherwise than as the same rows. Then an array of its own, to be copied to out afterwards.
cdef cnp.ndarray target(cnp.ndarray out, rows_t *r):
    cdef int axis = cnp.PyArray_NDIM(out) - 1
    cdef int64_t stride = cnp.PyArray_STRIDE(out, 0) if axis else 0
    cdef char *x = <char *>r.ptr
    cdef char *y = <char *>cnp.PyArray_DATA(out)
    cdef int64_t x_size = r.cols * (4 if r.dtype == DTYPE_F32 else 2), y_size = cnp.PyArray_DIM(out, axis) * 4
    cdef int64_t x_reach = (r.rows - 1) * r.stride, y_reach = (r.rows - 1) * stride
    if cnp.PyArray_STRIDE(out, axis) != 4 and cnp.PyArray_DIM(out, axis) > 1 or not cnp.PyArray_ISALIGNED(out):
        return np.empty_like(out, order="C", subok=False)
    if x == y and r.dtype == DTYPE_F32 and (stride == r.stride or r.rows == 1) and abs(stride) >= (x_size if axis else 0):
        return out
    if (x + min(x_reach, 0) < y + max(y_reach, 0) + y_size) and (y + min(y_reach, 0) < x + max(x_reach, 0) + x_size):
        return np.empty_like(out, order="C", subok=False)
    return out


# ---- softmax and its kin ----

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
    a.rows, a.cols, a.dtype, a.x_stride = r.rows, r.cols, r.dtype, r.stride
    run(op, &a, r.cols)
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


# ---- choosing ----

cdef object choose(object tokens, bint single, object on_invalid):
    if on_invalid == "raise":
        if single:
            if tokens[0] < 0:
                raise InvalidLogitsError([0], -1)
        elif tokens.size and tokens.min() < 0:
            raise InvalidLogitsError(np.flatnonzero(tokens < 0).tolist(), tokens)
    return int(tokens[0]) if single else tokens


cdef int check_on_invalid(object on_invalid) except -1:
    if on_invalid != "raise" and on_invalid != "mark":
        raise ValueError(f"on_invalid must be 'raise' or 'mark', got {on_invalid!r}")
    return 0


cdef int check_ties(object ties) except -1:
    if ties != "lowest" and ties != "all":
        raise ValueError(f"ties must be 'lowest' or 'all', got {ties!r}")
    return ties == "all"


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
    if out is not None and tokens is not out:
        out[...] = tokens
    return choose(tokens if out is None else out, r.single, on_invalid)


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
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise TypeError(f"out must be (values, ids), got {type(out).__name__}")
        shape = () if r.single else (r.rows,)
        shape += (width,)
        check_out(out[0], shape, cnp.NPY_FLOAT32, "out[0]")
        check_out(out[1], shape, cnp.NPY_INT64, "out[1]")
    a.x = rows_span(&r)
    a.rows, a.cols, a.dtype, a.x_stride, a.k, a.force_exact = r.rows, r.cols, r.dtype, r.stride, width, force_exact
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
    run(OP_top_k, a, a.cols)
    for i in range(a.rows):
        if entries[i] < 0:
            return values, ids, -1
        widest = max(widest, entries[i])
    return values, ids, widest


# ---- sample ----

class Support(NamedTuple):
    """What truncation left of each row: row r has ids[indptr[r]:indptr[r + 1]], descending, with logprobs."""

    ids: np.ndarray
    logprobs: np.ndarray
    indptr: np.ndarray


PRESETS = {  # the order of the steps, as each of these has it (docs/sampling.md)
    "transformers": ("temperature", "top_k", "top_p", "min_p"),
    "vllm": ("temperature", "min_p", "top_k", "top_p"),
    "llama.cpp": ("top_k", "top_p", "min_p", "temperature"),
    "mlx-lm": ("top_p", "min_p", "top_k", "temperature"),
}
_STEPS = {"temperature": STEP_TEMPERATURE, "top_k": STEP_TOP_K, "top_p": STEP_TOP_P, "min_p": STEP_MIN_P}


cdef int fill_steps(int64_t *steps, object preset) except -1:
    cdef int i = 0
    if isinstance(preset, str):
        names = PRESETS.get(preset)
        if names is None:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)} or a sequence of steps, got {preset!r}")
    else:
        if not isinstance(preset, (list, tuple)):
            raise TypeError(f"preset must be a name or a list of steps, got {preset!r}")
        names = tuple(preset)
        if "temperature" not in names or len(set(names)) != len(names) or not set(names) <= set(_STEPS):
            raise ValueError("preset must name 'temperature' and any of 'top_k', 'top_p', 'min_p', each once, "
                             f"got {names}")
    for name in names:
        steps[i] = _STEPS[name]
        i += 1
    return 0


# Which noise each row uses: seed, key and step, or u.
cdef int fill_draw(sample_params *p, rows_t *r, object seed, object step, object keys, object u, object rng) except -1:
    cdef int64_t size = sizeof(sample_params), i
    cdef bint one_seed = True
    if (seed is not None) + (rng is not None) + (u is not None) > 1:
        raise ValueError("give one of seed, rng and u")
    if u is not None:
        if step is not None or keys is not None:
            raise ValueError("step and keys go with seed or rng, not with u")
        return fill_doubles(&p.u, size, r.rows, u, "u", 0.0, 1.0 - 2.0 ** -53)
    if rng is not None:
        if step is not None:
            raise ValueError("step comes from rng; give one of them")
        seed, step = rng.seed, rng.step
        if step > UINT32_MAX:
            raise ValueError(f"{rng!r} has used up its steps")
    elif seed is None:
        if step is not None:
            raise ValueError("step needs seed")
        seed, step = entropy(), 0
    elif step is None:
        raise ValueError("seed needs step=, or a loop would reuse its noise; rng=lanewise.Stream(seed) counts by itself")
    elif not is_scalar(seed):
        one_seed = False
        seed = [entropy() if s is None else s for s in per_row(seed, "seed", r.rows)]
    fill_integers(&p.seed, size, r.rows, seed, "seed", 0, UINT64_MAX)
    fill_integers(&p.step, size, r.rows, step, "step", 0, UINT32_MAX)
    if keys is not None:
        return fill_integers(&p.key, size, r.rows, keys, "keys", 0, UINT64_MAX)
    for i in range(r.rows):
        p[i].key = i if one_seed else 0
    return 0


cdef object entropy():
    return int.from_bytes(os.urandom(8), "little")


# Numbers of SamplingParams, one for all rows or a list, one a row; a keyword beside them is an error.
cdef list from_params(object params, list given, int64_t count):
    rows = [params] if isinstance(params, SamplingParams) else list(params) if isinstance(params, (list, tuple)) else None
    if rows is None or not all(isinstance(row, SamplingParams) for row in rows):
        raise TypeError(f"params must be a SamplingParams or a list of them, one a row, got {params!r}")
    if not isinstance(params, SamplingParams) and len(rows) != count:
        raise ValueError(f"params must be one or one a row: {count} rows, got {len(rows)}")
    for name, value in zip(PARAMETERS, given):
        if not (is_scalar(value) and value == getattr(_DEFAULTS, name)):
            raise ValueError(f"{name} is given in params and as a keyword")
    if isinstance(params, SamplingParams):
        return [getattr(params, name) for name in PARAMETERS]
    return [[getattr(row, name) for row in rows] for name in PARAMETERS]


PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "min_keep", "repetition_penalty", "frequency_penalty",
              "presence_penalty")
_DEFAULTS = SamplingParams()


cdef int fill_numbers(sample_params *p, int64_t rows, object temperature, object top_k, object top_p, object min_p,
                      object min_keep, object repetition_penalty, object frequency_penalty,
                      object presence_penalty) except -1:
    cdef int64_t size = sizeof(sample_params)
    fill_doubles(&p.temperature, size, rows, temperature, "temperature", 0.0, DBL_MAX)
    fill_integers(&p.top_k, size, rows, top_k, "top_k", INT64_MIN, INT64_MAX)
    fill_doubles(&p.top_p, size, rows, top_p, "top_p", -INFINITY, INFINITY)
    fill_doubles(&p.min_p, size, rows, min_p, "min_p", 0.0, 1.0)
    fill_integers(&p.min_keep, size, rows, min_keep, "min_keep", 0, INT64_MAX)
    fill_doubles(&p.repetition_penalty, size, rows, repetition_penalty, "repetition_penalty", FLT_MIN, FLT_MAX)
    fill_doubles(&p.frequency_penalty, size, rows, frequency_penalty, "frequency_penalty", -FLT_MAX, FLT_MAX)
    fill_doubles(&p.presence_penalty, size, rows, presence_penalty, "presence_penalty", -FLT_MAX, FLT_MAX)
    return 0


# Bias, penalties and masks of a call; returns what the spans point into.
cdef list fill_edits(sample_args *a, rows_t *r, object prompt_ids, object output_ids, object bias, object mask):
    kept = []
    if prompt_ids is not None:
        ids, offsets = ragged_ids(prompt_ids, "prompt_ids", r)
        kept += ids, offsets
        a.prompt_ids, a.prompt_offsets = whole(ids), whole(offsets)
    if output_ids is not None:
        ids, offsets = ragged_ids(output_ids, "output_ids", r)
        kept += ids, offsets
        a.output_ids, a.output_offsets = whole(ids), whole(offsets)
    if bias is not None and is_sparse(bias):
        ids, values, offsets = sparse_bias(bias, r)
        kept += ids, values, offsets
        a.bias_ids, a.bias_values, a.bias_offsets = whole(ids), whole(values), whole(offsets)
    elif bias is not None:
        values = dense_bias(bias, r)
        kept.append(values)
        a.bias_values, a.bias_dense = whole(values), 1
        a.bias_stride = r.cols * 4 if values.ndim == 2 else 0
    if mask is not None:
        words = mask_array(mask, r)
        is_bool = words.dtype == np.bool_
        kept.append(words)
        a.mask, a.mask_kind = whole(words), MASK_BOOL if is_bool else MASK_BITS
        a.mask_width = words.shape[words.ndim - 1] * (1 if is_bool else 32)
        a.mask_stride = words.strides[0] if words.ndim == 2 else 0
    return kept


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
    a.ties_all = check_ties(ties)
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
    a.has_u, a.force_exact = u is not None, force_exact
    edits = fill_edits(&a, &r, prompt_ids, output_ids, bias, mask)
    tokens = None
    if r.single and out is None:
        a.tokens.ptr, a.tokens.bytes = &token, sizeof(token)
    else:
        tokens = tokens_out(out, &r)
        a.tokens = whole(tokens)
    support = None
    if return_support:  # room for everything; only what is kept is ever touched
        support = Support(np.empty(r.rows * r.cols, np.int64), np.empty(r.rows * r.cols, np.float32),
                          np.zeros(r.rows + 1, np.int64))
        a.support_ids, a.support_logprobs, a.support_offsets = (whole(support.ids), whole(support.logprobs),
                                                                whole(support.indptr))
    if rng is None:
        fill_draw(p, &r, seed, step, keys, u, rng)
        run(OP_sample, &a, r.cols)
    else:
        if not isinstance(rng, Stream):
            raise TypeError(f"rng must be a lanewise.Stream, got {type(rng).__name__}")
        with rng:
            fill_draw(p, &r, seed, step, keys, u, rng)
            run(OP_sample, &a, r.cols)
            rng.step += 1
    if tokens is None:
        if token < 0 and on_invalid == "raise":
            raise InvalidLogitsError([0], -1)
        result = token
    else:
        if out is not None and tokens is not out:
            out[...] = tokens
        result = choose(tokens if out is None else out, r.single, on_invalid)
    if support is None:
        return result
    total = int(support.indptr[r.rows])
    return result, Support(support.ids[:total].copy(), support.logprobs[:total].copy(), support.indptr)
