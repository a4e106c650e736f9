# cython: language_level=3, freethreading_compatible=True, auto_pickle=False
"""BlockPool, which blocks of a cache are free, and PrefixCache, which of them hold what prompts begin with.

Thin: handles, tokens and keys become C arrays of their own, one C function does the call, its error becomes an exception.
"""
cimport cython
cimport numpy as cnp
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport INT64_MAX, INT64_MIN, UINT32_MAX, UINT64_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free

import struct

import numpy as np

from lanewise._arguments cimport integer
from lanewise._arrays cimport as_array
from lanewise.errors import BlockError, OutOfBlocksError

cnp.import_array()

NO_BLOCK = POOL_NO_BLOCK
MOST_KEY_BYTES = 1024


# ---- handles in ----

cdef inline cnp.ndarray empty(cnp.npy_intp count, int dtype):
    return cnp.PyArray_EMPTY(1, &count, dtype, 0)


# A copy: what is checked is what is used, whoever writes to `handles` meanwhile.
cdef cnp.ndarray handles_of(object handles, str name):
    cdef cnp.ndarray array
    if isinstance(handles, (list, tuple)):
        return listed(handles if type(handles) is list else list(handles), name)
    if type(handles) is not np.ndarray:
        handles = as_array(handles, name)
    array = handles
    if cnp.PyArray_NDIM(array) == 1 and cnp.PyArray_DIM(array, 0) == 0:
        return empty(0, cnp.NPY_INT64)
    if cnp.PyArray_TYPE(array) != cnp.NPY_INT64 or not cnp.PyArray_ISNOTSWAPPED(array):
        if handles.dtype.kind != "i":
            raise TypeError(f"{name} must be int64, got {handles.dtype}")
    if cnp.PyArray_NDIM(array) != 1:
        raise ValueError(f"{name} must be one handle or one-dimensional, got shape {handles.shape}")
    return cnp.PyArray_Cast(array, cnp.NPY_INT64)


cdef cnp.ndarray listed(list handles, str name):
    cdef Py_ssize_t count = PyList_GET_SIZE(handles), i
    cdef cnp.ndarray array = empty(count, cnp.NPY_INT64)
    cdef int64_t *to = <int64_t *>cnp.PyArray_DATA(array)
    cdef int overflow = 0
    for i in range(count):
        if PyLong_CheckExact(<object>PyList_GET_ITEM(handles, i)):
            to[i] = PyLong_AsLongLongAndOverflow(<object>PyList_GET_ITEM(handles, i), &overflow)
            if not overflow:
                continue
        to[i] = one_handle(handles[i], f"{name}[{i}]")
    return array


cdef int64_t one_handle(object handle, str name) except? -2:
    cdef int overflow = 0
    cdef int64_t value
    if PyLong_CheckExact(handle):
        value = PyLong_AsLongLongAndOverflow(handle, &overflow)
        if not overflow:
            return value
    return <int64_t>integer(handle, name, INT64_MIN, INT64_MAX)


# 1 and the handle, or 0: it is something with several.
cdef inline bint is_one(object handles):
    return PyLong_CheckExact(handles) or isinstance(handles, (int, np.integer))


cdef int refuse(pool_error *error, int64_t total, str name, bint single=False) except -1:
    cdef int64_t block = error.handle & UINT32_MAX
    if error.kind == POOL_SHORT:
        raise OutOfBlocksError(error.want, error.have, total)
    if error.kind == POOL_NO_MEMORY:
        raise MemoryError("no memory for the keys of the blocks")
    if error.kind == POOL_FOREIGN:
        what = f"{error.handle} is no handle of this pool of {total} blocks"
    elif error.kind == POOL_OVERFREED:
        what = f"block {block} is freed {error.want} times in one call and held {error.have} time(s)"
    elif error.kind == POOL_SATURATED:
        what = f"block {block} is held 2**32 - 1 times already"
    elif error.kind == POOL_REPEATED:
        what = f"block {block} stands twice in one call"
    elif error.kind == POOL_CONTENTS:
        what = f"block {block} is committed with other tokens or keys"
    elif error.have == error.want:
        what = f"block {block} is not held"
    else:
        what = f"stale: block {block} is in generation {error.have}, the handle is of generation {error.want}"
    if error.index < 0:
        name, single = "parent", True
    raise BlockError(f"{name if single else f'{name}[{error.index}]'}: {what}", error.index, error.handle)


