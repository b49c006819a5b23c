/* All layers of a step in one call: the same operations, in the same order, as engine/model/decoder.py runs one by one.
 * At one row, going back to Python between them would take as long as some of them do. */
#include "layers.h"
#include "linear.h"
#include "pointwise.h"

#include <stdlib.h>
#include <string.h>

RL_API int64_t rl_linear(int64_t kind, const uint8_t *weights, int64_t out_features, int64_t in_features, const float *x,
                         int64_t num_rows, const float *bias, const float *residual, float *out);
RL_API int64_t rl_rms_norm(const rl_norm *args);
RL_API int64_t rl_rope_and_write_kv(const rl_rope *args);
RL_API int64_t rl_gated_activation(const rl_gate *args);
RL_API int64_t rl_attention_workspace(const rl_attention *args);
RL_API int64_t rl_paged_attention(const rl_attention *args);

/* Rows of what lies between the operations. */
typedef struct {
    float *normed, *qkv, *q, *k, *attended, *gate_up, *activated, *product;
    rl_span *spans; /* where rows choose pages: the spans over those, */
    int64_t *pages; /* and the pages */
    char *attention;
    int64_t attention_bytes;
} Buffers;

typedef struct {
    const rl_decoder *decoder;
    const rl_step *step;
    Buffers at;
} Run;

static int64_t row_floats(const rl_decoder *d) {
    return 2 * d->hidden + 3 * d->intermediate + (3 * d->num_heads + 3 * d->num_kv_heads) * d->head_dim;
}

/* Spans and pages of a step that chooses, each KV head for itself. */
static int64_t most_spans(const rl_decoder *d, const rl_step *step) {
    return step->sparse_pages > 0 ? step->num_spans * d->num_kv_heads * step->copies : 0;
}

static int64_t most_pages(const rl_decoder *d, const rl_step *step) {
    return step->sparse_pages > 0 ? step->num_pages + most_spans(d, step) * step->sparse_pages : 0;
}

static Buffers cut(const rl_decoder *d, const rl_step *step) {
    Buffers b;
    int64_t rows = step->rows, heads = d->num_heads * d->head_dim;
    b.normed = (float *)(((uintptr_t)step->workspace + 63) & ~(uintptr_t)63);
    b.product = b.normed + rows * d->hidden;
    b.qkv = b.product + rows * d->hidden;
    b.q = b.qkv + rows * (d->num_heads + 2 * d->num_kv_heads) * d->head_dim;
    b.k = b.q + rows * heads;
    b.attended = b.k + rows * d->num_kv_heads * d->head_dim;
    b.gate_up = b.attended + rows * heads;
    b.activated = b.gate_up + rows * 2 * d->intermediate;
    b.spans = (rl_span *)(((uintptr_t)(b.activated + rows * d->intermediate) + 63) & ~(uintptr_t)63);
    b.pages = (int64_t *)(b.spans + most_spans(d, step));
    b.attention = (char *)(b.pages + most_pages(d, step));
    b.attention_bytes = step->workspace_bytes - (b.attention - (char *)step->workspace);
    return b;
}

static rl_attention attention_of(const rl_decoder *d, const rl_step *step, const rl_layer *layer, const Buffers *at) {
    rl_attention args = {
        .q = at->q,
        .kv = layer->kv,
        .out = at->attended,
        .spans = step->spans,
        .pages = step->pages,
        .workspace = at->attention,
        .workspace_bytes = at->attention_bytes,
        .num_spans = step->num_spans,
        .num_heads = d->num_heads,
        .num_kv_heads = d->num_kv_heads * step->copies,
        .head_dim = d->head_dim,
        .page_size = step->page_size,
        .window = layer->window,
        .sink_tokens = layer->sink_tokens,
        .scale = d->scale,
        .softcap = d->softcap,
    };
    return args;
}

