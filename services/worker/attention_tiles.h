/* The two products of a chunk in AMX tiles. Included by attention_pairs.h. */

#pragma once

#define PAIRS_VARIANT "amx"
#define PAIRED_ROWS 96 /* query rows of one item, at most: packing is paid once for all of them */

#define TILED_BLOCK 32 /* query rows whose sums are held in tiles */

/* Tiles: sums of the upper rows 0, 1, of the lower rows 2, 3; left operands 4, 5; right operands 6, 7. */
#define TILED_PRODUCT(is_two, left, left_lower, left_stride, right, right_stride) \
    do {                                                                          \
        _tile_loadd(4, left, left_stride);                                        \
        _tile_loadd(6, right, right_stride);                                      \
        _tile_loadd(7, (const char *)(right) + 64, right_stride);                 \
        _tile_dpbf16ps(0, 4, 6);                                                  \
        _tile_dpbf16ps(1, 4, 7);                                                  \
        if (is_two) {                                                             \
            _tile_loadd(5, left_lower, left_stride);                              \
            _tile_dpbf16ps(2, 5, 6);                                              \
            _tile_dpbf16ps(3, 5, 7);                                              \
        }                                                                         \
    } while (0)

/* scores[r][0..count) = sum over d < dim of q[r][d] * key[position][d]; up to 32 rows */
INLINE void tiled_scores_of(int is_two, int64_t dim, const uint16_t *q, const float *words, int count, float *scores) {
    const int width = CHUNK * sizeof(float);
    for (int at = 0; at < count; at += 32) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < dim; d += PAIRED_DIMS) {
            const float *keys = words + d / 2 * CHUNK + at;
            TILED_PRODUCT(is_two, q + d, q + 16 * dim + d, dim * 2, keys, width);
        }
        _tile_stored(0, scores + at, width);
        _tile_stored(1, scores + at + 16, width);
        if (is_two) _tile_stored(2, scores + 16 * CHUNK + at, width);
        if (is_two) _tile_stored(3, scores + 16 * CHUNK + at + 16, width);
    }
}

/* sums[r][0..dim) += sum over positions of weights[r][position] * value[position][0..dim); up to 32 rows */
INLINE void tiled_values_of(int is_two, int64_t dim, const uint16_t *weights, const uint16_t *pairs, int count,
                            float *sums) {
    const int64_t width = dim * sizeof(float);
    for (int64_t d = 0; d < dim; d += PAIRED_DIMS) {
        _tile_loadd(0, sums + d, width);
        _tile_loadd(1, sums + d + 16, width);
        if (is_two) _tile_loadd(2, sums + 16 * dim + d, width);
        if (is_two) _tile_loadd(3, sums + 16 * dim + d + 16, width);
        for (int at = 0; at < count; at += 32) {
            const uint16_t *left = weights + at, *right = pairs + at * dim + d * 2;
            TILED_PRODUCT(is_two, left, left + 16 * CHUNK, CHUNK * 2, right, dim * 4);
        }
        _tile_stored(0, sums + d, width);
        _tile_stored(1, sums + d + 16, width);
        if (is_two) _tile_stored(2, sums + 16 * dim + d, width);
        if (is_two) _tile_stored(3, sums + 16 * dim + d + 16, width);
    }
}

/* Rows after the true ones are whatever lies there: their sums are nobody's. */
static void paired_scores(int rows, int64_t dim, const uint16_t *q, const float *words, int count, float *scores) {
    tiles_settle(q);
    for (int row = 0; row < rows; row += TILED_BLOCK) {
        const uint16_t *from = q + row * dim;
        if (rows - row > 16) tiled_scores_of(1, dim, from, words, count, scores + row * CHUNK);
        else tiled_scores_of(0, dim, from, words, count, scores + row * CHUNK);
    }
    tiles_settle(scores);
}

static void paired_values(int rows, int64_t dim, const uint16_t *weights, const uint16_t *pairs, int count,
                          float *sums) {
    tiles_settle(weights);
    for (int row = 0; row < rows; row += TILED_BLOCK) {
        const uint16_t *from = weights + row * CHUNK;
        if (rows - row > 16) tiled_values_of(1, dim, from, pairs, count, sums + row * dim);
        else tiled_values_of(0, dim, from, pairs, count, sums + row * dim);
    }
    tiles_settle(sums);
}
