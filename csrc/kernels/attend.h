/* Attention of queries over cached keys and values: softmax(scale q K') V, in one pass (Milakov & Gimelshein, arXiv
   1805.02867; Dao et al., FlashAttention, arXiv 2205.14135; Kwon et al., PagedAttention, arXiv 2309.06180).

   Keys are cut into chunks of ATTEND_CHUNK by their absolute position. A chunk gives each of a tile's rows (a row is a
   query with one of its heads) a state: the maximum m of its scores, the sum of exp(score - m), and the values summed
   with these weights. States are joined in the order of chunks. Every number is computed in one order, whatever rows
   share a tile, blocks hold the keys and tasks share the work: a dot product in eight lanes along head_dim, then
   across; a weighted sum key by key; what is added for a key that a row does not see is 0, so it does not matter which
   of those are met. Four rows at a time share what is loaded of a key or value, so a group's heads read it once. */

/* ---- tanh ---- */

/* Cephes' tanhf (Moshier): an odd polynomial near 0, where exp would cancel; a NaN stays one. */
INLINE vf v_tanh(vf x) {
  vf z = v_mul(x, x), p = v_set1(-5.70498872745e-3f);
  p = v_fma(p, z, v_set1(2.06390887954e-2f));
  p = v_fma(p, z, v_set1(-5.37397155531e-2f));
  p = v_fma(p, z, v_set1(1.33314422036e-1f));
  p = v_fma(p, z, v_set1(-3.33332819422e-1f));
  vf near = v_fma(v_mul(p, z), x, x);
  vf size = v_max(x, v_sub(v_set1(0.0f), x));
  vf e = v_exp(v_mul(v_min(size, v_set1(10.0f)), v_set1(2.0f))); /* from 10 on it is 1 */
  vf far = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(e, v_set1(1.0f))));
  far = v_select(v_gt(v_set1(0.0f), x), v_sub(v_set1(0.0f), far), far);
  return v_select(v_unord(x, x), x, v_select(v_gt(v_set1(0.625f), size), near, far));
}

/* ---- a tile ---- */

/* What a task works with; arrays lie in the scratch. Widths are head_dims up to whole vectors. */
struct tile {
  const struct attend_args *a;
  const struct attend_task *task;
  size_t rows, k_width, v_width;
  int64_t lo[ATTEND_ROWS], hi[ATTEND_ROWS]; /* what each row sees */
  int64_t first, end, all_from, all_to;     /* what any row sees, what all rows see */
  int k_direct, v_direct;                   /* whether the products can read keys, values as they lie */
  float *q, *q_sums;                        /* [rows][k_width] as q_eight says, and the sum of each row */
  float *scores;                            /* [rows][SCORES_ROW]; then weights */
  float *m, *sums, *values;                 /* a chunk's states: [rows], [rows], [rows][v_width] */
  float *all_m, *all_sums, *all_values;     /* those of all chunks so far */
  float *wide;                              /* SOME_KEYS keys or values made float32 */
  float *zeros;                             /* a key or value that stands where there is none */
  float *packed;                            /* two whose elements were not adjacent */
  struct keys {
    bytes rows[2 * ATTEND_CHUNK + KEYS_AHEAD]; /* of keys, then of values, then the first of what follows */
    float k_scale[ATTEND_CHUNK], k_zero[ATTEND_CHUNK], v_scale[ATTEND_CHUNK], v_zero[ATTEND_CHUNK]; /* of int8 */
    uint16_t holes[ATTEND_CHUNK / LANES]; /* a bit for each key that is in no block */
    int64_t start;                        /* position of the first */
    size_t from, to;                      /* those that any row sees, out to whole vectors */
  } *now, *next;
};

