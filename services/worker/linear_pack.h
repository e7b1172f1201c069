/* How weights are packed, and how int8 becomes bfloat16 again. Included by linear.h.
 *
 * int8 lies as bfloat16 does, a byte for each number: weight = byte * scale, one scale for each output and step. A step
 * begins with its 32 scales, so that all there is to read lies in one row. Groups of 32 inputs are also those of GGUF's
 * Q8_0: what was such a number is so again. Where bytes are multiplied by bytes, four inputs of an output lie together
 * and are 128 higher. */

#pragma once

static int64_t linear_packed_bytes(int64_t in, int64_t out, int64_t kind) {
    return linear_panels(out) * linear_panel_bytes(in, kind);
}

/* Where a number of a step lies, counted in numbers. */
INLINE int64_t linear_place(int64_t input, int64_t output) {
    return output / 16 * (TILE / 2) + input / 2 * 32 + output % 16 * 2 + input % 2;
}

/* The same for bytes, and what is stored for 0. */
#if HAS_BYTES
#define NO_BYTE 128
INLINE int64_t linear_byte_place(int64_t input, int64_t output) {
    return output / 16 * 512 + input / 4 * 64 + output % 16 * 4 + input % 4;
}
#else
#define NO_BYTE 0
INLINE int64_t linear_byte_place(int64_t input, int64_t output) { return linear_place(input, output); }
#endif

/* The largest of a step's numbers; NaN if one of them is infinite or no number; 0 if they are next to nothing. */
static float linear_largest(const uint16_t *row) {
    float most = 0.0f;
    for (int64_t i = 0; i < STEP; i++) {
        float size = __builtin_fabsf(one_widened(row[i]));
        if (!__builtin_isfinite(size)) return __builtin_nanf("");
        most = size > most ? size : most;
    }
    return most < 1e-30f ? 0.0f : most;
}

/* What a step with a number that is none gives is none either: its scale is not. */
static void linear_pack_int8(const uint16_t *row, int64_t output, char *step) {
    float most = linear_largest(row), by = 127.0f / most;
    int8_t *to = (int8_t *)step + SCALE_BYTES;
    ((float *)step)[output] = most / 127.0f;
    if (most > 0.0f)
        for (int64_t i = 0; i < STEP; i++)
            to[linear_byte_place(i, output)] = (int8_t)(NO_BYTE + (int)__builtin_rintf(one_widened(row[i]) * by));
}

static void linear_pack_bf16(const uint16_t *row, int64_t output, char *step) {
    for (int64_t i = 0; i < STEP; i++) ((uint16_t *)step)[linear_place(i, output)] = row[i];
}

/* weights: bfloat16 [out][in] */
static void linear_pack(const uint16_t *weights, int64_t in, int64_t out, int64_t kind, void *packed) {
    memset(packed, 0, linear_packed_bytes(in, out, kind));
    for (int64_t output = 0; output < out; output++) {
        const uint16_t *row = weights + output * in;
        char *to = (char *)packed + output / PANEL * linear_panel_bytes(in, kind);
        for (int64_t i = 0; i < in; i += STEP, to += linear_step_bytes(kind)) {
            if (kind == LINEAR_INT8) linear_pack_int8(row + i, output % PANEL, to);
            else linear_pack_bf16(row + i, output % PANEL, to);
        }
    }
}

/* ---- int8 to bfloat16 ---- */

#define ROW_VECTORS (32 / LANES) /* of floats: a row of a tile */

/* 32 bytes, of which each pair belongs to one output. */
INLINE void linear_widen_row(const int8_t *from, const vf *scales, uint16_t *to) {
#if LANES == 16 && defined(__AVX512BF16__)
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)from)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(from + 16))));
    low = _mm512_mul_ps(low, (__m512)scales[0]);
    high = _mm512_mul_ps(high, (__m512)scales[1]);
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#else
    typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    UNROLLED for (int v = 0; v < ROW_VECTORS; v++) {
        vf number = __builtin_convertvector(__builtin_convertvector(*(const bytes *)(from + v * LANES), vi), vf);
        store_first_narrowed(to + v * LANES, number * scales[v], LANES);
    }
#endif
}

/* The scales of a tile, each twice: both inputs of a pair have the same. */
INLINE void linear_spread(const float *scales, vf *pairs) {
#if LANES == 16
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    __m512 given = (__m512)load(scales);
    pairs[0] = (vf)_mm512_permutexvar_ps(low, given);
    pairs[1] = (vf)_mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8)), given);
#else
    UNROLLED for (int v = 0; v < ROW_VECTORS; v++)
        for (int i = 0; i < LANES; i++) pairs[v][i] = scales[(v * LANES + i) / 2];
#endif
}

/* Where weights are to be had for a product: as bfloat16, or as int8 that is widened on the way. */
struct linear_weights {
    const char *tiles; /* NULL: from int8 */
    const char *int8;
    uint16_t *room;
};

/* One step of a panel. With every other row a line of what comes next is called, up to so many. */
INLINE void linear_widen_step(const char *step, uint16_t *to, struct linear_stream *stream, int lines) {
    const int8_t *bytes = (const int8_t *)step + SCALE_BYTES;
    if (lines > 16) linear_stream_call(stream, lines - 16);
    for (int tile = 0; tile < 2; tile++) {
        vf scales[ROW_VECTORS];
        linear_spread((const float *)step + 16 * tile, scales);
        for (int row = 0; row < 16; row++, bytes += 32, to += 32) {
            if (row % 2 == 0 && tile * 8 + row / 2 < lines) linear_stream_call(stream, 1);
            linear_widen_row(bytes, scales, to);
        }
    }
}

static void linear_widen(const struct linear_weights *from, int64_t steps, struct linear_stream *stream, int lines) {
    for (int64_t step = 0; step < steps; step++)
        linear_widen_step(from->int8 + step * INT8_STEP_BYTES, from->room + step * STEP_BYTES / 2, stream, lines);
}
