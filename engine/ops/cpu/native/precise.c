/* Products whose activations keep 16 bits: each row is multiplied as the sum of two rows of 8 bits, its rounded values and what the
 * rounding left over. The weights are read once for both halves, and the second row is nearly free where reading them is the cost. */
#include "linear.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#define MOST_ROWS 256 /* at a time, so that a long prompt needs no more room than a short one */
#define ROWS_ALONE 4  /* so few are not worth waking threads for */

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

/* high + low = x, high on the grid of 255 values per group that rl_quantize_row would round x to. Written so that a compiler
 * turns the loops into vector code without being allowed to reorder sums. */
#define LANES 8
#define ROUNDS 12582912.0f /* 1.5 * 2^23: adding it drops the fraction */

static void split_row(const float *x, int64_t n, float *high, float *low) {
    for (int64_t start = 0; start < n; start += RL_GROUP) {
        int64_t count = start + RL_GROUP < n ? RL_GROUP : n - start, whole = count / LANES * LANES;
        const float *from = x + start;
        float most[LANES] = {0};
        for (int64_t i = 0; i < whole; i += LANES)
            for (int lane = 0; lane < LANES; lane++) {
                float size = fabsf(from[i + lane]);
                most[lane] = size > most[lane] ? size : most[lane];
            }
        float largest = 0.0f;
        for (int lane = 0; lane < LANES; lane++)
            largest = most[lane] > largest ? most[lane] : largest;
        for (int64_t i = whole; i < count; i++)
            largest = fabsf(from[i]) > largest ? fabsf(from[i]) : largest;
        float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        for (int64_t i = 0; i < count; i++) {
            float steps = (from[i] * inverse + ROUNDS) - ROUNDS;
            high[start + i] = steps * scale;
            low[start + i] = from[i] - high[start + i];
        }
    }
}

typedef struct {
    const float *x, *bias, *residual;
    float *halves, *products, *out;
    int64_t rows, in_features, out_features;
} Job;

static void split_piece(void *arg, int64_t row) {
    Job *job = arg;
    int64_t n = job->in_features;
    split_row(job->x + row * n, n, job->halves + row * n, job->halves + (job->rows + row) * n);
}

static void add_piece(void *arg, int64_t row) {
    Job *job = arg;
    int64_t n = job->out_features;
    const float *high = job->products + row * n, *low = job->products + (job->rows + row) * n;
    const float *bias = job->bias, *residual = job->residual ? job->residual + row * n : NULL;
    float *out = job->out + row * n; /* may be the residual's own row: each element is read before it is written */
    if (residual && bias)
        for (int64_t i = 0; i < n; i++)
            out[i] = residual[i] + (high[i] + low[i] + bias[i]);
    else if (residual)
        for (int64_t i = 0; i < n; i++)
            out[i] = residual[i] + (high[i] + low[i]);
    else if (bias)
        for (int64_t i = 0; i < n; i++)
            out[i] = high[i] + low[i] + bias[i];
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = high[i] + low[i];
}

static void each_row(void (*piece)(void *, int64_t), Job *job) {
    if (job->rows > ROWS_ALONE)
        rl_pool_run(piece, job, job->rows);
    else
        for (int64_t row = 0; row < job->rows; row++)
            piece(job, row);
}

int64_t rl_linear_precise(int64_t kind, const uint8_t *weights, int64_t out_features, int64_t in_features, const float *x,
                          int64_t num_rows, const float *bias, const float *residual, float *out) {
    int64_t most = num_rows < MOST_ROWS ? num_rows : MOST_ROWS;
    int is_kept;
    float *halves = take((size_t)(2 * most * (in_features + out_features)), &is_kept);
    if (!halves)
        return -1;
    int64_t code = 0;
    for (int64_t first = 0; first < num_rows && code == 0; first += most) {
        int64_t rows = first + most < num_rows ? most : num_rows - first;
        Job job = {x + first * in_features,
                   bias,
                   residual ? residual + first * out_features : NULL,
                   halves,
                   halves + 2 * most * in_features,
                   out + first * out_features,
                   rows,
                   in_features,
                   out_features};
        each_row(split_piece, &job);
        code = rl_linear(kind, weights, out_features, in_features, halves, 2 * rows, NULL, NULL, job.products);
        if (code == 0)
            each_row(add_piece, &job);
    }
    give(halves, is_kept);
    return code;
}
