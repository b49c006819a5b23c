/* Integer products: quantize the activations, hand tiles to the pool. */
#include "linear.h"

#include <stdatomic.h>
#include <stdlib.h>

#define PIECE_BYTES (48 << 10)    /* of weights: long enough for the prefetcher, short enough to share evenly */
#define PIECES_PER_THREAD 6
#define TILE_BYTES (24 << 10)     /* of activations that stay in the first cache while blocks of weights pass */
#define ROWS_QUANTIZED_ALONE 4    /* so few are not worth waking threads for */

/* -- scratch: one buffer is kept, since a fresh megabyte would be paged in anew at each call -------------------------- */

static uint8_t *kept;
static size_t kept_bytes;
static atomic_flag kept_in_use = ATOMIC_FLAG_INIT;

static uint8_t *aligned_new(size_t num_bytes) {
#ifdef _WIN32
    return _aligned_malloc(num_bytes, 64);
#else
    return aligned_alloc(64, (num_bytes + 63) / 64 * 64);
#endif
}

static void aligned_free(void *buffer) {
#ifdef _WIN32
    _aligned_free(buffer);
#else
    free(buffer);
#endif
}

static uint8_t *take_scratch(size_t num_bytes, int *is_kept) {
    *is_kept = !atomic_flag_test_and_set(&kept_in_use);
    if (!*is_kept)
        return aligned_new(num_bytes);
    if (kept_bytes < num_bytes) {
        aligned_free(kept);
        kept = aligned_new(num_bytes);
        kept_bytes = kept ? num_bytes : 0;
    }
    if (!kept)
        atomic_flag_clear(&kept_in_use);
    return kept;
}

static void give_scratch(uint8_t *buffer, int is_kept) {
    if (is_kept)
        atomic_flag_clear(&kept_in_use);
    else
        aligned_free(buffer);
}

/* -- pieces ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    const float *x;
    int64_t in_features, row_bytes;
    uint8_t *rows;
    void (*quantize)(const float *, int64_t, uint8_t *);
} quantize_job;

static void quantize_piece(void *arg, int64_t row) {
    quantize_job *job = arg;
    job->quantize(job->x + row * job->in_features, job->in_features, job->rows + row * job->row_bytes);
}

typedef struct {
    rl_product product;
    int64_t num_blocks, blocks_per_piece, rows_per_tile;
    void (*tile)(const rl_product *, int64_t, int64_t, int64_t, int64_t);
} product_job;

static void product_piece(void *arg, int64_t piece) {
    product_job *job = arg;
    int64_t first = piece * job->blocks_per_piece, last = first + job->blocks_per_piece;
    if (last > job->num_blocks)
        last = job->num_blocks;
    for (int64_t row = 0; row < job->product.num_rows; row += job->rows_per_tile) {
        int64_t end = row + job->rows_per_tile;
        job->tile(&job->product, first, last, row, end < job->product.num_rows ? end : job->product.num_rows);
    }
}

static int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

/* out [num_rows, out] = x [num_rows, in] @ weights.T (+ bias) (+ residual, which may be out). -1 without memory. */
RL_API int64_t rl_linear(int64_t kind, const uint8_t *weights, int64_t out_features, int64_t in_features, const float *x,
                         int64_t num_rows, const float *bias, const float *residual, float *out) {
    if (kind & RL_PRECISE)
        return rl_linear_precise(kind & ~RL_PRECISE, weights, out_features, in_features, x, num_rows, bias, residual, out);
    int64_t num_groups = rl_num_groups(in_features), row_bytes = rl_activation_row_bytes(num_groups);
    int is_kept;
    uint8_t *rows = take_scratch((size_t)(row_bytes * num_rows), &is_kept);
    if (!rows)
        return -1;
    quantize_job quantize = {x, in_features, row_bytes, rows, RL_PICK(rl_quantize_row)};
    if (num_rows <= ROWS_QUANTIZED_ALONE)
        for (int64_t row = 0; row < num_rows; row++)
            quantize_piece(&quantize, row);
    else
        rl_pool_run(quantize_piece, &quantize, num_rows);

    int64_t block_bytes = rl_block_bytes(kind, num_groups), num_blocks = rl_num_blocks(out_features);
    int64_t fair = clamp(num_blocks / (rl_pool_threads() * PIECES_PER_THREAD), 1, num_blocks);
    int64_t used = num_groups * (RL_GROUP + 8); /* of an activation row, by most products */
    product_job job = {
        .product = {kind, out_features, in_features, num_groups, block_bytes, weights, rows, row_bytes, num_rows, bias,
                    residual, out},
        .num_blocks = num_blocks,
        .blocks_per_piece = clamp(PIECE_BYTES / block_bytes, 1, fair),
        .rows_per_tile = clamp(TILE_BYTES / used / 8, 1, 1 << 20) * 8,
        .tile = RL_PICK(rl_product_tile),
    };
    rl_pool_run(product_piece, &job, (num_blocks + job.blocks_per_piece - 1) / job.blocks_per_piece);
    give_scratch(rows, is_kept);
    return 0;
}
