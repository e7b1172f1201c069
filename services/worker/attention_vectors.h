/* Vectors of floats as wide as the processor has them: AVX-512, AVX2, or four lanes on whatever there is.
 * Arithmetic is the compiler's own (vector extensions of gcc and clang); intrinsics only where it has no word for it. */

#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define WIDE 1
#define LANES 16
#define BLOCK_ROWS 6
#if defined(__AVX512BF16__)
#define PAIRWISE 1
#define VARIANT "avx512_bf16"
#else
#define VARIANT "avx512"
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#define BLOCK_ROWS 3
#define VARIANT "avx2"
#else
#define LANES 4
#define BLOCK_ROWS 2
#define VARIANT "portable"
#endif
#ifndef PAIRWISE
#define PAIRWISE 0
#endif
#ifndef WIDE
#define WIDE 0
#endif


#define VECTORS 4
#define CHUNK (LANES * VECTORS) /* positions whose scores are held at a time */

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef float loose_vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t loose_vu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t loose_vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t loose_u32 __attribute__((aligned(2), may_alias));


INLINE vf load(const float *at) { return (vf) * (const loose_vf *)at; }
INLINE void store(float *at, vf given) { *(loose_vf *)at = (loose_vf)given; }
INLINE vf all(float given) { return given - (vf){0}; }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }

INLINE vf widened(const uint16_t *at) {
    vh halves = (vh) * (const loose_vh *)at;
    return (vf)(__builtin_convertvector(halves, vu) << 16);
}

INLINE float largest_lane(vf given) {
    float best = given[0];
    for (int lane = 1; lane < LANES; lane++) best = given[lane] > best ? given[lane] : best;
    return best;
}

INLINE float sum_of_lanes(vf given) {
    float sum = given[0];
    for (int lane = 1; lane < LANES; lane++) sum += given[lane];
    return sum;
}

/* 2^x for x <= 127; 0 below 2^-126. Relative error 1e-7. */
INLINE vf exp2_of(vf x) {
    const vf rounder = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    vi tiny = x < all(-126.0f);
    x = choose(tiny, all(-126.0f), x);
    vf shifted = x + rounder;
    vf f = x - (shifted - rounder);
    vf y = all(1.540353039e-4f);
    y = y * f + all(1.333355815e-3f);
    y = y * f + all(9.618129108e-3f);
    y = y * f + all(5.550410866e-2f);
    y = y * f + all(2.402265070e-1f);
    y = y * f + all(6.931471806e-1f);
    y = y * f + all(1.0f);
    vi exponent = (vi)shifted << 23;
    return choose(tiny, all(0.0f), (vf)((vi)y + exponent));
}

INLINE float exp2_one(float x) { return exp2_of(all(x))[0]; }

/* ---- keys of LANES positions side by side: dword c of position i goes to packed[c * CHUNK + i] ---- */

#if WIDE
INLINE void pack_square(const void *const *rows, int64_t at, int count, uint32_t *packed) {
    __m512i r[16], t[16];
    __mmask16 mask = (__mmask16)((1u << count) - 1);
    for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, (const uint32_t *)rows[i] + at);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        __m512i even_a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), odd_a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        __m512i even_b = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        __m512i odd_b = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        t[i] = _mm512_shuffle_i32x4(even_a, even_b, 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(odd_a, odd_b, 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(even_a, even_b, 0xdd);
        t[12 + i] = _mm512_shuffle_i32x4(odd_a, odd_b, 0xdd);
    }
    for (int c = 0; c < count; c++) _mm512_storeu_si512(packed + (at + c) * CHUNK, t[c]);
}
#elif LANES == 8
INLINE void pack_square(const void *const *rows, int64_t at, int count, uint32_t *packed) {
    __m256i r[8], t[8];
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
    for (int i = 0; i < 8; i++) r[i] = _mm256_maskload_epi32((const int *)rows[i] + at, mask);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x20);
        t[4 + i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x31);
    }
    for (int c = 0; c < count; c++) _mm256_storeu_si256((__m256i *)(packed + (at + c) * CHUNK), t[c]);
}
#else
INLINE void pack_square(const void *const *rows, int64_t at, int count, uint32_t *packed) {
    for (int i = 0; i < LANES; i++)
        for (int c = 0; c < count; c++)
            packed[(at + c) * CHUNK + i] = *((const loose_u32 *)rows[i] + at + c);
}
#endif

static void pack(const void *const *rows, int64_t dwords, uint32_t *packed) {
    int64_t at = 0;
    for (; at + LANES <= dwords; at += LANES) pack_square(rows, at, LANES, packed);
    if (at < dwords) pack_square(rows, at, (int)(dwords - at), packed);
}

