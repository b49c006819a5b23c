/* Odd shapes through attention and the operations between the products, on heap blocks of exactly the right size, for a
 * library built with sanitizers. Prints how many calls it made. */
#include "attention.h"
#include "linear.h"
#include "pointwise.h"
#include "sparse.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int64_t rl_set_isa(int64_t isa);
int64_t rl_set_threads(int64_t num_threads);
int64_t rl_rms_norm(const rl_norm *args);
int64_t rl_rope_and_write_kv(const rl_rope *args);
int64_t rl_gated_activation(const rl_gate *args);
int64_t rl_attention_workspace(const rl_attention *args);
int64_t rl_paged_attention(const rl_attention *args);

int64_t rl_linear(int64_t kind, const uint8_t *weights, int64_t out_features, int64_t in_features, const float *x,
                  int64_t num_rows, const float *bias, const float *residual, float *out);
int64_t rl_packed_bytes(int64_t kind, int64_t out_features, int64_t in_features);
int64_t rl_pack(int64_t kind, const float *weights, int64_t out_features, int64_t in_features, int64_t search, uint8_t *packed);
int64_t rl_rows(int64_t kind, const uint8_t *packed, int64_t in_features, const int64_t *ids, int64_t num_rows, float *out);
int64_t rl_stored_kind(int64_t type);
int64_t rl_repack(int64_t type, const uint8_t *stored, int64_t num_rows, int64_t in_features, int64_t first_row,
                  uint8_t *packed);
int64_t rl_dequantize(int64_t type, const uint8_t *blocks, int64_t num_blocks, float *out);

static int num_calls;

static void must(int64_t code) {
    num_calls++;
    if (code < 0) {
        fprintf(stderr, "call %d refused its arguments\n", num_calls);
        exit(1);
    }
}

static float *floats(int64_t count) {
    float *block = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++)
        block[i] = (float)(i * 7919 % 2003) / 1000.0f - 1.0f;
    return block;
}

static void pointwise(int64_t rows, int64_t size) {
    float *x = floats(rows * size), *weight = floats(size), *out = floats(rows * size);
    rl_norm norm = {x, weight, out, rows, size, 1e-5f};
    must(rl_rms_norm(&norm));
    float *gate_up = floats(rows * 2 * size);
    for (int64_t activation = RL_SILU; activation <= RL_GELU_TANH; activation++) {
        rl_gate gate = {gate_up, out, rows, size, activation};
        must(rl_gated_activation(&gate));
    }
    free(x), free(weight), free(out), free(gate_up);
}

static void multiply(int64_t kind, const uint8_t *weights, int64_t out_features, int64_t in_features, int64_t rows) {
    float *x = floats(rows * in_features), *out = floats(rows * out_features), *bias = floats(out_features);
    must(rl_linear(kind, weights, out_features, in_features, x, rows, bias, out, out));
    must(rl_linear(kind | RL_PRECISE, weights, out_features, in_features, x, rows, NULL, NULL, out));
    free(x), free(out), free(bias);
}

/* Weights packed from numbers. */
static void packed(int64_t kind, int64_t out_features, int64_t in_features, int64_t rows) {
    float *weights = floats(out_features * in_features), *back = floats(out_features * in_features);
    uint8_t *bytes = aligned_alloc(64, (size_t)(rl_packed_bytes(kind, out_features, in_features) + 63) / 64 * 64);
    must(rl_pack(kind, weights, out_features, in_features, rows % 2, bytes));
    must(rl_rows(kind, bytes, in_features, NULL, out_features, back));
    multiply(kind, bytes, out_features, in_features, rows);
    free(weights), free(back), free(bytes);
}

