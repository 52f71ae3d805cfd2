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

// How a layer attends, and where its pages are: keys and values [num_blocks, K, block_size, H], equal strides, the last
// two axes contiguous.
struct Layer {
    const void *keys, *values;
    int64_t block_stride, head_stride;
    int32_t kv_heads, group, head_dim, block_size;
    int32_t is_bf16;        // else float32, pages and queries alike
    int32_t window, chunk;  // 0: none
    float scale, softcap;   // 0: none
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
    const Task *tasks;
    int32_t num_tasks;
    float *partials;    // see `part`, for each slot and key head
    int32_t *counters;  // zeros, for each tile that is cut and key head; left as zeros
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
};

// How gate and up are joined; see `Gate` in expert_gates.py.
enum { GATE_SILU, GATE_GELU_TANH, GATE_RELU, GATE_SWIGLUOAI };

// A layer of E experts of width W over rows of D numbers. Matrices are packed: gate [W, D], up [W, D] behind it, and down
// [D, W], each in blocks of 64 outputs (the last may be narrower), of a block unit after unit of the inputs: a float, or
// two neighbours in bfloat16. D and W are multiples of 16.
struct Experts {
    const void *const *gate_up, *const *down;  // of each expert; null where nothing goes
    const float *gate_up_bias, *down_bias;     // [E, 2 W] and [E, D], or null
    int32_t num_experts, hidden, width, gate;
    int32_t is_bf16;  // else float32, matrices and rows alike; only where the instruction set multiplies it
};

// Where a group's numbers have their zero: in the middle of all; at a number of a byte for each output; or their scaled
// values are less an offset, of 16 bits.
enum { ZEROS_MIDDLE, ZEROS_POINTS, ZEROS_OFFSETS };

// A matrix [O, I] in numbers of a few bits; see quantized.cpp. `group`, of inputs that share a scale, and `input_block`,
// which are rounded together, are multiples of 16; blocks divide groups, and groups the inputs.
struct Packed {
    const uint8_t *packed;
    const float *row_scales;  // [O], besides those of groups
    int32_t inputs, outputs, bits, group, zeros, input_block;
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

// R rows, and the K experts of each.
struct Routed {
    const void *x;  // [R, D]
    int64_t x_stride;
    void *out;               // [R, D]
    const int32_t *experts;  // [R, K]; below 0: nowhere
    const float *weights;    // [R, K]
    int32_t num_rows, top_k;
};
}

const int KEYS_AT_ONCE = 128;  // that a tile looks at
const int TILE_ROWS = 96;      // queries times heads of a tile, or all heads of one query

static inline int tile_queries(int group) { return group >= TILE_ROWS ? 1 : TILE_ROWS / group; }

static inline int first_seen(int window, int chunk, int position) {
    int first = 0;
    if (window && position - window + 1 > first) first = position - window + 1;
    if (chunk && position >= 0 && position / chunk * chunk > first) first = position / chunk * chunk;
    return first;
}
