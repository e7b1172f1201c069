/* Up to 32 rows against steps of a panel, in vectors: of floats, or as dots. Included by linear.h. */

#pragma once

/* A pair of inputs of LANES outputs that lie from `column` on. */
INLINE vu linear_pairs(const char *step, int64_t pair, int column) {
    return (vu) * (const loose_vu *)(step + column / 16 * TILE + pair * 64 + column % 16 * 4);
}

#if HAS_DOTS
#include "linear_dots.h"
#define LINEAR_VARIANT (dots_are_fast() ? DOTS_VARIANT : VARIANT)
#else
#define LINEAR_VARIANT VARIANT
#endif

#if LANES == 16
#define WIDE_VECTORS 2 /* columns that are summed at a time, in vectors: 32 of them */
#define WIDE_ROWS 8
#define FOR_EACH_WIDE_ROW_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#elif LANES == 8
#define WIDE_VECTORS 2 /* 16 of them: one tile after the other */
#define WIDE_ROWS 5
#define FOR_EACH_WIDE_ROW_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#else
#define WIDE_VECTORS 4
#define WIDE_ROWS 2
#define FOR_EACH_WIDE_ROW_COUNT(CASE) CASE(1) CASE(2)
#endif
#define WIDE (WIDE_VECTORS * LANES)

#define EACH_WIDE_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
#define EACH_WIDE_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < WIDE_VECTORS; v++)

/* Even inputs are the lower halves of the pairs: floats but for a shift; odd ones are the upper halves. */
INLINE void linear_block(int rows, const uint16_t *x, int64_t x_stride, const char *weights, int64_t steps, int column,
                         float *sums, int is_more, struct linear_stream *stream, int lines) {
    vf sum[WIDE_ROWS][WIDE_VECTORS];
    EACH_WIDE_ROW EACH_WIDE_VECTOR sum[r][v] = is_more ? load(sums + r * PANEL + column + v * LANES) : all(0.0f);
    for (int64_t step = 0; step < steps; step++, x += STEP, weights += STEP_BYTES) {
        linear_stream_call(stream, lines);
        for (int64_t pair = 0; pair < STEP / 2; pair++) {
            vf even[WIDE_VECTORS], odd[WIDE_VECTORS];
            EACH_WIDE_VECTOR {
                vu both = linear_pairs(weights, pair, column + v * LANES);
                even[v] = (vf)(both << 16);
                odd[v] = (vf)(both & 0xffff0000u);
            }
            EACH_WIDE_ROW {
                vu both = *(const loose_u32 *)(x + r * x_stride + 2 * pair) + (vu){0};
                vf given = (vf)(both << 16), other = (vf)(both & 0xffff0000u);
                EACH_WIDE_VECTOR sum[r][v] += given * even[v];
                EACH_WIDE_VECTOR sum[r][v] += other * odd[v];
            }
        }
    }
    EACH_WIDE_ROW EACH_WIDE_VECTOR store(sums + r * PANEL + column + v * LANES, sum[r][v]);
}

static void linear_blocks(int64_t rows, const uint16_t *x, int64_t x_stride, const char *weights, int64_t steps,
                          float *sums, int is_more, struct linear_stream *stream, int lines) {
#if HAS_DOTS
    if (dots_are_fast()) {
        linear_dot_blocks(rows, x, x_stride, weights, steps, sums, is_more, stream, lines);
        return;
    }
#endif
    int64_t blocks = (rows + WIDE_ROWS - 1) / WIDE_ROWS, each = (rows + blocks - 1) / blocks;
    int64_t passes = blocks * (PANEL / WIDE);
    lines = (int)((lines + passes - 1) / passes);
    for (int64_t row = 0; row < rows; row += each)
        for (int column = 0; column < PANEL; column += WIDE) {
            const uint16_t *from = x + row * x_stride;
            float *to = sums + row * PANEL;
#define CASE(N) \
    case N: linear_block(N, from, x_stride, weights, steps, column, to, is_more, stream, lines); break;
            switch (row + each < rows ? each : rows - row) { FOR_EACH_WIDE_ROW_COUNT(CASE) }
#undef CASE
        }
}

#define WIDENED_STEPS 4 /* widened and multiplied at a time: they stay in the first cache */

/* sums[row][output] = (is_more: what it was, else 0) + x W^T over some steps. */
static void linear_rows(int64_t rows, const uint16_t *x, int64_t x_stride, const struct linear_weights *w,
                        int64_t steps, float *sums, int is_more, struct linear_beside *beside) {
    linear_finish(&beside->pending, ROW_BLOCK);
    if (w->tiles) {
        linear_blocks(rows, x, x_stride, w->tiles, steps, sums, is_more, &beside->stream, beside->lines);
        return;
    }
    for (int64_t from = 0; from < steps; from += WIDENED_STEPS) {
        struct linear_weights some = *w;
        int64_t count = from + WIDENED_STEPS < steps ? WIDENED_STEPS : steps - from;
        some.int8 += from * INT8_STEP_BYTES;
        linear_widen(&some, count, &beside->stream, beside->lines);
        linear_blocks(rows, x + from * STEP, x_stride, (const char *)some.room, count, sums, is_more || from,
                      &beside->stream, 0);
    }
}

static int linear_init(void) { return 0; }
static void linear_thread_begin(void) {}
static void linear_thread_end(void) {}
