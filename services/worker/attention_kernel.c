/* Attention over a paged KV pool: blocks are read where they lie, rows of one ragged batch keep to their own.
 *
 *     queries     [tokens of row a | of row b | ...], any stride between heads and between tokens
 *     pool        [block][KV head][position][dim], one of keys and one of values for each layer
 *     out         [token][head][dim]
 *
 * A call writes the new tokens' keys and values, then works through items. An item is one KV head of one row: a tile of
 * its queries (all query heads that share the KV head) against a range of its positions, chunk after chunk with an
 * online softmax. Short rows have one tile; their range is cut into pieces of SPLIT positions that are joined at the
 * end, so that a single long row keeps all cores busy. How a row is cut depends on that row alone, and so does the order
 * of its sums: what else is in the batch does not change a bit of it.
 *
 * Sums are float whatever the pool holds. bfloat16 is multiplied pair by pair where the processor does so fast and the
 * dim is a multiple of 32: in AMX tiles, or in dots; else it is widened and multiplied as floats. A position at or after
 * the end of a row is never read: it may be anything. */

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_pairs.h"
#include "team.h"

#define SPLIT 512               /* positions of one item of a short row */
#define TILE_ROWS 30            /* query rows of one item: tokens x heads that share a KV head */
#define WRITE_TOKENS 16         /* tokens that are written to the pool at a time */

enum { FLOAT32 = 0, BFLOAT16 = 1 };

/* One step: the same for all layers. */
struct step {
    int64_t rows, tokens, block_tokens;
    const int64_t *slots;         /* [tokens] where each new token is written: block * block_tokens + offset */
    const int32_t *firsts;        /* [rows] the row's first token in the batch */
    const int32_t *starts, *ends; /* [rows] its first new position, and the position after its last */
    const int32_t *table_firsts;  /* [rows] where its block ids begin */
    const int32_t *tables;        /* block ids of all rows, end to end */
};

/* One layer's call. Strides count elements; the dim is always dense. */
struct layer {
    int64_t heads, kv_heads, dim, dtype, window;
    float scale, softcap; /* softcap and window: 0 for none */
    void *keys, *values;
    const void *q, *k, *v;
    void *out;
    int64_t q_head, q_token, k_head, k_token, v_head, v_token;
};

struct item {
    int32_t row, head, token, tokens; /* which queries, of which KV head */
    int32_t from, to;                 /* which positions */
    int32_t part;                     /* where the unjoined result goes, -1 for straight to the output */
    int32_t parts;                    /* of a first part: how many there are to be joined */
};

struct job {
    const struct step *step;
    const struct layer *layer;
    struct item *items;
    int64_t item_count, part_floats;
    int64_t parts, tile_rows, group, padded, element;
    int is_paired;                /* multiplied pair by pair */
    float *partials;
    _Atomic int64_t written, begun, joined;
    _Atomic int failed;
};

static int may_use_pairs;

/* ---- one item ---- */

struct scratch {
    float *q;            /* [tile rows][dim] */
    float *packed;       /* [dim][CHUNK]; pair by pair: words of two halves, [dim / 2][CHUNK] */
    float *widened;      /* [CHUNK][padded dim]; pair by pair: [CHUNK / 2][dim][2] halves */
    uint16_t *halves;    /* [tile rows][CHUNK] weights, pair by pair */
    float *scores;       /* [tile rows][CHUNK] */
    float *most, *total; /* [tile rows], [tile rows][LANES] */
    float *sums;         /* [tile rows][padded dim] */
    void *zeros;         /* a key of zeros, stands in for positions that are not there */
    const void *keys[CHUNK], *values[CHUNK];
};

/* Where keys and values of up to CHUNK positions lie. Returns how many there are. */
static int find_positions(const struct job *job, const struct item *item, int32_t from, struct scratch *s) {
    const struct step *step = job->step;
    const struct layer *layer = job->layer;
    const int32_t *table = step->tables + step->table_firsts[item->row];
    int64_t row_bytes = layer->dim * job->element, block_tokens = step->block_tokens;
    int64_t block = from / block_tokens, offset = from % block_tokens;
    int count = item->to - from < CHUNK ? item->to - from : CHUNK;
    int done = 0;
    while (done < count) {
        int64_t at = ((table[block] * layer->kv_heads + item->head) * block_tokens + offset) * row_bytes;
        const char *key = (const char *)layer->keys + at, *value = (const char *)layer->values + at;
        for (; offset < block_tokens && done < count; offset++, done++, key += row_bytes, value += row_bytes) {
            s->keys[done] = key;
            s->values[done] = value;
        }
        offset = 0;
        block++;
    }
    for (int i = count; i % LANES; i++) s->keys[i] = s->zeros;
    return count;
}