INLINE int64_t query_of(const struct tile *t, size_t row) {
  return t->task->first_query + (int64_t)row / t->task->heads;
}
INLINE int64_t head_of(const struct tile *t, size_t row) { return t->task->first_head + (int64_t)row % t->task->heads; }
INLINE size_t whole_vectors(int64_t dim) { return ((size_t)dim + LANES - 1) / LANES * LANES; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE float *carve(char **scratch, size_t floats) { return (float *)take(scratch, floats * sizeof(float)); }

/* Whether the products read keys or values as they lie: for more rows of q than FOUR, of float32 than `f32_rows`, they
   are made ready once. */
INLINE int is_direct(const struct side *s, size_t rows, size_t f32_rows) {
  return s->chunk == s->dim && s->dim % LANES == 0 && rows <= (s->dtype == DTYPE_F32 ? f32_rows : FOUR);
}

static void set_out(struct tile *t, const struct attend_args *a, const struct attend_task *task, char *scratch) {
  const struct attend_query *queries = (const struct attend_query *)a->queries.ptr + task->first_query;
  t->a = a;
  t->task = task;
  t->rows = (size_t)(task->queries * task->heads);
  t->k_width = whole_vectors(a->key.dim);
  t->v_width = whole_vectors(a->value.dim);
  t->k_direct = is_direct(&a->key, t->rows, 8 * FOUR); /* beyond, pairs pay */
  t->v_direct = is_direct(&a->value, t->rows, ATTEND_ROWS);
  size_t rows = t->rows, wider = t->k_width > t->v_width ? t->k_width : t->v_width;
  t->q = carve(&scratch, rows * t->k_width);
  t->q_sums = carve(&scratch, rows);
  t->scores = carve(&scratch, rows * SCORES_ROW);
  t->m = carve(&scratch, rows);
  t->sums = carve(&scratch, rows);
  t->values = carve(&scratch, rows * t->v_width);
  t->all_m = carve(&scratch, rows);
  t->all_sums = carve(&scratch, rows);
  t->all_values = carve(&scratch, rows * t->v_width);
  t->wide = carve(&scratch, SOME_KEYS * wider);
  t->zeros = carve(&scratch, wider);
  t->packed = carve(&scratch, 2 * wider);
  t->now = (struct keys *)carve(&scratch, sizeof(struct keys) / sizeof(float));
  t->next = (struct keys *)carve(&scratch, sizeof(struct keys) / sizeof(float));
  fill(t->zeros, wider, 0.0f);
  fill(t->all_m, rows, -INFINITY);
  fill(t->all_sums, rows, 0.0f);
  fill(t->all_values, rows * t->v_width, 0.0f);
  t->first = t->all_from = queries->lo;
  t->end = t->all_to = queries->hi;
  for (int64_t i = 1; i < task->queries; i++) {
    t->first = least(t->first, queries[i].lo);
    t->end = most(t->end, queries[i].hi);
    t->all_from = most(t->all_from, queries[i].lo);
    t->all_to = least(t->all_to, queries[i].hi);
  }
  for (size_t r = 0; r < rows; r++) {
    const struct attend_query *query = queries + (int64_t)r / task->heads;
    t->lo[r] = query->lo;
    t->hi[r] = query->hi;
    const float *q = (const float *)a->q.ptr + (query_of(t, r) * a->heads + head_of(t, r)) * a->key.dim;
    vf sum = v_set1(0.0f);
    for (size_t d = 0; d < t->k_width; d += LANES) {
      float x[LANES];
      vf lanes = lanes_load(q, d, min_size((size_t)a->key.dim - d, LANES), DTYPE_F32, 1.0f, 0.0f, 0.0f);
      sum = v_add(sum, lanes);
      v_store(x, lanes);
      as_met(x, (int)a->key.dtype);
      memcpy(q_eight(t->q, t->k_width, rows, r, d), x, HALF * sizeof *x);
      memcpy(q_eight(t->q, t->k_width, rows, r, d + HALF), x + HALF, HALF * sizeof *x);
    }
    t->q_sums[r] = v_sum_across(sum);
  }
}

/* ---- where a chunk's keys and values are ---- */

INLINE bytes *k_row(struct keys *keys, size_t key) { return keys->rows + (key - keys->from); }
INLINE bytes *v_row(struct keys *keys, size_t key) { return k_row(keys, key) + (keys->to - keys->from); }

/* That the keys [from, to) of the chunk are nowhere. */
INLINE void no_keys(const struct tile *t, struct keys *keys, size_t from, size_t to) {
  for (size_t i = from; i < to; i++) {
    *k_row(keys, i) = *v_row(keys, i) = (bytes)t->zeros;
    keys->k_scale[i] = keys->k_zero[i] = keys->v_scale[i] = keys->v_zero[i] = 0.0f;
  }
}

/* Of `n` tokens, the scale and the zero, `step` floats from one token's to the next's. */
INLINE void take_scales(float *restrict scale, float *restrict zero, const float *restrict pairs, int64_t step,
                        int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    scale[i] = pairs[step * i];
    zero[i] = pairs[step * i + 1];
  }
}

