/* Products with fp32 weights.
 *
 * Packed weights are blocks of 16 output rows, one input of all 16 after the other: [blocks][in][16], the last block padded with zeros.
 * Every output adds up its inputs in order, a segment of RL_SEGMENT at a time: a row's result is the same alone and in a batch.
 */
#ifndef RL_DENSE_H
#define RL_DENSE_H

#include "linear.h"

#define RL_SEGMENT 64

/* As rl_linear, rl_pack and rl_rows of the other kinds. */
int64_t rl_dense_linear(const float *weights, int64_t out_features, int64_t in_features, const float *x, int64_t num_rows,
                        const float *bias, const float *residual, float *out);
int64_t rl_dense_pack(const float *weights, int64_t out_features, int64_t in_features, float *packed);
int64_t rl_dense_rows(const float *packed, int64_t in_features, const int64_t *ids, int64_t num_rows, float *out);

typedef struct {
    int64_t out_features, in_features;
    const float *weights; /* packed */
    const float *x;       /* [num_rows, in] */
    int64_t num_rows;
    const float *bias;     /* [out] or NULL */
    const float *residual; /* [num_rows, out] or NULL; may be out itself */
    float *out;            /* [num_rows, out] */
} rl_dense_product;

/* Output blocks [first, last) of rows [row, end). */
RL_DECLARE(void, rl_dense_tile, const rl_dense_product *product, int64_t first, int64_t last, int64_t row, int64_t end);

#endif
