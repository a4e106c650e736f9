# cython: language_level=3, freethreading_compatible=True, auto_pickle=False
"""Keys and values in and out of caches, token by token, whatever their layouts and dtypes.

Arrays that begin with layers are done in one call, lists of arrays a layer at a time.
"""
cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

import numpy as np

from lanewise._arguments cimport word
from lanewise._arrays cimport as_array, in_place, is_bfloat16, whole
from lanewise._ops cimport *
from lanewise._sides cimport dtype_of, fill_scales, fill_side

from . import _arrays, layouts

cnp.import_array()


cdef extern from "plan.h":
    struct targets:
        pass
    enum:
        FEW_BLOCKS
    int all_differ(const int64_t *ids, int64_t rows, int64_t blocks) nogil
    int64_t target_slots(int64_t rows) nogil
    int64_t enter_targets(targets *t, const int64_t *ids, int64_t rows, int64_t *slots) nogil


# ---- what is moved: keys, then values ----


@cython.internal
cdef class Half:
    """Keys or values on their way: views of all layers or one a layer on both sides, and what they are called."""
    cdef public list src, dst, src_scales, dst_scales
    cdef public str src_name, dst_name

    def __init__(self, tuple src, tuple dst):
        self.src_name, self.src, self.src_scales = src
        self.dst_name, self.dst, self.dst_scales = dst


@cython.internal
cdef class Turn:
    """RoPE: tables, and each item's row in them."""
    cdef public cnp.ndarray cos, sin, positions
    cdef public int64_t rotary, interleaved


@cython.internal
cdef class Job:
    """One kernel call: the halves' arrays of some layers, kept with the struct that points into them."""
    cdef kv_args a
    cdef object kept
    cdef int64_t layer
    cdef str src_name


# A list of arrays of all layers or one a layer, cut to meet another such list.
cdef list meet(list views, list others):
    if len(views) >= len(others):
        return views
    return [views[0][i:i + 1] for i in range(len(others))]


cdef list jobs_of(Half half, cnp.ndarray sources, cnp.ndarray targets, int64_t items, Turn turn):
    cdef Job job
    cdef cnp.ndarray src, dst
    cdef kv_args *a
    cdef int64_t layer = 0
    check_layers(half)
    pairs = zip(meet(half.src, half.dst), meet(half.dst, half.src), strict=True)
    scale_pairs = [meet(views, other) if views is not None else None
                   for views, other in ((half.src_scales, half.dst), (half.dst_scales, half.src))]
    jobs = []
    for i, (x, y) in enumerate(pairs):
        src, dst = x, y
        job = Job()
        a = &job.a
        memset(a, 0, sizeof(kv_args))
        fill_side(src, &a.from_, &a.src, half.src_name, False)
        fill_side(dst, &a.to, &a.dst, half.dst_name, True)
        check_rows(half, a, src, dst)
        if a.from_.dtype == DTYPE_I8:
            if scale_pairs[0] is None:
                raise ValueError(f"{half.src_name} is int8, so its scales must be given")
            fill_scales(scale_pairs[0][i], src, &a.from_, &a.src_scales, half.src_name + "'s scales", False)
        if a.to.dtype == DTYPE_I8:
            if scale_pairs[1] is None:
                raise ValueError(f"{half.dst_name} is int8, so its scales must be given")
            fill_scales(scale_pairs[1][i], dst, &a.to, &a.dst_scales, half.dst_name + "'s scales", True)
        a.sources, a.targets = span_or_none(sources), span_or_none(targets)
        a.rows, a.cols = items, a.from_.dim
        a.layers, a.heads = cnp.PyArray_DIM(src, 0), cnp.PyArray_DIM(src, 2)
        a.from_tokens, a.to_tokens = max(1, cnp.PyArray_DIM(src, 3)), max(1, cnp.PyArray_DIM(dst, 3))
        if turn is not None:
            set_turn(a, turn, half.src_name)
        job.kept = (src, dst, scale_pairs, sources, targets, turn)
        job.layer, job.src_name = layer, half.src_name
        layer += a.layers
        jobs.append(job)
    return jobs


cdef span span_or_none(cnp.ndarray slots):
    cdef span none
    none.ptr, none.bytes = NULL, 0
    return none if slots is None else whole(slots)