/* Where `n` rows of a block lie, and the scale and zero of each. */
INLINE void point_at(bytes *to, float *scale, float *zero, const struct side *s, const struct span *memory,
                     const struct span *scales, int64_t block, int64_t head, int64_t token, int64_t n) {
  bytes row = (bytes)memory->ptr + row_offset(s, 0, block, head, token);
  for (int64_t i = 0; i < n; i++) {
    to[i] = row + i * s->token;
  }
  if (s->dtype == DTYPE_I8) {
    const void *pairs = (bytes)scales->ptr + scale_offset(s, 0, block, head, token);
    const int64_t step = s->scale_token / (int64_t)sizeof *scale;
    if (step == 2) { /* adjacent: the compiler makes vectors of it */
      take_scales(scale, zero, pairs, 2, n);
    } else {
      take_scales(scale, zero, pairs, step, n);
    }
  }
}

static void find_keys(const struct tile *t, struct keys *keys, int64_t chunk) {
  const struct attend_args *a = t->a;
  const struct side *k = &a->key, *v = &a->value;
  const int64_t *blocks = (const int64_t *)a->table.ptr + t->task->table_row * a->table_stride;
  int64_t head = t->task->kv_head, start = chunk * ATTEND_CHUNK;
  int64_t first = most(t->first - start, 0), end = least(t->end - start, ATTEND_CHUNK);
  keys->start = start;
  keys->from = keys->to = 0;
  if (first >= end) {
    return;
  }
  keys->from = (size_t)first / LANES * LANES;
  keys->to = whole_vectors(end);
  memset(keys->holes, 0, sizeof keys->holes);
  no_keys(t, keys, keys->from, (size_t)first);
  no_keys(t, keys, (size_t)end, keys->to);
  for (int64_t i = first; i < end;) {
    int64_t ordinal = (start + i) / a->block_size, token = start + i - ordinal * a->block_size, block = blocks[ordinal];
    int64_t n = least(end - i, a->block_size - token);
    if (block >= 0) {
      bytes *to = k_row(keys, (size_t)i), *v_to = v_row(keys, (size_t)i);
      point_at(to, keys->k_scale + i, keys->k_zero + i, k, &a->k, &a->k_scales, block, head, token, n);
      point_at(v_to, keys->v_scale + i, keys->v_zero + i, v, &a->v, &a->v_scales, block, head, token, n);
    } else {
      no_keys(t, keys, (size_t)i, (size_t)(i + n));
      for (int64_t j = i; j < i + n; j++) {
        keys->holes[j / LANES] |= (uint16_t)(1u << j % LANES);
      }
    }
    i += n;
  }
}

/* What is to be asked for behind the last of `keys`: the first rows of those that follow, if any do. */
static void find_ahead(const struct tile *t, struct keys *keys, const struct keys *following) {
  bytes *ahead = keys->rows + 2 * (keys->to - keys->from);
  const size_t there = min_size(2 * (following->to - following->from), KEYS_AHEAD);
  memcpy(ahead, following->rows, there * sizeof *ahead);
  for (size_t i = there; i < KEYS_AHEAD; i++) {
    ahead[i] = (bytes)t->zeros;
  }
}

/* A row with its elements adjacent: where it lies, or in `packed`. */
INLINE bytes adjacent(const struct tile *t, const struct side *s, bytes row, float *packed) {
  return row == (bytes)t->zeros ? row : packed_row(s, row, packed);
}

INLINE float *store_pairs(float *to, bytes a, bytes b, size_t d, int dtype) {
  vf k[2];
  load_pairs(k, a, b, d, dtype);
  v_store(to, k[0]);
  v_store(to + LANES, k[1]);
  return to + 2 * LANES;
}

/* SOME_KEYS keys as float32, pair by pair: into t->wide. */
static void pair_keys(const struct tile *t, const bytes *rows, int asks) {
  const struct side *s = &t->a->key;
  const size_t dim = (size_t)s->dim, whole = dim / LANES * LANES, size = (size_t)size_of_element(s->dtype);
  float *to = t->wide;
  for (size_t p = 0; p < PAIRS; p++) {
    const bytes *pair = rows + pair_starts(p);
    bytes front = adjacent(t, s, pair[0], t->packed), back = adjacent(t, s, pair[4], t->packed + t->k_width);
    for (size_t d = 0; d < whole; d += LANES) {
      if (asks && d * size % 64 == 0) {
        ask_row(pair, d * size);
        ask_row(pair + 4, d * size);
      }
      to = store_pairs(to, front, back, d, (int)s->dtype);
    }
    if (whole < dim) {
      float rest[2][LANES] = {{0}}; /* room for any dtype */
      memcpy(rest[0], front + whole * size, (dim - whole) * size);
      memcpy(rest[1], back + whole * size, (dim - whole) * size);
      to = store_pairs(to, (bytes)rest[0], (bytes)rest[1], 0, (int)s->dtype);
    }
  }
}

