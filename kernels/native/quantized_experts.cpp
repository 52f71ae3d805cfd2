// A layer of experts in numbers of 4, 6 or 8 bits: each row through its experts, weighted and added up. Compiled once for
// every instruction set. What experts read is rounded once, and so is what is between their matrices.
#include "experts.h"
#include "quantized.h"

namespace {

// What lies in the memory that the caller gives. Rows of an expert are rounded side by side.
template <class T> struct Room {
    Order order;
    T *gated;              // [P, G]
    Rounded rows, halfway;  // [P, D] and [P, G]

    Room(const QuantizedExperts *experts, int64_t num_pairs, Memory &memory) {
        order = room_of(&experts->layer, num_pairs, memory);
        gated = memory.take<T>(num_pairs * experts->layer.width);
        rows = room_of(experts->gate, num_pairs, memory);
        halfway = room_of(experts->down, num_pairs, memory);
    }
};

// The part of an expert whose rows begin at `first`.
Rounded part_of(const Packed *matrix, const Rounded &all, int64_t first) {
    int64_t blocks = matrix->inputs / matrix->input_block, groups = matrix->inputs / matrix->group;
    return {all.numbers + first * matrix->inputs, all.scales + first * blocks, all.starts + first * blocks,
            all.group_sums + first * groups, all.whole + first * groups};
}

// Into the place of a pair, all experts' matrices being alike.
template <class T>
void round_pair(const QuantizedExperts *experts, const Order &order, const Packed *matrix, int expert, int place,
                const T *x, const Rounded &to) {
    int first = order.starts[expert], rows = order.starts[expert + 1] - first;
    float scale = experts->rounds_rows ? largest_of(x, matrix->inputs) / 127.0f : 0.0f;
    round_row(matrix, x, experts->rounds_rows ? &scale : nullptr, place - first, rows, part_of(matrix, to, first));
}

template <class T> void gate_strip(const QuantizedExperts *experts, const Room<T> &room, int expert, int strip) {
    const Packed *gate = experts->gate + expert, *up = experts->up + expert;
    int first = room.order.starts[expert], rows = room.order.starts[expert + 1] - first;
    int64_t width = experts->layer.width;
    int column = strip * STRIP, columns = columns_at(column, STRIP, width);
    Rounded from = part_of(gate, room.rows, first);
    float gates[ROWS_BESIDE * STRIP], ups[ROWS_BESIDE * STRIP];
    for (int row = 0; row < rows; row += ROWS_BESIDE) {
        int count = tile_rows(row, rows);
        NAMED(strip_sums, ISA)(count, gate, strip, &from, row, gates, nullptr, 0);
        NAMED(strip_sums, ISA)(count, up, strip, &from, row, ups, nullptr, 0);
        for (int r = 0; r < count; r++)
            join_row(&experts->layer, expert, column, columns, gates + r * STRIP, ups + r * STRIP,
                     room.gated + (first + row + r) * width + column);
    }
}

template <class T> void down_strip(const QuantizedExperts *experts, const Room<T> &room, int expert, int strip) {
    const Packed *down = experts->down + expert;
    int first = room.order.starts[expert], rows = room.order.starts[expert + 1] - first;
    int64_t hidden = experts->layer.hidden;
    int column = strip * STRIP, columns = columns_at(column, STRIP, hidden);
    Rounded from = part_of(down, room.halfway, first);
    float sums[ROWS_BESIDE * STRIP];
    for (int row = 0; row < rows; row += ROWS_BESIDE) {
        int count = tile_rows(row, rows);
        NAMED(strip_sums, ISA)(count, down, strip, &from, row, sums, nullptr, 0);
        for (int r = 0; r < count; r++)
            memcpy(room.order.results + (first + row + r) * hidden + column, sums + r * STRIP, columns * sizeof(float));
    }
}

template <class T> void run(const QuantizedExperts *experts, const Routed *routed, char *memory, int threads) {
    Memory given = {memory, 0};
    int num_pairs = routed->num_rows * routed->top_k;
    Room<T> room(experts, num_pairs, given);
    const Order &order = room.order;
    sort_pairs(&experts->layer, routed, &room.order);
    int64_t width = experts->layer.width;
    int gate_strips = (int)(width + STRIP - 1) / STRIP, down_strips = (experts->layer.hidden + STRIP - 1) / STRIP;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int p = 0; p < num_pairs; p++)
            if (order.places[p] >= 0)
                round_pair(experts, order, experts->gate, routed->experts[p], order.places[p],
                           (const T *)routed->x + p / routed->top_k * routed->x_stride, room.rows);
        // Some that follow each other: memory gives them faster.
#pragma omp for schedule(dynamic, 4)
        for (int task = 0; task < order.num_used * gate_strips; task++)
            gate_strip(experts, room, order.used[task / gate_strips], task % gate_strips);
#pragma omp for
        for (int p = 0; p < num_pairs; p++)
            if (order.places[p] >= 0)
                round_pair(experts, order, experts->down, routed->experts[p], order.places[p],
                           (const T *)room.gated + order.places[p] * width, room.halfway);
#pragma omp for schedule(dynamic, 4)
        for (int task = 0; task < order.num_used * down_strips; task++)
            down_strip(experts, room, order.used[task / down_strips], task % down_strips);
#pragma omp for
        for (int row = 0; row < routed->num_rows; row++) add_up_row<T>(&experts->layer, routed, order, row);
    }
}

}  // namespace

extern "C" {

int64_t NAMED(quantized_experts_room, ISA)(const QuantizedExperts *experts, int32_t num_pairs) {
    Memory room = {nullptr, 0};
    Room<float>(experts, num_pairs, room);  // no smaller than that of another type
    return room.taken;
}

void NAMED(run_quantized_experts, ISA)(const QuantizedExperts *experts, const Routed *routed, char *memory,
                                       int32_t threads) {
    if (experts->layer.is_bf16)
        run<bf16>(experts, routed, memory, threads);
    else
        run<float>(experts, routed, memory, threads);
}
}
