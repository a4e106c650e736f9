/* The 16-lane layer: every kernel is written once on these words, every ISA spells them once.

   The contract, the same bits on every ISA:
   - Always 16 lanes. Tails are loaded with a stated fill and stored masked; nothing beyond is touched.
   - v_fma rounds once. Nothing else is contracted (-ffp-contract=off), nothing is estimated, no libm.
   - v_max(a, b) is a > b ? a : b and v_min(a, b) is a < b ? a : b: with a NaN, b is the answer.
     So v_max(x, acc) drops the NaNs of x; who must know of them asks v_unord or n_see.
   - Reductions halve and combine: 64 to 16 by vectors, then lanes i and i + 8, + 4, + 2, + 1.
   - A mask (vm) is all or nothing in each lane; m_bits gives lane 0 in bit 0.
   - HELD vectors can be summed into with room left in the registers for what is summed.
   - Integer words wrap modulo 2^32; weights are exact in 64 bits, so their order cannot show.

   Words
     prefetch(p)                               may bring the line at p closer; p need not be an address
     prefetch_far(p)                           the same, but no closer than the second level of the caches
     vf v_set1(a)  v_load(p)  v_load_n(p, n, fill)  v_store(p, v)  v_store_n(p, n, v)
     vf v_once(v)                              v, whose load is not done again where v is used again
     vf v_load_f16(p)  v_load_bf16(p)  v_load_i8(p)   widened exactly; a NaN stays a NaN
     v_store_f16(p, v)  v_store_bf16(p, v)     rounded to nearest, ties to even; a NaN gives the quiet one
     v_store_i8(p, v)                          of whole numbers in [-128, 127]
     vf v_pair(a, b)  v_pair_f16 v_pair_i8     eight of a, then eight of b; v_twice(p) = v_pair(p, p)
     v_pairs_bf16(out, a, b)                   of sixteen of a and of b: out[0] the even ones, out[1] the odd ones
     vf v_add v_sub v_mul v_div v_max v_min (a, b)  v_fma(a, b, c) = a*b + c
     vm v_gt v_ge v_eq v_unord (a, b)  m_or m_and (m, m)  m_bits(m)  m_of_bits(bits)
     v_fill64(v, keep, fill)                   of v[0..3]: lane l of v[i] stays if bit 16 i + l is set, else fill
     unsigned b_nonzero(p)                     bit i: byte i of the sixteen at p is not 0
     vf v_select(m, a, b) = m ? a : b  v_keep(m, a) = m ? a : +0
     vu v_bits(v)  vf v_of_bits(u)  vu u_set1 u_load u_store u_add u_xor u_shl(u, c) u_shr(u, c)  vm u_eq(u, u)
     vu u_mul_wide(a, b, &hi)                  64-bit products: low words returned, high words in hi
     size_t v_compress(p, v, m)  u_compress(p, u, m)   lanes of m packed to p, which has room for 16; how many
     float v_max_across(v)  v_sum_across(v)  v_max_rows(p, r): p[j] = max across r[j], of ROWS
     vf v_sum_fours(r): of r[0..3], lane 4 q + j = the sum of lanes 4 q .. 4 q + 3 of r[j], added as (0 + 2) + (1 + 3)
     vf v_sum_pairs(a, b)                      quarters 0 + 1 and 2 + 3 of a, then of b
     vn n_none()  n_see(n, a, b)  n_any(n)      whether any of the vectors seen had a NaN
     weights: a weight is round_half_even(2^43 * e), e in [0, 1]
     vw w_zero()  w_add(acc, e)  w_total(acc)  w_store(p, e) writes 16 uint64
     lines: 64 bytes of memory, to 64-byte aligned; what is streamed goes around the caches where the ISA can
     line_stream(to, from)  line_stream_zero(to)  lines_streamed() before others may read it  line_prefetch(p) */
#ifndef LANEWISE_VEC_H
#define LANEWISE_VEC_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define WEIGHT_BITS 43

#if defined LANEWISE_AVX512 || defined LANEWISE_AVX2 || defined LANEWISE_NEON
#define INLINE static inline __attribute__((always_inline))
#else /* calls cost portable C nothing beside its words, and always inlined it is three times the code */
#define LANEWISE_SCALAR
#define INLINE static inline
#endif

#if defined LANEWISE_AVX512
#include "vec_avx512.h"
#elif defined LANEWISE_AVX2
#include "vec_avx2.h"
#elif defined LANEWISE_NEON
#include "vec_neon.h"
#else
#include "vec_scalar.h"
#endif

#endif
