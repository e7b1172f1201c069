/* What Python calls of the linear layers: included once, by the source that becomes the library. */

#pragma once

#include "linear.h"

int64_t linear_outside_bytes(int64_t in, int64_t out, int64_t kind) { return linear_packed_bytes(in, out, kind); }

int64_t linear_outside_scales(int64_t in, int64_t out, int64_t kind) { return linear_scale_count(in, out, kind); }

void linear_outside_pack(const uint16_t *weights, int64_t in, int64_t out, int64_t kind, void *packed, float *scales) {
    linear_pack(weights, in, out, kind, packed, scales);
}

const char *linear_outside_variant(void) { return LINEAR_VARIANT; }
