/* What every family does with a row: its temperature, its maximum, filling it, finding a value in it. */

INLINE int is_greedy(double temperature) { return temperature < 1e-30; }
INLINE double at_most_1e30(double temperature) { return temperature > 1e30 ? 1e30 : temperature; }

INLINE vn see_four(vn seen, const vf v[4]) { return n_see(n_see(seen, v[0], v[1]), v[2], v[3]); }

/* 64 elements from i on. */
INLINE void load_once(vf v[4], const void *x, size_t i, int dtype) {
  for (size_t j = 0; j < 4; j++) {
    v[j] = v_once(row_load(x, i + LANES * j, dtype));
  }
}

/* The largest of x[i..end), NaNs left out but noticed. */
INLINE float block_max(const void *x, size_t i, size_t end, int dtype, int *has_nan) {
  const float lowest = -INFINITY;
  vf acc[4] = {v_set1(lowest), v_set1(lowest), v_set1(lowest), v_set1(lowest)}, v[4];
  vn nan = n_none();
  for (; i + 64 <= end; i += 64) {
    load_once(v, x, i, dtype);
    for (size_t j = 0; j < 4; j++) {
      acc[j] = v_max(v[j], acc[j]);
    }
    nan = see_four(nan, v);
  }
  if (i < end) {
    row_load64(v, x, i, end, dtype, lowest);
    for (size_t j = 0; j < 4; j++) {
      acc[j] = v_max(v[j], acc[j]);
    }
    nan = see_four(nan, v);
  }
  *has_nan |= n_any(nan);
  return max_across64(acc);
}

enum { BLOCK = 64 };

/* What a row may not have in it: NaN; among probabilities, what is below 0. */
struct unfit {
  vn nan;
  vf least;
};
INLINE void watch(struct unfit *seen, const vf v[4], int probs) {
  seen->nan = see_four(seen->nan, v);
  if (probs) {
    seen->least = v_min(v_min(v_min(v[0], v[2]), v_min(v[1], v[3])), seen->least);
  }
}

INLINE vf max_of_four(const vf v[4]) { return v_max(v_max(v[0], v[2]), v_max(v[1], v[3])); }

/* max of every block of 64; the last vector of maxima is padded with NaN, which reaches no bound */
INLINE void maxima_of(float *maxima, const void *x, size_t n, int dtype, int probs, int *has_unfit) {
  struct unfit seen = {n_none(), v_set1(0.0f)};
  size_t blocks = (n + BLOCK - 1) / BLOCK, b = 0;
  for (; (b + ROWS) * BLOCK <= n; b += ROWS) {
    vf row[ROWS];
#pragma GCC unroll 16 /* else each row goes through memory on its way to v_max_rows */
    for (size_t i = 0; i < ROWS; i++) {
      vf v[4];
      load_once(v, x, (b + i) * BLOCK, dtype);
      watch(&seen, v, probs);
      row[i] = max_of_four(v);
    }
    v_max_rows(maxima + b, row);
  }
  for (; b < blocks; b++) {
    vf v[4];
    row_load64(v, x, b * BLOCK, n, dtype, probs ? 0.0f : -INFINITY);
    watch(&seen, v, probs);
    maxima[b] = max_across64(v);
  }
  v_store_n(maxima + blocks, (LANES - blocks % LANES) % LANES, v_set1(NAN));
  *has_unfit |= n_any(seen.nan) || m_bits(v_gt(v_set1(0.0f), seen.least));
}
INLINE void block_maxima(float *maxima, const void *x, size_t n, int dtype, int *has_nan) {
  maxima_of(maxima, x, n, dtype, 0, has_nan);
}

enum { SUM_BLOCK = 4096 };

/* The float32 of x[i..end), at most SUM_BLOCK of them: where they lie, or widened into room. What reads a row more than
   once is written for float32 alone, over these: a third of the code, and as fast, since each logit is widened once. */
struct widening {
  const void *x;
  size_t i, end;
  int64_t dtype;
  float *room;
};
INLINE void widen_as(const struct widening *w, void *scratch, int dtype) {
  (void)scratch;
  for (size_t i = w->i; i < w->end; i += LANES) {
    vf v = w->end - i >= LANES ? row_load(w->x, i, dtype) : row_load_n(w->x, i, w->end - i, dtype, 0.0f);
    v_store(w->room + (i - w->i), v);
  }
}
static const float *widened(const void *x, size_t i, size_t end, int64_t dtype, float room[SUM_BLOCK]) {
  if (dtype == DTYPE_F32) {
    return (const float *)x + i;
  }
  const struct widening args = {x, i, end, dtype, room};
  FOR_DTYPE(widen_as, &args, NULL)
  return room;
}

INLINE void fill(float *out, size_t n, float value) {
  for (size_t i = 0; i < n; i += LANES) {
    store_upto(out, i, n, v_set1(value));
  }
}

/* The last of all if there is none, which only a row that changes meanwhile can lack. */
INLINE size_t first_equal(const void *x, size_t n, int dtype, float value) {
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? row_load(x, i, dtype) : row_load_n(x, i, n - i, dtype, NAN);
    unsigned hit = m_bits(v_eq(v, v_set1(value)));
    if (hit) {
      return i + (size_t)__builtin_ctz(hit);
    }
  }
  return n - 1;
}
