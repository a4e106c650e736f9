/* The prefix cache: a chained hash table with one entry a block, beside the pool's lists. */
#include "prefix.h"

#include <stdlib.h>
#include <string.h>

/* ---- the hash ---- */

static const uint64_t A = UINT64_C(0x6a09e667f3bcc908), B = UINT64_C(0xbb67ae8584caa73b);

static uint64_t fold(uint64_t a, uint64_t b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (uint64_t)(product >> 64) ^ (uint64_t)product;
}

static uint64_t hash_block(uint64_t before, const int32_t *tokens, int64_t count, const uint8_t *extra, int64_t size) {
  uint64_t h = fold(before ^ (uint64_t)size, B);
  for (int64_t i = 0; i < size; i += 8) {
    uint64_t word = 0;
    for (int64_t j = i; j < size && j < i + 8; j++) {
      word |= (uint64_t)extra[j] << 8 * (j - i);
    }
    h = fold(h ^ word, B);
  }
  for (int64_t i = 0; i < count; i += 2) {
    uint64_t second = i + 1 < count ? (uint64_t)tokens[i + 1] : 0;
    h = fold((uint64_t)tokens[i] ^ A, second ^ h);
  }
  return fold(h, B);
}

/* ---- a place in the table ---- */

/* A block of a prompt, and what is before it. */
struct node {
  uint64_t hash, parent_hash, parent;
  int64_t depth;
  const int32_t *tokens;
  struct extra *extra; /* NULL: none */
};

static const struct node BEFORE_ALL = {.depth = -1};

/* Moves on to block `i` of the prompt, which is that block of its sequence that follows the node. */
static void step_to(const struct prefix *c, const struct prompt *prompt, int64_t i, int64_t *extras, struct node *n) {
  n->depth++;
  n->tokens = prompt->tokens + i * c->block_size;
  while (*extras < prompt->extra_count && prompt->extras[*extras].block < n->depth) {
    ++*extras;
  }
  n->extra =
      *extras < prompt->extra_count && prompt->extras[*extras].block == n->depth ? prompt->extras + *extras : NULL;
  uint64_t before = n->depth ? n->parent_hash : c->root;
  const struct extra none = {0}, *extra = n->extra ? n->extra : &none;
  n->hash = hash_block(before, n->tokens, c->block_size, extra->bytes, extra->size) & c->mask;
}

/* What comes next has the entry of this block before it. */
static void descend(const struct prefix *c, struct node *n, uint32_t block) {
  n->parent_hash = c->entries[block].hash;
  n->parent = c->entries[block].serial;
  n->depth = c->entries[block].depth;
}

static int has_contents(const struct prefix *c, uint32_t block, const struct node *n) {
  const struct entry *e = &c->entries[block];
  int64_t size = n->extra ? n->extra->size : 0;
  return e->depth == n->depth && e->extra_size == size && (!size || !memcmp(e->extra, n->extra->bytes, (size_t)size)) &&
         !memcmp(c->tokens + block * c->block_size, n->tokens, (size_t)c->block_size * sizeof *n->tokens);
}

static uint32_t *bucket(const struct prefix *c, uint64_t hash) { return &c->buckets[hash & c->bucket_mask]; }

/* block + 1, or 0; how many entries there are in its bucket up to there. */
static uint32_t find(const struct prefix *c, const struct node *n, int *met) {
  uint32_t at = *bucket(c, n->hash);
  for (*met = 0; at; at = c->entries[at - 1].next, ++*met) {
    const struct entry *e = &c->entries[at - 1];
    if (e->hash == n->hash && e->parent == n->parent && has_contents(c, at - 1, n)) {
      break;
    }
  }
  return at;
}

/* ---- entries ---- */

static void tell(struct prefix *c, int kind, uint32_t block) {
  const struct entry *e = &c->entries[block];
  if (!c->event_room) {
    return;
  }
  if (c->event_count == c->event_room) {
    c->event_first = (c->event_first + 1) % c->event_room;
    c->event_count--;
    c->events_lost++;
  }
  int64_t at = (c->event_first + c->event_count++) % c->event_room;
  c->events[at] = (struct event){kind, block, e->hash, e->parent_hash};
}

