/* Integer products: quantize the activations, hand tiles to the pool. */
#include "linear.h"
#include "dense.h"

#include <stdatomic.h>
#include <stdlib.h>

#define PIECE_BYTES (24 << 10)    /* of weights: a thread that is done waits no longer for another than one takes */
#define PIECES_PER_THREAD 12
#define TILE_BYTES (24 << 10)     /* of activations that stay in the first cache while blocks of weights pass */
#define ROWS_QUANTIZED_ALONE 4    /* so few are not worth waking threads for */
#define MOST_ROWS 512             /* at a time, so that a long prompt needs no more room than a short one */

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
    int64_t in_features, stride; /* bytes from one row's activations to the next one's */
    uint8_t *rows;
    void (*quantize)(const float *, int64_t, uint8_t *);
} quantize_job;

static void quantize_piece(void *arg, int64_t row) {
    quantize_job *job = arg;
    job->quantize(job->x + row * job->in_features, job->in_features, job->rows + row * job->stride);
}

/* Blocks are dealt out in pieces and counted through all parts of the matrix. */
typedef struct {
    rl_product parts[RL_MOST_PARTS];
    int64_t num_parts, num_blocks, blocks_per_piece, rows_per_tile;
    const float *limits; /* of RL_LIKELY, by row */
    void (*tile)(const rl_product *, int64_t, int64_t, int64_t, int64_t);
} product_job;

static int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

/* Work on some blocks of a part. */
typedef void (*blocks_fn)(const product_job *job, const rl_product *part, int64_t first, int64_t last);

static void multiply_blocks(const product_job *job, const rl_product *part, int64_t first, int64_t last) {
    for (int64_t row = 0; row < part->num_rows; row += job->rows_per_tile) {
        int64_t end = clamp(row + job->rows_per_tile, row, part->num_rows);
        job->tile(part, first, last, row, end);
    }
}

static void multiply_likely_blocks(const product_job *job, const rl_product *part, int64_t first, int64_t last) {
    RL_PICK(rl_product_likely)(part, first, last, job->limits);
}

static void each_block(const product_job *job, int64_t piece, blocks_fn fn) {
    int64_t first = piece * job->blocks_per_piece, start = 0;
    int64_t last = clamp(first + job->blocks_per_piece, first, job->num_blocks);
    for (int64_t i = 0; i < job->num_parts; i++) {
        int64_t blocks = rl_num_blocks(job->parts[i].out_features);
        int64_t from = clamp(first - start, 0, blocks), to = clamp(last - start, 0, blocks);
        if (from < to)
            fn(job, &job->parts[i], from, to);
        start += blocks;
    }
}

static void product_piece(void *job, int64_t piece) { each_block(job, piece, multiply_blocks); }
static void likely_piece(void *job, int64_t piece) { each_block(job, piece, multiply_likely_blocks); }

/* Choose the size of the pieces; their number. */
static int64_t deal_blocks(product_job *job, int64_t block_bytes) {
    int64_t fair = clamp(job->num_blocks / (rl_pool_threads() * PIECES_PER_THREAD), 1, job->num_blocks);
    job->blocks_per_piece = clamp(PIECE_BYTES / block_bytes, 1, fair);
    return (job->num_blocks + job->blocks_per_piece - 1) / job->blocks_per_piece;
}

/* Fill in ``job``'s parts, each a product of its own rows of weights; how many pieces of work they make. */
static int64_t cut(product_job *job, const rl_product *whole, const rl_parts *parts) {
    int64_t most_bytes = 0;
    job->num_parts = parts->count;
    for (int64_t i = 0; i < parts->count; i++) {
        rl_product *part = &job->parts[i];
        *part = *whole;
        part->kind = parts->part[i].kind;
        part->out_features = parts->part[i].out_features;
        part->weights = parts->part[i].weights;
        part->block_bytes = rl_block_bytes(part->kind, part->num_groups);
        most_bytes = part->block_bytes > most_bytes ? part->block_bytes : most_bytes;
        job->num_blocks += rl_num_blocks(part->out_features);
    }
    return deal_blocks(job, most_bytes);
}

/* Let the job multiply these rows of activations into ``out``. */
static void turn_to(product_job *job, const uint8_t *rows, int64_t num_rows, const float *bias, const float *residual,
                    float *out) {
    int64_t column = 0;
    for (int64_t i = 0; i < job->num_parts; i++) {
        rl_product *part = &job->parts[i];
        part->rows = rows;
        part->num_rows = num_rows;
        part->bias = bias ? bias + column : NULL;
        part->residual = residual ? residual + column : NULL;
        part->out = out + column;
        column += part->out_features;
    }
}

