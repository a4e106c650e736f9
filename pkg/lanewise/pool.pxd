# The block pool and the prefix cache, for modules that build upon them.
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t


cdef extern from "pool.h" nogil:
    enum:
        POOL_MOST_BLOCKS
        POOL_NO_BLOCK
        POOL_FINE
        POOL_SHORT
        POOL_FOREIGN
        POOL_STALE
        POOL_OVERFREED
        POOL_SATURATED
        POOL_REPEATED
        POOL_CONTENTS
        POOL_NO_MEMORY
    ctypedef struct pool_t "struct pool":
        int64_t total, reserved
        void *cache
    ctypedef struct pool_error "struct pool_error":
        int kind
        int64_t index, handle, have, want
    ctypedef struct pool_counts "struct pool_counts":
        int64_t free, cached, used
    bint pool_open(pool_t *pool, int64_t total, bint null_block)
    void pool_close(pool_t *pool)
    int pool_allocate(pool_t *pool, int64_t count, int64_t *handles, pool_error *error)
    int pool_free(pool_t *pool, const int64_t *handles, int64_t count, pool_error *error)
    int pool_fork(pool_t *pool, const int64_t *handles, int64_t count, pool_error *error)
    int pool_ids(pool_t *pool, const int64_t *handles, int64_t count, int32_t *ids, pool_error *error)
    int pool_refs(pool_t *pool, int64_t handle, int64_t *refs, pool_error *error)
    pool_counts pool_count(pool_t *pool)
    const char *pool_check(pool_t *pool, int64_t *block)


cdef class BlockPool:
    cdef pool_t pool
    cdef object __weakref__
    cdef object take(self, object n, pool_error *error)
