# cython: language_level=3, freethreading_compatible=True, auto_pickle=False
"""Sampler: a list of steps made into a plan, and the sequences that it draws tokens for.

Thin: edits by the text are csrc/history.c, what follows is one run of the kernel `chain` for the batch.
"""
cimport cython
cimport numpy as cnp
from libc.stdint cimport INT64_MAX, UINT32_MAX, UINT64_MAX, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

import os

import numpy as np

from lanewise._arguments cimport check_on_invalid, integer, mask_array, ragged_ids
from lanewise._arrays cimport as_array, check_out, is_bfloat16, logits_rows, rows_t, whole
from lanewise._ops cimport *
from lanewise._turns cimport close_turns, end_turn, open_turns, take_turn, turn
from lanewise.chain cimport Program
from lanewise import _plan, _program, _whole, steps as _steps
from lanewise.chain import run_chain
from lanewise.errors import InvalidLogitsError
from lanewise.params import SamplingParams
from lanewise.values import scale

cnp.import_array()


cdef extern from "history.h":
    enum:
        OVER_OUTPUT, OVER_PROMPT
        EDIT_ADD, EDIT_SEQUENCES, EDIT_NGRAM, EDIT_ENCODER_NGRAM, EDIT_FORCE

    struct edit_step:
        int64_t kind, over, counts_over, last_n, n, flags, limit
        double numbers[3]
        const int64_t *ids
        const double *values
        const int64_t *offsets
        int64_t count

    struct edit_row:
        const void *x
        int64_t dtype, cols
        const int64_t *text
        int64_t prompt, length

    struct touched:
        int64_t count
        int64_t *id
        float *value
        int forced

    void touched_free(touched *t)
    int edit_by_text(touched *t, const edit_step *steps, int64_t count, const edit_row *row, int relative)
    int64_t touched_lists(const touched *t, int64_t *ids, float *minus, float *plus)
    void touched_write(const touched *t, float *z, int64_t cols)


cdef enum:
    MOST_IDS = 0x7fffffff
    STATE = 2  # doubles


# Lists, one a row, behind one another; row i is offsets[i] .. offsets[i + 1] - 1.
cdef struct ragged:
    int64_t *ids
    float *values
    int64_t *offsets
    int64_t count, room


# Nothing may be told of by no address, which memcpy does not take.
cdef inline void put(void *to, const void *from_, size_t count) noexcept:
    if count:
        memcpy(to, from_, count)


# ---- plans ----

# Whether C can follow a step without a look. Steps see to that when they are made, but object.__setattr__ and pickles
# do not ask them.
cdef bint is_sound(const edit_step *s, int64_t ids, int64_t values) noexcept:
    cdef int64_t i, least = s.kind == EDIT_SEQUENCES  # whose last id is what is touched
    for i in range(ids):
        if not 0 <= s.ids[i] <= MOST_IDS:
            return False
    if s.offsets != NULL:
        for i in range(s.count):
            if s.offsets[i + 1] < s.offsets[i] + least:
                return False
        if s.offsets[0] != 0 or s.offsets[s.count] != ids:
            return False
    if s.kind == EDIT_ADD or s.kind == EDIT_SEQUENCES or s.kind == EDIT_FORCE:
        return values == s.count
    return s.n >= 1 or (s.kind != EDIT_NGRAM and s.kind != EDIT_ENCODER_NGRAM)


cdef class _Edits:
    """A run of edits, as C has them."""
    cdef edit_step *step
    cdef int64_t count, largest
    cdef list kept

    def __cinit__(self, list edits):
        cdef edit_step *to
        cdef int64_t ids, values, ends, k
        self.largest, self.kept = -1, []
        self.count = len(edits)
        self.step = <edit_step *>malloc(max(1, self.count) * sizeof(edit_step))
        if self.step == NULL:
            raise MemoryError("no memory for a plan")
        memset(self.step, 0, max(1, self.count) * sizeof(edit_step))
        for i, edit in enumerate(edits):
            to, ids, values = &self.step[i], 0, 0
            to.kind, to.over, to.counts_over, to.last_n = edit.kind, edit.over, edit.counts_over, edit.last_n
            to.n, to.flags, to.limit = edit.n, edit.flags, edit.limit
            for k in range(3):
                to.numbers[k] = edit.numbers[k]
            if edit.ids is not None:
                to.ids = <const int64_t *>self.keep(edit.ids, cnp.NPY_INT64, &ids)
                to.count = ids
                for k in range(ids):
                    self.largest = max(self.largest, to.ids[k])
            if edit.values:
                to.values = <const double *>self.keep(edit.values, cnp.NPY_FLOAT64, &values)
            if edit.offsets:
                to.offsets = <const int64_t *>self.keep(edit.offsets, cnp.NPY_INT64, &ends)
                to.count = ends - 1
            if not is_sound(to, ids, values):
                raise ValueError(f"steps must stay as they were made: one was altered and says {edit!r}")

    cdef void *keep(self, object numbers, int dtype, int64_t *count) except NULL:
        cdef cnp.ndarray array = np.array(tuple(numbers), cnp.PyArray_DescrFromType(dtype)).reshape(-1)
        count[0] = cnp.PyArray_DIM(array, 0)
        self.kept.append(array)
        return cnp.PyArray_DATA(array)

    def __dealloc__(self):
        free(self.step)


