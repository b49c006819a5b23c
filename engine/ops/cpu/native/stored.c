/* GGUF's blocks into the layout of linear.h: the stored values and scales, in another order. Nothing is rounded. */
#include "linear.h"

#include <stdatomic.h>
#include <string.h>

/* The numbers that GGUF files use. */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

typedef struct {
    int64_t type, kind, num_groups, block_bytes, row_bytes, num_rows, first_row;
    const uint8_t *stored;
    uint8_t *packed;
    atomic_int has_bad;
} repack_job;

/* Where one group of one row goes. */
typedef struct {
    int64_t kind;
    int lane;
    uint8_t *header, *values;
} target;

/* Bytes of a stored row of ``num_groups`` groups; 0 for a type that is not kept. */
static int64_t stored_row_bytes(int64_t type, int64_t num_groups) {
    switch (type) {
    case Q4_0: return num_groups * 18;
    case Q4_1: return num_groups * 20;
    case Q5_0: return num_groups * 22;
    case Q5_1: return num_groups * 24;
    case Q8_0: return num_groups * 34;
    case Q4_K: return num_groups / 8 * 144;
    case Q5_K: return num_groups / 8 * 176;
    case Q6_K: return num_groups / 8 * 210;
    default: return 0;
    }
}

static int64_t kind_of(int64_t type) {
    switch (type) {
    case Q4_0:
    case Q4_1: return RL_INT4;
    case Q5_0:
    case Q5_1: return RL_INT5;
    default: return type; /* Q8_0 and the K types have the same numbers */
    }
}

static int is_finite_half(const uint8_t *half) { return (half[1] & 0x7c) != 0x7c; }

static void put_half(uint8_t *halves, int lane, const uint8_t *half) { memcpy(halves + 2 * lane, half, 2); }

/* -2^steps times a half; what overflows becomes infinite. */
static void put_negative_half(uint8_t *halves, int lane, const uint8_t *half, int steps) {
    uint16_t bits;
    memcpy(&bits, half, 2);
    uint16_t sign = (uint16_t)(~bits & 0x8000), exponent = bits >> 10 & 31, rest = bits & 0x3ff;
    if (!exponent) { /* zero or subnormal: the whole number is shifted until it has an exponent */
        uint32_t number = (uint32_t)rest << steps;
        while (number >= 0x800) {
            exponent++;
            number >>= 1; /* exact: at least as many zeros were shifted in */
        }
        bits = (uint16_t)(sign | ((exponent << 10) + number));
    } else {
        exponent = (uint16_t)(exponent + steps);
        bits = (uint16_t)(exponent >= 31 ? sign | 0x7c00 : sign | exponent << 10 | rest);
    }
    put_half(halves, lane, (const uint8_t *)&bits);
}

/* The group's values: 4 to 6 bits without sign, or 8 with. */
static void put_values(const target *to, const uint8_t *q) {
    uint8_t *at = to->values + 4 * to->lane;
    const int bits = rl_bits(to->kind);
    if (bits == 8) {
        for (int i = 0; i < RL_GROUP; i++)
            at[64 * (i / 4) + i % 4] = q[i];
        return;
    }
    for (int i = 0; i < 16; i++)
        at[64 * (i / 4) + i % 4] = (uint8_t)((q[i] & 15) | q[16 + i] << 4);
    for (int i = 0; i < 16 && bits > 4; i++) {
        uint8_t *upper = at + 256 + i % 4;
        if (bits == 5) {
            *upper = (uint8_t)(*upper | (q[i] >> 4) << (i / 4) | (q[16 + i] >> 4) << (4 + i / 4));
        } else {
            *upper = (uint8_t)(*upper | (q[i] >> 4) << (2 * (i / 4)));
            upper[64] = (uint8_t)(upper[64] | (q[16 + i] >> 4) << (2 * (i / 4)));
        }
    }
}

static void nibbles(const uint8_t *bytes, uint8_t *q) {
    for (int i = 0; i < 16; i++) {
        q[i] = bytes[i] & 15;
        q[16 + i] = bytes[i] >> 4;
    }
}

/* Blocks of 32. 0 when a scale is not a finite number. */
static int small_group(const target *to, int64_t type, const uint8_t *block) {
    const int has_minimum = type == Q4_1 || type == Q5_1, has_fifth = type == Q5_0 || type == Q5_1;
    if (!is_finite_half(block) || (has_minimum && !is_finite_half(block + 2)))
        return 0;
    put_half(to->header, to->lane, block);
    if (type == Q8_0) {
        put_values(to, block + 2);
        return 1;
    }
    uint8_t q[RL_GROUP], *minimums = to->header + 32;
    if (has_minimum)
        put_half(minimums, to->lane, block + 2);
    else /* 8 or 16 in the middle */
        put_negative_half(minimums, to->lane, block, has_fifth ? 4 : 3);
    const uint8_t *rest = block + (has_minimum ? 4 : 2);
    nibbles(rest + (has_fifth ? 4 : 0), q);
    for (int i = 0; i < RL_GROUP && has_fifth; i++)
        q[i] = (uint8_t)(q[i] | (rest[i / 8] >> i % 8 & 1) << 4);
    put_values(to, q);
    return is_finite_half(minimums + 2 * to->lane);
}

