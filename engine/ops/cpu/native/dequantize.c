/* GGUF's common block formats to fp32, with the arithmetic (and so the bits) of the gguf package's Python decoders. */
#include "rl.h"

#include <immintrin.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))

/* The numbers that GGUF files use. */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

AVX2 static inline float half_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return _cvtsh_ss(half);
}

/* Blocks of 32: fp16 scale, and for Q4_1 fp16 minimum; low halves first. */
AVX2 static void q4_block(const uint8_t *block, int has_minimum, float *out) {
    float scale = half_at(block), minimum = has_minimum ? half_at(block + 2) : 0.0f;
    const uint8_t *q = block + (has_minimum ? 4 : 2);
    int zero = has_minimum ? 0 : 8;
    for (int i = 0; i < 16; i++)
        out[i] = scale * (float)((q[i] & 15) - zero) + minimum;
    for (int i = 0; i < 16; i++)
        out[16 + i] = scale * (float)((q[i] >> 4) - zero) + minimum;
}

/* The same with a fifth bit each, in four bytes before the halves. */
AVX2 static void q5_block(const uint8_t *block, int has_minimum, float *out) {
    float scale = half_at(block), minimum = has_minimum ? half_at(block + 2) : 0.0f;
    const uint8_t *high = block + (has_minimum ? 4 : 2), *q = high + 4;
    int zero = has_minimum ? 0 : 16;
    for (int i = 0; i < 32; i++) {
        int value = (i < 16 ? q[i] & 15 : q[i - 16] >> 4) | (high[i / 8] >> i % 8 & 1) << 4;
        out[i] = scale * (float)(value - zero) + minimum;
    }
}

AVX2 static void q8_block(const uint8_t *block, float *out) {
    float scale = half_at(block);
    for (int i = 0; i < 32; i++)
        out[i] = scale * (float)(int8_t)block[2 + i];
}

/* The 6-bit scale and minimum of sub-block ``i`` of a K block. */
static void k_scale(const uint8_t *packed, int i, int *scale, int *minimum) {
    if (i < 4) {
        *scale = packed[i] & 63;
        *minimum = packed[i + 4] & 63;
    } else {
        *scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6 << 4);
        *minimum = (packed[i + 4] >> 4) | (packed[i] >> 6 << 4);
    }
}

/* Blocks of 256: fp16 scale and minimum of the block, eight 6-bit pairs, (Q5_K: a high bit each,) halves of bytes. */
AVX2 static void q45_k_block(const uint8_t *block, int has_high_bits, float *out) {
    float d = half_at(block), dmin = half_at(block + 2);
    const uint8_t *scales = block + 4, *high = block + 16, *low = block + (has_high_bits ? 48 : 16);
    for (int i = 0; i < 8; i++) {
        int scale, minimum;
        k_scale(scales, i, &scale, &minimum);
        float step = d * (float)scale, least = dmin * (float)minimum;
        const uint8_t *q = low + i / 2 * 32;
        int shift = i % 2 * 4;
        for (int j = 0; j < 32; j++) {
            int value = q[j] >> shift & 15;
            if (has_high_bits)
                value |= (high[j] >> i & 1) << 4;
            out[32 * i + j] = step * (float)value - least;
        }
    }
}

/* Blocks of 256: low 4 bits, high 2 bits, an int8 scale per 16, fp16 scale of the block. */
AVX2 static void q6_k_block(const uint8_t *block, float *out) {
    const uint8_t *low = block, *high = block + 128;
    const int8_t *scales = (const int8_t *)block + 192;
    float d = half_at(block + 208);
    for (int half = 0; half < 2; half++, low += 64, high += 32)
        for (int quarter = 0; quarter < 4; quarter++) {
            float *to = out + 128 * half + 32 * quarter;
            const uint8_t *q = low + quarter % 2 * 32;
            for (int part = 0; part < 2; part++) {
                float step = d * (float)scales[8 * half + 2 * quarter + part];
                for (int j = 16 * part; j < 16 * part + 16; j++) {
                    int value = (q[j] >> (quarter / 2 * 4) & 15) | (high[j] >> (2 * quarter) & 3) << 4;
                    to[j] = step * (float)(value - 32);
                }
            }
        }
}

/* Weights of ``num_blocks`` blocks of ``type`` to out. -1 for a type that is not known here. */
AVX2 RL_API int64_t rl_dequantize(int64_t type, const uint8_t *blocks, int64_t num_blocks, float *out) {
    for (int64_t i = 0; i < num_blocks; i++) {
        switch (type) {
        case Q4_0: q4_block(blocks + i * 18, 0, out + i * 32); break;
        case Q4_1: q4_block(blocks + i * 20, 1, out + i * 32); break;
        case Q5_0: q5_block(blocks + i * 22, 0, out + i * 32); break;
        case Q5_1: q5_block(blocks + i * 24, 1, out + i * 32); break;
        case Q8_0: q8_block(blocks + i * 34, out + i * 32); break;
        case Q4_K: q45_k_block(blocks + i * 144, 0, out + i * 256); break;
        case Q5_K: q45_k_block(blocks + i * 176, 1, out + i * 256); break;
        case Q6_K: q6_k_block(blocks + i * 210, out + i * 256); break;
        default: return -1;
        }
    }
    return 0;
}