cdef int check_layers(Half half) except -1:
    src, dst = layers_of(half.src), layers_of(half.dst)
    if src != dst:
        raise ValueError(f"{half.src_name} and {half.dst_name} must have as many layers, got {src} and {dst}")
    for name, views, scales in ((half.src_name, half.src, half.src_scales), (half.dst_name, half.dst, half.dst_scales)):
        if scales is not None and len(scales) != len(views):
            raise ValueError(f"{name}'s scales must be as many arrays as {name}, {len(views)}, got {len(scales)}")
    return 0


cdef int64_t layers_of(list views):
    return len(views) * views[0].shape[0]


cdef int check_rows(Half half, kv_args *a, cnp.ndarray src, cnp.ndarray dst) except -1:
    if cnp.PyArray_DIM(src, 2) != cnp.PyArray_DIM(dst, 2):
        raise ValueError(f"{half.src_name} and {half.dst_name} must have as many heads, got {cnp.PyArray_DIM(src, 2)} "
                         f"and {cnp.PyArray_DIM(dst, 2)}")
    if a.from_.dim != a.to.dim:
        raise ValueError(f"{half.src_name} and {half.dst_name} must have one head_dim, got {a.from_.dim} "
                         f"and {a.to.dim}")
    return 0


cdef int set_turn(kv_args *a, Turn turn, str name) except -1:
    if turn.rotary > a.from_.dim:
        raise ValueError(f"cos has {turn.rotary // 2} columns, for {turn.rotary} elements, "
                         f"but {name} has a head_dim of {a.from_.dim}")
    a.cos, a.sin, a.positions = whole(turn.cos), whole(turn.sin), whole(turn.positions)
    a.rotary, a.interleaved = turn.rotary, turn.interleaved
    return 0


# Everything is looked at before anything is moved.
cdef int run_all(list jobs) except -1:
    cdef Job job
    for job in jobs:
        if (job.a.from_.dtype == DTYPE_I8) != (job.a.to.dtype == DTYPE_I8):
            check(job)
    for job in jobs:
        if job.a.layers and job.a.heads:
            run(OP_move_kv, &job.a, job.a.cols, job.a.layers * job.a.heads * (job.a.cols + 20))
    return 0


cdef int check(Job job) except -1:
    cdef cnp.ndarray status = np.empty(job.a.rows, np.int64)
    if not job.a.layers or not job.a.heads:
        return 0
    job.a.status = whole(status)
    run(OP_check_kv, &job.a, job.a.cols, job.a.layers * job.a.heads * (job.a.cols + 20))
    job.a.status.ptr, job.a.status.bytes = NULL, 0
    bad = np.flatnonzero(status >= 0)
    if bad.size:
        item, at = int(bad[0]), int(status[bad[0]])
        where = f"{job.src_name}: token {item}, layer {job.layer + at // job.a.heads}, head {at % job.a.heads}"
        if job.a.from_.dtype == DTYPE_I8:
            raise ValueError(f"{where}: an int8 row must have a scale above 0, or 0 and nothing but codes 0, "
                             "and a zero in [-128, 127]")
        raise ValueError(f"{where} has a NaN or an infinity, which int8 cannot hold")
    return 0


# ---- slots ----


# A copy as int64, each below `capacity`: what is checked is what is used, whoever writes to `slots` meanwhile.
cdef cnp.ndarray slot_array(object slots, str name, int64_t capacity):
    cdef cnp.ndarray a
    cdef int64_t i
    array = as_array(slots, name)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    if array.dtype == np.uint64 and array.size and array.max() > 2 ** 63 - 1:
        at = int(array.argmax())
        raise ValueError(f"{name}[{at}] is {array[at]}, but there are {capacity} slots")
    a = np.array(array, np.int64, order="C")
    cdef const int64_t *s = <const int64_t *>cnp.PyArray_DATA(a)
    for i in range(cnp.PyArray_SIZE(a)):
        if s[i] >= capacity:
            raise ValueError(f"{name}[{i}] is {s[i]}, but there are {capacity} slots")
    return a


