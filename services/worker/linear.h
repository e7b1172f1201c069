/* Linear layers on packed weights: y = x W^T, with what follows a product in a model done on the way out.
 *
 * Weights lie in panels of 32 outputs. A panel is its inputs in order, a *step* of 32 inputs at a time: two tiles, each
 * 16 rows of a pair of inputs for 16 outputs, `[pair][output][2]`. So a panel is read from memory from its first byte to
 * its last, and a tile is what AMX multiplies, and a row of it what dots do; elsewhere the same bytes are widened to
 * floats.
 *
 * A row's sums run over its inputs in one order, whatever else is in the call: rows never change each other's results.
 * With few rows, reading the weights is all it takes: each thread calls what it works on next from memory early. */

#pragma once

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "attention_vectors.h"
#include "dots.h"
#include "tiles.h"

#if LANES == 16 && defined(__AVX512VNNI__) && !HAS_TILES && !defined(NO_BYTES)
#define HAS_BYTES 1
#else
#define HAS_BYTES 0
#endif

enum { LINEAR_BF16 = 0, LINEAR_INT8 = 1 };
enum { EPILOGUE_NONE = 0, EPILOGUE_ADD = 1, EPILOGUE_GATED = 2, EPILOGUE_ACTIVATED = 3 };
enum { ACT_SILU = 0, ACT_GELU_TANH = 1, ACT_GELU = 2, ACT_RELU = 3 };

/* Weights, packed: y = x W^T (+ bias). */
struct linear {
    int64_t in, out;     /* in: a multiple of 32; out: the true number of outputs, packed zeros fill the last panel */
    int64_t kind;        /* LINEAR_... */
    const void *packed;  /* 64-byte aligned */
    const float *bias;   /* [out] or NULL */
};

struct linear_bytes;

struct linear_call {
    const struct linear *w;
    const uint16_t *x; /* bfloat16 [rows][in]; may be read up to rows rounded up to 16: those rows may be anything */
    int64_t x_stride;  /* strides count elements */
    void *y;           /* bfloat16 or float; only true rows and outputs are written */
    int64_t y_stride, y_is_float;
    const uint16_t *add; /* EPILOGUE_ADD: bfloat16, added before rounding; may be y itself */
    int64_t add_stride;
    int64_t rows, epilogue;
    int64_t activation; /* GATED: W has gate and up interleaved, 16 rows by 16; y = act(gate) * up has out / 2 columns */
    struct linear_bytes *bytes; /* room for x as bytes, `linear_bytes_of` of it: for `linear_prepare` and what follows */
};

#define PANEL 32 /* outputs */
#define STEP 32  /* inputs */
#define TILE 1024
#define STEP_BYTES (2 * TILE)
#define SCALE_BYTES (PANEL * 4)
#define INT8_STEP_BYTES (SCALE_BYTES + TILE)
#define ROW_BLOCK 32    /* rows that are multiplied at a time */
#define GROUP_BLOCKS 16 /* row blocks that share what has been made of a panel */

#include "linear_stream.h"
#include "linear_pack.h"
#include "linear_epilogue.h"

/* What is done while sums are made, a little with each step: neither memory nor the tiles have to wait for it. */
struct linear_beside {
    struct linear_stream stream;
    struct linear_pending pending;
    int lines; /* to call with each step */
};

#if HAS_TILES
#include "linear_amx.h"
#else
#include "linear_vectors.h"
#endif
#if HAS_BYTES
#include "linear_bytes.h"
#endif

#define CHUNK_STEPS 64 /* steps of a panel that are multiplied by one row block after the other */

