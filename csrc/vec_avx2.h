/* The layer on AVX2, FMA and F16C: two 8-lane registers a vector. */
#include <immintrin.h>

typedef struct {
  __m256 lo, hi;
} vf;
typedef struct {
  __m256i lo, hi;
} vu;
typedef struct {
  __m256 lo, hi; /* lanes of all ones or all zeros */
} vm;
typedef __m256i vw;
enum { HELD = 4 };

INLINE vf vf2(__m256 lo, __m256 hi) { return (vf){lo, hi}; }
INLINE vu vu2(__m256i lo, __m256i hi) { return (vu){lo, hi}; }
INLINE vm vm2(__m256 lo, __m256 hi) { return (vm){lo, hi}; }

/* masks of the first n lanes, by an offset into a run of ones and zeros */
static const int32_t tail_mask[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
INLINE vu first_lanes(size_t n) {
  const int32_t *t = tail_mask + LANES - n;
  return vu2(_mm256_loadu_si256((const __m256i *)t), _mm256_loadu_si256((const __m256i *)(t + 8)));
}

INLINE vf v_set1(float a) { return vf2(_mm256_set1_ps(a), _mm256_set1_ps(a)); }
INLINE vf v_load(const float *p) { return vf2(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE vf v_load_n(const float *p, size_t n, float fill) {
  vu m = first_lanes(n);
  __m256 f = _mm256_set1_ps(fill);
  return vf2(_mm256_blendv_ps(f, _mm256_maskload_ps(p, m.lo), _mm256_castsi256_ps(m.lo)),
             _mm256_blendv_ps(f, _mm256_maskload_ps(p + 8, m.hi), _mm256_castsi256_ps(m.hi)));
}
INLINE void v_store(float *p, vf a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
INLINE void v_store_n(float *p, size_t n, vf a) {
  vu m = first_lanes(n);
  _mm256_maskstore_ps(p, m.lo, a.lo);
  _mm256_maskstore_ps(p + 8, m.hi, a.hi);
}
INLINE vf v_load_f16(const uint16_t *p) {
  return vf2(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
             _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
INLINE __m256
bf16x8(const uint16_t *p) { /* one shuffle: a widening and a shift would both take a port that multiplies */
  const __m256i up = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1, 8, 9, -1, -1, 10,
                                      11, -1, -1, 12, 13, -1, -1, 14, 15);
  __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(twice, up));
}
INLINE vf v_load_bf16(const uint16_t *p) { return vf2(bf16x8(p), bf16x8(p + 8)); }
INLINE __m256 quiet8(__m256 v) { /* NaNs to the one */
  return _mm256_blendv_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}
INLINE void v_store_f16(uint16_t *p, vf a) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(quiet8(a.lo), _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(quiet8(a.hi), _MM_FROUND_TO_NEAREST_INT));
}
INLINE __m256i bf16_bits8(__m256 v) {
  __m256i u = _mm256_castps_si256(quiet8(v)), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
INLINE void v_store_bf16(uint16_t *p, vf a) {
  __m256i halves = _mm256_packus_epi32(bf16_bits8(a.lo), bf16_bits8(a.hi));
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(halves, 0xD8));
}
INLINE void v_store_i8(int8_t *p, vf a) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  words = _mm256_permute4x64_epi64(words, 0xD8);
  __m128i codes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i *)p, codes);
}
INLINE __m256 i8x8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vf v_load_i8(const int8_t *p) { return vf2(i8x8(p), i8x8(p + 8)); }

INLINE vf v_twice(const float *p) {
  __m256 half = _mm256_loadu_ps(p);
  __asm__("" : "+x"(half)); /* or gcc reads it again for each use: loads are what the dot products wait for */
  return vf2(half, half);
}
INLINE vf v_pair(const float *a, const float *b) { return vf2(_mm256_loadu_ps(a), _mm256_loadu_ps(b)); }
INLINE vf v_pair_f16(const uint16_t *a, const uint16_t *b) {
  return vf2(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)a)),
             _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)b)));
}
INLINE void v_pairs_bf16(vf out[2], const uint16_t *a, const uint16_t *b) {
  const __m256i odd = _mm256_set1_epi32((int)0xffff0000u);
  __m256i x = _mm256_loadu_si256((const __m256i *)a), y = _mm256_loadu_si256((const __m256i *)b);
  out[0] = vf2(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)));
  out[1] = vf2(_mm256_castsi256_ps(_mm256_and_si256(x, odd)), _mm256_castsi256_ps(_mm256_and_si256(y, odd)));
}
INLINE vf v_pair_i8(const int8_t *a, const int8_t *b) { return vf2(i8x8(a), i8x8(b)); }
INLINE vf v_once(vf a) { return a; }
INLINE void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
INLINE void prefetch_far(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

INLINE vf v_add(vf a, vf b) { return vf2(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)); }
INLINE vf v_sub(vf a, vf b) { return vf2(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)); }
INLINE vf v_mul(vf a, vf b) { return vf2(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)); }
INLINE vf v_div(vf a, vf b) { return vf2(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)); }
INLINE vf v_max(vf a, vf b) { return vf2(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)); }
INLINE vf v_min(vf a, vf b) { return vf2(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)); }
INLINE vf v_fma(vf a, vf b, vf c) { return vf2(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)); }

