/* What is worked on next: called from memory early and evenly, for only a few calls can be under way.
 *
 * Keys and values of an item lie in runs, one of each for a block. Calls go along the runs of one item and then along
 * those of the next, a fixed lead before the work. Nothing comes of a call but time. */

#pragma once

#include "attention_vectors.h"

/* Of keys, and as much of values. 64 rows at 200 positions on a Zen 4: 15.2 ms with 12 KB, 19.6 with 4, 15.5 with 32 and
 * 20.6 with 64; 16 rows at 2,000: 28.4, 38.8, 31.3, 31.1. Called a chunk at a time, one chunk ahead: 17.5 and 34.7. */
#define LEAD_OF_KEYS 12288
#define POSITIONS_AT_ONCE 2

/* Positions [at, to) of one head of one row. */
struct stretch {
    const int32_t *table; /* the row's block ids */
    int64_t head_bytes;   /* where in a block the head begins */
    int32_t at, to;
};

struct ahead {
    const char *keys, *values; /* the pool */
    int64_t block_tokens, block_bytes, row_bytes;
    struct stretch now, next;
    const char *key, *value; /* what is left of a run begins here */
    int64_t left;            /* bytes of its keys; its values are as many */
    int64_t due;             /* bytes of keys that may be called by now */
    int64_t at_once;
};

static void ahead_find_run(struct ahead *a) {
    if (a->now.at >= a->now.to) {
        a->now = a->next;
        a->next.at = a->next.to;
    }
    if (a->now.at >= a->now.to) return;
    int64_t offset = a->now.at % a->block_tokens, count = a->block_tokens - offset;
    if (count > a->now.to - a->now.at) count = a->now.to - a->now.at;
    int64_t place = a->now.table[a->now.at / a->block_tokens] * a->block_bytes + a->now.head_bytes;
    a->key = a->keys + place + offset * a->row_bytes;
    a->value = a->values + place + offset * a->row_bytes;
    a->left = count * a->row_bytes;
    a->now.at += (int32_t)count;
}

INLINE void call_ahead(struct ahead *a) {
    if (a->due <= 0) return;
    if (a->left <= 0) ahead_find_run(a);
    if (a->left <= 0) return;
    for (int64_t at = 0; at < a->at_once; at += 64) {
        __builtin_prefetch(a->key + at, 0, 2);
        __builtin_prefetch(a->value + at, 0, 2);
    }
    a->key += a->at_once;
    a->value += a->at_once;
    a->left -= a->at_once;
    a->due -= a->at_once;
}

/* Work goes on to so many positions: what had to be called before is, and as much again may be. */
static void ahead_go_on(struct ahead *a, int count) {
    while (a->due > 0 && (a->left > 0 || a->now.at < a->now.to || a->next.at < a->next.to)) call_ahead(a);
    a->due += count * a->row_bytes;
}