@cython.final
cdef class _Plan:
    """What a list of steps asks for. Plain: edits, then one program; else the row is written out first."""
    cdef readonly tuple steps
    cdef list before    # what comes before the last program: _Edits, Program or a step
    cdef _Edits edits   # of a plain one; if split, the kernel adds and penalises itself:
    cdef _Edits added, added_then  # what is added before and behind its penalties
    cdef sample_params penalties
    cdef int64_t over, last_n
    cdef bint split, penalises, whole_text
    cdef Program program
    cdef bint plain, stateful, guided
    cdef int64_t largest

    def __cinit__(self, tuple found):
        groups = _plan.groups(found)
        self.steps, self.largest = found, -1
        last = groups.pop() if groups and groups[-1].kind == "program" else None
        self.program = Program(last.steps if last is not None else ())
        self.stateful = last is not None and last.steps[len(last.steps) - 1][0] in _program.LAST
        self.before = []
        for group in groups:
            if group.kind == "edit":
                edits = _Edits(list(group.steps))
                self.largest = max(self.largest, (<_Edits>edits).largest)
                self.before.append(edits)
            elif group.kind == "program":
                self.before.append(Program(group.steps))
            else:
                self.before.append(group.steps[0])
                self.guided |= isinstance(group.steps[0], (_steps.Guidance, _steps.Contrastive))
        self.plain = not self.before or (len(self.before) == 1 and isinstance(self.before[0], _Edits))
        memset(&self.penalties, 0, sizeof(self.penalties))
        self.penalties.repetition_penalty = 1.0
        if self.plain and self.before:
            self.edits = self.before[0]
            self.take_apart(_plan.split(groups[0].steps))

    cdef int take_apart(self, object found) except -1:
        if found is None:
            return 0
        self.split = True
        self.added = _Edits(list(found.before)) if found.before else None
        self.added_then = _Edits(list(found.behind)) if found.behind else None
        told = found.penalties
        if told is None:
            return 0
        self.penalises = True
        (self.penalties.repetition_penalty, self.penalties.frequency_penalty,
         self.penalties.presence_penalty) = told.numbers
        repeats, counts = told.numbers[0] != 1, told.numbers[1:] != (0, 0)
        self.whole_text = repeats and counts and told.over != told.counts_over
        self.over, self.last_n = told.over if repeats else told.counts_over, told.last_n
        return 0


# ---- sequences ----

@cython.final
cdef class _Sequence:
    """A text, and what its steps have learnt: state i is that after i ids of output."""
    cdef object id
    cdef _Plan plan
    cdef uint64_t seed, key, forks
    cdef int64_t first_step, prompt, length, room, largest, states_room
    cdef int64_t *text
    cdef double *states
    cdef uint64_t called  # the last call it was in
    cdef bint own_steps

    def __dealloc__(self):
        free(self.text)
        free(self.states)

    # Room for so many more ids, and for their states.
    cdef int reserve(self, int64_t more) except -1:
        cdef int64_t want = self.length + more, room
        cdef void *memory
        if want > self.room:
            room = want + want // 2 + 64
            memory = realloc(self.text, room * sizeof(int64_t))
            if memory == NULL:
                raise MemoryError(f"no memory for the text of sequence {self.id!r}")
            self.text, self.room = <int64_t *>memory, room
        want = want - self.prompt + 1
        if self.plan.stateful and want > self.states_room:
            room = want + want // 2 + 16
            memory = realloc(self.states, room * STATE * sizeof(double))
            if memory == NULL:
                raise MemoryError(f"no memory for the states of sequence {self.id!r}")
            self.states, self.states_room = <double *>memory, room
        return 0

    cdef double *state(self) noexcept:
        return &self.states[STATE * (self.length - self.prompt)]

    # The ids of an array, copied to where there is room for them, and checked there.
    cdef int extend(self, cnp.ndarray ids, str name, int64_t most, bint output) except -1:
        cdef int64_t count = cnp.PyArray_DIM(ids, 0), largest = self.largest, i
        cdef int64_t *to = self.text + self.length
        cdef uint64_t furthest = 0  # as unsigned: what is below 0 is far away
        put(to, cnp.PyArray_DATA(ids), count * sizeof(int64_t))
        for i in range(count):
            furthest = max(furthest, <uint64_t>to[i])
        if count and furthest > <uint64_t>most:
            for i in range(count):
                if not 0 <= to[i] <= most:
                    raise ValueError(f"{name}[{i}] is {to[i]}, not an id in 0..{most}")
        if self.plan.stateful and output:
            for i in range(count):
                memcpy(self.state() + STATE * (i + 1), self.state(), STATE * sizeof(double))
        self.length += count
        self.largest = max(largest, <int64_t>furthest if count else -1)
        return 0

    # There is room.
    cdef void append(self, int64_t token, const double *state) noexcept:
        if self.plan.stateful:
            memcpy(self.state() + STATE, state, STATE * sizeof(double))
        self.text[self.length] = token
        self.length += 1
        self.largest = max(self.largest, token)

    cdef void find_largest(self) noexcept:
        self.largest = -1
        for i in range(self.length):
            self.largest = max(self.largest, self.text[i])


# Ids as int64, adjacent, one axis; the user's own array where it is that.
cdef cnp.ndarray ids_of(object ids, str name, int64_t most):
    if type(ids) is np.ndarray and cnp.PyArray_TYPE(<cnp.ndarray>ids) == cnp.NPY_INT64 and \
            cnp.PyArray_NDIM(<cnp.ndarray>ids) == 1 and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>ids):
        return ids
    if isinstance(ids, (list, tuple)):
        ids = np.array(ids) if len(ids) else np.empty(0, np.int64)
    ids = as_array(ids, name)
    if ids.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {ids.shape}")
    if ids.dtype.kind not in "iu" and ids.size:
        raise TypeError(f"{name} must be integers, got {ids.dtype}")
    if ids.dtype.kind == "u" and ids.size and ids.max() > most:  # before any of them wraps
        at = int(np.argmax(ids > most))
        raise ValueError(f"{name}[{at}] is {ids[at]}, not an id in 0..{most}")
    return np.require(ids, np.int64, ["C", "A"])


cdef object copied(const int64_t *ids, int64_t count):
    cdef cnp.npy_intp n = count
    cdef cnp.ndarray array = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT64, 0)
    put(cnp.PyArray_DATA(array), ids, count * sizeof(int64_t))
    return array


cdef uint64_t mixed(uint64_t x) noexcept:
    """64 bits from 64, one to one (Steele, Lea & Flood, SplitMix64)."""
    x += 0x9E3779B97F4A7C15ULL
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL
    return x ^ (x >> 31)


# ---- the sampler ----

