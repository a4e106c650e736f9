/* sample: one token a row, decided on integers and exact sums (docs/determinism.md).

   The token is the Gumbel argmax over what the truncations leave or, when u is given, the inverse CDF on the integer
   weights in id order. A row whose first truncation is top-k goes by few.h, one without any is drawn as it is; all
   others, and every row when the exact path is forced, are written out and truncated whole (truncate.h). */

INLINE void put_support(const struct sample_args *a, int64_t row, const struct list *kept, float max, float inverse,
                        uint64_t total) {
  int64_t *ids = (int64_t *)a->support_ids.ptr + row * a->cols;
  float *logprobs = (float *)a->support_logprobs.ptr + row * a->cols;
  double log_total = log64_1((double)total) - WEIGHT_BITS * 6.93147180559945286227e-01;
  for (size_t i = 0; i < kept->count; i++) {
    ids[i] = kept->id[i];
    logprobs[i] = (float)((double)((kept->value[i] + 0.0f - max) * inverse) - log_total);
  }
  ((int64_t *)a->support_counts.ptr)[row] = (int64_t)kept->count;
}

/* Kept ids in descending order and their renormalised logprobs. */
static void put_whole_support(struct row_state *s, const struct sample_args *a, int64_t row) {
  char *scratch = s->scratch;
  struct list kept = list_in(&scratch, s->n), spare = list_in(&scratch, s->n);
  for (size_t i = 0; i < s->n; i += LANES) { /* z is padded with -inf */
    vf v = v_load(s->z + i);
    append(&kept, v, ids_from(i), v_gt(v, v_set1(-INFINITY)));
  }
  sort_list(&kept, &spare);
  put_support(a, row, &kept, s->max, s->inverse, total_weight(s));
}

static size_t draw_whole(struct row_state *s, const struct sample_args *a, const struct sample_params *p,
                         const struct philox_key *key) {
  if (a->has_u) {
    return inverse_cdf(s, p->u);
  }
  int has_nan = 0;
  block_maxima(s->maxima, s->z, s->n, DTYPE_F32, &has_nan);
  return gumbel_argmax(s->z, s->n, s->maxima, s->temperature, key);
}

/* z may be the user's row; s->z is written over. */
static size_t sample_few(struct row_state *s, const struct sample_args *a, const struct sample_params *p, int64_t row,
                         const float *z, size_t k, const struct philox_key *key) {
  struct few f = {.weight = (uint64_t *)s->scratch};
  pick_few(&f, z, s->n, s->maxima, k, s->scratch + (s->n + 2 * LANES) * sizeof *f.weight);
  truncate_few(&f, a, p, s->temperature);
  if (a->support_ids.ptr) {
    put_support(a, row, &f.list, f.max, f.inverse, weigh_few(&f));
  }
  spread_few(&f, s->z, s->maxima, s->n);
  return gumbel_argmax(s->z, s->n, s->maxima, s->temperature, key);
}

/* Without an effect of any truncation, and nobody asking for what was kept, the row is drawn from as it stands. */
INLINE int is_plain(const struct sample_args *a, const struct sample_params *p, size_t n) {
  return !a->force_exact && !a->has_u && !a->support_ids.ptr && !top_k_of(p, n) && p->top_p >= 1.0 && p->min_p <= 0.0;
}

static int64_t sample_row(const struct sample_args *a, int64_t row, char *scratch) {
  const struct sample_params *p = (const struct sample_params *)a->params.ptr + row;
  const struct philox_key key = {p->seed, p->key, (uint32_t)p->step};
  size_t n = (size_t)a->cols, room = (n + BLOCK) / BLOCK * BLOCK, few = few_first(a, p, n);
  struct row_state s = {.z = (float *)scratch, .n = n, .inverse = 1.0f, .force_exact = a->force_exact != 0};
  uint32_t *counts = (uint32_t *)(s.z + room);
  s.maxima = (float *)(counts + room);
  s.scratch = (char *)(s.maxima + room);
  s.temperature = p->temperature > 1e30 ? 1e30 : p->temperature;
  int greedy = p->temperature < 1e-30;
  int in_place = a->dtype == DTYPE_F32 && !has_edits(a) && (greedy || few || is_plain(a, p, n));
  const float *z = in_place ? row_of(a->x.ptr, a->x_stride, row) : s.z;
  if (!in_place) {
    write_edited(s.z, counts, a, row);
  }

  int has_nan = 0;
  block_maxima(s.maxima, z, n, DTYPE_F32, &has_nan);
  s.max = block_max(s.maxima, 0, (n + BLOCK - 1) / BLOCK, DTYPE_F32, &has_nan);
  if (has_nan || s.max == -INFINITY || s.max == INFINITY) {
    return -1;
  }
  if (greedy) {
    size_t token = first_equal(z, n, DTYPE_F32, s.max);
    if (a->support_ids.ptr) {
      struct list only = {&s.max, &(uint32_t){(uint32_t)token}, 1};
      put_support(a, row, &only, s.max, 1.0f, (uint64_t)1 << WEIGHT_BITS);
    }
    return (int64_t)token;
  }
  if (few) {
    return (int64_t)sample_few(&s, a, p, row, z, few, &key);
  }
  if (is_plain(a, p, n)) {
    return (int64_t)gumbel_argmax(z, n, s.maxima, s.temperature, &key);
  }
  truncate(&s, a, p);
  if (a->support_ids.ptr) {
    put_whole_support(&s, a, row);
  }
  return (int64_t)draw_whole(&s, a, p, &key);
}

static void sample(const struct sample_args *a, void *scratch) {
  int64_t *tokens = a->tokens.ptr, *counts = a->support_counts.ptr;
  FOR_ROWS (r, a) {
    if (counts) {
      counts[r] = 0;
    }
    tokens[r] = sample_row(a, r, scratch);
  }
}
