// Which experts a row goes to, and with what weights: see layers/moe/routing.py of the engine, whose choice this is. A
// row is some hundred numbers, so that the plain instruction set will do.
#include "kernels.h"
#include "simd.h"

namespace {

const float NEVER = -__builtin_inff();

float exp_of(float x) { return exp2_of(splat(x * 1.442695041f))[0]; }

// Scores [E] of a row's logits, whose memory has a vector's length more.
void score(const Routing *how, const float *logits, float *scores) {
    int count = how->num_experts;
    if (how->scoring == SCORING_SIGMOID) {
        for (int e = 0; e < count; e++) {
            float small = exp_of(logits[e] > 0.0f ? -logits[e] : logits[e]);
            scores[e] = (logits[e] > 0.0f ? 1.0f : small) / (small + 1.0f);
        }
        return;
    }
    float most = NEVER, sum = 0.0f;
    for (int e = 0; e < count; e++) most = larger(logits[e], most);
    for (int e = 0; e < count; e += LANES) store(scores + e, exp2_of((load(logits + e) - most) * 1.442695041f));
    for (int e = 0; e < count; e++) sum += scores[e];
    for (int e = 0; e < count; e++) scores[e] /= sum;
}

// The place of the largest of those that are not taken, the first of equals; where none is larger than what is hidden, the
// first that is not taken.
int best_of(const float *of, const bool *taken, int count) {
    int best = -1;
    for (int e = 0; e < count; e++)
        if (!taken[e] && (best < 0 || of[e] > of[best])) best = e;
    return best;
}

// Hides the experts of all groups but the best.
void keep_best_groups(const Routing *how, float *choice) {
    int size = how->num_experts / how->num_groups;
    float ranks[MOST_EXPERTS];
    bool kept[MOST_EXPERTS] = {};
    for (int g = 0; g < how->num_groups; g++) {
        bool taken[MOST_EXPERTS] = {};
        ranks[g] = 0.0f;
        for (int i = 0; i < how->best_of_group; i++) {
            int best = best_of(choice + g * size, taken, size);
            taken[best] = true;
            ranks[g] += choice[g * size + best];
        }
    }
    for (int i = 0; i < how->top_groups; i++) kept[best_of(ranks, kept, how->num_groups)] = true;
    for (int e = 0; e < how->num_experts; e++)
        if (!kept[e / size]) choice[e] = NEVER;
}

template <class T> void route_row(const Routing *how, const T *row, float *weights, int32_t *experts) {
    float logits[MOST_EXPERTS + LANES], scores[MOST_EXPERTS + LANES], choice[MOST_EXPERTS];
    int count = how->num_experts;
    for (int e = 0; e < count; e += LANES) store(logits + e, load_some(row + e, count - e));
    score(how, logits, scores);
    bool in_groups = how->top_groups < how->num_groups;
    // Logits still differ where scores are the same.
    for (int e = 0; e < count; e++)
        choice[e] = how->correction ? scores[e] + how->correction[e] : in_groups ? scores[e] : logits[e];
    if (in_groups) keep_best_groups(how, choice);
    bool taken[MOST_EXPERTS] = {};
    float sum = 1e-20f, factor = how->scale;
    for (int k = 0; k < how->top_k; k++) {
        int best = best_of(choice, taken, count);
        taken[best] = true;
        experts[k] = best;
        sum += weights[k] = scores[best];
    }
    if (how->renormalize) factor /= sum;
    for (int k = 0; k < how->top_k; k++) weights[k] *= factor;
}

}  // namespace

extern "C" {

void route(const Routing *how, const void *logits, int64_t stride, int32_t rows, float *weights, int32_t *experts,
           int32_t is_bf16, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int row = 0; row < rows; row++) {
        float *of_row = weights + (int64_t)row * how->top_k;
        int32_t *chosen = experts + (int64_t)row * how->top_k;
        if (is_bf16)
            route_row(how, (const bf16 *)logits + row * stride, of_row, chosen);
        else
            route_row(how, (const float *)logits + row * stride, of_row, chosen);
    }
}
}
