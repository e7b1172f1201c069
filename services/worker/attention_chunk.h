/* Attention of a few query rows to one chunk of positions: scores, weights, weighted sums of values. */

#pragma once

#include "attention_ahead.h"

#define FLOOR (-1e30f) /* below every score, and finite: a row that has seen nothing yet is no NaN */

/* ---- two small matrix products, in blocks of query rows that stay in registers ---- */

/* Unrolled whole, so that the sums are registers and no array. */
#define EACH_ROW _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++)
#define EACH_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++)

/* scores[r][0..CHUNK) = sum over d < dim of q[r][d] * packed[d] */
INLINE void score_block(int rows, int vectors, int64_t dim, const float *q, const float *packed, float *scores) {
    vf sum[BLOCK_ROWS][VECTORS];
    EACH_ROW EACH_VECTOR sum[r][v] = all(0.0f);
    for (int64_t d = 0; d < dim; d++)
        EACH_VECTOR {
            vf key = load(packed + d * CHUNK + v * LANES);
            EACH_ROW sum[r][v] += all(q[r * dim + d]) * key;
        }
    EACH_ROW EACH_VECTOR store(scores + r * CHUNK + v * LANES, sum[r][v]);
}

/* Values of one chunk, each a row of numbers. */
struct values {
    const void *const *rows;
    int count, is_half;
};

/* sums[r][column..] += sum over i of weights[r][i] * values[i][column..], vectors wide */
INLINE void value_block(int rows, int vectors, int is_half, struct values values, const float *weights, int64_t column,
                        float *sums, int64_t stride, struct ahead *ahead) {
    vf sum[BLOCK_ROWS][VECTORS];
    EACH_ROW EACH_VECTOR sum[r][v] = load(sums + r * stride + column + v * LANES);
    for (int i = 0; i < values.count; i++) {
        if (i % 2 == 0) call_ahead(ahead);
        EACH_VECTOR {
            vf value = is_half ? widened((const uint16_t *)values.rows[i] + column + v * LANES)
                               : load((const float *)values.rows[i] + column + v * LANES);
            EACH_ROW sum[r][v] += all(weights[r * CHUNK + i]) * value;
        }
    }
    EACH_ROW EACH_VECTOR store(sums + r * stride + column + v * LANES, sum[r][v]);
}

INLINE void value_columns(int rows, int is_half, struct values values, const float *weights, int64_t columns,
                          float *sums, struct ahead *ahead) {
    int64_t column = 0;
    for (; column + VECTORS * LANES <= columns; column += VECTORS * LANES)
        value_block(rows, VECTORS, is_half, values, weights, column, sums, columns, ahead);
    for (; column < columns; column += LANES)
        value_block(rows, 1, is_half, values, weights, column, sums, columns, ahead);
}

#define FOR_EACH_ROW_COUNT(CASE) CASE(1) CASE(2) WIDER_ROW_COUNTS(CASE)
#if BLOCK_ROWS == 6
#define WIDER_ROW_COUNTS(CASE) CASE(3) CASE(4) CASE(5) CASE(6)
#elif BLOCK_ROWS == 3
#define WIDER_ROW_COUNTS(CASE) CASE(3)
#else
#define WIDER_ROW_COUNTS(CASE)
#endif

INLINE int rows_at_once(int rows) {
    int blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    return (rows + blocks - 1) / blocks;
}

static void score_rows(int rows, int64_t dim, const float *q, const float *packed, float *scores) {
#define CASE(N) \
    case N: score_block(N, VECTORS, dim, q, packed, scores); break;
    switch (rows) { FOR_EACH_ROW_COUNT(CASE) }
#undef CASE
}

static void value_rows(int rows, struct values values, const float *weights, int64_t columns, float *sums,
                       struct ahead *ahead) {
#define CASE(N)                                                                              \
    case N:                                                                                  \
        if (values.is_half) value_columns(N, 1, values, weights, columns, sums, ahead);     \
        else value_columns(N, 0, values, weights, columns, sums, ahead);                    \
        break;
    switch (rows) { FOR_EACH_ROW_COUNT(CASE) }
#undef CASE
}

/* ---- softmax ---- */

struct bend {
    float scale, softcap; /* score * scale is in units of log2(e); with a softcap: softcap * tanh(score * scale) */
};

INLINE vf bent(vf score, struct bend bend, int is_capped) {
    score *= all(bend.scale);
    if (!is_capped) return score;
    /* tanh(x) = 1 - 2 / (exp(2x) + 1), with x small enough that exp stays finite; beyond 20 it is 1 in float anyway */
    vf x = choose(score > all(20.0f), all(20.0f), choose(score < all(-20.0f), all(-20.0f), score));
    vf e = exp2_of(x * all(2.885390082f));
    return all(bend.softcap) * (all(1.0f) - all(2.0f) / (e + all(1.0f)));
}

/* What a row has come to so far: its largest score, the sum of its weights lane by lane, its sums of values. */
struct course_of_row {
    float *most, *total, *sums;
    int64_t columns;
};

/* A larger score than all before: what has been summed weighs less. */
static void shrink(struct course_of_row row, float now) {
    float by = exp2_one(*row.most - now);
    store(row.total, load(row.total) * all(by));
    for (int64_t c = 0; c < row.columns; c += LANES) store(row.sums + c, load(row.sums + c) * all(by));
    *row.most = now;
}

INLINE void soften_as(int is_capped, float *scores, uint16_t *halves, int from, int to, struct bend bend,
                      struct course_of_row row) {
    enum { vectors = VECTORS };
    vf score[VECTORS], best = all(FLOOR);
    EACH_VECTOR score[v] = bent(load(scores + v * LANES), bend, is_capped);
    if (from > 0 || to < CHUNK) {
        vi lane;
        UNROLLED for (int i = 0; i < LANES; i++) lane[i] = i;
        EACH_VECTOR {
            vi place = lane + v * LANES;
            score[v] = choose((place >= from) & (place < to), score[v], all(-__builtin_inff()));
        }
    }
    EACH_VECTOR best = larger(score[v], best);
    float now = largest_lane(best), most = *row.most;
    if (now > most) {
        shrink(row, now);
        most = now;
    }
    vf sum = load(row.total);
    EACH_VECTOR {
        vf weight = score[v] - all(most);
        weight = halves ? exp2_for_halves(weight) : exp2_of(weight);
        if (halves) store_narrowed(halves + v * LANES, weight);
        else store(scores + v * LANES, weight);
        sum += weight;
    }
    store(row.total, sum);
}

/* Turn a row's scores into weights; those outside of [from, to) weigh nothing, whatever they are. They take the place
 * of the scores, or go to `halves` if there is such a place. */
static void soften(float *scores, uint16_t *halves, int from, int to, struct bend bend, struct course_of_row row) {
    if (bend.softcap != 0.0f) soften_as(1, scores, halves, from, to, bend, row);
    else if (halves) soften_as(0, scores, halves, from, to, bend, row);
    else soften_as(0, scores, NULL, from, to, bend, row);
}
