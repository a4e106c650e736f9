/* The two products of attention, queries by keys and weights by values, for rows of keys or values wherever they lie.

   A dot product runs in eight lanes along head_dim and then across them, a weighted sum key by key: one order, however
   many rows or keys share a pass. Of bfloat16 the eight lanes meet the even elements of sixteen, then the odd ones: as
   they lie, that is a shift and a mask. Up to four rows share what is loaded of a key or a value. Rows are whole
   vectors, keys come SOME_KEYS at a time. */

enum { FOUR = 4, SOME_KEYS = LANES, PAIRS = SOME_KEYS / 2 };
/* Floats from a row of scores to the next: a power of two, and they would push each other out of the cache. */
enum { SCORES_ROW = ATTEND_CHUNK + LANES };

typedef const char *bytes;

/* ---- what is read, and what is asked for meanwhile ---- */

/* Rows are asked for twice before they are wanted. KEYS_AHEAD keys before, into the second level of the caches: in the
   first, what waits for memory takes the place of what is being read (Zen 4, 2026-11-30: float32 from memory takes 2.4
   times as long). KEYS_SOON keys before, when they have come that far, into the first (Emerald Rapids, 2026-11-30: from
   memory and from the third level all takes a tenth less). A few lines at a time, between the products: many at once
   would wait for one another. And by turns from several rows: memory gives a row after the other more slowly. */
enum { KEYS_AHEAD = 32, KEYS_SOON = 16 };

INLINE void ask_row(const bytes *row, size_t offset) {
  prefetch_far(row[KEYS_AHEAD] + offset);
  prefetch(row[KEYS_SOON] + offset);
}

/* Rows to be read, where they lie, and behind which of each SOME_KEYS of them others are asked for meanwhile. */
struct run {
  const bytes *rows, *lie;
  size_t keys, from, to;
};

/* Where rows of q take several passes over the same keys, each asks for a part of what comes: memory would else rest in
   all passes but the first. */
INLINE struct run pass_of(struct run all, size_t pass, size_t passes) {
  return (struct run){all.rows, all.lie, all.keys, all.to * pass / passes, all.to * (pass + 1) / passes};
}

/* Vectors to a line of memory: 1 of float32, 2, 4. */
INLINE size_t vectors_a_line(size_t size) { return 64 / size / LANES; }

/* Asks, in the step through elements [d, d + LANES) of `n` rows, for those lines behind them that such a step has. */
INLINE void ask(const bytes *rows, size_t n, size_t d, size_t size) {
  for (size_t i = d / LANES % vectors_a_line(size); i < n; i += vectors_a_line(size)) {
    ask_row(rows + i, d * size);
  }
}

/* ---- queries by keys ---- */

enum { HALF = LANES / 2 };

/* Two keys as load_pairs gives them, one after the other: where many rows of q read them, they are put together once.
 */
enum { PAIRED = DTYPE_I8 + 1 };

/* Sixteen elements of two keys from d on, as pairs of eights. */
INLINE void load_pairs(vf k[2], bytes a, bytes b, size_t d, int dtype) {
  if (dtype == PAIRED) {
    k[0] = v_load((const float *)a + 2 * d);
    k[1] = v_load((const float *)a + 2 * d + LANES);
    return;
  }
  if (dtype == DTYPE_BF16) {
    v_pairs_bf16(k, (const uint16_t *)a + d, (const uint16_t *)b + d);
    return;
  }
  for (int i = 0; i < 2; i++, d += HALF) {
    k[i] = dtype == DTYPE_F32   ? v_pair((const float *)a + d, (const float *)b + d)
           : dtype == DTYPE_F16 ? v_pair_f16((const uint16_t *)a + d, (const uint16_t *)b + d)
                                : v_pair_i8((const int8_t *)a + d, (const int8_t *)b + d);
  }
}

/* Sixteen elements in the order in which the dot products meet them. */
INLINE void as_met(float *x, int dtype) {
  float even[HALF], odd[HALF];
  if (dtype != DTYPE_BF16) {
    return;
  }
  for (int i = 0; i < HALF; i++) {
    even[i] = x[2 * i];
    odd[i] = x[2 * i + 1];
  }
  memcpy(x, even, sizeof even);
  memcpy(x + HALF, odd, sizeof odd);
}

