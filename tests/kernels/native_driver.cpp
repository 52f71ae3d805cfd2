// Holds the compiled kernels of every instruction set that this processor has against plain loops: for processors on which
// torch does not run. Prints the sets, or what is wrong; arguments name those that are tried, else all are.
#include "kernels.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <string>
#include <vector>

using std::vector;

static int failures = 0;

struct Random {
    uint32_t state;
    float next() {  // of a normal distribution, nearly
        float sum = 0;
        for (int i = 0; i < 4; i++) {
            state = state * 1664525u + 1013904223u;
            sum += (float)(state >> 8) / (1 << 24) - 0.5f;
        }
        return sum * 1.7f;
    }
    int below(int n) {
        state = state * 1664525u + 1013904223u;
        return (int)((state >> 8) % (uint32_t)n);
    }
    vector<float> many(int64_t n, float size = 1) {
        vector<float> x(n);
        for (float &one : x) one = next() * size;
        return x;
    }
};

static uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static float from_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static uint16_t to_half(float x) {  // of numbers that are exact in it
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x == 0) return 0;
    return (uint16_t)((bits >> 16 & 0x8000) | ((int)(bits >> 23 & 255) - 112) << 10 | (bits >> 13 & 1023));
}

// Numbers in either type; `plain` are those that are meant.
struct Floats {
    vector<float> plain;
    vector<uint16_t> shorts;
    bool is_bf16;
    Floats(vector<float> x, bool is_bf16) : plain(x), shorts(x.size()), is_bf16(is_bf16) {
        for (size_t i = 0; i < x.size(); i++) {
            shorts[i] = to_bf16(x[i]);
            if (is_bf16) plain[i] = from_bf16(shorts[i]);
        }
    }
    void *at(int64_t i = 0) { return is_bf16 ? (void *)(shorts.data() + i) : (void *)(plain.data() + i); }
    float read(int64_t i) const { return is_bf16 ? from_bf16(shorts[i]) : plain[i]; }
};

static void compare(const InstructionSet *set, const std::string &what, const Floats &found, const vector<double> &expected,
                    double tolerance) {
    double most = 1e-6, worst = 0;
    for (double one : expected) most = fmax(most, fabs(one));
    for (size_t i = 0; i < expected.size(); i++) {
        double off = fabs(found.read(i) - expected[i]);
        if (!(off <= worst)) worst = off;
    }
    if (worst <= tolerance * most) return;
    printf("%s: %s is off by %g of %g\n", set->name, what.c_str(), worst, most);
    failures++;
}

// Products in few bits add up the same integers in the same order, be it by tiles or by vectors.
static void compare_to_tiles(const InstructionSet *set, const Floats &found) {
    static vector<float> by_tiles;
    static size_t nth = 0;
    bool tiles = !strcmp(set->name, "avx512_amx"), vectors = !strcmp(set->name, "avx512_bf16") && !by_tiles.empty();
    int others = 0;
    for (size_t i = 0; i < found.plain.size(); i++)
        if (tiles)
            by_tiles.push_back(found.read(i));
        else if (vectors)
            others += by_tiles[nth++] != found.read(i);
    if (!others) return;
    printf("%s: %d numbers are others than by tiles\n", set->name, others);
    failures++;
}

// A matrix of random numbers, laid out as quantized.h says, and what it stands for.
struct Matrix {
    Packed packed;
    vector<uint8_t> bytes, table;
    vector<float> row_scales;
    vector<double> values;

    Matrix(Random &random, int outputs, int inputs, int bits, int group, int zeros, bool coded, int shared = 0)
        : row_scales(outputs), values((int64_t)outputs * inputs) {
        if (coded)
            for (int i = 0; i < 16; i++) table.push_back((uint8_t)(random.below(255) + 1));
        for (float &one : row_scales) one = 0.01f * (float)(1 + random.below(9));
        for (int first = 0; first < outputs; first += 64)
            for (int at = 0; at < inputs; at += shared ? shared : group) {
                if (shared)
                    add_shared(random, first, at, outputs, inputs, bits, group, zeros, shared);
                else
                    add_group(random, first, at, outputs, inputs, bits, group, zeros);
            }
        int block = shared ? shared : group % 32 ? 16 : 32;
        packed = {bytes.data(), row_scales.data(), coded ? table.data() : nullptr, inputs, outputs, bits, group, zeros, block, shared};
    }

