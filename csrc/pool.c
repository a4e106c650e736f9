/* The block pool: reference counts, generations and two intrusive lists of free blocks. */
#if !defined _WIN32
#define _GNU_SOURCE
#endif
#include "pool.h"

#include <stdlib.h>
#include <string.h>

#if defined _WIN32
#include <windows.h>
#else
#include <sched.h>
#endif

/* ---- the lock ---- */

static void give_way(void) {
#if defined _WIN32
  SwitchToThread();
#else
  sched_yield();
#endif
}

void pool_lock(struct pool *pool) {
  while (atomic_flag_test_and_set_explicit(&pool->lock, memory_order_acquire)) {
    give_way();
  }
}

void pool_unlock(struct pool *pool) { atomic_flag_clear_explicit(&pool->lock, memory_order_release); }

/* ---- lists of free blocks ---- */

static void append(struct pool *pool, struct free_list *list, uint32_t block) {
  struct block *b = &pool->blocks[block];
  b->before = list->last;
  b->after = 0;
  if (list->last) {
    pool->blocks[list->last - 1].after = block + 1;
  } else {
    list->first = block + 1;
  }
  list->last = block + 1;
  list->count++;
}

static void unlink_from(struct pool *pool, struct free_list *list, uint32_t block) {
  const struct block *b = &pool->blocks[block];
  if (b->before) {
    pool->blocks[b->before - 1].after = b->after;
  } else {
    list->first = b->after;
  }
  if (b->after) {
    pool->blocks[b->after - 1].before = b->before;
  } else {
    list->last = b->before;
  }
  list->count--;
}

void pool_settle(struct pool *pool, uint32_t block) {
  uint32_t flags = pool->blocks[block].flags;
  if (!(flags & BLOCK_PINNED)) {
    append(pool, flags & BLOCK_CACHED ? &pool->cached : &pool->blank, block);
  }
}

void pool_lift(struct pool *pool, uint32_t block) { unlink_from(pool, &pool->cached, block); }

/* ---- opening and closing ---- */

int pool_open(struct pool *pool, int64_t total, int null_block) {
  static atomic_uint_fast32_t pools;
  *pool = (struct pool){.lock = ATOMIC_FLAG_INIT, .total = total, .reserved = null_block, .fresh = null_block};
  pool->origin = atomic_fetch_add(&pools, 1) * UINT64_C(0x9e3779b9); /* far apart, by the golden ratio */
  pool->blocks = calloc((size_t)total, sizeof *pool->blocks);
  return pool->blocks != NULL;
}

void pool_close(struct pool *pool) {
  free(pool->blocks);
  pool->blocks = NULL;
}

/* ---- handles ---- */

static int64_t generation(const struct pool *pool, uint32_t block) {
  return (int64_t)((pool->origin + pool->blocks[block].lives) % INT32_MAX) + 1; /* never 0: a bare id is no handle */
}

int64_t pool_handle(const struct pool *pool, uint32_t block) { return generation(pool, block) << 32 | block; }

static int is_nothing(const struct pool *pool, int64_t handle) {
  return handle == POOL_NO_BLOCK || (handle == POOL_NULL && pool->reserved);
}

int pool_problem(const struct pool *pool, int64_t handle) {
  int64_t block = handle & UINT32_MAX;
  if (handle < 0 || block < pool->reserved || block >= pool->total) {
    return POOL_FOREIGN;
  }
  int alive = handle >> 32 == generation(pool, (uint32_t)block) && pool->blocks[block].refs;
  return alive ? POOL_FINE : POOL_STALE;
}

int pool_fail(const struct pool *pool, struct pool_error *error, int kind, int64_t index, int64_t handle) {
  int64_t have = kind == POOL_FOREIGN ? pool->total : generation(pool, (uint32_t)handle);
  *error = (struct pool_error){.kind = kind, .index = index, .handle = handle, .have = have, .want = handle >> 32};
  return kind;
}

/* ---- references ---- */

static uint32_t take(struct pool *pool) {
  uint32_t block;
  if (pool->fresh < pool->total) {
    block = (uint32_t)pool->fresh++;
  } else if (pool->blank.count) {
    block = pool->blank.first - 1;
    unlink_from(pool, &pool->blank, block);
  } else {
    block = pool->cached.first - 1;
    unlink_from(pool, &pool->cached, block);
    pool->evict(pool->cache, block);
  }
  pool->blocks[block].refs = 1;
  return block;
}

static struct pool_counts counts(const struct pool *pool) {
  int64_t blank = pool->total - pool->fresh + pool->blank.count, cached = pool->cached.count;
  return (struct pool_counts){blank, cached, pool->total - blank - cached};
}

int pool_allocate(struct pool *pool, int64_t count, int64_t *handles, struct pool_error *error) {
  pool_lock(pool);
  struct pool_counts now = counts(pool);
  int kind = count <= now.free + now.cached ? POOL_FINE : POOL_SHORT;
  *error = (struct pool_error){.kind = kind, .have = now.free + now.cached, .want = count};
  for (int64_t i = 0; i < count && !kind; i++) {
    handles[i] = pool_handle(pool, take(pool));
  }
  pool_unlock(pool);
  return kind;
}

int pool_acquire(struct pool *pool, uint32_t block) {
  struct block *b = &pool->blocks[block];
  if (b->refs == UINT32_MAX) {
    return 0;
  }
  if (b->refs++ == 0 && !(b->flags & BLOCK_PINNED)) {
    pool_lift(pool, block);
  }
  return 1;
}