/* Where element d of a row of q is: eight of each of up to FOUR rows, then the next eight. */
INLINE float *q_eight(float *q, size_t dim, size_t rows, size_t row, size_t d) {
  size_t first = row / FOUR * FOUR, n = min_size(rows - first, FOUR);
  return q + first * dim + d * n + row % FOUR * HALF;
}

/* The first key of a pair; the other is four on. */
INLINE size_t pair_starts(size_t pair) { return pair / 4 * 8 + pair % 4; }

/* The products of `pairs` pairs of keys with `rows` rows of q: summed to fours of lanes if there are fours of pairs; if
   not, they wait for the rest. */
INLINE void some_dots(vf *fours, vf *waiting, const struct run *run, size_t key, int pair, const float *q, size_t dim,
                      int dtype, int rows, int pairs) {
  const size_t size = dtype == PAIRED ? sizeof(float) : (size_t)size_of_element(dtype);
  const bytes *keys = run->rows + key + pair_starts((size_t)pair);
  const size_t part = (size_t)pair / (size_t)pairs, parts = PAIRS / (size_t)pairs, all = 2 * (size_t)pairs;
  const size_t wanted = run->to - run->from, asked = wanted * (part + 1) / parts - wanted * part / parts;
  const bytes *before = run->lie + key + run->from + wanted * part / parts;
  vf acc[FOUR * PAIRS]; /* at most HELD of them are used */
#pragma GCC unroll 16
  for (int i = 0; i < pairs * rows; i++) {
    acc[i] = v_set1(0.0f);
  }
  for (size_t d = 0; d < dim; d += LANES) {
    if (pairs >= 4) { /* or gcc keeps so many of them in vector registers, whose moves take what multiplies */
      __asm__("" : "+r"(keys));
    }
    if (asked == all) { /* a number that the compiler knows */
      ask(before, all, d, size);
    } else {
      ask(before, asked, d, size);
    }
    vf k[PAIRS][2];
#pragma GCC unroll 8
    for (size_t p = 0; p < (size_t)pairs; p++) {
      load_pairs(k[p], keys[pair_starts(p)], keys[pair_starts(p) + 4], d, dtype);
    }
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; half++) {
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        vf x = v_twice(q + (d + half * HALF) * (size_t)rows + HALF * r);
#pragma GCC unroll 8
        for (int p = 0; p < pairs; p++) {
          acc[r * pairs + p] = v_fma(x, k[p][half], acc[r * pairs + p]);
        }
      }
    }
  }
  if (pairs < 4) {
#pragma GCC unroll 16
    for (int i = 0; i < pairs * rows; i++) {
      waiting[i / pairs * PAIRS + i % pairs] = acc[i];
    }
    return;
  }
#pragma GCC unroll 16
  for (int i = 0; i < pairs * rows; i += 4) {
    fours[i / pairs * 2 + i % pairs / 4] = v_sum_fours(acc + i);
  }
}

/* scores[row][key] = the dot product of each of `rows` rows of q with each key. */
INLINE void dots(float *scores, const struct run *run, const float *q, size_t dim, int dtype, int rows) {
  const int most = HELD / rows, pairs = most >= 8 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
  for (size_t key = 0; key < run->keys; key += SOME_KEYS) {
    vf fours[FOUR * 2], waiting[FOUR * PAIRS];
    for (int p = 0; p < PAIRS; p += pairs) {
      some_dots(fours + p / 4, waiting + p, run, key, p, q, dim, dtype, rows, pairs);
    }
    for (int i = 0; pairs < 4 && i < 2 * rows; i++) {
      fours[i] = v_sum_fours(waiting + 4 * i);
    }
    for (int r = 0; r < rows; r++) {
      v_store(scores + (size_t)r * SCORES_ROW + key, v_sum_pairs(fours[2 * r], fours[2 * r + 1]));
    }
  }
}

/* ---- weights by values ---- */

INLINE vf load_any(bytes p, size_t d, int dtype) {
  return dtype == DTYPE_I8 ? v_load_i8((const int8_t *)p + d) : row_load(p, d, dtype);
}

/* Vectors of sums that a row has: as many as the registers hold, or additions wait for one another. */
INLINE int sums_a_row(int rows) { return (int)HELD > 4 || rows == 1 ? 4 : rows == 2 ? 2 : 1; }

/* acc[row][d ..] += the sum of weights[row][key] * values[key][d ..], over `vectors` vectors from d on, asking behind
   the `wanted` values from run->from on for the same place. */
