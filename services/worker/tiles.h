/* AMX: eight tiles of 16 rows of 64 bytes, the same shape for all that is multiplied here.
 *
 * A process asks once whether it may use them; a thread sets their shape before it does. */

#pragma once

#include "attention_vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && LANES == 16 && !defined(NO_AMX)
#define HAS_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

/* Returns 0 if this process may use the tiles. */
static int tiles_ask(void) {
    const long ask_for_state = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, ask_for_state, tile_data) ? 1 : 0;
}

/* gcc does not know that loads of tiles, and of their shapes, read memory: by now all is stored that lies there. */
INLINE void tiles_settle(const void *at) { __asm__ volatile("" : : "r"(at) : "memory"); }

static void tiles_begin(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shape.row_bytes[tile] = 64;
        shape.rows[tile] = 16;
    }
    tiles_settle(&shape);
    _tile_loadconfig(&shape);
}

static void tiles_end(void) { _tile_release(); }

#else
#define HAS_TILES 0
INLINE void tiles_begin(void) {}
INLINE void tiles_end(void) {}
#endif
