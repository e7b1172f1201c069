/* Vectors of floats as wide as the processor has them: AVX-512, AVX2, or four lanes on whatever there is.
 * Arithmetic is the compiler's own (vector extensions of gcc and clang); intrinsics only where it has no word for it. */

#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define LANES 16
#define BLOCK_ROWS 6 /* query rows whose sums fit into registers, VECTORS for each */
#define VARIANT "avx512"
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

#define VECTORS 4
#define CHUNK (LANES * VECTORS) /* positions whose scores are held at a time */

#define UNROLLED _Pragma("GCC unroll 16") /* so that an array of vectors stays in registers */
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
#if LANES == 16 /* gcc makes three of the comparison below; the second one if either is no number, as there */
INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#else
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
#endif

INLINE vf widened(const uint16_t *at) {
#if LANES == 16 /* gcc makes two halves of the conversion below */
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
#else
    vh halves = (vh) * (const loose_vh *)at;
    return (vf)(__builtin_convertvector(halves, vu) << 16);
#endif
}

INLINE float one_widened(uint16_t given) {
    uint32_t bits = (uint32_t)given << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Rounded to the nearest half, ties to even; what is no number stays none. */
INLINE vh narrowed(vf given) {
#if LANES == 16 && defined(__AVX512BF16__) /* numbers below 2^-126 become 0 */
    return (vh)_mm512_cvtneps_pbh((__m512)given);
#else
    vu bits = (vu)given;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    rounded = (vu)choose(given == given, (vf)rounded, (vf)((vu){0} + 0x7fc0u));
    return __builtin_convertvector(rounded, vh);
#endif
}

INLINE void store_narrowed(uint16_t *at, vf given) { *(loose_vh *)at = (loose_vh)narrowed(given); }

/* Up to a whole vector, where less is left. */
INLINE void store_first(float *at, vf given, int64_t left) {
    memcpy(at, &given, left < LANES ? left * sizeof(float) : sizeof given);
}
INLINE void store_first_narrowed(uint16_t *at, vf given, int64_t left) {
    vh halves = narrowed(given);
    memcpy(at, &halves, left < LANES ? left * sizeof(uint16_t) : sizeof halves);
}

/* In registers: lanes that go through memory would have to be waited for. */
#if LANES == 16
INLINE float largest_lane(vf given) { return _mm512_reduce_max_ps((__m512)given); }
INLINE float sum_of_lanes(vf given) { return _mm512_reduce_add_ps((__m512)given); }
#elif LANES == 8
INLINE float largest_lane(vf given) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)given), _mm256_extractf128_ps((__m256)given, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
INLINE float sum_of_lanes(vf given) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)given), _mm256_extractf128_ps((__m256)given, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
#else
INLINE float larger_of(float a, float b) { return a > b ? a : b; }
INLINE float largest_lane(vf given) { return larger_of(larger_of(given[0], given[1]), larger_of(given[2], given[3])); }
INLINE float sum_of_lanes(vf given) { return given[0] + given[1] + given[2] + given[3]; }
#endif

/* 2^x for x <= 127; 0 below 2^-126; what is no number stays none. Relative error 1e-7. */
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
    vf power = (vf)(((vi)shifted << 23) + 0x3f800000); /* multiplied by, not added to the bits: no number stays none */
    return choose(tiny, all(0.0f), y * power);
}

/* The same for what is rounded to halves, for which numbers below 2^-126 are 0. Relative error 8e-5, a twentieth of
 * what rounding loses. */
INLINE vf exp2_for_halves(vf x) {
#if LANES == 16 && defined(__AVX512BF16__)
    const vf rounder = all(12582912.0f);
    x = larger(all(-126.0f), x); /* no number stays none */
    vf shifted = x + rounder, f = x - (shifted - rounder);
    vf y = all(0.0551716685f);
    y = y * f + all(0.2426111251f);
    y = y * f + all(0.6932609677f);
    y = y * f + all(0.9999280572f); /* below 1 for f = 0: what -126 comes to is 0 */
    return (vf)((vi)y + ((vi)shifted << 23));
#else
    return exp2_of(x);
#endif
}

INLINE float exp2_one(float x) { return exp2_of(all(x))[0]; }

/* ---- keys of LANES positions side by side, as floats: number d of position i goes to packed[d * CHUNK + i] ---- */

/* One word of a key for each position: a float, or two halves that follow each other. */
INLINE void store_words(float *packed, int64_t word, int is_half, vu words) {
    if (is_half) {
        store(packed + 2 * word * CHUNK, (vf)(words << 16));
        store(packed + (2 * word + 1) * CHUNK, (vf)(words & 0xffff0000u));
    } else {
        store(packed + word * CHUNK, (vf)words);
    }
}

#if LANES == 16
INLINE void pack_square(const void *const *rows, int64_t at, int count, int is_half, float *packed) {
    __m512i r[16], t[16];
    __mmask16 mask = (__mmask16)((1u << count) - 1);
    UNROLLED for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, (const uint32_t *)rows[i] + at);
    UNROLLED for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLLED for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLLED for (int i = 0; i < 4; i++) {
        __m512i even_a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), odd_a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        __m512i even_b = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        __m512i odd_b = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        t[i] = _mm512_shuffle_i32x4(even_a, even_b, 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(odd_a, odd_b, 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(even_a, even_b, 0xdd);
        t[12 + i] = _mm512_shuffle_i32x4(odd_a, odd_b, 0xdd);
    }
    UNROLLED for (int w = 0; w < LANES; w++)
        if (w < count) store_words(packed, at + w, is_half, (vu)t[w]);
}
#elif LANES == 8
INLINE void pack_square(const void *const *rows, int64_t at, int count, int is_half, float *packed) {
    __m256i r[8], t[8];
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
    UNROLLED for (int i = 0; i < 8; i++) r[i] = _mm256_maskload_epi32((const int *)rows[i] + at, mask);
    UNROLLED for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLLED for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLLED for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x20);
        t[4 + i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x31);
    }
    UNROLLED for (int w = 0; w < LANES; w++)
        if (w < count) store_words(packed, at + w, is_half, (vu)t[w]);
}
#else
INLINE void pack_square(const void *const *rows, int64_t at, int count, int is_half, float *packed) {
    for (int w = 0; w < count; w++) {
        vu words;
        for (int i = 0; i < LANES; i++) words[i] = *((const loose_u32 *)rows[i] + at + w);
        store_words(packed, at + w, is_half, words);
    }
}
#endif

INLINE void pack_all(const void *const *rows, int64_t dim, int is_half, float *packed) {
    int64_t at = 0, words = is_half ? dim / 2 : dim;
    for (; at + LANES <= words; at += LANES) pack_square(rows, at, LANES, is_half, packed);
    if (at < words) pack_square(rows, at, (int)(words - at), is_half, packed);
}

static inline void pack(const void *const *rows, int64_t dim, int is_half, float *packed) {
    if (is_half) pack_all(rows, dim, 1, packed);
    else pack_all(rows, dim, 0, packed);
}