INLINE void some_weighted(float *acc, size_t width, const float *weights, const struct run *run, size_t wanted,
                          size_t d, int dtype, int rows, int vectors) {
  const size_t size = (size_t)size_of_element(dtype), from = run->from;
  const bytes *values = run->rows;
  vf a[FOUR * 4]; /* at most HELD of them are used */
#pragma GCC unroll 16
  for (int i = 0; i < rows * vectors; i++) {
    a[i] = v_load(acc + (size_t)(i / vectors) * width + d + (size_t)(i % vectors) * LANES);
  }
#pragma GCC unroll 1
  for (size_t k = 0; k < SOME_KEYS; k++) {
    const int asked = wanted == SOME_KEYS || k - from < wanted;
#pragma GCC unroll 4
    for (size_t j = 0; j < (size_t)vectors; j++) {
      if (asked && j % vectors_a_line(size) == 0) {
        ask_row(run->lie + k, (d + j * LANES) * size);
      }
      vf v = load_any(values[k], d + j * LANES, dtype);
#pragma GCC unroll 4
      for (size_t r = 0; r < (size_t)rows; r++) {
        a[r * (size_t)vectors + j] = v_fma(v_set1(weights[r * SCORES_ROW + k]), v, a[r * (size_t)vectors + j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows * vectors; i++) {
    v_store(acc + (size_t)(i / vectors) * width + d + (size_t)(i % vectors) * LANES, a[i]);
  }
}

INLINE void weighted(float *acc, size_t width, const float *weights, const struct run *run, int dtype, int rows) {
  const int vectors = sums_a_row(rows);
  const size_t step = (size_t)vectors * LANES, a_line = vectors_a_line((size_t)size_of_element(dtype));
  size_t d = 0;
  for (; d + step <= width; d += step) {
    const size_t wanted = d / LANES % a_line ? 0 : run->to - run->from; /* once a line */
    if (wanted == SOME_KEYS) {                                          /* a number that the compiler knows */
      some_weighted(acc, width, weights, run, SOME_KEYS, d, dtype, rows, vectors);
    } else {
      some_weighted(acc, width, weights, run, wanted, d, dtype, rows, vectors);
    }
  }
  for (; vectors > 1 && d < width; d += LANES) {
    some_weighted(acc, width, weights, run, d / LANES % a_line ? 0 : run->to - run->from, d, dtype, rows, 1);
  }
}

/* One function a dtype and number of rows, for both products. */
typedef void (*dots_fn)(float *scores, const struct run *run, const float *q, size_t dim);
typedef void (*weighted_fn)(float *acc, size_t width, const float *weights, const struct run *run);
#define DOTS(name, dtype, rows)                                                                     \
  static void dots_##name##rows(float *scores, const struct run *run, const float *q, size_t dim) { \
    dots(scores, run, q, dim, dtype, rows);                                                         \
  }
#define WEIGHTED(name, dtype, rows)                                                                          \
  static void weighted_##name##rows(float *acc, size_t width, const float *weights, const struct run *run) { \
    weighted(acc, width, weights, run, dtype, rows);                                                         \
  }
#define FOR_ROWS_OF(kind, name, dtype) \
  kind(name, dtype, 1) kind(name, dtype, 2) kind(name, dtype, 3) kind(name, dtype, 4)
#define FOR_DTYPES(kind)               \
  FOR_ROWS_OF(kind, f32_, DTYPE_F32)   \
  FOR_ROWS_OF(kind, f16_, DTYPE_F16)   \
  FOR_ROWS_OF(kind, bf16_, DTYPE_BF16) \
  FOR_ROWS_OF(kind, i8_, DTYPE_I8)
FOR_DTYPES(DOTS)
FOR_ROWS_OF(DOTS, paired_, PAIRED)
FOR_DTYPES(WEIGHTED)
#define ROW_OF(name) {name##1, name##2, name##3, name##4}
static const dots_fn dots_of[][FOUR] = {ROW_OF(dots_f32_), ROW_OF(dots_f16_), ROW_OF(dots_bf16_), ROW_OF(dots_i8_),
                                        ROW_OF(dots_paired_)};
static const weighted_fn weighted_of[][FOUR] = {ROW_OF(weighted_f32_), ROW_OF(weighted_f16_), ROW_OF(weighted_bf16_),
                                                ROW_OF(weighted_i8_)};
#undef DOTS
#undef WEIGHTED
#undef FOR_ROWS_OF
#undef FOR_DTYPES
#undef ROW_OF