cdef class Sampler:
    """Steps, made into a plan once, and the sequences they choose tokens for; called with a row of logits a sequence.

    steps: a list of lanewise.steps, or a project's name for its defaults ("transformers", "vllm", "llama.cpp",
    "mlx-lm"). seed: that of sequences without one of their own, fresh entropy if None. vocab_size cuts padded logits.
    Sequences are known by an id, any hashable object, and have rows in the order in which they were added.
    One thread at a time: a second one gets a RuntimeError. Pickles. Raises ValueError, TypeError.

    >>> sampler = lanewise.Sampler([lanewise.steps.TopK(2), lanewise.steps.DRY(0.8)], seed=1)
    >>> sampler.add("a", [1, 2])
    >>> sampler.add("b", steps=[lanewise.steps.Temperature(0.0)])
    >>> sampler(np.float32([[1, 5, 5.1, 0], [3, 2, 1, 0]])).tolist(), sampler.output("b").tolist()
    ([2, 0], [0])
    """
    cdef turn turn
    cdef readonly uint64_t seed
    cdef readonly object vocab_size
    cdef uint64_t serial, calls
    cdef str preset
    cdef _Plan plan
    cdef dict plans, by_value, sequences
    cdef list order
    cdef touched touched
    # what a call fills in, row after row, kept for the next
    cdef sample_params *params
    cdef chain_row *rows
    cdef chain_step *steps_
    cdef ragged bias, added, before, text  # behind them: sample's prompt_ids and output_ids
    cdef double *state_
    cdef int64_t rows_room, step_room, step_count
    cdef _Plan last_plan

    def __cinit__(self):
        open_turns(&self.turn)
        self.plans, self.by_value, self.sequences, self.order = {}, {}, {}, []
        self.plan = _Plan(())  # of one that was never told its steps

    def __init__(self, steps, *, seed=None, vocab_size=None):
        self.preset = steps if isinstance(steps, str) else None
        self.seed = entropy() if seed is None else integer(seed, "seed", 0, UINT64_MAX)
        self.vocab_size = None if vocab_size is None else integer(vocab_size, "vocab_size", 1, SAMPLE_MAX_VOCAB)
        self.plan = self.plan_of(_steps.preset(steps) if self.preset is not None else steps)

    def __dealloc__(self):
        touched_free(&self.touched)
        free(self.params)
        free(self.rows)
        free(self.steps_)
        free_lists(&self.bias)
        free_lists(&self.added)
        free_lists(&self.before)
        free_lists(&self.text)
        free(self.state_)
        close_turns(&self.turn)

    cdef int enter(self) except -1:
        return take_turn(&self.turn, "Sampler")

    cdef void leave(self) noexcept:
        end_turn(&self.turn)

    # ---- plans ----

    cdef _Plan plan_of(self, object steps):
        known = self.plans.get(id(steps))
        if known is not None and known[0] is steps:
            return known[1]
        found = _plan.checked(steps)
        try:
            plan = self.by_value.get(found)
        except TypeError as error:
            raise TypeError(f"steps must be hashable, functions and all: {error}") from None
        if plan is None:
            plan = _Plan(found)
        self.forget_plans()
        self.by_value[found] = plan
        if type(steps) is tuple:
            self.plans[id(steps)] = (steps, plan)  # which holds it, so that the number stays its own
        return plan

    # Sequences keep the plans that they have.
    cdef int forget_plans(self) except -1:
        if len(self.by_value) >= 1024:
            self.plans.clear()
            self.by_value.clear()
        return 0

    cdef _Plan plan_of_params(self, object params):
        if self.preset is None:
            raise ValueError("params go with a Sampler of a project's name; this one has steps of its own")
        if isinstance(params, SamplingParams):
            plan = self.by_value.get(params)
            if plan is None:
                plan = self.plan_of(_steps.preset(self.preset, params))
                self.by_value[params] = plan
            return plan
        if not isinstance(params, dict):
            raise TypeError(f"params must be a SamplingParams or a dict, got {params!r}")
        return self.plan_of(_steps.preset(self.preset, **params))

    # ---- sequences in and out ----

    cdef _Sequence known(self, object id_):
        found = self.sequences.get(id_)
        if found is None:
            raise KeyError(f"no sequence {id_!r}")
        return found

    # By identity: list.remove compares, which takes twenty times as long.
    cdef Py_ssize_t row_of(self, _Sequence s) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.order)):
            if self.order[i] is s:
                return i
        raise KeyError(f"no sequence {s.id!r}")

    cdef int refuse_known(self, object id_) except -1:
        if id_ in self.sequences:
            raise ValueError(f"there is a sequence {id_!r} already")
        return 0

    cdef _Sequence new_sequence(self, object id_, object prompt_ids, object output_ids, object steps, object params,
                                object seed, object key, object step):
        cdef _Sequence new = _Sequence.__new__(_Sequence)
        cdef cnp.ndarray prompt, output
        cdef int64_t most = MOST_IDS if self.vocab_size is None else <int64_t>self.vocab_size - 1
        if steps is not None and params is not None:
            raise ValueError("give steps or params, not both")
        self.refuse_known(id_)
        new.id = id_
        new.own_steps = steps is not None or params is not None
        new.plan = (self.plan_of(steps) if steps is not None else self.plan if params is None
                    else self.plan_of_params(params))
        new.largest = -1
        prompt, output = ids_of(prompt_ids, "prompt_ids", most), ids_of(output_ids, "output_ids", most)
        new.seed = self.seed if seed is None else integer(seed, "seed", 0, UINT64_MAX)
        new.key = (self.serial if seed is None else 0) if key is None else integer(key, "key", 0, UINT64_MAX)
        new.first_step = integer(step, "step", 0, UINT32_MAX)
        new.reserve(cnp.PyArray_DIM(prompt, 0) + cnp.PyArray_DIM(output, 0) + 1)
        new.extend(prompt, "prompt_ids", most, False)
        new.prompt = new.length
        if new.plan.stateful:
            memcpy(new.states, new.plan.program.first, STATE * sizeof(double))
        new.extend(output, "output_ids", most, True)
        return new

    def add(self, id, prompt_ids=(), *, output_ids=(), steps=None, params=None, seed=None, key=None, step=0, index=None):
        """A new sequence, in the last row, or in row `index` with the others moved down.

        steps: its own, else the Sampler's. params: a SamplingParams, or numbers in the names of the Sampler's project.
        Its noise is of (seed, key, step + length of the output): with a seed of its own the key is 0, else the number
        of sequences added before. output_ids: what was put out already.
        """
        self.enter()
        try:
            at = len(self.order) if index is None else integer(index, "index", 0, len(self.order))
            new = self.new_sequence(id, prompt_ids, output_ids, steps, params, seed, key, step)
            self.sequences[id] = new
            self.order.insert(at, new)
            self.serial += 1
        finally:
            self.leave()

    def remove(self, id):
        """Forgets a sequence; the rows behind it move up."""
        self.enter()
        try:
            del self.order[self.row_of(self.known(id))]
            del self.sequences[id]
        finally:
            self.leave()

    def fork(self, id, new, *, seed=None, key=None, index=None):
        """A sequence `new` that goes on from where `id` is, with noise of its own: a key made from id's, or as told."""
        cdef _Sequence parent, child
        self.enter()
        try:
            parent = self.known(id)
            self.refuse_known(new)
            at = len(self.order) if index is None else integer(index, "index", 0, len(self.order))
            child = _Sequence.__new__(_Sequence)
            child.id, child.plan, child.own_steps = new, parent.plan, parent.own_steps
            child.first_step, child.largest = parent.first_step, parent.largest
            child.seed = parent.seed if seed is None else integer(seed, "seed", 0, UINT64_MAX)
            if key is not None:
                child.key = integer(key, "key", 0, UINT64_MAX)
            elif seed is None:
                child.key = mixed(parent.key + (parent.forks + 1) * 0xD1342543DE82EF95ULL)
            child.prompt = parent.prompt
            child.reserve(parent.length)
            child.length = parent.length
            child.reserve(1)
            put(child.text, parent.text, parent.length * sizeof(int64_t))
            if parent.plan.stateful:
                memcpy(child.states, parent.states, (parent.length - parent.prompt + 1) * STATE * sizeof(double))
            self.sequences[new] = child
            self.order.insert(at, child)
            parent.forks += 1
        finally:
            self.leave()

    def accept(self, id, tokens):
        """Puts out a token, or some, that were chosen elsewhere. What steps learn from draws stays as it is."""
        cdef _Sequence s
        cdef cnp.ndarray array
        cdef int64_t one, most = MOST_IDS if self.vocab_size is None else <int64_t>self.vocab_size - 1
        self.enter()
        try:
            s = self.known(id)
            if isinstance(tokens, (int, np.integer)):
                one = integer(tokens, "tokens", 0, most)
                s.reserve(1)
                s.append(one, s.state() if s.plan.stateful else NULL)
            else:
                array = ids_of(tokens, "tokens", most)
                s.reserve(cnp.PyArray_DIM(array, 0))
                s.extend(array, "tokens", most, True)
        finally:
            self.leave()

    def rollback(self, id, n=1):
        """Takes back the last n ids of the output, and what steps have learnt since."""
        cdef _Sequence s
        self.enter()
        try:
            s = self.known(id)
            s.length -= <int64_t>integer(n, "n", 0, s.length - s.prompt)
            s.find_largest()
        finally:
            self.leave()

    # ---- rows ----

    def swap(self, i, j):
        """Exchanges rows i and j."""
        self.enter()
        try:
            i, j = integer(i, "i", 0, len(self.order) - 1), integer(j, "j", 0, len(self.order) - 1)
            self.order[i], self.order[j] = self.order[j], self.order[i]
        finally:
            self.leave()

    def update_rows(self, *, removed=(), added=(), moved=()):
        """A batch changes, by vLLM's rules: rows removed, then (row, id, arguments of add) added, then rows moved.

        moved: (from, to, "move") leaves row `from` empty and takes the place of what is in `to`; (i, j, "swap").
        A sequence whose row another is given is removed. No row may be empty then, or nothing is changed: ValueError.
        """
        cdef uint64_t serial = self.serial
        self.enter()
        try:
            rows = dict(enumerate(self.order))
            for row in removed:
                if rows.pop(row, None) is None:
                    raise ValueError(f"removed: there is no row {row}")
            kept = self.sequences
            try:
                for row, id_, told in added:
                    gone = rows.pop(integer(row, "added: row", 0, INT64_MAX), None)
                    self.sequences = {(<_Sequence>s).id: s for s in rows.values()}
                    if strange := told.keys() - _ADDED.keys():
                        raise TypeError(f"added: {min(strange)!r} is no argument of add")
                    told = _ADDED | told
                    rows[row] = self.new_sequence(id_, told["prompt_ids"], told["output_ids"], told["steps"],
                                                  told["params"], told["seed"], told["key"], told["step"])
                    self.serial += 1
                for from_, to, how in moved:
                    if how == "swap":
                        rows[from_], rows[to] = rows[to], rows[from_]
                    elif how == "move":
                        rows[to] = rows.pop(from_)
                    else:
                        raise ValueError(f"moved: must end in 'move' or 'swap', got {how!r}")
                if sorted(rows) != list(range(len(rows))):
                    raise ValueError(f"rows are left empty: {sorted(rows)} are in use")
            except KeyError as error:
                self.sequences, self.serial = kept, serial
                raise ValueError(f"moved: there is no row {error}") from None
            except BaseException:
                self.sequences, self.serial = kept, serial
                raise
            self.order = [rows[row] for row in range(len(rows))]
            self.sequences = {(<_Sequence>s).id: s for s in self.order}
        finally:
            self.leave()

    # ---- what is known of them ----

    @property
    def steps(self):
        """The steps of sequences without their own."""
        return self.plan.steps

    @property
    def ids(self):
        """The sequences, row after row."""
        return [(<_Sequence>s).id for s in self.order]

    def __len__(self):
        return len(self.order)

    def __contains__(self, id):
        return id in self.sequences

    def prompt(self, id):
        """The ids of a sequence's prompt, int64: a copy."""
        cdef _Sequence s
        self.enter()
        try:
            s = self.known(id)
            return copied(s.text, s.prompt)
        finally:
            self.leave()

    def output(self, id):
        """The ids put out so far, int64: a copy."""
        cdef _Sequence s
        self.enter()
        try:
            s = self.known(id)
            return copied(s.text + s.prompt, s.length - s.prompt)
        finally:
            self.leave()

    def noise(self, id):
        """The (seed, key, step) of the next draw."""
        cdef _Sequence s = self.known(id)
        return s.seed, s.key, s.first_step + s.length - s.prompt

    def state(self, id):
        """What a step has learnt from the draws: mirostat's (mu, 0), adaptive-p's two sums; None without such a step."""
        cdef _Sequence s
        self.enter()
        try:
            s = self.known(id)
            return (s.state()[0], s.state()[1]) if s.plan.stateful else None
        finally:
            self.leave()

    def steps_of(self, id):
        """The steps of a sequence."""
        return self.known(id).plan.steps

    # ---- a call ----

    def __call__(self, logits, ids=None, *, mask=None, guides=None, record=True, on_invalid="raise", out=None):
        """A token a row: an int for logits (V,) of one sequence, int64 (B,) for (B, V).

        ids: the sequences of the rows, if these are not all in their order. mask: as sample has it, applied before the
        first truncation. guides: the other model's logits, (B, V) or a list with None, for Guidance and Contrastive.
        record=False leaves the sequences as they are: the same call gives the same tokens. on_invalid: "raise"
        InvalidLogitsError, and nothing is recorded; or "mark" such rows with -1, which record nothing. out: int64 (B,).
        """
        check_on_invalid(on_invalid)
        self.enter()
        try:
            return self.call(logits, ids, mask, guides, record, on_invalid == "raise", out)
        finally:
            self.leave()

    cdef object call(self, object logits, object ids, object mask, object guides, bint record, bint raising, object out):
        cdef rows_t r
        cdef list order
        cdef cnp.ndarray tokens
        cdef const int64_t *token
        cdef int64_t i
        owner = logits_rows(logits, &r, "logits")
        if self.vocab_size is not None:
            r.cols = integer(self.vocab_size, "vocab_size", 1, r.cols)
        if r.cols > SAMPLE_MAX_VOCAB:
            raise ValueError(f"a Sampler takes up to {SAMPLE_MAX_VOCAB} ids, got {r.cols}")
        order = self.order if ids is None else self.chosen(ids, r.single)
        if len(order) != r.rows:
            raise ValueError(f"logits must have one row a sequence: {len(order)} sequences, got {r.rows} rows")
        self.check_rows(order, r.cols)
        if mask is not None:
            mask = mask_array(mask, &r)
        guides = self.checked_guides(order, guides, &r)
        if out is not None:
            if r.single:
                raise ValueError("out is for (B, V) logits; (V,) gives an int")
            check_out(out, (r.rows,), cnp.NPY_INT64, "out")
        tokens = self.drawn(order, owner, &r, mask, guides)
        token = <const int64_t *>cnp.PyArray_DATA(tokens)
        for i in range(r.rows):
            if token[i] < 0 and raising:
                self.refuse(order, tokens, r.single)
        if record:
            self.record(order, token)
        if out is not None:
            out[...] = tokens
            return out
        return token[0] if r.single else tokens

    cdef int refuse(self, list order, cnp.ndarray tokens, bint single) except -1:
        invalid = np.flatnonzero(tokens < 0).tolist()
        names = ", ".join([repr((<_Sequence>order[i]).id) for i in invalid[:8]])
        raise InvalidLogitsError(invalid, -1 if single else tokens,
                                 f"of sequence {names}: a NaN or +inf among the allowed ids, or nothing allowed")

    cdef list chosen(self, object ids, bint single):
        if single and not isinstance(ids, (list, np.ndarray)):
            return [self.known(ids)]
        if not isinstance(ids, (list, tuple, np.ndarray)):
            raise TypeError(f"ids must be a list of sequences, one a row, got {ids!r}")
        return [self.known(id_) for id_ in (ids.tolist() if isinstance(ids, np.ndarray) else ids)]

    cdef int check_rows(self, list order, int64_t cols) except -1:
        cdef _Sequence s
        self.calls += 1
        for s in order:
            if s.called == self.calls:
                raise ValueError(f"ids name sequence {s.id!r} twice")
            s.called = self.calls
            if s.largest >= cols:
                raise ValueError(f"sequence {s.id!r} has the id {s.largest}, but logits are of {cols} ids")
            if s.plan.largest >= cols:
                raise ValueError(f"a step of sequence {s.id!r} names the id {s.plan.largest}, "
                                 f"but logits are of {cols} ids")
            if s.first_step + s.length - s.prompt > UINT32_MAX:
                raise ValueError(f"sequence {s.id!r} has used up its steps")
            s.reserve(1)
        return 0

    cdef bint any_guided(self, list order) noexcept:
        cdef _Sequence s
        for s in order:
            if s.plan.guided:
                return True
        return False

    cdef list checked_guides(self, list order, object guides, rows_t *r):
        """A float32 row for each that needs one."""
        cdef _Sequence s
        if guides is None and not self.any_guided(order):
            return [None] * len(order)
        found = [None] * len(order)
        if guides is not None and (r.single or not isinstance(guides, (list, tuple))):
            guides = as_array(guides, "guides")
            guides = guides[None] if guides.ndim < 2 else guides
        if guides is not None and len(guides) != len(order):
            raise ValueError(f"guides must have one row a sequence: {len(order)} sequences, got {len(guides)}")
        for i, s in enumerate(order):
            if not s.plan.guided:
                continue
            if guides is None or guides[i] is None:
                raise ValueError(f"sequence {s.id!r} has a step that needs guides[{i}]")
            row = as_array(guides[i], f"guides[{i}]")
            if row.dtype.kind != "f" and not is_bfloat16(row.dtype):
                raise TypeError(f"guides[{i}] must be float32, float16, bfloat16 or float64, got {row.dtype}")
            if row.ndim != 1 or row.shape[0] < r.cols:
                raise ValueError(f"guides[{i}] must have shape ({r.cols},), got {row.shape}")
            found[i] = scale(row[:r.cols], 1.0)
        return found

    # Room for so many rows.
    cdef int reserve(self, int64_t rows) except -1:
        cdef int64_t room = 2 * rows + 2
        if rows < self.rows_room:
            return 0
        self.rows_room = 0
        grow(<void **>&self.params, room, sizeof(sample_params))
        grow(<void **>&self.rows, room, sizeof(chain_row))
        grow(<void **>&self.bias.offsets, room, sizeof(int64_t))
        grow(<void **>&self.added.offsets, room, sizeof(int64_t))
        grow(<void **>&self.before.offsets, room, sizeof(int64_t))
        grow(<void **>&self.text.offsets, room, sizeof(int64_t))
        grow(<void **>&self.state_, room * STATE, sizeof(double))
        self.rows_room = room
        return 0

    # Tokens of all rows, -1 where a row is invalid; the states that follow are in self.state_.
    cdef cnp.ndarray drawn(self, list order, object owner, rows_t *r, cnp.ndarray mask, list guides):
        cdef _Sequence s
        cdef int64_t i, first = 0
        cdef cnp.npy_intp count = r.rows
        cdef cnp.ndarray tokens = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
        cdef chain_args a
        self.reserve(r.rows)
        self.step_count = self.bias.count = self.added.count = self.before.count = self.text.count = 0
        self.bias.offsets[0] = self.added.offsets[0] = self.before.offsets[0] = self.text.offsets[0] = 0
        whole_rows = {}
        for i in range(r.rows):
            s = order[i]
            self.fill_row(i, s)
            if not s.plan.plain:
                whole_rows[i] = self.written(s, owner[:r.cols] if r.single else owner[i, :r.cols], r,
                                             mask_of(mask, i), guides[i])
            elif s.plan.edits is not None:
                self.fill_edits(s, r, i, whole_rows)
            self.bias.offsets[i + 1], self.added.offsets[i + 1] = self.bias.count, self.added.count
            self.before.offsets[i + 1], self.text.offsets[i + 1] = self.before.count, self.text.count
        memset(&a, 0, sizeof(a))
        a.cols, a.dtype, a.x_stride, a.force_exact = r.cols, r.dtype, r.stride, force_exact()
        if mask is not None:
            fill_mask(&a, mask)
        for i in sorted(whole_rows):
            self.run(&a, tokens, r.ptr, first, i)
            first = i + 1
        self.run(&a, tokens, r.ptr, first, r.rows)
        a.dtype, a.x_stride = DTYPE_F32, 0
        for i, row in whole_rows.items():
            self.run(&a, tokens, cnp.PyArray_DATA(<cnp.ndarray>row), i, i + 1)
        return tokens

    # Seed, key and step, the steps and the state of a row.
    cdef int fill_row(self, int64_t i, _Sequence s) except -1:
        cdef sample_params *p = &self.params[i]
        cdef chain_row *row = &self.rows[i]
        p[0] = s.plan.penalties
        p.seed, p.key, p.step = s.seed, s.key, s.first_step + s.length - s.prompt
        memset(row, 0, sizeof(chain_row))
        row.steps, row.first_step = s.plan.program.count(), self.step_count
        if i and s.plan is self.last_plan:
            row.first_step = self.rows[i - 1].first_step
        else:
            if self.step_count + row.steps > self.step_room:
                self.step_room = 0
                grow(<void **>&self.steps_, 2 * (self.step_count + row.steps), sizeof(chain_step))
                self.step_room = 2 * (self.step_count + row.steps)
            put(&self.steps_[self.step_count], s.plan.program.line(), row.steps * sizeof(chain_step))
            self.step_count += row.steps
            self.last_plan = s.plan
        if s.plan.stateful:
            memcpy(&self.state_[STATE * i], s.state(), STATE * sizeof(double))
        else:
            memset(&self.state_[STATE * i], 0, STATE * sizeof(double))
        return 0

    # What the edits of a plain plan make of row i, behind the lists of the rows before it.
    cdef int fill_edits(self, _Sequence s, rows_t *r, int64_t i, dict whole_rows) except -1:
        cdef edit_row row
        cdef _Plan plan = s.plan
        cdef cnp.npy_intp cols = r.cols
        cdef int64_t count
        row.x, row.dtype, row.cols = <char *>r.ptr + i * r.stride, r.dtype, r.cols
        row.text, row.prompt, row.length = s.text, s.prompt, s.length
        if plan.split:
            if plan.added is not None:
                self.add_edits(&self.bias, plan.added, &row)
            if plan.added_then is not None:
                self.add_edits(&self.added, plan.added_then, &row)
            if plan.penalises:
                self.add_text(plan, s)
            return 0
        self.edit(plan.edits, &row, False)
        if self.touched.forced:
            z = cnp.PyArray_EMPTY(1, &cols, cnp.NPY_FLOAT32, 0)
            touched_write(&self.touched, <float *>cnp.PyArray_DATA(z), r.cols)
            whole_rows[i] = z
            return 0
        extend(&self.bias, self.touched.count)
        extend(&self.added, self.touched.count)
        count = touched_lists(&self.touched, self.bias.ids + self.bias.count, self.bias.values + self.bias.count,
                              self.added.values + self.added.count)
        put(self.added.ids + self.added.count, self.bias.ids + self.bias.count, count * sizeof(int64_t))
        self.bias.count += count
        self.added.count += count
        return 0

    cdef int edit(self, _Edits edits, edit_row *row, bint relative) except -1:
        if edit_by_text(&self.touched, edits.step, edits.count, row, relative) < 0:
            raise MemoryError("no memory for edits")
        return 0

    cdef int add_edits(self, ragged *to, _Edits edits, edit_row *row) except -1:
        self.edit(edits, row, True)
        extend(to, self.touched.count)
        to.count += touched_lists(&self.touched, to.ids + to.count, NULL, to.values + to.count)
        return 0

    # What the kernel penalises.
    cdef int add_text(self, _Plan plan, _Sequence s) except -1:
        cdef int64_t first = 0 if plan.over != OVER_OUTPUT else s.prompt
        cdef int64_t end = s.length if plan.over != OVER_PROMPT else s.prompt
        if plan.whole_text:
            add_ids(&self.before, s.text, s.prompt)
            add_ids(&self.text, s.text + s.prompt, s.length - s.prompt)
        else:
            first = max(first, end - plan.last_n) if plan.last_n >= 0 else first
            add_ids(&self.text, s.text + first, end - first)
        return 0

    # Rows first .. end - 1 of what was filled in, the first of them at x's row `first`.
    cdef int run(self, chain_args *a, cnp.ndarray tokens, void *x, int64_t first, int64_t end) except -1:
        cdef chain_args b = a[0]
        cdef int64_t rows = end - first, width = b.cols * (4 if b.dtype == DTYPE_F32 else 2)
        if rows <= 0:
            return 0
        b.rows = rows
        b.x.ptr, b.x.bytes = <char *>x + first * b.x_stride, (rows - 1) * abs(b.x_stride) + width
        b.params.ptr, b.params.bytes = self.params + first, rows * sizeof(sample_params)
        b.chain_rows.ptr, b.chain_rows.bytes = self.rows + first, rows * sizeof(chain_row)
        b.steps.ptr, b.steps.bytes = self.steps_, self.step_count * sizeof(chain_step)
        b.state.ptr, b.state.bytes = self.state_ + STATE * first, rows * STATE * sizeof(double)
        b.tokens.ptr = <int64_t *>cnp.PyArray_DATA(tokens) + first
        b.tokens.bytes = rows * sizeof(int64_t)
        if b.mask_kind != MASK_NONE:
            b.mask.ptr = <char *>b.mask.ptr + first * b.mask_stride
            b.mask.bytes -= first * b.mask_stride
        fill_list(&self.bias, first, rows, &b.bias_ids, &b.bias_values, &b.bias_offsets)
        fill_list(&self.added, first, rows, &b.added_ids, &b.added_values, &b.added_offsets)
        fill_list(&self.before, first, rows, &b.prompt_ids, NULL, &b.prompt_offsets)
        fill_list(&self.text, first, rows, &b.output_ids, NULL, &b.output_offsets)
        return run(OP_chain, &b, b.cols, 3 * b.cols + 20000)

    # The row of a plan that is not plain, up to its last program.
    cdef object written(self, _Sequence s, object logits, rows_t *r, object mask, object guide):
        cdef edit_row row
        cdef cnp.ndarray z = scale(logits, 1.0)
        for group in s.plan.before:
            if isinstance(group, _Edits):
                row.x, row.dtype, row.cols = cnp.PyArray_DATA(z), DTYPE_F32, r.cols
                row.text, row.prompt, row.length = s.text, s.prompt, s.length
                self.edit(group, &row, False)
                touched_write(&self.touched, <float *>cnp.PyArray_DATA(z), r.cols)
            elif isinstance(group, Program):
                token, left = run_chain(z, group, mask=mask, seed=s.seed, keys=[s.key],
                                        step=s.first_step + s.length - s.prompt, return_support=True, on_invalid="mark")
                z = np.full(r.cols, -np.inf, np.float32)
                if token < 0:
                    return z
                z[left.ids] = left.logprobs
            else:
                z = _whole.applied(group, z, copied(s.text, s.length), guide)
        return z

    cdef void record(self, list order, const int64_t *tokens) noexcept:
        cdef _Sequence s
        cdef int64_t i = 0
        for s in order:
            if tokens[i] >= 0:
                s.append(tokens[i], &self.state_[STATE * i])
            i += 1

    # ---- saved ----

    def state_dict(self):
        """All that is needed to go on elsewhere, as plain data: numbers, arrays, and steps as (name, fields).

        Functions that steps were given are in it as they are.
        """
        self.enter()
        try:
            return {"version": 1, "steps": _plan.packed(self.plan.steps), "preset": self.preset, "seed": self.seed,
                    "vocab_size": self.vocab_size, "serial": self.serial,
                    "sequences": [self.packed(s) for s in self.order]}
        finally:
            self.leave()

    cdef dict packed(self, _Sequence s):
        states = None
        if s.plan.stateful:
            states = np.empty((s.length - s.prompt + 1, STATE))
            memcpy(cnp.PyArray_DATA(states), s.states, cnp.PyArray_NBYTES(states))
        return {"id": s.id, "prompt": copied(s.text, s.prompt),
                "output": copied(s.text + s.prompt, s.length - s.prompt), "seed": s.seed, "key": s.key,
                "step": s.first_step, "forks": s.forks, "states": states,
                "steps": _plan.packed(s.plan.steps) if s.own_steps else None}

    def load_state_dict(self, state):
        """Becomes the Sampler that state_dict() was called on, its steps and seed with it; or else raises, unchanged."""
        cdef Sampler new
        if not isinstance(state, dict) or state.get("version") != 1:
            raise ValueError("state must come from state_dict() of this version")
        try:
            new = self.loaded(state)
        except KeyError as error:
            raise ValueError(f"state: {error} is missing") from None
        self.enter()
        try:
            self.preset, self.plan, self.seed = new.preset, new.plan, new.seed
            self.vocab_size, self.serial = new.vocab_size, new.serial
            self.plans, self.by_value, self.sequences, self.order = new.plans, new.by_value, new.sequences, new.order
        finally:
            self.leave()

    cdef Sampler loaded(self, dict state):
        cdef _Sequence s
        cdef Sampler new = Sampler(_plan.unpacked(state["steps"]), seed=state["seed"], vocab_size=state["vocab_size"])
        preset, serial = state["preset"], state["serial"]
        if preset is not None and (not isinstance(preset, str) or preset not in _steps.PRESETS):
            raise ValueError(f"state: preset must be one of {', '.join(_steps.PRESETS)}, or None, got {preset!r}")
        for saved in state["sequences"]:
            own = None if saved["steps"] is None else _plan.unpacked(saved["steps"])
            new.add(saved["id"], saved["prompt"], output_ids=saved["output"], steps=own, seed=saved["seed"],
                    key=saved["key"], step=saved["step"])
            s = new.order[len(new.order) - 1]
            s.forks = integer(saved["forks"], "forks", 0, UINT64_MAX)
            if s.plan.stateful:
                states = np.ascontiguousarray(saved["states"], np.float64)
                if states.shape != (s.length - s.prompt + 1, STATE):
                    raise ValueError(f"sequence {s.id!r}: states have shape {states.shape}")
                if np.isnan(states).any():  # infinite they may be: of AdaptiveP(-inf), which is off
                    raise ValueError(f"sequence {s.id!r}: states must be numbers, got nan")
                memcpy(s.states, cnp.PyArray_DATA(states), cnp.PyArray_NBYTES(states))
        new.preset, new.serial = preset, integer(serial, "serial", 0, UINT64_MAX)
        return new

    def __reduce__(self):
        return _plan.restored, (type(self), self.state_dict())


