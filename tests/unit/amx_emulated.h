/* AMX where there is none: what its instructions do, in plain C, but for numbers below 2^-126, which it takes for 0. For
 * tests, which include it before a kernel. */

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_BF16__ 1
#define __AMX_TILE__ 1

static __thread struct {
    int is_shaped;
    float tiles[8][16][16];
} emulated;

/* Whoever multiplies must have set the one shape there is. */
static inline float (*emulated_tile(int tile))[16] {
    if (!emulated.is_shaped) __builtin_trap();
    return emulated.tiles[tile];
}

static inline void emulated_shape(const void *shape) {
    const uint8_t *bytes = shape;
    emulated.is_shaped = bytes[0] == 1 && bytes[1] == 0;
    for (int tile = 0; tile < 8; tile++)
        emulated.is_shaped &= bytes[16 + 2 * tile] == 64 && bytes[17 + 2 * tile] == 0 && bytes[48 + tile] == 16;
    memset(emulated.tiles, 0xff, sizeof emulated.tiles); /* no numbers: nobody may count on what is in them */
}

static inline void emulated_zero(int tile) { memset(emulated_tile(tile), 0, sizeof emulated.tiles[0]); }

static inline void emulated_load(int tile, const void *from, int64_t stride) {
    float(*to)[16] = emulated_tile(tile);
    for (int row = 0; row < 16; row++) memcpy(to[row], (const char *)from + row * stride, 64);
}

static inline void emulated_store(int tile, void *to, int64_t stride) {
    float(*from)[16] = emulated_tile(tile);
    for (int row = 0; row < 16; row++) memcpy((char *)to + row * stride, from[row], 64);
}

/* One of two halves of a word, as a float. */
static inline float emulated_half(float word, int is_upper) {
    uint32_t bits;
    memcpy(&bits, &word, sizeof bits);
    bits = is_upper ? bits & 0xffff0000u : bits << 16;
    memcpy(&word, &bits, sizeof bits);
    return word;
}

static inline void emulated_dots(int sums, int left, int right) {
    float(*to)[16] = emulated_tile(sums), (*a)[16] = emulated_tile(left), (*b)[16] = emulated_tile(right);
    for (int row = 0; row < 16; row++)
        for (int pair = 0; pair < 16; pair++)
            for (int half = 0; half < 2; half++) {
                float given = emulated_half(a[row][pair], half);
                for (int column = 0; column < 16; column++)
                    to[row][column] += given * emulated_half(b[pair][column], half);
            }
}

/* The permission is asked for, and given. */
static inline long emulated_permission(long number, ...) { return number * 0; }

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(shape) emulated_shape(shape)
#define _tile_release() (emulated.is_shaped = 0)
#define _tile_zero(tile) emulated_zero(tile)
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbf16ps(sums, left, right) emulated_dots(sums, left, right)
#define syscall(...) emulated_permission(__VA_ARGS__)
