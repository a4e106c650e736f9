/* The layer on AVX-512 F, BW, DQ and VL: one register a vector, masks in mask registers. */
#ifdef LANEWISE_SIMDE
#include "simde_avx512.h" /* the emulation the tests use on CPUs without AVX-512 */
#else
#include <immintrin.h>
#endif

typedef __m512 vf;
typedef __m512i vu;
typedef __mmask16 vm;
typedef __m512i vw;
enum { HELD = 16 };

INLINE vm first_lanes(size_t n) { return (vm)((1u << n) - 1u); }

INLINE vf v_set1(float a) { return _mm512_set1_ps(a); }
INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE vf v_load_n(const float *p, size_t n, float fill) {
  return _mm512_mask_loadu_ps(_mm512_set1_ps(fill), first_lanes(n), p);
}
INLINE void v_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE void v_store_n(float *p, size_t n, vf a) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
INLINE vf v_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf v_load_bf16(const uint16_t *p) { /* one permutation: to widen and to shift would both wait for its port */
  const __m512i up = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3,
                                      0, 2, 0, 1, 0, 0, 0);
  __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p));
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, up, x));
}
INLINE __m512 quiet16(__m512 v) { /* NaNs to the one */
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), v,
                              _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}
/* 2^-25, halfway to the least half, is even as 0. CPUs agree (F16C is the same); Bochs, where this unit is proven,
   rounds it up, so it is made 0 before. */
INLINE void v_store_f16(uint16_t *p, vf a) {
  __mmask16 tie = _mm512_cmp_ps_mask(_mm512_abs_ps(a), _mm512_set1_ps(0x1p-25f), _CMP_EQ_OQ);
  a = _mm512_mask_mul_ps(a, tie, a, _mm512_setzero_ps()); /* of its sign */
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(quiet16(a), _MM_FROUND_TO_NEAREST_INT));
}
INLINE void v_store_bf16(uint16_t *p, vf a) {
  __m512i u = _mm512_castps_si512(quiet16(a)), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  u = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(u));
}
INLINE void v_store_i8(int8_t *p, vf a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))); }
INLINE vf v_load_i8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

INLINE vf v_twice(const float *p) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(p)); }
INLINE vf v_pair(const float *a, const float *b) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b), 1);
}
INLINE __m256i pair16(const void *a, const void *b) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a)),
                                 _mm_loadu_si128((const __m128i *)b), 1);
}
INLINE vf v_pair_f16(const uint16_t *a, const uint16_t *b) { return _mm512_cvtph_ps(pair16(a, b)); }
INLINE void v_pairs_bf16(vf out[2], const uint16_t *a, const uint16_t *b) {
  __m512i front = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)a));
  __m512i both = _mm512_inserti64x4(front, _mm256_loadu_si256((const __m256i *)b), 1);
  out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  out[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000u)));
}
INLINE vf v_pair_i8(const int8_t *a, const int8_t *b) {
  __m128i ab = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)a), _mm_loadl_epi64((const __m128i *)b));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(ab));
}
/* gcc 12 gives a vector's load to each of its uses: maxima of a row that lies 16 bytes behind a line, as NumPy's do,
   then take 1.4 times as long (Zen 4, 2026-11-30). */
INLINE vf v_once(vf a) {
#ifndef LANEWISE_SIMDE
  __asm__("" : "+v"(a));
#endif
  return a;
}
INLINE void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
INLINE void prefetch_far(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }

INLINE vm v_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE vm v_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE vm v_eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE vm v_unord(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
typedef vm vn;
INLINE vn n_none(void) { return 0; }
INLINE vn n_see(vn n, vf a, vf b) { return (vn)(n | v_unord(a, b)); }
INLINE int n_any(vn n) { return n != 0; }
INLINE vm m_or(vm a, vm b) { return (vm)(a | b); }
INLINE vm m_and(vm a, vm b) { return (vm)(a & b); }
INLINE unsigned m_bits(vm a) { return a; }
INLINE vm m_of_bits(unsigned bits) { return (vm)bits; }
INLINE unsigned b_nonzero(const uint8_t *p) {
  __m128i zero = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)p), _mm_setzero_si128());
  return (unsigned)_mm_movemask_epi8(zero) ^ 0xffffu;
}
INLINE vf v_select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
INLINE void v_fill64(vf v[4], uint64_t keep, float fill) {
  for (int i = 0; i < 4; i++) {
    v[i] = v_select(m_of_bits((unsigned)(keep >> LANES * i & 0xffffu)), v[i], v_set1(fill));
  }
}
/* By integers, gcc makes one instruction of it and the addition that v_exp ends with. */
INLINE vf v_keep(vm m, vf a) { return _mm512_castsi512_ps(_mm512_maskz_mov_epi32(m, _mm512_castps_si512(a))); }

