# cython: language_level=3, freethreading_compatible=True, auto_pickle=False
"""Attention over cached keys and values: what is to be done is planned once a step, and run once a layer."""
cimport cython
cimport numpy as cnp
from libc.float cimport FLT_MAX
from libc.math cimport INFINITY, sqrt
from libc.stdint cimport INT32_MAX, int64_t

import numpy as np

from lanewise import _threads
from lanewise._arguments cimport integer, number, word
from lanewise._arrays cimport as_array, check_out, has_shape, is_bfloat16, logits_rows, readable, rows_span, rows_t, whole
from lanewise._ops cimport *
from lanewise._sides cimport fill_layer, fill_scales

from . import layouts

cnp.import_array()

cdef enum:
    QUERY = 4  # int64 in an attend_query
    TASK = 8   # int64 in an attend_task
    TASKS_A_THREAD = 4
    MOST_STATES = 1 << 18  # (chunk, query, head) triples that are kept apart: beyond, tasks are many anyway

cdef double LOG2_E = 1.4426950408889634


# ---- arrays in ----


cdef cnp.ndarray integers(object x, str name, int axes):
    array = as_array(x, name)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.ndim != axes:
        raise ValueError(f"{name} must have {axes} {'axis' if axes == 1 else 'axes'}, got shape {array.shape}")
    if array.dtype == np.uint64 and array.size and array.max() > INT32_MAX:
        raise ValueError(f"{name} must be at most {INT32_MAX}, got {array.max()}")
    return np.array(array, np.int64, order="C")  # its own: what is checked must stay so


# Native, aligned, no stride below 0.
cdef bint is_forward(cnp.ndarray a):
    cdef int i
    for i in range(cnp.PyArray_NDIM(a)):
        if cnp.PyArray_STRIDE(a, i) < 0:
            return False
    return cnp.PyArray_ISNOTSWAPPED(a) and cnp.PyArray_ISALIGNED(a)


# Whether what is read, all spans before `out`, is in what will be written.
cdef bint reads_out(const attend_args *a):
    cdef const span *s
    cdef char *out = <char *>a.out.ptr
    cdef int i
    for i in range(&a.out - <const span *>a):
        s = <const span *>a + i
        if <char *>s.ptr < out + a.out.bytes and out < <char *>s.ptr + s.bytes:
            return True
    return False


@cython.final
@cython.internal
cdef class Caches:
    """The keys and values of one layer, seen as (blocks, heads, tokens, head_dim), or (..., pieces, x)."""
    cdef object layout, block_size, k_array, v_array
    cdef str k_axes, v_axes, both  # both: the axes of one array that holds keys and values
    cdef cnp.ndarray k, v

    def __cinit__(self, k_cache, v_cache, layout, block_size):
        self.layout, self.block_size, self.both = layout, block_size, None
        self.k_axes, self.v_axes = layouts.parse(layout)
        self.k_array = cache_array(k_cache, self.k_axes, layout, "k_cache")
        if "2" in self.k_axes:
            if v_cache is not None:
                raise ValueError(f"layout {layout!r} has keys and values in k_cache, so v_cache must be None")
            self.both = self.k_axes
            self.k_array, self.v_array = parted(self.k_array, self.both, layout, "k_cache")
            self.k_axes = self.v_axes = self.both.replace("2", "")
        elif v_cache is None:
            raise ValueError(f"v_cache is missing: layout {layout!r} has keys alone in k_cache")
        else:
            self.v_array = cache_array(v_cache, self.v_axes, layout, "v_cache")
        self.k = where_kernels_read(canonical(self.k_array, self.k_axes, block_size))
        self.v = where_kernels_read(canonical(self.v_array, self.v_axes, block_size))
        if not agree(self.k, self.v):
            raise ValueError("k_cache and v_cache must agree but for head_dim: as (blocks, heads, tokens, head_dim) they "
                             f"are {(<object>self.k).shape} and {(<object>self.v).shape}")

    # Scales and zeros, in one array where keys and values are.
    cdef tuple scales(self, object k_scales, object v_scales, side *keys, side *values, span *k_memory, span *v_memory):
        if self.both is not None and k_scales is not None:
            if v_scales is not None:
                raise ValueError(f"layout {self.layout!r} has the scales of both in k_scales, so v_scales must be None")
            axes = self.both.replace("D", "").replace("x", "") + "D"
            both = cache_array(k_scales, axes, self.layout, "k_scales")
            k_scales, v_scales = parted(both, axes, self.layout, "k_scales")
        return (self.side_scales(k_scales, self.k_array, self.k, self.k_axes, "k_scales", keys, k_memory),
                self.side_scales(v_scales, self.v_array, self.v, self.v_axes, "v_scales", values, v_memory))

    cdef object side_scales(self, object x, object array, object view, str axes, str name, side *s, span *memory):
        memory.ptr, memory.bytes = NULL, 0
        if s.dtype != DTYPE_I8:
            if x is not None:
                raise ValueError(f"{name} is for int8 caches")
            return None
        if x is None:
            raise ValueError(f"{name} is missing: an int8 cache needs the scale and zero of each token")
        given = as_array(x, name)
        if given.dtype != np.float32 or not given.dtype.isnative:
            raise TypeError(f"{name} must be float32, got {given.dtype}")
        shape = tuple([n for n, axis in zip(array.shape, axes) if axis not in "Dx"]) + (2,)
        if given.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {given.shape}")
        found = layouts.scale_views(given, axes, self.block_size)[0][0][0]
        if found.strides[3] != 4 or not found.flags.aligned or any([stride < 0 for stride in found.strides]):
            found = found.copy()
        fill_scales(found[None], view[None], s, memory, name, False)
        return found


