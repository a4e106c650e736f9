/* A row as it is judged, without writing it out: the user's own memory, a list of the ids whose logits are edited, and
   the mask. Blocks of 64 are put together when they are looked at; the largest of each block is known beforehand. */

/* `bytes` of scratch, the rest behind them. */
INLINE char *take(char **scratch, size_t bytes) {
  char *taken = *scratch;
  *scratch += (bytes + 63) / 64 * 64;
  return taken;
}

struct judged {
  const void *x;
  size_t n, blocks;
  int64_t dtype;
  struct mask mask;
  const uint64_t *is_edited; /* a bit an id, a word a block; NULL if none is */
  const uint32_t *slot;      /* of an id that is, where in `edited` */
  const float *edited;
  float *maxima; /* of the blocks, padded with NaN to whole vectors */
  float max;
  int64_t likely; /* where a draw begins to look, below 0 if nowhere: what it finds is the same */
};

/* ---- maxima ---- */

/* The largest that is allowed of a block, in each of sixteen lanes; NaNs noticed among what is allowed. */
INLINE vf masked_max(vf v[4], uint64_t allowed, vn *nan) {
  v_fill64(v, allowed, -INFINITY);
  *nan = see_four(*nan, v);
  return max_of_four(v);
}

/* Where ROWS blocks in a row have no allowed id they are not read: that is the grammar's usual case. */
INLINE void masked_maxima(float *maxima, const void *x, size_t n, int dtype, const struct mask *mask, int *has_nan) {
  size_t blocks = (n + BLOCK - 1) / BLOCK, b = 0;
  vn nan = n_none();
  for (; (b + ROWS) * BLOCK <= n; b += ROWS) {
    uint64_t allowed[ROWS];
    if (!allowed_of_blocks(allowed, mask, b * BLOCK, ROWS)) {
      for (size_t i = 0; i < ROWS; i++) {
        maxima[b + i] = -INFINITY;
      }
      continue;
    }
    vf row[ROWS];
#pragma GCC unroll 16 /* as in maxima_of */
    for (size_t i = 0; i < ROWS; i++) {
      vf v[4];
      load_once(v, x, (b + i) * BLOCK, dtype);
      row[i] = masked_max(v, allowed[i], &nan);
    }
    v_max_rows(maxima + b, row);
  }
  for (; b < blocks; b++) {
    vf v[4];
    row_load64(v, x, b * BLOCK, n, dtype, -INFINITY);
    maxima[b] = v_max_across(masked_max(v, allowed64(mask, b * BLOCK), &nan));
  }
  for (; b % LANES; b++) {
    maxima[b] = NAN;
  }
  *has_nan |= n_any(nan);
}

struct maxima_args {
  struct judged *row;
  int64_t dtype;
  int *has_nan;
};
INLINE void find_maxima_as(const struct maxima_args *a, void *scratch, int dtype) {
  (void)scratch;
  const struct judged *j = a->row;
  if (j->mask.kind == MASK_NONE) {
    block_maxima(j->maxima, j->x, j->n, dtype, a->has_nan);
  } else {
    masked_maxima(j->maxima, j->x, j->n, dtype, &j->mask, a->has_nan);
  }
}

/* ---- blocks ---- */

INLINE float logit(const struct judged *j, size_t id) { return row_at(j->x, id, (int)j->dtype); }

INLINE float judged_logit(const struct judged *j, size_t id) {
  int edited = j->is_edited && j->is_edited[id / BLOCK] >> id % BLOCK & 1;
  return edited ? j->edited[j->slot[id]] : logit(j, id);
}

static const float *put_together(const struct judged *j, size_t block, float room[BLOCK]) {
  size_t first = block * BLOCK;
  uint64_t allowed = allowed64(&j->mask, first), edited = j->is_edited ? j->is_edited[block] : 0;
  vf v[4];
  row_load64(v, j->x, first, j->n, (int)j->dtype, -INFINITY);
  v_fill64(v, allowed, -INFINITY);
  for (size_t i = 0; i < 4; i++) {
    v_store(room + LANES * i, v[i]);
  }
  for (uint64_t left = edited & allowed; left; left &= left - 1) {
    size_t i = (size_t)__builtin_ctzll(left);
    room[i] = j->edited[j->slot[first + i]];
  }
  return room;
}

