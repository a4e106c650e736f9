/* Which blocks of a cache are free, and how often each of the others is held. Bookkeeping only: no storage.

   A handle is generation << 32 | block. A block's generation moves on when its last reference goes, so a handle that
   was kept too long is told from those of the block's next life. Free blocks are used in this order: those never used,
   then those without contents, then cached ones (a prefix cache knows their contents), each list from the longest free.

   Every function checks its whole call before it changes anything. The lock is held inside these functions alone. */
#ifndef LANEWISE_POOL_H
#define LANEWISE_POOL_H

#include <stdatomic.h>
#include <stdint.h>

enum { POOL_MOST_BLOCKS = INT32_MAX };
enum { POOL_NULL = 0, POOL_NO_BLOCK = -1 }; /* handles of nothing: the reserved block 0; no block at all */

enum {
  BLOCK_CACHED = 1, /* the prefix cache knows its contents */
  BLOCK_PINNED = 2, /* not free, even without references */
  BLOCK_SEEN = 4    /* met in the call that runs */
};

struct block {
  uint32_t refs, lives, flags;
  uint32_t before, after; /* in a list of free ones: block + 1, 0 at the ends */
};

struct free_list {
  uint32_t first, last; /* block + 1 */
  int64_t count;
};

struct pool {
  atomic_flag lock;
  int64_t total, reserved, fresh; /* blocks fresh .. total - 1 were never used */
  struct block *blocks;
  struct free_list blank, cached;
  uint64_t origin; /* of generations, another in each pool, so that a foreign handle is not taken for one of its own */
  void *cache;     /* whose evict is told before a cached block is handed out */
  void (*evict)(void *cache, uint32_t block);
};

enum {
  POOL_FINE,
  POOL_SHORT,
  POOL_FOREIGN,
  POOL_STALE,
  POOL_OVERFREED,
  POOL_SATURATED,
  POOL_REPEATED,
  POOL_CONTENTS,
  POOL_NO_MEMORY
};

/* What is wrong with a call, and which of its handles. */
struct pool_error {
  int kind;
  int64_t index, handle;
  int64_t have, want;
};

struct pool_counts {
  int64_t free, cached, used; /* they add up to total */
};

/* 0 without memory. 1 <= total <= POOL_MOST_BLOCKS; takes no time for the blocks. */
int pool_open(struct pool *pool, int64_t total, int null_block);
void pool_close(struct pool *pool);

/* POOL_FINE or the kind of the error. */
int pool_allocate(struct pool *pool, int64_t count, int64_t *handles, struct pool_error *error);
int pool_free(struct pool *pool, const int64_t *handles, int64_t count, struct pool_error *error); /* the last first */
int pool_fork(struct pool *pool, const int64_t *handles, int64_t count, struct pool_error *error);
int pool_ids(struct pool *pool, const int64_t *handles, int64_t count, int32_t *ids, struct pool_error *error);
int pool_refs(struct pool *pool, int64_t handle, int64_t *refs, struct pool_error *error);
struct pool_counts pool_count(struct pool *pool);

/* NULL, or which invariant does not hold, at which block (-1: in the sums). */
const char *pool_check(struct pool *pool, int64_t *block);

/* ---- for the prefix cache, under the lock ---- */

void pool_lock(struct pool *pool);
void pool_unlock(struct pool *pool);
int pool_problem(const struct pool *pool, int64_t handle); /* POOL_FINE, POOL_FOREIGN or POOL_STALE */
int pool_fail(const struct pool *pool, struct pool_error *error, int kind, int64_t index, int64_t handle);
int64_t pool_handle(const struct pool *pool, uint32_t block);
int pool_acquire(struct pool *pool, uint32_t block); /* one more reference, the first too; 0 if there can be none */
void pool_settle(struct pool *pool, uint32_t block); /* into the list where a block without references belongs */
void pool_lift(struct pool *pool, uint32_t block);   /* out of the list of cached ones */
const char *pool_check_locked(struct pool *pool, int64_t *block);

#endif