    void add_half(float x) {
        uint16_t half = to_half(x);
        bytes.push_back((uint8_t)half), bytes.push_back((uint8_t)(half >> 8));
    }

    // Groups whose scales, and offsets where there are any, are small numbers times what they share.
    void add_shared(Random &random, int first, int at, int outputs, int inputs, int bits, int group, int zeros, int shared) {
        const int parts = zeros == ZEROS_OFFSETS ? 2 : 1, groups = shared / group;
        vector<float> halves(parts * 64);
        vector<int> small(parts * groups * 64);
        for (float &one : halves) add_half(one = (float)(random.below(15) - 7) / 64);
        for (int &one : small) bytes.push_back((uint8_t)(int8_t)(one = random.below(255) - 127));
        vector<int> numbers(64 * shared);
        for (int &one : numbers) one = random.below(1 << bits);
        for (int i = 0; i < shared; i += 16)
            for (int part = 0; part < (bits == 6 ? 3 : 2); part++)
                for (int o = 0; o < 64; o++)
                    for (int k = 0; k < 4; k++) {
                        const int *of = &numbers[o * shared + i + k];
                        bytes.push_back((uint8_t)(part == 2 ? of[0] >> 4 | of[4] >> 4 << 2 | of[8] >> 4 << 4 | of[12] >> 4 << 6
                                                            : (of[8 * part] & 15) | (of[8 * part + 4] & 15) << 4));
                    }
        for (int o = 0; o < 64 && first + o < outputs; o++)
            for (int i = 0; i < shared; i++) {
                int g = i / group, number = numbers[o * shared + i] - (parts == 1 ? 1 << (bits - 1) : 0);
                double value = number * (double)halves[o] * small[g * 64 + o];
                if (parts == 2) value -= (double)halves[64 + o] * small[(groups + g) * 64 + o];
                values[(int64_t)(first + o) * inputs + at + i] = value * row_scales[first + o];
            }
    }

    void add_group(Random &random, int first, int at, int outputs, int inputs, int bits, int group, int zeros) {
        float scales[64], offsets[64];
        int points[64];
        for (int o = 0; o < 64; o++) {
            bool is_there = first + o < outputs;
            scales[o] = is_there ? (float)(random.below(15) - 7) / 8 : 0;
            offsets[o] = is_there ? (float)random.below(9) / 4 : 0;
            points[o] = is_there ? random.below(1 << bits) : 0;
        }
        auto add_halves = [&](const float *x) {
            for (int o = 0; o < 64; o++) add_half(x[o]);
        };
        add_halves(scales);
        if (zeros == ZEROS_POINTS) bytes.insert(bytes.end(), points, points + 64);
        if (zeros == ZEROS_OFFSETS) add_halves(offsets);
        int step = bits == 4 ? 8 : 4;
        for (int i = 0; i < group; i += step)
            for (int o = 0; o < 64; o++)
                for (int k = 0; k < 4; k++) {
                    int low = random.below(1 << bits), high = bits == 4 ? random.below(16) : 0;
                    bytes.push_back((uint8_t)(low | high << 4));
                    if (first + o >= outputs) continue;
                    for (int half = 0; half < (bits == 4 ? 2 : 1); half++) {
                        int number = half ? high : low;
                        double value = zeros == ZEROS_OFFSETS ? number * (double)scales[o] - offsets[o]
                                       : table.empty()
                                           ? (number - (zeros == ZEROS_POINTS ? points[o] : 1 << (bits - 1))) * (double)scales[o]
                                           : (table[number] - 128) * (double)scales[o];
                        values[(int64_t)(first + o) * inputs + at + i + 4 * half + k] = value * row_scales[first + o];
                    }
                }
    }

    // Of a row that is rounded as kernels do.
    vector<double> times(const float *x) const {
        vector<double> rounded(packed.inputs), out(packed.outputs);
        for (int at = 0; at < packed.inputs; at += packed.input_block) {
            float most = 0;
            for (int i = 0; i < packed.input_block; i++) most = fmaxf(most, fabsf(x[at + i]));
            float by = fmaxf(most / 127.0f, 1e-12f);
            for (int i = 0; i < packed.input_block; i++) rounded[at + i] = (double)nearbyintf(x[at + i] / by) * by;
        }
        for (int o = 0; o < packed.outputs; o++)
            for (int i = 0; i < packed.inputs; i++) out[o] += values[(int64_t)o * packed.inputs + i] * rounded[i];
        return out;
    }
};

