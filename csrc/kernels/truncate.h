/* Truncation on the whole row: each step finds the prefix of z's order that it keeps, and sets the rest to -inf.
   Masses are sums of integer weights, so no order of adding shows. */

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

static void keep(struct row_state *s, struct prefix p) {
  const struct cut cut = cut_of(p);
  const vf rest = v_set1(-INFINITY);
  for (size_t i = 0; i < s->n; i += LANES) {
    vf v = v_load(s->z + i);
    v_store(s->z + i, v_select(is_kept(&cut, i, v), v, rest));
  }
}

static uint64_t total_weight(const struct row_state *s) {
  return mass_of(s->z, s->n, (struct measure){s->max, s->inverse}, everything);
}

/* The row as it stands, its maxima found. */
static struct judged row_of_state(const struct row_state *s) {
  struct judged row = plain_row(s->z, s->n, DTYPE_F32, s->maxima);
  int has_nan = 0;
  find_maxima(&row, &has_nan);
  return row;
}

/* The first k of z's order: by candidates (top_k.h), or by radix when forced. */
static struct prefix first_k(struct row_state *s, size_t k) {
  if (s->force_exact) {
    return select_count(s->z, s->n, k, s->scratch);
  }
  const struct judged row = row_of_state(s);
  return first_prefix(&row, k, s->scratch);
}

static void with_min_keep(struct row_state *s, struct prefix p, size_t min_keep, int ties_all) {
  if (ties_all) {
    p.end = s->n;
  }
  if (min_keep > 1) { /* what is allowed may be less: the prefix of n ids then holds all of it */
    p = longer(p, first_k(s, min_size(min_keep, s->n)));
  }
  keep(s, p);
}

/* How many top-k keeps of n, 0 if it is off. */
INLINE size_t top_k_of(const struct sample_params *p, size_t n) {
  size_t k = (size_t)(p->top_k > p->min_keep ? p->top_k : p->min_keep);
  return p->top_k > 0 && k < n ? k : 0;
}

static void truncate_top_k(struct row_state *s, const struct sample_params *p, int ties_all) {
  size_t k = top_k_of(p, s->n);
  if (k) {
    with_min_keep(s, first_k(s, k), 1, ties_all);
  }
}

INLINE float round_down(double x) {
  float rounded = (float)x;
  return (double)rounded > x ? key_value(order_key(rounded) - 1) : rounded;
}

/* max + T * ln(min_p) in float64, rounded down to float32: kept is what reaches it. */
INLINE float min_p_bound(double min_p, float max, double temperature) {
  return round_down((double)max + temperature * log64_1(min_p < DBL_MIN ? DBL_MIN : min_p));
}

/* By bounds and bisection (nucleus.h), or by radix when forced. */
static struct prefix nucleus_of(struct row_state *s, double top_p) {
  if (s->force_exact) {
    const struct weighing mass = {1, s->max, s->inverse, top_p};
    return select_weight(s->z, s->n, 1, &mass, s->scratch);
  }
  return kept_by_mass(s->z, s->n, (struct measure){s->max, s->inverse}, top_p, s->scratch).prefix;
}

static void truncate_top_p(struct row_state *s, const struct sample_params *p, int ties_all) {
  if (p->top_p < 1.0) {
    with_min_keep(s, nucleus_of(s, p->top_p), (size_t)p->min_keep, ties_all);
  }
}

static void truncate_min_p(struct row_state *s, const struct sample_params *p, double temperature) {
  if (p->min_p > 0.0) {
    struct prefix likely = {min_p_bound(p->min_p, s->max, temperature), s->n};
    with_min_keep(s, likely, (size_t)p->min_keep, 0);
  }
}

static void truncate(struct row_state *s, const struct sample_args *a, const struct sample_params *p) {
  int tempered = 0;
  for (int i = 0; i < STEP_LIMIT && a->steps[i]; i++) {
    switch (a->steps[i]) {
    case STEP_TEMPERATURE:
      s->inverse = (float)(1.0 / s->temperature);
      tempered = 1;
      break;
    case STEP_TOP_K:
      truncate_top_k(s, p, (a->ties_all & TIES_TOP_K) != 0);
      break;
    case STEP_TOP_P:
      truncate_top_p(s, p, (a->ties_all & TIES_TOP_P) != 0);
      break;
    default:
      truncate_min_p(s, p, tempered ? s->temperature : 1.0);
    }
  }
}

/* The first kept id whose running weight exceeds floor(u * W) */
static size_t inverse_cdf(const struct row_state *s, double u) {
  uint64_t target = times_weight(u, total_weight(s), 0), running = 0, w[LANES];
  for (size_t i = 0; i < s->n; i += LANES) {
    w_store(w, term_of(v_load(s->z + i), (struct measure){s->max, s->inverse}, 1));
    for (size_t j = 0; j < LANES; j++) {
      running += w[j];
      if (running > target) {
        return i + j;
      }
    }
  }
  return s->n; /* not reached: target < W */
}