static void widen(float *to, const uint16_t *from, int64_t count) {
    int64_t d = 0;
    for (; d + LANES <= count; d += LANES) store(to + d, widened(from + d));
    for (; d < count; d++) to[d] = one_widened(from[d]);
}

static void take_queries(const struct job *job, const struct item *item, struct scratch *s) {
    const struct layer *layer = job->layer;
    int64_t dim = layer->dim, first = job->step->firsts[item->row] + item->token;
    for (int64_t token = 0; token < item->tokens; token++)
        for (int64_t g = 0; g < job->group; g++) {
            int64_t row = token * job->group + g;
            int64_t at = (item->head * job->group + g) * layer->q_head + (first + token) * layer->q_token;
            if (job->is_paired) memcpy((uint16_t *)s->q + row * dim, (const uint16_t *)layer->q + at, dim * 2);
            else if (layer->dtype == FLOAT32) memcpy(s->q + row * dim, (const float *)layer->q + at, dim * sizeof(float));
            else widen(s->q + row * dim, (const uint16_t *)layer->q + at, dim);
        }
}

/* Values as floats, their rows filled up with zeros to whole vectors. */
static void widen_values(const struct job *job, struct scratch *s, int count) {
    int64_t dim = job->layer->dim;
    for (int i = 0; i < count; i++) {
        float *to = s->widened + i * job->padded;
        const void *from = s->values[i];
        if (job->layer->dtype == FLOAT32) memcpy(to, from, dim * sizeof(float));
        else widen(to, from, dim);
        for (int64_t d = dim; d < job->padded; d++) to[d] = 0.0f;
        s->values[i] = to;
    }
}

static struct bend bend_of(const struct layer *layer) {
    if (layer->softcap == 0.0f) return (struct bend){layer->scale * 1.442695041f, 0.0f};
    return (struct bend){layer->scale / layer->softcap, layer->softcap * 1.442695041f};
}

/* The first position that the token at one sees. */
static int32_t first_seen(const struct layer *layer, int32_t position) {
    return layer->window && layer->window <= position ? position - (int32_t)layer->window + 1 : 0;
}

/* What each row of the item makes of its scores of `count` positions from one on. */
static void soften_rows(const struct job *job, const struct item *item, struct scratch *s, int32_t from, int count) {
    const struct layer *layer = job->layer;
    struct bend bend = bend_of(layer);
    int32_t position = job->step->starts[item->row] + item->token;
    int row = 0;
    for (int token = 0; token < item->tokens; token++, position++) {
        int32_t first = first_seen(layer, position), sees_from = first > from ? first - from : 0;
        int32_t sees_to = position + 1 - from < count ? position + 1 - from : count;
        for (int64_t g = 0; g < job->group; g++, row++) {
            float *sums = s->sums + row * job->padded;
            struct course_of_row so_far = {s->most + row, s->total + row * LANES, sums, job->padded};
            soften(s->scores + row * CHUNK, job->is_paired ? s->halves + row * CHUNK : NULL, sees_from, sees_to, bend,
                   so_far);
        }
    }
}

static void pack_keys(const struct job *job, struct scratch *s, int count, struct ahead *ahead) {
    int64_t words = job->is_paired ? job->layer->dim / 2 : job->layer->dim;
    int must_widen = !job->is_paired && job->layer->dtype == BFLOAT16;
    for (int at = 0; at < count; at += LANES) {
        for (int i = 0; i < 4; i++) call_ahead(ahead);
        pack(s->keys + at, words, must_widen, s->packed + at);
    }
}

static void attend_chunk(const struct job *job, const struct item *item, struct scratch *s, int32_t from, int count,
                         struct ahead *ahead) {
    int is_half = job->layer->dtype == BFLOAT16, rows = item->tokens * (int)job->group, step = rows_at_once(rows);
    int64_t dim = job->layer->dim;
    pack_keys(job, s, count, ahead);
    for (int row = 0; row < rows; row += step)
        score_rows(row + step < rows ? step : rows - row, dim, s->q + row * dim, s->packed, s->scores + row * CHUNK);
    soften_rows(job, item, s, from, count);
    int must_widen = job->padded != dim || (is_half && rows > 2 * BLOCK_ROWS);
    if (must_widen) widen_values(job, s, count);
    struct values values = {s->values, count, is_half && !must_widen};
    for (int row = 0; row < rows; row += step)
        value_rows(row + step < rows ? step : rows - row, values, s->scores + row * CHUNK, job->padded,
                   s->sums + row * job->padded, ahead);
}