static void enter(struct prefix *c, struct node *n, uint32_t block) {
  uint32_t *first = bucket(c, n->hash);
  struct entry *e = &c->entries[block];
  *e = (struct entry){.hash = n->hash,
                      .parent_hash = n->parent_hash,
                      .serial = ++c->serials,
                      .parent = n->parent,
                      .depth = n->depth,
                      .next = *first};
  if (n->extra) {
    e->extra = n->extra->copy;
    e->extra_size = n->extra->size;
    n->extra->copy = NULL;
  }
  memcpy(c->tokens + block * c->block_size, n->tokens, (size_t)c->block_size * sizeof *n->tokens);
  *first = block + 1;
  c->pool->blocks[block].flags |= BLOCK_CACHED;
  c->count++;
  tell(c, EVENT_STORED, block);
}

/* The caller moves the block to another list, if it is in one. */
static void take_out(struct prefix *c, uint32_t block) {
  struct entry *e = &c->entries[block];
  struct block *b = &c->pool->blocks[block];
  uint32_t *at = bucket(c, e->hash);
  while (*at != block + 1) {
    at = &c->entries[*at - 1].next;
  }
  *at = e->next;
  tell(c, EVENT_REMOVED, block);
  free(e->extra);
  *e = (struct entry){0};
  c->pinned -= (b->flags & BLOCK_PINNED) != 0;
  b->flags &= ~(uint32_t)(BLOCK_CACHED | BLOCK_PINNED);
  c->count--;
}

static void evict(void *cache, uint32_t block) { take_out(cache, block); }

/* ---- opening and closing ---- */

int prefix_open(struct prefix *c, struct pool *pool, int64_t block_size, uint64_t seed, int64_t most_pinned,
                int64_t event_room) {
  size_t total = (size_t)pool->total, buckets = 1;
  while (buckets < total) {
    buckets *= 2;
  }
  *c = (struct prefix){.pool = pool,
                       .block_size = block_size,
                       .root = fold(seed ^ A, (uint64_t)block_size ^ B),
                       .mask = UINT64_MAX,
                       .bucket_mask = buckets - 1,
                       .most_pinned = most_pinned,
                       .event_room = event_room};
  c->entries = calloc(total, sizeof *c->entries);
  c->tokens = calloc(total, (size_t)block_size * sizeof *c->tokens);
  c->buckets = calloc(buckets, sizeof *c->buckets);
  c->events = calloc((size_t)event_room + 1, sizeof *c->events); /* never none: NULL means there is no memory */
  if (!c->entries || !c->tokens || !c->buckets || !c->events) {
    prefix_close(c);
    return PREFIX_NO_MEMORY;
  }
  pool_lock(pool);
  int alone = !pool->cache;
  if (alone) {
    pool->cache = c;
    pool->evict = evict;
  }
  pool_unlock(pool);
  if (!alone) {
    prefix_close(c);
  }
  return alone ? PREFIX_OPEN : PREFIX_NOT_ALONE;
}

static void leave_pool(struct prefix *c) {
  struct pool *pool = c->pool;
  pool_lock(pool);
  for (int64_t i = 0; i < pool->fresh; i++) {
    struct block *b = &pool->blocks[i];
    if (b->flags & BLOCK_CACHED) {
      if (!b->refs && !(b->flags & BLOCK_PINNED)) {
        pool_lift(pool, (uint32_t)i);
      }
      take_out(c, (uint32_t)i);
      if (!b->refs) {
        pool_settle(pool, (uint32_t)i);
      }
    }
  }
  pool->cache = NULL;
  pool_unlock(pool);
}

void prefix_close(struct prefix *c) {
  if (c->pool && c->pool->cache == c) {
    leave_pool(c);
  }
  free(c->entries);
  free(c->tokens);
  free(c->buckets);
  free(c->events);
  *c = (struct prefix){0};
}

/* ---- looking up ---- */

int64_t prefix_narrow(const void *tokens, int64_t step, int64_t count, int32_t *to) {
  const char *from = tokens;
  uint64_t all = 0;
  if (step == sizeof(int64_t)) {
    const int64_t *adjacent = tokens;
    for (int64_t i = 0; i < count; i++) {
      all |= (uint64_t)adjacent[i];
      to[i] = (int32_t)adjacent[i];
    }
  } else {
    for (int64_t i = 0; i < count; i++) {
      int64_t token = *(const int64_t *)(from + i * step);
      all |= (uint64_t)token;
      to[i] = (int32_t)token;
    }
  }
  for (int64_t i = 0; i < count && all > INT32_MAX; i++) {
    if (*(const uint64_t *)(from + i * step) > INT32_MAX) {
      return i;
    }
  }
  return -1;
}

