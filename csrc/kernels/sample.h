/* sample: one token a row, decided on integers and exact sums (docs/determinism.md).

   The row after bias, penalties and mask is written out as z; every truncation keeps a prefix of z's order and is
   applied by setting the rest to -inf; the draw is the Gumbel argmax over what is left, or, when u is given, the
   inverse CDF on the integer weights in id order. */

struct row_state {
  float *z;      /* cols, padded to whole blocks */
  float *maxima; /* of blocks of 64 */
  char *scratch; /* for selections */
  size_t n;
  float max;
  float inverse; /* 1 / T of the steps so far: 1 before the temperature step */
  double temperature;
  int force_exact;
};

/* ---- the row as it is judged ---- */

/* -inf fills the last vector beyond the row; adding 0 makes both zeros one. */
struct text {
  float *z;
  const void *x;
  size_t n;
  int64_t dtype;
};
INLINE void write_out_as(const struct text *t, void *scratch, int dtype) {
  (void)scratch;
  const vf zero = v_set1(0.0f);
  for (size_t i = 0; i < t->n; i += LANES) {
    vf v = t->n - i >= LANES ? row_load(t->x, i, dtype) : row_load_n(t->x, i, t->n - i, dtype, -INFINITY);
    v_store(t->z + i, v_add(v, zero));
  }
}
static void write_out(float *z, const void *x, size_t n, int64_t dtype) {
  const struct text t = {z, x, n, dtype};
  FOR_DTYPE(write_out_as, &t, NULL)
}

struct ids {
  const int64_t *id;
  size_t count;
};

INLINE struct ids ids_of(const struct span *ids, const struct span *offsets, int64_t row) {
  if (!ids->ptr) {
    return (struct ids){NULL, 0};
  }
  const int64_t *o = (const int64_t *)offsets->ptr + row;
  return (struct ids){(const int64_t *)ids->ptr + o[0], (size_t)(o[1] - o[0])};
}

static void add_bias(float *z, size_t n, const struct sample_args *a, int64_t row) {
  if (a->bias_dense) {
    const float *bias = row_of(a->bias_values.ptr, a->bias_stride, row);
    for (size_t i = 0; i < n; i++) {
      z[i] += bias[i];
    }
    return;
  }
  struct ids ids = ids_of(&a->bias_ids, &a->bias_offsets, row);
  const float *values = (const float *)a->bias_values.ptr + (ids.count ? ids.id - (const int64_t *)a->bias_ids.ptr : 0);
  for (size_t i = 0; i < ids.count; i++) {
    z[ids.id[i]] += values[i];
  }
}

enum { SEEN = 1u << 31 }; /* marks an id that is penalised; the rest of its count is how often it was put out */

/* Repetition over prompt and output, frequency and presence over output, each id once, in that order. */
static void penalise(float *z, uint32_t *counts, struct ids prompt, struct ids output, const struct sample_params *p) {
  const float repetition = (float)p->repetition_penalty, frequency = (float)p->frequency_penalty;
  const float presence = (float)p->presence_penalty;
  struct ids lists[2] = {output, prompt};
  for (int l = 0; l < 2; l++) {
    for (size_t i = 0; i < lists[l].count; i++) {
      counts[lists[l].id[i]] = SEEN;
    }
  }
  for (size_t i = 0; i < output.count; i++) {
    counts[output.id[i]]++;
  }
  for (int l = 0; l < 2; l++) {
    for (size_t i = 0; i < lists[l].count; i++) {
      uint32_t *count = &counts[lists[l].id[i]];
      float *v = &z[lists[l].id[i]];
      if (*count & SEEN) {
        float times = (float)(*count & ~SEEN);
        *v = *v > 0.0f ? *v / repetition : *v * repetition;
        if (times > 0.0f) {
          *v -= frequency * times;
          *v -= presence;
        }
        *count = 0; /* done: a later mention of the id finds nothing to do */
      }
    }
  }
}

static void forbid(float *z, size_t n, const struct sample_args *a, int64_t row) {
  const void *mask = row_of(a->mask.ptr, a->mask_stride, row);
  size_t width = min_size((size_t)a->mask_width, n);
  for (size_t i = 0; i < width; i += LANES) {
    size_t lanes = min_size(LANES, width - i);
    unsigned allowed = 0;
    if (a->mask_kind == MASK_BITS) {
      allowed = ((const uint32_t *)mask)[i / 32] >> i % 32 & 0xffffu;
    } else {
      const uint8_t *bytes = (const uint8_t *)mask + i;
      for (size_t j = 0; j < lanes; j++) {
        allowed |= (unsigned)(bytes[j] != 0) << j;
      }
    }
    store_upto(z, i, width, v_select(m_of_bits(allowed), v_load(z + i), v_set1(-INFINITY)));
  }
  fill(z + width, n - width, -INFINITY);
}