# Whether two arrays have as many blocks, heads and tokens.
cdef bint agree(cnp.ndarray a, cnp.ndarray b):
    cdef int i
    for i in range(3):
        if cnp.PyArray_DIM(a, i) != cnp.PyArray_DIM(b, i):
            return False
    return True


# A view of our own: whoever has the array may give it another shape while we look at other arguments.
cdef object cache_array(object x, str axes, object layout, str name):
    array = as_array(x, name)[...]
    if cnp.PyArray_NDIM(array) != len(axes):
        raise ValueError(f"{name} must have {len(axes)} axes for layout {layout!r}, got shape {array.shape}")
    if "L" in axes and array.shape[axes.index("L")] != 1:
        raise ValueError(f"{name} must be of one layer, got {array.shape[axes.index('L')]} of them: layout {layout!r}, "
                         f"shape {array.shape}")
    return array


# One array that holds keys and values, as two.
cdef tuple parted(object array, str axes, object layout, str name):
    cdef int at = axes.index("2")
    if array.shape[at] != 2:
        raise ValueError(f"layout {layout!r}: axis 2 of {name} must have 2 entries, got shape {array.shape}")
    before = (slice(None),) * at
    return array[(*before, 0)], array[(*before, 1)]


cdef object canonical(object array, str axes, object block_size):
    if axes == "NHTD":
        return array
    if axes == "NTHD":
        return cnp.PyArray_SwapAxes(array, 1, 2)
    return layouts.views(array, axes, block_size)[0][0][0]


# What a kernel can read where it is, or a copy.
cdef object where_kernels_read(cnp.ndarray view):
    cdef bint direct = is_forward(view)
    if cnp.PyArray_NDIM(view) == 5:  # pieces
        direct &= cnp.PyArray_STRIDE(view, 4) == cnp.PyArray_ITEMSIZE(view) or cnp.PyArray_DIM(view, 4) == 1
    return view if direct else (<object>view).astype(view.dtype.newbyteorder("="), order="C")


cdef span memory_of(object view):
    cdef span s
    s.ptr, s.bytes = NULL, 0
    if view is not None:
        reach = sum([(n - 1) * abs(stride) for n, stride in zip(view.shape, view.strides)])
        s.ptr, s.bytes = cnp.PyArray_DATA(<cnp.ndarray>view), reach + view.itemsize if view.size else 0
    return s


cdef object of_heads(object x, str name, int64_t heads, double high):
    if x is None:
        return None
    array = np.require(to_float32(as_array(x, name)), requirements="CA")
    if array.shape != (heads,):
        raise ValueError(f"{name} must have shape ({heads},), one a query head, got {array.shape}")
    bad = np.flatnonzero(~(array <= high))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] must be a number{'' if high == INFINITY else ' below inf'}, got {array[bad[0]]}")
    return array


# ---- the plan ----


