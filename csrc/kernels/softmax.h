/* softmax and its kin: one read of the row in blocks of 4,096, each block against the running maximum.

   A block's terms are e = exp((x - ref) / T), ref the largest logit up to and with that block; its sum runs in 64
   float32 lanes, the blocks are joined in float64 (Milakov & Gimelshein 2018, by blocks). softmax stores e and scales
   it afterwards, so each logit is read once, from memory into the cache. NaN rows follow IEEE: all NaN. */

struct block_sum {
  float reference, sum;
};

struct row_sum {
  float max;
  double total; /* sum of exp((x - max) / T) */
  int has_nan;
};

INLINE float inverse_temperature(const struct row_args *a, int64_t row, int *greedy) {
  double t = ((const double *)a->temperature.ptr)[row * a->temperature_step];
  *greedy = is_greedy(t);
  return (float)(1.0 / at_most_1e30(t));
}

/* Sum of exp((x - reference) * inverse) over x[i..end); stores the terms unless out is NULL. Exponentials leave memory
   idle, so what is read next, which lies from `later` on, is asked for meanwhile. */
INLINE float block_exp_sum(const void *x, size_t i, size_t end, int dtype, float reference, float inverse, float *out,
                           const char *later) {
  vf acc[4] = {v_set1(0), v_set1(0), v_set1(0), v_set1(0)}, v[4];
  const vf ref = v_set1(reference), inv = v_set1(inverse);
  for (; i + 64 <= end; i += 64) {
    for (size_t j = 0; j < 4; j++, later += LANES * sizeof(float)) {
      prefetch(later);
      vf e = v_exp(v_mul(v_sub(row_load(x, i + LANES * j, dtype), ref), inv));
      if (out) {
        v_store(out + i + LANES * j, e);
      }
      acc[j] = v_add(acc[j], e);
    }
  }
  if (i < end) {
    row_load64(v, x, i, end, dtype, -INFINITY);
    for (size_t j = 0; j < 4; j++) {
      vf e = v_exp(v_mul(v_sub(v[j], ref), inv));
      if (out) {
        store_upto(out, i + LANES * j, end, e);
      }
      acc[j] = v_add(acc[j], e);
    }
  }
  return sum_across64(acc);
}

/* What a block's terms count for beside the row's maximum; nothing if all it saw was -inf. */
INLINE double block_factor(float reference, float max, float inverse) {
  return reference == -INFINITY ? 0.0 : exp64_1(((double)reference - (double)max) * (double)inverse);
}

/* One body of each for every caller: the exponential, four at a time, is long. */
static float sum_exp(const float *z, size_t n, float reference, float inverse, const char *later) {
  return inverse == 1.0f ? block_exp_sum(z, 0, n, DTYPE_F32, reference, 1.0f, NULL, later) /* a product less */
                         : block_exp_sum(z, 0, n, DTYPE_F32, reference, inverse, NULL, later);
}
static float put_exp(float *out, const float *z, size_t n, float reference, float inverse, const char *later) {
  return inverse == 1.0f ? block_exp_sum(z, 0, n, DTYPE_F32, reference, 1.0f, out, later)
                         : block_exp_sum(z, 0, n, DTYPE_F32, reference, inverse, out, later);
}

static struct row_sum sum_row(const void *x, size_t n, int64_t dtype, float inverse, float *out,
                              struct block_sum *blocks) {
  struct row_sum row = {-INFINITY, 0.0, 0};
  float room[SUM_BLOCK];
  size_t count = 0;
  for (size_t i = 0; i < n; i += SUM_BLOCK, count++) {
    size_t end = min_size(i + SUM_BLOCK, n);
    const float *z = widened(x, i, end, dtype, room);
    float m = block_max(z, 0, end - i, DTYPE_F32, &row.has_nan);
    row.max = m > row.max ? m : row.max;
    /* with nothing but -inf so far, any finite reference makes every term 0 */
    float reference = row.max == -INFINITY ? 0.0f : row.max;
    const char *later = (const char *)x + end * dtype_size(dtype);
    float sum =
        out ? put_exp(out + i, z, end - i, reference, inverse, later) : sum_exp(z, end - i, reference, inverse, later);
    blocks[count] = (struct block_sum){row.max, sum};
  }
  for (size_t b = 0; b < count; b++) {
    row.total += (double)blocks[b].sum * block_factor(blocks[b].reference, row.max, inverse);
  }
  return row;
}

/* The limit of T to 0: all mass on the first maximum. */
static void greedy_row(const void *x, float *out, size_t n, int64_t dtype, float chosen, float rest) {
  float room[SUM_BLOCK], max = -INFINITY;
  size_t best = 0;
  int has_nan = 0;
  for (size_t i = 0; i < n; i += SUM_BLOCK) {
    size_t end = min_size(i + SUM_BLOCK, n);
    const float *z = widened(x, i, end, dtype, room);
    float m = block_max(z, 0, end - i, DTYPE_F32, &has_nan);
    if (m > max) {
      max = m;
      best = i + first_equal(z, end - i, DTYPE_F32, m);
    }
  }
  if (has_nan || max == -INFINITY || max == INFINITY) {
    fill(out, n, v_max_across(QUIET_NAN));
    return;
  }
  fill(out, n, rest);
  out[best] = chosen;
}