struct linear_scratch {
    float sums[GROUP_BLOCKS][ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    uint16_t widened[CHUNK_STEPS * STEP_BYTES / 2] __attribute__((aligned(64)));
};

struct linear_task {
    const struct linear_call *call;
    struct linear_beside beside;
    struct linear_scratch *scratch;
    int64_t blocks; /* of all rows */
};

/* Steps [from, to) of a panel. What several blocks need is widened once. */
static struct linear_weights linear_chunk(struct linear_task *task, int64_t panel, int64_t from, int64_t to) {
    const struct linear *w = task->call->w;
    const char *packed = (const char *)w->packed + panel * linear_panel_bytes(w->in, w->kind);
    struct linear_weights weights = {.room = task->scratch->widened};
    if (w->kind == LINEAR_BF16) {
        weights.tiles = packed + from * STEP_BYTES;
        return weights;
    }
    weights.int8 = packed + from * INT8_STEP_BYTES;
    if (task->blocks > 1 && !HAS_BYTES) {
        linear_widen(&weights, to - from, &task->beside.stream, task->beside.lines);
        weights.tiles = (const char *)weights.room;
    }
    return weights;
}

/* Steps [from, to) of some rows. */
static void linear_block_rows(const struct linear_call *call, int64_t row, int64_t rows, struct linear_weights *weights,
                              int64_t from, int64_t to, float *sums, struct linear_beside *beside) {
#if HAS_BYTES
    if (call->w->kind == LINEAR_INT8) {
        int64_t steps = call->w->in / STEP;
        linear_bytes_rows(rows, call->bytes + row * steps + from, steps, weights->int8, to - from, sums, from > 0, beside);
        return;
    }
#endif
    linear_rows(rows, call->x + row * call->x_stride + from * STEP, call->x_stride, weights, to - from, sums, from > 0,
                beside);
}

/* Row blocks [first, end) of one panel; their sums wait in scratch from chunk to chunk. */
static void linear_group(struct linear_task *task, int64_t panel, int64_t first, int64_t end) {
    const struct linear_call *call = task->call;
    int64_t steps = call->w->in / STEP, each = task->blocks > 1 ? CHUNK_STEPS : steps;
    for (int64_t from = 0; from < steps; from += each) {
        int64_t to = from + each < steps ? from + each : steps;
        struct linear_weights weights = linear_chunk(task, panel, from, to);
        for (int64_t block = first; block < end; block++) {
            int64_t row = block * ROW_BLOCK, rows = call->rows - row < ROW_BLOCK ? call->rows - row : ROW_BLOCK;
            float *sums = task->scratch->sums[each < steps ? block - first : 0];
            linear_block_rows(call, row, rows, &weights, from, to, sums, &task->beside);
            if (to == steps) linear_to_finish(&task->beside.pending, panel, row, rows, sums);
        }
    }
}

static void linear_panel(struct linear_task *task, int64_t panel) {
    for (int64_t block = 0; block < task->blocks; block += GROUP_BLOCKS)
        linear_group(task, panel, block, block + GROUP_BLOCKS < task->blocks ? block + GROUP_BLOCKS : task->blocks);
}

/* Cache lines to call with each step that something goes through: widening for several blocks, and each block. */
static int linear_lines(const struct linear_task *task) {
    int64_t kind = task->call->w->kind, lines = linear_step_bytes(kind) / 64;
    int64_t passes = task->blocks + (kind == LINEAR_INT8 && task->blocks > 1 && !HAS_BYTES);
    return (int)((lines + passes - 1) / passes);
}

/* Bytes of room that a call needs for x. */
static int64_t linear_bytes_of(const struct linear_call *call) {
#if HAS_BYTES
    if (call->w->kind == LINEAR_INT8) return call->rows * (call->w->in / STEP) * (int64_t)sizeof(struct linear_bytes);
#endif
    (void)call;
    return 0;
}

/* Before `linear_work`, by all threads, of whom none may go on before all rows are done: returns how many this has. */
static int64_t linear_prepare(const struct linear_call *call, _Atomic int64_t *taken) {
    int64_t done = 0;
#if HAS_BYTES
    int64_t steps = call->w->in / STEP, end = 0;
    for (int64_t row; (row = team_take(taken, call->rows, &end)) < call->rows;)
        for (done += end - row; row < end; row++)
            for (int64_t step = 0; step < steps; step++)
                linear_to_bytes(call->x + row * call->x_stride + step * STEP, call->bytes + row * steps + step);
#endif
    (void)call, (void)taken;
    return done;
}

/* How many panels of a call are to be done. */
static inline int64_t linear_pieces(const struct linear_call *call) {
    return call->rows > 0 ? linear_panels(call->w->out) : 0;
}

/* Each thread of the team calls this with the same call and the same counter, which was 0 before. Returns how many
 * panels it has done; that all are done, and when to go on, is the caller's. */
static int64_t linear_work(const struct linear_call *call, _Atomic int64_t *taken) {
    struct linear_scratch scratch;
    if (call->rows <= 0) return 0;
    struct linear_task task = {.call = call, .scratch = &scratch, .blocks = (call->rows + ROW_BLOCK - 1) / ROW_BLOCK};
    struct linear_stream *stream = &task.beside.stream;
    task.beside.pending.call = call;
    task.beside.lines = linear_lines(&task);
    linear_stream_begin(stream, call->w, taken, task.blocks > 1);
    int64_t first, end, done = 0;
    for (; linear_stream_next(stream, &first, &end); done += end - first)
        for (int64_t panel = first; panel < end; panel++) {
            stream->due += stream->panel_bytes;
            linear_panel(&task, panel);
        }
    linear_finish(&task.beside.pending, ROW_BLOCK);
    return done;
}
