/* x86-64 with AVX-512 F, BW, DQ and VL; nothing elsewhere, so that every build lists every unit. */
#if defined __x86_64__ || defined _M_X64
#ifndef LANEWISE_SIMDE /* the emulation compiles for what the host has */
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#endif

#define LANEWISE_AVX512
#define ISA_NAME "avx512"
#define TABLE lanewise_avx512
#include "vec_math.h"

#include "kernels/all.h"

#include "table.h"

#if defined __clang__ && !defined LANEWISE_SIMDE
#pragma clang attribute pop
#endif
#endif