/* Bytes that attention needs in any of the layers; -1 for arguments that make no sense. */
static int64_t attention_workspace(const rl_decoder *decoder, const rl_step *step) {
    Buffers none = {0};
    int64_t most = 0, window = -1;
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        if (decoder->layers[i].window == window)
            continue;
        rl_attention args = attention_of(decoder, step, &decoder->layers[i], &none);
        int64_t bytes = rl_attention_workspace(&args);
        if (bytes < 0)
            return -1;
        most = bytes > most ? bytes : most;
        window = decoder->layers[i].window;
    }
    return most;
}

/* The same where rows choose their pages: as if each span that does had a context of that many. */
static int64_t chosen_workspace(const rl_decoder *decoder, const rl_step *step) {
    rl_span *spans = malloc(sizeof *spans * (size_t)step->num_spans);
    if (!spans)
        return -1;
    for (int64_t i = 0; i < step->num_spans; i++) {
        spans[i] = step->spans[i];
        if (rl_span_chooses(&spans[i], step->page_size, step->sparse_pages))
            spans[i].context = step->sparse_pages * step->page_size;
    }
    rl_step chosen = *step;
    chosen.spans = spans;
    int64_t bytes = attention_workspace(decoder, &chosen);
    free(spans);
    return bytes;
}

/* Bytes of workspace that rl_run_layers needs for this step; -1 for arguments that make no sense, or no memory. */
RL_API int64_t rl_layers_workspace(const rl_decoder *decoder, const rl_step *step) {
    int64_t most = attention_workspace(decoder, step);
    int64_t chosen = step->sparse_pages > 0 ? chosen_workspace(decoder, step) : 0;
    if (most < 0 || chosen < 0)
        return -1;
    return 128 + step->rows * row_floats(decoder) * (int64_t)sizeof(float) +
           most_spans(decoder, step) * (int64_t)sizeof(rl_span) + most_pages(decoder, step) * (int64_t)sizeof(int64_t) +
           (most > chosen ? most : chosen);
}

static int64_t norm(const Run *run, const float *x, const float *weight, float *out, int64_t rows) {
    rl_norm args = {x, weight, out, rows, run->decoder->hidden, run->decoder->eps};
    return rl_rms_norm(&args);
}

static int64_t multiply(const rl_matrix *m, const float *x, int64_t rows, const float *residual, float *out) {
    return rl_linear(m->kind, m->weights, m->out_features, m->in_features, x, rows, m->bias, residual, out);
}

/* x += the product, normed first where the family has sandwich norms. */
static int64_t add_product(const Run *run, const rl_matrix *m, const float *from, const float *post_norm, float *x,
                           int64_t rows) {
    if (!post_norm)
        return multiply(m, from, rows, x, x);
    float *product = run->at.product;
    if (multiply(m, from, rows, NULL, product) < 0 || norm(run, product, post_norm, product, rows) < 0)
        return -1;
    for (int64_t i = 0; i < rows * run->decoder->hidden; i++)
        x[i] += product[i];
    return 0;
}

/* Keep the bounds of the pages that were just written to, and let decoding rows choose pages by them. */
static void choose(const Run *run, const rl_layer *layer, rl_attention *attention) {
    const rl_step *step = run->step;
    rl_noted_keys noted = {
        .bounds = layer->bounds,
        .kv = &layer->kv,
        .keys = run->at.k,
        .slots = step->slots,
        .rows = step->rows,
        .num_kv_heads = attention->num_kv_heads,
        .copies = step->copies,
        .head_dim = attention->head_dim,
        .page_size = step->page_size,
    };
    rl_note_keys(&noted);
    rl_choice choice = {
        .bounds = layer->bounds,
        .q = run->at.q,
        .spans = step->spans,
        .pages = run->at.pages,
        .chosen = run->at.spans,
        .num_spans = step->num_spans,
        .num_pages = step->num_pages,
        .num_heads = attention->num_heads,
        .num_kv_heads = attention->num_kv_heads,
        .head_dim = attention->head_dim,
        .page_size = step->page_size,
        .count = step->sparse_pages,
    };
    memcpy(run->at.pages, step->pages, sizeof(int64_t) * (size_t)step->num_pages);
    attention->num_spans = rl_choose_pages(&choice);
    attention->spans = run->at.spans;
    attention->pages = run->at.pages;
}

