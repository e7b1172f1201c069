/* A step of a whole model as one call: instructions that the exported graph was lowered to, run by all threads together.
 *
 * Every value of a step is a table of rows, one for each token, or for each token whose logits are wanted. Either kind
 * lies in an arena of its own: a value's first row at `at` * capacity bytes, where capacity is the number of rows there
 * is room for, so that where a value lies does not depend on how many tokens a step has. Threads take pieces of an
 * instruction's work by a counter, and go on to the next instruction when all pieces are done. They do not wait for each
 * other to arrive: a thread that another process keeps from running holds up nothing but the piece it has, and finds all
 * done when it comes back.
 * Threads are those of the OpenMP runtime that was handed to the attention kernel. */

#include <sched.h>

#include "attention_kernel.c"
#include "linear.h"
#include "linear_floats.h"
#include "rows.h"

enum { LOOKUP = 0, NORM = 1, LINEAR = 2, ROTATE = 3, ATTEND = 4, PICK = 5, ADD = 6 };
enum { NOWHERE = -1, LOGITS = -2 };
enum { BY_TOKEN = 0, BY_POSITION = 1 };

/* Where a value lies: `at` bytes of each row of the arena before it (or NOWHERE, or LOGITS for what comes out). */
struct place {
    int64_t at, column, stride; /* column and stride count elements */
    int64_t wanted;             /* 1: it has a row for each token whose logits are wanted, and lies in their arena */
};

struct instruction {
    int64_t op;
    struct place in, in_2, in_3, out;
    const void *what;      /* of the op: struct lookup, norm, linear_how, rotation, attention, row_width */
};

struct lookup { const void *table; int64_t width, by; };
struct norm { const float *weight, *bias; int64_t width, groups, centred; float epsilon; };
struct linear_how { struct linear weights; int64_t epilogue, activation; };
struct rotation { int64_t heads, dim, half; }; /* in: turned in place, in_2: cosines, in_3: sines */
struct attention { struct layer layer; };       /* keys and values of the pool; in: q, in_2: k, in_3: v */
struct row_width { int64_t width; };

struct program_step {
    const struct instruction *instructions;
    int64_t count, is_half;
    char *arena, *wanted_arena;
    int64_t capacity, wanted_capacity;
    const struct step *step;
    const int64_t *token_ids, *positions, *wanted;
    int64_t tokens, wanted_count;
    float *logits;
    int64_t logits_stride;
};

/* Of some work: how many pieces have been taken, and how many are done. Each has a cache line of its own. */
struct phase {
    _Atomic int64_t taken, done;
    char rest[48];
};

struct course {
    const struct program_step *given;
    struct job *jobs;      /* [count] used where an instruction attends */
    struct layer *layers;  /* [count] */
    struct phase *phases;  /* [count][PHASES] */
    void *bytes;           /* room for what a matrix of int8 is multiplied by */
};

#define PHASES 3 /* attention writes, attends, joins; a matrix is prepared for, and multiplied by; all else has one */
#define SPINS 4000 /* looks before others are let run: whoever has the last piece may be waiting for this core */

