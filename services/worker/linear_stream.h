/* What a thread works on, and what it calls from memory ahead of that. Included by linear.h.
 *
 * Panels are taken some at a time, from a counter that all threads share: those of one take follow each other in memory.
 * What is worked on next is taken when the lead reaches it, no earlier. */

#pragma once

#include "team.h"

#if HAS_DOTS /* on a Zen 4, 16 rows of all layers take 11.1 ms, with the lead below 13.5 */
#define LEAD_BYTES 65536
#else
#define LEAD_BYTES 16384
#endif

static int64_t linear_step_bytes(int64_t kind) { return kind == LINEAR_BF16 ? STEP_BYTES : INT8_STEP_BYTES; }
static int64_t linear_panel_bytes(int64_t in, int64_t kind) { return in / STEP * linear_step_bytes(kind); }
static int64_t linear_panels(int64_t out) { return (out + PANEL - 1) / PANEL; }

struct linear_stream {
    const char *at, *end;     /* what is to be called next, up to the end of its take; NULL when nothing is left */
    int64_t due;              /* bytes that may be called by now */
    int64_t ahead, ahead_end; /* panels that have been taken and not begun; -1 for none */
    int64_t panels;
    int64_t panel_bytes;
    const char *packed;
    _Atomic int64_t *taken;
};

static void linear_stream_take(struct linear_stream *s) {
    s->ahead = team_take(s->taken, s->panels, &s->ahead_end);
    int is_left = s->ahead < s->panels;
    s->at = is_left ? s->packed + s->ahead * s->panel_bytes : NULL;
    s->end = is_left ? s->packed + s->ahead_end * s->panel_bytes : NULL;
}

/* Call up to so many cache lines. */
INLINE void linear_stream_call(struct linear_stream *s, int64_t lines) {
    if (s->due < 64 * lines) lines = s->due / 64;
    if (s->end - s->at < 64 * lines) lines = (s->end - s->at) / 64;
    const char *at = s->at;
    for (int64_t line = 0; line < lines; line++) __builtin_prefetch(at + 64 * line, 0, 2);
    s->at += 64 * lines;
    s->due -= 64 * lines;
    if (s->at == s->end && s->at && s->ahead < 0) linear_stream_take(s);
}

static void linear_stream_begin(struct linear_stream *s, const struct linear *w, _Atomic int64_t *taken, int is_slow) {
    *s = (struct linear_stream){.panels = linear_panels(w->out), .packed = w->packed, .taken = taken};
    s->panel_bytes = linear_panel_bytes(w->in, w->kind);
    linear_stream_take(s);
    s->due = !is_slow && s->panel_bytes > LEAD_BYTES ? LEAD_BYTES : s->panel_bytes;
    linear_stream_call(s, LEAD_BYTES / 64);
}

/* The panels to work on now. Returns 0 when all have been taken. */
static int linear_stream_next(struct linear_stream *s, int64_t *first, int64_t *end) {
    if (s->ahead < 0) linear_stream_take(s);
    if (s->ahead >= s->panels) return 0;
    *first = s->ahead;
    *end = s->ahead_end;
    s->ahead = -1;
    return 1;
}
