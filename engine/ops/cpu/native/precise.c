/* Products whose activations keep 16 bits: each row is multiplied as the sum of two rows of 8 bits, its rounded values and what the
 * rounding left over. The weights are read once for both halves, and the second row is nearly free where reading them is the cost. */
#include "linear.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#define MOST_ROWS 64 /* at a time, so that a long prompt needs no more room than a short one */

RL_API int64_t rl_linear(int64_t kind, const uint8_t *weights, int64_t out_features, int64_t in_features, const float *x,
                         int64_t num_rows, const float *bias, const float *residual, float *out);

static float *kept;
static size_t kept_floats;
static atomic_flag kept_in_use = ATOMIC_FLAG_INIT;

static float *take(size_t num_floats, int *is_kept) {
    *is_kept = !atomic_flag_test_and_set(&kept_in_use);
    if (!*is_kept)
        return malloc(num_floats * sizeof(float));
    if (kept_floats < num_floats) {
        free(kept);
        kept = malloc(num_floats * sizeof(float));
        kept_floats = kept ? num_floats : 0;
    }
    if (!kept)
        atomic_flag_clear(&kept_in_use);
    return kept;
}

static void give(float *buffer, int is_kept) {
    if (is_kept)
        atomic_flag_clear(&kept_in_use);
    else
        free(buffer);
}

/* high + low = x, high on the grid of 255 values per group that rl_quantize_row would round x to. */
static void split_row(const float *x, int64_t n, float *high, float *low) {
    for (int64_t start = 0; start < n; start += RL_GROUP) {
        int64_t end = start + RL_GROUP < n ? start + RL_GROUP : n;
        float largest = 0.0f;
        for (int64_t i = start; i < end; i++)
            largest = fmaxf(largest, fabsf(x[i]));
        float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        for (int64_t i = start; i < end; i++) {
            high[i] = nearbyintf(x[i] * inverse) * scale;
            low[i] = x[i] - high[i];
        }
    }
}

static void add_halves(const float *high, const float *low, const float *bias, const float *residual, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) {
        float sum = high[i] + low[i];
        if (bias)
            sum += bias[i];
        out[i] = residual ? residual[i] + sum : sum;
    }
}

int64_t rl_linear_precise(int64_t kind, const uint8_t *weights, int64_t out_features, int64_t in_features, const float *x,
                          int64_t num_rows, const float *bias, const float *residual, float *out) {
    int64_t most = num_rows < MOST_ROWS ? num_rows : MOST_ROWS;
    int is_kept;
    float *halves = take((size_t)(2 * most * (in_features + out_features)), &is_kept);
    if (!halves)
        return -1;
    float *products = halves + 2 * most * in_features;
    int64_t code = 0;
    for (int64_t first = 0; first < num_rows && code == 0; first += most) {
        int64_t rows = first + most < num_rows ? most : num_rows - first;
        for (int64_t row = 0; row < rows; row++)
            split_row(x + (first + row) * in_features, in_features, halves + row * in_features,
                      halves + (rows + row) * in_features);
        code = rl_linear(kind, weights, out_features, in_features, halves, 2 * rows, NULL, NULL, products);
        for (int64_t row = 0; row < rows && code == 0; row++)
            add_halves(products + row * out_features, products + (rows + row) * out_features, bias,
                       residual ? residual + (first + row) * out_features : NULL, out_features,
                       out + (first + row) * out_features);
    }
    give(halves, is_kept);
    return code;
}