/* Norm, QKV, rotation, cache write and attention: step->x -> at.attended. */
static int64_t attend(const Run *run, const rl_layer *layer) {
    const rl_decoder *d = run->decoder;
    const rl_step *step = run->step;
    if (norm(run, step->x, layer->attn_norm, run->at.normed, step->rows) < 0 ||
        multiply(&layer->qkv, run->at.normed, step->rows, NULL, run->at.qkv) < 0)
        return -1;
    rl_rotation none = {NULL, NULL, 0}, turn = layer->rotation < 0 ? none : step->rotations[layer->rotation];
    rl_rope rope = {
        .qkv = run->at.qkv,
        .cos = turn.cos,
        .sin = turn.sin,
        .q_norm = layer->q_norm,
        .k_norm = layer->k_norm,
        .slots = step->slots,
        .positions = step->positions,
        .kv = layer->kv,
        .q = run->at.q,
        .k = layer->bounds.least && layer->kv.type >= RL_KV8 ? run->at.k : NULL,
        .rows = step->rows,
        .num_heads = d->num_heads,
        .num_kv_heads = d->num_kv_heads,
        .head_dim = d->head_dim,
        .half = turn.half,
        .copies = step->copies,
        .eps = d->eps,
    };
    rl_attention attention = attention_of(d, step, layer, &run->at);
    if (rl_rope_and_write_kv(&rope) < 0)
        return -1;
    if (layer->bounds.least && step->sparse_pages > 0)
        choose(run, layer, &attention);
    return rl_paged_attention(&attention);
}

/* Attention output, MLP and both residual additions on ``rows`` rows of x and at.attended. */
static int64_t finish_layer(const Run *run, const rl_layer *layer, float *x, int64_t rows) {
    const rl_decoder *d = run->decoder;
    if (add_product(run, &layer->attn_out, run->at.attended, layer->post_attn_norm, x, rows) < 0 ||
        norm(run, x, layer->mlp_norm, run->at.normed, rows) < 0 ||
        multiply(&layer->gate_up, run->at.normed, rows, NULL, run->at.gate_up) < 0)
        return -1;
    rl_gate gate = {run->at.gate_up, run->at.activated, rows, d->intermediate, d->activation};
    if (rl_gated_activation(&gate) < 0)
        return -1;
    return add_product(run, &layer->mlp_out, run->at.activated, layer->post_mlp_norm, x, rows);
}

/* Copy the rows whose logits are wanted to the front, through the buffer ``spare``. */
static void keep_wanted(const rl_step *step, float *from, float *spare, int64_t size) {
    for (int64_t i = 0; i < step->num_wanted; i++)
        memcpy(spare + i * size, from + step->wanted[i] * size, sizeof(float) * (size_t)size);
    memcpy(from, spare, sizeof(float) * (size_t)(step->num_wanted * size));
}

/* Write the step's keys and values and give the normed rows that the head multiplies. 0, or -1 for arguments that make no
 * sense, too small a workspace or no memory. num_wanted may be at most rows. */
RL_API int64_t rl_run_layers(const rl_decoder *decoder, const rl_step *step) {
    Run run = {decoder, step, cut(decoder, step)};
    if (run.at.attention_bytes < 0 || step->num_wanted > step->rows)
        return -1;
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        const rl_layer *layer = &decoder->layers[i];
        int64_t rows = step->rows;
        if (attend(&run, layer) < 0)
            return -1;
        if (i == decoder->num_layers - 1) { /* from here on a row no longer sees the others */
            rows = step->num_wanted;
            keep_wanted(step, step->x, run.at.normed, decoder->hidden);
            keep_wanted(step, run.at.attended, run.at.q, decoder->num_heads * decoder->head_dim);
        }
        if (rows > 0 && finish_layer(&run, layer, step->x, rows) < 0)
            return -1;
    }
    return norm(&run, step->x, decoder->final_norm, step->out, step->num_wanted);
}
