/* Arithmetic on the layer, once for all ISAs: loads by dtype, exp, log, Philox and the noise made of them.

   Float32 words use v_fma; the float64 functions are plain C on +, -, *, / and bit patterns, which IEEE 754 and
   -ffp-contract=off pin down, so a compiler may vectorise them without a bit changing. */
#ifndef LANEWISE_VEC_MATH_H
#define LANEWISE_VEC_MATH_H

#include "ops.h"
#include "vec.h"

#define QUIET_NAN (v_of_bits(u_set1(0x7fc00000u)))

INLINE size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* ---- rows of any dtype ---- */

/* Calls body(args, scratch, dtype) with dtype a constant, so that each dtype gets loops of its own. */
#define FOR_DTYPE(body, args, scratch) \
  switch ((args)->dtype) {             \
  case DTYPE_F32:                      \
    body(args, scratch, DTYPE_F32);    \
    break;                             \
  case DTYPE_F16:                      \
    body(args, scratch, DTYPE_F16);    \
    break;                             \
  default:                             \
    body(args, scratch, DTYPE_BF16);   \
  }

INLINE size_t dtype_size(int64_t dtype) { return dtype == DTYPE_F32 ? 4 : 2; }

INLINE vf row_load(const void *row, size_t i, int dtype) {
  switch (dtype) {
  case DTYPE_F32:
    return v_load((const float *)row + i);
  case DTYPE_F16:
    return v_load_f16((const uint16_t *)row + i);
  default:
    return v_load_bf16((const uint16_t *)row + i);
  }
}

INLINE vf row_load_n(const void *row, size_t i, size_t n, int dtype, float fill) {
  if (dtype == DTYPE_F32) {
    return v_load_n((const float *)row + i, n, fill);
  }
  uint16_t tail[LANES] = {0};
  memcpy(tail, (const uint16_t *)row + i, n * sizeof *tail);
  return v_select(m_of_bits((1u << n) - 1u), row_load(tail, 0, dtype), v_set1(fill));
}

/* One element. */
INLINE float row_at(const void *row, size_t i, int dtype) {
  if (dtype == DTYPE_F32) {
    return ((const float *)row)[i];
  }
  float lanes[LANES];
  v_store(lanes, row_load_n(row, i, 1, dtype, 0.0f));
  return lanes[0];
}

/* 64 elements from i on, `fill` beyond n */
INLINE void row_load64(vf v[4], const void *row, size_t i, size_t n, int dtype, float fill) {
  for (size_t j = 0; j < 4; j++, i += LANES) {
    if (n >= i + LANES) {
      v[j] = row_load(row, i, dtype);
    } else if (n > i) {
      v[j] = row_load_n(row, i, n - i, dtype, fill);
    } else {
      v[j] = v_set1(fill);
    }
  }
}

INLINE void store_upto(float *out, size_t i, size_t n, vf v) {
  if (n >= i + LANES) {
    v_store(out + i, v);
  } else if (n > i) {
    v_store_n(out + i, n - i, v);
  }
}

INLINE float max_across64(const vf v[4]) { return v_max_across(v_max(v_max(v[0], v[2]), v_max(v[1], v[3]))); }
INLINE float sum_across64(const vf v[4]) { return v_sum_across(v_add(v_add(v[0], v[2]), v_add(v[1], v[3]))); }

#define FOR_ROWS(r, args) for (int64_t r = (args)->first_row; r < (args)->first_row + (args)->rows; r++)

INLINE const void *row_of(const void *base, int64_t stride, int64_t row) { return (const char *)base + stride * row; }

/* ---- float32 ---- */

/* exp, monotone and within 1.02 ULP on [-87.33, 88.7]; 0 below, and 0 for a NaN: who must see NaNs looks for
   them in its own pass. Cody-Waite reduction and the Cephes polynomial (Moshier), evaluated with FMA. */
