/* The two products of attention, queries by keys and weights by values, for rows of keys or values wherever they lie.

   A dot product runs in eight lanes along head_dim and then across them, a weighted sum key by key: one order, however
   many rows or keys share a pass. Up to four rows share what is loaded of a key or a value. Rows are whole vectors. */

enum { FOUR = 4, SOME_KEYS = LANES };
/* Floats from a row of scores to the next: a power of two, and they would push each other out of the cache. */
enum { SCORES_ROW = ATTEND_CHUNK + LANES };

typedef const char *bytes;

/* ---- the two products ---- */

INLINE vf load_pair(bytes a, bytes b, size_t d, int dtype) {
  switch (dtype) {
  case DTYPE_F32:
    return v_pair((const float *)a + d, (const float *)b + d);
  case DTYPE_F16:
    return v_pair_f16((const uint16_t *)a + d, (const uint16_t *)b + d);
  case DTYPE_BF16:
    return v_pair_bf16((const uint16_t *)a + d, (const uint16_t *)b + d);
  default:
    return v_pair_i8((const int8_t *)a + d, (const int8_t *)b + d);
  }
}

INLINE vf load_any(bytes p, size_t d, int dtype) {
  return dtype == DTYPE_I8 ? v_load_i8((const int8_t *)p + d) : row_load(p, d, dtype);
}

/* Rows are asked for KEYS_AHEAD keys before they are wanted, and into the second level of the caches: in the first,
   what waits for memory takes the place of what is being read (Zen 4, 2026-11-30: float32 from memory takes 2.4 times
   as long). A line at a time, between the products: many at once would wait for one another. */
enum { KEYS_AHEAD = 32 };

/* Dot products of `rows` rows of q with 2 * pairs keys: t[key][row of four]. Asks for the keys `ahead`, if any. */
INLINE void some_dots(float *t, const bytes *keys, const bytes *ahead, const float *q, size_t dim, int dtype, int rows,
                      int pairs) {
  const size_t size = (size_t)size_of_element(dtype);
  vf acc[HELD];
#pragma GCC unroll 16
  for (int i = 0; i < (pairs * rows + 3) / 4 * 4; i++) {
    acc[i] = v_set1(0.0f);
  }
  for (size_t d = 0; d < dim; d += 8) {
    for (int i = 0; ahead && d * size % 64 == 0 && i < 2 * pairs; i++) {
      prefetch_far(ahead[i] + d * size);
    }
    vf k[4];
#pragma GCC unroll 4
    for (int p = 0; p < pairs; p++) {
      k[p] = load_pair(keys[2 * p], keys[2 * p + 1], d, dtype);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
      vf x = v_twice(q + (size_t)r * dim + d);
#pragma GCC unroll 4
      for (int p = 0; p < pairs; p++) {
        acc[p * rows + r] = v_fma(x, k[p], acc[p * rows + r]);
      }
    }
  }
  if (rows >= 3) {
#pragma GCC unroll 4
    for (int p = 0; p < pairs; p++) {
      const vf *of = acc + p * rows, four[FOUR] = {of[0], of[1], of[2], rows == FOUR ? of[3] : v_set1(0.0f)};
      v_sum_eights(t + 2 * p * FOUR, four);
    }
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < pairs * rows; i += 4) {
    float sums[8];
    v_sum_eights(sums, acc + i);
#pragma GCC unroll 4
    for (int j = i; j < i + 4; j++) {
      if (j < pairs * rows) {
        t[2 * (j / rows) * FOUR + j % rows] = sums[j - i];
        t[(2 * (j / rows) + 1) * FOUR + j % rows] = sums[4 + j - i];
      }
    }
  }
}

/* The same for SOME_KEYS keys. */
INLINE void dots(float *t, const bytes *keys, const bytes *ahead, const float *q, size_t dim, int dtype, int rows) {
  const int pairs = rows * 4 <= HELD ? 4 : rows * 2 <= HELD ? 2 : 1;
  for (int k = 0; k < SOME_KEYS; k += 2 * pairs) {
    some_dots(t + k * FOUR, keys + k, ahead ? ahead + k : NULL, q, dim, dtype, rows, pairs);
  }
}