/* Values as whole vectors of float32: into t->wide. */
static void widen_values(const struct tile *t, const struct run *run) {
  const struct side *s = &t->a->value;
  const size_t dim = (size_t)s->dim, whole = dim / LANES * LANES, size = (size_t)size_of_element(s->dtype);
  float *wide = t->wide;
  for (size_t i = 0; i < run->keys; i++, wide += t->v_width) {
    bytes row = adjacent(t, s, run->rows[i], t->packed);
    for (size_t d = 0; d < whole; d += LANES) {
      if (d * size % 64 == 0 && run->to) {
        ask_row(run->rows + i, d * size);
      }
      v_store(wide + d, load_any(row, d, (int)s->dtype));
    }
    if (whole < dim) {
      v_store(wide + whole, lanes_load(row, whole, dim - whole, (int)s->dtype, 1.0f, 0.0f, 0.0f));
    }
  }
}

/* Rows as the products read them: as they lie, or of float32, SOME_KEYS at most, with `widened` to point at them. */
static struct run ready_keys(const struct tile *t, const bytes *rows, size_t keys, bytes *widened) {
  if (t->k_direct) {
    return (struct run){rows, rows, keys, 0, SOME_KEYS};
  }
  const int as_wide = t->a->key.dtype == DTYPE_F32; /* or the products do not know the lines of what is to come */
  pair_keys(t, rows, !as_wide);
  for (size_t p = 0; p < PAIRS; p++) {
    widened[pair_starts(p)] = widened[pair_starts(p) + 4] = (bytes)(t->wide + 2 * p * t->k_width);
  }
  return (struct run){widened, rows, keys, 0, as_wide ? SOME_KEYS : 0};
}
static struct run ready_values(const struct tile *t, const bytes *rows, bytes *widened) {
  const struct run run = {rows, rows, SOME_KEYS, 0, SOME_KEYS};
  if (t->v_direct) {
    return run;
  }
  widen_values(t, &run);
  for (size_t i = 0; i < SOME_KEYS; i++) {
    widened[i] = (bytes)(t->wide + i * t->v_width);
  }
  return (struct run){widened, widened, SOME_KEYS, 0, 0};
}

/* ---- scores ---- */

INLINE const char *own_mask(const struct tile *t, size_t row) {
  const struct attend_args *a = t->a;
  return (const char *)a->mask.ptr + query_of(t, row) * a->mask_query + head_of(t, row) * a->mask_head;
}

/* Bit i: the row sees key i of SOME_KEYS from `key` on. Adds to their scores what the mask says. */
INLINE unsigned seen(const struct tile *t, size_t row, size_t key, vf *score) {
  int64_t position = t->now->start + (int64_t)key;
  int64_t from = most(t->lo[row] - position, 0), to = least(t->hi[row] - position, LANES);
  if (from >= to) {
    return 0;
  }
  unsigned bits = ((1u << to) - (1u << from)) & ~(unsigned)t->now->holes[key / LANES];
  size_t n = (size_t)(to - from);
  if (t->a->mask_kind == ATTEND_MASK_BOOL) {
    uint8_t some[LANES] = {0};
    memcpy(some + from, own_mask(t, row) + position + from, n);
    bits &= b_nonzero(some);
  } else if (t->a->mask_kind == ATTEND_MASK_ADDED) {
    float some[LANES] = {0};
    memcpy(some + from, (const float *)(const void *)own_mask(t, row) + position + from, n * sizeof *some);
    vf added = v_load(some);
    bits &= ~m_bits(v_eq(added, v_set1(-INFINITY)));
    *score = v_add(*score, added);
  }
  return bits;
}