# A slot that two items would write: an error, or the last has it.
cdef cnp.ndarray no_slot_twice(cnp.ndarray slots, str name, object duplicates):
    cdef int64_t i, last = -1
    cdef const int64_t *s = <const int64_t *>cnp.PyArray_DATA(slots)
    cdef bint raising = word(duplicates, "duplicates", ("raise", "last")) == 0
    for i in range(cnp.PyArray_SIZE(slots)):
        if s[i] >= 0:
            if s[i] <= last:
                break
            last = s[i]
    else:
        return slots  # they ascend
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    again = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0))
    if not again.size:
        return slots
    if raising:
        first, second = int(order[again[0]]), int(order[again[0] + 1])
        raise ValueError(f"{name}[{first}] and {name}[{second}] are both {int(ordered[again[0]])}: "
                         "a slot may be written once in a call")
    slots[order[again]] = -1
    return slots


cdef int64_t capacity_of(list views):
    return views[0].shape[1] * views[0].shape[3]


# Copies of those views that share memory with what is to be written.
cdef list apart(list views, list written):
    found = []
    for view in views:
        for other in written:
            if np.may_share_memory(view, other):
                view = view.copy()
                break
        found.append(view)
    return found


# ---- append ----


# The layout of plain arrays of tokens for a cache of this one.
cdef str token_axes(str axes, object cache):
    layers = "L" if "L" in axes or isinstance(cache, (list, tuple)) else ""
    return layers + ("SHD" if "H" in axes else "SD")


cdef list token_views(object given, str axes, str name):
    if isinstance(given, (list, tuple)) and axes[0] == "L" and len(given) and hasattr(given[0], "shape"):
        return layouts.views(list(given), axes[1:])[0]
    array = as_array(given, name)
    if array.ndim != len(axes):
        meant = {"L": "layers", "S": "tokens", "H": "heads", "D": "head_dim"}
        raise ValueError(f"{name} must have the axes ({', '.join([meant[x] for x in axes])}) for this cache, "
                         f"got shape {array.shape}")
    if cnp.PyArray_TYPE(array) == cnp.NPY_FLOAT64:
        array = to_float32(array)
    if not is_readable(array):
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return layouts.views(array, axes)[0]


cdef bint is_readable(cnp.ndarray a):
    cdef int i
    for i in range(cnp.PyArray_NDIM(a)):
        if cnp.PyArray_STRIDE(a, i) < 0:
            return False
    return cnp.PyArray_ISALIGNED(a) and cnp.PyArray_ISNOTSWAPPED(a)


# Of a pair of arrays that users pass one by one: the second is None where the first holds both, or there is one only.
cdef object pair_of(object keys, object values):
    return keys if values is None else (keys, values)


cdef tuple cache_views(object k_cache, object v_cache, object k_scales, object v_scales, object layout):
    key_axes, value_axes = layouts.parse(layout)
    if "2" in key_axes and v_cache is not None:
        raise ValueError(f"layout {layout!r} has keys and values in k_cache, so v_cache must be None")
    keys, values = layouts.views(pair_of(k_cache, v_cache), layout)
    scales = None, None
    if k_scales is not None:
        scales = layouts.scale_views(pair_of(k_scales, v_scales), layout)
    return keys, values, scales[0], scales[1]


cdef Turn turn_of(object cos, object sin, object positions, object style, int64_t items):
    cdef Turn turn = Turn()
    cdef bint interleaved = word(style, "rope", ("neox", "interleaved"))
    tables = []
    for name, given in (("cos", cos), ("sin", sin)):
        if given is None:
            raise ValueError("rope needs cos, sin and positions")
        array = as_array(given, name)
        if array.dtype.kind != "f":
            raise TypeError(f"{name} must be float32, got {array.dtype}")
        array = np.require(to_float32(array), requirements=["C", "A"])
        if array.ndim != 2 or array.shape[1] == 0:
            raise ValueError(f"{name} must have the axes (positions, half of what is turned), got shape {array.shape}")
        tables.append(array)
    turn.cos, turn.sin = tables
    if tables[0].shape != tables[1].shape:
        raise ValueError(f"cos and sin must have one shape, got {tables[0].shape} and {tables[1].shape}")
    if positions is None:
        raise ValueError("rope needs cos, sin and positions")
    turn.positions = slot_array(positions, "positions", tables[0].shape[0])
    if turn.positions.shape[0] != items:
        raise ValueError(f"positions must have one number a token: {items} tokens, got {turn.positions.shape[0]}")
    if items and turn.positions.min() < 0:
        at = int(turn.positions.argmin())
        raise ValueError(f"positions[{at}] must be at least 0, got {turn.positions[at]}")
    turn.rotary, turn.interleaved = 2 * tables[0].shape[1], interleaved
    return turn