static void try_products(const InstructionSet *set, bool is_bf16) {
    struct { int bits, group, zeros; bool coded; int shared; } forms[] = {
        {4, 32, ZEROS_MIDDLE, false}, {4, 64, ZEROS_POINTS, false}, {4, 32, ZEROS_OFFSETS, false}, {8, 16, ZEROS_MIDDLE, false},
        {8, 32, ZEROS_POINTS, false}, {4, 16, ZEROS_MIDDLE, true},
        {4, 32, ZEROS_OFFSETS, false, 64}, {4, 16, ZEROS_MIDDLE, false, 128}, {6, 32, ZEROS_OFFSETS, false, 128},
        {6, 16, ZEROS_MIDDLE, false, 64},
    };
    for (auto &form : forms)
        for (int rows : {1, 2, 3, 5, 6, 13, 55}) {
            Random random = {(uint32_t)rows};
            const int outputs = 70, inputs = 128;
            Matrix matrix(random, outputs, inputs, form.bits, form.group, form.zeros, form.coded, form.shared);
            Floats x(random.many(rows * inputs), is_bf16), other(random.many(rows * outputs), is_bf16);
            Floats bias(random.many(outputs), is_bf16), out(vector<float>(rows * outputs), is_bf16);
            Product product = {x.at(), out.at(), other.at(), bias.at(), nullptr, inputs, outputs, outputs, rows, THEN_ADD, is_bf16};
            vector<char> memory(set->product_room(&matrix.packed, rows));
            set->run_product(&matrix.packed, &product, memory.data(), 2);
            vector<double> expected;
            for (int r = 0; r < rows; r++) {
                vector<double> sums = matrix.times(x.plain.data() + r * inputs);
                for (int o = 0; o < outputs; o++) expected.push_back(sums[o] + bias.plain[o] + other.plain[r * outputs + o]);
            }
            std::string name = "a product in " + std::to_string(form.bits) + " bits, " + (form.coded ? "coded" : "") +
                               " zeros " + std::to_string(form.zeros) + ", rows " + std::to_string(rows);
            compare(set, name, out, expected, is_bf16 ? 1e-2 : 2e-5);
            compare_to_tiles(set, out);
        }
}

static double silu(double x) { return x / (1 + exp(-x)); }

struct Routes {
    vector<int32_t> experts;
    vector<float> weights;
    Routes(Random &random, int rows, int top_k, int num_experts) : weights(random.many(rows * top_k)) {
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < top_k; k++) experts.push_back(r % 4 == 3 ? -1 : (random.below(num_experts - 1) + k) % num_experts);
    }
};

static void try_rounded_experts(const InstructionSet *set, bool is_bf16) {
    const int count = 4, hidden = 96, width = 64, rows = 60, top_k = 2;
    Random random = {7};
    vector<Matrix> gates, ups, downs;
    vector<Packed> gate, up, down;
    for (int e = 0; e < count; e++) {
        gates.emplace_back(random, width, hidden, 4, 32, ZEROS_MIDDLE, true);
        ups.emplace_back(random, width, hidden, 4, 32, ZEROS_MIDDLE, true);
        downs.emplace_back(random, hidden, width, 8, 32, ZEROS_POINTS, false);
    }
    for (int e = 0; e < count; e++)
        gate.push_back(gates[e].packed), up.push_back(ups[e].packed), down.push_back(downs[e].packed);
    Routes routes(random, rows, top_k, count);
    Floats x(random.many(rows * hidden, 0.1f), is_bf16), out(vector<float>(rows * hidden), is_bf16);
    vector<float> up_bias = random.many(count * 2 * width), down_bias = random.many(count * hidden);
    Experts layer = {nullptr, nullptr, up_bias.data(), down_bias.data(), count, hidden, width, GATE_SILU, is_bf16};
    QuantizedExperts experts = {layer, gate.data(), up.data(), down.data(), 0};
    Routed routed = {x.at(), hidden, out.at(), routes.experts.data(), routes.weights.data(), rows, top_k};
    vector<char> memory(set->quantized_experts_room(&experts, rows * top_k));
    set->run_quantized_experts(&experts, &routed, memory.data(), 2);
    vector<double> expected(rows * hidden);
    for (int p = 0; p < rows * top_k; p++) {
        int e = routes.experts[p], r = p / top_k;
        if (e < 0) continue;
        vector<double> g = gates[e].times(x.plain.data() + r * hidden), u = ups[e].times(x.plain.data() + r * hidden);
        vector<float> gated;
        for (int i = 0; i < width; i++)
            gated.push_back((float)(silu(g[i] + up_bias[e * 2 * width + i]) * (u[i] + up_bias[e * 2 * width + width + i])));
        vector<double> d = downs[e].times(Floats(gated, is_bf16).plain.data());
        for (int i = 0; i < hidden; i++) expected[r * hidden + i] += routes.weights[p] * (d[i] + down_bias[e * hidden + i]);
    }
    compare(set, "experts in few bits", out, expected, 0.02);  // some are rounded the other way in between
    compare_to_tiles(set, out);
}