/* Sub-block ``i`` of a Q4_K or Q5_K block. */
static int k_group(const target *to, int64_t type, const uint8_t *block, int i) {
    if (!is_finite_half(block) || !is_finite_half(block + 2))
        return 0;
    put_half(to->header, to->lane, block);
    put_half(to->header + 32, to->lane, block + 2);
    const uint8_t *packed = block + 4, *high = block + 16, *low = block + (type == Q5_K ? 48 : 16) + i / 2 * 32;
    uint8_t *factors = to->header + 64 + 32 * i + to->lane;
    if (i < 4) { /* six bits each: the upper two of the last four pairs lie above the first ones */
        factors[0] = packed[i] & 63;
        factors[16] = packed[i + 4] & 63;
    } else {
        factors[0] = (uint8_t)((packed[i + 4] & 15) | packed[i - 4] >> 6 << 4);
        factors[16] = (uint8_t)(packed[i + 4] >> 4 | packed[i] >> 6 << 4);
    }
    uint8_t q[RL_GROUP];
    for (int j = 0; j < RL_GROUP; j++) {
        q[j] = low[j] >> i % 2 * 4 & 15;
        if (type == Q5_K)
            q[j] = (uint8_t)(q[j] | (high[j] >> i & 1) << 4);
    }
    put_values(to, q);
    return 1;
}

/* Group ``i`` of a Q6_K block: two sub-blocks of 16. */
static int q6_k_group(const target *to, const uint8_t *block, int i) {
    if (!is_finite_half(block + 208))
        return 0;
    const int half = i / 4, quarter = i % 4;
    const uint8_t *low = block + 64 * half + quarter % 2 * 32, *high = block + 128 + 32 * half, *scales = block + 192 + 2 * i;
    put_half(to->header, to->lane, block + 208);
    uint8_t *factors = to->header + 64 + 32 * i + to->lane, q[RL_GROUP];
    factors[0] = scales[0];
    factors[16] = scales[1];
    for (int j = 0; j < RL_GROUP; j++)
        q[j] = (uint8_t)((low[j] >> quarter / 2 * 4 & 15) | (high[j] >> 2 * quarter & 3) << 4);
    put_values(to, q);
    return 1;
}

static int put_group(const repack_job *job, int64_t row, int64_t group) {
    const uint8_t *stored = job->stored + row * job->row_bytes;
    const int64_t place = job->first_row + row;
    uint8_t *block = job->packed + place / RL_BLOCK_ROWS * job->block_bytes;
    target to = {job->kind, (int)(place % RL_BLOCK_ROWS), block + rl_header_at(job->kind, group),
                 block + rl_values_at(job->kind, group)};
    if (job->kind == RL_INT8)
        to.header = block + job->num_groups * RL_INT8_GROUP_BYTES + group * RL_BLOCK_ROWS * 2;
    if (job->kind < RL_Q4_K)
        return small_group(&to, job->type, stored + group * (job->row_bytes / job->num_groups));
    const uint8_t *of_eight = stored + group / 8 * (job->row_bytes / (job->num_groups / 8));
    int i = (int)(group % 8);
    return job->type == Q6_K ? q6_k_group(&to, of_eight, i) : k_group(&to, job->type, of_eight, i);
}

/* The rows of one packed block. */
static void repack_piece(void *arg, int64_t piece) {
    repack_job *job = arg;
    int64_t first = piece * RL_BLOCK_ROWS - job->first_row, last = first + RL_BLOCK_ROWS;
    for (int64_t row = first < 0 ? 0 : first; row < (last < job->num_rows ? last : job->num_rows); row++)
        for (int64_t group = 0; group < job->num_groups; group++)
            if (!put_group(job, row, group))
                atomic_store(&job->has_bad, 1);
}

/* The kind that holds blocks of ``type`` as they are; -1 where there is none. */
RL_API int64_t rl_stored_kind(int64_t type) { return stored_row_bytes(type, 8) ? kind_of(type) : -1; }

/* Rows [num_rows, in] of blocks of ``type`` to the rows from ``first_row`` of a matrix whose packed bytes were zero. in is whole blocks.
 * -1 when a scale is not a finite number, -2 for a type or a width that cannot be kept. */
RL_API int64_t rl_repack(int64_t type, const uint8_t *stored, int64_t num_rows, int64_t in_features, int64_t first_row,
                         uint8_t *packed) {
    int64_t num_groups = in_features / RL_GROUP, row_bytes = stored_row_bytes(type, num_groups), kind = kind_of(type);
    if (in_features % RL_GROUP || !row_bytes || (kind >= RL_Q4_K && num_groups % 8))
        return -2;
    repack_job job = {type,     kind,      num_groups, rl_block_bytes(kind, num_groups), row_bytes,
                      num_rows, first_row, stored,     packed,                           0};
    rl_pool_run(repack_piece, &job, rl_num_blocks(first_row + num_rows));
    return atomic_load(&job.has_bad) ? -1 : 0;
}