def append_kv(k, v, k_cache, v_cache, slots, *, layout, k_scales=None, v_scales=None, rope=None, cos=None, sin=None,
              positions=None, duplicates="raise"):
    """Writes the keys and values of tokens to slots of a cache, in its dtype; slot = block * block size + token.

    k, v: (tokens, heads, head_dim), with layers first if the cache has several; None as v for a cache of keys alone.
    k_cache, v_cache: arrays that lie as `layout` says (the module layouts), or lists of them, one a layer; v_cache is
    None where k_cache has both. slots: an integer a token, below 0 writes nothing. A slot that stands twice is an
    error, or with duplicates="last" gets its last token.
    An int8 cache needs k_scales and v_scales, float32, with the cache's axes but head_dim and a last one of scale and
    zero; they are written. rope: "neox" (pairs half of what is turned apart) or "interleaved" (neighbours) turns
    keys by cos and sin, (positions, half of what is turned), at each token's position.
    Raises ValueError, TypeError, before anything is written.

    >>> cache = np.zeros((2, 4, 16, 1, 2), np.float16)
    >>> lanewise.append_kv(np.ones((1, 1, 2)), np.ones((1, 1, 2)), cache, None, [17], layout="2NTHD")
    >>> cache[:, 1, 1].tolist()
    [[[1.0, 1.0]], [[1.0, 1.0]]]
    """
    cdef Turn turn = None
    key_axes, value_axes = layouts.parse(layout)
    for name, given in (("k_cache", k_cache), ("v_cache", v_cache), ("k_scales", k_scales), ("v_scales", v_scales)):
        in_place(given, name)
    keys, values, key_scales, value_scales = cache_views(k_cache, v_cache, k_scales, v_scales, layout)
    new_keys = token_views(k, token_axes(key_axes, k_cache), "k")
    cdef int64_t items = capacity_of(new_keys)
    if (v is None) != (values is None):
        raise ValueError("v must be None if, and only if, the cache has no values")
    halves = [(new_keys, keys, key_scales, "k", "k_cache")]
    if values is not None:
        halves.append((token_views(v, token_axes(value_axes, k_cache), "v"), values, value_scales, "v", "v_cache"))
        if capacity_of(halves[1][0]) != items:
            raise ValueError(f"k and v must have as many tokens, got {items} and {capacity_of(halves[1][0])}")
        check_capacity(keys, values)
    slots = no_slot_twice(slot_array(slots, "slots", capacity_of(keys)), "slots", duplicates)
    if slots.shape[0] != items:
        raise ValueError(f"slots must have one number a token: {items} tokens, got {slots.shape[0]}")
    if rope is not None:
        turn = turn_of(cos, sin, positions, rope, items)
    written = [view for half in halves for view in half[1]]
    jobs = []
    for src, dst, scales, src_name, dst_name in halves:
        if src[0].dtype == np.int8:
            raise TypeError(f"{src_name} must be floats, got int8")
        half = Half((src_name, apart(src, written), None), (dst_name, dst, scales))
        jobs += jobs_of(half, None, slots, items, turn if src_name == "k" else None)
    run_all(jobs)


cdef int check_capacity(list keys, list values) except -1:
    if keys[0].shape[1] != values[0].shape[1] or keys[0].shape[3] != values[0].shape[3]:
        raise ValueError(f"keys and values must have as many blocks and tokens, got {keys[0].shape[1]} blocks of "
                         f"{keys[0].shape[3]} and {values[0].shape[1]} of {values[0].shape[3]}")
    return 0


# ---- a cache that is written to again and again ----


