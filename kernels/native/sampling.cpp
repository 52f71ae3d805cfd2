// One token per row of logits: see sampling.py of pagefleet_kernels, whose tokens these are. A row is read once for the
// largest logit of each block; after that only blocks are looked at that may hold what wins. Compiled once for every
// instruction set.
#include <omp.h>

#include "kernels.h"
#include "simd.h"

#ifndef ISA
#error "compile with -DISA=name"
#endif

namespace {

const int BLOCK = 64;
const float MOST_NOISE = 22.2f;     // -log of the smallest exponential, 2^-32
const float LEAST_SCORE = -60.0f;   // whose weight is nothing beside that of the best, 1
const int HALVINGS = 14;
const double LN2 = 0.693147180559945309417;
const float BELOW_ONE = 1.0f - 0x1p-24f;

struct Candidate {
    float score;
    int32_t token;
    double weight;
};

// A row: its logits, what it asks for, and memory for what is found.
template <class T> struct Row {
    const T *logits;
    int32_t vocab, num_blocks;
    float best, inverse_temperature;
    uint32_t key_0, key_1;
    float *maxima, *sorted;  // of blocks
    Candidate *candidates;
};

INLINE vf infinity_of(float sign) { return splat(sign * __builtin_inff()); }

// The numbers from `at` on; -infinity behind the row's end.
template <class T> INLINE vf load_logits(const T *logits, int at, int vocab) {
    if (at + LANES <= vocab) return load(logits + at);
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    int left = vocab - at < 0 ? 0 : vocab - at;
    return choose(lane < splat_int(left), left ? load_some(logits + at, left) : (vf){}, infinity_of(-1.0f));
}

// The largest logit, infinity where one is no number; notes that of each block.
template <class T> float find_maxima(const Row<T> &row) {
    vf most = infinity_of(-1.0f);
    vi strange = {};
    float best = -__builtin_inff();
    for (int block = 0; block < row.num_blocks; block++) {
        most = infinity_of(-1.0f);
        for (int i = 0; i < BLOCK; i += LANES) {
            vf x = load_logits(row.logits, block * BLOCK + i, row.vocab);
            strange |= x != x;
            most = larger_of(most, x);
        }
        row.maxima[block] = max_of(most);
        best = larger(row.maxima[block], best);
    }
    for (int i = 0; i < LANES; i++)
        if (strange[i]) return __builtin_inff();
    return best;
}

// The first token of the largest logit.
template <class T> int32_t first_best(const Row<T> &row) {
    int block = 0;
    while (row.maxima[block] != row.best) block++;
    for (int token = block * BLOCK;; token++) {
        T some[LANES] = {row.logits[token]};
        if (load(some)[0] == row.best) return token;
    }
}

template <class T> INLINE float score_of(const Row<T> &row, float logit) {
    return (logit - row.best) * row.inverse_temperature;
}

uint64_t mix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

INLINE vf uniform_of(vu token, uint32_t key_0, uint32_t key_1) {
    vu h = (token * 0x9e3779b1u) ^ key_0;
    h = (h ^ (h >> 16)) * 0x85ebca6bu + key_1;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    h = h ^ (h >> 16);
    vf u = __builtin_convertvector((vi)(h & 0x7fffffffu), vf) * 0x1p-31f + 0x1p-32f;
    return choose(u < splat(BELOW_ONE), u, splat(BELOW_ONE));
}

// Of a positive number, by the series of artanh.
double log_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    int exponent = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    double part;
    memcpy(&part, &bits, 8);
    if (part > 1.4142135623730951) part *= 0.5, exponent++;
    double f = (part - 1.0) / (part + 1.0), square = f * f, sum = 0.0;
    for (int i = 21; i >= 1; i -= 2) sum = sum * square + 1.0 / i;
    return exponent * LN2 + 2.0 * f * sum;
}

// Of x <= 0.
double exp_of(double x) {
    if (x < -700.0) return 0.0;
    double whole = (double)(int64_t)(x * (1.0 / LN2) - 0.5), part = x - whole * LN2, sum = 1.0;
    const double over[] = {1.0, 1.0 / 2, 1.0 / 3, 1.0 / 4, 1.0 / 5, 1.0 / 6, 1.0 / 7, 1.0 / 8, 1.0 / 9, 1.0 / 10, 1.0 / 11, 1.0 / 12};
    for (int i = 11; i >= 0; i--) sum = sum * (part * over[i]) + 1.0;
    uint64_t bits = (uint64_t)((int64_t)whole + 1023) << 52;
    double power;
    memcpy(&power, &bits, 8);
    return sum * power;
}

// -log(E), E exponentially distributed: each step rounded as the twin rounds it.
float noise_of(float uniform) {
    double rest = 1.0 - (double)uniform;
    float exponential = (float)(log_of(rest) * (double)uniform / (rest - 1.0));  // Kahan's log1p
    return -(float)log_of((double)exponential);
}

struct Draw {
    float most = -__builtin_inff();
    int32_t token = -1;