void prefix_hashes(const struct prefix *c, const struct prompt *prompt, uint64_t *hashes) {
  struct node n = BEFORE_ALL;
  int64_t extras = 0;
  for (int64_t i = 0; i < prompt->blocks; i++) {
    step_to(c, prompt, i, &extras, &n);
    hashes[i] = n.parent_hash = n.hash;
  }
}

/* The blocks whose entries a prompt meets until the first that is not there. */
static int64_t walk(const struct prefix *c, const struct prompt *prompt, int64_t *found) {
  struct node n = BEFORE_ALL;
  int64_t extras = 0, i = 0;
  int met;
  for (; i < prompt->blocks; i++) {
    step_to(c, prompt, i, &extras, &n);
    uint32_t at = find(c, &n, &met);
    if (!at) {
      break;
    }
    found[i] = at - 1;
    descend(c, &n, at - 1);
  }
  return i;
}

int64_t prefix_longest(struct prefix *c, const struct prompt *prompt, int64_t *found) {
  pool_lock(c->pool);
  int64_t count = walk(c, prompt, found);
  pool_unlock(c->pool);
  return count;
}

int64_t prefix_match(struct prefix *c, const struct prompt *prompt, int64_t *found) {
  pool_lock(c->pool);
  int64_t count = walk(c, prompt, found), i = 0;
  for (; i < count && pool_acquire(c->pool, (uint32_t)found[i]); i++) {
    found[i] = pool_handle(c->pool, (uint32_t)found[i]);
  }
  pool_unlock(c->pool);
  return i;
}

/* ---- committing ---- */

/* The block whose entry has what this one holds, + 1, or 0. */
static uint32_t known_as(const struct prefix *c, uint32_t block) {
  const struct entry *e = &c->entries[block];
  if (e->serial) {
    return block + 1;
  }
  int same =
      e->twin && e->twin_lives == c->pool->blocks[block].lives && c->entries[e->twin - 1].serial == e->twin_serial;
  return same ? e->twin : 0;
}

static int mark(struct prefix *c, int64_t handle, int64_t index, struct pool_error *error) {
  int kind = pool_problem(c->pool, handle);
  struct block *b = kind ? NULL : &c->pool->blocks[(uint32_t)handle];
  kind = b && b->flags & BLOCK_SEEN ? POOL_REPEATED : kind;
  if (kind) {
    return pool_fail(c->pool, error, kind, index, handle);
  }
  b->flags |= BLOCK_SEEN;
  return POOL_FINE;
}

/* Whether all are held, and no two the same. */
static int check_handles(struct prefix *c, const int64_t *handles, int64_t count, struct pool_error *error) {
  int64_t marked = 0;
  int kind = POOL_FINE;
  while (marked < count && !kind) {
    kind = mark(c, handles[marked], marked, error);
    marked += !kind;
  }
  while (marked-- > 0) {
    c->pool->blocks[(uint32_t)handles[marked]].flags &= ~(uint32_t)BLOCK_SEEN;
  }
  return kind;
}

/* Whether those that are in the table have the contents that are committed now. */
static int check_contents(const struct prefix *c, const struct prompt *prompt, const int64_t *handles, struct node n,
                          struct pool_error *error) {
  int64_t extras = 0;
  for (int64_t i = 0; i < prompt->blocks; i++) {
    uint32_t block = (uint32_t)handles[i];
    step_to(c, prompt, i, &extras, &n);
    if (c->entries[block].serial && !has_contents(c, block, &n)) {
      return pool_fail(c->pool, error, POOL_CONTENTS, i, handles[i]);
    }
  }
  return POOL_FINE;
}

static int copy_extras(const struct prompt *prompt) {
  for (int64_t i = 0; i < prompt->extra_count; i++) {
    struct extra *extra = &prompt->extras[i];
    extra->copy = malloc((size_t)extra->size);
    if (!extra->copy) {
      return POOL_NO_MEMORY;
    }
    memcpy(extra->copy, extra->bytes, (size_t)extra->size);
  }
  return POOL_FINE;
}

