/* AVX-512 on a CPU that has AVX2, by SIMDe (gcc only). Its names replace the intrinsics'; what SIMDe 0.8.2 lacks is
   below. Not for the tests of memory: its masked loads read the whole vector. */
#pragma GCC target("avx2,fma,f16c")
#pragma GCC diagnostic ignored "-Wpsabi"
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

static inline __m512d emulated_cvtps_pd(__m256 a) {
  __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
  return _mm512_insertf64x4(_mm512_castpd256_pd512(low), high, 1);
}
#define _mm512_cvtps_pd emulated_cvtps_pd
