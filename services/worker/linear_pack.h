/* How weights are packed, and how int8 becomes bfloat16 again. Included by linear.h.
 *
 * int8 lies as bfloat16 does, a byte for each number: weight = byte * scale, one scale for each output and each group of
 * GROUP inputs; scales lie `[panel][group][output of the panel]`. */

#pragma once

#define GROUP 64 /* inputs: two steps */

static int64_t linear_groups(int64_t in) { return (in + GROUP - 1) / GROUP; }

static int64_t linear_packed_bytes(int64_t in, int64_t out, int64_t kind) {
    return linear_panels(out) * linear_panel_bytes(in, kind);
}

/* How many floats the scales are. */
static int64_t linear_scale_count(int64_t in, int64_t out, int64_t kind) {
    return kind == LINEAR_INT8 ? linear_panels(out) * linear_groups(in) * PANEL : 0;
}

/* Where a number of a panel lies, counted in numbers. */
INLINE int64_t linear_place(int64_t input, int64_t output) {
    int64_t tile = input / STEP * 2 + output / 16;
    return tile * (TILE / 2) + input % STEP / 2 * 32 + output % 16 * 2 + input % 2;
}

static void linear_pack_int8(const uint16_t *row, int64_t in, int64_t output, int8_t *panel, float *scales) {
    for (int64_t group = 0; group < linear_groups(in); group++) {
        int64_t from = group * GROUP, to = from + GROUP < in ? from + GROUP : in;
        float most = 0.0f;
        for (int64_t i = from; i < to; i++) {
            float size = __builtin_fabsf(one_widened(row[i]));
            most = size > most ? size : most;
        }
        scales[group * PANEL + output] = most / 127.0f;
        float by = most > 0.0f ? 127.0f / most : 0.0f;
        for (int64_t i = from; i < to; i++)
            panel[linear_place(i, output)] = (int8_t)__builtin_rintf(one_widened(row[i]) * by);
    }
}

/* weights: bfloat16 [out][in]; scales: room for linear_scale_count, NULL for LINEAR_BF16. */
static void linear_pack(const uint16_t *weights, int64_t in, int64_t out, int64_t kind, void *packed, float *scales) {
    memset(packed, 0, linear_packed_bytes(in, out, kind));
    if (kind == LINEAR_INT8) memset(scales, 0, linear_scale_count(in, out, kind) * sizeof(float));
    for (int64_t output = 0; output < out; output++) {
        const uint16_t *row = weights + output * in;
        int64_t panel = output / PANEL;
        char *to = (char *)packed + panel * linear_panel_bytes(in, kind);
        if (kind == LINEAR_INT8) {
            linear_pack_int8(row, in, output % PANEL, (int8_t *)to, scales + panel * linear_groups(in) * PANEL);
            continue;
        }
        for (int64_t i = 0; i < in; i++) ((uint16_t *)to)[linear_place(i, output % PANEL)] = row[i];
    }
}

/* ---- int8 to bfloat16 ---- */

#if LANES == 16 && defined(__AVX512BF16__)
/* 32 bytes, of which each pair belongs to one output. */
INLINE void linear_widen_row(const int8_t *from, const float *pairs, uint16_t *to) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)from)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(from + 16))));
    low = _mm512_mul_ps(low, (__m512)load(pairs));
    high = _mm512_mul_ps(high, (__m512)load(pairs + 16));
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
#else
typedef int8_t linear_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
INLINE void linear_widen_row(const int8_t *from, const float *pairs, uint16_t *to) {
    UNROLLED for (int i = 0; i < 32; i += LANES) {
        vf number = __builtin_convertvector(__builtin_convertvector(*(const linear_bytes *)(from + i), vi), vf);
        store_first_narrowed(to + i, number * load(pairs + i), LANES);
    }
}
#endif

/* Where weights are to be had for a product: as bfloat16, or as bytes that are widened on the way. */
struct linear_weights {
    const char *tiles;   /* NULL: from bytes */
    const int8_t *bytes; /* whole groups, from their first on */
    const float *scales;
    uint16_t *room;
};

/* The scales of a group, each twice: both inputs of a pair have the same. */
INLINE void linear_spread(const float *scales, float *pairs) {
#if LANES == 16
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    for (int tile = 0; tile < 2; tile++) {
        __m512 given = (__m512)load(scales + 16 * tile);
        store(pairs + 32 * tile, (vf)_mm512_permutexvar_ps(low, given));
        store(pairs + 32 * tile + 16, (vf)_mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8)), given));
    }
#else
    for (int i = 0; i < 2 * PANEL; i++) pairs[i] = scales[i / 2];
#endif
}

/* One step of a panel. With every other row a line of what comes next is called, up to so many. */
INLINE void linear_widen_step(const int8_t *bytes, const float *pairs, uint16_t *to, struct linear_stream *stream,
                              int lines) {
    for (int row = 0; row < 32; row++) {
        if (row % 2 == 0 && row / 2 < lines) linear_stream_call(stream, 1);
        linear_widen_row(bytes + 32 * row, pairs + row / 16 * 32, to + 32 * row);
    }
}

/* So many steps; the first begins a group. */
static void linear_widen(const struct linear_weights *from, int64_t steps, struct linear_stream *stream, int lines) {
    float pairs[2 * PANEL] __attribute__((aligned(64)));
    for (int64_t step = 0; step < steps; step++) {
        if (step * STEP % GROUP == 0) linear_spread(from->scales + step * STEP / GROUP * PANEL, pairs);
        linear_widen_step(from->bytes + step * STEP_BYTES / 2, pairs, from->room + step * STEP_BYTES / 2, stream, lines);
    }
}
