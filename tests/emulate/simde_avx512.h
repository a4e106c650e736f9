/* AVX-512 on a CPU that has AVX2, by SIMDe (gcc only). Its names replace the intrinsics'; below is what SIMDe 0.8.2
   lacks, and what it does otherwise: its masked loads read the whole vector, its masked stores write all of it. */
#pragma GCC target("avx2,fma,f16c")
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

static inline __m512d emulated_cvtps_pd(__m256 a) {
  __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
  return _mm512_insertf64x4(_mm512_castpd256_pd512(low), high, 1);
}

static inline __m512i emulated_cvtepi8_epi32(__m128i a) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_cvtepi8_epi32(a)), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)),
                            1);
}

#define emulated_cvtps_ph(a, how)                                                                    \
  _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(_mm512_castps512_ps256(a), (how))), \
                          _mm256_cvtps_ph(_mm512_extractf32x8_ps((a), 1), (how)), 1)

static inline __m256i emulated_cvtepi32_epi16(__m512i a) {
  uint32_t lane[16];
  uint16_t low[16];
  _mm512_storeu_si512(lane, a);
  for (int i = 0; i < 16; i++) {
    low[i] = (uint16_t)lane[i];
  }
  return _mm256_loadu_si256((const __m256i *)low);
}

static inline __m128i emulated_cvtepi32_epi8(__m512i a) {
  uint32_t lane[16];
  uint8_t low[16];
  _mm512_storeu_si512(lane, a);
  for (int i = 0; i < 16; i++) {
    low[i] = (uint8_t)lane[i];
  }
  return _mm_loadu_si128((const __m128i *)low);
}

static inline void emulated_mask_storeu_ps(float *p, __mmask16 mask, __m512 a) {
  float lane[16];
  _mm512_storeu_ps(lane, a);
  for (int i = 0; i < 16; i++) {
    if (mask >> i & 1) {
      p[i] = lane[i];
    }
  }
}

static inline __m512 emulated_mask_loadu_ps(__m512 a, __mmask16 mask, const float *p) {
  float lane[16];
  _mm512_storeu_ps(lane, a);
  for (int i = 0; i < 16; i++) {
    lane[i] = mask >> i & 1 ? p[i] : lane[i];
  }
  return _mm512_loadu_ps(lane);
}

#undef _mm512_mask_loadu_ps
#undef _mm512_mask_storeu_ps
#define _mm512_cvtps_pd emulated_cvtps_pd
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtps_ph emulated_cvtps_ph
#define _mm512_stream_si512 _mm512_storeu_si512
#define _mm512_mask_loadu_ps emulated_mask_loadu_ps
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