/* Everything that is not a plain score: the soft cap, the slope, the mask, and that keys are not seen. */
INLINE vf adjusted(const struct tile *t, size_t row, size_t key, vf score) {
  const struct attend_args *a = t->a;
  if (a->soft_cap != 0.0) {
    vf cap = v_set1((float)a->soft_cap);
    score = v_mul(v_tanh(v_div(score, cap)), cap);
  }
  if (a->slopes.ptr) {
    float slope = ((const float *)a->slopes.ptr)[head_of(t, row)], distance[LANES];
    int64_t first =
        t->now->start + (int64_t)key - ((const struct attend_query *)a->queries.ptr)[query_of(t, row)].position;
    for (int64_t i = 0; i < LANES; i++) {
      distance[i] = (float)(first + i);
    }
    score = v_fma(v_set1(slope), v_load(distance), score);
  }
  unsigned bits = seen(t, row, key, &score);
  return v_select(m_of_bits(bits), score, v_set1(-INFINITY));
}

/* Whether all rows see all keys [from, to), and nothing is added to their scores. */
INLINE int are_plain(const struct tile *t, size_t from, size_t to) {
  const struct attend_args *a = t->a;
  int64_t position = t->now->start;
  unsigned holes = 0;
  for (size_t i = from; i < to; i += LANES) {
    holes |= t->now->holes[i / LANES];
  }
  return position + (int64_t)from >= t->all_from && position + (int64_t)to <= t->all_to && !holes && !a->mask_kind &&
         !a->slopes.ptr && a->soft_cap == 0.0;
}

/* The dot products of all rows with all keys. */
static void multiply_keys(const struct tile *t) {
  struct keys *keys = t->now;
  const dots_fn *products_of = dots_of[t->k_direct ? t->a->key.dtype : PAIRED];
  const size_t passes = (t->rows + FOUR - 1) / FOUR;
  const size_t some = t->k_direct && passes == 1 ? keys->to - keys->from : SOME_KEYS;
  bytes widened[SOME_KEYS];
  for (size_t key = keys->from; key < keys->to; key += some) {
    const struct run run = ready_keys(t, k_row(keys, key), some, widened);
    for (size_t r = 0; r < t->rows; r += FOUR) {
      const struct run pass = pass_of(run, r / FOUR, passes);
      products_of[min_size(t->rows - r, FOUR) - 1](t->scores + r * SCORES_ROW + key, &pass, t->q + r * t->k_width,
                                                   t->k_width);
    }
  }
}

/* ---- weights ---- */

/* Sums over a chunk run in four vectors: vector i is added to the fourth of them, j, that it belongs to. */
#define FOR_FOURS(i, j, from, to)                                                              \
  for (size_t first_ = (from) / (4 * LANES) * (4 * LANES); first_ < (to); first_ += 4 * LANES) \
  _Pragma("GCC unroll 4") for (size_t j = 0, i = first_; j < 4; j++, i += LANES) if (i >= (from) && i < (to))

/* Dot products to scores, and their maximum: a NaN if there is one among them. */
INLINE float take_scores(const struct tile *t, size_t row) {
  const struct keys *keys = t->now;
  const size_t from = keys->from, to = keys->to;
  const int quantised = t->a->key.dtype == DTYPE_I8, plain = are_plain(t, from, to);
  const vf scale = v_set1((float)t->a->scale), q_sum = v_set1(t->q_sums[row]);
  float *x = t->scores + row * SCORES_ROW;
  vf m = v_set1(-INFINITY);
  vn nans = n_none();
  for (size_t i = from; i < to; i += LANES) {
    vf score = v_load(x + i);
    if (quantised) { /* q (s (c - z)) = s (q c - z sum(q)) */
      score = v_mul(v_sub(score, v_mul(v_load(keys->k_zero + i), q_sum)), v_load(keys->k_scale + i));
    }
    score = v_mul(score, scale);
    if (!plain && !are_plain(t, i, i + LANES)) {
      score = adjusted(t, row, i, score);
    }
    m = v_max(score, m);
    nans = n_see(nans, score, score);
    v_store(x + i, score);
  }
  return n_any(nans) ? NAN : v_max_across(m);
}

/* x[i] = exp(x[i] - m), and their sum. Not inlined: amid a whole task there are no registers for exp's constants. */
static __attribute__((noinline)) float exp_from(float *x, float m, size_t from, size_t to) {
  const vf top = v_set1(m);
  vf acc[4] = {v_set1(0), v_set1(0), v_set1(0), v_set1(0)};
  FOR_FOURS(i, j, from, to) {
    vf e = v_exp(v_sub(v_load(x + i), top)); /* where m is -inf, of a NaN: 0 */
    acc[j] = v_add(acc[j], e);
    v_store(x + i, e);
  }
  return sum_across64(acc);
}

