/* The layer on aarch64 NEON: four 4-lane registers a vector. */
#include <arm_neon.h>

typedef struct {
  float32x4_t q[4];
} vf;
typedef struct {
  uint32x4_t q[4];
} vu;
typedef vu vm; /* lanes of all ones or all zeros */
typedef uint64x2_t vw;
enum { HELD = 4 };

#define QUARTERS(type, expr)    \
  type r_;                      \
  for (int i = 0; i < 4; i++) { \
    r_.q[i] = (expr);           \
  }                             \
  return r_

INLINE vf v_set1(float a) { QUARTERS(vf, vdupq_n_f32(a)); }
INLINE vf v_load(const float *p) { QUARTERS(vf, vld1q_f32(p + 4 * i)); }
INLINE void v_store(float *p, vf a) {
  for (int i = 0; i < 4; i++) {
    vst1q_f32(p + 4 * i, a.q[i]);
  }
}
INLINE vf v_load_n(const float *p, size_t n, float fill) {
  float tail[LANES];
  v_store(tail, v_set1(fill));
  memcpy(tail, p, n * sizeof *p);
  return v_load(tail);
}
INLINE void v_store_n(float *p, size_t n, vf a) {
  float tail[LANES];
  v_store(tail, a);
  memcpy(p, tail, n * sizeof *p);
}
INLINE vf v_load_f16(const uint16_t *p) { QUARTERS(vf, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
INLINE vf v_load_bf16(const uint16_t *p) { QUARTERS(vf, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
INLINE float32x4_t quiet4(float32x4_t v) { /* NaNs to the one */
  return vbslq_f32(vceqq_f32(v, v), v, vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000u)));
}
INLINE void v_store_f16(uint16_t *p, vf a) {
  for (int i = 0; i < 4; i++) {
    vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(quiet4(a.q[i]))));
  }
}
INLINE void v_store_bf16(uint16_t *p, vf a) {
  for (int i = 0; i < 4; i++) {
    uint32x4_t u = vreinterpretq_u32_f32(quiet4(a.q[i])), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    vst1_u16(p + 4 * i, vshrn_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16));
  }
}
INLINE void v_store_i8(int8_t *p, vf a) {
  for (int i = 0; i < 2; i++) {
    int16x4_t front = vmovn_s32(vcvtq_s32_f32(a.q[2 * i])), back = vmovn_s32(vcvtq_s32_f32(a.q[2 * i + 1]));
    vst1_s8(p + 8 * i, vmovn_s16(vcombine_s16(front, back)));
  }
}
INLINE void i8_to_f32(float32x4_t *out, int8x8_t a) {
  int16x8_t wide = vmovl_s8(a);
  out[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
  out[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)));
}
INLINE vf v_pair_i8(const int8_t *a, const int8_t *b) {
  vf r;
  i8_to_f32(r.q, vld1_s8(a));
  i8_to_f32(r.q + 2, vld1_s8(b));
  return r;
}
INLINE vf v_load_i8(const int8_t *p) { return v_pair_i8(p, p + 8); }
INLINE vf v_pair(const float *a, const float *b) { QUARTERS(vf, vld1q_f32((i < 2 ? a : b) + i % 2 * 4)); }
INLINE vf v_pair_f16(const uint16_t *a, const uint16_t *b) {
  QUARTERS(vf, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((i < 2 ? a : b) + i % 2 * 4))));
}
INLINE void v_pairs_bf16(vf out[2], const uint16_t *a, const uint16_t *b) {
  for (int i = 0; i < 4; i++) {
    uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16((i < 2 ? a : b) + i % 2 * 8));
    out[0].q[i] = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
    out[1].q[i] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000u)));
  }
}
INLINE vf v_twice(const float *p) { return v_pair(p, p); }
INLINE vf v_once(vf a) { return a; }
INLINE void prefetch(const void *p) { __builtin_prefetch(p); }
INLINE void prefetch_far(const void *p) { __builtin_prefetch(p, 0, 2); }

