/* Up to 32 rows against steps of a panel, in AMX tiles: 2 x 2 of sums, as wide as there are tiles for. Included by
 * linear.h. */

#pragma once

#define LINEAR_VARIANT "amx"

/* In turn in one of several places: a step can be widened while the one before is multiplied. */
INLINE const char *linear_widened(const struct linear_weights *w, int64_t step, struct linear_beside *beside) {
    uint16_t *room = w->room + step % 4 * (STEP_BYTES / 2);
    linear_widen_step(w->int8 + step * INT8_STEP_BYTES, room, &beside->stream, beside->lines);
    tiles_settle(room);
    return (const char *)room;
}

/* Tiles: sums of the upper rows 0, 1, of the lower rows 2, 3; rows of x 4, 5; weights 6, 7. */
INLINE void linear_tiles(int is_two, int is_int8, const uint16_t *x, int64_t x_stride, const struct linear_weights *w,
                         int64_t steps, float *sums, int is_more, struct linear_beside *beside) {
    const char *weights = w->tiles;
    const int width = PANEL * sizeof(float);
    int64_t finished_each = (beside->pending.rows + steps - 1) / steps;
    tiles_settle(sums);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (is_more) {
        _tile_loadd(0, sums, width);
        _tile_loadd(1, sums + 16, width);
        if (is_two) _tile_loadd(2, sums + 16 * PANEL, width);
        if (is_two) _tile_loadd(3, sums + 16 * PANEL + 16, width);
    }
    for (int64_t step = 0; step < steps; step++, x += STEP, weights += STEP_BYTES) {
        if (is_int8) weights = linear_widened(w, step, beside);
        else linear_stream_call(&beside->stream, beside->lines);
        linear_finish(&beside->pending, finished_each);
        _tile_loadd(4, x, x_stride * 2);
        _tile_loadd(6, weights, 64);
        _tile_loadd(7, weights + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (is_two) {
            _tile_loadd(5, x + 16 * x_stride, x_stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    linear_finish(&beside->pending, ROW_BLOCK); /* their sums may lie where these go */
    _tile_stored(0, sums, width);
    _tile_stored(1, sums + 16, width);
    if (is_two) _tile_stored(2, sums + 16 * PANEL, width);
    if (is_two) _tile_stored(3, sums + 16 * PANEL + 16, width);
}

/* sums[row][output] = (is_more: what it was, else 0) + x W^T over some steps. */
static void linear_rows(int64_t rows, const uint16_t *x, int64_t x_stride, const struct linear_weights *w,
                        int64_t steps, float *sums, int is_more, struct linear_beside *beside) {
    switch ((rows > 16) * 2 + !w->tiles) {
    case 0: linear_tiles(0, 0, x, x_stride, w, steps, sums, is_more, beside); break;
    case 1: linear_tiles(0, 1, x, x_stride, w, steps, sums, is_more, beside); break;
    case 2: linear_tiles(1, 0, x, x_stride, w, steps, sums, is_more, beside); break;
    default: linear_tiles(1, 1, x, x_stride, w, steps, sums, is_more, beside);
    }
}

static int linear_init(void) { return tiles_ask(); }
static void linear_thread_begin(void) { tiles_begin(); }
static void linear_thread_end(void) { tiles_end(); }
