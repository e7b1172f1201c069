/* Linear layers whose numbers are floats: for models that compute in float32, on any processor.
 *
 * Weights lie in panels of 32 outputs, `[input][output of the panel]`, so that a panel is read from its first byte to its
 * last. A row's sums run over its inputs in one order, whatever else is in the call. */

#pragma once

#include "linear.h"

#define LINEAR_FLOAT 2

#if LANES == 16
#define FLOAT_VECTORS 2
#define FLOAT_ROWS 8
#elif LANES == 8
#define FLOAT_VECTORS 2
#define FLOAT_ROWS 5
#else
#define FLOAT_VECTORS 4
#define FLOAT_ROWS 2
#endif
#define FLOAT_WIDE (FLOAT_VECTORS * LANES)

static int64_t linear_floats_bytes(int64_t in, int64_t out) { return linear_panels(out) * PANEL * in * 4; }

/* weights: float [out][in] */
static void linear_floats_pack(const float *weights, int64_t in, int64_t out, float *packed) {
    memset(packed, 0, linear_floats_bytes(in, out));
    for (int64_t output = 0; output < out; output++)
        for (int64_t i = 0; i < in; i++)
            packed[(output / PANEL * in + i) * PANEL + output % PANEL] = weights[output * in + i];
}

struct floats_call {
    const struct linear *w;
    const float *x;
    int64_t x_stride;
    float *y;
    int64_t y_stride;
    const float *add;
    int64_t add_stride, rows, epilogue, activation;
};

INLINE void floats_sum(int rows, const float *x, int64_t x_stride, const float *weights, int64_t in, float *sums) {
    vf sum[FLOAT_ROWS][FLOAT_VECTORS];
    _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < FLOAT_VECTORS; v++) sum[r][v] = all(0.0f);
    for (int64_t i = 0; i < in; i++, weights += PANEL) {
        vf given[FLOAT_VECTORS];
        _Pragma("GCC unroll 4") for (int v = 0; v < FLOAT_VECTORS; v++) given[v] = load(weights + v * LANES);
        _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
            _Pragma("GCC unroll 4") for (int v = 0; v < FLOAT_VECTORS; v++)
                sum[r][v] += all(x[r * x_stride + i]) * given[v];
    }
    _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < FLOAT_VECTORS; v++) store(sums + r * PANEL + v * LANES, sum[r][v]);
}

static void floats_sum_rows(int rows, const float *x, int64_t x_stride, const float *weights, int64_t in, float *sums) {
    switch (rows) {
    case 1: floats_sum(1, x, x_stride, weights, in, sums); break;
    case 2: floats_sum(2, x, x_stride, weights, in, sums); break;
#if FLOAT_ROWS > 2
    case 3: floats_sum(3, x, x_stride, weights, in, sums); break;
    case 4: floats_sum(4, x, x_stride, weights, in, sums); break;
    case 5: floats_sum(5, x, x_stride, weights, in, sums); break;
#endif
#if FLOAT_ROWS > 5
    case 6: floats_sum(6, x, x_stride, weights, in, sums); break;
    case 7: floats_sum(7, x, x_stride, weights, in, sums); break;
    case 8: floats_sum(8, x, x_stride, weights, in, sums); break;
#endif
    }
}

static void floats_finish(const struct floats_call *call, int64_t panel, int64_t row, const float *sums) {
    int is_gated = call->epilogue == EPILOGUE_GATED;
    int64_t width = is_gated ? PANEL / 2 : PANEL, column = panel * width;
    int64_t columns = is_gated ? call->w->out / 2 : call->w->out, left = columns - column < width ? columns - column : width;
    float *y = call->y + row * call->y_stride + column;
    float with_bias[PANEL];
    for (int64_t i = 0; i < PANEL; i++) {
        int64_t output = panel * PANEL + i;
        with_bias[i] = sums[i] + (call->w->bias && output < call->w->out ? call->w->bias[output] : 0.0f);
    }
    for (int64_t at = 0; at < left; at += LANES) {
        vf given = load(with_bias + at);
        if (is_gated) given = linear_activated(given, call->activation) * load(with_bias + PANEL / 2 + at);
        if (call->epilogue == EPILOGUE_ACTIVATED) given = linear_activated(given, call->activation);
        if (call->epilogue == EPILOGUE_ADD) {
            vf added = all(0.0f);
            int64_t few = left - at < LANES ? left - at : LANES;
            memcpy(&added, call->add + row * call->add_stride + column + at, few * sizeof(float));
            given += added;
        }
        store_first(y + at, given, left - at);
    }
}

static int64_t floats_pieces(const struct floats_call *call) { return call->rows > 0 ? linear_panels(call->w->out) : 0; }

static void floats_panel(const struct floats_call *call, int64_t panel) {
    float sums[FLOAT_ROWS * PANEL];
    int64_t in = call->w->in, blocks = (call->rows + FLOAT_ROWS - 1) / FLOAT_ROWS;
    int64_t each = (call->rows + blocks - 1) / blocks;
    const float *weights = (const float *)call->w->packed + panel * PANEL * in;
    for (int64_t row = 0; row < call->rows; row += each) {
        int rows = (int)(row + each < call->rows ? each : call->rows - row);
        for (int64_t column = 0; column < PANEL; column += FLOAT_WIDE)
            floats_sum_rows(rows, call->x + row * call->x_stride, call->x_stride, weights + column, in, sums + column);
        for (int r = 0; r < rows; r++) floats_finish(call, panel, row + r, sums + r * PANEL);
    }
}

/* Each thread of the team calls this with the same call and the same counter, which was 0 before. Returns how many
 * panels it has done. */
static int64_t floats_work(const struct floats_call *call, _Atomic int64_t *taken) {
    int64_t panels = floats_pieces(call), done = 0, end = 0;
    for (int64_t first; (first = team_take(taken, panels, &end)) < panels; done += end - first)
        for (int64_t panel = first; panel < end; panel++) floats_panel(call, panel);
    return done;
}