#if HAS_PAIRS

/* The same pair by pair. */
static void attend_chunk_paired(const struct job *job, const struct item *item, struct scratch *s, int32_t from,
                                int count, struct ahead *ahead) {
    int rows = item->tokens * (int)job->group;
    int64_t dim = job->layer->dim;
    uint16_t *pairs = (uint16_t *)s->widened;
#if HAS_DOTS
    if (is_few(rows, dim)) {
        few_scores(rows, dim, (const uint16_t *)s->q, s->keys, count, s->scores, ahead);
        soften_rows(job, item, s, from, count);
        few_values(rows, dim, s->halves, s->values, count, s->sums, ahead);
        return;
    }
#endif
    pack_keys(job, s, count, ahead);
    paired_scores(rows, dim, (const uint16_t *)s->q, s->packed, count, s->scores);
    pair_values(s->values, count, dim, pairs, ahead); /* now: tiles wait for what has just been stored */
    soften_rows(job, item, s, from, count);
    paired_values(rows, dim, s->halves, pairs, count, s->sums);
}

#endif

static void store_out(const struct job *job, int64_t token, int64_t head, const float *sums, float total) {
    const struct layer *layer = job->layer;
    int64_t at = (token * layer->heads + head) * layer->dim;
    vf one_by = all(1.0f / total), given;
    for (int64_t d = 0; d < layer->dim; d += LANES) {
        int64_t left = layer->dim - d;
        given = load(sums + d) * one_by;
        if (layer->dtype == FLOAT32) store_first((float *)layer->out + at + d, given, left);
        else store_first_narrowed((uint16_t *)layer->out + at + d, given, left);
    }
}

static void finish_item(const struct job *job, const struct item *item, const struct scratch *s) {
    int64_t first = job->step->firsts[item->row] + item->token;
    for (int64_t row = 0; row < item->tokens * job->group; row++) {
        float total = sum_of_lanes(load(s->total + row * LANES));
        const float *sums = s->sums + row * job->padded;
        if (item->part < 0) {
            store_out(job, first + row / job->group, item->head * job->group + row % job->group, sums, total);
            continue;
        }
        float *part = job->partials + item->part * job->part_floats + row * (job->padded + 2);
        part[0] = s->most[row];
        part[1] = total;
        memcpy(part + 2, sums, job->padded * sizeof(float));
    }
}

/* While a chunk is worked on, what comes a little later is on its way from memory. */
static void attend_item(const struct job *job, const struct item *item, struct scratch *s, struct ahead *ahead) {
    int64_t rows = item->tokens * job->group;
    take_queries(job, item, s);
    for (int64_t row = 0; row < rows; row++) s->most[row] = FLOOR;
    memset(s->total, 0, rows * LANES * sizeof(float));
    memset(s->sums, 0, rows * job->padded * sizeof(float));
    for (int32_t from = item->from; from < item->to;) {
        int count = find_positions(job, item, from, s);
        ahead_go_on(ahead, count);
#if HAS_PAIRS
        if (job->is_paired) attend_chunk_paired(job, item, s, from, count, ahead);
        else
#endif
            attend_chunk(job, item, s, from, count, ahead);
        from += count;
    }
    ahead_go_on(ahead, 0); /* past this item: another takes the place of the next one */
    finish_item(job, item, s);
}

/* ---- a thread's share of a call ---- */

static void write_token(const struct job *job, int64_t token) {
    const struct layer *layer = job->layer;
    int64_t slot = job->step->slots[token], size = job->step->block_tokens, bytes = layer->dim * job->element;
    for (int64_t head = 0; head < layer->kv_heads; head++) {
        int64_t to = ((slot / size * layer->kv_heads + head) * size + slot % size) * bytes;
        int64_t key = (head * layer->k_head + token * layer->k_token) * job->element;
        int64_t value = (head * layer->v_head + token * layer->v_token) * job->element;
        memcpy((char *)layer->keys + to, (const char *)layer->k + key, bytes);
        memcpy((char *)layer->values + to, (const char *)layer->v + value, bytes);
    }
}