INLINE vf v_add(vf a, vf b) { QUARTERS(vf, vaddq_f32(a.q[i], b.q[i])); }
INLINE vf v_sub(vf a, vf b) { QUARTERS(vf, vsubq_f32(a.q[i], b.q[i])); }
INLINE vf v_mul(vf a, vf b) { QUARTERS(vf, vmulq_f32(a.q[i], b.q[i])); }
INLINE vf v_div(vf a, vf b) { QUARTERS(vf, vdivq_f32(a.q[i], b.q[i])); }
/* vmaxq and vminq treat NaN and zeros otherwise than the contract */
INLINE float32x4_t max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE float32x4_t min4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE vf v_max(vf a, vf b) { QUARTERS(vf, max4(a.q[i], b.q[i])); }
INLINE vf v_min(vf a, vf b) { QUARTERS(vf, min4(a.q[i], b.q[i])); }
INLINE vf v_fma(vf a, vf b, vf c) { QUARTERS(vf, vfmaq_f32(c.q[i], a.q[i], b.q[i])); }

INLINE vm v_gt(vf a, vf b) { QUARTERS(vm, vcgtq_f32(a.q[i], b.q[i])); }
INLINE vm v_ge(vf a, vf b) { QUARTERS(vm, vcgeq_f32(a.q[i], b.q[i])); }
INLINE vm v_eq(vf a, vf b) { QUARTERS(vm, vceqq_f32(a.q[i], b.q[i])); }
INLINE vm v_unord(vf a, vf b) {
  QUARTERS(vm, vmvnq_u32(vandq_u32(vceqq_f32(a.q[i], a.q[i]), vceqq_f32(b.q[i], b.q[i]))));
}
typedef uint32x4_t vn; /* lanes of all ones until they see a NaN */
INLINE vn n_none(void) { return vdupq_n_u32(0xffffffffu); }
INLINE vn n_see(vn n, vf a, vf b) {
  for (int i = 0; i < 4; i++) {
    n = vandq_u32(n, vandq_u32(vceqq_f32(a.q[i], a.q[i]), vceqq_f32(b.q[i], b.q[i])));
  }
  return n;
}
INLINE int n_any(vn n) { return vminvq_u32(n) == 0; }
INLINE vm m_or(vm a, vm b) { QUARTERS(vm, vorrq_u32(a.q[i], b.q[i])); }
INLINE vm m_and(vm a, vm b) { QUARTERS(vm, vandq_u32(a.q[i], b.q[i])); }
static const uint32_t lane_bit[4] = {1, 2, 4, 8};
INLINE unsigned m_bits(vm a) {
  unsigned bits = 0;
  for (int i = 0; i < 4; i++) {
    bits |= vaddvq_u32(vandq_u32(a.q[i], vld1q_u32(lane_bit))) << 4 * i;
  }
  return bits;
}
INLINE unsigned b_nonzero(const uint8_t *p) {
  static const uint8_t bit[LANES] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint8x16_t bytes = vld1q_u8(p), set = vandq_u8(vtstq_u8(bytes, bytes), vld1q_u8(bit));
  return (unsigned)vaddv_u8(vget_low_u8(set)) | (unsigned)vaddv_u8(vget_high_u8(set)) << 8;
}
INLINE vm m_of_bits(unsigned bits) { QUARTERS(vm, vtstq_u32(vdupq_n_u32(bits >> 4 * i), vld1q_u32(lane_bit))); }
INLINE vf v_select(vm m, vf a, vf b) { QUARTERS(vf, vbslq_f32(m.q[i], a.q[i], b.q[i])); }
INLINE void v_fill64(vf v[4], uint64_t keep, float fill) {
  for (int i = 0; i < 4; i++) {
    v[i] = v_select(m_of_bits((unsigned)(keep >> LANES * i & 0xffffu)), v[i], v_set1(fill));
  }
}
INLINE vf v_keep(vm m, vf a) { QUARTERS(vf, vreinterpretq_f32_u32(vandq_u32(m.q[i], vreinterpretq_u32_f32(a.q[i])))); }