/* Dot products to weights exp(score - m), and their sum. A NaN or +inf among the scores makes all of the row NaN. */
INLINE void weigh_row(const struct tile *t, size_t row) {
  const size_t from = t->now->from, to = t->now->to;
  float *x = t->scores + row * SCORES_ROW, m = take_scores(t, row);
  if (m < INFINITY) {
    t->m[row] = m;
    t->sums[row] = exp_from(x, m, from, to);
  } else {
    t->m[row] = INFINITY;
    t->sums[row] = NAN;
    fill(x + from, to - from, 0.0f);
  }
}

/* Weights to what codes are to be multiplied by; returns what their zeros amount to. */
INLINE float weigh_codes(const struct tile *t, float *weights) {
  const struct keys *keys = t->now;
  vf acc[4] = {v_set1(0), v_set1(0), v_set1(0), v_set1(0)};
  FOR_FOURS(i, j, keys->from, keys->to) {
    vf w = v_mul(v_load(weights + i), v_load(keys->v_scale + i));
    acc[j] = v_fma(w, v_load(keys->v_zero + i), acc[j]);
    v_store(weights + i, w);
  }
  return sum_across64(acc);
}

/* ---- values ---- */

INLINE int has_nan(const float *x, size_t from, size_t to) {
  vn nans = n_none();
  for (size_t i = from; i < to; i += LANES) {
    nans = n_see(nans, v_load(x + i), v_load(x + i));
  }
  return n_any(nans);
}

static void sum_values(const struct tile *t) {
  struct keys *keys = t->now;
  const weighted_fn *sum_of = weighted_of[t->v_direct ? t->a->value.dtype : DTYPE_F32];
  const size_t passes = (t->rows + FOUR - 1) / FOUR;
  bytes widened[SOME_KEYS];
  fill(t->values, t->rows * t->v_width, 0.0f);
  for (size_t key = keys->from; key < keys->to; key += SOME_KEYS) {
    const struct run run = ready_values(t, v_row(keys, key), widened);
    for (size_t r = 0; r < t->rows; r += FOUR) {
      const struct run pass = pass_of(run, r / FOUR, passes);
      sum_of[min_size(t->rows - r, FOUR) - 1](t->values + r * t->v_width, t->v_width, t->scores + r * SCORES_ROW + key,
                                              &pass);
    }
  }
}

/* The row's sum once more, of what it sees alone: values it does not see were met with weight 0, and 0 times a NaN or
   an infinity is a NaN. */
static void sum_seen(const struct tile *t, size_t row) {
  struct keys *keys = t->now;
  float *sums = t->values + row * t->v_width, *weights = t->scores + row * SCORES_ROW;
  fill(sums, t->v_width, 0.0f);
  for (size_t key = keys->from; key < keys->to; key += LANES) {
    vf ignored = v_set1(0.0f);
    for (unsigned bits = seen(t, row, key, &ignored); bits; bits &= bits - 1) {
      size_t i = key + (size_t)__builtin_ctz(bits);
      const struct run one = {v_row(keys, i), v_row(keys, i), 1, 0, 0};
      widen_values(t, &one);
      for (size_t d = 0; d < t->v_width; d += LANES) {
        v_store(sums + d, v_fma(v_set1(weights[i]), v_load(t->wide + d), v_load(sums + d)));
      }
    }
  }
}

/* What weigh_codes gave, of what the row sees alone: 0 times the scale or zero of another may be a NaN, too. */
static float zeros_seen(const struct tile *t, size_t row) {
  const struct keys *keys = t->now;
  const float *weights = t->scores + row * SCORES_ROW;
  vf acc[4] = {v_set1(0), v_set1(0), v_set1(0), v_set1(0)};
  FOR_FOURS(i, j, keys->from, keys->to) {
    vf ignored = v_set1(0.0f);
    const vm in = m_of_bits(seen(t, row, i, &ignored));
    acc[j] = v_fma(v_keep(in, v_load(weights + i)), v_keep(in, v_load(keys->v_zero + i)), acc[j]);
  }
  return sum_across64(acc);
}