static void softmax(const struct row_args *a, void *scratch) {
  struct block_sum *blocks = scratch;
  size_t n = (size_t)a->cols;
  FOR_ROWS (r, a) {
    const void *x = row_of(a->x.ptr, a->x_stride, r);
    float *out = (float *)((char *)a->out.ptr + a->out_stride * r);
    int greedy;
    float inverse = inverse_temperature(a, r, &greedy);
    if (greedy) {
      greedy_row(x, out, n, a->dtype, 1.0f, 0.0f);
      continue;
    }
    struct row_sum row = sum_row(x, n, a->dtype, inverse, out, blocks);
    if (row.has_nan || row.max == -INFINITY || row.max == INFINITY) {
      fill(out, n, v_max_across(QUIET_NAN));
      continue;
    }
    for (size_t b = 0, i = 0; i < n; b++) {
      size_t end = min_size(i + SUM_BLOCK, n);
      vf factor = v_set1((float)(block_factor(blocks[b].reference, row.max, inverse) / row.total));
      for (; i + LANES <= end; i += LANES) {
        v_store(out + i, v_mul(v_load(out + i), factor));
      }
      if (i < end) {
        v_store_n(out + i, end - i, v_mul(v_load_n(out + i, end - i, 0.0f), factor));
        i = end;
      }
    }
  }
}

/* The second read, by dtype: through room it takes a tenth longer. */
struct log_terms {
  float *out;
  const void *x;
  size_t n;
  int64_t dtype;
  float max, inverse, log_total;
};
INLINE void put_logs_as(const struct log_terms *t, void *scratch, int dtype) {
  (void)scratch;
  const vf max = v_set1(t->max), inv = v_set1(t->inverse), log_total = v_set1(t->log_total);
  size_t i = 0, n = t->n;
  for (; i + LANES <= n; i += LANES) {
    v_store(t->out + i, v_sub(v_mul(v_sub(row_load(t->x, i, dtype), max), inv), log_total));
  }
  if (i < n) {
    v_store_n(t->out + i, n - i, v_sub(v_mul(v_sub(row_load_n(t->x, i, n - i, dtype, 0.0f), max), inv), log_total));
  }
}

static void log_softmax(const struct row_args *a, void *scratch) {
  size_t n = (size_t)a->cols;
  FOR_ROWS (r, a) {
    const void *x = row_of(a->x.ptr, a->x_stride, r);
    float *out = (float *)((char *)a->out.ptr + a->out_stride * r);
    int greedy;
    float inverse = inverse_temperature(a, r, &greedy);
    if (greedy) {
      greedy_row(x, out, n, a->dtype, 0.0f, -INFINITY);
      continue;
    }
    struct row_sum row = sum_row(x, n, a->dtype, inverse, NULL, scratch);
    if (row.has_nan || row.max == -INFINITY || row.max == INFINITY) {
      fill(out, n, v_max_across(QUIET_NAN));
      continue;
    }
    const struct log_terms terms = {out, x, n, a->dtype, row.max, inverse, (float)log64_1(row.total)};
    FOR_DTYPE(put_logs_as, &terms, NULL)
  }
}

static void logsumexp(const struct row_args *a, void *scratch) {
  FOR_ROWS (r, a) {
    float *out = (float *)((char *)a->out.ptr + a->out_stride * r);
    int greedy;
    float inverse = inverse_temperature(a, r, &greedy);
    struct row_sum row = sum_row(row_of(a->x.ptr, a->x_stride, r), (size_t)a->cols, a->dtype, inverse, NULL, scratch);
    if (row.has_nan) {
      *out = v_max_across(QUIET_NAN);
    } else if (row.max == -INFINITY || row.max == INFINITY) {
      *out = row.max;
    } else {
      *out = (float)((double)row.max * (double)inverse + log64_1(row.total));
    }
  }
}

/* A row's maximum and its sum of exp(x - maximum), joined to those of what came before: when the maximum moves, the sum
   before is scaled down with it (Milakov & Gimelshein). +inf makes the sum NaN, a NaN both. */
static void softmax_stats(const struct stats_args *a, void *scratch) {
  FOR_ROWS (r, a) {
    float *m = (float *)a->m.ptr + r, before = *m;
    double *sum = (double *)a->sums.ptr + r;
    const void *x = row_of(a->x.ptr, a->x_stride, r);
    struct row_sum row = sum_row(x, (size_t)a->cols, a->dtype, 1.0f, NULL, scratch);
    if (row.has_nan || before != before) {
      *m = v_max_across(QUIET_NAN);
      *sum = (double)NAN;
      continue;
    }
    float top = row.max > before ? row.max : before;
    *m = top + 0.0f; /* -0 to 0 */
    if (top == INFINITY || (before > -INFINITY && *sum != *sum)) {
      *sum = (double)NAN;
    } else {
      double kept = before == -INFINITY ? 0.0 : *sum * block_factor(before, top, 1.0f);
      *sum = kept + (row.max == -INFINITY ? 0.0 : row.total * block_factor(row.max, top, 1.0f));
    }
  }
}

/* x / T, the division IEEE's */
INLINE void scale_rows(const struct row_args *a, void *scratch, int dtype) {
  (void)scratch;
  size_t n = (size_t)a->cols;
  FOR_ROWS (r, a) {
    const void *x = row_of(a->x.ptr, a->x_stride, r);
    float *out = (float *)((char *)a->out.ptr + a->out_stride * r);
    double t = ((const double *)a->temperature.ptr)[r * a->temperature_step];
    const vf divisor = v_set1((float)at_most_1e30(t));
    for (size_t i = 0; i < n; i += LANES) {
      vf v = n - i >= LANES ? row_load(x, i, dtype) : row_load_n(x, i, n - i, dtype, 0.0f);
      vf y = v_div(v, divisor);
      store_upto(out, i, n, v_select(v_unord(y, y), QUIET_NAN, y));
    }
  }
}

static void scale(const struct row_args *a, void *scratch) { FOR_DTYPE(scale_rows, a, scratch) }
