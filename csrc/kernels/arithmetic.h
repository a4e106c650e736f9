/* The words of the arithmetic as kernels, so that Python can walk every value of them on every ISA. */

INLINE void exp_of_each(const struct row_args *a, int rough) {
  const float *x = a->x.ptr;
  float *out = a->out.ptr;
  size_t n = (size_t)a->cols;
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? v_load(x + i) : v_load_n(x + i, n - i, 0.0f);
    store_upto(out, i, n, rough ? v_exp_rough(v) : v_exp(v));
  }
}
static void exp32(const struct row_args *a, void *scratch) {
  (void)scratch;
  exp_of_each(a, 0);
}
static void exp_rough(const struct row_args *a, void *scratch) {
  (void)scratch;
  exp_of_each(a, 1);
}

static void log64(const struct row_args *a, void *scratch) {
  (void)scratch;
  const double *x = a->x.ptr;
  double *out = a->out.ptr;
  for (int64_t i = 0; i < a->cols; i++) {
    out[i] = log64_1(x[i]);
  }
}

INLINE void widen_row(const struct row_args *a, void *scratch, int dtype) {
  (void)scratch;
  float *out = a->out.ptr;
  size_t n = (size_t)a->cols;
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? row_load(a->x.ptr, i, dtype) : row_load_n(a->x.ptr, i, n - i, dtype, 0.0f);
    store_upto(out, i, n, v_select(v_unord(v, v), QUIET_NAN, v));
  }
}
static void widen(const struct row_args *a, void *scratch) { FOR_DTYPE(widen_row, a, scratch) }

/* out[i] = round(2^43 * x[i]) by w_store; the sum by w_add is appended at out[cols] */
static void weights(const struct row_args *a, void *scratch) {
  (void)scratch;
  const float *x = a->x.ptr;
  uint64_t *out = a->out.ptr, lanes[LANES];
  size_t n = (size_t)a->cols;
  vw total = w_zero();
  for (size_t i = 0; i < n; i += LANES) {
    size_t count = min_size(LANES, n - i);
    vf e = v_load_n(x + i, count, 0.0f);
    w_store(lanes, e);
    memcpy(out + i, lanes, count * sizeof *out);
    total = w_add(total, e);
  }
  out[n] = w_total(total);
}

/* The raw 64-bit draws of items first .. first + cols - 1 of a domain */
static void philox(const struct noise_args *a, void *scratch) {
  (void)scratch;
  const struct philox_key key = {a->seed, a->key, (uint32_t)a->step};
  uint64_t *out = a->out.ptr, r[32];
  for (int64_t i = 0; i < a->cols; i++) {
    int64_t item = a->first + i;
    if (i == 0 || item % 32 == 0) {
      random_bits32(r, (uint32_t)(item - item % 32), (uint32_t)a->domain, &key);
    }
    out[i] = r[item % 32];
  }
}
