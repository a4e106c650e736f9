/* What every family does with a row: its temperature, its maximum, filling it, finding a value in it. */

INLINE int is_greedy(double temperature) { return temperature < 1e-30; }
INLINE double at_most_1e30(double temperature) { return temperature > 1e30 ? 1e30 : temperature; }

/* The largest of x[i..end), NaNs left out but noticed. */
INLINE float block_max(const void *x, size_t i, size_t end, int dtype, int *has_nan) {
  const float lowest = -INFINITY;
  vf acc[4] = {v_set1(lowest), v_set1(lowest), v_set1(lowest), v_set1(lowest)}, v[4];
  vm nan = m_of_bits(0);
  for (; i + 64 <= end; i += 64) {
    for (size_t j = 0; j < 4; j++) {
      v[j] = row_load(x, i + LANES * j, dtype);
      acc[j] = v_max(v[j], acc[j]);
    }
    nan = m_or(nan, m_or(v_unord(v[0], v[1]), v_unord(v[2], v[3])));
  }
  if (i < end) {
    row_load64(v, x, i, end, dtype, lowest);
    for (size_t j = 0; j < 4; j++) {
      acc[j] = v_max(v[j], acc[j]);
    }
    nan = m_or(nan, m_or(v_unord(v[0], v[1]), v_unord(v[2], v[3])));
  }
  *has_nan |= m_bits(nan) != 0;
  return max_across64(acc);
}

enum { BLOCK = 64 };

/* Lanes in which one of four vectors has a NaN or, in a row of probabilities, what is below 0. */
INLINE vm unfit(const vf v[4], int probs) {
  vm nan = m_or(v_unord(v[0], v[1]), v_unord(v[2], v[3]));
  vf least = v_min(v_min(v[0], v[2]), v_min(v[1], v[3]));
  return probs ? m_or(nan, v_gt(v_set1(0.0f), least)) : nan;
}

/* max of every block of 64; the last vector of maxima is padded with NaN, which reaches no bound */
INLINE void maxima_of(float *maxima, const void *x, size_t n, int dtype, int probs, int *has_unfit) {
  const float beyond = probs ? 0.0f : -INFINITY;
  vm bad = m_of_bits(0);
  size_t blocks = (n + BLOCK - 1) / BLOCK, b = 0;
  for (; (b + LANES) * BLOCK <= n; b += LANES) {
    vf row[LANES];
#pragma GCC unroll 16 /* else each row goes through memory on its way to v_max_rows */
    for (size_t i = 0; i < LANES; i++) {
      vf v[4];
      for (size_t j = 0; j < 4; j++) {
        v[j] = row_load(x, (b + i) * BLOCK + j * LANES, dtype);
      }
      bad = m_or(bad, unfit(v, probs));
      row[i] = v_max(v_max(v[0], v[2]), v_max(v[1], v[3]));
    }
    v_store(maxima + b, v_max_rows(row));
  }
  for (; b < blocks; b++) {
    vf v[4];
    row_load64(v, x, b * BLOCK, n, dtype, beyond);
    bad = m_or(bad, unfit(v, probs));
    maxima[b] = max_across64(v);
  }
  v_store_n(maxima + blocks, (LANES - blocks % LANES) % LANES, v_set1(NAN));
  *has_unfit |= m_bits(bad) != 0;
}
INLINE void block_maxima(float *maxima, const void *x, size_t n, int dtype, int *has_nan) {
  maxima_of(maxima, x, n, dtype, 0, has_nan);
}

INLINE void fill(float *out, size_t n, float value) {
  for (size_t i = 0; i < n; i += LANES) {
    store_upto(out, i, n, v_set1(value));
  }
}

INLINE size_t first_equal(const void *x, size_t n, int dtype, float value) {
  for (size_t i = 0; i < n; i += LANES) {
    vf v = n - i >= LANES ? row_load(x, i, dtype) : row_load_n(x, i, n - i, dtype, NAN);
    unsigned hit = m_bits(v_eq(v, v_set1(value)));
    if (hit) {
      return i + (size_t)__builtin_ctz(hit);
    }
  }
  return n;
}