INLINE vu v_bits(vf a) { QUARTERS(vu, vreinterpretq_u32_f32(a.q[i])); }
INLINE vf v_of_bits(vu a) { QUARTERS(vf, vreinterpretq_f32_u32(a.q[i])); }
INLINE vu u_set1(uint32_t a) { QUARTERS(vu, vdupq_n_u32(a)); }
INLINE vu u_load(const uint32_t *p) { QUARTERS(vu, vld1q_u32(p + 4 * i)); }
INLINE void u_store(uint32_t *p, vu a) {
  for (int i = 0; i < 4; i++) {
    vst1q_u32(p + 4 * i, a.q[i]);
  }
}
INLINE vu u_add(vu a, vu b) { QUARTERS(vu, vaddq_u32(a.q[i], b.q[i])); }
INLINE vu u_xor(vu a, vu b) { QUARTERS(vu, veorq_u32(a.q[i], b.q[i])); }
INLINE vu u_shl(vu a, int c) { QUARTERS(vu, vshlq_u32(a.q[i], vdupq_n_s32(c))); }
INLINE vu u_shr(vu a, int c) { QUARTERS(vu, vshlq_u32(a.q[i], vdupq_n_s32(-c))); }
INLINE vm u_eq(vu a, vu b) { QUARTERS(vm, vceqq_u32(a.q[i], b.q[i])); }
INLINE vu u_mul_wide(vu a, uint32_t b, vu *hi) {
  vu lo;
  for (int i = 0; i < 4; i++) {
    uint32x4_t front = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(a.q[i]), b));
    uint32x4_t back = vreinterpretq_u32_u64(vmull_n_u32(vget_high_u32(a.q[i]), b));
    lo.q[i] = vuzp1q_u32(front, back);
    hi->q[i] = vuzp2q_u32(front, back);
  }
  return lo;
}

/* Entry m moves the lanes of the bits in m to the front, as the bytes of a table look-up. */
#define LOWEST(m) ((m) & 1 ? 0u : (m) & 2 ? 1u : (m) & 4 ? 2u : 3u)
#define REST(m) ((m) & ((m) - 1))
#define BYTES(m) (LOWEST(m) * 0x04040404u + 0x03020100u)
#define PACK1(m) {BYTES(m), BYTES(REST(m)), BYTES(REST(REST(m))), BYTES(REST(REST(REST(m))))}
#define PACK4(m) PACK1(m), PACK1(m + 1), PACK1(m + 2), PACK1(m + 3)
static const uint32_t packing[16][4] = {PACK4(0), PACK4(4), PACK4(8), PACK4(12)};
#undef LOWEST
#undef REST
#undef BYTES
#undef PACK1
#undef PACK4

INLINE uint32x4_t packed4(uint32x4_t v, unsigned bits) {
  return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(v), vreinterpretq_u8_u32(vld1q_u32(packing[bits]))));
}
INLINE size_t v_compress(float *p, vf v, vm m) {
  size_t n = 0;
  for (int i = 0; i < 4; i++) {
    unsigned bits = vaddvq_u32(vandq_u32(m.q[i], vld1q_u32(lane_bit)));
    vst1q_f32(p + n, vreinterpretq_f32_u32(packed4(vreinterpretq_u32_f32(v.q[i]), bits)));
    n += (size_t)__builtin_popcount(bits);
  }
  return n;
}
INLINE size_t u_compress(uint32_t *p, vu v, vm m) {
  size_t n = 0;
  for (int i = 0; i < 4; i++) {
    unsigned bits = vaddvq_u32(vandq_u32(m.q[i], vld1q_u32(lane_bit)));
    vst1q_u32(p + n, packed4(v.q[i], bits));
    n += (size_t)__builtin_popcount(bits);
  }
  return n;
}

