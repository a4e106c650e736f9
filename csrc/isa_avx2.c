/* x86-64 with AVX2, FMA and F16C; nothing elsewhere, so that every build lists every unit. */
#if defined __x86_64__ || defined _M_X64
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define LANEWISE_AVX2
#define ISA_NAME "avx2"
#define TABLE lanewise_avx2
#include "vec_math.h"

#include "kernels/all.h"

#include "table.h"

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
