/* Integer products: packed weights times activations quantized to int8 in groups of 32.
 *
 * Packed weights are blocks of 16 output rows, a group of 32 inputs after the other, so that one 512-bit register holds four inputs of
 * each of the 16 rows. A group's values are
 *   4 bits   4 lines of 64 bytes (line j, row r, byte b: input 4j+b in the low half, input 16+4j+b in the high half)
 *   5 bits   those of 4 bits, and a line of fifth bits (row r, byte b: bit j of input 4j+b, bit 4+j of input 16+4j+b)
 *   6 bits   those of 4 bits, and two lines of upper bits (row r, byte b: bits 2j, 2j+1 of input 4j+b; of 16+4j+b in the second)
 *   8 bits   8 lines of 64 bytes, signed (line j, row r, byte b: input 4j+b)
 * and every few groups share a header that comes before them, or, for RL_INT8, at the block's end:
 *   RL_INT4, _G64, _G128   per 1, 2 or 4 groups 16 scales and 16 minimums in fp16; weight = value * scale + minimum
 *   RL_INT8                all groups' 16 scales in fp16, the block rounded up to 64 bytes; weight = value * scale
 *   RL_INT5                the header of RL_INT4, 5 bits
 *   RL_Q4_K, RL_Q5_K       per 8 groups 16 scales and 16 minimums in fp16, then per group 16 factors of each in 8 bits;
 *                          weight = value * (scale * factor) - minimum * factor
 *   RL_Q6_K                per 8 groups 16 scales in fp16 and 32 bytes unused, then per group 16 signed factors for its first and 16 for
 *                          its second half; weight = (value - 32) * (scale * factor)
 * They hold GGUF's blocks at their own values: Q4_0 and Q4_1 as RL_INT4, Q5_0 and Q5_1 as RL_INT5, Q8_0 as RL_INT8 (stored.c).
 * Rows are padded to whole blocks and inputs to whole groups, with zeros; the last header may serve fewer groups than the others.
 *
 * One quantized activation row: its int8 values, then per group fp32 scale and fp32 scale * sum of values, then int32 -128 * sum of
 * values, then -32 * the sums of its two halves; then the values again as int16 in the order 0 2 1 3 of each four (products without VNNI read those for int8 weights).
 */
#ifndef RL_LINEAR_H
#define RL_LINEAR_H

#include "rl.h"

#define RL_GROUP 32
#define RL_BLOCK_ROWS 16
#define RL_INT8_GROUP_BYTES 512

/* RL_PRECISE is or-ed to a kind given to rl_linear: activations keep 16 bits. Each row is then multiplied as the sum of two rows of 8
 * bits, its rounded values and what the rounding left over. The weights are read once for both, and the second is nearly free where
 * reading them is the cost.
 *
 * RL_LIKELY, for a head: the first row of 8 bits is multiplied with all weights, the second only with blocks that hold a likely
 * token, one whose logit lies no more than RL_LIKELY_NATS below the row's largest. What a sampler may draw is as precise as with
 * RL_PRECISE, to the bit; the thousands of others keep the error of 8 bits, and cost half. */
enum rl_kind {
    RL_DENSE = 1, /* fp32, see dense.h */
    RL_INT4 = 4,
    RL_INT4_G64 = 5,
    RL_INT4_G128 = 6,
    RL_INT5 = 7,
    RL_INT8 = 8,
    RL_Q4_K = 12,
    RL_Q5_K = 13,
    RL_Q6_K = 14,
    RL_PARTS = 32, /* for rl_linear alone: the weights are an rl_parts */
    RL_PRECISE = 64,
    RL_LIKELY = 128
};

#define RL_LIKELY_NATS 8.0f /* e^-8 of the likeliest token's share: 1 in 3,000 */

#define RL_MOST_PARTS 4

/* A matrix whose rows are packed in stretches of different kinds. */
typedef struct {
    int64_t count;
    struct {
        int64_t kind, out_features;
        const uint8_t *weights;
    } part[RL_MOST_PARTS];
} rl_parts;

