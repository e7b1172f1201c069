/* The two products of a chunk in dots. Included by attention_pairs.h. */

#pragma once

#define PAIRS_VARIANT DOTS_VARIANT
/* Query rows of one item, at most: packing is paid once for all of them. A prompt of 512: 46.7 ms with 24, 42.6 with 48,
 * 41.9 with 96. */
#define PAIRED_ROWS 48

#include "attention_few.h"

/* scores[r][0..CHUNK) = sum over d < dim of q[r][d] * key[position][d] */
INLINE void dot_scores(int rows, int vectors, int64_t dim, const uint16_t *q, const float *words, float *scores) {
    vf sum[BLOCK_ROWS][VECTORS];
    EACH_ROW EACH_VECTOR sum[r][v] = all(0.0f);
    for (int64_t pair = 0; pair < dim / 2; pair++) {
        vf key[VECTORS];
        EACH_VECTOR key[v] = load(words + pair * CHUNK + v * LANES);
        EACH_ROW {
            vu given = pair_of(q + r * dim + 2 * pair);
            EACH_VECTOR sum[r][v] = dot(sum[r][v], given, (vu)key[v]);
        }
    }
    EACH_ROW EACH_VECTOR store(scores + r * CHUNK + v * LANES, sum[r][v]);
}

/* sums[r][column..] += sum over positions of weights[r][position] * value[position][column..], vectors wide */
INLINE void dot_values(int rows, int vectors, int64_t dim, const uint16_t *weights, const uint16_t *pairs, int count,
                       float *sums) {
    vf sum[BLOCK_ROWS][VECTORS];
    EACH_ROW EACH_VECTOR sum[r][v] = load(sums + r * dim + v * LANES);
    for (int i = 0; i < count; i += 2, pairs += 2 * dim) {
        vf value[VECTORS];
        EACH_VECTOR value[v] = load((const float *)pairs + v * LANES);
        EACH_ROW {
            vu given = pair_of(weights + r * CHUNK + i);
            EACH_VECTOR sum[r][v] = dot(sum[r][v], given, (vu)value[v]);
        }
    }
    EACH_ROW EACH_VECTOR store(sums + r * dim + v * LANES, sum[r][v]);
}

INLINE void dot_columns(int rows, int64_t dim, const uint16_t *weights, const uint16_t *pairs, int count, float *sums) {
    int64_t column = 0;
    for (; column + VECTORS * LANES <= dim; column += VECTORS * LANES)
        dot_values(rows, VECTORS, dim, weights, pairs + 2 * column, count, sums + column);
    if (column < dim) dot_values(rows, PAIRED_DIMS / LANES, dim, weights, pairs + 2 * column, count, sums + column);
}

/* Scores of positions after the last are nobody's. */
static void paired_scores(int rows, int64_t dim, const uint16_t *q, const float *words, int count, float *scores) {
    int step = rows_at_once(rows);
    (void)count; /* the whole chunk, always: tiles ask */
    for (int row = 0; row < rows; row += step) {
        const uint16_t *from = q + row * dim;
        float *to = scores + row * CHUNK;
#define CASE(N) \
    case N: dot_scores(N, VECTORS, dim, from, words, to); break;
        switch (row + step < rows ? step : rows - row) { FOR_EACH_ROW_COUNT(CASE) }
#undef CASE
    }
}

static void paired_values(int rows, int64_t dim, const uint16_t *weights, const uint16_t *pairs, int count,
                          float *sums) {
    int step = rows_at_once(rows);
    for (int row = 0; row < rows; row += step) {
        const uint16_t *from = weights + row * CHUNK;
        float *to = sums + row * dim;
#define CASE(N) \
    case N: dot_columns(N, dim, from, pairs, count, to); break;
        switch (row + step < rows ? step : rows - row) { FOR_EACH_ROW_COUNT(CASE) }
#undef CASE
    }
}
