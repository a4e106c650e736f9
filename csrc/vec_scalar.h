/* The layer in portable C: a loop of 16. It is the reference the other spellings must equal bit for bit.

   Its words stay functions: inlined, sixteen unrolled lanes of each take minutes to compile. */
#define WORD static __attribute__((noinline, unused))

typedef struct {
  float f[LANES];
} vf;
typedef struct {
  uint32_t u[LANES];
} vu;
typedef struct {
  uint32_t m[LANES]; /* 0 or ~0 */
} vm;
typedef uint64_t vw;
enum { HELD = 4 };

#define EACH(type, field, expr)     \
  type r_;                          \
  for (int i = 0; i < LANES; i++) { \
    r_.field[i] = (expr);           \
  }                                 \
  return r_

INLINE float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

/* A fused multiply-add without the hardware: the product is exact in double, the sum is rounded to odd
   there (Boldo & Melquiond, IEEE TC 2008), so the one rounding to float that follows is the right one. */
INLINE float fma1(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  double p = (double)a * (double)b, d = (double)c, s = p + d;
  double t = s - p, error = (p - (s - t)) + (d - t);
  uint64_t u;
  memcpy(&u, &s, 8);
  uint64_t inexact = (uint64_t)(error != 0.0) & (uint64_t)(error == error) & ~u & 1u;
  uint64_t away = (uint64_t)((error > 0.0) == (s > 0.0));
  u += inexact * (2 * away - 1);
  memcpy(&s, &u, 8);
  return (float)s;
#endif
}

INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) { /* inf and NaN; a signalling NaN becomes quiet, as the hardware makes it */
    return bits_to_float(sign | 0x7f800000u | (rest << 13 & 0x7fffffu) | (rest > 0x7c00u ? 0x400000u : 0));
  }
  float magnitude = bits_to_float(rest << 13) * 0x1p112f; /* exact, subnormals too */
  return bits_to_float(sign | float_to_bits(magnitude));
}