cdef int found(const char *wrong, int64_t block) except -1:
    if wrong != NULL:
        raise AssertionError(wrong.decode() if block < 0 else f"block {block} {wrong.decode()}")
    return 0


# ---- the pool ----

cdef class BlockPool:
    """Which of num_blocks blocks are free, and how often each of the others is held. It has no storage itself.

    A block is allocated with one reference, fork adds one to each handle, free takes one, and the last makes the block
    free. A handle is an int: generation << 32 | block, and ids gives the blocks. One that was freed is stale for good,
    and using it is BlockError. Each call does all or nothing. free takes the last handle first, so that of a sequence's
    blocks the tail is evicted first. -1 among handles stands for no block and is passed over.

    With null_block, block 0 is never handed out: its handle is 0, and it is passed over like -1. It counts as used.

    Threads may share a pool. ValueError: num_blocks is not in 1 .. 2**31 - 1. TypeError: it is pickled or copied.

    >>> pool = lanewise.BlockPool(8)
    >>> table = pool.allocate(3)
    >>> child = pool.fork(table)
    >>> pool.free(table)
    >>> pool.ids(child).tolist(), pool.num_free, pool.num_used
    ([0, 1, 2], 5, 3)
    """

    def __cinit__(self, num_blocks, *, null_block=False):
        cdef int64_t total = <int64_t>integer(num_blocks, "num_blocks", 1, POOL_MOST_BLOCKS)
        if not pool_open(&self.pool, total, bool(null_block)):
            raise MemoryError(f"no memory for a pool of {num_blocks} blocks")

    def __dealloc__(self):
        pool_close(&self.pool)

    def allocate(self, n=None):
        """A handle, or an int64 array of n of them. OutOfBlocksError: there are fewer.

        >>> pool = lanewise.BlockPool(8)
        >>> pool.ids(pool.allocate()), pool.ids(pool.allocate(2)).tolist()
        (0, [1, 2])
        """
        cdef pool_error error
        handles = self.take(n, &error)
        if error.kind:
            refuse(&error, self.pool.total, "n")
        return handles

    def try_allocate(self, n=None):
        """As allocate, but None where there are fewer.

        >>> lanewise.BlockPool(8).try_allocate(9) is None
        True
        """
        cdef pool_error error
        handles = self.take(n, &error)
        return None if error.kind else handles

    cdef object take(self, object n, pool_error *error):
        cdef int64_t handle, count
        cdef cnp.ndarray handles
        if n is None:
            pool_allocate(&self.pool, 1, &handle, error)
            return None if error.kind else handle
        count = <int64_t>integer(n, "n", 0, INT64_MAX)
        if count > self.pool.total:  # before an array of so many is made
            error.kind, error.want, error.have = POOL_SHORT, count, self.num_available
            return None
        handles = empty(count, cnp.NPY_INT64)
        pool_allocate(&self.pool, count, <int64_t *>cnp.PyArray_DATA(handles), error)
        return handles

    def free(self, handles):
        """Takes one reference from each, the last first; one handle or several. BlockError: nothing is changed.

        >>> pool = lanewise.BlockPool(8)
        >>> pool.free(pool.allocate(3))
        >>> pool.num_free
        8
        """
        cdef pool_error error
        cdef int64_t handle
        cdef cnp.ndarray several
        if is_one(handles):
            handle = one_handle(handles, "handles")
            if pool_free(&self.pool, &handle, 1, &error):
                refuse(&error, self.pool.total, "handles", True)
        else:
            several = handles_of(handles, "handles")
            if pool_free(&self.pool, <int64_t *>cnp.PyArray_DATA(several), cnp.PyArray_DIM(several, 0), &error):
                refuse(&error, self.pool.total, "handles")

    def fork(self, handles):
        """Adds one reference to each and gives the handles: an int, or a new array. BlockError: nothing is changed.

        >>> pool = lanewise.BlockPool(8)
        >>> table = pool.allocate(3)
        >>> child = pool.fork(table)
        >>> pool.ref_count(table[0]), (child == table).all()
        (2, np.True_)
        """
        cdef pool_error error
        cdef int64_t handle
        cdef cnp.ndarray several
        if is_one(handles):
            handle = one_handle(handles, "handles")
            if pool_fork(&self.pool, &handle, 1, &error):
                refuse(&error, self.pool.total, "handles", True)
            return handle
        several = handles_of(handles, "handles")
        if pool_fork(&self.pool, <int64_t *>cnp.PyArray_DATA(several), cnp.PyArray_DIM(several, 0), &error):
            refuse(&error, self.pool.total, "handles")
        return several

    def ids(self, handles):
        """The blocks of handles that are held: an int, or an int32 array; -1 stays -1. BlockError: one is not held.

        >>> pool = lanewise.BlockPool(8)
        >>> pool.ids([pool.allocate(), -1]).tolist()
        [0, -1]
        """
        cdef pool_error error
        cdef int64_t handle
        cdef int32_t id_
        cdef cnp.ndarray several, ids
        if is_one(handles):
            handle = one_handle(handles, "handles")
            if pool_ids(&self.pool, &handle, 1, &id_, &error):
                refuse(&error, self.pool.total, "handles", True)
            return id_
        several = handles_of(handles, "handles")
        ids = empty(cnp.PyArray_DIM(several, 0), cnp.NPY_INT32)
        if pool_ids(&self.pool, <int64_t *>cnp.PyArray_DATA(several), cnp.PyArray_DIM(several, 0),
                    <int32_t *>cnp.PyArray_DATA(ids), &error):
            refuse(&error, self.pool.total, "handles")
        return ids

    def ref_count(self, handle):
        """How often a handle's block is held. BlockError: it is not.

        >>> pool = lanewise.BlockPool(8)
        >>> pool.ref_count(pool.fork(pool.allocate()))
        2
        """
        cdef pool_error error
        cdef int64_t refs
        if pool_refs(&self.pool, one_handle(handle, "handle"), &refs, &error):
            refuse(&error, self.pool.total, "handle", True)
        return refs

    def sharers(self, handle):
        """Who would see a block change: its references, and one more if a PrefixCache knows its contents.

        >>> pool = lanewise.BlockPool(8)
        >>> cache, one = lanewise.PrefixCache(pool, block_size=4), pool.allocate()
        >>> pool.sharers(one), cache.commit(one, range(4)), pool.sharers(one)
        (1, 1, 2)
        """
        cdef pool_error error
        cdef int64_t sharers
        if pool_sharers(&self.pool, one_handle(handle, "handle"), &sharers, &error):
            refuse(&error, self.pool.total, "handle", True)
        return sharers

    def all_own(self, handles):
        """Whether each block has one reference and no PrefixCache knows its contents: what may be written in place.

        BlockError: one is not held.

        >>> pool = lanewise.BlockPool(8)
        >>> table = pool.allocate(2)
        >>> pool.all_own(table), pool.all_own([table[0], pool.fork(table[1])])
        (True, False)
        """
        cdef pool_error error
        cdef cnp.ndarray several = handles_of(handles, "handles")
        cdef const int64_t *each = <const int64_t *>cnp.PyArray_DATA(several)
        cdef int64_t sharers, i
        cdef bint own = True
        for i in range(cnp.PyArray_DIM(several, 0)):
            if pool_sharers(&self.pool, each[i], &sharers, &error):
                error.index = i
                refuse(&error, self.pool.total, "handles")
            own &= sharers == 1
        return own

    def take_below(self, handles):
        """For compaction: for each handle the lowest blank block before its own, as long as there is one.

        handles come by descending block. The result, handles with one reference each, is no longer than they are. What
        they hold is then copied, PrefixCache.move told, and they are freed. BlockError: nothing is taken.

        >>> pool = lanewise.BlockPool(8)
        >>> table = pool.allocate(4)
        >>> pool.free(table[:3])
        >>> pool.ids(pool.take_below(table[3:])).tolist()
        [0]
        """
        cdef pool_error error
        cdef cnp.ndarray several = handles_of(handles, "handles")
        cdef cnp.ndarray taken = empty(cnp.PyArray_DIM(several, 0), cnp.NPY_INT64)
        cdef int64_t count = pool_take_below(&self.pool, <int64_t *>cnp.PyArray_DATA(several),
                                             cnp.PyArray_DIM(several, 0), <int64_t *>cnp.PyArray_DATA(taken), &error)
        if count < 0:
            refuse(&error, self.pool.total, "handles")
        return (<object>taken)[:count].copy()

    @property
    def num_blocks(self):
        """All blocks: num_free + num_cached + num_used."""
        return self.pool.total

    @property
    def num_free(self):
        """Free blocks without contents."""
        return pool_count(&self.pool).free

    @property
    def num_cached(self):
        """Free blocks whose contents a PrefixCache knows: evicted when there are no others."""
        return pool_count(&self.pool).cached

    @property
    def num_used(self):
        """Blocks that cannot be allocated: held, pinned, or the null block."""
        return pool_count(&self.pool).used

    @property
    def num_available(self):
        """How many allocate can give: num_free + num_cached."""
        cdef pool_counts now = pool_count(&self.pool)
        return now.free + now.cached

    def check(self):
        """Walks every list and counts every block. AssertionError: an invariant does not hold, which is a bug here.

        >>> lanewise.BlockPool(8).check()
        """
        cdef int64_t block = -1
        cdef const char *wrong = pool_check(&self.pool, &block)
        found(wrong, block)

    def __repr__(self):
        cdef pool_counts now = pool_count(&self.pool)
        return f"BlockPool({self.pool.total}: {now.free} free, {now.cached} cached, {now.used} used)"

    def __reduce__(self):
        raise TypeError("a BlockPool cannot be pickled or copied: its handles would be those of two pools")


