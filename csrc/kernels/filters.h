/* One truncation of a row, written out: logits, -inf where not kept; or the probabilities kept, over their sum.

   What is kept is what sample's step of that name keeps (truncate.h), so an invalid row is one that sample would
   refuse; it leaves as NaN. For probabilities the integer weight is round(2^43 * (p / max)), the division float32's;
   what is kept leaves as (p / max) * float32(2^43 / the weight kept). */

struct filtered {
  const float *x; /* the row as float32 */
  float *out;
  const struct sample_params *p;
  struct judged row; /* x; maxima once someone has found them */
  char *scratch;
  int ties_all, force_exact;
};

/* As the kernel of that name: a 16-bit NaN becomes the canonical one. */
static void widen_to(float *out, const void *x, size_t n, int64_t dtype) {
  const struct row_args a = {.x.ptr = (void *)x, .out.ptr = out, .cols = (int64_t)n, .dtype = dtype};
  widen(&a, NULL);
}

static struct filtered open_row(const struct filter_args *a, int64_t row, char *scratch) {
  size_t n = (size_t)a->cols;
  const void *x = row_of(a->x.ptr, a->x_stride, row);
  struct filtered f = {.x = x, .out = (float *)row_of(a->out.ptr, a->out_stride, row)};
  if (a->dtype != DTYPE_F32) {
    float *wide = (float *)take(&scratch, n * sizeof *wide);
    widen_to(wide, x, n, a->dtype);
    f.x = wide;
  }
  f.row = plain_row(f.x, n, DTYPE_F32, NULL);
  f.row.maxima = (float *)take(&scratch, (f.row.blocks + LANES) * sizeof *f.row.maxima);
  f.p = (const struct sample_params *)a->params.ptr + row;
  f.scratch = scratch;
  f.ties_all = a->ties_all != 0;
  f.force_exact = a->force_exact != 0;
  return f;
}

static int64_t mark_invalid(const struct filtered *f) {
  fill(f->out, f->row.n, v_max_across(QUIET_NAN));
  return -1;
}

/* ---- what is kept ---- */

/* A prefix as bounds to reach: its value up to the vector in which ties end, the float above from there on. */
struct cut {
  vf bound[3]; /* before that vector, in it, behind it */
  size_t at;
};

static struct cut cut_of(struct prefix p) {
  size_t at = p.end / LANES * LANES;
  const vf tied = v_set1(p.value), rest = v_set1(key_value(order_key(p.value) + 1));
  return (struct cut){{tied, v_select(m_of_bits((1u << (p.end - at)) - 1u), tied, rest), rest}, at};
}

INLINE vm is_kept(const struct cut *c, size_t i, vf v) { return v_ge(v, c->bound[(i >= c->at) + (i > c->at)]); }

/* Needs the maxima. */
static struct prefix first_in_row(const struct filtered *f, size_t k) {
  if (f->force_exact || k > f->row.blocks) {
    return select_count(f->x, f->row.n, k, f->scratch);
  }
  char *scratch = f->scratch;
  const struct list first = first_of(&f->row, k, &scratch);
  return last_of(&first);
}

/* min_keep of them. */
static struct prefix at_least(const struct filtered *f, struct prefix kept) {
  if (f->p->min_keep <= 1) {
    return kept;
  }
  struct prefix least = first_in_row(f, min_size((size_t)f->p->min_keep, f->row.n));
  return is_longer(least, kept) ? least : kept;
}

static struct prefix kept_by_top_k(const struct filtered *f) {
  size_t k = top_k_of(f->p, f->row.n);
  return k ? first_in_row(f, k) : everything;
}

static struct prefix kept_by_min_p(const struct filtered *f, double temperature) {
  if (f->p->min_p <= 0.0) {
    return everything;
  }
  return at_least(f, (struct prefix){min_p_bound(f->p->min_p, f->row.max, temperature), f->row.n});
}

/* ---- mass ---- */

/* What an entry weighs: round(2^43 * term), the term exp((z - max) * inverse) of a logit, p / max of a probability. */
struct measure {
  float max, inverse; /* inverse 0: of probabilities */
};

/* 0 of -inf, which is what lies beyond a row. */
INLINE vf term_of(vf v, struct measure m, int of_logits) {
  const vf max = v_set1(m.max);
  return of_logits ? v_exp(v_mul(v_sub(v, max), v_set1(m.inverse))) : v_div(v_max(v, v_set1(0.0f)), max);
}