@cython.final
cdef class KVTarget:
    """Where a cache's keys and values lie, looked at once: canonical views, (layers, blocks, heads, tokens, head_dim).

    What its calls do not take (int8, what overlaps, what is wrong) they leave alone and give False: append_kv then does
    it, or says what is wrong.
    """
    cdef kv_args halves[2]
    cdef object views
    cdef int64_t layers, blocks, tokens, slots

    def __cinit__(self, cnp.ndarray keys not None, cnp.ndarray values not None):
        cdef int i
        cdef cnp.ndarray view
        self.views = keys, values
        check_capacity([keys], [values])
        for i in range(2):
            view = self.views[i]
            memset(&self.halves[i], 0, sizeof(kv_args))
            fill_side(view, &self.halves[i].to, &self.halves[i].dst, ("keys", "values")[i], True)
            self.halves[i].cols = self.halves[i].to.dim
            self.halves[i].heads = cnp.PyArray_DIM(view, 2)
        self.layers, self.blocks, self.tokens = keys.shape[0], keys.shape[1], keys.shape[3]
        self.slots = self.blocks * self.tokens

    def write(self, k, v, slots, int64_t layer=-1):
        """Rows (layers, tokens, heads, head_dim), without the layers if there is one, to slots; whether it was done."""
        cdef kv_args a[2]
        cdef cnp.ndarray at, own, x
        cdef int axes = 4 if layer < 0 else 3, i
        cdef cnp.npy_intp items
        if not cnp.PyArray_CheckExact(slots) or layer >= self.layers or isinstance(k, (list, tuple)) or \
                isinstance(v, (list, tuple)):
            return False
        at = slots
        if cnp.PyArray_NDIM(at) != 1 or cnp.PyArray_TYPE(at) != cnp.NPY_INT64 or not cnp.PyArray_ISCARRAY_RO(at):
            return False
        items = cnp.PyArray_SIZE(at)
        own = cnp.PyArray_EMPTY(1, &items, cnp.NPY_INT64, 0)  # as in slot_array
        memcpy(cnp.PyArray_DATA(own), cnp.PyArray_DATA(at), items * sizeof(int64_t))
        if not are_slots(<const int64_t *>cnp.PyArray_DATA(own), items, self.slots):
            return False
        arrays = as_array(k, "k"), as_array(v, "v")
        for i in range(2):
            x = arrays[i]
            a[i] = self.halves[i]
            if cnp.PyArray_NDIM(x) != axes or cnp.PyArray_DIM(x, axes - 3) != items or \
                    cnp.PyArray_DIM(x, axes - 2) != a[i].heads or not is_source(x, &a[i], self.halves):
                return False
            a[i].layers = self.layers if layer < 0 else 1
            if layer < 0 and cnp.PyArray_DIM(x, 0) != self.layers:
                return False
            a[i].dst.ptr = <char *>a[i].dst.ptr + max(layer, 0) * a[i].to.layer
            a[i].dst.bytes -= max(layer, 0) * a[i].to.layer
            a[i].from_.layer = cnp.PyArray_STRIDE(x, 0)
            a[i].from_.token, a[i].from_.head = cnp.PyArray_STRIDE(x, axes - 3), cnp.PyArray_STRIDE(x, axes - 2)
            a[i].from_tokens, a[i].to_tokens = max(1, items), self.tokens
            a[i].targets, a[i].rows = whole(own), items
        self.run(a)
        return True

    def write_states(self, k, v, int64_t first, int64_t step, int64_t start):
        """States (rows, heads, n, head_dim) of one layer to tokens start .. start + n - 1 of blocks first, first + step,
        ...; whether it was done."""
        return self.put(k, v, first, step, start, -1) > 0

    # n, or 0 if it was not done. rows: how many there must be; below 0, any.
    cdef int64_t put(self, object k, object v, int64_t first, int64_t step, int64_t start, int64_t must) except -1:
        cdef kv_args a[2]
        cdef cnp.ndarray x
        cdef int64_t rows, count, shift
        cdef int i
        arrays = as_array(k, "k"), as_array(v, "v")
        x = arrays[0]
        if cnp.PyArray_NDIM(x) != 4 or self.layers != 1:
            return 0
        rows, count = cnp.PyArray_DIM(x, 0), cnp.PyArray_DIM(x, 2)
        if rows < 1 or 0 <= must != rows or not 0 <= first < self.blocks or not 0 <= start <= self.tokens - count or \
                rows > 1 and not 1 <= step <= (self.blocks - 1 - first) // (rows - 1):
            return 0
        step = step if rows > 1 else 0
        for i in range(2):
            x = arrays[i]
            a[i] = self.halves[i]
            if cnp.PyArray_NDIM(x) != 4 or cnp.PyArray_DIM(x, 0) != rows or cnp.PyArray_DIM(x, 2) != count or \
                    cnp.PyArray_DIM(x, 1) != a[i].heads or not is_source(x, &a[i], self.halves):
                return 0
            a[i].layers, a[i].rows = 1, rows * count
            shift = first * a[i].to.block + start * a[i].to.token
            a[i].dst.ptr = <char *>a[i].dst.ptr + shift
            a[i].dst.bytes -= shift
            a[i].to.block *= step
            a[i].from_.block, a[i].from_.head = cnp.PyArray_STRIDE(x, 0), cnp.PyArray_STRIDE(x, 1)
            a[i].from_.token = cnp.PyArray_STRIDE(x, 2)
            a[i].from_tokens = a[i].to_tokens = max(1, count)
        self.run(a)
        return count

    cdef int run(self, kv_args *a) except -1:
        cdef int i
        for i in range(2):
            run(OP_move_kv, &a[i], a[i].cols, a[i].layers * a[i].heads * (a[i].cols + 20))
        return 0


