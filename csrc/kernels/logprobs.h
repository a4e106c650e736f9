/* logprobs: log softmax at the chosen, the given and the n likeliest ids; the rank of the chosen; the entropy.

   One read, in blocks of 4,096, gives the maxima of blocks of 64 and the sum that log_softmax has, in its order, so
   what comes out is an element of log_softmax to the bit: y - log(total), y = (z - max) / T. The maxima then lead to
   the blocks that hold the top n, and to those that hold anything above the chosen. Entropy is log(total) - sum(e y) /
   total, e = exp(y): neither term is negative, so nothing cancels, and e y is 0 where e is.

   A row with a NaN or +inf, or nothing but -inf, has no probabilities: values are NaN, ids -1, the rank 0. At T = 0 the
   first maximum is certain; order and rank are those of the logits at every T. */

struct block_sums {
  float reference, sum, weighted; /* of e and of e y, y against the reference */
};

struct law {
  float inverse; /* 1 / T */
  int greedy, with_entropy;
  float bound;   /* how many logits exceed it is counted */
  int64_t above; /* that number; the rest is found with it */
  float max, log_total, entropy;
  int64_t certain;    /* at T = 0 the one id, else -1 */
  int valid, nothing; /* nothing but -inf */
};

/* z's; ids below 0 stand for none */
static float logprob(const struct law *law, float z, int64_t id) {
  if (!law->valid || id < 0) {
    return v_max_across(QUIET_NAN);
  }
  if (law->certain >= 0) {
    return id == law->certain ? 0.0f : -INFINITY;
  }
  return (z - law->max) * law->inverse - law->log_total;
}

/* Both sums over n of z, the first block_exp_sum's term by term. */
static void sum_weighted(struct block_sums *s, const float *z, size_t n, float reference, float inverse) {
  vf sum[4] = {v_set1(0), v_set1(0), v_set1(0), v_set1(0)}, weighted[4], v[4];
  const vf ref = v_set1(reference), inv = v_set1(inverse), least = v_set1(-88.0f); /* e is 0 there */
  memcpy(weighted, sum, sizeof sum);
  for (size_t i = 0; i < n; i += 64) {
    row_load64(v, z, i, n, DTYPE_F32, -INFINITY);
    for (size_t j = 0; j < 4; j++) {
      vf y = v_mul(v_sub(v[j], ref), inv), e = v_exp(y);
      sum[j] = v_add(sum[j], e);
      weighted[j] = v_fma(e, v_max(y, least), weighted[j]);
    }
  }
  s->sum = sum_across64(sum);
  s->weighted = sum_across64(weighted);
}

/* max is the largest logit up to and with these n */
static struct block_sums sums_of(const float *z, size_t n, float max, float inverse, int with_entropy,
                                 const char *later) {
  struct block_sums s = {max, 0.0f, 0.0f};
  float reference = max == -INFINITY ? 0.0f : max; /* any finite one makes every term 0 */
  if (with_entropy) {
    sum_weighted(&s, z, n, reference, inverse);
  } else {
    s.sum = sum_exp(z, n, reference, inverse, later);
  }
  return s;
}

static void join_sums(struct law *law, const struct block_sums *sums, size_t count) {
  double total = 0.0, weighted = 0.0;
  for (size_t b = 0; b < count; b++) {
    double factor = block_factor(sums[b].reference, law->max, law->inverse), sum = (double)sums[b].sum;
    total += sum * factor;
    if (factor > 0.0) {
      double shift = ((double)sums[b].reference - (double)law->max) * (double)law->inverse;
      weighted += ((double)sums[b].weighted + shift * sum) * factor;
    }
  }
  double log_total = log64_1(total);
  law->log_total = (float)log_total;
  law->entropy = (float)(log_total - weighted / total);
}

/* How many of n exceed the bound; only blocks whose maximum does are read. */
static int64_t count_above(const float *z, size_t n, const float *maxima, float bound) {
  const vf least = v_set1(bound), one = v_of_bits(u_set1(1));
  vu count = u_set1(0);
  uint32_t lanes[LANES];
  int64_t sum = 0;
  for (size_t b = 0; b * BLOCK < n; b += LANES) {
    for (unsigned hits = m_bits(v_gt(v_load(maxima + b), least)); hits; hits &= hits - 1) {
      vf v[4];
      row_load64(v, z, (b + (size_t)__builtin_ctz(hits)) * BLOCK, n, DTYPE_F32, -INFINITY);
      for (size_t j = 0; j < 4; j++) {
        count = u_add(count, v_bits(v_keep(v_gt(v[j], least), one)));
      }
    }
  }
  u_store(lanes, count);
  for (size_t j = 0; j < LANES; j++) {
    sum += lanes[j];
  }
  return sum;
}