static void attend_chunk(const struct tile *t) {
  multiply_keys(t);
  const int quantised = t->a->value.dtype == DTYPE_I8;
  float zeros[ATTEND_ROWS];
  for (size_t r = 0; r < t->rows; r++) {
    weigh_row(t, r);
    zeros[r] = quantised ? weigh_codes(t, t->scores + r * SCORES_ROW) : 0.0f;
  }
  sum_values(t);
  for (size_t r = 0; r < t->rows; r++) {
    float *row = t->values + r * t->v_width;
    if (has_nan(row, 0, t->v_width)) {
      sum_seen(t, r);
    }
    zeros[r] = zeros[r] == zeros[r] ? zeros[r] : zeros_seen(t, r);
    for (size_t d = 0; quantised && d < t->v_width; d += LANES) {
      v_store(row + d, v_sub(v_load(row + d), v_set1(zeros[r])));
    }
  }
}

/* ---- states ---- */

/* To join states (m, sum, values) is to scale both by exp(m - the greater m), and to add. */
INLINE vf join_values(vf all, vf values, float old, float new) {
  return v_fma(values, v_set1(new), v_mul(all, v_set1(old)));
}

/* A chunk's states to those of the chunks before it, LANES rows at a time. */
static void join_chunk(const struct tile *t) {
  for (size_t first = 0; first < t->rows; first += LANES) {
    const vf all_m = v_load(t->all_m + first), m = v_load(t->m + first), top = v_select(v_gt(m, all_m), m, all_m);
    const vf olds = v_exp(v_sub(all_m, top)), news = v_exp(v_sub(m, top)); /* of two empty states, of NaNs: 0 */
    const vf sums = v_add(v_mul(v_load(t->all_sums + first), olds), v_mul(v_load(t->sums + first), news));
    float old[LANES], new[LANES];
    v_store(old, olds);
    v_store(new, news);
    v_store(t->all_m + first, top);
    v_store(t->all_sums + first, sums);
    for (size_t i = 0; i < min_size(LANES, t->rows - first); i++) {
      float *all = t->all_values + (first + i) * t->v_width, *values = t->values + (first + i) * t->v_width;
      for (size_t d = 0; d < t->v_width; d += LANES) {
        v_store(all + d, join_values(v_load(all + d), v_load(values + d), old[i], new[i]));
      }
    }
  }
}

/* Up to LANES states of one row, in their order, to those before: first all that is to be scaled by, then the values,
   which need not leave the registers. */
struct states {
  float m[LANES], sums[LANES];
  const float *values[LANES];
};
static void join_states(float *all_m, float *all_sum, float *all_values, const struct states *s, size_t count,
                        size_t width) {
  float old[LANES] = {0}, new[LANES] = {0}, m = *all_m, sum = *all_sum;
  for (size_t i = 0; i < count; i++) {
    float top = s->m[i] > m ? s->m[i] : m;
    old[i] = m - top;
    new[i] = s->m[i] - top;
    m = top;
  }
  v_store(old, v_exp(v_load(old)));
  v_store(new, v_exp(v_load(new)));
  for (size_t i = 0; i < count; i++) {
    sum = sum * old[i] + s->sums[i] * new[i];
  }
  for (size_t d = 0; d < width; d += LANES) {
    vf all = v_load(all_values + d);
    for (size_t i = 0; i < count; i++) {
      all = join_values(all, v_load(s->values[i] + d), old[i], new[i]);
    }
    v_store(all_values + d, all);
  }
  *all_m = m;
  *all_sum = sum;
}

/* What a query's head comes to: the sink joined, values over sum, and the logarithm of the sum. */
static __attribute__((noinline)) void finish(const struct attend_args *a, int64_t query, int64_t head, float m,
                                             float sum, float *values, const float *zeros, size_t width) {
  float *out = (float *)a->out.ptr + (query * a->heads + head) * a->value.dim;
  if (a->sinks.ptr) {
    const struct states sink = {{((const float *)a->sinks.ptr)[head]}, {1.0f}, {zeros}};
    join_states(&m, &sum, values, &sink, 1, width);
  }
  const vf zero = v_set1(0.0f), divisor = v_set1(sum == 0.0f ? 1.0f : sum);
  for (size_t d = 0; d < width; d += LANES) {
    vf y = v_add(v_div(v_load(values + d), divisor), zero); /* -0 to 0 */
    store_upto(out, d, (size_t)a->value.dim, v_select(v_unord(y, y), QUIET_NAN, y));
  }
  if (a->lse.ptr) {
    float lse = sum == 0.0f ? -INFINITY : (float)(((double)m + log64_1((double)sum)) * a->lse_unit);
    ((float *)a->lse.ptr)[query * a->heads + head] = sum != sum ? v_max_across(QUIET_NAN) : lse;
  }
}