@cython.final
cdef class KVRoom:
    """What blocks a step apart have room for: states are written behind the last, and seen with those before as tensors
    of that type, without a copy."""
    cdef KVTarget target
    cdef object keys, values
    cdef int64_t first, step, rows

    def __cinit__(self, KVTarget target not None, int64_t first, int64_t step, int64_t rows, tensor):
        self.target, self.first, self.step, self.rows = target, first, step, rows
        blocks = slice(first, first + (rows - 1) * step + 1, step)
        self.keys, self.values = [_arrays.Lender(view[0, blocks], tensor) for view in target.views]

    def extend(self, k, v, int64_t length):
        """States (rows, heads, n, head_dim) to tokens `length` and on: keys and values with them, or None."""
        cdef int64_t count = self.target.put(k, v, self.first, self.step, length, self.rows)
        return self.upto(length + count) if count else None

    def upto(self, int64_t length):
        return self.keys.upto(length), self.values.upto(length)


# Slots that differ and are in range; whatever else is to be looked at closer.
cdef bint are_slots(const int64_t *s, int64_t count, int64_t slots) except -1:
    cdef targets t
    cdef int64_t i, last = -1
    cdef int64_t *room
    cdef bint ascend = True
    for i in range(count):
        if not 0 <= s[i] < slots:
            return False
        ascend &= s[i] > last
        last = s[i]
    if ascend or slots <= FEW_BLOCKS and all_differ(s, count, slots):
        return True
    room = <int64_t *>malloc(target_slots(count) * sizeof(int64_t))
    if room == NULL:
        raise MemoryError(f"no memory to look at {count} slots")
    i = enter_targets(&t, s, count, room)
    free(room)
    return i < 0


# Whether rows are floats that the kernel reads in place, of the target's width, and lie in neither half; if so, `a` has
# them but for the strides.
cdef bint is_source(cnp.ndarray x, kv_args *a, const kv_args *halves) except -1:
    cdef int axes = cnp.PyArray_NDIM(x), kind = cnp.PyArray_TYPE(x), i
    cdef int64_t last = 0, item = cnp.PyArray_ITEMSIZE(x)
    cdef char *start = <char *>cnp.PyArray_DATA(x)
    if kind == cnp.NPY_FLOAT32:
        a.from_.dtype = DTYPE_F32
    elif kind == cnp.NPY_FLOAT16:
        a.from_.dtype = DTYPE_F16
    elif is_bfloat16(x.dtype):
        a.from_.dtype = DTYPE_BF16
    else:
        return False
    if a.to.dtype == DTYPE_I8 or cnp.PyArray_DIM(x, axes - 1) != a.to.dim or not is_readable(x) or \
            a.to.dim > 1 and cnp.PyArray_STRIDE(x, axes - 1) != item:
        return False
    for i in range(axes):
        if cnp.PyArray_DIM(x, i) == 0:
            return False
        last += (cnp.PyArray_DIM(x, i) - 1) * cnp.PyArray_STRIDE(x, i)
    a.src.ptr, a.src.bytes = start, last + item
    a.from_.dim = a.from_.chunk = a.to.dim
    a.from_.chunk_stride = a.to.dim * item
    for i in range(2):
        if start < <char *>halves[i].dst.ptr + halves[i].dst.bytes and <char *>halves[i].dst.ptr < start + last + item:
            return False
    return True