/* ---- truncations: each finds the prefix it keeps ---- */

static void keep(struct row_state *s, struct prefix p) {
  const vf value = v_set1(p.value), rest = v_set1(-INFINITY);
  for (size_t i = 0; i < s->n; i += LANES) {
    vf v = v_load(s->z + i);
    size_t ties = p.last_tie < i ? 0 : min_size(LANES, p.last_tie - i + 1);
    vm kept = m_or(v_gt(v, value), m_and(v_eq(v, value), m_of_bits((1u << ties) - 1u)));
    v_store(s->z + i, v_select(kept, v, rest));
  }
}

INLINE vf weight_terms(const struct row_state *s, vf z) {
  return v_exp(v_mul(v_sub(z, v_set1(s->max)), v_set1(s->inverse)));
}

static uint64_t total_weight(const struct row_state *s) {
  vw acc = w_zero();
  for (size_t i = 0; i < s->n; i += LANES) {
    acc = w_add(acc, weight_terms(s, v_load(s->z + i)));
  }
  return w_total(acc);
}

/* floor or ceil of x * weight for x in [0, 1), weight <= 2^63: exact, x is a 53-bit integer times a power of two */
INLINE uint64_t times_weight(double x, uint64_t weight, int round_up) {
  uint64_t u = double_bits(x), exponent = u >> 52;
  uint64_t mantissa = (u & 0x000fffffffffffffu) | (exponent ? 0x0010000000000000u : 0);
  unsigned shift = 1075u - (unsigned)(exponent ? exponent : 1); /* x = mantissa * 2^-shift */
  unsigned __int128 product = (unsigned __int128)mantissa * weight;
  if (shift > 127) {
    return round_up && product;
  }
  uint64_t whole = (uint64_t)(product >> shift);
  return whole + (round_up && product != (unsigned __int128)whole << shift);
}

/* The first k of z's order: by block maxima (top_k.h), or by radix when k exceeds the number of blocks. */
static struct prefix first_k(struct row_state *s, size_t k) {
  if (s->force_exact || k > (s->n + BLOCK - 1) / BLOCK) {
    return select_count(s->z, s->n, k, s->scratch);
  }
  struct list above, equal;
  int has_nan = 0;
  block_maxima(s->maxima, s->z, s->n, DTYPE_F32, &has_nan);
  top_k_by_blocks(s->z, s->n, DTYPE_F32, s->maxima, k, s->scratch, &above, &equal);
  const struct list *last = equal.count ? &equal : &above;
  return (struct prefix){last->value[last->count - 1], last->id[last->count - 1]};
}

static void with_min_keep(struct row_state *s, struct prefix p, size_t min_keep, int ties_all) {
  if (ties_all) {
    p.last_tie = s->n;
  }
  if (min_keep > 1) { /* what is allowed may be less: the prefix of n ids then holds all of it */
    struct prefix least = first_k(s, min_size(min_keep, s->n));
    p = is_longer(least, p) ? least : p;
  }
  keep(s, p);
}

static void truncate_top_k(struct row_state *s, const struct sample_params *p, int ties_all) {
  size_t k = (size_t)(p->top_k > p->min_keep ? p->top_k : p->min_keep);
  if (p->top_k > 0 && k < s->n) {
    with_min_keep(s, first_k(s, k), 1, ties_all);
  }
}

static void truncate_top_p(struct row_state *s, const struct sample_params *p, int ties_all) {
  if (p->top_p < 1.0) {
    uint64_t limit = p->top_p > 0.0 ? times_weight(p->top_p, total_weight(s), 1) : 1;
    const struct weighing mass = {1, s->max, s->inverse};
    with_min_keep(s, select_weight(s->z, s->n, limit, &mass, s->scratch), (size_t)p->min_keep, ties_all);
  }
}

static void truncate_min_p(struct row_state *s, const struct sample_params *p, double temperature) {
  if (p->min_p > 0.0) {
    double bound = (double)s->max + temperature * log64_1(p->min_p < DBL_MIN ? DBL_MIN : p->min_p);
    float rounded = (float)bound;
    if ((double)rounded > bound) { /* round down instead */
      rounded = key_value(order_key(rounded) - 1);
    }
    with_min_keep(s, (struct prefix){rounded, s->n}, (size_t)p->min_keep, 0);
  }
}

static void truncate(struct row_state *s, const struct sample_args *a, const struct sample_params *p) {
  int ties_all = a->ties_all != 0, tempered = 0;
  for (int i = 0; i < STEP_LIMIT && a->steps[i]; i++) {
    switch (a->steps[i]) {
    case STEP_TEMPERATURE:
      s->inverse = (float)(1.0 / s->temperature);
      tempered = 1;
      break;
    case STEP_TOP_K:
      truncate_top_k(s, p, ties_all);
      break;
    case STEP_TOP_P:
      truncate_top_p(s, p, ties_all);
      break;
    default:
      truncate_min_p(s, p, tempered ? s->temperature : 1.0);
    }
  }
}