/* Finds the law of x, and the maxima of its blocks of 64; sums has room for an entry every SUM_BLOCK. */
static void find_law(struct law *law, const void *x, size_t n, int64_t dtype, float *maxima, struct block_sums *sums) {
  float room[SUM_BLOCK];
  size_t count = 0, best = 0;
  int has_nan = 0;
  law->max = -INFINITY;
  for (size_t i = 0; i < n; i += SUM_BLOCK, count++) {
    size_t end = min_size(i + SUM_BLOCK, n);
    const float *z = widened(x, i, end, dtype, room);
    float *own = maxima + i / BLOCK;
    block_maxima(own, z, end - i, DTYPE_F32, &has_nan);
    float m = block_max(own, 0, (end - i + BLOCK - 1) / BLOCK, DTYPE_F32, &has_nan);
    if (law->greedy && m > law->max) {
      best = i + first_equal(z, end - i, DTYPE_F32, m);
    }
    law->max = m > law->max ? m : law->max;
    if (!law->greedy) {
      sums[count] =
          sums_of(z, end - i, law->max, law->inverse, law->with_entropy, (const char *)x + end * dtype_size(dtype));
    }
    if (m > law->bound) { /* while the block is at hand */
      law->above += count_above(z, end - i, own, law->bound);
    }
  }
  law->valid = !has_nan && law->max > -INFINITY && law->max < INFINITY;
  law->nothing = !has_nan && law->max == -INFINITY;
  if (law->valid && law->greedy) {
    law->certain = (int64_t)best;
  } else if (law->valid) {
    join_sums(law, sums, count);
  }
}

INLINE void put_top(const struct logprobs_args *a, int64_t row, const void *x, int dtype, const struct law *law,
                    float *maxima, char *scratch) {
  size_t n = (size_t)a->cols, k = (size_t)a->top_n;
  float *logprobs = (float *)a->top_logprobs.ptr + row * a->top_n;
  int64_t *ids = (int64_t *)a->top_ids.ptr + row * a->top_n;
  if (!law->valid) {
    fill(logprobs, k, v_max_across(QUIET_NAN));
    memset(ids, 0xff, k * sizeof *ids); /* -1 */
    return;
  }
  const struct judged whole = plain_row(x, n, dtype, maxima);
  const struct list first =
      a->force_exact || n > COUNTABLE ? top_k_exact(x, n, dtype, k, scratch) : first_of(&whole, k, &scratch);
  for (size_t i = 0; i < k; i++) {
    int there = i < first.count; /* all are, but in a row that changes meanwhile */
    ids[i] = there ? (int64_t)first.id[i] : -1;
    logprobs[i] = logprob(law, there ? first.value[i] : 0.0f, ids[i]);
  }
}

INLINE void put_given(const struct logprobs_args *a, int64_t row, const void *x, int dtype, const struct law *law) {
  const int64_t *ids = (const int64_t *)a->ids.ptr + row * a->ids_step;
  float *given = (float *)a->given.ptr + row * a->ids_width;
  for (int64_t i = 0; i < a->ids_width; i++) {
    given[i] = logprob(law, row_at(x, ids[i] < 0 ? 0 : (size_t)ids[i], dtype), ids[i]);
  }
}

/* A row as it is scored: the user's own, or written out with its edits. */
struct scored {
  const struct logprobs_args *a;
  const void *x;
  int64_t row, dtype;
};

INLINE void score_row(const struct scored *s, void *scratch, int dtype) {
  const struct logprobs_args *a = s->a;
  size_t n = (size_t)a->cols;
  char *rest = scratch;
  float *maxima = (float *)take(&rest, (n / BLOCK + 2 * LANES) * sizeof *maxima);
  struct block_sums *sums = (struct block_sums *)take(&rest, (n / SUM_BLOCK + 1) * sizeof *sums);
  double temperature = ((const struct sample_params *)a->params.ptr)[s->row].temperature;
  int64_t token = a->tokens.ptr ? ((const int64_t *)a->tokens.ptr)[s->row] : -1;
  struct law law = {
      .inverse = (float)(1.0 / at_most_1e30(temperature)),
      .greedy = is_greedy(temperature),
      .with_entropy = a->entropy.ptr != NULL,
      .bound = token < 0 ? INFINITY : row_at(s->x, (size_t)token, dtype),
      .certain = -1,
  };
  find_law(&law, s->x, n, dtype, maxima, sums);
  if (a->tokens.ptr) {
    ((float *)a->chosen.ptr)[s->row] = logprob(&law, law.bound, token);
    ((int64_t *)a->rank.ptr)[s->row] = law.valid && token >= 0 ? law.above + 1 : 0;
  }
  if (a->top_n) {
    put_top(a, s->row, s->x, dtype, &law, maxima, rest);
  }
  if (a->given.ptr) {
    put_given(a, s->row, s->x, dtype, &law);
  }
  if (a->entropy.ptr) {
    ((float *)a->entropy.ptr)[s->row] = law.valid ? law.entropy : v_max_across(QUIET_NAN);
  }
}

static void logprobs(const struct logprobs_args *a, void *scratch) {
  const struct sample_args edits = {EDITS_OF(a), .params = a->params};
  size_t n = (size_t)a->cols;
  char *rest = scratch;
  float *z = (float *)take(&rest, (n + BLOCK) * sizeof *z);
  uint32_t *counts = (uint32_t *)take(&rest, n * sizeof *counts);
  FOR_ROWS (r, a) {
    struct scored s = {a, row_of(a->x.ptr, a->x_stride, r), r, a->dtype};
    if (a->bias_values.ptr || a->prompt_ids.ptr || a->output_ids.ptr || a->mask_kind != MASK_NONE) {
      write_edited(z, counts, &edits, r);
      s.x = z;
      s.dtype = DTYPE_F32;
    }
    FOR_DTYPE(score_row, &s, rest)
  }
}