// A matrix as products read it.
static vector<char> laid_out(const InstructionSet *set, Floats &weights, int outputs, int inputs) {
    Dense matrix = {nullptr, inputs, outputs, weights.is_bf16};
    vector<char> packed(set->dense_bytes(&matrix));
    set->lay_out_dense(&matrix, weights.at(), inputs, packed.data(), 2);
    return packed;
}

static void try_dense(const InstructionSet *set, bool is_bf16) {
    const int outputs = 70, inputs = 131;
    for (int rows : {1, 2, 3, 4, 5, 6, 8, 13}) {
        Random random = {(uint32_t)rows};
        Floats weights(random.many(outputs * inputs), is_bf16), x(random.many(rows * inputs), is_bf16);
        Floats bias(random.many(outputs), is_bf16), out(vector<float>(2 * rows * outputs), is_bf16);
        vector<char> packed = laid_out(set, weights, outputs, inputs);
        Dense matrix = {packed.data(), inputs, outputs, is_bf16}, twice[] = {matrix, matrix};
        Product product = {x.at(), out.at(), nullptr, bias.at(), nullptr, inputs, outputs, 0, rows, THEN_NOTHING, is_bf16};
        vector<char> memory(set->dense_room(&matrix, 2 * rows));
        set->run_dense(twice, 2, &product, 0, rows * outputs, memory.data(), 2);
        vector<double> expected;
        for (int r = 0; r < 2 * rows; r++)
            for (int o = 0; o < outputs; o++) {
                double sum = bias.plain[o];
                for (int i = 0; i < inputs; i++) sum += (double)x.plain[r % rows * inputs + i] * weights.plain[o * inputs + i];
                expected.push_back(sum);
            }
        compare(set, "two products in floats, rows " + std::to_string(rows), out, expected, is_bf16 ? 1e-2 : 2e-5);
    }
}

static void try_experts(const InstructionSet *set, bool is_bf16, int rows) {
    const int count = 3, hidden = 80, width = 96, top_k = 2;
    Random random = {3};
    vector<Floats> plain;  // of each expert gate, up and down
    vector<vector<char>> packed;
    for (int e = 0; e < 3 * count; e++) {
        int outputs = e % 3 == 2 ? hidden : width, inputs = e % 3 == 2 ? width : hidden;
        plain.emplace_back(random.many(outputs * inputs, 0.1f), is_bf16);
        packed.push_back(laid_out(set, plain.back(), outputs, inputs));
    }
    vector<const void *> gate_up, down;
    for (int e = 0; e < count; e++) {
        vector<char> &gate = packed[3 * e], &up = packed[3 * e + 1];
        gate.insert(gate.end(), up.begin(), up.end());
        gate_up.push_back(gate.data()), down.push_back(packed[3 * e + 2].data());
    }
    Routes routes(random, rows, top_k, count);
    Floats x(random.many(rows * hidden), is_bf16), out(vector<float>(rows * hidden), is_bf16);
    Experts experts = {gate_up.data(), down.data(), nullptr, nullptr, count, hidden, width, GATE_SILU, is_bf16};
    Routed routed = {x.at(), hidden, out.at(), routes.experts.data(), routes.weights.data(), rows, top_k};
    vector<char> memory(set->experts_room(&experts, rows * top_k));
    set->run_experts(&experts, &routed, memory.data(), 2);
    vector<double> expected(rows * hidden);
    for (int p = 0; p < rows * top_k; p++) {
        int e = routes.experts[p], r = p / top_k;
        if (e < 0) continue;
        vector<float> gated(width);
        for (int o = 0; o < width; o++) {
            double g = 0, u = 0;
            for (int i = 0; i < hidden; i++) {
                g += (double)plain[3 * e].plain[o * hidden + i] * x.plain[r * hidden + i];
                u += (double)plain[3 * e + 1].plain[o * hidden + i] * x.plain[r * hidden + i];
            }
            gated[o] = (float)(silu(g) * u);
        }
        Floats between(gated, is_bf16);
        for (int o = 0; o < hidden; o++)
            for (int i = 0; i < width; i++)
                expected[r * hidden + o] += (double)routes.weights[p] * plain[3 * e + 2].plain[o * width + i] * between.plain[i];
    }
    compare(set, "experts", out, expected, is_bf16 ? 2e-2 : 2e-5);
}

