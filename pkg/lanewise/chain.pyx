# cython: language_level=3, freethreading_compatible=True, auto_pickle=False
"""Programs of sampling steps, run: what Sampler is made on."""
cimport cython
cimport numpy as cnp
from libc.float cimport DBL_MAX, FLT_MAX
from libc.stdint cimport int64_t
from libc.string cimport memset

import numpy as np

from lanewise._arguments cimport check_on_invalid, integer
from lanewise._arrays cimport as_array, logits_rows, rows_span, rows_t, whole
from lanewise._ops cimport *
from lanewise._settings cimport draw, fill_edits, fill_penalties
from lanewise.sampling cimport chosen, support_of, tokens_out
from lanewise import _program

cnp.import_array()


@cython.final
cdef class Program:
    """Steps such as ("top_k", 40), ("xtc", 0.5, 0.1) or ("top_p", {"p": 0.9}), in the order in which they act.

    Made once, for good: a kernel follows it without a look. Raises ValueError, TypeError.

    >>> Program([("top_k", 40), ("temperature", 0.8)]).codes[:, 1].tolist()
    [40.0, 0.8]
    """

    def __cinit__(self, steps):
        self.steps = tuple([tuple(step) if isinstance(step, list) else step for step in steps])
        lines, state = _program.compiled(self.steps)
        self.lines = np.array(lines, np.float64).tobytes()
        self.first[0], self.first[1] = state

    cdef int64_t count(self) noexcept:
        return len(self.lines) // sizeof(chain_step)

    cdef const chain_step *line(self) noexcept:
        return <const chain_step *><const char *>self.lines

    @property
    def codes(self):
        """float64 (n, 4): a step's code and numbers."""
        return np.frombuffer(self.lines).reshape(-1, _program.WIDTH)

    @property
    def state(self):
        """float64 (2,): what a sequence starts with."""
        return np.array([self.first[0], self.first[1]])

    def __eq__(self, other):
        return isinstance(other, Program) and self.lines == (<Program>other).lines

    def __hash__(self):
        return hash(self.lines)

    def __repr__(self):
        return f"Program({list(self.steps)!r})"

    def __reduce__(self):
        return Program, (self.steps,)


# Each row's steps, and the states they begin with.
cdef int fill_programs(chain_args *a, chain_row *to, double *first, object programs, list kept) except -1:
    cdef int64_t i, steps = 0
    cdef Program program
    cdef bytes lines
    if type(programs) is Program:
        program = programs
        lines = program.lines
        for i in range(a.rows):
            start_program(&to[i], &first[2 * i], program, 0)
    else:
        each = list(programs) if isinstance(programs, (list, tuple)) else [None]
        if not all(isinstance(one, Program) for one in each):
            raise TypeError(f"programs must be a Program, or a list of them, one a row, got {programs!r}")
        if len(each) != a.rows:
            raise ValueError(f"programs must be one or one a row: {a.rows} rows, got {len(each)}")
        starts = {}
        for i, program in enumerate(each):
            if program not in starts:
                starts[program] = steps
                steps += program.count()
            start_program(&to[i], &first[2 * i], program, starts[program])
        lines = b"".join([(<Program>one).lines for one in starts])
    kept.append(lines)
    a.steps.ptr, a.steps.bytes = <char *>lines, len(lines)
    return 0


cdef void start_program(chain_row *row, double *state, Program program, int64_t first_step) noexcept:
    row.first_step, row.steps = first_step, program.count()
    state[0], state[1] = program.first[0], program.first[1]


cdef int fill_added(chain_args *a, rows_t *r, object added, list kept) except -1:
    cdef int64_t i, total
    cdef int64_t *id_
    cdef int64_t *end
    cdef float *value
    if not isinstance(added, tuple) or len(added) != (2 if r.single else 3):
        raise TypeError(f"added must be (ids, values{'' if r.single else ', offsets'}), got {added!r}")
    given = as_array(added[0], "added[0]")
    if given.dtype.kind not in "iu" and given.size:
        raise TypeError(f"added[0] must be integers, got {given.dtype}")
    ids = np.array(given, np.int64)  # what is checked is what is used
    values = np.array(to_float32(as_array(added[1], "added[1]")))
    offsets = np.array([0, ids.size] if r.single else as_array(added[2], "added[2]"), np.int64)
    if ids.ndim != 1 or values.shape != ids.shape:
        raise ValueError(f"added: ids and values must be (n,) each, got {ids.shape} and {values.shape}")
    if offsets.shape != (r.rows + 1,) or offsets[0] != 0 or offsets[r.rows] != ids.size or (np.diff(offsets) < 0).any():
        raise ValueError(f"added: offsets must rise from 0 to {ids.size} in {r.rows + 1} entries, got {added[2]!r}")
    id_, value = <int64_t *>cnp.PyArray_DATA(ids), <float *>cnp.PyArray_DATA(values)
    for i in range(ids.size):
        if not 0 <= id_[i] < r.cols:
            raise ValueError(f"added: ids[{i}] is {id_[i]}, not an id in 0..{r.cols - 1}")
        if not value[i] <= FLT_MAX:
            raise ValueError(f"added: values[{i}] is {value[i]}; it must be a number or -inf")
    a.added_ids, a.added_values, a.added_offsets = whole(ids), whole(values), whole(offsets)
    kept += ids, values, offsets
    return 0