_ADDED = {"prompt_ids": (), "output_ids": (), "steps": None, "params": None, "seed": None, "key": None, "step": 0}


# ---- edits without a state ----

_EDITS_OF = {}  # of lists of steps, a while


cdef _Edits edits_of(object steps):
    found = _plan.checked(steps)
    edits = _EDITS_OF.get(found)
    if edits is None:
        groups = _plan.groups(found)
        if len(groups) > 1 or (groups and groups[0].kind != "edit"):
            others = [type(step).__name__ for step in found if step._kind != "edit"]
            raise ValueError(f"apply_steps takes edits of single logits, got {', '.join(others)}")
        edits = _Edits(list(groups[0].steps) if groups else [])
        if len(_EDITS_OF) >= 256:
            _EDITS_OF.clear()
        _EDITS_OF[found] = edits
    return edits


def apply_steps(logits, steps, *, prompt_ids=None, output_ids=None, out=None):
    """The rows as edits by their texts leave them, float32, (V,) or (B, V): of steps those that docs/samplers.md calls so.

    prompt_ids, output_ids: a list of ids a row, or a 2-D array padded with -1. out: may be logits.
    Raises ValueError, TypeError before anything is written.

    >>> steps = [lanewise.steps.NoRepeatNgram(2), lanewise.steps.LogitBias({0: 1.5})]
    >>> lanewise.apply_steps(np.float32([1, 2, 3]), steps, output_ids=[1, 2, 1]).tolist()
    [2.5, 2.0, -inf]
    """
    cdef rows_t r
    cdef touched found
    cdef edit_row row
    cdef int64_t i
    cdef cnp.ndarray result, text
    owner = logits_rows(logits, &r, "logits")
    edits = edits_of(steps)
    if edits.largest >= r.cols:
        raise ValueError(f"a step names the id {edits.largest}, but logits are of {r.cols} ids")
    given = [(np.empty(0, np.int64), np.zeros(r.rows + 1, np.int64)) if ids is None else ragged_ids(ids, name, &r)
             for ids, name in ((prompt_ids, "prompt_ids"), (output_ids, "output_ids"))]
    if out is not None:
        check_out(out, owner.shape, cnp.NPY_FLOAT32, "out")
    result = np.asarray(out) if out is logits else scale(owner, 1.0)  # out may overlap the logits, which are still read
    memset(&found, 0, sizeof(found))
    try:
        for i in range(r.rows):
            parts = [ids[offsets_[i]:offsets_[i + 1]] for ids, offsets_ in given]
            text = np.concatenate(parts)
            row.x, row.dtype, row.cols = <char *>r.ptr + i * r.stride, r.dtype, r.cols
            row.text, row.prompt = <const int64_t *>cnp.PyArray_DATA(text), len(parts[0])
            row.length = cnp.PyArray_DIM(text, 0)
            if edit_by_text(&found, edits.step, edits.count, &row, False) < 0:
                raise MemoryError("no memory for edits")
            to = result if r.single else result[i]
            z = to if to.flags.c_contiguous and to.flags.aligned else np.ascontiguousarray(to)
            touched_write(&found, <float *>cnp.PyArray_DATA(<cnp.ndarray>z), r.cols)
            if z is not to:
                to[...] = z
    finally:
        touched_free(&found)
    if out is not None and out is not logits:
        out[...] = result
    return result if out is None else out