static float from_eight(int code, int fraction, int bias) {
    int exponent = (code & 127) >> fraction;
    float size = ldexpf((code & ((1 << fraction) - 1)) + (exponent ? 1 << fraction : 0), (exponent ? exponent : 1) - bias - fraction);
    return code & 128 ? -size : size;
}

static void try_attention(const InstructionSet *set, bool is_bf16, int held, int head_dim, int window, float softcap, bool sinks,
                          int group) {
    const int kv_heads = 2, heads = kv_heads * group, block_size = 16, num_blocks = 70;
    Random random = {(uint32_t)head_dim};
    int64_t head_stride = block_size * head_dim, block_stride = 2 * kv_heads * head_stride;
    Floats pages(random.many(num_blocks * block_stride), is_bf16);
    vector<uint8_t> codes(pages.plain.size());
    if (held != PAGES_PLAIN)
        for (size_t i = 0; i < codes.size(); i++) {  // up to 2 or so
            codes[i] = (uint8_t)(random.below(66) | random.below(2) << 7);
            pages.plain[i] = from_eight(codes[i], held == PAGES_E4M3 ? 3 : 2, held == PAGES_E4M3 ? 7 : 15) / 2;
        }
    auto pages_at = [&](int64_t i) { return held == PAGES_PLAIN ? pages.at(i) : (void *)(codes.data() + i); };
    float of_codes = held == PAGES_PLAIN ? 1 : 0.5f;
    vector<int32_t> starts = {0, 1, 40}, lens = {700, 75}, tables;
    for (int i = 0; i < 2 * num_blocks; i++) tables.push_back(i * 29 % num_blocks);
    vector<float> sink = random.many(heads), slopes = random.many(heads, 0.01f);
    float scale = 1 / sqrtf((float)head_dim);
    Layer layer = {pages_at(0), pages_at(kv_heads * head_stride), block_stride, head_stride, kv_heads, group, head_dim, block_size,
                   is_bf16, window, 0, held, of_codes, of_codes, scale, softcap, sinks ? sink.data() : nullptr, sinks ? slopes.data() : nullptr};
    Step step = {starts.data(), lens.data(), tables.data(), num_blocks, 2};
    PlanSize size = plan_attention(&step, group, kv_heads, window, 0, 2, nullptr);
    vector<Task> tasks(size.tasks);
    int32_t part = set->part(&layer, size.queries);
    vector<float> partials(size.slots * kv_heads * part);
    vector<int32_t> counters(size.tiles * kv_heads);
    Plan plan = {tasks.data(), 0, 0, partials.data(), counters.data(), part};
    plan_attention(&step, group, kv_heads, window, 0, 2, &plan);
    Floats q(random.many(starts[2] * heads * head_dim), is_bf16), out(vector<float>(q.plain.size()), is_bf16);
    vector<uint32_t> memory(set->room(&layer) * size.threads);
    set->attend(&layer, &step, &plan, q.at(), heads * head_dim, head_dim, out.at(), memory.data(), set->room(&layer));
    vector<double> expected(q.plain.size());
    for (int s = 0; s < 2; s++)
        for (int t = starts[s]; t < starts[s + 1]; t++)
            for (int h = 0; h < heads; h++) {
                int position = lens[s] - starts[s + 1] + t, first = window && position >= window ? position - window + 1 : 0;
                vector<double> weights;
                double most = sinks ? sink[h] : -1e30, total = 0;
                auto key = [&](int k) {
                    return tables[s * num_blocks + k / block_size] * block_stride + h / group * head_stride + k % block_size * head_dim;
                };
                for (int k = first; k <= position; k++) {
                    double score = 0;
                    for (int i = 0; i < head_dim; i++)
                        score += (double)q.plain[((int64_t)t * heads + h) * head_dim + i] * pages.plain[key(k) + i];
                    score *= scale;
                    if (softcap) score = softcap * tanh(score / softcap);
                    if (sinks) score -= slopes[h] * (position - k);
                    weights.push_back(score), most = fmax(most, score);
                }
                if (sinks) total = exp(sink[h] - most);
                for (double &one : weights) total += one = exp(one - most);
                for (int k = first; k <= position; k++)
                    for (int i = 0; i < head_dim; i++)
                        expected[((int64_t)t * heads + h) * head_dim + i] +=
                            weights[k - first] / total * pages.plain[key(k) + kv_heads * head_stride + i];
            }
    compare(set, "attention, " + std::to_string(group) + " heads of " + std::to_string(head_dim) + ", pages of kind " + std::to_string(held), out, expected, is_bf16 ? 2e-2 : 5e-5);
}