# ---- prompts in ----

# Each key says of what kind it is, of what type and how long: no two different ones make the same bytes.
cdef bytes tagged(bytes kind, object key, str name):
    if isinstance(key, str):
        type_, data = b"s", key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes):
        type_, data = b"b", bytes(key)
    elif isinstance(key, int) and not isinstance(key, bool):
        type_, data = b"i", key.to_bytes(key.bit_length() // 8 + 1, "little", signed=True)
    else:
        raise TypeError(f"{name} must be a str, bytes or int, got {key!r}")
    if len(data) > MOST_KEY_BYTES:
        raise ValueError(f"{name} may have up to {MOST_KEY_BYTES} bytes, got {len(data)}")
    return struct.pack("<ccI", kind, type_, len(data)) + data


# [(block, what is hashed and compared there)], ascending
cdef list extras_of(object adapter, object salt, object images, int64_t block_size):
    cdef dict at = {}
    root = b""
    if adapter is not None:
        root += tagged(b"a", adapter, "adapter")
    if salt is not None:
        root += tagged(b"s", salt, "salt")
    if root:
        at[0] = root
    if images is not None:
        placed = {}
        for i, image in enumerate(images):
            if not isinstance(image, (tuple, list)) or len(image) != 2:
                raise TypeError(f"images[{i}] must be (key, position), got {image!r}")
            position = <int64_t>integer(image[1], f"images[{i}]: position", 0, INT64_MAX)
            if position in placed:
                raise ValueError(f"images[{i}]: there is another at position {position}")
            placed[position] = tagged(b"m", image[0], f"images[{i}]")
        for position in sorted(placed):
            block, offset = divmod(position, block_size)
            at[block] = at.get(block, b"") + struct.pack("<I", offset) + placed[position]
    return sorted(at.items())


# Tokens and keys of a call, in memory of their own.
cdef class _Prompt:
    cdef prompt_t c
    cdef cnp.ndarray tokens
    cdef list extras
    cdef int64_t count

    def __dealloc__(self):
        free(self.c.extras)


cdef _Prompt prompt_of(PrefixCache cache, object tokens, object adapter, object salt, object images, bint cap):
    cdef _Prompt p = _Prompt.__new__(_Prompt)
    cdef int64_t block_size = cache.cache.block_size
    p.tokens = tokens_of(tokens)
    p.count = cnp.PyArray_DIM(p.tokens, 0)
    p.c.tokens = <const int32_t *>cnp.PyArray_DATA(p.tokens)
    p.c.blocks = max(p.count - cap, 0) // block_size
    if adapter is not None or salt is not None or images is not None:
        add_extras(p, extras_of(adapter, salt, images, block_size))
    return p


cdef int add_extras(_Prompt p, list extras) except -1:
    cdef Py_ssize_t i
    cdef bytes data
    p.extras = extras  # they keep the bytes
    p.c.extras = <extra *>calloc(len(extras) + 1, sizeof(extra))
    if p.c.extras == NULL:
        raise MemoryError("no memory for the keys of a prompt")
    p.c.extra_count = len(extras)
    for i in range(len(extras)):
        p.c.extras[i].block, data = extras[i]
        p.c.extras[i].bytes, p.c.extras[i].size = data, len(data)
    return 0


cdef cnp.ndarray tokens_of(object tokens):
    cdef cnp.ndarray array, narrow
    cdef int64_t count, bad
    array = tokens if type(tokens) is np.ndarray else as_array(tokens, "tokens")
    if cnp.PyArray_NDIM(array) != 1:
        raise ValueError(f"tokens must be one-dimensional, got shape {(<object>array).shape}")
    count = cnp.PyArray_DIM(array, 0)
    if count and (<object>array).dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers, got {(<object>array).dtype}")
    if cnp.PyArray_TYPE(array) != cnp.NPY_INT64 or not cnp.PyArray_ISBEHAVED_RO(array):
        array = cnp.PyArray_Cast(array, cnp.NPY_INT64)  # uint64 above the range becomes negative: refused as well
    narrow = empty(count, cnp.NPY_INT32)
    bad = prefix_narrow(cnp.PyArray_DATA(array), cnp.PyArray_STRIDE(array, 0), count,
                        <int32_t *>cnp.PyArray_DATA(narrow))
    if bad >= 0:
        raise ValueError(f"tokens[{bad}] is {tokens[bad]}, not in 0..2**31 - 1")
    return narrow


# ---- the prefix cache ----

@cython.no_gc_clear  # the collector must not take its pool away before __dealloc__ has left it
cdef class PrefixCache:
    """Which blocks of a pool hold what prompts begin with, so that a prompt takes them instead of computing them.

    commit enters full blocks that have been filled, match finds those of a prompt and holds them once more. A block that
    is free stays known until the pool needs it: the one free for longest goes first, of a sequence the tail. A hit
    compares tokens and keys, block by block; hashes only find candidates. tokens are integers in 0..2**31 - 1.

    Keys make different prompts of the same tokens: adapter and salt from the first token on, images, a list of
    (key, position), from the block of their position on. A key is a str, bytes or int; each kind and type is its own.
    seed is the hash's key: what hashes gives is the same wherever seed and block_size are.

    Up to max_pinned blocks (half of the pool) can be pinned. max_events events wait for events(). Threads may share it.
    ValueError: the pool has another cache, or a number is out of its range.

    >>> pool = lanewise.BlockPool(8)
    >>> cache = lanewise.PrefixCache(pool, block_size=4)
    >>> table = pool.allocate(2)
    >>> cache.commit(table, range(8))  # once keys and values are written
    2
    >>> pool.free(table)
    >>> handles, n = cache.match([0, 1, 2, 3, 4, 9])
    >>> pool.ids(handles).tolist(), n, pool.num_cached
    ([0], 4, 1)
    """

    def __cinit__(self, BlockPool pool not None, block_size=16, *, seed=0, max_pinned=None, max_events=0):
        cdef int64_t most_tokens = <int64_t>integer(block_size, "block_size", 1, PREFIX_MOST_TOKENS)
        cdef int64_t total = pool.pool.total, pinned, room
        pinned = total // 2 if max_pinned is None else <int64_t>integer(max_pinned, "max_pinned", 0, total)
        room = <int64_t>integer(max_events, "max_events", 0, 2**31 - 1)
        self.seed = integer(seed, "seed", 0, UINT64_MAX)
        self.pool = pool
        status = prefix_open(&self.cache, &pool.pool, most_tokens, self.seed, pinned, room)
        if status == PREFIX_NO_MEMORY:
            raise MemoryError(f"no memory for a prefix cache of {total} blocks of {most_tokens} tokens")
        if status == PREFIX_NOT_ALONE:
            raise ValueError("the pool has a PrefixCache already")

    def __dealloc__(self):
        prefix_close(&self.cache)

    def commit(self, handles, tokens, *, parent=None, adapter=None, salt=None, images=None):
        """Enters the full blocks of `tokens`, which `handles` hold, filled, and gives how many are new.

        With parent, the handle of the committed block before them, they continue its sequence: the positions of images
        count from that sequence's beginning, and adapter and salt are those it began with. What is known already, in
        this block or another, is not entered again; nor is anything after a parent that is not known any more. Handles
        beyond the full blocks are left out.

        BlockError: a handle is not held, stands twice, or was committed with other contents. ValueError: there are
        fewer handles than full blocks. Nothing is entered then.

        >>> pool = lanewise.BlockPool(8)
        >>> cache, table = lanewise.PrefixCache(pool, block_size=4), pool.allocate(2)
        >>> cache.commit(table[:1], [1, 2, 3, 4]), cache.commit(table[1:], [5, 6, 7, 8], parent=table[0])
        (1, 1)
        """
        cdef pool_error error
        cdef int64_t entered, before = POOL_NO_BLOCK
        cdef cnp.ndarray several = handles_of([handles] if is_one(handles) else handles, "handles")
        cdef _Prompt p = prompt_of(self, tokens, adapter, salt, images, False)
        if parent is not None:
            before = one_handle(parent, "parent")
            if before == POOL_NO_BLOCK:
                raise ValueError("parent must be a handle or None, got -1")
        if cnp.PyArray_DIM(several, 0) < p.c.blocks:
            raise ValueError(f"handles must have one for each of the {p.c.blocks} full blocks of {p.count} tokens, "
                             f"got {cnp.PyArray_DIM(several, 0)}")
        if prefix_commit(&self.cache, &p.c, <int64_t *>cnp.PyArray_DATA(several), before, &entered, &error):
            refuse(&error, self.pool.pool.total, "handles")
        return entered

    def match(self, tokens, *, adapter=None, salt=None, images=None, cap=True):
        """(handles of the known blocks that `tokens` begin with, how many tokens they hold); each is held once more.

        With cap, the last token is never among them, since a model must see one to give logits.

        >>> pool = lanewise.BlockPool(8)
        >>> cache, table = lanewise.PrefixCache(pool, block_size=4), pool.allocate(2)
        >>> n = cache.commit(table, range(8))
        >>> cache.match(range(8))[1], cache.match(range(8), cap=False)[1], cache.match(range(8), salt="x")[1]
        (4, 8, 0)
        """
        cdef _Prompt p = prompt_of(self, tokens, adapter, salt, images, cap)
        cdef cnp.ndarray handles = empty(p.c.blocks, cnp.NPY_INT64)
        cdef int64_t count = prefix_match(&self.cache, &p.c, <int64_t *>cnp.PyArray_DATA(handles))
        if count < p.c.blocks:
            handles = (<object>handles)[:count].copy()
        return handles, count * self.cache.block_size

    def longest(self, tokens, *, adapter=None, salt=None, images=None, cap=True):
        """How many tokens match would give, without holding anything.

        >>> pool = lanewise.BlockPool(8)
        >>> cache = lanewise.PrefixCache(pool, block_size=4)
        >>> cache.commit(pool.allocate(), [1, 2, 3, 4]), cache.longest([1, 2, 3, 4, 5])
        (1, 4)
        """
        cdef _Prompt p = prompt_of(self, tokens, adapter, salt, images, cap)
        cdef cnp.ndarray room = empty(p.c.blocks, cnp.NPY_INT64)
        return prefix_longest(&self.cache, &p.c, <int64_t *>cnp.PyArray_DATA(room)) * self.cache.block_size

    def forget(self, handles):
        """Takes blocks that are held out of the cache, as their contents are about to change; how many were in it.

        What came after them is not found any more. BlockError: one is not held, and nothing is changed.

        >>> pool = lanewise.BlockPool(8)
        >>> cache, one = lanewise.PrefixCache(pool, block_size=4), pool.allocate()
        >>> cache.commit(one, [1, 2, 3, 4]), cache.forget(one), len(cache)
        (1, 1, 0)
        """
        cdef pool_error error
        cdef int64_t forgotten
        cdef cnp.ndarray several = handles_of([handles] if is_one(handles) else handles, "handles")
        if prefix_forget(&self.cache, <int64_t *>cnp.PyArray_DATA(several), cnp.PyArray_DIM(several, 0), &forgotten,
                         &error):
            refuse(&error, self.pool.pool.total, "handles")
        return forgotten

    def move(self, source, to):
        """Says that what the blocks `source` hold has been copied to the blocks `to`, where prompts now find it.

        All are held, before and after. BlockError: one is not, and nothing is changed.

        >>> pool = lanewise.BlockPool(8)
        >>> cache, table = lanewise.PrefixCache(pool, block_size=4), pool.allocate(2)
        >>> cache.commit(table[1:], range(4)), cache.move(table[1:], table[:1])
        (1, None)
        >>> pool.ids(cache.match(range(5))[0]).tolist()
        [0]
        """
        cdef pool_error error
        cdef cnp.ndarray old = handles_of(source, "source"), new = handles_of(to, "to")
        if cnp.PyArray_DIM(old, 0) != cnp.PyArray_DIM(new, 0):
            raise ValueError(f"to must have as many handles as source, {cnp.PyArray_DIM(old, 0)}, "
                             f"got {cnp.PyArray_DIM(new, 0)}")
        if prefix_move(&self.cache, <int64_t *>cnp.PyArray_DATA(old), <int64_t *>cnp.PyArray_DATA(new),
                       cnp.PyArray_DIM(old, 0), &error):
            refuse(&error, self.pool.pool.total, "source or to")

    def clear(self):
        """Forgets the contents of all free blocks; how many they were. Blocks held or pinned stay known.

        >>> pool = lanewise.BlockPool(8)
        >>> cache, table = lanewise.PrefixCache(pool, block_size=4), pool.allocate(2)
        >>> n = cache.commit(table, range(8))
        >>> pool.free(table[1:])
        >>> cache.clear(), len(cache), pool.num_free
        (1, 1, 7)
        """
        return prefix_clear(&self.cache)

    def pin(self, tokens, *, adapter=None, salt=None, images=None):
        """Keeps the known blocks that `tokens` begin with from eviction, held or not; how many were not pinned before.

        ValueError: more than max_pinned would be, and none of them is.

        >>> pool = lanewise.BlockPool(8)
        >>> cache, table = lanewise.PrefixCache(pool, block_size=4), pool.allocate(2)
        >>> n = cache.commit(table, range(8))
        >>> cache.pin(range(8)), pool.free(table), pool.num_used
        (2, None, 2)
        """
        cdef bint done
        cdef _Prompt p = prompt_of(self, tokens, adapter, salt, images, False)
        cdef cnp.ndarray room = empty(p.c.blocks, cnp.NPY_INT64)
        cdef int64_t more = prefix_pin(&self.cache, &p.c, <int64_t *>cnp.PyArray_DATA(room), &done)
        if not done:
            raise ValueError(f"{more} more block(s) would be pinned, {self.num_pinned} of at most "
                             f"{self.cache.most_pinned} are")
        return more

    def unpin(self, tokens, *, adapter=None, salt=None, images=None):
        """Lets the blocks that pin kept be evicted again, once no one holds them; how many were pinned.

        >>> pool = lanewise.BlockPool(8)
        >>> cache, one = lanewise.PrefixCache(pool, block_size=4), pool.allocate()
        >>> cache.commit(one, range(4)), cache.pin(range(4)), cache.unpin(range(4))
        (1, 1, 1)
        """
        cdef _Prompt p = prompt_of(self, tokens, adapter, salt, images, False)
        cdef cnp.ndarray room = empty(p.c.blocks, cnp.NPY_INT64)
        return prefix_unpin(&self.cache, &p.c, <int64_t *>cnp.PyArray_DATA(room))

    def hashes(self, tokens, *, adapter=None, salt=None, images=None):
        """uint64: the hash of each full block and all before it, known or not. For routers: see docs/operations.md.

        >>> cache = lanewise.PrefixCache(lanewise.BlockPool(8), block_size=4)
        >>> [hex(h) for h in cache.hashes(range(4))]
        ['0x39be8b992af819d4']
        """
        cdef _Prompt p = prompt_of(self, tokens, adapter, salt, images, False)
        cdef cnp.ndarray hashes = empty(p.c.blocks, cnp.NPY_UINT64)
        prefix_hashes(&self.cache, &p.c, <uint64_t *>cnp.PyArray_DATA(hashes))
        return hashes

    def events(self):
        """What was entered and taken out since the last call: ("stored" or "removed", hash, parent's hash, block).

        A first block's parent has hash 0. Where max_events were not enough, the oldest are lost, and the list begins
        with ("lost", how many, 0, -1).

        >>> pool = lanewise.BlockPool(8)
        >>> cache = lanewise.PrefixCache(pool, block_size=4, max_events=100)
        >>> cache.commit(pool.allocate(), range(4)), [event[0] for event in cache.events()]
        (1, ['stored'])
        """
        cdef event some[64]
        cdef int64_t lost, count = 64, i
        events = []
        while count == 64:
            count = prefix_drain(&self.cache, some, 64, &lost)
            if lost:
                events.append(("lost", lost, 0, -1))
            for i in range(count):
                kind = "stored" if some[i].kind == EVENT_STORED else "removed"
                events.append((kind, some[i].hash, some[i].parent_hash, some[i].block))
        return events

    def __len__(self):
        return prefix_count(&self.cache).entries

    @property
    def block_size(self):
        """Tokens of a block."""
        return self.cache.block_size

    @property
    def max_pinned(self):
        """How many blocks can be pinned."""
        return self.cache.most_pinned

    @property
    def num_pinned(self):
        """How many blocks are pinned."""
        return prefix_count(&self.cache).pinned

    def check(self):
        """As BlockPool.check, of the pool and every entry. AssertionError: an invariant does not hold.

        >>> lanewise.PrefixCache(lanewise.BlockPool(8)).check()
        """
        cdef int64_t block = -1
        cdef const char *wrong = prefix_check(&self.cache, &block)
        found(wrong, block)

    def _keep_hash_bits(self, bits):  # so that a test can make all hashes equal
        if len(self):
            raise ValueError("the cache must be empty")
        self.cache.mask = (<uint64_t>1 << integer(bits, "bits", 0, 63)) - 1

    def __repr__(self):
        return f"PrefixCache({len(self)} of {self.pool.pool.total} blocks of {self.cache.block_size} tokens)"

    def __reduce__(self):
        raise TypeError("a PrefixCache cannot be pickled or copied: its blocks are those of its pool")
