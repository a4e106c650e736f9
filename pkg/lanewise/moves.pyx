# cython: language_level=3, freethreading_compatible=True, auto_pickle=False
"""Whole blocks of an array, moved as bytes: gather, scatter, copy, swap between pools, permute, zero.

Any array is a row of blocks along one of its axes. Moves of one call count as made at once.
"""
cimport cython
cimport numpy as cnp
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

import os

import numpy as np

from lanewise import _caches
from lanewise._arguments cimport integer
from lanewise._arrays cimport as_array, in_place, is_bfloat16
from lanewise._ops cimport *

cnp.import_array()


cdef extern from "numpy/arrayobject.h":
    ctypedef struct PyArray_Descr
    PyArray_Descr *dtype_of "PyArray_DESCR"(cnp.ndarray a)
    bint has_objects "PyDataType_REFCHK"(PyArray_Descr *dtype)
    bint is_same "PyArray_EquivTypes"(PyArray_Descr *dtype, PyArray_Descr *other)


cdef extern from "plan.h":
    struct targets:
        pass
    struct plan:
        int64_t *src
        int64_t *dst
        int64_t rows
        int spare
    enum:
        FEW_BLOCKS
    int all_differ(const int64_t *ids, int64_t rows, int64_t blocks) nogil
    int64_t target_slots(int64_t rows) nogil
    int64_t enter_targets(targets *t, const int64_t *ids, int64_t rows, int64_t *slots) nogil
    int64_t writer_of(const targets *t, int64_t id) nogil
    int64_t plan_room(int64_t rows) nogil
    int order_moves(const targets *t, const int64_t *src, int64_t rows, int64_t shift, int64_t *room, plan *p) nogil


# ---- streaming ----

cdef int64_t stream_from = -1  # bytes; -1 until it is first asked for


cdef int64_t threshold() except -1:
    global stream_from
    if stream_from < 0:
        stream_from = default_threshold()
    return stream_from