/* Returns how many this thread has written. */
static int64_t write_tokens(struct job *job) {
    for (int64_t done = 0;;) {
        int64_t token = atomic_fetch_add(&job->written, WRITE_TOKENS);
        if (token >= job->step->tokens) return done;
        int64_t end = token + WRITE_TOKENS < job->step->tokens ? token + WRITE_TOKENS : job->step->tokens;
        done += end - token;
        for (; token < end; token++) write_token(job, token);
    }
}

static size_t padded_bytes(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* One allocation for all of a thread's scratch; NULL if there is no memory. */
static void *make_scratch(const struct job *job, struct scratch *s) {
    size_t rows = (size_t)(job->tile_rows + PAIRED_BLOCK - 1) / PAIRED_BLOCK * PAIRED_BLOCK;
    size_t dim = (size_t)job->layer->dim, padded = (size_t)job->padded, key = padded_bytes(dim * 4);
    struct { void **at; size_t bytes; } parts[] = {
        {(void **)&s->q, rows * dim * 4}, {(void **)&s->packed, key * CHUNK},
        {(void **)&s->widened, CHUNK * padded * 4}, {(void **)&s->halves, rows * CHUNK * 2},
        {(void **)&s->scores, rows * CHUNK * 4}, {(void **)&s->most, rows * 4}, {(void **)&s->total, rows * LANES * 4},
        {(void **)&s->sums, rows * padded * 4}, {(void **)&s->zeros, key},
    };
    size_t count = sizeof parts / sizeof *parts, all_bytes = 0;
    for (size_t i = 0; i < count; i++) all_bytes += padded_bytes(parts[i].bytes);
    char *memory = aligned_alloc(64, all_bytes), *next = memory;
    if (!memory) return NULL;
    for (size_t i = 0; i < count; i++) {
        *parts[i].at = next;
        next += padded_bytes(parts[i].bytes);
    }
    memset(s->zeros, 0, key);
    memset(s->packed, 0, key * CHUNK);
    return memory;
}

/* What is read for an item. */
static struct stretch stretch_of(const struct job *job, const struct item *item) {
    const struct step *step = job->step;
    int64_t head_bytes = item->head * step->block_tokens * job->layer->dim * job->element;
    return (struct stretch){step->tables + step->table_firsts[item->row], head_bytes, item->from, item->to};
}

static struct ahead ahead_of(const struct job *job) {
    const struct layer *layer = job->layer;
    int64_t row_bytes = layer->dim * job->element, block_tokens = job->step->block_tokens;
    return (struct ahead){
        .keys = layer->keys, .values = layer->values, .block_tokens = block_tokens,
        .block_bytes = layer->kv_heads * block_tokens * row_bytes, .row_bytes = row_bytes, .due = LEAD_OF_KEYS,
        .at_once = POSITIONS_AT_ONCE * row_bytes,
    };
}

/* Items are taken one by one, so that a thread that is held up holds up nothing else; the next is known early.
 * Returns how many this thread has taken: without memory none of them has been worked on, and the call has failed. */
static int64_t attend_items(struct job *job) {
    struct scratch scratch;
    void *memory = make_scratch(job, &scratch);
    struct ahead ahead = ahead_of(job);
    if (!memory) atomic_store(&job->failed, 1);
    int64_t done = 0, mine = atomic_fetch_add(&job->begun, 1);
    if (mine < job->item_count) ahead.now = stretch_of(job, job->items + mine);
    while (mine < job->item_count) {
        int64_t next = atomic_fetch_add(&job->begun, 1);
        if (next < job->item_count) ahead.next = stretch_of(job, job->items + next);
        if (memory) attend_item(job, job->items + mine, &scratch, &ahead);
        mine = next;
        done++;
    }
    free(memory);
    return done;
}

static void join_row(const struct job *job, const struct item *item, int64_t row, float *sums) {
    const float *parts = job->partials + item->part * job->part_floats + row * (job->padded + 2);
    float most = FLOOR, total = 0.0f;
    for (int part = 0; part < item->parts; part++) {
        float given = parts[part * job->part_floats];
        most = given > most ? given : most;
    }
    memset(sums, 0, job->padded * sizeof(float));
    for (int part = 0; part < item->parts; part++) {
        const float *given = parts + part * job->part_floats;
        float weight = exp2_one(given[0] - most);
        total += weight * given[1];
        for (int64_t d = 0; d < job->padded; d++) sums[d] += weight * given[2 + d];
    }
    int64_t token = job->step->firsts[item->row] + item->token + row / job->group;
    store_out(job, token, item->head * job->group + row % job->group, sums, total);
}

/* Returns how many items this thread has looked at. */
static int64_t join_parts(struct job *job) {
    float sums[job->padded];
    for (int64_t done = 0;; done++) {
        int64_t mine = atomic_fetch_add(&job->joined, 1);
        if (mine >= job->item_count) return done;
        const struct item *item = job->items + mine;
        if (item->parts)
            for (int64_t row = 0; row < item->tokens * job->group; row++) join_row(job, item, row, sums);
    }
}

static void work(void *given) {
    struct job *job = given;
    write_tokens(job);
    wait_for_team();
    if (job->is_paired) tiles_begin();
    attend_items(job);
    if (job->is_paired) tiles_end();
    if (job->parts) {
        wait_for_team();
        join_parts(job);
    }
}

/* ---- what there is to do ---- */

static int64_t tile_tokens(const struct job *job) {
    int64_t tokens = (job->is_paired ? PAIRED_ROWS : TILE_ROWS) / job->group;
    return tokens > 0 ? tokens : 1;
}

/* Cut one row into items. Called twice: with items NULL it only counts. */
static void cut_row(struct job *job, int32_t row, struct item *items) {
    const struct step *step = job->step;
    int32_t start = step->starts[row], count = step->ends[row] - start, tile = (int32_t)tile_tokens(job);
    int is_short = count <= tile;
    /* the last tile sees most and takes longest: it goes first */
    for (int32_t token = (count - 1) / tile * tile; token >= 0; token -= tile) {
        int32_t tokens = token + tile < count ? tile : count - token;
        int32_t from = first_seen(job->layer, start + token), to = start + token + tokens;
        int32_t parts = is_short ? (to - 1) / SPLIT - from / SPLIT + 1 : 1;
        for (int32_t head = 0; head < job->layer->kv_heads; head++)
            for (int32_t part = 0; part < parts; part++) {
                int32_t begin = part ? (from / SPLIT + part) * SPLIT : from;
                int32_t end = part + 1 < parts ? (from / SPLIT + part + 1) * SPLIT : to;
                int32_t place = parts > 1 ? (int32_t)job->parts++ : -1;
                if (items)
                    items[job->item_count] = (struct item){
                        row, head, token, tokens, begin, end, place, parts > 1 && part == 0 ? parts : 0,
                    };
                job->item_count++;
            }
    }
}

static void cut(struct job *job, struct item *items) {
    job->item_count = job->parts = 0;
    for (int pass = 0; pass < 2; pass++) /* prompts first: their items are the longest */
        for (int32_t row = 0; row < job->step->rows; row++)
            if ((job->step->ends[row] - job->step->starts[row] > 1) == (pass == 0)) cut_row(job, row, items);
}

/* ---- what the outside calls ---- */

void attention_use(parallel_function parallel, barrier_function barrier, size_function size) {
    team_use(parallel, barrier, size);
    may_use_pairs = pairs_ask();
}

/* After `attention_use`. */
const char *attention_variant(void) { return may_use_pairs ? PAIRS_VARIANT : VARIANT; }

/* Returns 0, or 1 if there is no memory; `end_job` frees what there is in both cases. */
static int begin_job(struct job *job) {
    const struct layer *layer = job->layer;
    job->group = layer->heads / layer->kv_heads;
    job->element = layer->dtype == FLOAT32 ? 4 : 2;
    job->is_paired = may_use_pairs && layer->dtype == BFLOAT16 && layer->dim % PAIRED_DIMS == 0;
    job->padded = (layer->dim + LANES - 1) / LANES * LANES;
    job->tile_rows = tile_tokens(job) * job->group;
    job->part_floats = job->tile_rows * (job->padded + 2);
    cut(job, NULL);
    job->items = malloc((size_t)(job->item_count ? job->item_count : 1) * sizeof *job->items);
    job->partials = malloc((size_t)(job->parts ? job->parts : 1) * job->part_floats * sizeof(float));
    if (!job->items || !job->partials) return 1;
    cut(job, job->items);
    return 0;
}

static void end_job(struct job *job) {
    free(job->partials);
    free(job->items);
}

/* Returns 0, or 1 if there was no memory. */
int attention_call(const struct step *step, const struct layer *layer) {
    struct job job = {.step = step, .layer = layer};
    if (begin_job(&job)) job.failed = 1;
    else run_parallel(work, &job, 0, 0);
    end_job(&job);
    return job.failed;
}