/* Two stretches of GGUF blocks, as one matrix. Every byte of a block but its scales may be anything. */
static void stored(const int64_t types[2], int64_t out_features, int64_t in_features, int64_t rows) {
    static const int64_t block_bytes[] = {0, 0, 18, 20, 0, 0, 22, 24, 34, 0, 0, 0, 144, 176, 210};
    rl_parts parts = {2, {{0}}};
    uint8_t *packed[2];
    for (int i = 0; i < 2; i++) {
        int64_t type = types[i], per_block = type >= 12 ? 256 : 32, blocks = out_features * in_features / per_block;
        uint8_t *bytes = malloc((size_t)(blocks * block_bytes[type]));
        for (int64_t j = 0; j < blocks * block_bytes[type]; j++)
            bytes[j] = (uint8_t)(j * 7919 % 251 & 0x3b); /* no fp16 of them is infinite */
        float *numbers = floats(out_features * in_features);
        must(rl_dequantize(type, bytes, blocks, numbers));
        int64_t kind = rl_stored_kind(type), size = rl_packed_bytes(kind, out_features, in_features);
        packed[i] = aligned_alloc(64, (size_t)(size + 63) / 64 * 64);
        memset(packed[i], 0, (size_t)size);
        must(rl_repack(type, bytes, out_features - 1, in_features, 1, packed[i]));
        must(rl_rows(kind, packed[i], in_features, NULL, out_features, numbers));
        parts.part[i].kind = kind, parts.part[i].out_features = out_features, parts.part[i].weights = packed[i];
        free(bytes), free(numbers);
    }
    multiply(RL_PARTS, (const uint8_t *)&parts, 2 * out_features, in_features, rows);
    free(packed[0]), free(packed[1]);
}

static void products(int64_t rows) {
    const int64_t kinds[] = {RL_INT4, RL_INT4_G64, RL_INT4_G128, RL_INT8};
    const int64_t types[][2] = {{2, 3}, {6, 7}, {8, 12}, {13, 14}};
    for (int i = 0; i < 4; i++) {
        packed(kinds[i], 1 + 11 * rows, 65 + rows, rows);
        stored(types[i], 1 + 11 * rows, 256, rows);
    }
}