/* lanes i and i + 8, then i and i + 4: four lanes are left */
INLINE float32x4_t max_to_four(vf a) { return max4(max4(a.q[0], a.q[2]), max4(a.q[1], a.q[3])); }
INLINE float v_max_across(vf a) {
  float32x4_t m4 = max_to_four(a), m2 = max4(m4, vextq_f32(m4, m4, 2));
  return vgetq_lane_f32(max4(m2, vextq_f32(m2, m2, 1)), 0);
}
INLINE float v_sum_across(vf a) {
  float32x4_t s4 = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
  float32x4_t s2 = vaddq_f32(s4, vextq_f32(s4, s4, 2));
  return vgetq_lane_f32(vaddq_f32(s2, vextq_f32(s2, s2, 1)), 0);
}
INLINE float32x4_t max_pair(float32x4_t a, float32x4_t b) { /* a0 a1 b0 b1 against a2 a3 b2 b3 */
  return max4(vcombine_f32(vget_low_f32(a), vget_low_f32(b)), vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
}
INLINE float32x4_t max_rows4(const vf *r) {
  float32x4_t a = max_pair(max_to_four(r[0]), max_to_four(r[1]));
  float32x4_t b = max_pair(max_to_four(r[2]), max_to_four(r[3]));
  return max4(vuzp1q_f32(a, b), vuzp2q_f32(a, b));
}
/* Of two vectors, lanes i and i + 2 added, those of a before those of b. */
INLINE float64x2_t add_apart(float32x4_t a, float32x4_t b) {
  return vreinterpretq_f64_f32(vaddq_f32(vzip1q_f32(a, b), vzip2q_f32(a, b)));
}
INLINE float32x4_t sum_fours(const vf *r, int quarter) {
  float64x2_t ab = add_apart(r[0].q[quarter], r[1].q[quarter]), cd = add_apart(r[2].q[quarter], r[3].q[quarter]);
  return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(ab, cd)), vreinterpretq_f32_f64(vzip2q_f64(ab, cd)));
}
INLINE vf v_sum_fours(const vf *r) { QUARTERS(vf, sum_fours(r, i)); }
INLINE vf v_sum_pairs(vf a, vf b) {
  QUARTERS(vf, vaddq_f32((i < 2 ? a : b).q[i % 2 * 2], (i < 2 ? a : b).q[i % 2 * 2 + 1]));
}
enum { ROWS = 8 };
INLINE void v_max_rows(float *p, const vf *r) {
  vst1q_f32(p, max_rows4(r));
  vst1q_f32(p + 4, max_rows4(r + 4));
}

/* The sum of e * 2^43 and 2^52 in double has the rounded weight as its low mantissa bits. */
INLINE uint64x2_t weights2(float64x2_t d) {
  const float64x2_t magic = vdupq_n_f64(0x1p52);
  return veorq_u64(vreinterpretq_u64_f64(vaddq_f64(d, magic)), vreinterpretq_u64_f64(magic));
}
INLINE vw w_zero(void) { return vdupq_n_u64(0); }
INLINE vw w_add(vw acc, vf e) {
  for (int i = 0; i < 4; i++) {
    float32x4_t scaled = vmulq_n_f32(e.q[i], 0x1p43f);
    acc = vaddq_u64(acc, weights2(vcvt_f64_f32(vget_low_f32(scaled))));
    acc = vaddq_u64(acc, weights2(vcvt_high_f64_f32(scaled)));
  }
  return acc;
}
INLINE uint64_t w_total(vw acc) { return vgetq_lane_u64(acc, 0) + vgetq_lane_u64(acc, 1); }
INLINE void w_store(uint64_t *p, vf e) {
  for (int i = 0; i < 4; i++) {
    float32x4_t scaled = vmulq_n_f32(e.q[i], 0x1p43f);
    vst1q_u64(p + 4 * i, weights2(vcvt_f64_f32(vget_low_f32(scaled))));
    vst1q_u64(p + 4 * i + 2, weights2(vcvt_high_f64_f32(scaled)));
  }
}

/* C has no word for it, so it is written in assembly; and no fence: whoever hands the memory on orders it. */
INLINE void stream32(void *to, uint8x16_t lo, uint8x16_t hi) {
  __asm__ volatile("stnp %q1, %q2, [%0]" : : "r"(to), "w"(lo), "w"(hi) : "memory");
}
INLINE void line_stream(void *to, const void *from) {
  const uint8_t *p = from;
  stream32(to, vld1q_u8(p), vld1q_u8(p + 16));
  stream32((char *)to + 32, vld1q_u8(p + 32), vld1q_u8(p + 48));
}
INLINE void line_stream_zero(void *to) {
  stream32(to, vdupq_n_u8(0), vdupq_n_u8(0));
  stream32((char *)to + 32, vdupq_n_u8(0), vdupq_n_u8(0));
}
INLINE void lines_streamed(void) {}
INLINE void line_prefetch(const void *p) { __builtin_prefetch(p); }
