/* The inner loops of the products with fp32 weights, compiled once per instruction set. */
#include "dense.h"
#include "vector.h"

#define UNROLL _Pragma("GCC unroll 16")
#define VECTORS (RL_BLOCK_ROWS / RL_WIDTH) /* that hold a block's outputs */
#ifdef __AVX512F__
#define MOST_ROWS 8  /* times two blocks: 16 sums and 2 weights of 32 registers */
#define MOST_BLOCKS 2
#else
#define MOST_ROWS 4  /* 8 sums and 2 weights of 16 registers */
#define MOST_BLOCKS 1
#endif

RL_INLINE void finish(const rl_dense_product *p, vf sum, int64_t row, int64_t column) {
    int64_t left = p->out_features - column;
    int n = left < RL_WIDTH ? (int)left : RL_WIDTH;
    if (n <= 0)
        return;
    if (p->bias)
        sum = vf_add(sum, vf_load_n(p->bias + column, n));
    int64_t at = row * p->out_features + column;
    if (p->residual)
        sum = vf_add(sum, vf_load_n(p->residual + at, n));
    vf_store_n(p->out + at, n, sum);
}

/* R rows times B blocks from ``block`` on. */
RL_INLINE void multiply(const int R, const int B, const rl_dense_product *p, int64_t block, int64_t row) {
    const int64_t n = p->in_features;
    const float *x = p->x + row * n, *weights = p->weights + block * RL_BLOCK_ROWS * n;
    vf total[MOST_ROWS][MOST_BLOCKS * VECTORS];
    for (int64_t start = 0; start == 0 || start < n; start += RL_SEGMENT) {
        int64_t end = n - start < RL_SEGMENT ? n : start + RL_SEGMENT;
        vf sum[MOST_ROWS][MOST_BLOCKS * VECTORS];
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int v = 0; v < B * VECTORS; v++) sum[r][v] = vf_zero();
        }
        for (int64_t i = start; i < end; i++) {
            vf w[MOST_BLOCKS * VECTORS];
            UNROLL for (int v = 0; v < B * VECTORS; v++)
                w[v] = vf_load(weights + v / VECTORS * RL_BLOCK_ROWS * n + i * RL_BLOCK_ROWS + v % VECTORS * RL_WIDTH);
            UNROLL for (int r = 0; r < R; r++) {
                vf input = vf_set1(x[r * n + i]);
                UNROLL for (int v = 0; v < B * VECTORS; v++) sum[r][v] = vf_fma(w[v], input, sum[r][v]);
            }
        }
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int v = 0; v < B * VECTORS; v++)
                total[r][v] = start == 0 ? sum[r][v] : vf_add(total[r][v], sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < B * VECTORS; v++) finish(p, total[r][v], row + r, block * RL_BLOCK_ROWS + v * RL_WIDTH);
    }
}

typedef void (*multiply_fn)(const rl_dense_product *, int64_t block, int64_t row);

#define ROWS(R, B)                                                                                                     \
    static void multiply_##R##_##B(const rl_dense_product *p, int64_t block, int64_t row) { multiply(R, B, p, block, row); }
ROWS(1, 1)
ROWS(2, 1)
ROWS(3, 1)
ROWS(4, 1)
/* [n - 1]: n rows and one block */
static const multiply_fn few[] = {multiply_1_1, multiply_2_1, multiply_3_1, multiply_4_1};
#if MOST_BLOCKS == 2
ROWS(8, 1)
ROWS(8, 2)
static const multiply_fn most[] = {multiply_8_1, multiply_8_2}; /* [b - 1]: MOST_ROWS rows and b blocks */
#else
static const multiply_fn most[] = {multiply_4_1};
#endif

void RL_FN(rl_dense_tile)(const rl_dense_product *p, int64_t first, int64_t last, int64_t row, int64_t end) {
    int64_t whole = row + (end - row) / MOST_ROWS * MOST_ROWS;
    for (int64_t block = first, count; block < last; block += count) {
        count = last - block < MOST_BLOCKS ? last - block : MOST_BLOCKS;
        for (int64_t r = row; r < whole; r += MOST_ROWS)
            most[count - 1](p, block, r);
        for (int64_t b = block; b < block + count; b++)
            for (int64_t r = whole, rows; r < end; r += rows) {
                rows = end - r < 4 ? end - r : 4;
                few[rows - 1](p, b, r);
            }
    }
}
