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

/* Needs the maxima. */
static struct prefix first_in_row(const struct filtered *f, size_t k) {
  if (f->force_exact) {
    return select_count(f->x, f->row.n, k, f->scratch);
  }
  return first_prefix(&f->row, k, f->scratch);
}

/* min_keep of them. */
static struct prefix at_least(const struct filtered *f, struct prefix kept) {
  if (f->p->min_keep <= 1) {
    return kept;
  }
  return longer(kept, first_in_row(f, min_size((size_t)f->p->min_keep, f->row.n)));
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

/* ---- masks ---- */

/* x where it is kept, else -inf. */
static void put_kept(float *out, const float *x, size_t n, struct prefix kept) {
  const struct cut cut = cut_of(kept);
  const vf rest = v_set1(-INFINITY);
  size_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    v_store(out + i, v_select(is_kept(&cut, i, v_load(x + i)), v_load(x + i), rest));
  }
  if (i < n) {
    vm which = is_kept(&cut, i, v_load_n(x + i, n - i, 0.0f));
    v_store_n(out + i, n - i, v_select(which, v_load_n(x + i, n - i, 0.0f), rest));
  }
}

static struct prefix kept_by_top_p(const struct filtered *f, float inverse) {
  struct nucleus nucleus = whole_nucleus(&f->row, inverse, f->p->top_p);
  struct weighed kept;
  if (f->force_exact) {
    const struct weighing mass = {1, f->row.max, inverse, f->p->top_p};
    kept.prefix = select_weight(f->x, f->row.n, 1, &mass, f->scratch);
  } else if (!ends_early(&nucleus, &kept, f->scratch)) {
    kept = kept_by_mass(f->x, f->row.n, (struct measure){f->row.max, inverse}, f->p->top_p, f->scratch);
  }
  kept.prefix.end = f->ties_all ? f->row.n : kept.prefix.end;
  return at_least(f, kept.prefix);
}

static int64_t mask_row(const struct filter_args *a, int64_t row, char *scratch, int step) {
  struct filtered f = open_row(a, row, scratch);
  double temperature = at_most_1e30(f.p->temperature);
  int has_nan = 0;
  find_maxima(&f.row, &has_nan);
  f.row.max = block_max(f.row.maxima, 0, f.row.blocks, DTYPE_F32, &has_nan);
  if (has_nan || f.row.max == -INFINITY || f.row.max == INFINITY) {
    return mark_invalid(&f);
  }
  struct prefix kept = everything;
  if (is_greedy(temperature)) {
    kept = (struct prefix){f.row.max, first_equal(f.x, f.row.n, DTYPE_F32, f.row.max) + 1};
  } else if (step == STEP_TOP_K) {
    kept = kept_by_top_k(&f);
    kept.end = f.ties_all ? f.row.n : kept.end;
  } else if (step == STEP_MIN_P) {
    kept = kept_by_min_p(&f, temperature);
  } else if (f.p->top_p < 1.0) {
    kept = kept_by_top_p(&f, (float)(1.0 / temperature));
  }
  put_kept(f.out, f.x, f.row.n, kept);
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
    kept = f.p->top_p < 1.0
               ? kept_by_mass(f.x, f.row.n, (struct measure){f.row.max, 0.0f}, f.p->top_p, f.scratch).prefix
               : everything;
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
