// What stands around attention in a layer: RMSNorm, the rotation of heads, and keys and values on their way into pages.
#include "eights.h"
#include "kernels.h"

namespace {

const int LONGEST_HEAD = 1024;

template <class T> INLINE float squares_of(const T *x, int width) {
    vf sum = {}, other = {};
    int at = 0;
    for (; at + 2 * LANES <= width; at += 2 * LANES) {
        vf a = load(x + at), b = load(x + at + LANES);
        sum = sum + a * a;
        other = other + b * b;
    }
    for (; at < width; at += LANES) {
        vf a = load_some(x + at, width - at);
        sum = sum + a * a;
    }
    return sum_of(sum + other);
}

template <class T>
void norm_row(const T *x, T *out, const float *weight, int width, float eps) {
    float factor = 1.0f / __builtin_sqrtf(squares_of(x, width) / width + eps);
    for (int at = 0; at < width; at += LANES) {
        vf scaled = load_some(x + at, width - at) * factor * load_some(weight + at, width - at);
        store_some(out + at, scaled, width - at);
    }
}

template <class T> void norm(const Rows *rows, const T *x, T *out, const float *weight, float eps) {
    int heads = rows->heads, width = rows->width;
#pragma omp parallel for num_threads(rows->threads) if (rows->threads > 1)
    for (int t = 0; t < rows->tokens; t++)
        for (int h = 0; h < heads; h++)
            norm_row(x + t * rows->token_stride + h * rows->head_stride, out + ((int64_t)t * heads + h) * width,
                     weight + (int64_t)h * rows->weight_stride, width, eps);
}

// One head, in floats that have been read, to where it came from.
template <class T> INLINE void turn(const float *x, T *to, const float *cos, const float *sin, int half, bool neighbours) {
    if (neighbours) {
        float turned[LONGEST_HEAD + LANES];
        for (int i = 0; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            turned[2 * i] = a * cos[i] - b * sin[i];
            turned[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        for (int at = 0; at < 2 * half; at += LANES) store_some(to + at, load(turned + at), 2 * half - at);
        return;
    }
    for (int at = 0; at < half; at += LANES) {
        int left = half - at;
        vf a = load_some(x + at, left), b = load_some(x + half + at, left);
        vf c = load_some(cos + at, left), s = load_some(sin + at, left);
        store_some(to + at, a * c - b * s, left);
        store_some(to + half + at, b * c + a * s, left);
    }
}

template <class T> void rotate(const Rows *rows, T *qk, const Rotation *how) {
    int width = rows->width, half = how->rotary_dim / 2;
#pragma omp parallel for num_threads(rows->threads) if (rows->threads > 1)
    for (int t = 0; t < rows->tokens; t++) {
        const float *cos = how->cos_sin + (int64_t)t * how->rotary_dim, *sin = cos + half;
        for (int h = 0; h < rows->heads; h++) {
            T *head = qk + t * rows->token_stride + h * rows->head_stride;
            float x[LONGEST_HEAD + LANES];
            for (int at = 0; at < width; at += LANES) store(x + at, load_some(head + at, width - at));
            if (how->q_norm) {
                const float *weight = h < how->num_heads ? how->q_norm : how->k_norm;
                norm_row(x, x, weight, width, how->eps);
                for (int at = 2 * half; at < width; at += LANES) store_some(head + at, load(x + at), width - at);
            }
            turn(x, head, cos, sin, half, how->neighbours);
        }
    }
}

// Runs with each head of each token that has a slot: the token's number, the head's, and where its numbers begin in pages.
template <class Run>
void in_slots(const Layer *layer, const int64_t *slots, int32_t num_tokens, int32_t threads, const Run &run) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int t = 0; t < num_tokens; t++) {
        if (slots[t] < 0) continue;
        int64_t block = slots[t] / layer->block_size, offset = slots[t] % layer->block_size;
        for (int h = 0; h < layer->kv_heads; h++)
            run(t, h, block * layer->block_stride + h * layer->head_stride + offset * layer->head_dim);
    }
}

template <class T> INLINE void write_codes(const T *from, void *to, int width, float scale, int pages) {
    for (int at = 0; at < width; at += LANES) {
        vf x = load_some(from + at, width - at) / scale;
        if (pages == PAGES_E4M3)
            store_codes((e4m3 *)to + at, x, width - at);
        else
            store_codes((e5m2 *)to + at, x, width - at);
    }
}

template <class T>
void write(const Layer *layer, const T *k, const T *v, int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head,
           const int64_t *slots, int32_t num_tokens, int32_t threads) {
    in_slots(layer, slots, num_tokens, threads, [&](int t, int h, int64_t at) {
        auto put = [&](const T *from, const void *pages, float scale) {
            if (layer->pages == PAGES_PLAIN)
                memcpy((T *)pages + at, from, layer->head_dim * sizeof(T));
            else
                write_codes(from, (uint8_t *)pages + at, layer->head_dim, scale, layer->pages);
        };
        put(k + t * k_token + h * k_head, layer->keys, layer->k_scale);
        if (layer->values != layer->keys) put(v + t * v_token + h * v_head, layer->values, layer->v_scale);
    });
}

}  // namespace

extern "C" {

void NAMED(norm, ISA)(const Rows *rows, const void *x, void *out, const float *weight, float eps) {
    if (rows->is_bf16)
        norm(rows, (const bf16 *)x, (bf16 *)out, weight, eps);
    else
        norm(rows, (const float *)x, (float *)out, weight, eps);
}

void NAMED(rotate, ISA)(const Rows *rows, void *qk, const Rotation *how) {
    if (rows->is_bf16)
        rotate(rows, (bf16 *)qk, how);
    else
        rotate(rows, (float *)qk, how);
}

void NAMED(write_pages, ISA)(const Layer *layer, const void *k, const void *v, int64_t k_token, int64_t k_head, int64_t v_token,
                             int64_t v_head, const int64_t *slots, int32_t num_tokens, int32_t threads) {
    if (layer->is_bf16)
        write(layer, (const bf16 *)k, (const bf16 *)v, k_token, k_head, v_token, v_head, slots, num_tokens, threads);
    else
        write(layer, (const float *)k, (const float *)v, k_token, k_head, v_token, v_head, slots, num_tokens, threads);
}
}
