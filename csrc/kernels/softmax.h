/* softmax and its kin: one read of the row in blocks of 4,096, each block against the running maximum.

   A block's terms are e = exp((x - ref) / T), ref the largest logit up to and with that block; its sum runs in 64
   float32 lanes, the blocks are joined in float64 (Milakov & Gimelshein 2018, by blocks). softmax stores e and scales
   it afterwards, so each logit is read once, from memory into the cache. NaN rows follow IEEE: all NaN. */

enum { SUM_BLOCK = 4096 };

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

/* Sum of exp((x - reference) * inverse) over x[i..end); stores the terms unless out is NULL. */
INLINE float block_exp_sum(const void *x, size_t i, size_t end, int dtype, float reference, float inverse, float *out) {
  vf acc[4] = {v_set1(0), v_set1(0), v_set1(0), v_set1(0)}, v[4];
  const vf ref = v_set1(reference), inv = v_set1(inverse);
  for (; i + 64 <= end; i += 64) {
    for (size_t j = 0; j < 4; j++) {
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

INLINE struct row_sum sum_row(const void *x, size_t n, int dtype, float inverse, float *out, struct block_sum *blocks) {
  struct row_sum row = {-INFINITY, 0.0, 0};
  size_t count = 0;
  for (size_t i = 0; i < n; i += SUM_BLOCK, count++) {
    size_t end = min_size(i + SUM_BLOCK, n);
    float m = block_max(x, i, end, dtype, &row.has_nan);
    row.max = m > row.max ? m : row.max;
    /* with nothing but -inf so far, any finite reference makes every term 0 */
    float reference = row.max == -INFINITY ? 0.0f : row.max;
    float sum = inverse == 1.0f ? block_exp_sum(x, i, end, dtype, reference, 1.0f, out) /* a product less */
                                : block_exp_sum(x, i, end, dtype, reference, inverse, out);
    blocks[count] = (struct block_sum){row.max, sum};
  }
  for (size_t b = 0; b < count; b++) {
    row.total += (double)blocks[b].sum * block_factor(blocks[b].reference, row.max, inverse);
  }
  return row;
}

/* The same where no terms are kept: one copy a dtype for all that want sums alone. */
static struct row_sum sum_alone(const void *x, size_t n, int dtype, float inverse, struct block_sum *blocks) {
  switch (dtype) {
  case DTYPE_F32:
    return sum_row(x, n, DTYPE_F32, inverse, NULL, blocks);
  case DTYPE_F16:
    return sum_row(x, n, DTYPE_F16, inverse, NULL, blocks);
  default:
    return sum_row(x, n, DTYPE_BF16, inverse, NULL, blocks);
  }
}

/* The limit of T to 0: all mass on the first maximum. */
INLINE void greedy_row(const void *x, float *out, size_t n, int dtype, float chosen, float rest) {
  int has_nan = 0;
  float m = block_max(x, 0, n, dtype, &has_nan);
  if (has_nan || m == -INFINITY || m == INFINITY) {
    fill(out, n, v_max_across(QUIET_NAN));
    return;
  }
  size_t best = first_equal(x, n, dtype, m);
  fill(out, n, rest);
  out[best] = chosen;
}

INLINE void softmax_rows(const struct row_args *a, void *scratch, int dtype) {
  struct block_sum *blocks = scratch;
  size_t n = (size_t)a->cols;
  FOR_ROWS (r, a) {
    const void *x = row_of(a->x.ptr, a->x_stride, r);
    float *out = (float *)((char *)a->out.ptr + a->out_stride * r);
    int greedy;
    float inverse = inverse_temperature(a, r, &greedy);
    if (greedy) {
      greedy_row(x, out, n, dtype, 1.0f, 0.0f);
      continue;
    }
    struct row_sum row = sum_row(x, n, dtype, inverse, out, blocks);
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

INLINE void log_softmax_rows(const struct row_args *a, void *scratch, int dtype) {
  size_t n = (size_t)a->cols;
  FOR_ROWS (r, a) {
    const void *x = row_of(a->x.ptr, a->x_stride, r);
    float *out = (float *)((char *)a->out.ptr + a->out_stride * r);
    int greedy;
    float inverse = inverse_temperature(a, r, &greedy);
    if (greedy) {
      greedy_row(x, out, n, dtype, 0.0f, -INFINITY);
      continue;
    }
    struct row_sum row = sum_alone(x, n, dtype, inverse, scratch);
    if (row.has_nan || row.max == -INFINITY || row.max == INFINITY) {
      fill(out, n, v_max_across(QUIET_NAN));
      continue;
    }
    const vf max = v_set1(row.max), inv = v_set1(inverse), log_total = v_set1((float)log64_1(row.total));
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
      v_store(out + i, v_sub(v_mul(v_sub(row_load(x, i, dtype), max), inv), log_total));
    }
    if (i < n) {
      v_store_n(out + i, n - i, v_sub(v_mul(v_sub(row_load_n(x, i, n - i, dtype, 0.0f), max), inv), log_total));
    }
  }
}

static void logsumexp(const struct row_args *a, void *scratch) {
  FOR_ROWS (r, a) {
    float *out = (float *)((char *)a->out.ptr + a->out_stride * r);
    int greedy;
    float inverse = inverse_temperature(a, r, &greedy);
    const void *x = row_of(a->x.ptr, a->x_stride, r);
    struct row_sum row = sum_alone(x, (size_t)a->cols, (int)a->dtype, inverse, scratch);
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
    struct row_sum row = sum_alone(x, (size_t)a->cols, (int)a->dtype, 1.0f, scratch);
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

static void softmax(const struct row_args *a, void *scratch) { FOR_DTYPE(softmax_rows, a, scratch) }
static void log_softmax(const struct row_args *a, void *scratch) { FOR_DTYPE(log_softmax_rows, a, scratch) }
static void scale(const struct row_args *a, void *scratch) { FOR_DTYPE(scale_rows, a, scratch) }