    void offer(float score, float uniform, int32_t candidate) {
        float noisy = score + noise_of(uniform);
        if (noisy > most || (noisy == most && candidate < token)) most = noisy, token = candidate;
    }
};

// No less than the noise: E is at least the uniform number, and the logarithm of that about its exponent.
INLINE vf most_noise(vf uniform) {
    vi exponent = ((vi)uniform >> 23) - 127;
    return __builtin_convertvector(exponent, vf) * (float)-LN2 + 1e-3f;
}

template <class T> void draw_in_block(const Row<T> &row, int block, float threshold, Draw &draw) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int at = block * BLOCK; at < (block + 1) * BLOCK && at < row.vocab; at += LANES) {
        vf score = (load_logits(row.logits, at, row.vocab) - row.best) * row.inverse_temperature;
        vf uniform = uniform_of((vu)(lane + at), row.key_0, row.key_1);
        vf hope = choose(score >= splat(threshold), score + most_noise(uniform), infinity_of(-1.0f));
        if (!(max_of(hope) > draw.most)) continue;
        for (int i = 0; i < LANES; i++)
            if (hope[i] > draw.most) draw.offer(score[i], uniform[i], at + i);
    }
}

// From all tokens whose scores are no less than the threshold.
template <class T> int32_t draw_from_all(const Row<T> &row, float threshold) {
    Draw draw;
    int best_block = first_best(row) / BLOCK;
    draw_in_block(row, best_block, threshold, draw);
    for (int block = 0; block < row.num_blocks; block++) {
        float score = score_of(row, row.maxima[block]);
        if (block != best_block && score >= threshold && score + MOST_NOISE > draw.most)
            draw_in_block(row, block, threshold, draw);
    }
    return draw.token;
}

// The candidates that score no less than the threshold, and less than the ceiling; returns how many there are.
template <class T> int collect(const Row<T> &row, float threshold, float ceiling) {
    int found = 0;
    for (int block = 0; block < row.num_blocks; block++) {
        if (score_of(row, row.maxima[block]) < threshold) continue;
        for (int at = block * BLOCK; at < (block + 1) * BLOCK && at < row.vocab; at += LANES) {
            vf score = (load_logits(row.logits, at, row.vocab) - row.best) * row.inverse_temperature;
            if (max_of(score) < threshold) continue;
            for (int i = 0; i < LANES && at + i < row.vocab; i++)
                if (score[i] >= threshold && score[i] < ceiling) row.candidates[found++] = {score[i], at + i, 1.0};
        }
    }
    return found;
}

// The nth highest of the numbers, from 1; moves them about.
float nth_highest(float *numbers, int count, int nth) {
    int low = 0, high = count;
    while (true) {
        float pivot = numbers[low + (high - low) / 2];
        int above = low, at = low, below = high;  // [low, above) are higher, [above, at) equal, [below, high) lower
        while (at < below) {
            float x = numbers[at];
            if (x > pivot)
                numbers[at++] = numbers[above], numbers[above++] = x;
            else if (x < pivot)
                numbers[at] = numbers[--below], numbers[below] = x;
            else
                at++;
        }
        if (nth <= above)
            high = above;
        else if (nth <= below)
            return pivot;
        else
            low = below;
    }
}

// The score at which the weights, from the highest down, reach the target; -infinity where they do not.
float score_where_reached(Candidate *candidates, int count, double target) {
    int low = 0, high = count;
    double before = 0.0;
    while (low < high) {
        float pivot = candidates[low + (high - low) / 2].score;
        int above = low, at = low, below = high;
        double higher = 0.0, equal = 0.0;
        while (at < below) {
            Candidate one = candidates[at];
            if (one.score > pivot)
                candidates[at++] = candidates[above], candidates[above++] = one, higher += one.weight;
            else if (one.score < pivot)
                candidates[at] = candidates[--below], candidates[below] = one;
            else
                at++, equal += one.weight;
        }
        if (above > low && before + higher >= target) {
            high = above;
        } else if (before + higher + equal >= target) {
            return pivot;
        } else {
            before += higher + equal;
            low = below;
        }
    }
    return -__builtin_inff();
}

// Drops candidates under the threshold, and weighs the others; returns how many they are.
int keep(Candidate *candidates, int count, float threshold, double *mass) {
    int kept = 0;
    *mass = 0.0;
    for (int i = 0; i < count; i++) {
        if (candidates[i].score < threshold) continue;
        candidates[kept] = candidates[i];
        candidates[kept].weight = exp_of(candidates[kept].score);
        *mass += candidates[kept++].weight;
    }
    return kept;
}

// What all tokens weigh together whose scores are no less than the bound.
template <class T> double mass_of(const Row<T> &row, float bound) {
    float least = larger(bound, LEAST_SCORE);
    double mass = 0.0;
    for (int block = 0; block < row.num_blocks; block++) {
        if (score_of(row, row.maxima[block]) < least) continue;
        vf sum = {};
        for (int at = block * BLOCK; at < (block + 1) * BLOCK && at < row.vocab; at += LANES) {
            vf score = (load_logits(row.logits, at, row.vocab) - row.best) * row.inverse_temperature;
            sum = sum + choose(score >= splat(least), exp2_of(score * (float)(1.0 / LN2)), (vf){});
        }
        mass += sum_of(sum);
    }
    return mass;
}

