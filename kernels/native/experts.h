// What all layers of experts do around their products: pairs of a row and an expert are put in order, gate and up are
// joined, and results are added up.
//
// Shapes: R rows, K experts of each, P = R * K pairs, sorted by expert; D hidden size, G width of an expert.
#pragma once
#include "gates.h"
#include "kernels.h"
#include "memory.h"

namespace {

struct Order {
    int32_t *starts;  // [E + 1], of each expert's pairs
    int32_t *places;  // [P], where each of the rows' order is; -1: nowhere
    int32_t *used;    // [E], the experts that anything goes to
    int32_t num_used;
    float *results;  // [P, D]
};

Order room_of(const Experts *experts, int64_t num_pairs, Memory &memory) {
    Order room = {};
    room.starts = memory.take<int32_t>(experts->num_experts + 1);
    room.places = memory.take<int32_t>(num_pairs);
    room.used = memory.take<int32_t>(experts->num_experts);
    room.results = memory.take<float>(num_pairs * experts->hidden);
    return room;
}

void sort_pairs(const Experts *experts, const Routed *routed, Order *order) {
    int num_pairs = routed->num_rows * routed->top_k, next = 0;
    int32_t *starts = order->starts;
    memset(starts, 0, (experts->num_experts + 1) * sizeof(int32_t));
    for (int p = 0; p < num_pairs; p++)
        if (routed->experts[p] >= 0) starts[routed->experts[p] + 1]++;
    order->num_used = 0;
    for (int e = 0; e < experts->num_experts; e++) {
        if (starts[e + 1]) order->used[order->num_used++] = e;
        int count = starts[e + 1];
        starts[e + 1] = next;  // for now where the next pair of expert e goes
        next += count;
    }
    for (int p = 0; p < num_pairs; p++) {
        int expert = routed->experts[p];
        order->places[p] = expert < 0 ? -1 : starts[expert + 1]++;
    }
}

// A row of some columns from `column` on, gate and up without their biases.
template <class T>
INLINE void join_row(const Experts *experts, int expert, int column, int columns, const float *gate, const float *up, T *to) {
    int64_t width = experts->width;
    const float *bias = experts->gate_up_bias ? experts->gate_up_bias + expert * 2 * width + column : nullptr;
    for (int n = 0; n < columns; n += LANES) {
        vf g = load(gate + n), u = load(up + n);
        if (bias) g += load(bias + n), u += load(bias + width + n);
        store(to + n, joined(experts->gate, g, u));
    }
}

// Of so many that are computed together.
INLINE int columns_at(int column, int columns, int64_t end) { return end - column < columns ? (int)end - column : columns; }

template <class T> void add_up_row(const Experts *experts, const Routed *routed, const Order &order, int row) {
    int64_t hidden = experts->hidden;
    T *to = (T *)routed->out + row * hidden;
    for (int column = 0; column < hidden; column += LANES) {
        vf sum = {};
        for (int p = row * routed->top_k; p < (row + 1) * routed->top_k; p++) {
            if (order.places[p] < 0) continue;
            vf result = load(order.results + order.places[p] * hidden + column);
            if (experts->down_bias) result += load(experts->down_bias + routed->experts[p] * hidden + column);
            sum += routed->weights[p] * result;
        }
        store(to + column, sum);
    }
}

}  // namespace