#define COMPARE(name, how) \
  INLINE vm name(vf a, vf b) { return vm2(_mm256_cmp_ps(a.lo, b.lo, how), _mm256_cmp_ps(a.hi, b.hi, how)); }
COMPARE(v_gt, _CMP_GT_OQ)
COMPARE(v_ge, _CMP_GE_OQ)
COMPARE(v_eq, _CMP_EQ_OQ)
COMPARE(v_unord, _CMP_UNORD_Q)
#undef COMPARE
INLINE vm m_or(vm a, vm b) { return vm2(_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)); }
INLINE vm m_and(vm a, vm b) { return vm2(_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)); }
INLINE unsigned m_bits(vm a) { return (unsigned)_mm256_movemask_ps(a.lo) | (unsigned)_mm256_movemask_ps(a.hi) << 8; }
INLINE vm m_of_bits(unsigned bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i lo = _mm256_set1_epi32((int)bits), hi = _mm256_set1_epi32((int)(bits >> 8));
  return vm2(_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(lo, lane), lane)),
             _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(hi, lane), lane)));
}
INLINE unsigned b_nonzero(const uint8_t *p) {
  __m128i zero = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)p), _mm_setzero_si128());
  return (unsigned)_mm_movemask_epi8(zero) ^ 0xffffu;
}
INLINE vf v_select(vm m, vf a, vf b) {
  return vf2(_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi));
}
/* A blend looks at sign bits alone: a shift puts each lane's bit there. */
INLINE __m256 fill8(__m256 v, __m256i bits, int first, __m256 fill) {
  const __m256i up = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  __m256i sign = _mm256_sllv_epi32(bits, _mm256_sub_epi32(up, _mm256_set1_epi32(first)));
  return _mm256_blendv_ps(fill, v, _mm256_castsi256_ps(sign));
}
INLINE void v_fill64(vf v[4], uint64_t keep, float fill) {
  const __m256 f = _mm256_set1_ps(fill);
  const __m256i half[2] = {_mm256_set1_epi32((int)(uint32_t)keep), _mm256_set1_epi32((int)(uint32_t)(keep >> 32))};
  for (int i = 0; i < 4; i++) {
    v[i].lo = fill8(v[i].lo, half[i / 2], i % 2 * LANES, f);
    v[i].hi = fill8(v[i].hi, half[i / 2], i % 2 * LANES + 8, f);
  }
}

/* Doubled as an integer, a NaN exceeds every other float: comparing floats would wait for the units that find maxima.
 */
typedef __m256i vn;
INLINE vn n_none(void) { return _mm256_setzero_si256(); }
INLINE vn see8(vn n, __m256 v) {
  __m256i u = _mm256_castps_si256(v);
  return _mm256_max_epu32(n, _mm256_add_epi32(u, u));
}
INLINE vn n_see(vn n, vf a, vf b) { return see8(see8(see8(see8(n, a.lo), a.hi), b.lo), b.hi); }
INLINE int n_any(vn n) {
  const __m256i infinity = _mm256_set1_epi32((int)0xff000000u);
  return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_max_epu32(n, infinity), infinity)) != -1;
}

INLINE vf v_keep(vm m, vf a) { return vf2(_mm256_and_ps(m.lo, a.lo), _mm256_and_ps(m.hi, a.hi)); }