/* A block's logits as they are judged where they lie, NULL if they do not lie anywhere. */
INLINE const float *block_in_place(const struct judged *j, size_t block) {
  int is_there = j->dtype == DTYPE_F32 && j->mask.kind == MASK_NONE && (block + 1) * BLOCK <= j->n &&
                 !(j->is_edited && j->is_edited[block]);
  return is_there ? (const float *)j->x + block * BLOCK : NULL;
}

/* The 64 logits of a block as they are judged, -inf beyond the row. */
INLINE const float *block_of(const struct judged *j, size_t block, float room[BLOCK]) {
  const float *there = block_in_place(j, block);
  return there ? there : put_together(j, block, room);
}

/* The row may be larger than the cache that its last reader filled: asks for a block some time before it is needed. */
INLINE void expect_block(const struct judged *j, size_t block) {
  size_t size = dtype_size(j->dtype);
  const char *start = (const char *)j->x + block * BLOCK * size;
  for (size_t line = 0; line < BLOCK * size; line += 64) {
    __builtin_prefetch(start + line);
  }
}

static float max_of_block(const struct judged *j, size_t block) {
  float room[BLOCK];
  const float *z = block_of(j, block, room);
  const vf v[4] = {v_load(z), v_load(z + LANES), v_load(z + 2 * LANES), v_load(z + 3 * LANES)};
  return max_across64(v);
}

/* ---- edits ---- */

/* In the order in which ids are first seen. */
struct edits {
  uint64_t *is_edited;
  uint32_t *slot;
  uint32_t *id, *counts; /* counts as penalise has them */
  float *before, *value;
  size_t count;
};

INLINE size_t slot_of(struct edits *e, size_t id) {
  uint64_t *word = &e->is_edited[id / BLOCK], bit = (uint64_t)1 << id % BLOCK;
  if (*word & bit) {
    return e->slot[id];
  }
  *word |= bit;
  e->slot[id] = (uint32_t)e->count;
  e->id[e->count] = (uint32_t)id;
  e->counts[e->count] = 0;
  return e->count++;
}

enum { AHEAD = 32 }; /* ids, about as long as memory takes */
INLINE void expect_id(const struct edits *e, const struct judged *j, int64_t id) {
  __builtin_prefetch((const char *)j->x + (size_t)id * dtype_size(j->dtype));
  __builtin_prefetch(e->slot + id, 1);
}

/* e is a copy, or every store would make the compiler read it again. */
static struct edits collect_edits(struct edits e, const struct judged *j, const struct sample_args *a, int64_t row) {
  struct ids biased = ids_of(&a->bias_ids, &a->bias_offsets, row);
  struct ids lists[2] = {ids_of(&a->output_ids, &a->output_offsets, row),
                         ids_of(&a->prompt_ids, &a->prompt_offsets, row)};
  const float *bias = bias_values(a, biased);
  for (size_t i = 0; i < biased.count; i++) {
    slot_of(&e, (size_t)biased.id[i]);
  }
  for (uint32_t l = 0; l < 2; l++) {
    for (size_t i = 0; i < lists[l].count; i++) {
      expect_id(&e, j, lists[l].id[min_size(i + AHEAD, lists[l].count - 1)]);
      uint32_t *count = &e.counts[slot_of(&e, (size_t)lists[l].id[i])];
      *count = (*count | SEEN) + (l == 0);
    }
  }
  for (size_t i = 0; i < e.count; i++) {
    e.before[i] = e.value[i] = logit(j, e.id[i]);
  }
  for (size_t i = 0; i < biased.count; i++) {
    e.value[e.slot[biased.id[i]]] += bias[i];
  }
  return e;
}