typedef struct {
    int64_t kind; /* enum rl_kind */
    int64_t out_features, in_features, num_groups;
    int64_t block_bytes;
    const uint8_t *weights;
    const uint8_t *rows; /* quantized activations */
    int64_t row_bytes;
    int64_t num_rows;      /* of activations */
    int64_t halves;        /* rows 2 i and 2 i + 1 together give row i of the result (RL_PRECISE) */
    const float *bias;     /* [out] or NULL */
    const float *residual; /* [rows of the result, out] or NULL; may be out itself */
    float *out;            /* [rows of the result, out] */
    int64_t out_stride;    /* floats from one row of out, and of the residual, to the next */
} rl_product;

static inline int64_t rl_num_groups(int64_t in_features) { return (in_features + RL_GROUP - 1) / RL_GROUP; }
static inline int64_t rl_num_blocks(int64_t out_features) { return (out_features + RL_BLOCK_ROWS - 1) / RL_BLOCK_ROWS; }

/* Groups that share a header. */
static inline int64_t rl_header_groups(int64_t kind) {
    return kind >= RL_Q4_K ? 8 : kind == RL_INT4_G128 ? 4 : kind == RL_INT4_G64 ? 2 : 1;
}
static inline int rl_bits(int64_t kind) {
    return kind == RL_INT8 ? 8 : kind == RL_Q6_K ? 6 : kind == RL_Q5_K || kind == RL_INT5 ? 5 : 4;
}
/* Bytes of a header before its groups, and of a group's values. */
static inline int64_t rl_header_bytes(int64_t kind) { return kind >= RL_Q4_K ? 64 + 8 * 32 : kind == RL_INT8 ? 0 : 64; }
static inline int64_t rl_group_bytes(int64_t kind) { return 64 * rl_bits(kind); }
/* Where a group's header and its values lie in a block. */
static inline int64_t rl_header_at(int64_t kind, int64_t group) {
    int64_t header = group / rl_header_groups(kind);
    return header * (rl_header_bytes(kind) + rl_header_groups(kind) * rl_group_bytes(kind));
}
static inline int64_t rl_values_at(int64_t kind, int64_t group) {
    int64_t headers = group / rl_header_groups(kind) + 1;
    return headers * rl_header_bytes(kind) + group * rl_group_bytes(kind);
}
static inline int64_t rl_block_bytes(int64_t kind, int64_t num_groups) {
    if (kind == RL_INT8)
        return (num_groups * (RL_INT8_GROUP_BYTES + 2 * RL_BLOCK_ROWS) + 63) / 64 * 64;
    return rl_values_at(kind, num_groups - 1) + rl_group_bytes(kind);
}

/* Offsets in a quantized activation row. */
static inline int64_t rl_scales_at(int64_t num_groups) { return num_groups * RL_GROUP; }
static inline int64_t rl_sums_at(int64_t num_groups) { return num_groups * (RL_GROUP + 4); }
static inline int64_t rl_offsets_at(int64_t num_groups) { return num_groups * (RL_GROUP + 8); }
static inline int64_t rl_halves_at(int64_t num_groups) { return num_groups * (RL_GROUP + 12); }
static inline int64_t rl_wide_at(int64_t num_groups) { return (num_groups * (RL_GROUP + 20) + 63) / 64 * 64; }
static inline int64_t rl_activation_row_bytes(int64_t num_groups) {
    return rl_wide_at(num_groups) + (num_groups * RL_GROUP * 2 + 63) / 64 * 64;
}

/* Quantize x [in_features] to one activation row, or to two behind each other: rounded, and what that left over. */
RL_DECLARE(void, rl_quantize_row, const float *x, int64_t in_features, uint8_t *row);
RL_DECLARE(void, rl_quantize_row_twice, const float *x, int64_t in_features, uint8_t *row);
/* Output blocks [first, last) of rows [row, end). */
RL_DECLARE(void, rl_product_tile, const rl_product *product, int64_t first, int64_t last, int64_t row, int64_t end);
/* The largest of some numbers; -INFINITY of none. */
RL_DECLARE(float, rl_largest, const float *x, int64_t count);
/* The same as rl_product_tile for those of the blocks alone where the row's residual reaches its limit, ``limits`` by row. */
RL_DECLARE(void, rl_product_likely, const rl_product *product, int64_t first, int64_t last, const float *limits);

#endif