INLINE vu v_bits(vf a) { return vu2(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)); }
INLINE vf v_of_bits(vu a) { return vf2(_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)); }
INLINE vu u_set1(uint32_t a) { return vu2(_mm256_set1_epi32((int)a), _mm256_set1_epi32((int)a)); }
INLINE vu u_load(const uint32_t *p) {
  return vu2(_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8)));
}
INLINE void u_store(uint32_t *p, vu a) {
  _mm256_storeu_si256((__m256i *)p, a.lo);
  _mm256_storeu_si256((__m256i *)(p + 8), a.hi);
}
INLINE vu u_add(vu a, vu b) { return vu2(_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)); }
INLINE vu u_xor(vu a, vu b) { return vu2(_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)); }
INLINE vu u_shl(vu a, int c) { return vu2(_mm256_slli_epi32(a.lo, c), _mm256_slli_epi32(a.hi, c)); }
INLINE vu u_shr(vu a, int c) { return vu2(_mm256_srli_epi32(a.lo, c), _mm256_srli_epi32(a.hi, c)); }
INLINE vm u_eq(vu a, vu b) {
  return vm2(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.lo, b.lo)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.hi, b.hi)));
}
INLINE __m256i mul_wide8(__m256i a, __m256i b, __m256i *hi) {
  __m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
  *hi = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
INLINE vu u_mul_wide(vu a, uint32_t b, vu *hi) {
  __m256i factor = _mm256_set1_epi32((int)b);
  return vu2(mul_wide8(a.lo, factor, &hi->lo), mul_wide8(a.hi, factor, &hi->hi));
}

/* Entry m lists the lanes of the bits in m, a byte each; the last byte also has their number in its high half, which
   a permutation does not look at. */
#define BIT(m, i) ((m) >> (i) & 1u)
#define BELOW(m, i)                                                                                              \
  ((i > 0) * BIT(m, 0) + (i > 1) * BIT(m, 1) + (i > 2) * BIT(m, 2) + (i > 3) * BIT(m, 3) + (i > 4) * BIT(m, 4) + \
   (i > 5) * BIT(m, 5) + (i > 6) * BIT(m, 6) + (i > 7) * BIT(m, 7))
#define PLACE(m, i) ((uint64_t)(BIT(m, i) * i) << 8 * (BELOW(m, i) & 7))
#define PACK1(m)                                                                                     \
  (PLACE(m, 1) | PLACE(m, 2) | PLACE(m, 3) | PLACE(m, 4) | PLACE(m, 5) | PLACE(m, 6) | PLACE(m, 7) | \
   (uint64_t)BELOW(m, 8) << 60)
#define PACK4(m) PACK1(m), PACK1(m + 1), PACK1(m + 2), PACK1(m + 3)
#define PACK16(m) PACK4(m), PACK4(m + 4), PACK4(m + 8), PACK4(m + 12)
#define PACK64(m) PACK16(m), PACK16(m + 16), PACK16(m + 32), PACK16(m + 48)
static const uint64_t packing[256] = {PACK64(0u), PACK64(64u), PACK64(128u), PACK64(192u)};
#undef BIT
#undef BELOW
#undef PLACE
#undef PACK1
#undef PACK4
#undef PACK16
#undef PACK64

INLINE __m256i packed8(uint64_t lanes, __m256i v) {
  return _mm256_permutevar8x32_epi32(v, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)lanes)));
}
INLINE size_t u_compress(uint32_t *p, vu v, vm m) {
  uint64_t lo = packing[_mm256_movemask_ps(m.lo)], hi = packing[_mm256_movemask_ps(m.hi)];
  _mm256_storeu_si256((__m256i *)p, packed8(lo, v.lo));
  _mm256_storeu_si256((__m256i *)(p + (lo >> 60)), packed8(hi, v.hi));
  return (lo >> 60) + (hi >> 60);
}
INLINE size_t v_compress(float *p, vf v, vm m) {
  uint64_t lo = packing[_mm256_movemask_ps(m.lo)], hi = packing[_mm256_movemask_ps(m.hi)];
  _mm256_storeu_ps(p, _mm256_castsi256_ps(packed8(lo, _mm256_castps_si256(v.lo))));
  _mm256_storeu_ps(p + (lo >> 60), _mm256_castsi256_ps(packed8(hi, _mm256_castps_si256(v.hi))));
  return (lo >> 60) + (hi >> 60);
}

INLINE float v_max_across(vf a) {
  __m256 m8 = _mm256_max_ps(a.lo, a.hi);
  __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
  __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
  return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}