INLINE vf v_exp(vf x) {
  vf t = v_fma(x, v_set1(1.44269504088896341f), v_set1(0x1.8p23f)); /* the low bits hold round(x / ln 2) */
  vf n = v_sub(t, v_set1(0x1.8p23f));
  vf r = v_fma(n, v_set1(-0.693145751953125f), x);
  r = v_fma(n, v_set1(-1.42860682030941723212e-6f), r);
  vf p = v_set1(1.9875691500e-4f);
  p = v_fma(p, r, v_set1(1.3981999507e-3f));
  p = v_fma(p, r, v_set1(8.3334519073e-3f));
  p = v_fma(p, r, v_set1(4.1665795894e-2f));
  p = v_fma(p, r, v_set1(1.6666665459e-1f));
  p = v_fma(p, r, v_set1(5.0000001201e-1f));
  p = v_add(v_fma(v_mul(r, r), p, r), v_set1(1.0f));
  vf scaled = v_of_bits(u_add(v_bits(p), u_shl(v_bits(t), 23)));
  return v_keep(v_ge(x, v_set1(-87.33f)), scaled);
}

/* Within 3.1 % of v_exp for x in [-87, 0], and what it is at -87 below: the exponent and a straight line between powers
   of two, put where the line's error is the same above and below (Schraudolph, Neural Computation 1999). Only bounds
   are made of it. */
enum { ROUGH_BITS = 15 };
INLINE vf v_exp_rough(vf x) {
  const float one = 0x1p23f + 127 * (1 << ROUGH_BITS), centre = 1409.0f;
  vf t = v_fma(v_max(x, v_set1(-87.0f)), v_set1(1.44269504088896341f * (1 << ROUGH_BITS)), v_set1(one - centre));
  return v_of_bits(u_shl(v_bits(t), 23 - ROUGH_BITS));
}

/* ---- float64: names end in _1, for one number ---- */

INLINE uint64_t double_bits(double d) {
  uint64_t u;
  memcpy(&u, &d, 8);
  return u;
}
INLINE double bits_double(uint64_t u) {
  double d;
  memcpy(&d, &u, 8);
  return d;
}
/* u < 2^52, without a conversion instruction that some ISAs lack in vectors */
INLINE double small_to_double(uint64_t u) { return bits_double(u | 0x4330000000000000u) - 0x1p52; }

/* log(2^k * (1 + f)) for 1 + f in [sqrt(1/2), sqrt(2)): the polynomial of fdlibm's e_log.c (Sun, 1993). The sum is
   ordered so that log1p(f) is whole before k ln 2 is added: its error stays below half the distance to its
   neighbours, and what follows only adds constants, so the result is monotone in f. */
