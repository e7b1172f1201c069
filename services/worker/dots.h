/* Dots: vectors that multiply pairs of bfloat16 and add both products to a float (avx512_bf16).
 *
 * Where there are AMX tiles they do more. Without them it depends on who made the processor: AMD's take as many of
 * these instructions as of those on floats, so that twice as much is multiplied (Zen 4: 236 and 118 GFLOP/s on one
 * core); Intel's were measured at half the rate of floats. What they add to, and what comes out, is 0 below 2^-126. */

#pragma once

#include "attention_vectors.h"
#include "tiles.h"

#if LANES == 16 && defined(__AVX512BF16__) && !HAS_TILES && !defined(NO_DOTS)
#define HAS_DOTS 1
#define DOTS_VARIANT "avx512_bf16"

#ifdef ANYONES_DOTS /* for tests: whoever made the processor */
INLINE int dots_are_fast(void) { return 1; }
#else
INLINE int dots_are_fast(void) { return __builtin_cpu_is("amd"); }
#endif

/* sum[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]; the pairs lie in words. */
INLINE vf dot(vf sum, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

/* The same pair in each lane. */
INLINE vu pair_of(const uint16_t *at) { return *(const loose_u32 *)at + (vu){0}; }

#else
#define HAS_DOTS 0
#endif
