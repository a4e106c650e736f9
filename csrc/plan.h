/* An order for moves of blocks that are to count as made at once: whoever reads a block goes before who overwrites it,
   and a cycle goes through one spare block. Parallel moves: May 1989, "The parallel assignment problem redefined".

   A target is written once, so of every move at most one other has to wait: the moves form trees and cycles. */
#ifndef LANEWISE_PLAN_H
#define LANEWISE_PLAN_H

#include <stdint.h>
#include <string.h>

/* Which move writes a target: open addressing, at most half full; a slot has the move's number + 1, or 0. */
struct targets {
  const int64_t *ids;
  int64_t *slots;
  int64_t mask;
};

struct plan {
  int64_t *src, *dst; /* in order; -1 is the spare block */
  int64_t rows;
  int spare;
};

static inline int64_t target_slots(int64_t rows) {
  int64_t slots = 16;
  while (slots < 2 * rows) {
    slots *= 2;
  }
  return slots;
}

static inline int64_t *slot_of(const struct targets *t, int64_t id) {
  uint64_t at = ((uint64_t)id * 0x9E3779B97F4A7C15u) >> 20; /* Fibonacci hashing: Knuth, volume 3, 6.4 */
  int64_t *slot = t->slots + (at & (uint64_t)t->mask);
  while (*slot && t->ids[*slot - 1] != id) {
    slot = t->slots + (++at & (uint64_t)t->mask);
  }
  return slot;
}

/* The move that writes `id`, or -1. */
static inline int64_t writer_of(const struct targets *t, int64_t id) { return *slot_of(t, id) - 1; }

/* Enters all targets; the first move whose target is an earlier one's too, or -1. */
static inline int64_t enter_targets(struct targets *t, const int64_t *ids, int64_t rows, int64_t *slots) {
  *t = (struct targets){ids, slots, target_slots(rows) - 1};
  memset(slots, 0, (size_t)(t->mask + 1) * sizeof *slots);
  for (int64_t i = 0; i < rows; i++) {
    int64_t *slot = slot_of(t, ids[i]);
    if (*slot) {
      return i;
    }
    *slot = i + 1;
  }
  return -1;
}

/* Whether ids below FEW_BLOCKS are all different: what small calls ask, faster than a table tells. */
enum { FEW_BLOCKS = 8192 };
static inline int all_differ(const int64_t *ids, int64_t rows, int64_t blocks) {
  uint64_t seen[FEW_BLOCKS / 64], twice = 0;
  memset(seen, 0, (size_t)(blocks + 63) / 64 * sizeof *seen);
  for (int64_t i = 0; i < rows; i++) {
    uint64_t id = (uint64_t)ids[i], *word = seen + id / 64, bit = (uint64_t)1 << id % 64;
    twice |= *word & bit;
    *word |= bit;
  }
  return !twice;
}

static inline void emit_move(struct plan *p, int64_t src, int64_t dst) {
  p->src[p->rows] = src;
  p->dst[p->rows++] = dst;
}

/* int64 that order_moves needs room for */
static inline int64_t plan_room(int64_t rows) { return 5 * rows + 2; }

/* Block src of the source is block src - shift of the target. 0 if the moves may be made as they are, in any order. */
static inline int order_moves(const struct targets *t, const int64_t *src, int64_t rows, int64_t shift, int64_t *room,
                              struct plan *p) {
  const int64_t *dst = t->ids;
  int64_t *next = room, *waits_for = room + rows; /* who waits for a move; for how many a move waits, -1 once made */
  int is_ordered = 0;
  *p = (struct plan){room + 2 * rows, room + 2 * rows + rows * 3 / 2 + 1, 0, 0};
  for (int64_t i = 0; i < rows; i++) {
    waits_for[i] = src[i] - shift == dst[i] ? -1 : 0;
  }
  for (int64_t i = 0; i < rows; i++) {
    int64_t writer = waits_for[i] < 0 ? -1 : writer_of(t, src[i] - shift);
    next[i] = writer >= 0 && waits_for[writer] >= 0 ? writer : -1;
    if (next[i] >= 0) {
      waits_for[next[i]]++;
    }
    is_ordered |= waits_for[i] < 0 || next[i] >= 0;
  }
  if (!is_ordered) {
    return 0;
  }
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t move = i; move >= 0 && waits_for[move] == 0;) {
      emit_move(p, src[move], dst[move]);
      waits_for[move] = -1;
      move = next[move];
      if (move >= 0) {
        waits_for[move]--;
      }
    }
  }
  for (int64_t i = 0; i < rows; i++) { /* what is left are cycles */
    if (waits_for[i] < 0) {
      continue;
    }
    emit_move(p, dst[i] + shift, -1);
    p->spare = 1;
    for (int64_t move = i; waits_for[move] >= 0; move = next[move]) {
      waits_for[move] = -1;
      emit_move(p, next[move] == i ? -1 : src[move], dst[move]);
    }
  }
  return 1;
}

#endif