cdef object entropy():
    return int.from_bytes(os.urandom(8), "little")


cdef object mask_of(cnp.ndarray mask, int64_t row):
    return mask[row] if mask is not None and cnp.PyArray_NDIM(mask) == 2 else mask


cdef void fill_mask(chain_args *a, cnp.ndarray mask) noexcept:
    cdef bint is_bool = cnp.PyArray_TYPE(mask) == cnp.NPY_BOOL
    cdef int axes = cnp.PyArray_NDIM(mask)
    a.mask, a.mask_kind = whole(mask), MASK_BOOL if is_bool else MASK_BITS
    a.mask_width = cnp.PyArray_DIM(mask, axes - 1) * (1 if is_bool else 32)
    a.mask_stride = cnp.PyArray_STRIDE(mask, 0) if axes == 2 else 0


cdef void free_lists(ragged *lists) noexcept:
    free(lists.ids)
    free(lists.values)
    free(lists.offsets)


cdef int extend(ragged *lists, int64_t count) except -1:
    cdef int64_t room = 2 * (lists.count + count)
    if lists.count + count > lists.room:
        lists.room = 0
        grow(<void **>&lists.ids, room, sizeof(int64_t))
        grow(<void **>&lists.values, room, sizeof(float))
        lists.room = room
    return 0


cdef int add_ids(ragged *to, const int64_t *ids, int64_t count) except -1:
    extend(to, count)
    put(to.ids + to.count, ids, count * sizeof(int64_t))
    to.count += count
    return 0


# Spans of the lists of rows first .. first + rows - 1, unless all are empty.
cdef void fill_list(const ragged *lists, int64_t first, int64_t rows, span *ids, span *values, span *offsets) noexcept:
    cdef int64_t count = lists.offsets[first + rows]
    if count > lists.offsets[first]:
        ids.ptr, ids.bytes = lists.ids, count * sizeof(int64_t)
        offsets.ptr, offsets.bytes = lists.offsets + first, (rows + 1) * sizeof(int64_t)
        if values != NULL:
            values.ptr, values.bytes = lists.values, count * sizeof(float)


cdef int grow(void **memory, int64_t count, size_t size) except -1:
    cdef void *more = realloc(memory[0], count * size)
    if more == NULL:
        raise MemoryError(f"no memory for {count} of a call")
    memory[0] = more
    return 0
