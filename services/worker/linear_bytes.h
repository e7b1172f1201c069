/* int8 against int8: rows of x become bytes too, and sums of a step are whole numbers (avx512_vnni). Included by linear.h.
 *
 * A step of a row is 32 bytes with a scale of their own, as a step of a weight has. The instruction multiplies bytes
 * without a sign by bytes with one: weights are stored 128 higher than they are, and a step of a row begins with -128
 * times the sum of its bytes. All layers of 135M on a Zen 4, widened to bfloat16 before: 1 row 5.8 -> 4.1 ms, 16 rows
 * 14.7 -> 8.8, 32 rows 25.8 -> 16.4 (bfloat16: 7.1, 11.5, 22.8). */

#pragma once

#define BYTES_ROWS 6 /* rows whose sums fit into registers, two vectors of each kind for each */
#define FOR_EACH_BYTES_ROW_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define EACH_BYTES_ROW _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++)

/* One step of one row. */
struct linear_bytes {
    int8_t x[STEP];
    float scale;
    int32_t first;
};

/* A step with a number that is none, or infinite, is none: its scale is not. */
INLINE void linear_to_bytes(const uint16_t *x, struct linear_bytes *to) {
    vf low = widened(x), high = widened(x + 16);
    vi sign = (vi){0} + 0x7fffffff;
    __m512i sizes = _mm512_max_epu32((__m512i)((vi)low & sign), (__m512i)((vi)high & sign));
    uint32_t bits = _mm512_reduce_max_epu32(sizes); /* what is no number is larger than all */
    float most = 0.0f;
    memcpy(&most, &bits, sizeof most);
    if (bits >= 0x7f800000) most = __builtin_nanf("");
    float by = most < 1e-30f ? 0.0f : 127.0f / most;
    __m512i a = _mm512_cvtps_epi32((__m512)(low * all(by))), b = _mm512_cvtps_epi32((__m512)(high * all(by)));
    _mm_storeu_si128((__m128i *)to->x, _mm512_cvtsepi32_epi8(a));
    _mm_storeu_si128((__m128i *)(to->x + 16), _mm512_cvtsepi32_epi8(b));
    to->scale = most < 1e-30f ? 0.0f : most / 127.0f;
    to->first = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}

INLINE void linear_bytes_block(int rows, const struct linear_bytes *x, int64_t x_stride, const char *weights,
                               int64_t steps, float *sums, int is_more, struct linear_stream *stream, int lines) {
    vf low[BYTES_ROWS], high[BYTES_ROWS];
    EACH_BYTES_ROW {
        low[r] = is_more ? load(sums + r * PANEL) : all(0.0f);
        high[r] = is_more ? load(sums + r * PANEL + 16) : all(0.0f);
    }
    for (int64_t step = 0; step < steps; step++, x++, weights += INT8_STEP_BYTES) {
        __m512i low_sum[BYTES_ROWS], high_sum[BYTES_ROWS];
        EACH_BYTES_ROW low_sum[r] = high_sum[r] = _mm512_set1_epi32(x[r * x_stride].first);
        linear_stream_call(stream, lines);
        const char *bytes = weights + SCALE_BYTES;
        UNROLLED for (int64_t four = 0; four < STEP / 4; four++) {
            __m512i first = _mm512_load_si512(bytes + four * 64), second = _mm512_load_si512(bytes + 512 + four * 64);
            EACH_BYTES_ROW {
                __m512i given = (__m512i)(*(const loose_u32 *)(x[r * x_stride].x + 4 * four) + (vu){0});
                low_sum[r] = _mm512_dpbusd_epi32(low_sum[r], first, given);
                high_sum[r] = _mm512_dpbusd_epi32(high_sum[r], second, given);
            }
        }
        vf low_scale = load((const float *)weights), high_scale = load((const float *)weights + 16);
        EACH_BYTES_ROW {
            vf scale = all(x[r * x_stride].scale);
            low[r] += (vf)_mm512_cvtepi32_ps(low_sum[r]) * (scale * low_scale);
            high[r] += (vf)_mm512_cvtepi32_ps(high_sum[r]) * (scale * high_scale);
        }
    }
    EACH_BYTES_ROW {
        store(sums + r * PANEL, low[r]);
        store(sums + r * PANEL + 16, high[r]);
    }
}

static void linear_bytes_rows(int64_t rows, const struct linear_bytes *x, int64_t x_stride, const char *weights,
                              int64_t steps, float *sums, int is_more, struct linear_beside *beside) {
    int64_t blocks = (rows + BYTES_ROWS - 1) / BYTES_ROWS, each = (rows + blocks - 1) / blocks;
    int lines = (int)((beside->lines + blocks - 1) / blocks);
    struct linear_stream *stream = &beside->stream;
    linear_finish(&beside->pending, ROW_BLOCK);
    for (int64_t row = 0; row < rows; row += each) {
        const struct linear_bytes *from = x + row * x_stride;
        float *to = sums + row * PANEL;
#define CASE(N) \
    case N: linear_bytes_block(N, from, x_stride, weights, steps, to, is_more, stream, lines); break;
        switch (row + each < rows ? each : rows - row) { FOR_EACH_BYTES_ROW_COUNT(CASE) }
#undef CASE
    }
}
