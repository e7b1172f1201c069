/* Linear layers one after the other on torch's threads, for tests and benchmarks. */

#include <stdlib.h>

#include "../../services/worker/linear.h"

struct round {
    const struct linear_call *calls;
    int64_t count;
    _Atomic int64_t *taken; /* two for each call */
    void *bytes;
};

static void play(void *given) {
    struct round *round = given;
    linear_thread_begin();
    for (int64_t at = 0; at < round->count; at++) {
        struct linear_call call = round->calls[at];
        call.bytes = round->bytes;
        if (linear_bytes_of(&call)) linear_prepare(&call, round->taken + 2 * at);
        wait_for_team();
        linear_work(&call, round->taken + 2 * at + 1);
        wait_for_team();
    }
    linear_thread_end();
}

const char *rig_variant(void) { return LINEAR_VARIANT; }

int rig_multiplies_bytes(void) { return HAS_BYTES; }

int64_t rig_bytes(int64_t in, int64_t out, int64_t kind) { return linear_packed_bytes(in, out, kind); }

void rig_pack(const uint16_t *weights, int64_t in, int64_t out, int64_t kind, void *packed) {
    linear_pack(weights, in, out, kind, packed);
}

/* Returns 0, 1 if the processor's tiles may not be used, 2 if there is no memory. */
int rig_run(parallel_function parallel, barrier_function barrier, size_function size, const struct linear_call *calls,
            int64_t count) {
    int64_t most = 1;
    for (int64_t at = 0; at < count; at++) most = linear_bytes_of(calls + at) > most ? linear_bytes_of(calls + at) : most;
    struct round round = {calls, count, calloc((size_t)count, 2 * sizeof(_Atomic int64_t)), malloc((size_t)most)};
    team_use(parallel, barrier, size);
    if (!round.taken || !round.bytes) return 2;
    int refused = linear_init();
    if (!refused) run_parallel(play, &round, 0, 0);
    free((void *)round.taken);
    free(round.bytes);
    return refused;
}