// The score of the nth highest maximum of a block: so many tokens at least score no less.
template <class T> float nth_of_blocks(const Row<T> &row, int64_t nth) {
    if (nth > row.num_blocks) return -__builtin_inff();
    memcpy(row.sorted, row.maxima, row.num_blocks * sizeof(float));
    return score_of(row, nth_highest(row.sorted, row.num_blocks, (int)nth));
}

template <class T> int32_t draw_from(const Row<T> &row, int count, float threshold) {
    Draw draw;
    for (int i = 0; i < count; i++) {
        const Candidate &one = row.candidates[i];
        if (one.score < threshold) continue;
        vf uniform = uniform_of((vu)splat_int(one.token), row.key_0, row.key_1);
        if (one.score + most_noise(uniform)[0] >= draw.most) draw.offer(one.score, uniform[0], one.token);
    }
    return draw.token;
}

template <class T> int32_t draw_of_top_k(const Row<T> &row, int64_t top_k, double top_p, float bound) {
    int count = collect(row, nth_of_blocks(row, top_k), __builtin_inff());
    float threshold = larger(score_where_reached(row.candidates, count, (double)top_k), bound);
    if (top_p < 1.0) {
        double mass;
        count = keep(row.candidates, count, threshold, &mass);
        threshold = larger(score_where_reached(row.candidates, count, top_p * mass), threshold);
    }
    return draw_from(row, count, threshold);
}

// The range that holds the score is halved before its tokens are looked at one by one.
template <class T> int32_t draw_of_top_p(const Row<T> &row, double top_p, float bound) {
    double target = top_p * mass_of(row, bound), before = 0.0, mass;
    float low = larger(bound, LEAST_SCORE), high = __builtin_inff();
    for (int i = 0; i < HALVINGS; i++) {
        float middle = i ? 0.5f * (low + high) : 0.0f;
        mass = mass_of(row, middle);
        if (mass >= target)
            low = middle;
        else
            high = middle, before = mass;
        if (low == high || high == __builtin_inff()) break;
    }
    int count = keep(row.candidates, collect(row, low, high), low, &mass);
    float reached = score_where_reached(row.candidates, count, target - before);
    return draw_from_all(row, larger(reached, low));
}

template <class T> int32_t sample(Row<T> &row, const Sampling *of, int at) {
    const int64_t *fields = of->fields + at;
    const int64_t rows = of->rows;
    double floats[3];
    for (int i = 0; i < 3; i++) memcpy(&floats[i], &fields[(4 + i) * rows], 8);
    row.best = find_maxima(row);
    if (row.best == __builtin_inff()) return -1;
    if (row.best == -__builtin_inff()) return -2;
    int64_t kind = fields[2 * rows], top_k = fields[3 * rows];
    if (kind == 0) return first_best(row);
    uint64_t key = mix64(mix64((uint64_t)fields[0]) ^ (uint64_t)(of->lens[at] - fields[rows]));
    row.key_0 = (uint32_t)key;
    row.key_1 = (uint32_t)(key >> 32);
    row.inverse_temperature = (float)floats[0];
    float bound = (float)floats[2];
    if (kind == 2 && top_k > 0) return draw_of_top_k(row, top_k < row.vocab ? top_k : row.vocab, floats[1], bound);
    if (kind == 2 && floats[1] < 1.0) return draw_of_top_p(row, floats[1], bound);
    return draw_from_all(row, kind == 2 ? bound : -__builtin_inff());
}

int64_t room_of(int32_t vocab) {
    int64_t blocks = (vocab + BLOCK - 1) / BLOCK;
    return vocab * (int64_t)sizeof(Candidate) + (2 * blocks * (int64_t)sizeof(float) + 63) / 64 * 64;
}

template <class T> void sample_rows(const Sampling *of, int32_t *tokens, char *memory) {
#pragma omp parallel for num_threads(of->threads) if (of->threads > 1)
    for (int at = 0; at < of->rows; at++) {
        char *own = memory + room_of(of->vocab) * omp_get_thread_num();
        Row<T> row;
        row.logits = (const T *)of->logits + at * of->stride;
        row.vocab = of->vocab;
        row.num_blocks = (of->vocab + BLOCK - 1) / BLOCK;
        row.candidates = (Candidate *)own;
        row.maxima = (float *)(own + of->vocab * sizeof(Candidate));
        row.sorted = row.maxima + row.num_blocks;
        tokens[at] = sample(row, of, at);
    }
}

}  // namespace

extern "C" {

int64_t NAMED(sampling_room, ISA)(int32_t vocab, int32_t threads) { return room_of(vocab) * threads; }

void NAMED(sample, ISA)(const Sampling *of, int32_t *tokens, char *memory) {
    if (of->is_bf16)
        sample_rows<bf16>(of, tokens, memory);
    else
        sample_rows<float>(of, tokens, memory);
}
}
