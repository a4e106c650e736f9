# cython: language_level=3, freethreading_compatible=True, auto_pickle=False
"""BlockPool, which blocks of a cache are free, and PrefixCache, which of them hold what prompts begin with.

Thin: handles, tokens and keys become C arrays of their own, one C function does the call, its error becomes an exception.
"""
cimport numpy as cnp
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport INT64_MAX, INT64_MIN, UINT32_MAX, int32_t, int64_t

import numpy as np

from lanewise._arguments cimport integer
from lanewise._arrays cimport as_array
from lanewise.errors import BlockError, OutOfBlocksError

cnp.import_array()

NO_BLOCK = POOL_NO_BLOCK


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
    raise BlockError(f"{name if single else f'{name}[{error.index}]'}: {what}", error.index, error.handle)


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
        cdef int64_t block
        cdef const char *wrong = pool_check(&self.pool, &block)
        if wrong != NULL:
            raise AssertionError(wrong.decode() if block < 0 else f"block {block} {wrong.decode()}")

    def __repr__(self):
        cdef pool_counts now = pool_count(&self.pool)
        return f"BlockPool({self.pool.total}: {now.free} free, {now.cached} cached, {now.used} used)"

    def __reduce__(self):
        raise TypeError("a BlockPool cannot be pickled or copied: its handles would be those of two pools")