INLINE uint64_t mass_as(const float *x, size_t n, struct measure m, struct prefix kept, int of_logits) {
  const struct cut cut = cut_of(kept);
  vw acc = w_zero();
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? v_load(x + i) : v_load_n(x + i, n - i, -INFINITY);
    vm which = is_kept(&cut, i, v);
    if (m_bits(which)) {
      acc = w_add(acc, v_keep(which, term_of(v, m, of_logits)));
    }
  }
  return w_total(acc);
}
static uint64_t mass_of(const float *x, size_t n, struct measure m, struct prefix kept) {
  return m.inverse > 0.0f ? mass_as(x, n, m, kept, 1) : mass_as(x, n, m, kept, 0);
}

/* Of what weighs anything at all: -inf does not count. */
static void extremes(const float *x, size_t n, float *least, float *most) {
  const vf nothing = v_set1(-INFINITY);
  vf low = v_set1(INFINITY), high = nothing;
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? v_load(x + i) : v_load_n(x + i, n - i, -INFINITY);
    low = v_select(v_eq(v, nothing), low, v_min(v, low));
    high = v_max(v, high);
  }
  *least = -v_max_across(v_sub(v_set1(0.0f), low));
  *most = v_max_across(high);
}

/* What reaches the bound, or what does not, into `to`, which may be x: stores never pass what has been read. */
static size_t pick_side(float *to, const float *x, size_t n, float bound, int reaching) {
  const vf t = v_set1(bound);
  size_t count = 0;
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? v_load(x + i) : v_load_n(x + i, n - i, NAN);
    count += v_compress(to + count, v, reaching ? v_ge(v, t) : v_gt(t, v));
  }
  return count;
}

static size_t nth_equal(const float *x, size_t n, float value, uint64_t nth) {
  float equals[LANES];
  for (size_t i = 0;; i += LANES) {
    vf v = n - i >= LANES ? v_load(x + i) : v_load_n(x + i, n - i, NAN);
    vm equal = v_eq(v, v_set1(value));
    size_t count = v_compress(equals, v, equal);
    if (nth <= count) {
      unsigned hits = m_bits(equal);
      while (--nth) {
        hits &= hits - 1;
      }
      return i + (size_t)__builtin_ctz(hits);
    }
    nth -= count;
  }
}

enum { HALVINGS = 8 };

/* least < the result <= most. Logits are halved by value, as their weights are spread; probabilities, and logits that
   this does not get on with, by their ordered bits. */
static float between(float least, float most, int by_value) {
  float middle = least + (most - least) * 0.5f;
  uint32_t low = order_key(least), high = order_key(most);
  return by_value && middle > least && middle <= most ? middle : key_value(low + (high - low + 1) / 2);
}

/* The entry with which the running weight reaches limit, sought in what is left of a row. */
struct search {
  float *left; /* count entries */
  size_t count;
  uint64_t above; /* the weight of what is before all of them */
  uint64_t total; /* of the row */
};

enum { SAMPLES = 128, SLACK = 12 }; /* ranks: a quantile of so many is seldom two deviations, 2 * 5.7, off */

/* Bounds between which, by the look of a few entries, the share top_p is reached. */
static void guess_bounds(const float *x, size_t n, struct measure m, double top_p, char *scratch, float *low,
                         float *high) {
  struct list some = list_in(&scratch, SAMPLES), spare = list_in(&scratch, SAMPLES);
  uint64_t w[SAMPLES], total = 0, running = 0;
  size_t rank = 0;
  *low = -FLT_MAX;
  *high = INFINITY;
  if (n < 8 * SAMPLES) {
    return;
  }
  for (; some.count < SAMPLES; some.count++) {
    some.value[some.count] = x[n / SAMPLES * some.count];
  }
  sort_list(&some, &spare);
  for (size_t i = 0; i < SAMPLES; i += LANES) {
    w_store(w + i, term_of(v_load(some.value + i), m, m.inverse > 0.0f));
  }
  for (size_t i = 0; i < SAMPLES; i++) {
    total += w[i];
  }
  for (uint64_t limit = top_p_limit(top_p, total); rank < SAMPLES - 1 && running + w[rank] < limit; rank++) {
    running += w[rank];
  }
  if (rank >= SLACK) {
    *high = some.value[rank - SLACK];
  }
  if (rank + SLACK < SAMPLES && some.value[rank + SLACK] > -FLT_MAX) {
    *low = some.value[rank + SLACK];
  }
}