/* acc[row][d ..] += the sum of weights[row][k] * values[k][d ..], over `vectors` vectors from d on, asking for the same
   place of the values `ahead`, if there are. */
INLINE void some_weighted(float *acc, size_t width, const float *weights, const bytes *values, size_t n, size_t d,
                          const bytes *ahead, int dtype, int rows, int vectors) {
  const size_t size = (size_t)size_of_element(dtype);
  vf a[FOUR];
#pragma GCC unroll 4
  for (int i = 0; i < rows * vectors; i++) {
    a[i] = v_load(acc + (size_t)(i / vectors) * width + d + (size_t)(i % vectors) * LANES);
  }
  for (size_t k = 0; k < n; k++) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) {
      if (ahead && (size_t)j * LANES * size % 64 == 0) {
        prefetch_far(ahead[k] + (d + (size_t)j * LANES) * size);
      }
      vf v = load_any(values[k], d + (size_t)j * LANES, dtype);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        a[r * vectors + j] = v_fma(v_set1(weights[(size_t)r * SCORES_ROW + k]), v, a[r * vectors + j]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < rows * vectors; i++) {
    v_store(acc + (size_t)(i / vectors) * width + d + (size_t)(i % vectors) * LANES, a[i]);
  }
}

INLINE void weighted(float *acc, size_t width, const float *weights, const bytes *values, size_t n, const bytes *ahead,
                     int dtype, int rows) {
  const int vectors = rows == 1 ? 4 : rows == 2 ? 2 : 1;
  const size_t step = (size_t)vectors * LANES;
  size_t d = 0;
  for (; d + step <= width; d += step) {
    if (ahead && d * (size_t)size_of_element(dtype) % 64 == 0) { /* the first to touch these cache lines */
      some_weighted(acc, width, weights, values, n, d, ahead, dtype, rows, vectors);
    } else {
      some_weighted(acc, width, weights, values, n, d, NULL, dtype, rows, vectors);
    }
  }
  for (; vectors > 1 && d < width; d += LANES) {
    some_weighted(acc, width, weights, values, n, d, NULL, dtype, rows, 1);
  }
}

/* One function a dtype and number of rows, for both products. */
typedef void (*dots_fn)(float *t, const bytes *keys, const bytes *ahead, const float *q, size_t dim);
typedef void (*weighted_fn)(float *acc, size_t width, const float *weights, const bytes *values, size_t n,
                            const bytes *ahead);
#define PRODUCTS(name, dtype, rows)                                                                          \
  static void dots_##name(float *t, const bytes *keys, const bytes *ahead, const float *q, size_t dim) {     \
    dots(t, keys, ahead, q, dim, dtype, rows);                                                               \
  }                                                                                                          \
  static void weighted_##name(float *acc, size_t width, const float *weights, const bytes *values, size_t n, \
                              const bytes *ahead) {                                                          \
    weighted(acc, width, weights, values, n, ahead, dtype, rows);                                            \
  }
#define PRODUCTS_OF(name, dtype) \
  PRODUCTS(name##1, dtype, 1) PRODUCTS(name##2, dtype, 2) PRODUCTS(name##3, dtype, 3) PRODUCTS(name##4, dtype, 4)
PRODUCTS_OF(f32_, DTYPE_F32)
PRODUCTS_OF(f16_, DTYPE_F16)
PRODUCTS_OF(bf16_, DTYPE_BF16)
PRODUCTS_OF(i8_, DTYPE_I8)
#define ROW_OF(kind, name) {kind##_##name##1, kind##_##name##2, kind##_##name##3, kind##_##name##4}
#define TABLE_OF(kind) {ROW_OF(kind, f32_), ROW_OF(kind, f16_), ROW_OF(kind, bf16_), ROW_OF(kind, i8_)}
static const dots_fn dots_of[4][FOUR] = TABLE_OF(dots);
static const weighted_fn weighted_of[4][FOUR] = TABLE_OF(weighted);
#undef PRODUCTS
#undef PRODUCTS_OF
#undef ROW_OF
#undef TABLE_OF