INLINE vu v_bits(vf a) { return _mm512_castps_si512(a); }
INLINE vf v_of_bits(vu a) { return _mm512_castsi512_ps(a); }
INLINE vu u_set1(uint32_t a) { return _mm512_set1_epi32((int)a); }
INLINE vu u_load(const uint32_t *p) { return _mm512_loadu_si512(p); }
INLINE void u_store(uint32_t *p, vu a) { _mm512_storeu_si512(p, a); }
INLINE vu u_add(vu a, vu b) { return _mm512_add_epi32(a, b); }
INLINE vu u_xor(vu a, vu b) { return _mm512_xor_si512(a, b); }
INLINE vu u_shl(vu a, int c) { return _mm512_slli_epi32(a, (unsigned)c); }
INLINE vu u_shr(vu a, int c) { return _mm512_srli_epi32(a, (unsigned)c); }
INLINE vm u_eq(vu a, vu b) { return _mm512_cmpeq_epi32_mask(a, b); }
INLINE vu u_mul_wide(vu a, uint32_t b, vu *hi) {
  __m512i factor = _mm512_set1_epi32((int)b);
  __m512i even = _mm512_mul_epu32(a, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
  *hi = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  return _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
}

INLINE size_t v_compress(float *p, vf v, vm m) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(m, v));
  return (size_t)__builtin_popcount(m);
}
INLINE size_t u_compress(uint32_t *p, vu v, vm m) {
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(m, v));
  return (size_t)__builtin_popcount(m);
}

INLINE __m256 low_half(vf a) { return _mm512_castps512_ps256(a); }
INLINE __m256 high_half(vf a) { return _mm512_extractf32x8_ps(a, 1); }

INLINE float v_max_across(vf a) {
  __m256 m8 = _mm256_max_ps(low_half(a), high_half(a));
  __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
  __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
  return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}
INLINE float v_sum_across(vf a) {
  __m256 s8 = _mm256_add_ps(low_half(a), high_half(a));
  __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

/* Of each four lanes of two vectors, lanes i and i + 2 added: two of a, then two of b. */
INLINE vf add_apart(vf a, vf b) {
  return _mm512_add_ps(_mm512_mask_blend_ps(0xCCCC, a, b), _mm512_shuffle_ps(a, b, 0x4E));
}
/* Of each four lanes of four vectors, the sums. */
INLINE vf v_sum_fours(const vf *r) {
  vf ab = add_apart(r[0], r[1]), cd = add_apart(r[2], r[3]);
  return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xDD));
}
/* Neighbouring quarters added: the two pairs of `front`, then those of `back`. */
INLINE vf v_sum_pairs(vf front, vf back) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(front, back, 0x88), _mm512_shuffle_f32x4(front, back, 0xDD));
}

/* The halving order over sixteen rows: i and i + 8 of two rows, i and i + 4 of four, i and i + 2 of eight,
   neighbours of sixteen. Rows meet as 0 4 8 12, 1 5 9 13, ... so that the lanes come out in row order. */
enum { ROWS = 16 };
INLINE void v_max_rows(float *p, const vf *r) {
  vf two[8], four[4], eight[2];
  for (int i = 0; i < 8; i++) {
    int a = i % 4 + 8 * (i / 4), b = a + 4;
    two[i] = _mm512_max_ps(_mm512_shuffle_f32x4(r[a], r[b], 0x44), _mm512_shuffle_f32x4(r[a], r[b], 0xEE));
  }
  for (int i = 0; i < 4; i++) {
    four[i] =
        _mm512_max_ps(_mm512_shuffle_f32x4(two[i], two[i + 4], 0x88), _mm512_shuffle_f32x4(two[i], two[i + 4], 0xDD));
  }
  for (int i = 0; i < 2; i++) {
    eight[i] = _mm512_max_ps(_mm512_shuffle_ps(four[2 * i], four[2 * i + 1], 0x44),
                             _mm512_shuffle_ps(four[2 * i], four[2 * i + 1], 0xEE));
  }
  v_store(p, _mm512_max_ps(_mm512_shuffle_ps(eight[0], eight[1], 0x88), _mm512_shuffle_ps(eight[0], eight[1], 0xDD)));
}

/* The sum of e * 2^43 and 2^52 in double has the rounded weight as its low mantissa bits. */
INLINE __m512i weights8(__m256 e) {
  const __m512d magic = _mm512_set1_pd(0x1p52);
  __m512d d = _mm512_cvtps_pd(_mm256_mul_ps(e, _mm256_set1_ps(0x1p43f)));
  return _mm512_xor_si512(_mm512_castpd_si512(_mm512_add_pd(d, magic)), _mm512_castpd_si512(magic));
}
INLINE vw w_zero(void) { return _mm512_setzero_si512(); }
INLINE vw w_add(vw acc, vf e) {
  return _mm512_add_epi64(acc, _mm512_add_epi64(weights8(low_half(e)), weights8(high_half(e))));
}
INLINE uint64_t w_total(vw acc) {
  uint64_t part[8];
  _mm512_storeu_si512(part, acc);
  return part[0] + part[1] + part[2] + part[3] + part[4] + part[5] + part[6] + part[7];
}
INLINE void w_store(uint64_t *p, vf e) {
  _mm512_storeu_si512(p, weights8(low_half(e)));
  _mm512_storeu_si512(p + 8, weights8(high_half(e)));
}

INLINE void line_stream(void *to, const void *from) { _mm512_stream_si512(to, _mm512_loadu_si512(from)); }
INLINE void line_stream_zero(void *to) { _mm512_stream_si512(to, _mm512_setzero_si512()); }
INLINE void lines_streamed(void) { _mm_sfence(); }
INLINE void line_prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