/* Two texts: one decodes at ``context``, one adds ``added`` rows; first their rows are written to the cache. */
static void attention(int64_t head_dim, int64_t group, int64_t kv_type, int64_t copies, int64_t context, int64_t added,
                      int64_t window) {
    const int64_t num_kv_heads = 2, page_size = 16, num_heads = group * num_kv_heads, rows = context + added;
    int64_t pages_each[2] = {(context + page_size - 1) / page_size, (added + page_size - 1) / page_size};
    int64_t num_pages = pages_each[0] + pages_each[1];
    int64_t *pages = malloc((size_t)num_pages * sizeof *pages), *slots = malloc((size_t)rows * sizeof *slots);
    for (int64_t i = 0; i < num_pages; i++)
        pages[i] = num_pages - 1 - i;
    for (int64_t row = 0; row < rows; row++) {
        int64_t position = row < context ? row : row - context;
        slots[row] = pages[(row < context ? 0 : pages_each[0]) + position / page_size] * page_size + position % page_size;
    }
    int64_t records = num_pages * page_size * num_kv_heads * copies, width = kv_type == RL_FP32 ? 4 : kv_type < RL_KV8 ? 2 : 1;
    int64_t key_size = kv_type == RL_KV4 ? head_dim / 2 + head_dim / 4 : head_dim * width;
    int64_t value_size = kv_type == RL_KV4 ? head_dim / 2 : head_dim * width, numbers = kv_type == RL_KV4 ? 2 : 1;
    float *sizes = floats(num_kv_heads * copies * head_dim);
    for (int64_t i = 0; i < num_kv_heads * copies * head_dim; i++)
        sizes[i] += 1.5f;
    rl_kv kv = {.keys = calloc(1, (size_t)(records * key_size)),
                .values = calloc(1, (size_t)(records * value_size)),
                .key_sizes = sizes, .value_sizes = sizes, .type = kv_type};
    if (kv_type >= RL_KV8) {
        kv.key_numbers = calloc((size_t)(records * numbers), sizeof(uint16_t));
        kv.value_numbers = calloc((size_t)(records * numbers), sizeof(uint16_t));
    }
    int64_t half = head_dim / 4;
    float *qkv = floats(rows * (num_heads + 2 * num_kv_heads) * head_dim), *q = floats(rows * num_heads * head_dim);
    float *cos = floats(rows * half), *sin = floats(rows * half), *weight = floats(head_dim);
    float *k = floats(rows * num_kv_heads * head_dim);
    rl_rope rope = {qkv, cos, sin, weight, weight, slots, NULL, kv, q, k, rows, num_heads, num_kv_heads, head_dim, half, copies,
                    1e-6f};
    must(rl_rope_and_write_kv(&rope));

    rl_span spans[2] = {{0, 1, context, 0, -1, 0}, {1, added, added, pages_each[0], -1, 0}};
    float *queries = floats((1 + added) * num_heads * head_dim), *out = floats((1 + added) * num_heads * head_dim);
    float *sink_scores = floats(num_heads);
    rl_attention args = {.q = queries, .kv = kv, .out = out, .spans = spans, .pages = pages,
                         .sink_scores = sink_scores, .num_spans = 2, .num_heads = num_heads,
                         .num_kv_heads = num_kv_heads * copies, .head_dim = head_dim, .page_size = page_size,
                         .window = window, .sink_tokens = window ? 3 : 0, .scale = 0.2f, .softcap = window ? 5.0f : 0.0f};
    args.workspace_bytes = rl_attention_workspace(&args);
    args.workspace = malloc((size_t)args.workspace_bytes);
    must(rl_paged_attention(&args));
    for (int64_t i = 0; i < (1 + added) * num_heads * head_dim; i++)
        if (!isfinite(out[i]))
            must(-1);
    const int64_t count = 3;
    size_t bound_bytes = sizeof(float) * (size_t)(num_pages * num_kv_heads * copies * head_dim);
    rl_bounds bounds = {malloc(bound_bytes), malloc(bound_bytes)};
    rl_noted_keys noted = {bounds, &kv, k, slots, rows, num_kv_heads * copies, copies, head_dim, page_size};
    must(rl_note_keys(&noted));
    int64_t most = 2 * num_kv_heads * copies, *chosen_pages = malloc((size_t)(num_pages + most * count) * sizeof *pages);
    for (int64_t i = 0; i < num_pages; i++)
        chosen_pages[i] = pages[i];
    rl_span *chosen = malloc((size_t)most * sizeof *chosen);
    spans[0].is_decode = 1;
    rl_choice choice = {bounds, queries, spans, chosen_pages, chosen, 2, num_pages, num_heads, num_kv_heads * copies, head_dim,
                        page_size, count};
    args.num_spans = rl_choose_pages(&choice);
    args.spans = chosen, args.pages = chosen_pages, args.window = 0;
    args.workspace_bytes = rl_attention_workspace(&args);
    args.workspace = realloc(args.workspace, (size_t)args.workspace_bytes);
    must(rl_paged_attention(&args));
    free(bounds.least), free(bounds.largest), free(chosen_pages), free(chosen), free(k);
    free(pages), free(slots), free(kv.keys), free(kv.values), free(qkv), free(q), free(cos), free(sin), free(weight);
    free(queries), free(out), free(sink_scores), free(args.workspace), free(sizes), free(kv.key_numbers), free(kv.value_numbers);
}

int main(void) {
    const int64_t head_dims[] = {4, 33, 64, 80}, contexts[] = {1, 15, 129, 400}, sizes[] = {1, 17, 70, 576};
    for (int64_t isa = RL_AVX2; isa <= RL_AVX512VNNI; isa++) {
        if (rl_set_isa(isa) < 0)
            continue;
        for (int64_t threads = 1; threads <= 3; threads += 2) {
            rl_set_threads(threads);
            for (int64_t rows = 1; rows <= 14; rows++)
                products(rows);
            for (int i = 0; i < 4; i++) {
                pointwise(1 + 40 * i, sizes[i]);
                for (int64_t kv_type = RL_FP32; kv_type <= RL_KV4; kv_type++)
                    for (int j = 0; j < 4; j++)
                        if (kv_type != RL_KV4 || head_dims[i] % 4 == 0)
                            attention(head_dims[i], 1 + i, kv_type, j % 2 ? 1 : 1 + i, contexts[j], 1 + 23 * j, j % 2 ? 40 : 0);
            }
        }
    }
    rl_set_threads(1);
    printf("%d\n", num_calls);
    return 0;
}