@cython.final
cdef class AttentionPlan:
    """Which queries see which keys, where those are, and how the work is shared: made once a step, run once a layer.

    block_table: (B, M) ids of each sequence's blocks in order, entries behind its length ignored. lengths: (B,) keys of
    each sequence, its new tokens included. query_start: (B + 1,) where each sequence's queries begin in q; by default
    one query each. The queries are the last tokens of their sequences; with causal, each sees itself and what is before
    it; with window, at most that many keys before its own. shared_prefix: the first tokens, if all sequences have them
    in the same blocks: they are then read once for all. hide_null: a negative id hides its block's keys, instead of
    being an error.

    Work is cut where keys are a multiple of 256, and results are the same bits however it is cut.
    Raises ValueError, TypeError.

    >>> plan = lanewise.AttentionPlan(np.int32([[0, 1]]), [20], num_heads=4, num_kv_heads=2, block_size=16)
    >>> kv = np.zeros((2, 2, 16, 8), np.float32)
    >>> plan.run(np.zeros((1, 4, 8), np.float32), kv, kv, layout="HND").shape
    (1, 4, 8)
    """
    cdef readonly int64_t num_queries, num_heads, num_kv_heads, block_size
    cdef cnp.ndarray table, queries, tasks
    cdef int64_t most_rows, slots, highest_block, longest
    cdef double pairs  # of keys and rows that are met

    # Once: what kernels follow without a look is never half of another plan.
    def __cinit__(self, block_table, lengths, *, num_heads, num_kv_heads, block_size, query_start=None, causal=True,
                 window=None, shared_prefix=0, hide_null=False):
        self.num_heads = integer(num_heads, "num_heads", 1, 1 << 20)
        self.num_kv_heads = integer(num_kv_heads, "num_kv_heads", 1, 1 << 20)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        self.block_size = integer(block_size, "block_size", 1, INT32_MAX)
        self.table = integers(block_table, "block_table", 2)
        cdef cnp.ndarray keys = integers(lengths, "lengths", 1)
        cdef int64_t sequences = keys.size
        if cnp.PyArray_DIM(self.table, 0) != sequences:
            raise ValueError(f"block_table must have a row a sequence: {sequences}, got {cnp.PyArray_DIM(self.table, 0)}")
        cdef cnp.ndarray starts = (np.arange(sequences + 1, dtype=np.int64) if query_start is None
                                   else integers(query_start, "query_start", 1))
        cdef int64_t left = -1 if window is None else integer(window, "window", 0, INT32_MAX)
        cdef int64_t prefix = integer(shared_prefix, "shared_prefix", 0, INT32_MAX)
        self.see(keys, starts, bool(causal), left)
        self.check_blocks(starts, bool(hide_null))
        prefix = self.check_prefix(prefix, keys) if prefix else 0
        self.cut(starts, prefix // ATTEND_CHUNK)

    # What each query sees.
    cdef int see(self, cnp.ndarray keys, cnp.ndarray starts, bint causal, int64_t left) except -1:
        cdef int64_t sequences = keys.size, room = cnp.PyArray_DIM(self.table, 1) * self.block_size
        cdef const int64_t *length = <const int64_t *>cnp.PyArray_DATA(keys)
        cdef const int64_t *start = <const int64_t *>cnp.PyArray_DATA(starts)
        cdef attend_query *query
        cdef int64_t b, i, position
        if starts.size != sequences + 1 or start[0] != 0:
            raise ValueError(f"query_start must be {sequences + 1} numbers from 0 on, got {starts.tolist()}")
        for b in range(sequences):
            if not 0 <= length[b] <= room:
                raise ValueError(f"lengths[{b}] must be in [0, {room}], what its blocks hold, got {length[b]}")
            if start[b + 1] < start[b] or start[b + 1] > INT32_MAX:
                raise ValueError(f"query_start[{b + 1}] must be in [{start[b]}, {INT32_MAX}], got {start[b + 1]}")
        self.num_queries = start[sequences]
        self.queries = np.empty((self.num_queries, QUERY), np.int64)
        query = <attend_query *>cnp.PyArray_DATA(self.queries)
        self.longest = 0
        for b in range(sequences):
            for i in range(start[b], start[b + 1]):
                position = length[b] - start[b + 1] + i
                query[i].position, query[i].states = position, -1
                query[i].hi = max(0, position + 1) if causal else length[b]
                query[i].lo = 0 if left < 0 else max(0, position - left)
                if query[i].lo >= query[i].hi:
                    query[i].lo = query[i].hi = 0
                self.longest = max(self.longest, query[i].hi)
        return 0

    cdef int check_blocks(self, cnp.ndarray starts, bint hide_null) except -1:
        cdef const int64_t *start = <const int64_t *>cnp.PyArray_DATA(starts)
        cdef const int64_t *block = <const int64_t *>cnp.PyArray_DATA(self.table)
        cdef const attend_query *query = <const attend_query *>cnp.PyArray_DATA(self.queries)
        cdef int64_t width = cnp.PyArray_DIM(self.table, 1), b, i, lo, hi
        self.highest_block = -1
        for b in range(starts.size - 1):
            lo, hi = INT32_MAX, 0
            for i in range(start[b], start[b + 1]):
                if query[i].lo < query[i].hi:
                    lo, hi = min(lo, query[i].lo), max(hi, query[i].hi)
            if lo >= hi:
                continue
            for i in range(lo // self.block_size, (hi + self.block_size - 1) // self.block_size):
                if block[b * width + i] < 0 and not hide_null:
                    raise ValueError(f"block_table[{b}, {i}] must not be negative: keys {i * self.block_size} and on "
                                     f"are attended to, got {block[b * width + i]}")
                self.highest_block = max(self.highest_block, block[b * width + i])
        return 0

    # Whole chunks of the prefix, in tokens.
    cdef int64_t check_prefix(self, int64_t prefix, cnp.ndarray keys) except -1:
        if keys.size and prefix > keys.min():
            raise ValueError(f"shared_prefix must be at most the shortest of lengths, {keys.min()}, got {prefix}")
        prefix -= prefix % ATTEND_CHUNK
        shared = self.table[:, :(prefix + self.block_size - 1) // self.block_size]
        if not keys.size or keys.size == 1:
            return 0
        differs = np.argwhere(shared != shared[:1])
        if differs.size:
            b, i = differs[0]
            raise ValueError(f"shared_prefix: block_table[{b}, {i}] is {shared[b, i]}, but {shared[0, i]} in row 0")
        return prefix

    # Tasks: tiles of queries and heads; of long sequences, runs of chunks of equal length.
    cdef int cut(self, cnp.ndarray starts, int64_t prefix_chunks) except -1:
        cdef const int64_t *start = <const int64_t *>cnp.PyArray_DATA(starts)
        cdef attend_query *query = <attend_query *>cnp.PyArray_DATA(self.queries)
        cdef int64_t group = self.num_heads // self.num_kv_heads
        cdef int64_t heads = min(group, <int64_t>ATTEND_ROWS), tile = ATTEND_ROWS // heads
        cdef int64_t pieces = (group + heads - 1) // heads, threads = _threads.get_num_threads()
        cdef int64_t b, i, run, chunks = 0
        cdef list tasks = []
        self.pairs = 0
        self.most_rows = 1
        self.slots = 0
        for b in range(starts.size - 1):
            for i in range(start[b], start[b + 1], tile):
                chunks += self.chunks_of(query, i, min(i + tile, start[b + 1])) * pieces * self.num_kv_heads
        run = INT32_MAX if threads == 1 else max(1, (chunks + threads * TASKS_A_THREAD - 1) // (threads * TASKS_A_THREAD))
        for b in range(starts.size - 1):
            self.keep_apart(query, start[b], start[b + 1], run, prefix_chunks)
        if prefix_chunks:
            self.add_tasks(tasks, query, 0, 0, self.num_queries, tile, heads, 0, prefix_chunks, run)
        for b in range(starts.size - 1):
            self.add_tasks(tasks, query, b, start[b], start[b + 1], tile, heads, prefix_chunks, INT32_MAX, run)
        self.tasks = np.array(tasks, np.int64).reshape(-1, TASK)
        return 0

    cdef int64_t chunks_of(self, const attend_query *query, int64_t first, int64_t end) noexcept:
        cdef int64_t i, lo = INT32_MAX, hi = 0
        for i in range(first, end):
            if query[i].lo < query[i].hi:
                lo, hi = min(lo, query[i].lo), max(hi, query[i].hi)
        return (hi + ATTEND_CHUNK - 1) // ATTEND_CHUNK - lo // ATTEND_CHUNK if lo < hi else 0

    # Where the work on a sequence's queries is shared, each chunk's states have a place.
    cdef void keep_apart(self, attend_query *query, int64_t first, int64_t end, int64_t run,
                         int64_t prefix_chunks) noexcept:
        cdef int64_t i, slots = 0
        for i in range(first, end):
            slots += self.chunks_of(query, i, i + 1)
        if (not prefix_chunks and self.chunks_of(query, first, end) <= run
                or (self.slots + slots) * self.num_heads > MOST_STATES and not prefix_chunks):
            return
        for i in range(first, end):
            query[i].states = self.slots
            self.slots += self.chunks_of(query, i, i + 1)

    cdef int add_tasks(self, list tasks, const attend_query *query, int64_t row, int64_t first, int64_t end, int64_t tile,
                       int64_t heads, int64_t first_chunk, int64_t end_chunk, int64_t run) except -1:
        cdef int64_t group = self.num_heads // self.num_kv_heads, i, kv, h, n, m, c, stop, to
        for i in range(first, end, tile):
            n = min(tile, end - i)
            stop = min(end_chunk, (self.highest(query, i, i + n) + ATTEND_CHUNK - 1) // ATTEND_CHUNK)
            for kv in range(self.num_kv_heads):
                for h in range(kv * group, (kv + 1) * group, heads):
                    m = min(heads, (kv + 1) * group - h)
                    self.most_rows = max(self.most_rows, n * m)
                    c = first_chunk
                    while True:
                        to = min(stop, c + run) if query[i].states >= 0 else stop
                        tasks.append((row, kv, i, n, h, m, c, to))
                        self.pairs += <double>(n * m * ATTEND_CHUNK) * max(to - c, 0)
                        c = to
                        if c >= stop:
                            break
        return 0

    cdef int64_t highest(self, const attend_query *query, int64_t first, int64_t end) noexcept:
        cdef int64_t i, hi = 0
        for i in range(first, end):
            hi = max(hi, query[i].hi)
        return hi

    def run(self, q, k_cache, v_cache, *, layout="HND", scale=None, soft_cap=None, slopes=None, sinks=None, mask=None,
            k_scales=None, v_scales=None, return_lse=False, lse_base="e", out=None):
        """Attention of q over the cache as planned: (queries, heads, v's head_dim) float32, and with return_lse also
        (queries, heads) logarithms of the sums. Arguments as in decode_attention."""
        cdef attend_args a
        cdef int64_t k_width, v_width, threads
        cdef cnp.ndarray wide, result, lse, states
        cdef Caches caches
        caches = k_cache if type(k_cache) is Caches else Caches(k_cache, v_cache, layout, self.block_size)
        self.check_caches(caches, &a)
        factors = caches.scales(k_scales, v_scales, &a.key, &a.value, &a.k_scales, &a.v_scales)
        queries = readable(q, "q")
        if not has_shape(queries, (self.num_queries, self.num_heads, a.key.dim)):
            raise ValueError(f"q must have shape {(self.num_queries, self.num_heads, a.key.dim)}, got {queries.shape}")
        wide = widened(queries)
        slopes = of_heads(slopes, "slopes", self.num_heads, FLT_MAX)
        sinks = of_heads(sinks, "sinks", self.num_heads, FLT_MAX)
        masked = self.read_mask(mask, &a)
        shape = (self.num_queries, self.num_heads, a.value.dim)
        result = np.empty(shape, np.float32) if out is None else check_out(out, shape, cnp.NPY_FLOAT32, "out")
        lse = np.empty(shape[:2], np.float32) if return_lse else None
        k_width, v_width = (a.key.dim + 15) // 16 * 16, (a.value.dim + 15) // 16 * 16
        a.scale = 1 / sqrt(<double>a.key.dim) if scale is None else number(scale, "scale", -FLT_MAX, FLT_MAX)
        a.soft_cap = 0.0 if soft_cap is None else number(soft_cap, "soft_cap", 0.0, FLT_MAX)
        a.lse_unit = unit_of(lse_base)
        a.q, a.slopes, a.sinks = whole(wide), memory_of(slopes), memory_of(sinks)
        a.mask = memory_of(masked)
        a.table, a.queries, a.tasks = whole(self.table), whole(self.queries), whole(self.tasks)
        a.out, a.states, a.lse = whole(result), memory_of(None), memory_of(None)
        written = result
        if out is not None and (not cnp.PyArray_IS_C_CONTIGUOUS(result) or not cnp.PyArray_ISALIGNED(result)
                                or reads_out(&a)):
            written = np.empty(shape, np.float32)
            a.out = whole(written)
        if lse is not None:
            a.lse = whole(lse)
        if self.slots:
            states = np.empty((self.slots * self.num_heads, 2 + v_width), np.float32)
            a.states = whole(states)
        a.heads, a.block_size, a.table_stride = self.num_heads, self.block_size, cnp.PyArray_DIM(self.table, 1)
        a.rows, a.first_row = cnp.PyArray_DIM(self.tasks, 0), 0
        if a.rows:
            a.cols = 4 * (self.most_rows * (k_width + 2 * v_width + 320) + 19 * max(k_width, v_width))
            run(OP_attend, &a, a.cols, <int64_t>(self.pairs / a.rows * (a.key.dim + a.value.dim) / 2) + 1000)
        if self.slots:
            a.rows, a.cols = self.num_queries, 8 * v_width
            run(OP_attend_merge, &a, a.cols, self.slots // a.rows * self.num_heads * v_width)
        if written is not result:
            result[...] = written
        return (result, lse) if return_lse else result

    def _time_scan(self, k_cache, v_cache, int64_t repeats, *, layout="HND"):
        """Benches: the nanoseconds of each run of a mere read of the keys and values that `run` meets."""
        cdef attend_args a
        cdef Caches caches = Caches(k_cache, v_cache, layout, self.block_size)
        self.check_caches(caches, &a)
        if self.table.min(initial=0) < 0:
            raise ValueError("hidden blocks are not scanned")
        cdef cnp.ndarray out = np.empty((cnp.PyArray_DIM(self.tasks, 0), 16), np.uint32)
        a.table, a.queries, a.tasks, a.out = whole(self.table), whole(self.queries), whole(self.tasks), whole(out)
        a.block_size, a.table_stride = self.block_size, cnp.PyArray_DIM(self.table, 1)
        a.rows, a.first_row, a.cols = cnp.PyArray_DIM(self.tasks, 0), 0, 0
        return timed(OP_scan_kv, &a, 0, repeats)

    cdef int check_caches(self, Caches caches, attend_args *a) except -1:
        cdef int64_t blocks = cnp.PyArray_DIM(caches.k, 0), heads = cnp.PyArray_DIM(caches.k, 1)
        cdef int64_t tokens = cnp.PyArray_DIM(caches.k, 2)
        fill_layer(caches.k, &a.key, &a.k, "k_cache")
        fill_layer(caches.v, &a.value, &a.v, "v_cache")
        if heads != self.num_kv_heads or tokens != self.block_size:
            raise ValueError(f"k_cache must have {self.num_kv_heads} heads and {self.block_size} tokens a block as planned, "
                             f"got {heads} and {tokens}")
        if self.highest_block >= blocks:
            b, i = np.argwhere(self.table == self.highest_block)[0]
            raise ValueError(f"block_table[{b}, {i}] must be in [0, {blocks - 1}], got {self.highest_block}")
        return 0

    cdef object read_mask(self, object mask, attend_args *a):
        cdef int64_t keys
        a.mask_kind, a.mask_query, a.mask_head = ATTEND_MASK_NONE, 0, 0
        if mask is None:
            return None
        array = as_array(mask, "mask")
        if array.dtype == np.bool_:
            a.mask_kind = ATTEND_MASK_BOOL
        elif array.dtype.kind == "f" or is_bfloat16(array.dtype):
            array = widened(readable(array, "mask"))
            a.mask_kind = ATTEND_MASK_ADDED
        else:
            raise TypeError(f"mask must be bool, True where a key is seen, or float, added to scores, got {array.dtype}")
        shapes = {1: (), 2: (self.num_queries,), 3: (self.num_queries, self.num_heads)}
        if array.ndim not in shapes or array.shape[:-1] != shapes[array.ndim] or array.shape[-1] < self.longest:
            raise ValueError(f"mask must have shape (K,), ({self.num_queries}, K) or ({self.num_queries}, "
                             f"{self.num_heads}, K), K at least {self.longest}, got {array.shape}")
        if array.strides[-1] != array.itemsize and array.shape[-1] > 1 or not is_forward(array):
            array = array.copy()
        a.mask_query = array.strides[0] if array.ndim > 1 else 0
        a.mask_head = array.strides[1] if array.ndim > 2 else 0
        return array


cdef double unit_of(object lse_base) except -1:
    return LOG2_E if word(lse_base, "lse_base", ("e", "2")) else 1.0


# C-contiguous float32 of what `readable` gave.
cdef cnp.ndarray widened(cnp.ndarray array):
    cdef int kind = cnp.PyArray_TYPE(array)
    if kind == cnp.NPY_FLOAT32:
        return cnp.PyArray_GETCONTIGUOUS(array)
    if kind == cnp.NPY_FLOAT16:
        return array.astype(np.float32, order="C")
    return (cnp.PyArray_GETCONTIGUOUS(array).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


# Contiguous caches are paged ones with one block a sequence; a table of slots is one of blocks of one token.
cdef tuple plan_for(object block_table, object lengths, object q, object k_cache, object v_cache, object layout,
                    dict arguments):
    heads = as_array(q, "q").shape
    if len(heads) != 3:
        raise ValueError(f"q must have shape (queries, heads, head_dim), got {heads}")
    caches = Caches(k_cache, v_cache, layout, None if block_table is None else 1)
    shape = caches.k.shape
    if block_table is None:
        block_table = np.arange(shape[0]).reshape(-1, 1)
    return AttentionPlan(block_table, lengths, num_heads=heads[1], num_kv_heads=shape[1], block_size=max(shape[2], 1),
                         **arguments), caches


def decode_attention(q, k_cache, v_cache, block_table, lengths, *, layout="HND", scale=None, window=None, soft_cap=None,
                     slopes=None, sinks=None, mask=None, k_scales=None, v_scales=None, shared_prefix=0, hide_null=False,
                     return_lse=False, lse_base="e", out=None):
    """softmax(scale q k') v of one query a sequence over its cached keys, as float32 (B, heads, v's head_dim).

    q: (B, heads, head_dim) float32, float16 or bfloat16. k_cache, v_cache: float32, float16, bfloat16, or int8 with
    k_scales and v_scales, of one layer, as `layout` says (the module layouts; append_kv has the same): "HND" is (blocks,
    kv_heads, tokens, head_dim), "NHD" (blocks, tokens, kv_heads, head_dim); v_cache is None where k_cache has both.
    Query head h reads KV head h // (heads / kv_heads), each key once for the group. block_table: (B, M) block ids, of
    slots if the layout has those, or None where block b is sequence b, slots all one. lengths: (B,) keys. scale: 1 /
    sqrt(head_dim) by default. window: see so many keys before the last. soft_cap: scores s become soft_cap tanh(s /
    soft_cap). slopes: (heads,), ALiBi. sinks: (heads,), a score that counts in the sum and has no value. mask: (K,),
    (B, K) or (B, heads, K); bool, True where a key is seen, or float, added to the scores. shared_prefix, hide_null: as in AttentionPlan. return_lse: give (out, lse), lse
    (B, heads) the logarithm of the sum of exp(score), to lse_base "e" or "2".
    What sees no keys gives 0, lse -inf. What a query does not see is not looked at, a NaN there does not matter.
    Raises ValueError, TypeError.

    >>> k = np.zeros((1, 1, 2, 4), np.float32)
    >>> v = np.float32([[[[1, 1], [3, 5]]]])
    >>> lanewise.decode_attention(np.ones((1, 2, 4), np.float32), k, v, [[0]], [2])
    array([[[2., 3.],
            [2., 3.]]], dtype=float32)
    """
    plan, caches = plan_for(block_table, lengths, q, k_cache, v_cache, layout,
                            {"window": window, "shared_prefix": shared_prefix, "hide_null": hide_null})
    return plan.run(q, caches, None, layout=layout, scale=scale, soft_cap=soft_cap, slopes=slopes, sinks=sinks,
                    mask=mask, k_scales=k_scales, v_scales=v_scales, return_lse=return_lse, lse_base=lse_base, out=out)


def extend_attention(q, k_cache, v_cache, block_table, lengths, query_start, *, causal=True, layout="HND", scale=None,
                     window=None, soft_cap=None, slopes=None, sinks=None, mask=None, k_scales=None, v_scales=None,
                     shared_prefix=0, hide_null=False, return_lse=False, lse_base="e", out=None):
    """decode_attention for several queries a sequence: its last tokens, whose keys are already in the cache.

    q: (total, heads, head_dim); query_start: (B + 1,) where each sequence's queries begin. With causal, a query sees
    itself and what is before it; else all of its sequence. The rest as in decode_attention, `total` for B; each query's
    result is, bit for bit, what decode_attention gives for it.

    >>> kv = np.zeros((1, 1, 3, 4), np.float32)
    >>> q = np.ones((2, 1, 4), np.float32)
    >>> _, lse = lanewise.extend_attention(q, kv, kv, [[0]], [3], [0, 2], return_lse=True, lse_base="2")
    >>> np.exp2(lse).ravel()  # so many keys are seen
    array([2., 3.], dtype=float32)
    """
    plan, caches = plan_for(block_table, lengths, q, k_cache, v_cache, layout,
                            {"query_start": query_start, "causal": causal, "window": window,
                             "shared_prefix": shared_prefix, "hide_null": hide_null})
    return plan.run(q, caches, None, layout=layout, scale=scale, soft_cap=soft_cap, slopes=slopes, sinks=sinks,
                    mask=mask, k_scales=k_scales, v_scales=v_scales, return_lse=return_lse, lse_base=lse_base, out=out)


# ---- merging ----


cdef object merge(object values, object lse, object lse_base, object out):
    """values: (rows, parts, heads, D), lse: (rows, parts, heads), both float32, any strides but D's."""
    cdef merge_args a
    cdef cnp.ndarray v, s
    rows, parts, heads, width = values.shape
    if not parts:
        raise ValueError("there must be at least one state to merge")
    v = np.ascontiguousarray(values.transpose(0, 2, 1, 3))
    s = np.ascontiguousarray(lse.transpose(0, 2, 1))
    cdef cnp.ndarray merged = np.empty((rows, heads, width), np.float32)
    cdef cnp.ndarray sums = np.empty((rows, heads), np.float32)
    a.values, a.lse, a.out, a.out_lse = whole(v), whole(s), whole(merged), whole(sums)
    a.rows, a.first_row, a.cols, a.width = rows * heads, 0, parts, width
    a.value_row, a.value_part, a.lse_row, a.lse_part = parts * width, width, parts, 1
    a.lse_unit = unit_of(lse_base)
    run(OP_merge_states, &a, parts, parts * (width + 50))
    if out is None:
        return merged, sums
    out[0][...], out[1][...] = merged, sums
    return out


cdef tuple checked_state(object v, object s, str v_name, str s_name, int axes):
    v, s = readable(v, v_name), readable(s, s_name)
    if v.ndim != axes:
        raise ValueError(f"{v_name} must have {axes} axes, got shape {v.shape}")
    if s.shape != v.shape[:-1]:
        raise ValueError(f"{s_name} must have shape {v.shape[:-1]}, got {s.shape}")
    return widened(v), widened(s)


def merge_state(v_a, s_a, v_b, s_b, *, lse_base="e", out=None):
    """Joins two results of attention over different keys: (v, s) for both sets of keys together.

    v_a, v_b: (L, heads, D); s_a, s_b: (L, heads), their lse, to lse_base. A part with lse -inf is empty, and not looked
    at; two such give 0 and -inf. out: a pair of float32 arrays to write to; may be inputs. Raises ValueError, TypeError.

    >>> v, s = lanewise.merge_state(np.ones((1, 1, 2)), [[0.0]], np.zeros((1, 1, 2)), [[-np.inf]])
    >>> v.tolist(), s.tolist()
    ([[[1.0, 1.0]]], [[0.0]])
    """
    v_a, s_a = checked_state(v_a, s_a, "v_a", "s_a", 3)
    v_b, s_b = checked_state(v_b, s_b, "v_b", "s_b", 3)
    if v_a.shape != v_b.shape:
        raise ValueError(f"v_a and v_b must have the same shape, got {v_a.shape} and {v_b.shape}")
    return merge(np.stack([v_a, v_b], 1), np.stack([s_a, s_b], 1), lse_base, check_pair(out, v_a.shape))


def merge_states(v, s, *, lse_base="e", out=None):
    """merge_state for any number of parts: v (L, parts, heads, D), s (L, parts, heads), to (L, heads, D), (L, heads).

    >>> v, s = lanewise.merge_states(np.ones((1, 3, 1, 2)), np.zeros((1, 3, 1)))
    >>> v.tolist(), np.exp(s).round(5).tolist()
    ([[[1.0, 1.0]]], [[3.0]])
    """
    v, s = checked_state(v, s, "v", "s", 4)
    return merge(v, s, lse_base, check_pair(out, (v.shape[0], *v.shape[2:])))


cdef object check_pair(object out, tuple shape):
    if out is None:
        return None
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"out must be a pair of arrays, got {type(out).__name__}")
    return check_out(out[0], shape, cnp.NPY_FLOAT32, "out[0]"), check_out(out[1], shape[:-1], cnp.NPY_FLOAT32, "out[1]")


# ---- the statistics of a softmax ----


# Numbers of rows before, the kernel's to write to.
cdef cnp.ndarray statistics(object x, str name, tuple shape, object dtype):
    array = as_array(x, name)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be numbers, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, one a row, got {array.shape}")
    with np.errstate(over="ignore"):
        return np.array(array, dtype, order="C")


def softmax_stats(scores, state=None, *, out=None):
    """Online softmax: (m, l), a row's largest score and its sum of exp(score - m), over this block and those before.

    scores: (V,) or (B, V) float32, float16, bfloat16, or float64 cast to float32. state: (m, l) of the blocks before,
    two numbers or (B,) arrays; where its m is -inf there were none. m is float32, l float64: when the maximum moves, l
    is scaled down with it. m + log(l) is the row's logsumexp, exp(score - m) / l its softmax.
    Nothing but -inf: -inf and 0. With a +inf, inf and NaN; with a NaN, both NaN. out: a pair (float32, float64) to write
    to; may be the state. Raises ValueError, TypeError.
    Milakov & Gimelshein, arXiv 1805.02867.

    >>> m, l = lanewise.softmax_stats(np.float32([1, 3]), lanewise.softmax_stats(np.float32([5, 5])))
    >>> print(m, l.round(3))
    5.0 2.154
    """
    cdef stats_args a
    cdef rows_t r
    cdef cnp.ndarray m, sums
    owner = logits_rows(scores, &r, "scores")
    shape = () if r.single else (r.rows,)
    if out is not None:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(f"out must be a pair of arrays, got {type(out).__name__}")
        check_out(out[0], shape, cnp.NPY_FLOAT32, "out[0]")
        check_out(out[1], shape, cnp.NPY_FLOAT64, "out[1]")
    if state is None:
        m, sums = np.full(shape, -np.inf, np.float32), np.zeros(shape)
    else:
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise TypeError(f"state must be a pair (m, l), got {type(state).__name__}")
        m = statistics(state[0], "state[0]", shape, np.float32)
        sums = statistics(state[1], "state[1]", shape, np.float64)
        bad = np.flatnonzero((sums < 0) | (sums == np.inf))
        if bad.size:
            row = "" if r.single else f"[{bad[0]}]"
            raise ValueError(f"state[1]{row} must be a sum of exponentials, 0 or more and below inf, got "
                             f"{sums.ravel()[bad[0]]}")
    a.x, a.m, a.sums = rows_span(&r), whole(m), whole(sums)
    a.rows, a.first_row, a.cols, a.dtype, a.x_stride = r.rows, 0, r.cols, r.dtype, r.stride
    run(OP_softmax_stats, &a, r.cols, 6 * r.cols + 1000)
    if out is not None:
        out[0][...], out[1][...] = m, sums
        return out
    return (m[()], sums[()]) if r.single else (m, sums)