# The user's own, which the draw changes.
cdef cnp.ndarray checked_state(object state, rows_t *r):
    cdef tuple shape = (2,)
    if not r.single:
        shape = (r.rows, 2)
    if type(state) is not np.ndarray or state.dtype != np.float64:
        raise TypeError(f"state must be a float64 array, got {getattr(state, 'dtype', type(state).__name__)}")
    if state.shape != shape or not cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>state):
        raise ValueError(f"state must be C-contiguous, of shape {shape}, got {state.shape}")
    if not cnp.PyArray_ISWRITEABLE(<cnp.ndarray>state):
        raise ValueError("state is read-only")
    return state


cdef int check_finite(cnp.ndarray state) except -1:
    cdef int64_t i
    cdef const double *number = <const double *>cnp.PyArray_DATA(state)
    for i in range(cnp.PyArray_SIZE(state)):
        if not -DBL_MAX <= number[i] <= DBL_MAX:
            raise ValueError(f"state{[int(at) for at in np.unravel_index(i, (<object>state).shape)]} is {number[i]}; "
                             "it must be finite")
    return 0


cdef void set_edits(chain_args *a, const sample_args *edits) noexcept:
    a.mask, a.mask_kind, a.mask_stride, a.mask_width = edits.mask, edits.mask_kind, edits.mask_stride, edits.mask_width
    a.bias_ids, a.bias_values, a.bias_offsets = edits.bias_ids, edits.bias_values, edits.bias_offsets
    a.bias_dense, a.bias_stride = edits.bias_dense, edits.bias_stride
    a.prompt_ids, a.prompt_offsets = edits.prompt_ids, edits.prompt_offsets
    a.output_ids, a.output_offsets = edits.output_ids, edits.output_offsets


def run_chain(logits, programs, *, state=None, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0,
              prompt_ids=None, output_ids=None, bias=None, added=None, mask=None, seed=None, step=None, keys=None,
              rng=None, vocab_size=None, return_support=False, on_invalid="raise", out=None):
    """One token a row by its program: an int for logits (V,), int64 (B,) for (B, V); V up to 1,048,576.

    programs: one for all rows or a list, one a row. In this order: bias, penalties, added, mask, the steps, a draw.
    added: (ids, values, offsets), of which row r has offsets[r] .. offsets[r + 1] - 1; for (V,) (ids, values). state:
    float64 (B, 2), for (V,) (2,), which the draw changes; an invalid row keeps its own. None: each program's first. The
    rest as `sample` has it.
    Raises ValueError, TypeError before anything is written.

    >>> run_chain(np.float32([1.0, 3.0, 2.0]), Program([("top_k", 2), ("temperature", 0.0)]))
    1
    """
    cdef rows_t r
    cdef chain_args a
    cdef sample_args edits
    cdef sample_params one
    cdef chain_row one_row
    cdef sample_params *p = &one
    cdef chain_row *to = &one_row
    cdef double one_state[2]
    cdef double *first = one_state
    cdef int64_t token
    check_on_invalid(on_invalid)
    memset(&a, 0, sizeof(a))
    memset(&edits, 0, sizeof(edits))
    owner = logits_rows(logits, &r, "logits")
    if vocab_size is not None:
        r.cols = integer(vocab_size, "vocab_size", 1, r.cols)
    if r.cols > SAMPLE_MAX_VOCAB:
        raise ValueError(f"run_chain takes up to {SAMPLE_MAX_VOCAB} ids, got {r.cols}")
    if r.rows != 1:
        rows_params = np.empty((r.rows, sizeof(sample_params)), np.uint8)
        rows_of_chain = np.empty((r.rows, sizeof(chain_row)), np.uint8)
        p = <sample_params *>cnp.PyArray_DATA(rows_params)
        states = np.empty((r.rows, 2))
        to = <chain_row *>cnp.PyArray_DATA(rows_of_chain)
        first = <double *>cnp.PyArray_DATA(states)
    memset(to, 0, r.rows * sizeof(chain_row))
    fill_penalties(p, r.rows, repetition_penalty, frequency_penalty, presence_penalty)
    a.x, a.params.ptr, a.params.bytes = rows_span(&r), p, r.rows * sizeof(sample_params)
    a.chain_rows.ptr, a.chain_rows.bytes = to, r.rows * sizeof(chain_row)
    a.rows, a.cols, a.dtype, a.x_stride, a.force_exact = r.rows, r.cols, r.dtype, r.stride, force_exact()
    kept = fill_edits(&edits, &r, prompt_ids, output_ids, bias, mask)
    set_edits(&a, &edits)
    fill_programs(&a, to, first, programs, kept)
    if added is not None:
        fill_added(&a, &r, added, kept)
    a.state.ptr, a.state.bytes = first, r.rows * 2 * sizeof(double)
    if state is not None:
        own = checked_state(state, &r)
        check_finite(own)
        a.state = whole(own)
    tokens = None
    if r.single and out is None:
        a.tokens.ptr, a.tokens.bytes = &token, sizeof(token)
    else:
        tokens = tokens_out(out, &r)
        a.tokens = whole(tokens)
    room = None
    if return_support:
        room = np.empty((r.rows, r.cols), np.int64), np.empty((r.rows, r.cols), np.float32), np.empty(r.rows, np.int64)
        a.support_ids, a.support_logprobs, a.support_counts = whole(room[0]), whole(room[1]), whole(room[2])
    draw(OP_chain, &a, p, &r, 3 * r.cols + 20000, seed, step, keys, None, rng)
    result = chosen(tokens, token, out, r.single, on_invalid)
    return result if room is None else (result, support_of(room))
