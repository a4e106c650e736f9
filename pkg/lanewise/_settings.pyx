# cython: language_level=3, freethreading_compatible=True
"""What a call of sample or its kin is told, into its args struct: steps, numbers, edits, noise."""
cimport numpy as cnp
from libc.float cimport DBL_MAX, FLT_MAX, FLT_MIN
from libc.math cimport INFINITY
from libc.stdint cimport INT64_MAX, INT64_MIN, UINT32_MAX, UINT64_MAX, int64_t, uint64_t

import os

import numpy as np

from lanewise._arguments cimport (
    dense_bias,
    fill_doubles,
    fill_integers,
    is_scalar,
    is_sparse,
    mask_array,
    per_row,
    ragged_ids,
    sparse_bias,
)
from lanewise._arrays cimport rows_t, whole
from lanewise._ops cimport *
from lanewise.stream cimport Stream
from lanewise.params import SamplingParams

cnp.import_array()

PRESETS = {  # the order of the steps, as each of these has it (docs/sampling.md)
    "transformers": ("temperature", "top_k", "top_p", "min_p"),
    "vllm": ("temperature", "min_p", "top_k", "top_p"),
    "llama.cpp": ("top_k", "top_p", "min_p", "temperature"),
    "mlx-lm": ("top_p", "min_p", "top_k", "temperature"),
}
_STEPS = {"temperature": STEP_TEMPERATURE, "top_k": STEP_TOP_K, "top_p": STEP_TOP_P, "min_p": STEP_MIN_P}


cdef tuple codes_of(tuple names):
    return tuple([_STEPS[name] for name in names])


_CODES = {preset: codes_of(names) for preset, names in PRESETS.items()}


cdef int fill_steps(int64_t *steps, object preset) except -1:
    cdef int i = 0
    cdef tuple names, codes
    if isinstance(preset, str):
        codes = _CODES.get(preset)
        if codes is None:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)} or a sequence of steps, got {preset!r}")
    else:
        if not isinstance(preset, (list, tuple)):
            raise TypeError(f"preset must be a name or a list of steps, got {preset!r}")
        names = tuple(preset)
        if "temperature" not in names or len(set(names)) != len(names) or not set(names) <= set(_STEPS):
            raise ValueError("preset must name 'temperature' and any of 'top_k', 'top_p', 'min_p', each once, "
                             f"got {names}")
        codes = codes_of(names)
    for code in codes:
        steps[i] = code
        i += 1
    return 0


cdef int fill_draw(sample_params *p, rows_t *r, object seed, object step, object keys, object u, Stream rng) except -1:
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
        if rng.step > UINT32_MAX:
            raise ValueError(f"{rng!r} has used up its steps")
        for i in range(r.rows):
            p[i].seed, p[i].step = rng.seed, rng.step
    elif seed is None:
        if step is not None:
            raise ValueError("step needs seed")
        seed, step = entropy(), 0
    elif step is None:
        raise ValueError("seed needs step=, or a loop would reuse its noise; rng=lanewise.Stream(seed) counts by itself")
    elif not is_scalar(seed):
        one_seed = False
        seed = [entropy() if s is None else s for s in per_row(seed, "seed", r.rows)]
    if rng is None:
        fill_integers(&p.seed, size, r.rows, seed, "seed", 0, UINT64_MAX)
        fill_integers(&p.step, size, r.rows, step, "step", 0, UINT32_MAX)
    if keys is not None:
        return fill_integers(&p.key, size, r.rows, keys, "keys", 0, UINT64_MAX)
    for i in range(r.rows):
        p[i].key = i if one_seed else 0
    return 0


cdef int draw(int op, const void *args, void *params, rows_t *r, int64_t row_work, object seed, object step, object keys,
              object u, object rng) except -1:
    cdef sample_params *p = <sample_params *>params
    cdef Stream stream
    if rng is None:
        fill_draw(p, r, seed, step, keys, u, None)
        return run(op, args, r.cols, row_work)
    if not isinstance(rng, Stream):
        raise TypeError(f"rng must be a lanewise.Stream, got {type(rng).__name__}")
    stream = rng
    stream.enter()
    try:
        fill_draw(p, r, seed, step, keys, u, stream)
        run(op, args, r.cols, row_work)
        stream.step += 1
    finally:
        stream.leave()
    return 0


cdef object entropy():
    return int.from_bytes(os.urandom(8), "little")


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
    return fill_penalties(p, rows, repetition_penalty, frequency_penalty, presence_penalty)


cdef int fill_penalties(sample_params *p, int64_t rows, object repetition_penalty, object frequency_penalty,
                        object presence_penalty) except -1:
    cdef int64_t size = sizeof(sample_params)
    fill_doubles(&p.repetition_penalty, size, rows, repetition_penalty, "repetition_penalty", FLT_MIN, FLT_MAX)
    fill_doubles(&p.frequency_penalty, size, rows, frequency_penalty, "frequency_penalty", -FLT_MAX, FLT_MAX)
    fill_doubles(&p.presence_penalty, size, rows, presence_penalty, "presence_penalty", -FLT_MAX, FLT_MAX)
    return 0


cdef list fill_edits(sample_args *a, rows_t *r, object prompt_ids, object output_ids, object bias, object mask):
    cdef cnp.ndarray words
    cdef bint is_bool
    cdef int axes
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
        kept.append(words)
        is_bool = cnp.PyArray_TYPE(words) == cnp.NPY_BOOL
        axes = cnp.PyArray_NDIM(words)
        a.mask, a.mask_kind = whole(words), MASK_BOOL if is_bool else MASK_BITS
        a.mask_width = cnp.PyArray_DIM(words, axes - 1) * (1 if is_bool else 32)
        a.mask_stride = cnp.PyArray_STRIDE(words, 0) if axes == 2 else 0
    return kept