INLINE float v_sum_across(vf a) {
  __m256 s8 = _mm256_add_ps(a.lo, a.hi);
  __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

/* Of each four lanes of two vectors, lanes i and i + 2 added: two of a, then two of b. */
INLINE __m256 add_apart(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_blend_ps(a, b, 0xCC), _mm256_shuffle_ps(a, b, 0x4E));
}
INLINE __m256 sum_fours8(__m256 a, __m256 b, __m256 c, __m256 d) {
  __m256 ab = add_apart(a, b), cd = add_apart(c, d);
  return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xDD));
}
INLINE vf v_sum_fours(const vf *r) {
  return vf2(sum_fours8(r[0].lo, r[1].lo, r[2].lo, r[3].lo), sum_fours8(r[0].hi, r[1].hi, r[2].hi, r[3].hi));
}
INLINE __m256 sum_pairs8(vf a) {
  return _mm256_add_ps(_mm256_permute2f128_ps(a.lo, a.hi, 0x20), _mm256_permute2f128_ps(a.lo, a.hi, 0x31));
}
INLINE vf v_sum_pairs(vf front, vf back) { return vf2(sum_pairs8(front), sum_pairs8(back)); }

/* Lanes i and i + 4 of rows a, b, then i and i + 2 with a second pair, then neighbours with two more pairs:
   the halving order, eight rows at a time. */
INLINE __m256 max_rows8(const vf *r) {
  __m256 m[8], pair[4], quad[2];
  for (int i = 0; i < 8; i++) {
    m[i] = _mm256_max_ps(r[i].lo, r[i].hi);
  }
  for (int i = 0; i < 4; i++) {
    pair[i] = _mm256_max_ps(_mm256_permute2f128_ps(m[i], m[i + 4], 0x20), _mm256_permute2f128_ps(m[i], m[i + 4], 0x31));
  }
  for (int i = 0; i < 2; i++) {
    quad[i] = _mm256_max_ps(_mm256_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0x44),
                            _mm256_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0xEE));
  }
  return _mm256_max_ps(_mm256_shuffle_ps(quad[0], quad[1], 0x88), _mm256_shuffle_ps(quad[0], quad[1], 0xDD));
}
enum { ROWS = 8 };
INLINE void v_max_rows(float *p, const vf *r) { _mm256_storeu_ps(p, max_rows8(r)); }

/* The sum of e * 2^43 and 2^52 in double has the rounded weight as its low mantissa bits. */
INLINE __m256i weights4(__m128 e) {
  const __m256d magic = _mm256_set1_pd(0x1p52);
  __m256d d = _mm256_cvtps_pd(_mm_mul_ps(e, _mm_set1_ps(0x1p43f)));
  return _mm256_xor_si256(_mm256_castpd_si256(_mm256_add_pd(d, magic)), _mm256_castpd_si256(magic));
}
INLINE vw w_zero(void) { return _mm256_setzero_si256(); }
INLINE vw w_add(vw acc, vf e) {
  __m256i lo = _mm256_add_epi64(weights4(_mm256_castps256_ps128(e.lo)), weights4(_mm256_extractf128_ps(e.lo, 1)));
  __m256i hi = _mm256_add_epi64(weights4(_mm256_castps256_ps128(e.hi)), weights4(_mm256_extractf128_ps(e.hi, 1)));
  return _mm256_add_epi64(acc, _mm256_add_epi64(lo, hi));
}
INLINE uint64_t w_total(vw acc) {
  uint64_t part[4];
  _mm256_storeu_si256((__m256i *)part, acc);
  return part[0] + part[1] + part[2] + part[3];
}
INLINE void w_store(uint64_t *p, vf e) {
  _mm256_storeu_si256((__m256i *)p, weights4(_mm256_castps256_ps128(e.lo)));
  _mm256_storeu_si256((__m256i *)(p + 4), weights4(_mm256_extractf128_ps(e.lo, 1)));
  _mm256_storeu_si256((__m256i *)(p + 8), weights4(_mm256_castps256_ps128(e.hi)));
  _mm256_storeu_si256((__m256i *)(p + 12), weights4(_mm256_extractf128_ps(e.hi, 1)));
}

INLINE void line_stream(void *to, const void *from) {
  __m256i lo = _mm256_loadu_si256((const __m256i *)from), hi = _mm256_loadu_si256((const __m256i *)from + 1);
  _mm256_stream_si256((__m256i *)to, lo);
  _mm256_stream_si256((__m256i *)to + 1, hi);
}
INLINE void line_stream_zero(void *to) {
  _mm256_stream_si256((__m256i *)to, _mm256_setzero_si256());
  _mm256_stream_si256((__m256i *)to + 1, _mm256_setzero_si256());
}
INLINE void lines_streamed(void) { _mm_sfence(); }
INLINE void line_prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