static void drop_copies(const struct prompt *prompt) {
  for (int64_t i = 0; i < prompt->extra_count; i++) {
    free(prompt->extras[i].copy);
    prompt->extras[i].copy = NULL;
  }
}

/* The block stays out of the table: another with its contents is there. */
static void make_twin(struct prefix *c, uint32_t block, uint32_t other) {
  struct entry *e = &c->entries[block];
  e->twin = other + 1;
  e->twin_lives = c->pool->blocks[block].lives;
  e->twin_serial = c->entries[other].serial;
}

static int64_t commit_checked(struct prefix *c, const struct prompt *prompt, const int64_t *handles, struct node n) {
  int64_t extras = 0, entered = 0;
  int met;
  for (int64_t i = 0; i < prompt->blocks; i++) {
    uint32_t block = (uint32_t)handles[i];
    step_to(c, prompt, i, &extras, &n);
    uint32_t at = find(c, &n, &met);
    if (at != block + 1 && c->entries[block].serial) {
      take_out(c, block); /* what was before it is gone, and it could not be found */
    }
    if (at && at != block + 1) {
      make_twin(c, block, at - 1);
    } else if (!at && met >= PREFIX_MOST_ALIKE) {
      break;
    } else if (!at) {
      enter(c, &n, block);
      entered++;
    }
    descend(c, &n, at ? at - 1 : block);
  }
  return entered;
}

int prefix_commit(struct prefix *c, const struct prompt *prompt, const int64_t *handles, int64_t parent,
                  int64_t *entered, struct pool_error *error) {
  struct node n = BEFORE_ALL;
  uint32_t before = 0;
  int kind = POOL_FINE;
  *entered = 0;
  pool_lock(c->pool);
  if (parent != POOL_NO_BLOCK) {
    kind = pool_problem(c->pool, parent);
    before = kind ? 0 : known_as(c, (uint32_t)parent);
    if (kind) {
      pool_fail(c->pool, error, kind, -1, parent);
    } else if (before) {
      descend(c, &n, before - 1);
    }
  }
  int reachable = parent == POOL_NO_BLOCK || before;
  kind = kind ? kind : check_handles(c, handles, prompt->blocks, error);
  kind = kind || !reachable ? kind : check_contents(c, prompt, handles, n, error);
  if (!kind && reachable) {
    kind = error->kind = copy_extras(prompt);
    *entered = kind ? 0 : commit_checked(c, prompt, handles, n);
    drop_copies(prompt);
  }
  pool_unlock(c->pool);
  return kind;
}

int prefix_forget(struct prefix *c, const int64_t *handles, int64_t count, int64_t *forgotten,
                  struct pool_error *error) {
  int kind = POOL_FINE;
  *forgotten = 0;
  pool_lock(c->pool);
  for (int64_t i = 0; i < count && !kind; i++) {
    kind = pool_problem(c->pool, handles[i]);
    if (kind) {
      pool_fail(c->pool, error, kind, i, handles[i]);
    }
  }
  for (int64_t i = 0; i < count && !kind; i++) {
    uint32_t block = (uint32_t)handles[i];
    if (c->entries[block].serial) {
      take_out(c, block);
      ++*forgotten;
    }
    c->entries[block].twin = 0;
  }
  pool_unlock(c->pool);
  return kind;
}

int64_t prefix_clear(struct prefix *c) {
  pool_lock(c->pool);
  int64_t cleared = c->pool->cached.count;
  for (int64_t i = 0; i < cleared; i++) {
    uint32_t block = c->pool->cached.first - 1;
    pool_lift(c->pool, block);
    take_out(c, block);
    pool_settle(c->pool, block);
  }
  pool_unlock(c->pool);
  return cleared;
}

/* ---- pinning ---- */