/* One read of the row: what it weighs, what reaches high weighs, and what is between the bounds. */
INLINE void split_mass_as(struct search *s, const float *x, size_t n, struct measure m, float low, float high,
                          int of_logits) {
  const vf bottom = v_set1(low), top = v_set1(high);
  vw total = w_zero(), above = w_zero();
  s->count = 0;
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? v_load(x + i) : v_load_n(x + i, n - i, -INFINITY), term = term_of(v, m, of_logits);
    vm over = v_ge(v, top);
    total = w_add(total, term);
    above = w_add(above, v_keep(over, term));
    s->count += v_compress(s->left + s->count, v, m_and(v_ge(v, bottom), v_gt(top, v)));
  }
  s->total = w_total(total);
  s->above = w_total(above);
}
static void split_mass(struct search *s, const float *x, size_t n, struct measure m, float low, float high) {
  if (m.inverse > 0.0f) {
    split_mass_as(s, x, n, m, low, high, 1);
  } else {
    split_mass_as(s, x, n, m, low, high, 0);
  }
}

/* Bisects between the extremes of what is left, so that something goes in every round, and HALVINGS + 32 rounds are the
   most, whatever the values. */
static float bisect(struct search *s, struct measure m, uint64_t limit) {
  float least, most;
  int round = m.inverse > 0.0f ? 0 : HALVINGS;
  for (extremes(s->left, s->count, &least, &most); least < most; extremes(s->left, s->count, &least, &most)) {
    float middle = between(least, most, round++ < HALVINGS);
    uint64_t mass = s->above + mass_of(s->left, s->count, m, (struct prefix){middle, s->count});
    int reached = mass >= limit;
    s->count = pick_side(s->left, s->left, s->count, middle, reached);
    s->above = reached ? s->above : mass;
  }
  return least;
}

/* The prefix with whose last entry the running weight reaches top_p of the row's: guessed bounds, exact masses on both
   sides of them, and a bisection of the part in which it is. */
static struct prefix kept_by_mass(const struct filtered *f, struct measure m) {
  const float *x = f->x;
  size_t n = f->row.n;
  char *scratch = f->scratch;
  struct search s = {.left = list_in(&scratch, n).value};
  float low, high;
  guess_bounds(x, n, m, f->p->top_p, scratch, &low, &high);
  split_mass(&s, x, n, m, low, high);
  uint64_t limit = top_p_limit(f->p->top_p, s.total), between = mass_of(s.left, s.count, m, everything);
  if (s.above >= limit) {
    s.above = 0;
    s.count = pick_side(s.left, x, n, high, 1);
  } else if (s.above + between < limit) {
    s.above += between;
    s.count = pick_side(s.left, x, n, low, 0);
  }
  float value = bisect(&s, m, limit);
  uint64_t w = mass_of(&value, 1, m, everything);
  return (struct prefix){value, nth_equal(x, n, value, (limit - s.above + w - 1) / w) + 1};
}

/* ---- masks ---- */

/* x where z, which is x or x with -inf where something else has judged it, is kept; else -inf. */
static void put_kept(float *out, const float *x, const float *z, size_t n, struct prefix kept) {
  const struct cut cut = cut_of(kept);
  const vf rest = v_set1(-INFINITY);
  size_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    v_store(out + i, v_select(is_kept(&cut, i, v_load(z + i)), v_load(x + i), rest));
  }
  if (i < n) {
    vm which = is_kept(&cut, i, v_load_n(z + i, n - i, 0.0f));
    v_store_n(out + i, n - i, v_select(which, v_load_n(x + i, n - i, 0.0f), rest));
  }
}

static struct prefix kept_by_top_p(const struct filtered *f, float inverse) {
  struct prefix kept = kept_by_mass(f, (struct measure){f->row.max, inverse});
  kept.end = f->ties_all ? f->row.n : kept.end;
  return at_least(f, kept);
}

/* The same by the step of sample. */
static void put_nucleus(const struct filtered *f, double temperature) {
  size_t n = f->row.n;
  char *scratch = f->scratch;
  struct row_state s = {.n = n, .maxima = f->row.maxima, .max = f->row.max, .force_exact = f->force_exact};
  s.z = (float *)take(&scratch, (n + BLOCK) * sizeof *s.z);
  s.scratch = scratch;
  s.temperature = temperature;
  s.inverse = (float)(1.0 / temperature);
  write_out(s.z, f->x, n, DTYPE_F32);
  truncate_top_p(&s, f->p, f->ties_all);
  put_kept(f->out, f->x, s.z, n, everything);
}

