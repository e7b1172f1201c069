/* Attention on pairs of bfloat16: the two products of a chunk, in AMX tiles or in dots, where a row has 32 numbers or a
 * multiple.
 *
 * Keys become words `[pair of dims][position]`, values pairs of positions `[pair][dim][2]`: what is multiplied pair by
 * pair. Weights are rounded to bfloat16; what they are divided by is their sum before that. */

#pragma once

#include "attention_chunk.h"
#include "dots.h"
#include "tiles.h"

#define PAIRED_DIMS 32
#define PAIRED_BLOCK 32 /* there is room for query rows up to a multiple of this */

#if HAS_TILES || HAS_DOTS
#define HAS_PAIRS 1

/* Where two vectors of halves become pairs of one from each. */
struct pairing { __m512i lower, upper; };

INLINE struct pairing pairing_of_words(void) {
    uint16_t order[2][32];
    for (int i = 0; i < 32; i++) {
        order[0][i] = (uint16_t)(i / 2 + i % 2 * 32);
        order[1][i] = (uint16_t)(16 + i / 2 + i % 2 * 32);
    }
    return (struct pairing){_mm512_loadu_si512(order[0]), _mm512_loadu_si512(order[1])};
}

/* pairs[i / 2][d][i % 2] = value[i][d]; zeros for positions that are not there, up to a multiple of 32 */
static void pair_values(const void *const *rows, int count, int64_t dim, uint16_t *pairs, struct ahead *ahead) {
    struct pairing pairing = pairing_of_words();
    __m512i none = _mm512_setzero_si512();
    for (int i = 0; i < (count + 31) / 32 * 32; i += 2, pairs += 2 * dim) {
        if (i % 4 == 0) call_ahead(ahead);
        for (int64_t d = 0; d < dim; d += 32) {
            __m512i a = i < count ? _mm512_loadu_si512((const uint16_t *)rows[i] + d) : none;
            __m512i b = i + 1 < count ? _mm512_loadu_si512((const uint16_t *)rows[i + 1] + d) : none;
            _mm512_storeu_si512(pairs + 2 * d, _mm512_permutex2var_epi16(a, pairing.lower, b));
            _mm512_storeu_si512(pairs + 2 * d + 32, _mm512_permutex2var_epi16(a, pairing.upper, b));
        }
    }
}

#if HAS_TILES
#include "attention_tiles.h"
static int pairs_ask(void) { return !tiles_ask(); }
#else
#include "attention_dots.h"
static int pairs_ask(void) { return dots_are_fast(); }
#endif

#else
#define HAS_PAIRS 0
#define PAIRS_VARIANT VARIANT
#define PAIRED_ROWS 1
static int pairs_ask(void) { return 0; }
#endif
