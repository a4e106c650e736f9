/* Which blocks hold what prompts begin with: a table from (the block before, tokens, extra keys) to a block.

   The hash of a block is keyed and chained, so it stands for all tokens before it too; it is a function of the key and
   the contents alone, the same in every process. With fold(a, b) = the high half of a * b xor the low half, all in
   64 bits, and A, B the fractions of the square roots of 2 and 3:
     root = fold(seed ^ A, block_size ^ B)
     h = fold((root, or the hash of the block before) ^ bytes of the extra keys, B)
     h = fold(h ^ w, B)           for each 8 bytes w of them, little-endian, padded with zeros
     h = fold(t ^ A, t' ^ h)      for each two tokens t, t' (0 behind the last odd one)
     hash = fold(h, B)
   Multiplying and folding is the mixer of Yi Wang's wyhash. A token is below 2^31, so t ^ A is never 0.

   A hash only finds candidates. A hit is an entry whose tokens and keys are equal and whose parent is the very entry
   that was met before, by a serial number that is never used again. So equal hashes cost time alone, and little of it:
   no bucket takes more than PREFIX_MOST_ALIKE entries. */
#ifndef LANEWISE_PREFIX_H
#define LANEWISE_PREFIX_H

#include "pool.h"

enum { PREFIX_MOST_ALIKE = 64, PREFIX_MOST_TOKENS = 1 << 16 }; /* in a bucket; in a block */

struct entry {
  uint64_t hash, parent_hash;
  uint64_t serial, parent; /* serial: 0 if the block is not in the table; parent: 0 for a first block */
  uint8_t *extra;
  int64_t extra_size, depth;
  uint32_t next;        /* in its bucket: block + 1 */
  uint32_t twin;        /* block + 1 whose entry has this block's contents, */
  uint32_t twin_lives;  /* while this block lives on */
  uint64_t twin_serial; /* and that one is what it was */
};

enum { EVENT_STORED, EVENT_REMOVED };

struct event {
  int64_t kind, block;
  uint64_t hash, parent_hash;
};

struct prefix {
  struct pool *pool;
  int64_t block_size;
  uint64_t root, mask; /* mask: of hashes, so that a test can make them collide */
  uint64_t serials;
  struct entry *entries; /* one a block */
  int32_t *tokens;       /* block_size a block */
  uint32_t *buckets;     /* block + 1 */
  uint64_t bucket_mask;
  int64_t count, pinned, most_pinned;
  struct event *events; /* a ring */
  int64_t event_room, event_first, event_count, events_lost;
};

/* The extra keys that enter at one block of a prompt. */
struct extra {
  int64_t block, size;
  const uint8_t *bytes;
  uint8_t *copy; /* NULL outside of a commit */
};

struct prompt {
  const int32_t *tokens;
  int64_t blocks;       /* full ones */
  struct extra *extras; /* by ascending block */
  int64_t extra_count;
};

enum { PREFIX_OPEN, PREFIX_NO_MEMORY, PREFIX_NOT_ALONE };

/* PREFIX_OPEN, or why not. A pool has one cache at most, and outlives it. */
int prefix_open(struct prefix *cache, struct pool *pool, int64_t block_size, uint64_t seed, int64_t most_pinned,
                int64_t event_room);
void prefix_close(struct prefix *cache);

/* int64 tokens, `step` bytes apart, as int32; which of them is not in 0 .. 2^31 - 1, or -1. */
int64_t prefix_narrow(const void *tokens, int64_t step, int64_t count, int32_t *to);

/* Hashes of the prompt's blocks, whether they are in the table or not. */
void prefix_hashes(const struct prefix *cache, const struct prompt *prompt, uint64_t *hashes);

/* How many of the prompt's blocks are known, and which (room for all); matched ones are held once more, as handles. */
int64_t prefix_longest(struct prefix *cache, const struct prompt *prompt, int64_t *found);
int64_t prefix_match(struct prefix *cache, const struct prompt *prompt, int64_t *found);

/* Enters the prompt's blocks, which are these, after `parent` (POOL_NO_BLOCK: at the beginning). Gives POOL_FINE or the
   kind of the error, at index -1 for the parent. What is known already is not entered again, and nothing is entered
   after a parent that is not known any more. */
int prefix_commit(struct prefix *cache, const struct prompt *prompt, const int64_t *handles, int64_t parent,
                  int64_t *entered, struct pool_error *error);

/* Takes out the entries of these blocks, whose contents are about to change. */
int prefix_forget(struct prefix *cache, const int64_t *handles, int64_t count, int64_t *forgotten,
                  struct pool_error *error);

/* Takes out all entries of free blocks; how many they were. */
int64_t prefix_clear(struct prefix *cache);

/* Keeps the known blocks of a prompt from eviction: how many of them were not pinned, none of which is if they are more
   than may be. Unpins them: how many were pinned. */
int64_t prefix_pin(struct prefix *cache, const struct prompt *prompt, int64_t *found, int *done);
int64_t prefix_unpin(struct prefix *cache, const struct prompt *prompt, int64_t *found);

/* The oldest events, and how many of them; those that found no room since the last call are counted in `lost`. */
int64_t prefix_drain(struct prefix *cache, struct event *events, int64_t most, int64_t *lost);

struct prefix_counts {
  int64_t entries, pinned;
};
struct prefix_counts prefix_count(struct prefix *cache);

/* As pool_check, of the pool and the table. */
const char *prefix_check(struct prefix *cache, int64_t *block);

#endif