INLINE size_t state_floats(const struct attend_args *a) { return 2 + whole_vectors(a->value.dim); }

/* The state of a query's head in a chunk. */
INLINE float *state_of(const struct attend_args *a, const struct attend_query *query, int64_t chunk, int64_t head) {
  int64_t slot = query->states + chunk - query->lo / ATTEND_CHUNK;
  return (float *)a->states.ptr + (size_t)(slot * a->heads + head) * state_floats(a);
}

static void keep_states(const struct tile *t, int64_t chunk) {
  int64_t start = chunk * ATTEND_CHUNK;
  for (size_t r = 0; r < t->rows; r++) {
    if (t->lo[r] < t->hi[r] && t->lo[r] < start + ATTEND_CHUNK && t->hi[r] > start) {
      const struct attend_query *query = (const struct attend_query *)t->a->queries.ptr + query_of(t, r);
      float *state = state_of(t->a, query, chunk, head_of(t, r));
      state[0] = t->m[r];
      state[1] = t->sums[r];
      memcpy(state + 2, t->values + r * t->v_width, t->v_width * sizeof *state);
    }
  }
}

static void attend_task(const struct attend_args *a, const struct attend_task *task, char *scratch) {
  struct tile t;
  set_out(&t, a, task, scratch);
  const int in_pieces = ((const struct attend_query *)a->queries.ptr)[task->first_query].states >= 0;
  int64_t chunk = most(task->first_chunk, t.first / ATTEND_CHUNK);
  int64_t end = t.first < t.end ? least(task->end_chunk, (t.end + ATTEND_CHUNK - 1) / ATTEND_CHUNK) : chunk;
  if (chunk < end) { /* what lies behind a shared prefix is another row's, nobody has looked at this one's */
    find_keys(&t, t.next, chunk);
  }
  for (; chunk < end; chunk++) {
    struct keys *done = t.now;
    t.now = t.next;
    t.next = done;
    t.next->from = t.next->to = 0;
    if (chunk + 1 < end) {
      find_keys(&t, t.next, chunk + 1);
    }
    find_ahead(&t, t.now, t.next);
    attend_chunk(&t);
    if (in_pieces) {
      keep_states(&t, chunk);
      continue;
    }
    join_chunk(&t);
  }
  for (size_t r = 0; r < t.rows && !in_pieces; r++) {
    finish(a, query_of(&t, r), head_of(&t, r), t.all_m[r], t.all_sums[r], t.all_values + r * t.v_width, t.zeros,
           t.v_width);
  }
}

static void attend(const struct attend_args *a, void *scratch) {
  FOR_ROWS (i, a) {
    attend_task(a, (const struct attend_task *)a->tasks.ptr + i, scratch);
  }
}

static void attend_merge(const struct attend_args *a, void *scratch) {
  char *free_scratch = scratch;
  size_t width = whole_vectors(a->value.dim);
  float *values = carve(&free_scratch, width), *zeros = carve(&free_scratch, width);
  fill(zeros, width, 0.0f);
  FOR_ROWS (i, a) {
    const struct attend_query *query = (const struct attend_query *)a->queries.ptr + i;
    const int64_t end = query->lo < query->hi ? (query->hi - 1) / ATTEND_CHUNK + 1 : 0;
    for (int64_t head = 0; head < a->heads && query->states >= 0; head++) {
      float m = -INFINITY, sum = 0.0f;
      fill(values, width, 0.0f);
      for (int64_t chunk = query->lo / ATTEND_CHUNK; chunk < end; chunk += LANES) {
        struct states some;
        size_t count = 0;
        for (int64_t c = chunk; c < least(chunk + LANES, end); c++, count++) {
          const float *state = state_of(a, query, c, head);
          some.m[count] = state[0];
          some.sums[count] = state[1];
          some.values[count] = state + 2;
        }
        join_states(&m, &sum, values, &some, count, width);
      }
      finish(a, i, head, m, sum, values, zeros, width);
    }
  }
}
