/* Key bounds of pages, and the choice of pages by them, for one KV head; see sparse.h. */
#include <math.h>

#include "codes.h"
#include "sparse.h"

#define MOST_RANKED 64 /* pages chosen at most between the first and the last */

void RL_FN(rl_note_keys_of)(const rl_noted_keys *args, int64_t kv_head) {
    int64_t size = args->head_dim, heads = args->num_kv_heads, type = args->kv->type;
    for (int64_t row = 0; row < args->rows; row++) {
        int64_t slot = args->slots[row], page = slot / args->page_size;
        float *least = args->bounds.least + (page * heads + kv_head) * size;
        float *largest = args->bounds.largest + (page * heads + kv_head) * size;
        int begins = slot % args->page_size == 0;
        const float *computed = args->keys + (row * (heads / args->copies) + kv_head / args->copies) * size;
        for (int64_t d = 0; d < size; d += RL_WIDTH) {
            int n = lanes_of(size, d);
            int64_t at = (slot * heads + kv_head) * size + d;
            vf key = type >= RL_KV8 ? vf_load_n(computed + d, n) : load_floats(args->kv->keys, at, type, n);
            vf_store_n(least + d, n, begins ? key : vf_min(key, vf_load_n(least + d, n)));
            vf_store_n(largest + d, n, begins ? key : vf_max(key, vf_load_n(largest + d, n)));
        }
    }
}

/* No key of a page scores more than this with q. */
static float most_of(const float *q, const float *least, const float *largest, int64_t size) {
    vf sum = vf_zero();
    for (int64_t d = 0; d < size; d += RL_WIDTH) {
        int n = lanes_of(size, d);
        vf query = vf_load_n(q + d, n);
        sum = vf_add(sum, vf_max(vf_mul(query, vf_load_n(least + d, n)), vf_mul(query, vf_load_n(largest + d, n))));
    }
    return vf_sum(sum);
}

/* Of a row's pages the first, the last and, of the others, those that some query head of the group could want most, in their
 * order. The span then speaks of them as of a text without what lies between. */
void RL_FN(rl_choose_pages_of)(const rl_choice *args, rl_span *span, int64_t kv_head, int64_t *pages) {
    int64_t group = args->num_heads / args->num_kv_heads, size = args->head_dim, wanted = args->count - 2;
    int64_t num_pages = (span->context + args->page_size - 1) / args->page_size;
    const int64_t *table = args->pages + span->first_page;
    const float *q = args->q + (span->row * args->num_heads + kv_head * group) * size;
    float scores[MOST_RANKED];
    int64_t indices[MOST_RANKED], kept = 0; /* best first */
    for (int64_t index = 1; index + 1 < num_pages && wanted > 0; index++) {
        int64_t at = (table[index] * args->num_kv_heads + kv_head) * size;
        float score = -INFINITY;
        for (int64_t head = 0; head < group; head++) {
            float most = most_of(q + head * size, args->bounds.least + at, args->bounds.largest + at, size);
            score = most > score ? most : score;
        }
        if (kept == wanted && !(score > scores[kept - 1]))
            continue;
        int64_t place = kept < wanted ? kept++ : kept - 1;
        for (; place > 0 && scores[place - 1] < score; place--) {
            scores[place] = scores[place - 1];
            indices[place] = indices[place - 1];
        }
        scores[place] = score;
        indices[place] = index;
    }
    for (int64_t i = 1; i < kept; i++) { /* by place in the text again */
        int64_t index = indices[i], place = i;
        for (; place > 0 && indices[place - 1] > index; place--)
            indices[place] = indices[place - 1];
        indices[place] = index;
    }
    pages[0] = table[0];
    for (int64_t i = 0; i < kept; i++)
        pages[1 + i] = table[indices[i]];
    pages[1 + kept] = table[num_pages - 1];
    span->first_page = pages - args->pages;
    span->context -= (num_pages - 2 - kept) * args->page_size;
}
