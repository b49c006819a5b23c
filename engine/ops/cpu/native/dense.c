/* Products with fp32 weights: lay them out, hand tiles to the pool. */
#include "dense.h"

#include <stdatomic.h>
#include <string.h>

#define PIECE_BYTES (64 << 10)  /* of weights */
#define PIECES_PER_THREAD 6
#define TILE_BYTES (256 << 10)  /* of activations that stay in the second cache while a piece of the weights passes */

static int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

typedef struct {
    rl_dense_product product;
    int64_t num_blocks, blocks_per_piece, rows_per_tile;
    void (*tile)(const rl_dense_product *, int64_t, int64_t, int64_t, int64_t);
} dense_job;

static void dense_piece(void *arg, int64_t piece) {
    dense_job *job = arg;
    int64_t first = piece * job->blocks_per_piece, last = clamp(first + job->blocks_per_piece, first, job->num_blocks);
    for (int64_t row = 0; row < job->product.num_rows; row += job->rows_per_tile)
        job->tile(&job->product, first, last, row, clamp(row + job->rows_per_tile, row, job->product.num_rows));
}

int64_t rl_dense_linear(const float *weights, int64_t out_features, int64_t in_features, const float *x, int64_t num_rows,
                        const float *bias, const float *residual, float *out) {
    int64_t num_blocks = rl_num_blocks(out_features), block_bytes = in_features * RL_BLOCK_ROWS * (int64_t)sizeof(float);
    int64_t fair = clamp(num_blocks / (rl_pool_threads() * PIECES_PER_THREAD), 1, num_blocks);
    int64_t wanted = clamp(PIECE_BYTES / block_bytes, 1, fair);
    dense_job job = {
        .product = {out_features, in_features, weights, x, num_rows, bias, residual, out},
        .num_blocks = num_blocks,
        .blocks_per_piece = wanted + wanted % 2, /* many rows take two blocks at a time */
        .rows_per_tile = clamp(TILE_BYTES / (in_features * (int64_t)sizeof(float)) / 8, 1, 1 << 20) * 8,
        .tile = RL_PICK(rl_dense_tile),
    };
    rl_pool_run(dense_piece, &job, (num_blocks + job.blocks_per_piece - 1) / job.blocks_per_piece);
    return 0;
}

typedef struct {
    const float *weights;
    int64_t out_features, in_features;
    float *packed;
    atomic_int has_bad;
} pack_job;

static void pack_piece(void *arg, int64_t block) {
    pack_job *job = arg;
    int64_t n = job->in_features, first = block * RL_BLOCK_ROWS;
    float *packed = job->packed + first * n, total = 0.0f;
    for (int64_t lane = 0; lane < RL_BLOCK_ROWS; lane++) {
        const float *row = job->weights + (first + lane) * n;
        for (int64_t i = 0; i < n; i++) {
            float weight = first + lane < job->out_features ? row[i] : 0.0f;
            packed[i * RL_BLOCK_ROWS + lane] = weight;
            total += weight - weight; /* NaN from the first weight on that is no finite number */
        }
    }
    if (total != 0.0f)
        atomic_store(&job->has_bad, 1);
}

int64_t rl_dense_pack(const float *weights, int64_t out_features, int64_t in_features, float *packed) {
    pack_job job = {weights, out_features, in_features, packed, 0};
    rl_pool_run(pack_piece, &job, rl_num_blocks(out_features));
    return atomic_load(&job.has_bad) ? -1 : 0;
}

typedef struct {
    const float *packed;
    const int64_t *ids;
    int64_t in_features;
    float *out;
} rows_job;

static void rows_piece(void *arg, int64_t index) {
    rows_job *job = arg;
    int64_t row = job->ids ? job->ids[index] : index, n = job->in_features;
    const float *from = job->packed + row / RL_BLOCK_ROWS * RL_BLOCK_ROWS * n + row % RL_BLOCK_ROWS;
    for (int64_t i = 0; i < n; i++)
        job->out[index * n + i] = from[i * RL_BLOCK_ROWS];
}

int64_t rl_dense_rows(const float *packed, int64_t in_features, const int64_t *ids, int64_t num_rows, float *out) {
    rows_job job = {packed, ids, in_features, out};
    rl_pool_run(rows_piece, &job, num_rows);
    return 0;
}
