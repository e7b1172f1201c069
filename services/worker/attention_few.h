/* Attention of a few query rows, in dots, straight from keys and values where they lie: packing would not be paid back
 * by so few. With 3 rows a position takes 9.5 ns on one core of a Zen 4, packed 13.6. Included by attention_dots.h. */

#pragma once

#define FEW_ROWS 3
#define MOST_PIECES 4 /* of 32 dims: what is kept of the query rows in registers */
#define EACH_FEW_ROW _Pragma("GCC unroll 3") for (int r = 0; r < rows; r++)
#define EACH_OF_FOUR _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++)

/* ---- scores: products of a position lie in 16 lanes; 16 positions are summed into one vector ---- */

/* Each adds two vectors to one: lanes without a bit sum up what a has there and with that bit; lanes with it, b. */
INLINE vf joined_8(vf a, vf b) {
    __m512 own = _mm512_mask_blend_ps(0xff00, (__m512)a, (__m512)b);
    return (vf)(own + _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x4e));
}
INLINE vf joined_4(vf a, vf b) {
    const __m512i other = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    __m512 own = _mm512_mask_blend_ps(0xf0f0, (__m512)a, (__m512)b);
    return (vf)(own + _mm512_permutex2var_ps((__m512)a, other, (__m512)b));
}
INLINE vf joined_2(vf a, vf b) {
    __m512 own = _mm512_mask_blend_ps(0xcccc, (__m512)a, (__m512)b);
    return (vf)(own + _mm512_shuffle_ps((__m512)a, (__m512)b, 0x4e));
}
INLINE vf joined_1(vf a, vf b) {
    const __m512i other = _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
    __m512 own = _mm512_mask_blend_ps(0xaaaa, (__m512)a, (__m512)b);
    return (vf)(own + _mm512_permutex2var_ps((__m512)a, other, (__m512)b));
}
#define JOIN(bit, a, b) EACH_FEW_ROW (a).of[r] = joined_##bit((a).of[r], (b).of[r])

struct few_sums { vf of[FEW_ROWS]; };
struct few_queries { vu of[FEW_ROWS][MOST_PIECES]; };

/* Lane by lane, for one position. */
INLINE struct few_sums few_products(int rows, int pieces, const struct few_queries *q, const void *key) {
    struct few_sums sums;
    EACH_FEW_ROW sums.of[r] = all(0.0f);
    _Pragma("GCC unroll 4") for (int piece = 0; piece < pieces; piece++) {
        vu given = (vu)load((const float *)key + piece * LANES);
        EACH_FEW_ROW sums.of[r] = dot(sums.of[r], q->of[r][piece], given);
    }
    return sums;
}

/* Of positions 0, 4, 8 and 12. */
INLINE struct few_sums few_quarter(int rows, int pieces, const struct few_queries *q, const void *const *keys) {
    struct few_sums a = few_products(rows, pieces, q, keys[0]), b = few_products(rows, pieces, q, keys[8]);
    JOIN(8, a, b);
    b = few_products(rows, pieces, q, keys[4]);
    struct few_sums c = few_products(rows, pieces, q, keys[12]);
    JOIN(8, b, c);
    JOIN(4, a, b);
    return a;
}

INLINE void few_scores_of_16(int rows, int pieces, const struct few_queries *q, const void *const *keys, float *scores,
                             struct ahead *ahead) {
    struct few_sums even = few_quarter(rows, pieces, q, keys);
    call_ahead(ahead);
    struct few_sums more = few_quarter(rows, pieces, q, keys + 2);
    JOIN(2, even, more);
    call_ahead(ahead);
    struct few_sums odd = few_quarter(rows, pieces, q, keys + 1);
    call_ahead(ahead);
    more = few_quarter(rows, pieces, q, keys + 3);
    JOIN(2, odd, more);
    JOIN(1, even, odd);
    EACH_FEW_ROW store(scores + r * CHUNK, even.of[r]);
}

INLINE void few_scores_of(int rows, int pieces, const uint16_t *q, const void *const *keys, int count, float *scores,
                          struct ahead *ahead) {
    struct few_queries queries;
    EACH_FEW_ROW _Pragma("GCC unroll 4") for (int piece = 0; piece < pieces; piece++)
        queries.of[r][piece] = (vu)load((const float *)(q + (r * pieces + piece) * PAIRED_DIMS));
    for (int at = 0; at < count; at += LANES) few_scores_of_16(rows, pieces, &queries, keys + at, scores + at, ahead);
}

/* ---- values: two positions at a time, paired as they are read ---- */

/* sums[r][0..64) += sum over positions of weights[r][position] * value[position][0..64) */
INLINE void few_values_of(int rows, const uint16_t *weights, const void *const *values, int count, int64_t column,
                          float *sums, int64_t stride, struct ahead *ahead) {
    struct pairing pairing = pairing_of_words();
    vf sum[FEW_ROWS][4];
    EACH_FEW_ROW EACH_OF_FOUR sum[r][v] = load(sums + r * stride + v * LANES);
    for (int i = 0; i < count; i += 2) {
        const uint16_t *first = (const uint16_t *)values[i] + column;
        const uint16_t *second = i + 1 < count ? (const uint16_t *)values[i + 1] + column : NULL;
        if (i % 4 == 0) call_ahead(ahead);
        _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
            __m512i a = _mm512_loadu_si512(first + 32 * half);
            __m512i b = second ? _mm512_loadu_si512(second + 32 * half) : _mm512_setzero_si512();
            vu low = (vu)_mm512_permutex2var_epi16(a, pairing.lower, b);
            vu high = (vu)_mm512_permutex2var_epi16(a, pairing.upper, b);
            EACH_FEW_ROW {
                vu given = pair_of(weights + r * CHUNK + i);
                sum[r][2 * half] = dot(sum[r][2 * half], given, low);
                sum[r][2 * half + 1] = dot(sum[r][2 * half + 1], given, high);
            }
        }
    }
    EACH_FEW_ROW EACH_OF_FOUR store(sums + r * stride + v * LANES, sum[r][v]);
}

/* ---- by number of rows and of dims ---- */

static int is_few(int rows, int64_t dim) { return rows <= FEW_ROWS && (dim == 64 || dim == 128); }

/* Scores of positions after the last are nobody's. */
static void few_scores(int rows, int64_t dim, const uint16_t *q, const void *const *keys, int count, float *scores,
                       struct ahead *ahead) {
#define CASE(N)                                                            \
    case N:                                                                \
        if (dim == 64) few_scores_of(N, 2, q, keys, count, scores, ahead); \
        else few_scores_of(N, 4, q, keys, count, scores, ahead);           \
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) }
#undef CASE
}

static void few_values(int rows, int64_t dim, const uint16_t *weights, const void *const *values, int count,
                       float *sums, struct ahead *ahead) {
    for (int64_t column = 0; column < dim; column += 64) {
        float *to = sums + column;
#define CASE(N) \
    case N: few_values_of(N, weights, values, count, column, to, dim, ahead); break;
        switch (rows) { CASE(1) CASE(2) CASE(3) }
#undef CASE
    }
}
