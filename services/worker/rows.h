/* What lies between the matrix products: one row of a step at a time, float sums, any row by any thread.
 *
 * A row is dense; rows of one value lie `stride` elements apart. Elements are bfloat16 or float, the same type for all
 * values of a step. */

#pragma once

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "attention_vectors.h"

#define ROWS_AT_ONCE 4 /* rows that a thread takes at a time */

/* Up to a whole vector from `at`, zeros where less is left. */
INLINE vf take(const void *row, int64_t at, int64_t left, int is_half) {
    if (left >= LANES) return is_half ? widened((const uint16_t *)row + at) : load((const float *)row + at);
    float few[LANES] = {0};
    for (int64_t i = 0; i < left; i++)
        few[i] = is_half ? one_widened(((const uint16_t *)row)[at + i]) : ((const float *)row)[at + i];
    return load(few);
}

INLINE void give(void *row, int64_t at, int64_t left, int is_half, vf given) {
    if (is_half) store_first_narrowed((uint16_t *)row + at, given, left);
    else store_first((float *)row + at, given, left);
}

/* out = (row - mean) / sqrt(variance + epsilon) * weight + bias for each group; without a mean it is the RMS norm. */
INLINE void norm_group(const void *row, void *out, const float *weight, const float *bias, int64_t width, float epsilon,
                       int centred, int is_half) {
    vf sum = all(0.0f), squares = all(0.0f);
    float mean = 0.0f;
    if (centred) {
        for (int64_t at = 0; at < width; at += LANES) sum += take(row, at, width - at, is_half);
        mean = sum_of_lanes(sum) / (float)width;
    }
    for (int64_t at = 0; at < width; at += LANES) {
        vf given = take(row, at, width - at, is_half);
        if (centred) { /* lanes beyond the end must add nothing */
            given -= all(mean);
            for (int64_t lane = width - at; lane < LANES; lane++) given[lane] = 0.0f;
        }
        squares += given * given;
    }
    vf factor = all(1.0f / sqrtf(sum_of_lanes(squares) / (float)width + epsilon));
    for (int64_t at = 0; at < width; at += LANES) {
        int64_t left = width - at;
        vf given = (take(row, at, left, is_half) - all(mean)) * factor;
        if (weight) given *= take(weight, at, left, 0);
        if (bias) given += take(bias, at, left, 0);
        give(out, at, left, is_half, given);
    }
}

/* Pairs (i, i + half) of each head turn by their angle; numbers beyond 2 * half stay. In place. */
INLINE void rotate_row(void *row, const void *cosines, const void *sines, int64_t heads, int64_t dim, int64_t half,
                       int is_half) {
    for (int64_t head = 0; head < heads; head++) {
        char *at_head = (char *)row + head * dim * (is_half ? 2 : 4);
        for (int64_t at = 0; at < half; at += LANES) {
            int64_t left = half - at;
            vf a = take(at_head, at, left, is_half), b = take(at_head, half + at, left, is_half);
            vf cos_a = take(cosines, at, left, is_half), cos_b = take(cosines, half + at, left, is_half);
            vf sin_a = take(sines, at, left, is_half), sin_b = take(sines, half + at, left, is_half);
            give(at_head, at, left, is_half, a * cos_a - b * sin_a);
            give(at_head, half + at, left, is_half, b * cos_b + a * sin_b);
        }
    }
}

INLINE void add_row(const void *a, const void *b, void *out, int64_t width, int is_half) {
    for (int64_t at = 0; at < width; at += LANES) {
        int64_t left = width - at;
        give(out, at, left, is_half, take(a, at, left, is_half) + take(b, at, left, is_half));
    }
}