static void try_layers(const InstructionSet *set, bool is_bf16) {
    const int tokens = 5, heads = 3, width = 36, rotary = 20;
    for (int neighbours = 0; neighbours < 2; neighbours++) {
        Random random = {5};
        Floats x(random.many(tokens * heads * width), is_bf16), out(vector<float>(x.plain.size()), is_bf16);
        vector<float> weight = random.many(width), table = random.many(tokens * rotary);
        Rows rows = {heads * width, width, tokens, heads, width, 0, is_bf16, 2};
        set->norm(&rows, x.at(), out.at(), weight.data(), 1e-6f);
        vector<double> normed, turned;
        for (int r = 0; r < tokens * heads; r++) {
            double sum = 0;
            for (int i = 0; i < width; i++) sum += (double)x.plain[r * width + i] * x.plain[r * width + i];
            for (int i = 0; i < width; i++) normed.push_back(x.plain[r * width + i] / sqrt(sum / width + 1e-6) * weight[i]);
        }
        compare(set, "a norm", out, normed, is_bf16 ? 1e-2 : 1e-5);
        Rotation how = {table.data(), weight.data(), weight.data(), 1e-6f, 2, rotary, neighbours};
        set->rotate(&rows, x.at(), &how);
        turned = normed;
        for (int r = 0; r < tokens * heads; r++)
            for (int i = 0; i < rotary / 2; i++) {
                int a = r * width + (neighbours ? 2 * i : i), b = neighbours ? a + 1 : a + rotary / 2;
                double cos = table[r / heads * rotary + i], sin = table[r / heads * rotary + rotary / 2 + i];
                turned[a] = normed[a] * cos - normed[b] * sin, turned[b] = normed[b] * cos + normed[a] * sin;
            }
        compare(set, "a rotation", x, turned, is_bf16 ? 1e-2 : 1e-5);
    }
}

int main(int count, char **names) {
    for (int nth = 0; const InstructionSet *set = instruction_set(nth); nth++) {
        bool wanted = count == 1;
        for (int i = 1; i < count; i++) wanted |= !strcmp(names[i], set->name);
        if (!wanted) continue;
        for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
            try_products(set, is_bf16);
            try_dense(set, is_bf16);
            try_rounded_experts(set, is_bf16);
            for (int rows : {9, 90}) try_experts(set, is_bf16, rows);
            for (int held : {PAGES_PLAIN, PAGES_E4M3, PAGES_E5M2})
                for (int group : {1, 2, 3, 4, 8}) {
                    try_attention(set, is_bf16, held, 64, 0, 0, false, group);
                    try_attention(set, is_bf16, held, 40, 100, 5, true, group);
                }
            try_attention(set, is_bf16, PAGES_PLAIN, 576, 0, 0, false, 16);  // as wide as latents, and of as many heads
            try_attention(set, is_bf16, PAGES_PLAIN, 40, 0, 0, false, 100);
            try_layers(set, is_bf16);
        }
        printf("%s ", set->name);
    }
    printf("\n");
    return failures != 0;
}