INLINE double log_parts(double k, double f) {
  double s = f / (2.0 + f), z = s * s, w = z * z, half_square = 0.5 * f * f;
  double odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  double even = z * (6.666666666666735130e-01 +
                     w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  double log1p_f = f - (half_square - s * (half_square + (even + odd)));
  return (log1p_f + k * 1.90821492927058770002e-10) + k * 6.93147180369123816490e-01;
}

/* log of a positive normal double: monotone, below 1 ULP */
INLINE double log64_1(double x) {
  const uint64_t sqrt_half = 0x3fe6a09e667f3bcdu, one = 0x3ff0000000000000u;
  uint64_t u = double_bits(x) + (one - sqrt_half);
  double k = small_to_double(u >> 52) - 1023.0;
  double m = bits_double((u & 0x000fffffffffffffu) + sqrt_half);
  return log_parts(k, m - 1.0);
}

/* -log(1 - v) for v in [0, 1): small v keep their precision */
INLINE double exponential_of(double v) {
  const uint64_t sqrt_half = 0x3fe6a09e667f3bcdu, one = 0x3ff0000000000000u;
  uint64_t u = double_bits(1.0 - v) + (one - sqrt_half);
  double k = small_to_double(u >> 52) - 1023.0;
  double m = bits_double((u & 0x000fffffffffffffu) + sqrt_half);
  int direct = v < 0.25;
  return -log_parts(direct ? 0.0 : k, direct ? -v : m - 1.0);
}

/* exp for x in [-700, 700]; 0 below and for -inf. Where it is used, degree 12 and speed are no matter. */
INLINE double exp64_1(double x) {
  if (!(x >= -700.0)) {
    return 0.0;
  }
  double t = x * 1.44269504088896340736 + 0x1.8p52, n = t - 0x1.8p52;
  double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double p = 1.0 + r / 12.0;
  for (int i = 11; i >= 1; i--) {
    p = 1.0 + r / (double)i * p;
  }
  return bits_double(double_bits(p) + (double_bits(t) << 52));
}

/* ---- random numbers ---- */

/* Philox4x32-10 (Salmon et al., SC 2011) for 16 counters {domain << 24 | index, step, key low, key high} */
struct philox_key {
  uint64_t seed, key;
  uint32_t step;
};

INLINE void philox16(vu out[4], vu index, uint32_t domain, const struct philox_key *k) {
  vu c0 = u_add(index, u_set1(domain << 24)), c1 = u_set1(k->step);
  vu c2 = u_set1((uint32_t)k->key), c3 = u_set1((uint32_t)(k->key >> 32));
  uint32_t k0 = (uint32_t)k->seed, k1 = (uint32_t)(k->seed >> 32);
  for (int round = 0; round < 10; round++) {
    vu hi0, hi1;
    vu lo0 = u_mul_wide(c0, 0xD2511F53u, &hi0), lo1 = u_mul_wide(c2, 0xCD9E8D57u, &hi1);
    c0 = u_xor(u_xor(hi1, c1), u_set1(k0));
    c2 = u_xor(u_xor(hi0, c3), u_set1(k1));
    c1 = lo1;
    c3 = lo0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

static const uint32_t lane_numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* 64 random bits for each of 32 consecutive items of a domain, the first a multiple of 32: two items share a counter */
INLINE void random_bits32(uint64_t r[32], uint32_t first, uint32_t domain, const struct philox_key *key) {
  uint32_t word[4][LANES];
  vu out[4];
  philox16(out, u_add(u_load(lane_numbers), u_set1(first / 2)), domain, key);
  for (int w = 0; w < 4; w++) {
    u_store(word[w], out[w]);
  }
  for (int i = 0; i < LANES; i++) {
    r[2 * i] = word[0][i] | (uint64_t)word[1][i] << 32;
    r[2 * i + 1] = word[2][i] | (uint64_t)word[3][i] << 32;
  }
}

/* Both items of 16 counters anywhere. */
static void random_pairs16(uint64_t first[16], uint64_t second[16], const uint32_t counter[16], uint32_t domain,
                           const struct philox_key *key) {
  uint32_t word[4][LANES];
  vu out[4];
  philox16(out, u_load(counter), domain, key);
  for (int w = 0; w < 4; w++) {
    u_store(word[w], out[w]);
  }
  for (int i = 0; i < LANES; i++) {
    first[i] = word[0][i] | (uint64_t)word[1][i] << 32;
    second[i] = word[2][i] | (uint64_t)word[3][i] << 32;
  }
}

/* One item each, of 16 items anywhere. */
static void random_bits16(uint64_t r[16], const uint32_t item[16], uint32_t domain, const struct philox_key *key) {
  uint32_t lo[LANES], hi[LANES];
  vu out[4], items = u_load(item);
  philox16(out, u_shr(items, 1), domain, key);
  vm even = u_eq(u_shl(items, 31), u_set1(0));
  u_store(lo, v_bits(v_select(even, v_of_bits(out[0]), v_of_bits(out[2]))));
  u_store(hi, v_bits(v_select(even, v_of_bits(out[1]), v_of_bits(out[3]))));
  for (int i = 0; i < LANES; i++) {
    r[i] = lo[i] | (uint64_t)hi[i] << 32;
  }
}

/* A standard exponential from 64 bits; r | 1 keeps it positive, the cap keeps it finite. */
INLINE double exponential1(uint64_t r) {
  r |= 1u;
  double d = small_to_double(r >> 32) * 0x1p32 + small_to_double(r & 0xffffffffu);
  double v = d * 0x1p-64;
  const double below_one = 1.0 - 0x1p-53;
  return exponential_of(v < below_one ? v : below_one);
}

#endif