static void quantize(const float *x, int64_t num_rows, int64_t in_features, int64_t halves, uint8_t *rows) {
    int64_t stride = rl_activation_row_bytes(rl_num_groups(in_features)) * (halves ? 2 : 1);
    quantize_job job = {x, in_features, stride, rows, halves ? RL_PICK(rl_quantize_row_twice) : RL_PICK(rl_quantize_row)};
    if (num_rows > ROWS_QUANTIZED_ALONE) {
        rl_pool_run(quantize_piece, &job, num_rows);
        return;
    }
    for (int64_t row = 0; row < num_rows; row++)
        quantize_piece(&job, row);
}

/* -- likely tokens ------------------------------------------------------------------------------------------------------ */

#define STRETCHES 8 /* of a row of logits, whose maxima are looked for apart */

typedef struct {
    const float *logits;
    int64_t size;
    float *maxima; /* [rows, STRETCHES] */
} maxima_job;

static void maximum_piece(void *arg, int64_t piece) {
    maxima_job *job = arg;
    int64_t row = piece / STRETCHES, stretch = piece % STRETCHES;
    int64_t first = job->size * stretch / STRETCHES, last = job->size * (stretch + 1) / STRETCHES;
    job->maxima[piece] = RL_PICK(rl_largest)(job->logits + row * job->size + first, last - first);
}

/* Add what rounding to 8 bits left over where ``out``, the product of what it kept, is likely. job: its rows are the remainders. */
static void add_remainders(product_job *job, int64_t num_pieces, int64_t num_rows, int64_t out_features, float *out,
                           float *limits) {
    maxima_job maxima = {out, out_features, limits};
    rl_pool_run(maximum_piece, &maxima, num_rows * STRETCHES);
    for (int64_t row = 0; row < num_rows; row++)
        limits[row] = RL_PICK(rl_largest)(limits + row * STRETCHES, STRETCHES) - RL_LIKELY_NATS;
    job->limits = limits;
    rl_pool_run(likely_piece, job, num_pieces);
}

/* -- the entry ---------------------------------------------------------------------------------------------------------- */

/* out [num_rows, out] = x [num_rows, in] @ weights.T (+ bias) (+ residual, which may be out). -1 without memory. */
RL_API int64_t rl_linear(int64_t kind, const uint8_t *weights, int64_t out_features, int64_t in_features, const float *x,
                         int64_t num_rows, const float *bias, const float *residual, float *out) {
    if (kind == RL_DENSE)
        return rl_dense_linear((const float *)weights, out_features, in_features, x, num_rows, bias, residual, out);
    int64_t num_groups = rl_num_groups(in_features), row_bytes = rl_activation_row_bytes(num_groups);
    int64_t halves = (kind & RL_PRECISE) != 0, likely = (kind & RL_LIKELY) != 0, most = clamp(num_rows, 0, MOST_ROWS);
    kind &= ~(RL_PRECISE | RL_LIKELY);
    int64_t quantized_bytes = row_bytes * most * (1 + (halves | likely));
    int is_kept;
    uint8_t *rows = take_scratch((size_t)(quantized_bytes + most * STRETCHES * (int64_t)sizeof(float)), &is_kept);
    if (!rows)
        return -1;
    int64_t used = num_groups * (RL_GROUP + 8); /* of an activation row, by most products */
    rl_product whole = {.in_features = in_features, .num_groups = num_groups, .row_bytes = row_bytes * (1 + likely),
                        .halves = halves, .out_stride = out_features};
    rl_parts one = {1, {{kind, out_features, weights}}};
    const rl_parts *parts = kind == RL_PARTS ? (const rl_parts *)(const void *)weights : &one;
    product_job job = {.rows_per_tile = clamp(TILE_BYTES / used / 8, 1, 1 << 20) * 8, .tile = RL_PICK(rl_product_tile)};
    int64_t num_pieces = cut(&job, &whole, parts);
    for (int64_t first = 0; first < num_rows; first += most) {
        int64_t count = clamp(num_rows - first, 0, most);
        const float *its_residual = residual ? residual + first * out_features : NULL;
        float *its_out = out + first * out_features;
        quantize(x + first * in_features, count, in_features, halves | likely, rows);
        turn_to(&job, rows, count * (1 + halves), bias, its_residual, its_out);
        rl_pool_run(product_piece, &job, num_pieces);
        if (!likely)
            continue;
        turn_to(&job, rows + row_bytes, count, NULL, its_out, its_out);
        add_remainders(&job, num_pieces, count, out_features, its_out, (float *)(rows + quantized_bytes));
    }
    give_scratch(rows, is_kept);
    return 0;
}
