// What Python sees of the compiled kernels: plain C, so that one library serves every Python and every torch.
//
// Shapes: T tokens of a step, S sequences, B blocks of a table, N query heads, K key heads, G = N / K, H head size.
// Strides count elements. Nothing here allocates or keeps anything between calls.
#pragma once
#include <stdint.h>

// A function that is there once for every instruction set.
#define NAMED_(name, isa) name##_##isa
#define NAMED(name, isa) NAMED_(name, isa)

extern "C" {

// What pages hold: numbers of the queries' type, or codes of 8 bits of numbers over a scale.
enum { PAGES_PLAIN, PAGES_E4M3, PAGES_E5M2 };

// How a layer attends, and where its pages are: keys and values [num_blocks, K, block_size, H], equal strides, the last
// two axes contiguous; the same pages where a latent is both.
struct Layer {
    const void *keys, *values;
    int64_t block_stride, head_stride;
    int32_t kv_heads, group, head_dim, block_size;
    int32_t is_bf16;        // else float32: queries, and keys and values as they are written
    int32_t window, chunk;  // 0: none
    int32_t pages;
    float k_scale, v_scale;  // of codes; else 1
    float scale, softcap;    // 0: none
    const float *sinks, *slopes;  // [N] or null
};

// Ragged queries: those of sequence s are tokens starts[s] to starts[s + 1], its last positions.
struct Step {
    const int32_t *starts, *seq_lens, *tables;
    int64_t table_stride;
    int32_t num_seqs;
};

// Some queries of a sequence against some of its keys, for each key head. A tile whose keys are cut into several tasks
// is put together by whichever of them ends last.
struct Task {
    int32_t seq, query, num_queries;  // `query` counts within the sequence's new tokens
    int32_t key_begin, key_end;
    int32_t slot;                   // number of its partial result; -1: it is the whole tile
    int32_t first_slot, num_parts;  // of the tile
    int32_t tile;                   // number of the tile among those that are cut
};

struct Plan {
    Task *tasks;
    int32_t num_tasks, threads;
    float *partials;    // `part` of them for each slot and key head
    int32_t *counters;  // zeros, for each tile that is cut and key head; left as zeros
    int64_t part;
};

// [T, heads, width], the last axis contiguous; weights of head h are `weight_stride` times h further on.
struct Rows {
    int64_t token_stride, head_stride;
    int32_t tokens, heads, width, weight_stride, is_bf16, threads;
};

// Of queries and keys: a norm of each head where there is one, then the turn of its first `rotary_dim` numbers.
struct Rotation {
    const float *cos_sin;  // [T, rotary_dim]: cosines, then sines
    const float *q_norm, *k_norm;  // [H] or null
    float eps;
    int32_t num_heads, rotary_dim;
    int32_t neighbours;  // they turn against each other, not halves
};

struct PlanSize {
    int32_t tasks, slots, tiles;
    int32_t threads;  // that are worth their waking
    int32_t queries;  // most of a tile that is cut
};

// How gate and up are joined; see `Gate` in expert_gates.py.
enum { GATE_SILU, GATE_GELU_TANH, GATE_RELU, GATE_SWIGLUOAI };

// A layer of E experts of width W over rows of D numbers. Matrices are laid out as `Dense`: gate [W, D], up [W, D] behind
// it, and down [D, W]. D and W are multiples of 16.
struct Experts {
    const void *const *gate_up, *const *down;  // of each expert; null where nothing goes
    const float *gate_up_bias, *down_bias;     // [E, 2 W] and [E, D], or null
    int32_t num_experts, hidden, width, gate;
    int32_t is_bf16;  // else float32, matrices and rows alike
};

// Where a group's numbers have their zero: in the middle of all; at a number of a byte for each output; or their scaled
// values are less an offset, of 16 bits.
enum { ZEROS_MIDDLE, ZEROS_POINTS, ZEROS_OFFSETS };

// A matrix [O, I] in numbers of a few bits; see quantized.h. `group`, of inputs that share a scale, and `input_block`,
// which are rounded together, are multiples of 16; blocks divide groups, and groups the inputs.
struct Packed {
    const uint8_t *packed;
    const float *row_scales;  // [O], besides those of groups
    const uint8_t *table;     // [16], what numbers of 4 bits stand for, 128 being zero; null: themselves
    int32_t inputs, outputs, bits, group, zeros, input_block;
    int32_t shared;  // inputs whose groups share a scale of 16 bits and have their own in 8, also `input_block`; 0: in 16
};

// A matrix [O, I] in floats, or in bfloat16, that lay_out_dense has laid out; rows of products are of the same type.
struct Dense {
    const void *packed;
    int32_t inputs, outputs, is_bf16;
};

// GGUF's kinds of blocks, by the numbers that it has for them.
enum {
    BLOCKS_Q4_0 = 2,
    BLOCKS_Q4_1 = 3,
    BLOCKS_Q5_0 = 6,
    BLOCKS_Q5_1 = 7,
    BLOCKS_Q8_0 = 8,
    BLOCKS_Q4_K = 12,
    BLOCKS_Q5_K = 13,
    BLOCKS_Q6_K = 14
};

// A matrix [O, I] in such blocks, each row contiguous.
struct Blocks {
    const uint8_t *blocks;
    int64_t row_bytes;
    int32_t inputs, outputs, kind;
};

// What happens to x W^T + bias: nothing, + or * `other` [T, O], or the activation GATE_... more.
enum { THEN_NOTHING, THEN_ADD, THEN_MULTIPLY, THEN_ACTIVATE };

// Of T rows with such a matrix, floats all of one type. `other` and `out` may be one.
struct Product {
    const void *x;  // [T, I]
    void *out;      // [T, O]
    const void *other;
    const void *bias;     // [O] or null
    const float *scales;  // [T], by which rows are rounded, or null: blocks have their own
    int64_t x_stride, out_stride, other_stride;
    int32_t rows, then, is_bf16;
};

// Such a layer in numbers of a few bits. All experts' matrices of a place are alike, those of gate and up, too.
struct QuantizedExperts {
    Experts layer;                    // `gate_up` and `down` are null
    const Packed *gate, *up, *down;  // [E], of [W, D], [W, D] and [D, W]; those that nothing goes to need no memory
    int32_t rounds_rows;             // each row of inputs as one, else by `input_block`
};

// What R rows of logits over a vocabulary ask for: `fields` of SamplingRows.
struct Sampling {
    const void *logits;  // [R, vocab], the last axis contiguous
    int64_t stride;
    const int64_t *fields;  // [7, R]
    const int32_t *lens;    // [R]
    int32_t rows, vocab, is_bf16, threads;
};

// R rows, and the K experts of each.
struct Routed {
    const void *x;  // [R, D]
    int64_t x_stride;
    void *out;               // [R, D]
    const int32_t *experts;  // [R, K]; below 0: nowhere
    const float *weights;    // [R, K]
    int32_t num_rows, top_k;
};

const int OWN_ROOM = 1 << 15;  // bytes of products that take memory of their own where they are given none

// The kernels for one instruction set; memory is the caller's, of so many bytes, attention's in units of four.
struct InstructionSet {
    const char *name;
    int32_t (*room)(const Layer *);
    int32_t (*part)(const Layer *, int32_t);  // numbers of a result of so many queries
    void (*attend)(const Layer *, const Step *, const Plan *, const void *, int64_t, int64_t, void *, uint32_t *,
                   int64_t);
    int64_t (*experts_room)(const Experts *, int32_t);
    void (*run_experts)(const Experts *, const Routed *, char *, int32_t);
    int64_t (*quantized_experts_room)(const QuantizedExperts *, int32_t);
    void (*run_quantized_experts)(const QuantizedExperts *, const Routed *, char *, int32_t);
    int64_t (*product_room)(const Packed *, int32_t);
    void (*run_product)(const Packed *, const Product *, char *, int32_t);
    int64_t (*dense_bytes)(const Dense *);
    void (*lay_out_dense)(const Dense *, const void *, int64_t, void *, int32_t);
    int64_t (*dense_room)(const Dense *, int32_t);
    // So many matrices of one shape, each with inputs and outputs of its own, which lie so far behind those of the one before;
    // memory is that of as many times the rows.
    void (*run_dense)(const Dense *, int32_t, const Product *, int64_t, int64_t, char *, int32_t);
    int64_t (*sampling_room)(int32_t, int32_t);
    void (*sample)(const Sampling *, int32_t *, char *);
    void (*norm)(const Rows *, const void *, void *, const float *, float);
    void (*rotate)(const Rows *, void *, const Rotation *);
    // Keys and values [T, K, H], their strides of a token and a head in turn, into their slots, block * block_size + offset;
    // a negative slot is nowhere.
    void (*write_pages)(const Layer *, const void *, const void *, int64_t, int64_t, int64_t, int64_t, const int64_t *, int32_t,
                        int32_t);
    void (*decode_blocks)(int32_t, const uint8_t *, int64_t, void *, int32_t);
    int32_t (*lay_out_blocks)(const Blocks *, uint8_t *, float *, int32_t);
};

// The best set first; null where there are no more.
const InstructionSet *instruction_set(int32_t nth);
PlanSize plan_attention(const Step *step, int32_t group, int32_t kv_heads, int32_t window, int32_t chunk,
                        int32_t threads, Plan *plan);

// How a row chooses `top_k` of its experts. Groups of neighbours are ranked by the sum of their `best_of_group` best.
enum { SCORING_SOFTMAX, SCORING_SIGMOID };
const int MOST_EXPERTS = 1024;
struct Routing {
    const float *correction;  // [E], added to scores for the choice alone, or null
    int32_t num_experts, top_k, scoring, renormalize, num_groups, top_groups, best_of_group;
    float scale;  // of weights
};
// Logits [T, E]; weights and experts [T, K].
void route(const Routing *how, const void *logits, int64_t stride, int32_t rows, float *weights, int32_t *experts,
           int32_t is_bf16, int32_t threads);

// A call of one of these functions, or of a set's: its arguments of each sort in their order.
enum {
    CALL_PLAN_ATTENTION,
    CALL_WRITE_PAGES,
    CALL_ATTEND,
    CALL_RUN_EXPERTS,
    CALL_RUN_QUANTIZED_EXPERTS,
    CALL_RUN_PRODUCT,
    CALL_RUN_DENSE,
    CALL_NORM,
    CALL_ROTATE,
    CALL_ROUTE,
    CALL_DECODE_BLOCKS
};
struct Call {
    int32_t function;
    int32_t counts[5];
    float number;
    int64_t strides[4];
    void *at[6];
};
void run_calls(const InstructionSet *set, const Call *calls, int32_t count);
}

const int KEYS_AT_ONCE = 128;  // that a tile looks at
const int TILE_ROWS = 96;      // queries times heads of a tile, or all heads of one query

// Rows of few queries that are looked at together, of several heads: a block's heads lie beside each other, and long
// stretches of memory come faster.
const int ROWS_TOGETHER = 16;

static inline int heads_together(int group, int kv_heads) {
    int most = group < ROWS_TOGETHER ? ROWS_TOGETHER / group : 1;
    while (kv_heads % most) most--;
    return most;
}

static inline int tile_queries(int group) { return group >= TILE_ROWS ? 1 : TILE_ROWS / group; }

static inline int first_seen(int window, int chunk, int position) {
    int first = 0;
    if (window && position - window + 1 > first) first = position - window + 1;
    if (chunk && position >= 0 && position / chunk * chunk > first) first = position / chunk * chunk;
    return first;
}