static int64_t mask_row(const struct filter_args *a, int64_t row, char *scratch, int step) {
  struct filtered f = open_row(a, row, scratch);
  double temperature = f.p->temperature > 1e30 ? 1e30 : f.p->temperature;
  int has_nan = 0;
  find_maxima(&f.row, &has_nan);
  f.row.max = block_max(f.row.maxima, 0, f.row.blocks, DTYPE_F32, &has_nan);
  if (has_nan || f.row.max == -INFINITY || f.row.max == INFINITY) {
    return mark_invalid(&f);
  }
  struct prefix kept = everything;
  if (temperature < 1e-30) {
    kept = (struct prefix){f.row.max, first_equal(f.x, f.row.n, DTYPE_F32, f.row.max) + 1};
  } else if (step == STEP_TOP_K) {
    kept = kept_by_top_k(&f);
    kept.end = f.ties_all ? f.row.n : kept.end;
  } else if (step == STEP_MIN_P) {
    kept = kept_by_min_p(&f, temperature);
  } else if (f.p->top_p < 1.0 && f.force_exact) {
    put_nucleus(&f, temperature);
    return 0;
  } else if (f.p->top_p < 1.0) {
    kept = kept_by_top_p(&f, (float)(1.0 / temperature));
  }
  put_kept(f.out, f.x, f.x, f.row.n, kept);
  return 0;
}

static void mask_rows(const struct filter_args *a, void *scratch, int step) {
  FOR_ROWS (r, a) {
    ((int64_t *)a->status.ptr)[r] = mask_row(a, r, scratch, step);
  }
}
static void top_k_mask(const struct filter_args *a, void *scratch) { mask_rows(a, scratch, STEP_TOP_K); }
static void top_p_mask(const struct filter_args *a, void *scratch) { mask_rows(a, scratch, STEP_TOP_P); }
static void min_p_mask(const struct filter_args *a, void *scratch) { mask_rows(a, scratch, STEP_MIN_P); }

/* ---- renorms ---- */

/* The largest; 0 unless all are probabilities, one of them above 0. */
static float largest_probability(const float *x, size_t n) {
  const vf zero = v_set1(0.0f);
  vm proper = m_of_bits(0xffffu);
  vf most = zero;
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? v_load(x + i) : v_load_n(x + i, n - i, 0.0f);
    proper = m_and(proper, v_ge(v, zero));
    most = v_max(v, most);
  }
  float max = v_max_across(most);
  return m_bits(proper) == 0xffffu && max < INFINITY ? max : 0.0f;
}

static void put_renormed(const struct filtered *f, struct prefix kept) {
  size_t n = f->row.n;
  const struct cut cut = cut_of(kept);
  const vf most = v_set1(f->row.max);
  const vf factor = v_set1((float)(0x1p43 / (double)mass_of(f->x, n, (struct measure){f->row.max, 0.0f}, kept)));
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? v_load(f->x + i) : v_load_n(f->x + i, n - i, 0.0f), out = v_set1(0.0f);
    vm which = is_kept(&cut, i, v);
    if (m_bits(which)) {
      out = v_keep(which, v_mul(v_div(v, most), factor));
    }
    store_upto(f->out, i, n, out);
  }
}

static int64_t renorm_row(const struct filter_args *a, int64_t row, char *scratch, int step) {
  struct filtered f = open_row(a, row, scratch);
  int has_nan = 0; /* told by the largest already */
  struct prefix kept;
  f.row.max = largest_probability(f.x, f.row.n);
  if (f.row.max == 0.0f) {
    return mark_invalid(&f);
  }
  if (step == STEP_TOP_K) {
    find_maxima(&f.row, &has_nan);
    kept = kept_by_top_k(&f);
  } else {
    kept = f.p->top_p < 1.0 ? kept_by_mass(&f, (struct measure){f.row.max, 0.0f}) : everything;
  }
  kept.end = f.ties_all ? f.row.n : kept.end;
  put_renormed(&f, kept);
  return 0;
}

static void renorm_rows(const struct filter_args *a, void *scratch, int step) {
  FOR_ROWS (r, a) {
    ((int64_t *)a->status.ptr)[r] = renorm_row(a, r, scratch, step);
  }
}
static void top_k_renorm(const struct filter_args *a, void *scratch) { renorm_rows(a, scratch, STEP_TOP_K); }
static void top_p_renorm(const struct filter_args *a, void *scratch) { renorm_rows(a, scratch, STEP_TOP_P); }