/* A value below a maximum leaves it alone unless it was the maximum: only then is a block read again. */
static void raise_or_lower_maxima(struct edits e, const struct judged *j, int *has_nan) {
  float *maxima = j->maxima;
  for (size_t i = 0; i < e.count; i++) {
    size_t id = e.id[i], block = id / BLOCK;
    float value = e.value[i], max = maxima[block];
    if ((value < max && e.before[i] != max) || !(allowed64(&j->mask, block * BLOCK) >> id % BLOCK & 1)) {
      continue;
    }
    *has_nan |= value != value;
    maxima[block] = value >= max ? value : max_of_block(j, block);
  }
}

static struct edits edits_in(const struct judged *j, char **scratch) {
  struct edits e = {.is_edited = (uint64_t *)take(scratch, j->blocks * sizeof *e.is_edited)};
  e.slot = (uint32_t *)take(scratch, j->n * sizeof *e.slot);
  e.id = (uint32_t *)take(scratch, j->n * sizeof *e.id);
  e.counts = (uint32_t *)take(scratch, j->n * sizeof *e.counts);
  e.before = (float *)take(scratch, j->n * sizeof *e.before);
  e.value = (float *)take(scratch, j->n * sizeof *e.value);
  memset(e.is_edited, 0, j->blocks * sizeof *e.is_edited);
  return e;
}

/* Bias and penalties. */
static struct edits usual_edits(const struct judged *j, const struct sample_args *a, int64_t row, char **scratch) {
  struct edits e = collect_edits(edits_in(j, scratch), j, a, row);
  const struct sample_params *p = (const struct sample_params *)a->params.ptr + row;
  for (size_t i = 0; i < e.count; i++) {
    float after = penalised(e.value[i], e.counts[i] & ~SEEN, p);
    e.value[i] = e.counts[i] ? after : e.value[i];
  }
  return e;
}

static void put_edits(struct judged *j, struct edits e, int *has_nan) {
  j->is_edited = e.is_edited;
  j->slot = e.slot;
  j->edited = e.value;
  raise_or_lower_maxima(e, j, has_nan);
}

/* ---- a row, ready ---- */

static struct judged plain_row(const void *x, size_t n, int64_t dtype, float *maxima) {
  return (struct judged){
      .x = x, .n = n, .blocks = (n + BLOCK - 1) / BLOCK, .dtype = dtype, .maxima = maxima, .likely = -1};
}

static void find_maxima(struct judged *j, int *has_nan) {
  const struct maxima_args args = {j, j->dtype, has_nan};
  FOR_DTYPE(find_maxima_as, &args, NULL)
}

/* Row `row` of a call, mask and dense bias seen to. */
static void begin_judging(struct judged *j, const struct sample_args *a, int64_t row, int *has_nan, char **scratch) {
  *j = plain_row(row_of(a->x.ptr, a->x_stride, row), (size_t)a->cols, a->dtype, NULL);
  j->maxima = (float *)take(scratch, (j->blocks + LANES) * sizeof *j->maxima);
  j->mask = mask_of(a, row);
  if (a->bias_dense) { /* every logit is edited */
    float *z = (float *)take(scratch, (j->n + LANES) * sizeof *z);
    write_out(z, j->x, j->n, j->dtype);
    add_bias(z, j->n, a, row);
    j->x = z;
    j->dtype = DTYPE_F32;
  }
  find_maxima(j, has_nan);
}

/* 0 if nothing can be chosen from it: a NaN or +inf among the allowed, or nothing allowed. */
static int end_judging(struct judged *j, int has_nan) {
  j->max = block_max(j->maxima, 0, j->blocks, DTYPE_F32, &has_nan);
  return !has_nan && j->max > -INFINITY && j->max < INFINITY;
}

static int judge(struct judged *j, const struct sample_args *a, int64_t row, char **scratch) {
  int has_nan = 0;
  begin_judging(j, a, row, &has_nan, scratch);
  if (a->bias_ids.ptr || a->prompt_ids.ptr || a->output_ids.ptr) {
    put_edits(j, usual_edits(j, a, row, scratch), &has_nan);
  }
  return end_judging(j, has_nan);
}