INLINE void breathe(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* This thread has done so many pieces: wait until all are. */
static void finish(struct phase *phase, int64_t mine, int64_t all_pieces) {
    atomic_fetch_add(&phase->done, mine);
    for (int looks = 0; atomic_load_explicit(&phase->done, memory_order_acquire) < all_pieces; looks++) {
        if (looks < SPINS) breathe();
        else sched_yield();
    }
}

/* ---- rows ---- */

INLINE char *address(const struct program_step *s, struct place place, int64_t row) {
    char *first = place.wanted ? s->wanted_arena + place.at * s->wanted_capacity : s->arena + place.at * s->capacity;
    return first + (place.column + row * place.stride) * (s->is_half ? 2 : 4);
}

static int64_t rows_of(const struct program_step *s, const struct instruction *one) {
    return one->out.wanted ? s->wanted_count : s->tokens;
}

/* Inlined once for each type: nothing asks for it number by number. */
INLINE void do_row_of(const struct program_step *s, const struct instruction *one, int64_t row, int is_half) {
    char *in = address(s, one->in, row), *out = address(s, one->out, row);
    switch (one->op) {
    case LOOKUP: {
        const struct lookup *what = one->what;
        int64_t bytes = what->width * (is_half ? 2 : 4);
        int64_t from = (what->by == BY_TOKEN ? s->token_ids : s->positions)[row];
        memcpy(out, (const char *)what->table + from * bytes, bytes);
        break;
    }
    case NORM: {
        const struct norm *what = one->what;
        for (int64_t group = 0; group < what->groups; group++) {
            int64_t offset = group * what->width * (is_half ? 2 : 4);
            norm_group(in + offset, out + offset, what->weight, what->bias, what->width, what->epsilon,
                       (int)what->centred, is_half);
        }
        break;
    }
    case ROTATE: {
        const struct rotation *what = one->what;
        rotate_row(in, address(s, one->in_2, row), address(s, one->in_3, row), what->heads, what->dim, what->half,
                   is_half);
        break;
    }
    case PICK: {
        const struct row_width *what = one->what;
        memcpy(out, address(s, one->in, s->wanted[row]), what->width * (is_half ? 2 : 4));
        break;
    }
    case ADD: {
        const struct row_width *what = one->what;
        add_row(in, address(s, one->in_2, row), out, what->width, is_half);
        break;
    }
    }
}

static void do_row(const struct program_step *s, const struct instruction *one, int64_t row) {
    if (s->is_half) do_row_of(s, one, row, 1);
    else do_row_of(s, one, row, 0);
}

static void do_rows(const struct program_step *s, const struct instruction *one, struct phase *phase) {
    int64_t rows = rows_of(s, one), done = 0;
    for (;;) {
        int64_t row = atomic_fetch_add(&phase->taken, ROWS_AT_ONCE);
        if (row >= rows) break;
        int64_t end = row + ROWS_AT_ONCE < rows ? row + ROWS_AT_ONCE : rows;
        done += end - row;
        for (; row < end; row++) do_row(s, one, row);
    }
    finish(phase, done, rows);
}

/* ---- matrices and attention ---- */

static struct linear_call linear_call_of(const struct program_step *s, const struct instruction *one) {
    const struct linear_how *what = one->what;
    int is_logits = one->out.at == LOGITS;
    return (struct linear_call){
        .w = &what->weights, .x = (const uint16_t *)address(s, one->in, 0), .x_stride = one->in.stride,
        .y = is_logits ? (void *)s->logits : (void *)address(s, one->out, 0),
        .y_stride = is_logits ? s->logits_stride : one->out.stride, .y_is_float = is_logits,
        .add = what->epilogue == EPILOGUE_ADD ? (const uint16_t *)address(s, one->in_2, 0) : NULL,
        .add_stride = one->in_2.stride, .rows = rows_of(s, one),
        .epilogue = what->epilogue, .activation = what->activation,
    };
}

static void do_linear(const struct course *course, const struct instruction *one, struct phase *phases) {
    struct linear_call call = linear_call_of(course->given, one);
    call.bytes = course->bytes;
    if (linear_bytes_of(&call)) finish(phases, linear_prepare(&call, &phases->taken), call.rows);
    finish(phases + 1, linear_work(&call, &phases[1].taken), linear_pieces(&call));
}

static void do_floats(const struct program_step *s, const struct instruction *one, struct phase *phase) {
    const struct linear_how *what = one->what;
    int is_logits = one->out.at == LOGITS;
    struct floats_call call = {
        .w = &what->weights, .x = (const float *)address(s, one->in, 0), .x_stride = one->in.stride,
        .y = is_logits ? s->logits : (float *)address(s, one->out, 0),
        .y_stride = is_logits ? s->logits_stride : one->out.stride,
        .add = what->epilogue == EPILOGUE_ADD ? (const float *)address(s, one->in_2, 0) : NULL,
        .add_stride = one->in_2.stride, .rows = rows_of(s, one),
        .epilogue = what->epilogue, .activation = what->activation,
    };
    finish(phase, floats_work(&call, &phase->taken), floats_pieces(&call));
}

static void do_attention(struct job *job, struct phase *phases) {
    finish(phases, write_tokens(job), job->step->tokens);
    finish(phases + 1, attend_items(job), job->item_count);
    if (job->parts) finish(phases + 2, join_parts(job), job->item_count);
}

static void do_all(void *given) {
    struct course *course = given;
    const struct program_step *s = course->given;
    linear_thread_begin();
    for (int64_t at = 0; at < s->count; at++) {
        const struct instruction *one = s->instructions + at;
        struct phase *phases = course->phases + at * PHASES;
        if (one->op == ATTEND) do_attention(course->jobs + at, phases);
        else if (one->op == LINEAR && s->is_half) do_linear(course, one, phases);
        else if (one->op == LINEAR) do_floats(s, one, phases);
        else do_rows(s, one, phases);
    }
    linear_thread_end();
}

/* Returns 1 if there is no memory. */
static int prepare_attention(struct course *course) {
    const struct program_step *s = course->given;
    for (int64_t at = 0; at < s->count; at++) {
        const struct instruction *one = s->instructions + at;
        if (one->op != ATTEND) continue;
        struct layer *layer = course->layers + at;
        struct job *job = course->jobs + at;
        *layer = ((const struct attention *)one->what)->layer;
        layer->dtype = s->is_half ? BFLOAT16 : FLOAT32;
        layer->q = address(s, one->in, 0);
        layer->k = address(s, one->in_2, 0);
        layer->v = address(s, one->in_3, 0);
        layer->out = address(s, one->out, 0);
        layer->q_token = one->in.stride;
        layer->k_token = one->in_2.stride;
        layer->v_token = one->in_3.stride;
        layer->q_head = layer->k_head = layer->v_head = layer->dim;
        *job = (struct job){.step = s->step, .layer = layer};
        if (begin_job(job)) return 1;
    }
    return 0;
}

/* Returns 1 if there is no memory. */
static int prepare_bytes(struct course *course) {
    const struct program_step *s = course->given;
    int64_t most = 0;
    for (int64_t at = 0; at < s->count && s->is_half; at++) {
        if (s->instructions[at].op != LINEAR) continue;
        struct linear_call call = linear_call_of(s, s->instructions + at);
        int64_t bytes = linear_bytes_of(&call);
        most = bytes > most ? bytes : most;
    }
    course->bytes = most ? malloc((size_t)most) : NULL;
    return most && !course->bytes;
}

/* Returns 0, or 1 if there was no memory. */
int program_run(const struct program_step *s) {
    struct course course = {.given = s};
    size_t count = (size_t)(s->count ? s->count : 1);
    course.jobs = calloc(count, sizeof *course.jobs);
    course.layers = calloc(count, sizeof *course.layers);
    course.phases = calloc(count * PHASES, sizeof *course.phases);
    int failed = !course.jobs || !course.layers || !course.phases || prepare_attention(&course) || prepare_bytes(&course);
    if (!failed) run_parallel(do_all, &course, 0, 0);
    for (int64_t at = 0; at < s->count && course.jobs; at++) {
        failed |= course.jobs[at].failed;
        end_job(course.jobs + at);
    }
    free(course.jobs);
    free(course.layers);
    free(course.phases);
    free(course.bytes);
    return failed;
}

int program_init(void) { return linear_init(); }

int64_t program_packed_bytes(int64_t in, int64_t out, int64_t kind) {
    return kind == LINEAR_FLOAT ? linear_floats_bytes(in, out) : linear_packed_bytes(in, out, kind);
}

/* weights: float for LINEAR_FLOAT, else bfloat16, `[out][in]` */
void program_pack(const void *weights, int64_t in, int64_t out, int64_t kind, void *packed) {
    if (kind == LINEAR_FLOAT) linear_floats_pack(weights, in, out, packed);
    else linear_pack(weights, in, out, kind, packed);
}
