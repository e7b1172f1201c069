/* What follows the product: bias, a sum, an activation, a gate; then rounding. Included by linear.h. */

#pragma once

/* 1 / x for 1 <= x <= 2^126, relative error 1e-7 */
INLINE vf linear_one_by(vf x) {
#if LANES == 16
    vf guess = (vf)_mm512_rcp14_ps((__m512)x);
    return guess * (all(2.0f) - x * guess);
#else
    return all(1.0f) / x;
#endif
}

/* x / (1 + exp(-of)); nothing is left of x where exp does not fit into a float */
INLINE vf linear_sigmoid_times(vf x, vf of) {
    vf power = of * all(-1.442695041f);
    vi is_nothing = power > all(125.0f);
    power = choose(is_nothing, all(0.0f), power);
    return choose(is_nothing, all(0.0f), x * linear_one_by(all(1.0f) + exp2_of(power)));
}

/* exact up to 2e-7 of x: x/2 * (1 + erf(x / sqrt 2)), erf as in Abramowitz and Stegun 7.1.26 */
INLINE vf linear_gelu(vf x) {
    vf size = choose(x < all(0.0f), -x, x), z = size * all(0.7071067812f);
    vf t = linear_one_by(all(1.0f) + all(0.3275911f) * z);
    vf sum = all(1.061405429f);
    sum = sum * t + all(-1.453152027f);
    sum = sum * t + all(1.421413741f);
    sum = sum * t + all(-0.284496736f);
    sum = sum * t + all(0.254829592f);
    vf beyond = sum * t * exp2_of(z * z * all(-1.442695041f)); /* 1 - erf(z) */
    vf kept = choose(x < all(0.0f), beyond, all(2.0f) - beyond);
    return all(0.5f) * x * kept;
}

INLINE vf linear_activated(vf x, int64_t activation) {
    switch (activation) {
    case ACT_SILU: return linear_sigmoid_times(x, x);
    case ACT_GELU_TANH: return linear_sigmoid_times(x, all(1.595769122f) * (x + all(0.044715f) * x * x * x));
    case ACT_GELU: return linear_gelu(x);
    default: return choose(x < all(0.0f), all(0.0f), x); /* ACT_RELU; what is no number stays none */
    }
}

/* Where a row's numbers go: `left` of them are true. */
struct linear_way_out {
    void *y;
    const uint16_t *add;
    int64_t left;
    int is_float;
};

INLINE void linear_store(struct linear_way_out to, int64_t at, vf given) {
    int64_t left = to.left - at;
    if (left <= 0) return;
    if (to.is_float) {
        if (left >= LANES) store((float *)to.y + at, given);
        else store_first((float *)to.y + at, given, left);
    } else {
        if (left >= LANES) store_narrowed((uint16_t *)to.y + at, given);
        else store_first_narrowed((uint16_t *)to.y + at, given, left);
    }
}

INLINE vf linear_added(struct linear_way_out to, int64_t at) {
    int64_t left = to.left - at;
    if (left >= LANES) return widened(to.add + at);
    uint16_t few[LANES] = {0};
    if (left > 0) memcpy(few, to.add + at, left * sizeof *few);
    return widened(few);
}

INLINE void linear_finish_row(const float *sums, const float *bias, struct linear_way_out to, int64_t epilogue,
                              int64_t activation) {
    if (epilogue == EPILOGUE_GATED) {
        for (int64_t at = 0; at < 16; at += LANES) {
            vf gate = load(sums + at) + load(bias + at), up = load(sums + 16 + at) + load(bias + 16 + at);
            linear_store(to, at, linear_activated(gate, activation) * up);
        }
        return;
    }
    for (int64_t at = 0; at < PANEL; at += LANES) {
        vf sum = load(sums + at) + load(bias + at);
        if (epilogue == EPILOGUE_ADD) sum += linear_added(to, at);
        if (epilogue == EPILOGUE_ACTIVATED) sum = linear_activated(sum, activation);
        linear_store(to, at, sum);
    }
}

/* Rows of a panel that have been summed and not yet finished: that is done beside the next sums. */
struct linear_pending {
    const struct linear_call *call;
    const float *sums;
    int64_t panel, row, rows, done;
    float bias[PANEL] __attribute__((aligned(64)));
};

/* One loop for each way, so that no row asks which. */
INLINE void linear_finish_as(struct linear_pending *pending, int64_t rows, int64_t epilogue, int64_t activation) {
    const struct linear_call *call = pending->call;
    int is_gated = epilogue == EPILOGUE_GATED;
    int64_t columns = is_gated ? call->w->out / 2 : call->w->out;
    int64_t column = pending->panel * (is_gated ? PANEL / 2 : PANEL);
    struct linear_way_out to = {.left = columns - column, .is_float = (int)call->y_is_float};
    for (int64_t i = pending->done; i < pending->done + rows; i++) {
        to.y = (char *)call->y + ((pending->row + i) * call->y_stride + column) * (to.is_float ? 4 : 2);
        if (epilogue == EPILOGUE_ADD) to.add = call->add + (pending->row + i) * call->add_stride + column;
        linear_finish_row(pending->sums + i * PANEL, pending->bias, to, epilogue, activation);
    }
}

static __attribute__((noinline)) void linear_finish_rows(struct linear_pending *pending, int64_t rows) {
    int64_t left = pending->rows - pending->done, activation = pending->call->activation;
    rows = rows < left ? rows : left;
    switch (pending->call->epilogue) {
    case EPILOGUE_ADD: linear_finish_as(pending, rows, EPILOGUE_ADD, 0); break;
    case EPILOGUE_ACTIVATED: linear_finish_as(pending, rows, EPILOGUE_ACTIVATED, activation); break;
    case EPILOGUE_GATED:
        if (activation == ACT_SILU) linear_finish_as(pending, rows, EPILOGUE_GATED, ACT_SILU);
        else linear_finish_as(pending, rows, EPILOGUE_GATED, activation);
        break;
    default: linear_finish_as(pending, rows, EPILOGUE_NONE, 0);
    }
    pending->done += rows;
}

/* Up to so many of the rows that wait. */
INLINE void linear_finish(struct linear_pending *pending, int64_t rows) {
    if (pending->done < pending->rows) linear_finish_rows(pending, rows);
}

/* The rows before must be finished. */
static void linear_to_finish(struct linear_pending *pending, int64_t panel, int64_t row, int64_t rows,
                             const float *sums) {
    const struct linear *w = pending->call->w;
    int64_t left = w->out - panel * PANEL;
    if (w->bias) memcpy(pending->bias, w->bias + panel * PANEL, (left < PANEL ? left : PANEL) * sizeof(float));
    pending->panel = panel;
    pending->row = row;
    pending->rows = rows;
    pending->done = 0;
    pending->sums = sums;
}
