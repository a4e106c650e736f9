# The block pool and the prefix cache, for modules that build upon them.
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t


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
        int64_t total
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


cdef extern from "prefix.h" nogil:
    enum:
        PREFIX_MOST_TOKENS
        PREFIX_NO_MEMORY
        PREFIX_NOT_ALONE
        EVENT_STORED
    ctypedef struct prefix_t "struct prefix":
        int64_t block_size, most_pinned
        uint64_t mask
    ctypedef struct event "struct event":
        int64_t kind, block
        uint64_t hash, parent_hash
    ctypedef struct extra "struct extra":
        int64_t block, size
        const uint8_t *bytes
        uint8_t *copy
    ctypedef struct prompt_t "struct prompt":
        const int32_t *tokens
        int64_t blocks
        extra *extras
        int64_t extra_count
    ctypedef struct prefix_counts "struct prefix_counts":
        int64_t entries, pinned
    int prefix_open(prefix_t *cache, pool_t *pool, int64_t block_size, uint64_t seed, int64_t most_pinned,
                    int64_t event_room)
    void prefix_close(prefix_t *cache)
    int64_t prefix_narrow(const void *tokens, int64_t step, int64_t count, int32_t *to)
    void prefix_hashes(const prefix_t *cache, const prompt_t *prompt, uint64_t *hashes)
    int64_t prefix_longest(prefix_t *cache, const prompt_t *prompt, int64_t *found)
    int64_t prefix_match(prefix_t *cache, const prompt_t *prompt, int64_t *found)
    int prefix_commit(prefix_t *cache, const prompt_t *prompt, const int64_t *handles, int64_t parent,
                      int64_t *entered, pool_error *error)
    int prefix_forget(prefix_t *cache, const int64_t *handles, int64_t count, int64_t *forgotten, pool_error *error)
    int64_t prefix_clear(prefix_t *cache)
    int64_t prefix_pin(prefix_t *cache, const prompt_t *prompt, int64_t *found, bint *done)
    int64_t prefix_unpin(prefix_t *cache, const prompt_t *prompt, int64_t *found)
    int64_t prefix_drain(prefix_t *cache, event *events, int64_t most, int64_t *lost)
    prefix_counts prefix_count(prefix_t *cache)
    const char *prefix_check(prefix_t *cache, int64_t *block)


cdef class BlockPool:
    cdef pool_t pool
    cdef object __weakref__
    cdef object take(self, object n, pool_error *error)


cdef class PrefixCache:
    cdef prefix_t cache
    cdef readonly BlockPool pool
    cdef readonly uint64_t seed
    cdef object __weakref__
