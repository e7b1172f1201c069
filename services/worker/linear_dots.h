/* Up to 32 rows against steps of a panel, in dots: tiles lie in pairs as they are wanted. Included by linear.h. */

#pragma once

#define DOT_ROWS 12 /* rows whose sums fit into registers, two vectors for each */
#define FOR_EACH_DOT_ROW_COUNT(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#define EACH_DOT_ROW _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++)

INLINE void linear_dots(int rows, const uint16_t *x, int64_t x_stride, const char *weights, int64_t steps, float *sums,
                        int is_more, struct linear_stream *stream, int lines) {
    vf low[DOT_ROWS], high[DOT_ROWS];
    EACH_DOT_ROW {
        low[r] = is_more ? load(sums + r * PANEL) : all(0.0f);
        high[r] = is_more ? load(sums + r * PANEL + 16) : all(0.0f);
    }
    for (int64_t step = 0; step < steps; step++, x += STEP, weights += STEP_BYTES) {
        linear_stream_call(stream, lines);
        for (int64_t pair = 0; pair < STEP / 2; pair++) {
            vu first = linear_pairs(weights, pair, 0), second = linear_pairs(weights, pair, 16);
            EACH_DOT_ROW {
                vu given = pair_of(x + r * x_stride + 2 * pair);
                low[r] = dot(low[r], given, first);
                high[r] = dot(high[r], given, second);
            }
        }
    }
    EACH_DOT_ROW {
        store(sums + r * PANEL, low[r]);
        store(sums + r * PANEL + 16, high[r]);
    }
}

static void linear_dot_blocks(int64_t rows, const uint16_t *x, int64_t x_stride, const char *weights, int64_t steps,
                              float *sums, int is_more, struct linear_stream *stream, int lines) {
    int64_t blocks = (rows + DOT_ROWS - 1) / DOT_ROWS, each = (rows + blocks - 1) / blocks;
    lines = (int)((lines + blocks - 1) / blocks);
    for (int64_t row = 0; row < rows; row += each) {
        const uint16_t *from = x + row * x_stride;
        float *to = sums + row * PANEL;
#define CASE(N) \
    case N: linear_dots(N, from, x_stride, weights, steps, to, is_more, stream, lines); break;
        switch (row + each < rows ? each : rows - row) { FOR_EACH_DOT_ROW_COUNT(CASE) }
#undef CASE
    }
}
