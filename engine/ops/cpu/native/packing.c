/* Weights into the layout of linear.h and back. */
#include "linear.h"
#include "dense.h"

#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define ON_GRID 1e-3f /* a weight this close to a grid point, in steps, lies on it (fp16 sources round by less) */
#define LEVELS 15
#define MOST_TOGETHER 4 /* groups that share a scale */

/* Built for AVX2 like the rest, since without it nothing of this library runs. */
#define AVX2 __attribute__((target("avx2,fma,f16c")))

AVX2 static uint16_t half_from_float(float x) { return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
AVX2 static float float_from_half(uint16_t x) { return _cvtsh_ss(x); }

typedef struct {
    const float *weights;
    int64_t kind, out_features, in_features, num_groups, block_bytes;
    int search;
    uint8_t *packed;
    atomic_int has_bad;
} pack_job;

/* Whether all ``count`` weights lie at minimum + whole number * span / steps. */
AVX2 static int is_on_grid(const float *w, int count, float minimum, float span, float steps) {
    float inverse = steps / span, worst = 0.0f;
    for (int i = 0; i < count; i++) {
        float position = (w[i] - minimum) * inverse;
        worst = fmaxf(worst, fabsf(position - rintf(position)));
    }
    return worst < ON_GRID;
}

/* Steps between the ends of a group: the fewest that put all its weights on a grid, else 15. */
AVX2 static float grid_steps(const float *w, int count, float minimum, float span) {
    for (int steps = 1; steps < LEVELS; steps++)
        if (is_on_grid(w, count, minimum, span, (float)steps))
            return (float)steps;
    return LEVELS;
}

/* Weights [count] that share a scale and a minimum: 1, 2 or 4 whole groups. */
AVX2 static int pack_int4_groups(const float *w, int count, int search, int lane, uint8_t *header) {
    float minimum = w[0], largest = w[0], total = 0.0f;
    for (int i = 0; i < count; i++) {
        minimum = w[i] < minimum ? w[i] : minimum;
        largest = w[i] > largest ? w[i] : largest;
        total += w[i];
    }
    float span = largest - minimum;
    if (!isfinite(span) || !isfinite(total))
        return 0;
    float steps = search && span > 0.0f ? grid_steps(w, count, minimum, span) : LEVELS;
    uint16_t scale = half_from_float(span / steps), least = half_from_float(minimum);
    float step = float_from_half(scale), from = float_from_half(least);
    float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    memcpy(header + 2 * lane, &scale, 2);
    memcpy(header + 32 + 2 * lane, &least, 2);
    uint8_t *group = header + rl_header_bytes(RL_INT4);
    for (int start = 0; start < count; start += RL_GROUP, group += rl_group_bytes(RL_INT4)) {
        uint8_t q[RL_GROUP];
        for (int i = 0; i < RL_GROUP; i++) {
            float position = rintf((w[start + i] - from) * inverse);
            q[i] = (uint8_t)(position < 0.0f ? 0.0f : position > LEVELS ? LEVELS : position);
        }
        for (int i = 0; i < RL_GROUP / 2; i++)
            group[64 * (i / 4) + 4 * lane + i % 4] = (uint8_t)(q[i] | q[i + 16] << 4);
    }
    return 1;
}

AVX2 static int pack_int8_group(const float *w, int lane, uint8_t *values, uint8_t *scales) {
    float largest = 0.0f, total = 0.0f;
    for (int i = 0; i < RL_GROUP; i++) {
        largest = fabsf(w[i]) > largest ? fabsf(w[i]) : largest;
        total += w[i];
    }
    if (!isfinite(largest) || !isfinite(total))
        return 0;
    uint16_t scale = half_from_float(largest / 127.0f);
    float step = float_from_half(scale);
    float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    for (int i = 0; i < RL_GROUP; i++) {
        float position = rintf(w[i] * inverse);
        position = position < -127.0f ? -127.0f : position > 127.0f ? 127.0f : position;
        values[64 * (i / 4) + 4 * lane + i % 4] = (uint8_t)(int8_t)position;
    }
    memcpy(scales + 2 * lane, &scale, 2);
    return 1;
}

AVX2 static void pack_piece(void *arg, int64_t block) {
    pack_job *job = arg;
    uint8_t *packed = job->packed + block * job->block_bytes;
    const int64_t together = rl_header_groups(job->kind);
    memset(packed, 0, (size_t)job->block_bytes);
    for (int lane = 0; lane < RL_BLOCK_ROWS; lane++) {
        int64_t row = block * RL_BLOCK_ROWS + lane;
        if (row >= job->out_features)
            break;
        for (int64_t group = 0; group < job->num_groups; group += together) {
            float padded[MOST_TOGETHER * RL_GROUP];
            const float *w = job->weights + row * job->in_features + group * RL_GROUP;
            int64_t groups = job->num_groups - group < together ? job->num_groups - group : together;
            int64_t count = groups * RL_GROUP, left = job->in_features - group * RL_GROUP;
            if (left < count) { /* a short last group repeats its last weight, which moves no extreme */
                for (int64_t i = 0; i < count; i++)
                    padded[i] = w[i < left ? i : left - 1];
                w = padded;
            }
            int is_good = job->kind == RL_INT8
                              ? pack_int8_group(w, lane, packed + group * RL_INT8_GROUP_BYTES,
                                                packed + job->num_groups * RL_INT8_GROUP_BYTES + group * RL_BLOCK_ROWS * 2)
                              : pack_int4_groups(w, (int)count, job->search, lane, packed + rl_header_at(job->kind, group));
            if (!is_good)
                atomic_store(&job->has_bad, 1);
        }
    }
}

/* Bytes of a packed matrix. */
RL_API int64_t rl_packed_bytes(int64_t kind, int64_t out_features, int64_t in_features) {
    if (kind == RL_DENSE)
        return rl_num_blocks(out_features) * RL_BLOCK_ROWS * in_features * (int64_t)sizeof(float);
    return rl_num_blocks(out_features) * rl_block_bytes(kind, rl_num_groups(in_features));
}

/* Quantize and pack weights [out, in]. search: look for grids of fewer than 16 points (see quantize.py). -1 when a weight is not a finite
 * number. */
RL_API int64_t rl_pack(int64_t kind, const float *weights, int64_t out_features, int64_t in_features, int64_t search,
                       uint8_t *packed) {
    if (kind == RL_DENSE)
        return rl_dense_pack(weights, out_features, in_features, (float *)packed);
    int64_t num_groups = rl_num_groups(in_features);
    pack_job job = {weights, kind, out_features, in_features, num_groups, rl_block_bytes(kind, num_groups), (int)search,
                    packed, 0};
    rl_pool_run(pack_piece, &job, rl_num_blocks(out_features));
    return atomic_load(&job.has_bad) ? -1 : 0;
}

/* Scale and minimum of each half of a group in lane ``lane`` of its block, with the arithmetic of GGUF's own decoders. */
AVX2 static void scales_of(int64_t kind, const uint8_t *block, int lane, int64_t num_groups, int64_t group, float *scale,
                           float *minimum) {
    const uint8_t *header = kind == RL_INT8
                                ? block + num_groups * RL_INT8_GROUP_BYTES + group * RL_BLOCK_ROWS * 2
                                : block + rl_header_at(kind, group);
    const uint8_t *factors = header + 64 + 32 * (group % rl_header_groups(kind)) + lane;
    uint16_t halves[2] = {0, 0};
    memcpy(&halves[0], header + 2 * lane, 2);
    if (kind != RL_INT8 && kind != RL_Q6_K)
        memcpy(&halves[1], header + 32 + 2 * lane, 2);
    scale[0] = scale[1] = float_from_half(halves[0]), *minimum = float_from_half(halves[1]);
    if (kind == RL_Q6_K) {
        scale[0] *= (float)(int8_t)factors[0];
        scale[1] *= (float)(int8_t)factors[16];
    } else if (kind == RL_Q4_K || kind == RL_Q5_K) {
        scale[0] = scale[1] *= (float)factors[0];
        *minimum = -(*minimum * (float)factors[16]);
    }
}

AVX2 static float value_at(int64_t kind, const uint8_t *values, int lane, int i) {
    if (kind == RL_INT8)
        return (float)(int8_t)values[64 * (i / 4) + 4 * lane + i % 4];
    const int half = i / 16, line = i % 16 / 4, at = 4 * lane + i % 4;
    int value = values[64 * line + at] >> 4 * half & 15;
    if (rl_bits(kind) == 5)
        value |= (values[256 + at] >> (4 * half + line) & 1) << 4;
    if (rl_bits(kind) == 6)
        value = (value | (values[256 + 64 * half + at] >> 2 * line & 3) << 4) - 32;
    return (float)value;
}

AVX2 static void unpack_row(int64_t kind, const uint8_t *block, int lane, int64_t in_features, float *out) {
    int64_t num_groups = rl_num_groups(in_features);
    for (int64_t group = 0; group < num_groups; group++) {
        int64_t left = in_features - group * RL_GROUP, count = left < RL_GROUP ? left : RL_GROUP;
        const uint8_t *values = block + rl_values_at(kind, group);
        float scale[2], minimum;
        scales_of(kind, block, lane, num_groups, group, scale, &minimum);
        for (int i = 0; i < count; i++)
            out[group * RL_GROUP + i] = value_at(kind, values, lane, i) * scale[i / 16] + minimum;
    }
}

typedef struct {
    const uint8_t *packed;
    const int64_t *ids;
    int64_t kind, in_features, block_bytes;
    float *out;
} rows_job;

static void rows_piece(void *arg, int64_t index) {
    rows_job *job = arg;
    int64_t row = job->ids ? job->ids[index] : index;
    const uint8_t *block = job->packed + row / RL_BLOCK_ROWS * job->block_bytes;
    unpack_row(job->kind, block, (int)(row % RL_BLOCK_ROWS), job->in_features, job->out + index * job->in_features);
}

/* Weights of rows ids [num_rows] (NULL: the first num_rows) to out [num_rows, in]. The ids must be rows of the matrix. */
RL_API int64_t rl_rows(int64_t kind, const uint8_t *packed, int64_t in_features, const int64_t *ids, int64_t num_rows,
                       float *out) {
    if (kind == RL_DENSE)
        return rl_dense_rows((const float *)packed, in_features, ids, num_rows, out);
    rows_job job = {packed, ids, kind, in_features, rl_block_bytes(kind, rl_num_groups(in_features)), out};
    rl_pool_run(rows_piece, &job, num_rows);
    return 0;
}