/* Adds `change`, 1 or -1, to the references of each, or to none of them: then what is wrong with which. */
static int change_refs(struct pool *pool, const int64_t *handles, int64_t count, int change, struct pool_error *error) {
  int64_t done = 0;
  int kind = POOL_FINE;
  for (; done < count; done++) {
    if (is_nothing(pool, handles[done])) {
      continue;
    }
    kind = pool_problem(pool, handles[done]);
    if (!kind && change > 0 && pool->blocks[(uint32_t)handles[done]].refs == UINT32_MAX) {
      kind = POOL_SATURATED;
    }
    if (kind) {
      break;
    }
    pool->blocks[(uint32_t)handles[done]].refs += (uint32_t)change;
  }
  if (!kind) {
    return POOL_FINE;
  }
  pool_fail(pool, error, kind, done, handles[done]);
  int64_t repeats = 1; /* of the handle at fault, in this call up to there */
  while (done-- > 0) {
    if (!is_nothing(pool, handles[done])) {
      pool->blocks[(uint32_t)handles[done]].refs -= (uint32_t)change;
      repeats += handles[done] == error->handle;
    }
  }
  if (kind == POOL_STALE && error->have == error->want && repeats > 1) { /* alive before the call */
    error->kind = POOL_OVERFREED;
    error->have = pool->blocks[(uint32_t)error->handle].refs;
    error->want = repeats;
  }
  return error->kind;
}

int pool_free(struct pool *pool, const int64_t *handles, int64_t count, struct pool_error *error) {
  pool_lock(pool);
  int kind = change_refs(pool, handles, count, -1, error);
  for (int64_t i = count - 1; i >= 0 && !kind; i--) {
    uint32_t block = (uint32_t)handles[i];
    if (is_nothing(pool, handles[i]) || pool->blocks[block].refs || pool_handle(pool, block) != handles[i]) {
      continue; /* held still, or listed already for a later place in this call */
    }
    pool->blocks[block].lives++;
    pool_settle(pool, block);
  }
  pool_unlock(pool);
  return kind;
}

int pool_fork(struct pool *pool, const int64_t *handles, int64_t count, struct pool_error *error) {
  pool_lock(pool);
  int kind = change_refs(pool, handles, count, 1, error);
  pool_unlock(pool);
  return kind;
}

int pool_ids(struct pool *pool, const int64_t *handles, int64_t count, int32_t *ids, struct pool_error *error) {
  int kind = POOL_FINE;
  pool_lock(pool);
  for (int64_t i = 0; i < count && !kind; i++) {
    kind = is_nothing(pool, handles[i]) ? POOL_FINE : pool_problem(pool, handles[i]);
    if (kind) {
      pool_fail(pool, error, kind, i, handles[i]);
    }
    ids[i] = (int32_t)handles[i];
  }
  pool_unlock(pool);
  return kind;
}

int pool_refs(struct pool *pool, int64_t handle, int64_t *refs, struct pool_error *error) {
  pool_lock(pool);
  int kind = pool_problem(pool, handle);
  if (kind) {
    pool_fail(pool, error, kind, 0, handle);
  } else {
    *refs = pool->blocks[(uint32_t)handle].refs;
  }
  pool_unlock(pool);
  return kind;
}

struct pool_counts pool_count(struct pool *pool) {
  pool_lock(pool);
  struct pool_counts now = counts(pool);
  pool_unlock(pool);
  return now;
}

/* ---- the invariants ---- */

/* A walk that finds each neighbour's way back and ends at the last one has met no block twice. */
static const char *check_list(const struct pool *pool, const struct free_list *list, uint32_t flags, int64_t *block) {
  uint32_t before = 0, at = list->first;
  int64_t met = 0;
  for (; at; met++) {
    const struct block *b = &pool->blocks[at - 1];
    *block = at - 1;
    if (*block < pool->reserved || *block >= pool->fresh) {
      return "is in a list of free blocks and was never used";
    }
    if (b->before != before) {
      return "is linked from a block it does not know";
    }
    if (b->refs) {
      return "is in a list of free blocks and has references";
    }
    if (b->flags != flags) {
      return "is in the wrong list of free blocks";
    }
    before = at;
    at = b->after;
  }
  *block = -1;
  return list->last != before ? "a list does not end where it says"
         : met != list->count ? "a list is miscounted"
                              : NULL;
}

const char *pool_check_locked(struct pool *pool, int64_t *block) {
  const char *wrong = check_list(pool, &pool->blank, 0, block);
  wrong = wrong ? wrong : check_list(pool, &pool->cached, BLOCK_CACHED, block);
  int64_t held = pool->reserved;
  for (int64_t i = pool->reserved; i < pool->fresh && !wrong; i++) {
    const struct block *b = &pool->blocks[i];
    held += b->refs || b->flags & BLOCK_PINNED;
    *block = i;
    if (b->flags & BLOCK_SEEN) {
      wrong = "is still marked by a call that is over";
    } else if (b->flags & BLOCK_PINNED && !(b->flags & BLOCK_CACHED)) {
      wrong = "is pinned without being cached";
    }
  }
  if (!wrong && held != counts(pool).used) {
    *block = -1;
    wrong = "free, cached and held blocks do not add up";
  }
  return wrong;
}

const char *pool_check(struct pool *pool, int64_t *block) {
  pool_lock(pool);
  const char *wrong = pool_check_locked(pool, block);
  pool_unlock(pool);
  return wrong;
}
