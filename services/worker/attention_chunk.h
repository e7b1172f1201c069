/* Attention of a few query rows to one chunk of positions: scores, weights, weighted sums of values. */

#pragma once

#include "attention_vectors.h"

#define FLOOR (-1e30f) /* below every score, and finite: a row that has seen nothing yet is no NaN */

/* ---- two small matrix products, in blocks of query rows that stay in registers ---- */

/* scores[r][0..CHUNK) = sum over c of q[r][c] * packed[c]. PAIRWISE q: dwords of two halves; else floats. */
INLINE void score_block(int rows, int is_half, int64_t dwords, const void *q, int64_t q_stride, const uint32_t *packed,
                        float *scores) {
    vf sum[BLOCK_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = all(0.0f);
    for (int64_t c = 0; c < dwords; c++) {
        const uint32_t *key = packed + c * CHUNK;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            vu bits = (vu) * (const loose_vu *)(key + v * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
#if PAIRWISE
                if (is_half) {
                    __m512i pair = _mm512_set1_epi32(((const int32_t *)q)[r * q_stride + c]);
                    sum[r][v] = (vf)_mm512_dpbf16_ps((__m512)sum[r][v], (__m512bh)pair, (__m512bh)bits);
                    continue;
                }
#endif
                const float *row = (const float *)q + r * q_stride;
                if (is_half) {
                    sum[r][v] += all(row[2 * c]) * (vf)(bits << 16);
                    sum[r][v] += all(row[2 * c + 1]) * (vf)(bits & 0xffff0000u);
                } else {
                    sum[r][v] += all(row[c]) * (vf)bits;
                }
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) store(scores + r * CHUNK + v * LANES, sum[r][v]);
}

/* sums[r][0..vectors*LANES) += sum over i < count of weights[r][i] * values[i][column...] */
INLINE void value_block(int rows, int vectors, int is_half, int count, const float *weights, const void *const *values,
                        int64_t column, float *sums, int64_t stride) {
    vf sum[BLOCK_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = load(sums + r * stride + column + v * LANES);
    for (int i = 0; i < count; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vf value = is_half ? widened((const uint16_t *)values[i] + column + v * LANES)
                               : load((const float *)values[i] + column + v * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) sum[r][v] += all(weights[r * CHUNK + i]) * value;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(sums + r * stride + column + v * LANES, sum[r][v]);
}

INLINE void value_columns(int rows, int is_half, int count, const float *weights, const void *const *values,
                          int64_t columns, float *sums) {
    int64_t column = 0;
    for (; column + VECTORS * LANES <= columns; column += VECTORS * LANES)
        value_block(rows, VECTORS, is_half, count, weights, values, column, sums, columns);
    for (; column < columns; column += LANES)
        value_block(rows, 1, is_half, count, weights, values, column, sums, columns);
}

#define FOR_EACH_ROW_COUNT(CASE) CASE(1) CASE(2) WIDER_ROW_COUNTS(CASE)
#if BLOCK_ROWS == 6
#define WIDER_ROW_COUNTS(CASE) CASE(3) CASE(4) CASE(5) CASE(6)
#elif BLOCK_ROWS == 3
#define WIDER_ROW_COUNTS(CASE) CASE(3)
#else
#define WIDER_ROW_COUNTS(CASE)
#endif

static void score_rows(int rows, int is_half, int64_t dwords, const void *q, int64_t q_stride, const uint32_t *packed,
                       float *scores) {
#define CASE(N)                                                                           \
    case N:                                                                               \
        if (is_half) score_block(N, 1, dwords, q, q_stride, packed, scores);              \
        else score_block(N, 0, dwords, q, q_stride, packed, scores);                      \
        break;
    switch (rows) { FOR_EACH_ROW_COUNT(CASE) }
#undef CASE
}

static void value_rows(int rows, int is_half, int count, const float *weights, const void *const *values,
                       int64_t columns, float *sums) {
#define CASE(N)                                                                           \
    case N:                                                                               \
        if (is_half) value_columns(N, 1, count, weights, values, columns, sums);          \
        else value_columns(N, 0, count, weights, values, columns, sums);                  \
        break;
    switch (rows) { FOR_EACH_ROW_COUNT(CASE) }
#undef CASE
}

/* ---- softmax ---- */

struct bend {
    float scale, softcap; /* score * scale is in units of log2(e); with a softcap: softcap * tanh(score * scale) */
};

INLINE vf bent(vf score, struct bend bend) {
    score *= all(bend.scale);
    if (bend.softcap == 0.0f) return score;
    /* tanh(x) = 1 - 2 / (exp(2x) + 1), with x small enough that exp stays finite; beyond 20 it is 1 in float anyway */
    vf x = choose(score > all(20.0f), all(20.0f), choose(score < all(-20.0f), all(-20.0f), score));
    vf e = exp2_of(x * all(2.885390082f));
    return all(bend.softcap) * (all(1.0f) - all(2.0f) / (e + all(1.0f)));
}

/* Turn a row's scores into weights; those outside of [from, to) weigh nothing, whatever they are. */
static void soften(float *scores, int from, int to, struct bend bend, float *most, float *total, float *sums,
                   int64_t columns) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    vf score[VECTORS], best = all(FLOOR);
    for (int v = 0; v < VECTORS; v++) {
        vi place = lane + v * LANES;
        score[v] = choose((place >= from) & (place < to), bent(load(scores + v * LANES), bend), all(-__builtin_inff()));
        best = larger(score[v], best);
    }
    float before = *most, now = largest_lane(best);
    if (now > before) {
        float shrink = exp2_one(before - now);
        store(total, load(total) * all(shrink));
        for (int64_t c = 0; c < columns; c += LANES) store(sums + c, load(sums + c) * all(shrink));
        *most = now;
    }
    vf sum = load(total);
    for (int v = 0; v < VECTORS; v++) {
        vf weight = exp2_of(score[v] - all(*most));
        store(scores + v * LANES, weight);
        sum += weight;
    }
    store(total, sum);
}