WORD vf v_set1(float a) { EACH(vf, f, a); }
WORD vf v_load(const float *p) {
  vf r;
  memcpy(&r, p, sizeof r);
  return r;
}
WORD vf v_load_n(const float *p, size_t n, float fill) {
  vf r = v_set1(fill);
  memcpy(&r, p, n * sizeof *p);
  return r;
}
INLINE void v_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
INLINE void v_store_n(float *p, size_t n, vf a) { memcpy(p, &a, n * sizeof *p); }
WORD vf v_load_f16(const uint16_t *p) { EACH(vf, f, half_to_float(p[i])); }
WORD vf v_load_bf16(const uint16_t *p) { EACH(vf, f, bits_to_float((uint32_t)p[i] << 16)); }
INLINE uint16_t float_to_half(float f) {
  uint32_t u = float_to_bits(f), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) {
    return 0x7e00u;
  }
  if (rest >= 0x477ff000u) { /* from 65520 on the nearest is an infinity */
    return (uint16_t)(sign | 0x7c00u);
  }
  if (rest < 0x38800000u) { /* a subnormal: adding 0.5 rounds to its unit, 2^-24 */
    return (uint16_t)(sign | (float_to_bits(bits_to_float(rest) + 0.5f) - float_to_bits(0.5f)));
  }
  return (uint16_t)(sign | (rest + 0xfffu + (rest >> 13 & 1u) - 0x38000000u) >> 13);
}
INLINE uint16_t float_to_bf16(float f) {
  uint32_t u = float_to_bits(f);
  return (uint16_t)(f != f ? 0x7fc0u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
WORD void v_store_f16(uint16_t *p, vf a) {
  for (int i = 0; i < LANES; i++) {
    p[i] = float_to_half(a.f[i]);
  }
}
WORD void v_store_bf16(uint16_t *p, vf a) {
  for (int i = 0; i < LANES; i++) {
    p[i] = float_to_bf16(a.f[i]);
  }
}
WORD void v_store_i8(int8_t *p, vf a) {
  for (int i = 0; i < LANES; i++) {
    p[i] = (int8_t)a.f[i];
  }
}
WORD vf v_load_i8(const int8_t *p) { EACH(vf, f, (float)p[i]); }

WORD vf v_pair(const float *a, const float *b) { EACH(vf, f, i < 8 ? a[i] : b[i - 8]); }
WORD vf v_pair_f16(const uint16_t *a, const uint16_t *b) { EACH(vf, f, half_to_float(i < 8 ? a[i] : b[i - 8])); }
WORD void v_pairs_bf16(vf out[2], const uint16_t *a, const uint16_t *b) {
  for (int i = 0; i < LANES; i++) {
    const uint16_t *p = i < 8 ? a + 2 * i : b + 2 * (i - 8);
    out[0].f[i] = bits_to_float((uint32_t)p[0] << 16);
    out[1].f[i] = bits_to_float((uint32_t)p[1] << 16);
  }
}
WORD vf v_pair_i8(const int8_t *a, const int8_t *b) { EACH(vf, f, (float)(i < 8 ? a[i] : b[i - 8])); }
INLINE vf v_twice(const float *p) { return v_pair(p, p); }
INLINE vf v_once(vf a) { return a; }
INLINE void prefetch(const void *p) { (void)p; }
INLINE void prefetch_far(const void *p) { (void)p; }

WORD vf v_add(vf a, vf b) { EACH(vf, f, a.f[i] + b.f[i]); }
WORD vf v_sub(vf a, vf b) { EACH(vf, f, a.f[i] - b.f[i]); }
WORD vf v_mul(vf a, vf b) { EACH(vf, f, a.f[i] * b.f[i]); }
WORD vf v_div(vf a, vf b) { EACH(vf, f, a.f[i] / b.f[i]); }
WORD vf v_max(vf a, vf b) { EACH(vf, f, a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
WORD vf v_min(vf a, vf b) { EACH(vf, f, a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
WORD vf v_fma(vf a, vf b, vf c) { EACH(vf, f, fma1(a.f[i], b.f[i], c.f[i])); }

WORD vm v_gt(vf a, vf b) { EACH(vm, m, 0u - (uint32_t)(a.f[i] > b.f[i])); }
WORD vm v_ge(vf a, vf b) { EACH(vm, m, 0u - (uint32_t)(a.f[i] >= b.f[i])); }
WORD vm v_eq(vf a, vf b) { EACH(vm, m, 0u - (uint32_t)(a.f[i] == b.f[i])); }
WORD vm v_unord(vf a, vf b) { EACH(vm, m, 0u - (uint32_t)(a.f[i] != a.f[i] || b.f[i] != b.f[i])); }
typedef vm vn;
WORD vn n_none(void) { EACH(vn, m, 0); }
WORD vn n_see(vn n, vf a, vf b) { EACH(vn, m, n.m[i] | (uint32_t)(a.f[i] != a.f[i] || b.f[i] != b.f[i])); }
WORD int n_any(vn n) {
  uint32_t any = 0;
  for (int i = 0; i < LANES; i++) {
    any |= n.m[i];
  }
  return any != 0;
}
WORD vm m_or(vm a, vm b) { EACH(vm, m, a.m[i] | b.m[i]); }
WORD vm m_and(vm a, vm b) { EACH(vm, m, a.m[i] & b.m[i]); }
WORD vm m_of_bits(unsigned bits) { EACH(vm, m, 0u - (bits >> i & 1u)); }
WORD unsigned b_nonzero(const uint8_t *p) {
  unsigned bits = 0;
  for (int i = 0; i < LANES; i++) {
    bits |= (unsigned)(p[i] != 0) << i;
  }
  return bits;
}
WORD unsigned m_bits(vm a) {
  unsigned bits = 0;
  for (int i = 0; i < LANES; i++) {
    bits |= (a.m[i] & 1u) << i;
  }
  return bits;
}
WORD vf v_select(vm m, vf a, vf b) { EACH(vf, f, m.m[i] ? a.f[i] : b.f[i]); }
WORD void v_fill64(vf v[4], uint64_t keep, float fill) {
  for (int i = 0; i < 4; i++) {
    v[i] = v_select(m_of_bits((unsigned)(keep >> LANES * i & 0xffffu)), v[i], v_set1(fill));
  }
}
WORD vf v_keep(vm m, vf a) { EACH(vf, f, bits_to_float(m.m[i] & float_to_bits(a.f[i]))); }

WORD vu v_bits(vf a) { EACH(vu, u, float_to_bits(a.f[i])); }
WORD vf v_of_bits(vu a) { EACH(vf, f, bits_to_float(a.u[i])); }
WORD vu u_set1(uint32_t a) { EACH(vu, u, a); }
WORD vu u_load(const uint32_t *p) { EACH(vu, u, p[i]); }
INLINE void u_store(uint32_t *p, vu a) { memcpy(p, &a, sizeof a); }
WORD vu u_add(vu a, vu b) { EACH(vu, u, a.u[i] + b.u[i]); }
WORD vu u_xor(vu a, vu b) { EACH(vu, u, a.u[i] ^ b.u[i]); }
WORD vu u_shl(vu a, int c) { EACH(vu, u, a.u[i] << c); }
WORD vu u_shr(vu a, int c) { EACH(vu, u, a.u[i] >> c); }
WORD vm u_eq(vu a, vu b) { EACH(vm, m, 0u - (uint32_t)(a.u[i] == b.u[i])); }
WORD vu u_mul_wide(vu a, uint32_t b, vu *hi) {
  vu lo;
  for (int i = 0; i < LANES; i++) {
    uint64_t product = (uint64_t)a.u[i] * b;
    lo.u[i] = (uint32_t)product;
    hi->u[i] = (uint32_t)(product >> 32);
  }
  return lo;
}

WORD size_t v_compress(float *p, vf v, vm m) {
  size_t n = 0;
  for (int i = 0; i < LANES; i++) {
    p[n] = v.f[i];
    n += m.m[i] & 1u;
  }
  return n;
}
WORD size_t u_compress(uint32_t *p, vu v, vm m) {
  size_t n = 0;
  for (int i = 0; i < LANES; i++) {
    p[n] = v.u[i];
    n += m.m[i] & 1u;
  }
  return n;
}

WORD float v_max_across(vf a) {
  for (int half = LANES / 2; half; half /= 2) {
    for (int i = 0; i < half; i++) {
      a.f[i] = a.f[i] > a.f[i + half] ? a.f[i] : a.f[i + half];
    }
  }
  return a.f[0];
}
WORD float v_sum_across(vf a) {
  for (int half = LANES / 2; half; half /= 2) {
    for (int i = 0; i < half; i++) {
      a.f[i] = a.f[i] + a.f[i + half];
    }
  }
  return a.f[0];
}
enum { ROWS = 8 };
WORD void v_max_rows(float *p, const vf *r) {
  for (int i = 0; i < ROWS; i++) {
    p[i] = v_max_across(r[i]);
  }
}
WORD vf v_sum_fours(const vf *r) {
  EACH(vf, f,
       (r[i % 4].f[i / 4 * 4] + r[i % 4].f[i / 4 * 4 + 2]) + (r[i % 4].f[i / 4 * 4 + 1] + r[i % 4].f[i / 4 * 4 + 3]));
}
WORD vf v_sum_pairs(vf a, vf b) {
  EACH(vf, f, (i < 8 ? a : b).f[i % 8 / 4 * 8 + i % 4] + (i < 8 ? a : b).f[i % 8 / 4 * 8 + i % 4 + 4]);
}

INLINE uint64_t weight1(float e) {
  double d = (double)e * 0x1p43 + 0x1p52; /* the addition rounds half to even to an integer */
  uint64_t u;
  memcpy(&u, &d, 8);
  return u & 0xfffffffffffffu;
}
INLINE vw w_zero(void) { return 0; }
WORD vw w_add(vw acc, vf e) {
  for (int i = 0; i < LANES; i++) {
    acc += weight1(e.f[i]);
  }
  return acc;
}
INLINE uint64_t w_total(vw acc) { return acc; }
WORD void w_store(uint64_t *p, vf e) {
  for (int i = 0; i < LANES; i++) {
    p[i] = weight1(e.f[i]);
  }
}

INLINE void line_stream(void *to, const void *from) { memcpy(to, from, 64); }
INLINE void line_stream_zero(void *to) { memset(to, 0, 64); }
INLINE void lines_streamed(void) {}
INLINE void line_prefetch(const void *p) { (void)p; }