cdef int64_t default_threshold() except -1:
    text = os.environ.get("LANEWISE_STREAM_BYTES", "")
    if not text:
        return min(max(_caches.last_level_cache() // 4, 2 << 20), 32 << 20)
    if not (text.isascii() and text.isdigit() and int(text) <= INT64_MAX):
        raise ValueError(f"LANEWISE_STREAM_BYTES must be a whole number, got {text!r}")
    return int(text)


def get_stream_threshold():
    """From how many bytes a call of the moves writes around the caches.

    Unless set: LANEWISE_STREAM_BYTES, or a quarter of the last-level cache, at least 2 and at most 32 MiB.

    >>> lanewise.get_stream_threshold() >= 0
    True
    """
    return threshold()


def set_stream_threshold(n):
    """Lets calls of the moves that write n bytes or more do so around the caches; None: as get_stream_threshold says.

    What is written around the caches costs a third less traffic, but is not in them when it is read next. Results do
    not change. Raises ValueError, TypeError.

    >>> lanewise.set_stream_threshold(1 << 20)
    >>> lanewise.get_stream_threshold()
    1048576
    >>> lanewise.set_stream_threshold(None)
    """
    global stream_from
    stream_from = -1 if n is None else <int64_t>integer(n, "n", 0, INT64_MAX)


# ---- arrays as blocks ----

cdef enum:
    MOST_AXES = 64  # of NumPy 2


cdef struct blocks_t:
    char *start            # of block 0
    int64_t count, step    # blocks; bytes from one to the next
    int64_t item
    int axes               # of a block
    int64_t shape[MOST_AXES]
    int64_t strides[MOST_AXES]


# Blocks of two arrays of one shape, or of one: runs of adjacent bytes in nested loops, the innermost first.
cdef struct runs_t:
    int64_t bytes
    int loops
    int64_t times[MOST_AXES]
    int64_t src[MOST_AXES]
    int64_t dst[MOST_AXES]


cdef cnp.ndarray source(object x, str name):
    cdef cnp.ndarray a = x if cnp.PyArray_CheckExact(x) else as_array(x, name)
    if has_objects(dtype_of(a)):
        raise TypeError(f"{name} must not have Python objects in it, got {a.dtype}")
    return a


# What is written to has to be the caller's own memory, not a copy of it.
cdef cnp.ndarray target(object x, str name):
    if not cnp.PyArray_Check(x):
        if not hasattr(x, "__dlpack__"):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
        in_place(x, name)
    cdef cnp.ndarray a = source(x, name)
    if not cnp.PyArray_ISWRITEABLE(a):
        raise ValueError(f"{name} is read-only")
    return a


cdef int fill_blocks(blocks_t *b, cnp.ndarray a, object axis_, str name) except -1:
    cdef int axes = cnp.PyArray_NDIM(a), i, axis
    if axes == 0:
        raise ValueError(f"{name} must have at least one axis, got a number")
    axis = <int>integer(axis_, "axis", -MOST_AXES, MOST_AXES - 1)
    if not -axes <= axis < axes:
        raise ValueError(f"axis must be in [{-axes}, {axes - 1}] for {name} of shape {(<object>a).shape}, got {axis}")
    axis += axes if axis < 0 else 0
    b.start = <char *>cnp.PyArray_DATA(a)
    b.count, b.step, b.item = cnp.PyArray_DIM(a, axis), cnp.PyArray_STRIDE(a, axis), cnp.PyArray_ITEMSIZE(a)
    b.axes = 0
    for i in range(axes):
        if i != axis:
            b.shape[b.axes], b.strides[b.axes] = cnp.PyArray_DIM(a, i), cnp.PyArray_STRIDE(a, i)
            b.axes += 1
    return axis


cdef int check_alike(cnp.ndarray a, str name, cnp.ndarray b, str other, int axis) except -1:
    """One dtype, and one shape but along `axis`."""
    cdef int i, same = cnp.PyArray_NDIM(a) == cnp.PyArray_NDIM(b)
    if dtype_of(a) != dtype_of(b) and not is_same(dtype_of(a), dtype_of(b)) and \
            not (is_bfloat16(a.dtype) and is_bfloat16(b.dtype)):
        raise TypeError(f"{name} must be {b.dtype} as {other} is, got {a.dtype}")
    for i in range(cnp.PyArray_NDIM(a) if same else 0):
        same = same and (i == axis or cnp.PyArray_DIM(a, i) == cnp.PyArray_DIM(b, i))
    if not same:
        raise ValueError(f"{name} must have the shape of {other} but along axis {axis}: "
                         f"{(<object>b).shape}, got {(<object>a).shape}")
    return 0


cdef int64_t block_bytes(const blocks_t *b) noexcept:
    cdef int64_t bytes = b.item
    cdef int i
    for i in range(b.axes):
        bytes *= b.shape[i]
    return bytes


# All memory of an array: from start + low to start + high.
cdef void reach(const blocks_t *b, int64_t *low, int64_t *high) noexcept:
    cdef int64_t far = (b.count - 1) * b.step
    cdef int i
    low[0], high[0] = min(far, 0), max(far, 0) + b.item
    for i in range(b.axes):
        far = (b.shape[i] - 1) * b.strides[i]
        low[0] += min(far, 0)
        high[0] += max(far, 0)


cdef span memory_of(const blocks_t *b, int64_t *at) noexcept:
    cdef int64_t low, high
    cdef span s
    reach(b, &low, &high)
    at[0] = -low
    s.ptr, s.bytes = b.start + low, high - low
    return s


# Whether no byte belongs to two elements: each axis steps over all that lies within it. `count` stands for b.count.
cdef bint is_nested(const blocks_t *b, int64_t count) noexcept:
    cdef int64_t shape[MOST_AXES]
    cdef int64_t strides[MOST_AXES]
    cdef int64_t extent = b.item, stride
    cdef int i, j, axes = 0
    for i in range(-1, b.axes):
        if (count if i < 0 else b.shape[i]) > 1:
            stride = abs(b.step if i < 0 else b.strides[i])
            j = axes
            while j and strides[j - 1] > stride:
                strides[j], shape[j] = strides[j - 1], shape[j - 1]
                j -= 1
            strides[j], shape[j] = stride, count if i < 0 else b.shape[i]
            axes += 1
    for i in range(axes):
        if strides[i] < extent:
            return False
        extent += strides[i] * (shape[i] - 1)
    return True


cdef void join_axes(const blocks_t *src, const blocks_t *dst, runs_t *r) noexcept:
    cdef int order[MOST_AXES]
    cdef int i, j, axes = 0, last
    for i in range(dst.axes):
        if dst.shape[i] != 1:
            j = axes
            while j and abs(dst.strides[order[j - 1]]) >= abs(dst.strides[i]):
                order[j] = order[j - 1]
                j -= 1
            order[j] = i
            axes += 1
    r.bytes, r.loops = dst.item, 0
    for j in range(axes):
        i, last = order[j], r.loops - 1
        if last < 0 and src.strides[i] == r.bytes and dst.strides[i] == r.bytes:
            r.bytes *= dst.shape[i]
        elif last >= 0 and src.strides[i] == r.times[last] * r.src[last] and \
                dst.strides[i] == r.times[last] * r.dst[last]:
            r.times[last] *= dst.shape[i]
        else:
            r.times[r.loops], r.src[r.loops], r.dst[r.loops] = dst.shape[i], src.strides[i], dst.strides[i]
            r.loops += 1


# ---- ids ----


cdef cnp.ndarray id_array(object ids, str name, int axes):
    cdef cnp.ndarray a = ids if cnp.PyArray_CheckExact(ids) else as_array(ids, name)
    cdef int type_ = cnp.PyArray_TYPE(a)
    if not (type_ == cnp.NPY_INT64 or type_ == cnp.NPY_INT32) or not cnp.PyArray_ISBEHAVED_RO(a):
        if a.dtype.kind not in "iu" and cnp.PyArray_SIZE(a):
            raise TypeError(f"{name} must be integers, got {a.dtype}")
        if a.dtype.kind == "u" and cnp.PyArray_SIZE(a) and a.max() > INT64_MAX:
            raise ValueError(f"{name} has a {a.max()}, which is no block")
        a = a.astype(np.int64)
    if axes == 2 and cnp.PyArray_SIZE(a) == 0:
        a = np.empty((0, 2), np.int64)
    if cnp.PyArray_NDIM(a) != axes or axes == 2 and cnp.PyArray_DIM(a, 1) != 2:
        raise ValueError(f"{name} must have shape {'(M, 2)' if axes == 2 else '(M,)'}, got {(<object>a).shape}")
    return a


# One row or column as int64, each below `count`: a copy, so that what is checked is what is used.
cdef cnp.ndarray checked(cnp.ndarray ids, int column, int64_t count, str name, str pool):
    cdef cnp.npy_intp rows = cnp.PyArray_DIM(ids, 0), step = cnp.PyArray_STRIDE(ids, 0), i
    cdef const char *at = <const char *>cnp.PyArray_DATA(ids)
    cdef cnp.ndarray copy = cnp.PyArray_EMPTY(1, &rows, cnp.NPY_INT64, 0)
    cdef int64_t *to = <int64_t *>cnp.PyArray_DATA(copy)
    cdef bint wide = cnp.PyArray_TYPE(ids) == cnp.NPY_INT64, is_bad = False
    if column > 0:
        at += column * cnp.PyArray_STRIDE(ids, 1)
    if wide and step == sizeof(int64_t):
        memcpy(to, at, rows * sizeof(int64_t))
    else:
        for i in range(rows):
            to[i] = (<const int64_t *>(at + i * step))[0] if wide else (<const int32_t *>(at + i * step))[0]
    for i in range(rows):
        is_bad |= <uint64_t>to[i] >= <uint64_t>count
    if is_bad:
        i = int(np.argmax((copy < 0) | (copy >= count)))
        raise ValueError(f"{name}[{i if column < 0 else f'{i}, {column}'}] is {to[i]}; {pool} has the blocks "
                         f"0 to {count - 1}" if count else f"{name} must be empty: {pool} has no blocks")
    return copy


# ---- moves ----


cdef struct moves_t:
    int64_t *sources  # NULL: 0, 1, 2 ...
    int64_t *targets
    int64_t rows
    int ordered, spare
    int stream


cdef int64_t *ids_of(cnp.ndarray ids) noexcept:
    return <int64_t *>cnp.PyArray_DATA(ids)


cdef span ids_span(int64_t *ids, int64_t rows) noexcept:
    cdef span s
    s.ptr, s.bytes = ids, rows * sizeof(int64_t) if ids != NULL else 0
    return s


@cython.internal
cdef class Plan:
    """Targets that are all different, and an order for the moves to them."""
    cdef int64_t *memory
    cdef targets entered

    def __dealloc__(self):
        free(self.memory)

    cdef int enter(self, const int64_t *ids, int64_t rows, str name, bint pairs, bint to_order) except -1:
        cdef int64_t slots = target_slots(rows), again
        self.memory = <int64_t *>malloc((slots + (plan_room(rows) if to_order else 0)) * sizeof(int64_t))
        if self.memory == NULL:
            raise MemoryError(f"no memory to plan {rows} moves")
        again = enter_targets(&self.entered, ids, rows, self.memory)
        if again >= 0:
            column = ", 1" if pairs else ""
            raise ValueError(f"{name}[{writer_of(&self.entered, ids[again])}{column}] and {name}[{again}{column}] are "
                             f"both {ids[again]}: a block can be written once")
        return 0

    cdef void order(self, moves_t *m, int64_t shift) noexcept:
        cdef plan p
        if order_moves(&self.entered, m.sources, m.rows, shift, self.memory + target_slots(m.rows), &p):
            m.sources, m.targets, m.rows, m.ordered, m.spare = p.src, p.dst, p.rows, True, p.spare


cdef int move(const blocks_t *src, const blocks_t *dst, const moves_t *m, int op=OP_move_blocks) except -1:
    cdef move_args a
    cdef runs_t r
    cdef int64_t turn[MOST_AXES]
    cdef int64_t row_work
    cdef int i
    if m.rows == 0 or block_bytes(dst) == 0:
        return 0
    join_axes(src, dst, &r)
    a.src, a.dst = memory_of(src, &a.src_at), memory_of(dst, &a.dst_at)
    if op == OP_zero_blocks:
        a.src.ptr = NULL
    a.sources, a.targets = ids_span(m.sources, m.rows), ids_span(m.targets, m.rows)
    a.sizes.ptr, a.sizes.bytes = NULL, 0
    a.rows, a.together = m.rows, 1
    if m.ordered:
        a.rows, a.together = 1, m.rows
    a.first_row, a.cols = 0, r.bytes if m.spare else 0
    a.bytes, a.stream = r.bytes, m.stream
    a.src_block, a.dst_block = src.step, dst.step
    a.layers, a.src_layer, a.dst_layer = 1, 0, 0
    if r.loops:
        a.layers, a.src_layer, a.dst_layer = r.times[0], r.src[0], r.dst[0]
    row_work = a.layers * (50 + r.bytes // 2)
    for i in range(1, r.loops):
        turn[i] = 0
    while True:
        run(op, &a, a.cols, row_work)
        i = 1
        while i < r.loops:
            turn[i] += 1
            a.src_at += r.src[i]
            a.dst_at += r.dst[i]
            if turn[i] < r.times[i]:
                break
            a.src_at -= turn[i] * r.src[i]
            a.dst_at -= turn[i] * r.dst[i]
            turn[i] = 0
            i += 1
        if i >= r.loops:
            return 0


# As if all sources were read before a target is written, though the two may be views of the same memory.
cdef int move_at_once(const blocks_t *src, const blocks_t *dst, moves_t *m, str name, bint pairs) except -1:
    cdef int64_t shift = 0
    cdef bint meet = may_meet(src, dst), on_one_grid = meet and is_one_grid(src, dst, &shift)
    cdef Plan plan
    if not meet and (m.targets == NULL or dst.count <= FEW_BLOCKS and all_differ(m.targets, m.rows, dst.count)):
        return move(src, dst, m)
    plan = Plan()
    if m.targets != NULL:
        plan.enter(m.targets, m.rows, name, pairs, on_one_grid)
    if not meet:
        return move(src, dst, m)
    if not on_one_grid:
        return move_by_copy(src, dst, m)
    if m.targets == NULL or m.sources == NULL:
        numbers = np.arange(m.rows)
        if m.sources == NULL:
            m.sources = ids_of(numbers)
        else:
            m.targets = ids_of(numbers)
            plan.enter(m.targets, m.rows, name, pairs, True)
    plan.order(m, shift)
    return move(src, dst, m)


cdef int move_by_copy(const blocks_t *src, const blocks_t *dst, const moves_t *m) except -1:
    cdef blocks_t between = dst[0]
    cdef moves_t there = m[0], back = m[0]
    cdef int i
    cdef int64_t step = dst.item
    between.count = m.rows
    for i in range(dst.axes - 1, -1, -1):
        between.strides[i] = step
        step *= dst.shape[i]
    between.step = step
    copy = np.empty(step * m.rows, np.uint8)
    between.start = <char *>cnp.PyArray_DATA(copy)
    there.targets = back.sources = NULL
    move(src, &between, &there)
    return move(&between, dst, &back)


cdef bint may_meet(const blocks_t *src, const blocks_t *dst) noexcept:
    cdef int64_t low, high, other_low, other_high
    reach(src, &low, &high)
    reach(dst, &other_low, &other_high)
    return src.start + low < dst.start + other_high and dst.start + other_low < src.start + high


# Whether block `shift + i` of the source is block i of the target, and no two blocks of either meet otherwise.
cdef bint is_one_grid(const blocks_t *src, const blocks_t *dst, int64_t *shift) noexcept:
    cdef int64_t apart = dst.start - src.start
    cdef int i
    if src.step != dst.step or src.step == 0 or apart % src.step:
        return False
    for i in range(src.axes):
        if src.strides[i] != dst.strides[i] and src.shape[i] > 1:
            return False
    shift[0] = apart // src.step
    return is_nested(src, max(src.count, shift[0] + dst.count) - min(shift[0], 0))


cdef int stream_of(int64_t bytes) except -1:
    return bytes >= threshold()


def gather_blocks(pool, ids, *, axis=0, out=None):
    """Blocks `ids` of `pool` one after another: np.take(pool, ids, axis), of any dtype.

    A block is what one index along `axis` selects: (N, ...), or (L, N, ...) with axis=1 for all layers at once. ids:
    integers in 0..N-1, repeats allowed. out: an array of pool's dtype to write to, returned; may overlap pool. The
    result is C-contiguous, so that another device can be sent it as one run.
    Raises ValueError, TypeError, before anything is written.

    >>> pool = np.arange(8.0).reshape(4, 2)
    >>> lanewise.gather_blocks(pool, [3, 0])
    array([[6., 7.],
           [0., 1.]])
    """
    cdef blocks_t src, dst
    cdef moves_t m
    cdef cnp.ndarray a = source(pool, "pool"), numbers, result
    cdef int at = fill_blocks(&src, a, axis, "pool")
    numbers = checked(id_array(ids, "ids", 1), -1, src.count, "ids", "pool")
    m.sources, m.targets, m.rows, m.ordered, m.spare = ids_of(numbers), NULL, cnp.PyArray_DIM(numbers, 0), False, False
    if out is None:
        shape = (<object>a).shape
        result = np.empty(shape[:at] + (m.rows,) + shape[at + 1:], a.dtype)
        fill_blocks(&dst, result, at, "out")
        m.stream = stream_of(m.rows * block_bytes(&dst))
        move(&src, &dst, &m)
        return result
    result = target(out, "out")
    check_alike(result, "out", a, "pool", at)
    fill_blocks(&dst, result, at, "out")
    if dst.count != m.rows:
        raise ValueError(f"out must have {m.rows} blocks, one for each of ids, got shape {(<object>result).shape}")
    check_writable(&dst, "out")
    m.stream = stream_of(m.rows * block_bytes(&dst))
    move_at_once(&src, &dst, &m, "ids", False)
    return out


def scatter_blocks(blocks, ids, pool, *, axis=0):
    """Writes blocks[i] to pool[ids[i]], in place: what gather_blocks undoes.

    blocks: an array of pool's dtype and shape, but along `axis` as many as ids; may overlap pool. ids: integers in
    0..N-1, all different. pool may be a torch tensor.
    Raises ValueError, TypeError, before anything is written.

    >>> pool = np.zeros((4, 2))
    >>> lanewise.scatter_blocks(np.ones((1, 2)), [2], pool)
    >>> pool[:, 0]
    array([0., 0., 1., 0.])
    """
    cdef blocks_t src, dst
    cdef moves_t m
    cdef cnp.ndarray to = target(pool, "pool"), from_ = source(blocks, "blocks"), numbers
    cdef int at = fill_blocks(&dst, to, axis, "pool")
    check_alike(from_, "blocks", to, "pool", at)
    fill_blocks(&src, from_, at, "blocks")
    numbers = checked(id_array(ids, "ids", 1), -1, dst.count, "ids", "pool")
    m.sources, m.targets, m.rows, m.ordered, m.spare = NULL, ids_of(numbers), cnp.PyArray_DIM(numbers, 0), False, False
    if src.count != m.rows:
        raise ValueError(f"blocks must have {m.rows} blocks, one for each of ids, got shape {(<object>from_).shape}")
    check_writable(&dst, "pool")
    m.stream = stream_of(m.rows * block_bytes(&src))
    move_at_once(&src, &dst, &m, "ids", False)


def copy_blocks(pool, pairs, *, axis=0):
    """For each of `pairs` writes block pairs[i, 0] to block pairs[i, 1], all as if at once: cycles and chains are fine.

    pool: an array, or a list of arrays (keys and values of each layer) in all of which the blocks move. pairs: integers,
    (M, 2); a block may be written once.
    Raises ValueError, TypeError, before anything is written.

    >>> pool = np.arange(3)
    >>> lanewise.copy_blocks(pool, [(0, 1), (1, 0)])
    >>> pool
    array([1, 0, 2])
    """
    cdef cnp.ndarray a, sources, targets
    cdef blocks_t b
    cdef moves_t m
    cdef Plan plan = Plan()
    cdef int64_t total = 0
    cdef bint one = not isinstance(pool, (list, tuple))
    arrays = [target(pool, "pool")] if one else [target(p, f"pool[{i}]") for i, p in enumerate(pool)]
    pair_array = id_array(pairs, "pairs", 2)
    sources = targets = None
    starts = {}
    for i, array in enumerate(arrays):
        name = "pool" if one else f"pool[{i}]"
        fill_blocks(&b, array, axis, name)
        check_writable(&b, name)
        if b.count and block_bytes(&b) and starts.setdefault(<size_t>b.start, i) != i:
            raise ValueError(f"pool[{starts[<size_t>b.start]}] and {name} are the same memory")
        sources = checked(pair_array, 0, b.count, "pairs", name)
        targets = checked(pair_array, 1, b.count, "pairs", name)
        total += cnp.PyArray_DIM(sources, 0) * block_bytes(&b)
    if sources is None:
        return
    m.sources, m.targets, m.rows, m.ordered, m.spare = ids_of(sources), ids_of(targets), len(sources), False, False
    m.stream = stream_of(total)
    plan.enter(m.targets, m.rows, "pairs", True, True)
    plan.order(&m, 0)
    for array in arrays:
        fill_blocks(&b, array, axis, "pool")
        move(&b, &b, &m)


def swap_blocks(src, dst, pairs, *, axis=0):
    """For each of `pairs` writes block pairs[i, 0] of `src` to block pairs[i, 1] of `dst`, all as if at once.

    The name is vLLM's, for what swaps a sequence in or out: src stays as it is. The two may have different numbers of
    blocks, overlap, or be one array. Pairs and errors as in copy_blocks.

    >>> device, host = np.arange(3), np.zeros(2, int)
    >>> lanewise.swap_blocks(device, host, [(2, 0)])
    >>> host
    array([2, 0])
    """
    cdef blocks_t a, b
    cdef moves_t m
    cdef cnp.ndarray from_ = source(src, "src"), to = target(dst, "dst"), sources, targets
    cdef int at = fill_blocks(&b, to, axis, "dst")
    check_alike(from_, "src", to, "dst", at)
    fill_blocks(&a, from_, at, "src")
    check_writable(&b, "dst")
    pair_array = id_array(pairs, "pairs", 2)
    sources, targets = checked(pair_array, 0, a.count, "pairs", "src"), checked(pair_array, 1, b.count, "pairs", "dst")
    m.sources, m.targets, m.rows, m.ordered, m.spare = ids_of(sources), ids_of(targets), len(sources), False, False
    m.stream = stream_of(m.rows * block_bytes(&b))
    move_at_once(&a, &b, &m, "pairs", True)


def permute_blocks(pool, order, *, axis=0):
    """pool[i] = pool[order[i]] for every i, in place, with room for one block more.

    order: each of 0..N-1 once. Raises ValueError, TypeError, before anything is written.

    >>> pool = np.array([10, 11, 12])
    >>> lanewise.permute_blocks(pool, [2, 0, 1])
    >>> pool
    array([12, 10, 11])
    """
    cdef blocks_t b
    cdef moves_t m
    cdef Plan plan = Plan(), sources_plan = Plan()
    cdef cnp.ndarray a = target(pool, "pool"), sources, targets
    fill_blocks(&b, a, axis, "pool")
    check_writable(&b, "pool")
    sources = checked(id_array(order, "order", 1), -1, b.count, "order", "pool")
    if len(sources) != b.count:
        raise ValueError(f"order must have one id a block: {b.count}, got {len(sources)}")
    targets = np.arange(b.count)
    m.sources, m.targets, m.rows, m.ordered, m.spare = ids_of(sources), ids_of(targets), b.count, False, False
    m.stream = stream_of(b.count * block_bytes(&b))
    sources_plan.enter(m.sources, m.rows, "order", False, False)
    plan.enter(m.targets, m.rows, "order", False, True)
    plan.order(&m, 0)
    move(&b, &b, &m)


def zero_blocks(pool, ids=None, *, axis=0):
    """Fills blocks `ids` of `pool`, or all, with zero bytes. ids: integers in 0..N-1.

    Raises ValueError, TypeError, before anything is written.

    >>> pool = np.ones((3, 2))
    >>> lanewise.zero_blocks(pool, [0, 2])
    >>> pool[:, 0]
    array([0., 1., 0.])
    """
    cdef blocks_t b
    cdef moves_t m
    cdef cnp.ndarray a = target(pool, "pool"), numbers
    fill_blocks(&b, a, axis, "pool")
    m.sources, m.targets, m.rows, m.ordered, m.spare = NULL, NULL, b.count, False, False
    if ids is not None:
        numbers = checked(id_array(ids, "ids", 1), -1, b.count, "ids", "pool")
        m.targets, m.rows = ids_of(numbers), cnp.PyArray_DIM(numbers, 0)
    m.stream = stream_of(m.rows * block_bytes(&b))
    move(&b, &b, &m, OP_zero_blocks)


cdef int check_writable(const blocks_t *b, str name) except -1:
    if not is_nested(b, b.count):
        raise ValueError(f"{name} has blocks that overlap one another in memory")
    return 0


def copy_addresses(src_ptrs, dst_ptrs, sizes):
    """For compat: copies sizes[i] bytes from address src_ptrs[i] to dst_ptrs[i]. Ranges must not overlap, nor be wrong."""
    cdef move_args a
    cdef cnp.ndarray sources, targets, bytes_, total
    sources, targets, bytes_ = [checked(id_array(x, name, 1), -1, INT64_MAX, name, "memory")
                                for x, name in ((src_ptrs, "src_ptrs"), (dst_ptrs, "dst_ptrs"), (sizes, "sizes"))]
    if not len(sources) == len(targets) == len(bytes_):
        raise ValueError(f"src_ptrs, dst_ptrs and sizes must be as many, got {len(sources)}, {len(targets)} and "
                         f"{len(bytes_)}")
    if not len(sources):
        return
    a.src.ptr, a.src.bytes, a.dst.ptr, a.dst.bytes = NULL, 0, NULL, 0
    a.rows, a.first_row, a.cols, a.together = len(sources), 0, 0, 1
    a.sources, a.targets = ids_span(ids_of(sources), a.rows), ids_span(ids_of(targets), a.rows)
    a.sizes = ids_span(ids_of(bytes_), a.rows)
    a.bytes, a.layers, a.src_at, a.src_layer, a.dst_at, a.dst_layer = 0, 1, 0, 0, 0, 0
    a.src_block = a.dst_block = 1
    work = int(bytes_.sum())
    a.stream = stream_of(work)
    run(OP_move_blocks, &a, 0, 50 + work // a.rows // 2)