# ---- gather ----


# The slots of sequences, one behind the other, as a table of blocks has them.
cdef cnp.ndarray table_slots(object block_table, object lengths, int64_t blocks, int64_t block_size):
    table = as_array(block_table, "block_table")
    if table.dtype.kind not in "iu" and table.size:
        raise TypeError(f"block_table must be integers, got {table.dtype}")
    if table.ndim != 2:
        raise ValueError(f"block_table must have the axes (sequences, blocks), got shape {table.shape}")
    if lengths is None:
        raise ValueError("block_table needs lengths")
    counts = slot_array(lengths, "lengths", table.shape[1] * block_size + 1)
    if len(counts) != len(table):
        raise ValueError(f"lengths must have one number a sequence: {len(table)} sequences, got {len(counts)}")
    found = []
    for i in range(len(table)):
        if counts[i] < 0:
            raise ValueError(f"lengths[{i}] must be at least 0, got {counts[i]}")
        at = np.arange(counts[i])
        used = table[i, :-(-counts[i] // block_size)]
        if (used >= blocks).any():
            bad = int(np.argmax(used >= blocks))
            raise ValueError(f"block_table[{i}, {bad}] is {used[bad]}, but there are {blocks} blocks")
        block = used.astype(np.int64)[at // block_size]
        found.append(np.where(block < 0, -1, block * block_size + at % block_size))
    return np.concatenate(found) if found else np.empty(0, np.int64)


cdef object float_dtype(object dtype, object cache_dtype):
    if dtype is None:
        return np.dtype(np.float32) if cache_dtype == np.int8 else cache_dtype
    if isinstance(dtype, str) and dtype == "bfloat16":
        return _arrays.BFLOAT16
    return np.dtype(dtype)


cdef object token_array(object out, list cache, bint with_layers, bint with_heads, int64_t items, object dtype, str name):
    shape = (layers_of(cache),) if with_layers else ()
    shape += (items, cache[0].shape[2]) if with_heads else (items,)
    dim = cache[0].shape[4] * (cache[0].shape[5] if cache[0].ndim == 6 else 1)
    shape += (dim,)
    if out is None:
        return np.zeros(shape, float_dtype(dtype, cache[0].dtype))
    array = as_array(in_place(out, name), name)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    return array


def gather_kv(k_cache, v_cache, slots=None, *, layout, block_table=None, lengths=None, k_scales=None, v_scales=None,
              dtype=None, out=None):
    """Keys and values of some tokens, (tokens, heads, head_dim) each, with layers first if the cache has several.

    slots: an integer a token, as in append_kv; below 0 is skipped, which leaves zeros or what was in out. Or
    block_table, (sequences, blocks), and lengths: the tokens of the first sequence, then those of the next; a block
    below 0 is skipped. dtype: float32, float16, "bfloat16" (default the cache's; of int8 float32). out: a pair of
    arrays to write to, in any of these dtypes. Values are None for a cache without them.
    An int8 row whose scale was never written, or cannot be one, is an error.
    Raises ValueError, TypeError, before anything is written.

    >>> cache = np.arange(8, dtype=np.float32).reshape(2, 2, 2, 1, 1)
    >>> k, v = lanewise.gather_kv(cache, None, [3, 0], layout="2NTHD")
    >>> k.ravel().tolist(), v.ravel().tolist()
    ([3.0, 0.0], [7.0, 4.0])
    """
    key_axes, value_axes = layouts.parse(layout)
    keys, values, key_scales, value_scales = cache_views(k_cache, v_cache, k_scales, v_scales, layout)
    if (slots is None) == (block_table is None):
        raise ValueError("either slots or block_table must be given")
    if block_table is not None:
        if "S" in key_axes:
            raise ValueError(f"layout {layout!r} has slots, not blocks, so a block_table says nothing")
        slots = table_slots(block_table, lengths, keys[0].shape[1], keys[0].shape[3])
    slots = slot_array(slots, "slots", capacity_of(keys))
    outs = (None, None) if out is None else tuple(out)
    if len(outs) != 2:
        raise ValueError(f"out must be a pair (keys, values), got {len(outs)} arrays")
    halves = [(keys, key_scales, key_axes, "k_cache", "out[0]", outs[0])]
    if values is not None:
        check_capacity(keys, values)
        halves.append((values, value_scales, value_axes, "v_cache", "out[1]", outs[1]))
    results, jobs, written = [], [], []
    for cache, scales, axes, cache_name, name, given in halves:
        plain = token_axes(axes, k_cache)
        result = token_array(given, cache, "L" in plain, "H" in plain, len(slots), dtype, name)
        if dtype_of(result, name) == DTYPE_I8:
            raise TypeError(f"{name} must be floats, got int8")
        results.append(result)
        written += layouts.views(result, plain)[0]
    for (cache, scales, axes, cache_name, name, given), result in zip(halves, written, strict=True):
        half = Half((cache_name, apart(cache, written), scales), (name, [result], None))
        jobs += jobs_of(half, slots, None, len(slots), None)
    run_all(jobs)
    return (*results, *[None] * (2 - len(results)))


# ---- relayout ----


def relayout(src, src_layout, dst, dst_layout, *, pairs=None, src_scales=None, dst_scales=None):
    """Copies keys and values from arrays that lie one way to arrays that lie another, and to their dtype.

    src, dst: as layouts.views takes them: an array, a list of arrays, one a layer, or a pair (keys, values) of those.
    pairs: (n, 2) integers, the slots from and to; a pair with one below 0 is skipped. Default: every slot to the
    same slot, of which both sides must have as many. int8 sides need their scales, as in append_kv, as src and dst are
    given; int8 to int8 moves codes and scales as they are.
    Source and target may overlap: the source is read first. Raises ValueError, TypeError, before anything is written.

    >>> pages = np.arange(12, dtype=np.float32).reshape(1, 2, 3, 2, 1)
    >>> by_head = np.zeros((2, 1, 2, 3, 1), np.float32)
    >>> lanewise.relayout(pages, "N2THD", by_head, "2NHTD")
    >>> by_head[0, 0, 1].ravel().tolist()
    [1.0, 3.0, 5.0]
    """
    from_keys, from_values = layouts.views(src, src_layout)
    in_place(dst_scales, "dst_scales")
    to_keys, to_values = layouts.views(in_place(dst, "dst"), dst_layout)
    if (from_values is None) != (to_values is None):
        raise ValueError("src and dst must both have values, or neither")
    scales = [(None, None) if given is None else layouts.scale_views(given, layout)
              for given, layout in ((src_scales, src_layout), (dst_scales, dst_layout))]
    halves = [(from_keys, scales[0][0], to_keys, scales[1][0], "keys")]
    if from_values is not None:
        check_capacity(from_keys, from_values)
        check_capacity(to_keys, to_values)
        halves.append((from_values, scales[0][1], to_values, scales[1][1], "values"))
    sources, targets, items = slot_pairs(pairs, capacity_of(from_keys), capacity_of(to_keys))
    written = [view for half in halves for view in half[2]] + [s for half in halves for s in half[3] or ()]
    jobs = []
    for from_views, from_scales, to_views, to_scales, name in halves:
        half = Half((f"src {name}", apart(from_views, written), None if from_scales is None else apart(from_scales, written)),
                    (f"dst {name}", to_views, to_scales))
        jobs += jobs_of(half, sources, targets, items, None)
    run_all(jobs)


cdef tuple slot_pairs(object pairs, int64_t from_slots, int64_t to_slots):
    if pairs is None:
        if from_slots != to_slots:
            raise ValueError(f"src and dst must have as many slots, got {from_slots} and {to_slots}; or give pairs")
        return None, None, from_slots
    array = as_array(pairs, "pairs")
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"pairs must have shape (n, 2), got {array.shape}")
    sources = slot_array(array[:, 0], "pairs[:, 0]", from_slots)
    targets = no_slot_twice(slot_array(array[:, 1], "pairs[:, 1]", to_slots), "pairs[:, 1]", "raise")
    return sources, targets, len(array)