/* ---- the draw ---- */

/* The first kept id whose running weight exceeds floor(u * W) */
static size_t inverse_cdf(const struct row_state *s, double u) {
  uint64_t target = times_weight(u, total_weight(s), 0), running = 0, w[LANES];
  for (size_t i = 0; i < s->n; i += LANES) {
    w_store(w, weight_terms(s, v_load(s->z + i)));
    for (size_t j = 0; j < LANES; j++) {
      running += w[j];
      if (running > target) {
        return i + j;
      }
    }
  }
  return s->n; /* not reached: target < W */
}

static size_t draw(struct row_state *s, const struct sample_args *a, const struct sample_params *p) {
  if (a->has_u) {
    return inverse_cdf(s, p->u);
  }
  const struct philox_key key = {p->seed, p->key, (uint32_t)p->step};
  int has_nan = 0;
  block_maxima(s->maxima, s->z, s->n, DTYPE_F32, &has_nan);
  return gumbel_argmax(s->z, s->n, s->maxima, s->temperature, &key);
}

/* Kept ids in descending order and their renormalised logprobs, appended at offsets[row]. */
static void put_support(struct row_state *s, const struct sample_args *a, int64_t row) {
  int64_t *offsets = (int64_t *)a->support_offsets.ptr + row;
  int64_t *ids = (int64_t *)a->support_ids.ptr + offsets[0];
  float *logprobs = (float *)a->support_logprobs.ptr + offsets[0];
  char *scratch = s->scratch;
  struct list kept = list_in(&scratch, s->n), spare = list_in(&scratch, s->n);
  for (size_t i = 0; i < s->n; i += LANES) { /* z is padded with -inf */
    vf v = v_load(s->z + i);
    append(&kept, v, ids_from(i), v_gt(v, v_set1(-INFINITY)));
  }
  sort_list(&kept, &spare);
  double log_total = log64_1((double)total_weight(s)) - WEIGHT_BITS * 6.93147180559945286227e-01;
  for (size_t i = 0; i < kept.count; i++) {
    ids[i] = kept.id[i];
    logprobs[i] = (float)((double)((kept.value[i] - s->max) * s->inverse) - log_total);
  }
  offsets[1] = offsets[0] + (int64_t)kept.count;
}

static int64_t sample_row(const struct sample_args *a, int64_t row, char *scratch) {
  const struct sample_params *p = (const struct sample_params *)a->params.ptr + row;
  size_t n = (size_t)a->cols, room = (n + BLOCK) / BLOCK * BLOCK;
  struct row_state s = {.z = (float *)scratch, .n = n, .inverse = 1.0f, .force_exact = a->force_exact != 0};
  uint32_t *counts = (uint32_t *)(s.z + room);
  s.maxima = (float *)(counts + room);
  s.scratch = (char *)(s.maxima + room);

  write_out(s.z, row_of(a->x.ptr, a->x_stride, row), n, a->dtype);
  if (a->bias_values.ptr) {
    add_bias(s.z, n, a, row);
  }
  if (a->prompt_ids.ptr || a->output_ids.ptr) {
    penalise(s.z, counts, ids_of(&a->prompt_ids, &a->prompt_offsets, row),
             ids_of(&a->output_ids, &a->output_offsets, row), p);
  }
  if (a->mask_kind != MASK_NONE) {
    forbid(s.z, n, a, row);
  }
  int has_nan = 0;
  s.max = block_max(s.z, 0, n, DTYPE_F32, &has_nan);
  if (has_nan || s.max == -INFINITY || s.max == INFINITY) {
    return -1;
  }
  int greedy = p->temperature < 1e-30;
  s.temperature = p->temperature > 1e30 ? 1e30 : p->temperature;
  size_t token;
  if (greedy) {
    token = first_equal(s.z, n, DTYPE_F32, s.max);
    keep(&s, (struct prefix){s.max, token});
  } else {
    truncate(&s, a, p);
    token = draw(&s, a, p);
  }
  if (a->support_ids.ptr) {
    put_support(&s, a, row);
  }
  return (int64_t)token;
}

static void sample(const struct sample_args *a, void *scratch) {
  int64_t *tokens = a->tokens.ptr, *offsets = a->support_offsets.ptr;
  for (int64_t r = 0; r < a->rows; r++) {
    if (offsets) {
      offsets[r + 1] = offsets[r];
    }
    tokens[r] = sample_row(a, r, scratch);
  }
}