int64_t prefix_pin(struct prefix *c, const struct prompt *prompt, int64_t *found, int *done) {
  struct block *blocks = c->pool->blocks;
  int64_t more = 0;
  pool_lock(c->pool);
  int64_t count = walk(c, prompt, found);
  for (int64_t i = 0; i < count; i++) {
    more += !(blocks[found[i]].flags & BLOCK_PINNED);
  }
  *done = c->pinned + more <= c->most_pinned;
  for (int64_t i = 0; i < count && *done; i++) {
    struct block *b = &blocks[found[i]];
    if (!(b->flags & BLOCK_PINNED) && !b->refs) {
      pool_lift(c->pool, (uint32_t)found[i]);
    }
    b->flags |= BLOCK_PINNED;
  }
  c->pinned += *done ? more : 0;
  pool_unlock(c->pool);
  return more;
}

int64_t prefix_unpin(struct prefix *c, const struct prompt *prompt, int64_t *found) {
  int64_t less = 0;
  pool_lock(c->pool);
  for (int64_t i = walk(c, prompt, found) - 1; i >= 0; i--) { /* tails first, as when they are freed */
    struct block *b = &c->pool->blocks[found[i]];
    if (b->flags & BLOCK_PINNED) {
      b->flags &= ~(uint32_t)BLOCK_PINNED;
      less++;
      if (!b->refs) {
        pool_settle(c->pool, (uint32_t)found[i]);
      }
    }
  }
  c->pinned -= less;
  pool_unlock(c->pool);
  return less;
}

/* ---- what there is to see ---- */

int64_t prefix_drain(struct prefix *c, struct event *events, int64_t most, int64_t *lost) {
  int64_t count = 0;
  pool_lock(c->pool);
  *lost = c->events_lost;
  c->events_lost = 0;
  for (; count < most && c->event_count; count++) {
    events[count] = c->events[c->event_first];
    c->event_first = (c->event_first + 1) % c->event_room;
    c->event_count--;
  }
  pool_unlock(c->pool);
  return count;
}

struct prefix_counts prefix_count(struct prefix *c) {
  pool_lock(c->pool);
  struct prefix_counts now = {c->count, c->pinned};
  pool_unlock(c->pool);
  return now;
}

static const char *check_entry(const struct prefix *c, uint32_t block) {
  const struct entry *e = &c->entries[block];
  const int32_t *tokens = c->tokens + block * c->block_size;
  uint64_t before = e->depth ? e->parent_hash : c->root;
  if ((hash_block(before, tokens, c->block_size, e->extra, e->extra_size) & c->mask) != e->hash) {
    return "has another hash than its contents";
  }
  if (!e->parent != !e->depth || e->parent >= e->serial || e->serial > c->serials) {
    return "has an impossible parent";
  }
  uint32_t at = *bucket(c, e->hash);
  int met = 0;
  for (; at && at != block + 1 && met < PREFIX_MOST_ALIKE; met++) {
    at = c->entries[at - 1].next;
  }
  return at == block + 1 && met < PREFIX_MOST_ALIKE ? NULL : "cannot be found by its hash";
}

static const char *check_table(const struct prefix *c, int64_t *block) {
  int64_t entries = 0, pinned = 0, linked = 0;
  for (int64_t i = 0; i < c->pool->total; i++) {
    const struct entry *e = &c->entries[i];
    uint32_t flags = i < c->pool->fresh ? c->pool->blocks[i].flags : 0;
    *block = i;
    if (!e->serial != !(flags & BLOCK_CACHED)) {
      return "is cached for the pool or for the prefix cache, but not for both";
    }
    const char *wrong = e->serial ? check_entry(c, (uint32_t)i) : NULL;
    if (wrong) {
      return wrong;
    }
    entries += e->serial != 0;
    pinned += (flags & BLOCK_PINNED) != 0;
  }
  *block = -1;
  for (uint64_t k = 0; k <= c->bucket_mask; k++) { /* each entry found itself above: a cycle leaves none over */
    for (uint32_t at = c->buckets[k]; at && linked <= entries; at = c->entries[at - 1].next) {
      linked++;
    }
  }
  if (entries != c->count || linked != entries || pinned != c->pinned || pinned > c->most_pinned) {
    return "entries do not add up";
  }
  return NULL;
}

const char *prefix_check(struct prefix *c, int64_t *block) {
  pool_lock(c->pool);
  const char *wrong = pool_check_locked(c->pool, block);
  wrong = wrong ? wrong : check_table(c, block);
  pool_unlock(c->pool);
  return wrong;
}
