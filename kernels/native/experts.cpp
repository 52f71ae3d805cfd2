// A layer of experts in floats: each row through its experts, weighted and added up. Compiled once for every instruction
// set.
//
// Matrices are packed: of each BLOCK of outputs (the last may be narrower) unit after unit, so that one is read from end
// to end, once for all rows of its expert.
#include "experts.h"
#include "products.h"

namespace {

const int ROWS = 48;  // that pass a block of gate and of up at a time

// What lies in the memory that the caller gives.
template <class T> struct Room {
    Order order;
    T *rows;   // [P, D]
    T *gated;  // [P, G]

    Room(const Experts *experts, int64_t num_pairs, Memory &memory) {
        order = room_of(experts, num_pairs, memory);
        rows = memory.take<T>(num_pairs * experts->hidden);
        gated = memory.take<T>(num_pairs * experts->width);
    }
};

template <class T> void gather_row(const Experts *experts, const Routed *routed, const Room<T> &room, int row) {
    int64_t hidden = experts->hidden;
    for (int p = row * routed->top_k; p < (row + 1) * routed->top_k; p++)
        if (room.order.places[p] >= 0)
            memcpy(room.rows + room.order.places[p] * hidden, (const T *)routed->x + row * routed->x_stride,
                   hidden * sizeof(T));
}

// out [rows, columns] = x w^T for the columns of a block that begins at `column`.
template <class T>
INLINE void multiply(const T *x, int64_t length, const void *packed, int column, int columns, float *out,
                     int64_t out_stride, int rows) {
    typedef typename UnitsOf<T>::type Units;
    int units = (int)length / Units::size;
    Whole block = {(const uint32_t *)packed + (int64_t)column * units, columns};
    product<Units>((const uint32_t *)x, units, block, units, out, (int)out_stride, rows, columns, false);
}

// A block of an expert's gate and up, joined.
template <class T> void gate_block(const Experts *experts, const Room<T> &room, int expert, int column) {
    int64_t hidden = experts->hidden, width = experts->width;
    int columns = columns_at(column, width), stop = room.order.starts[expert + 1];
    const char *gate_w = (const char *)experts->gate_up[expert], *up_w = gate_w + width * hidden * sizeof(T);
    float gate[ROWS][BLOCK], up[ROWS][BLOCK];
    for (int first = room.order.starts[expert]; first < stop; first += ROWS) {
        int rows = stop - first < ROWS ? stop - first : ROWS;
        const T *x = room.rows + first * hidden;
        multiply(x, hidden, gate_w, column, columns, gate[0], BLOCK, rows);
        multiply(x, hidden, up_w, column, columns, up[0], BLOCK, rows);
        for (int m = 0; m < rows; m++)
            join_row(experts, expert, column, columns, gate[m], up[m], room.gated + (first + m) * width + column);
    }
}

template <class T> void down_block(const Experts *experts, const Room<T> &room, int expert, int column) {
    int64_t hidden = experts->hidden, width = experts->width;
    int first = room.order.starts[expert], rows = room.order.starts[expert + 1] - first;
    multiply(room.gated + first * width, width, experts->down[expert], column, columns_at(column, hidden),
             room.order.results + first * hidden + column, hidden, rows);
}

template <class T> void run(const Experts *experts, const Routed *routed, char *memory, int threads) {
    Memory given = {memory, 0};
    Room<T> room(experts, (int64_t)routed->num_rows * routed->top_k, given);
    sort_pairs(experts, routed, &room.order);
    int gate_blocks = (experts->width + BLOCK - 1) / BLOCK, down_blocks = (experts->hidden + BLOCK - 1) / BLOCK;
    int num_used = room.order.num_used;
    const int32_t *used = room.order.used;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int row = 0; row < routed->num_rows; row++) gather_row(experts, routed, room, row);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < num_used * gate_blocks; task++)
            gate_block(experts, room, used[task / gate_blocks], task % gate_blocks * BLOCK);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < num_used * down_blocks; task++)
            down_block(experts, room, used[task / down_blocks], task % down_blocks * BLOCK);
#pragma omp for
        for (int row = 0; row < routed->num_rows; row++) add_up_row<T>(experts, routed, room.order, row);
    }
}

}  // namespace

extern "C" {

int64_t NAMED(experts_room, ISA)(const Experts *experts, int32_t num_pairs) {
    Memory room = {nullptr, 0};
    Room<float>(experts, num_pairs, room);  // no smaller than that of another type
    return room.taken;
}

void NAMED(run_experts, ISA)(const Experts *experts, const Routed *routed, char *memory, int32_t threads) {
    if (experts->is_bf16)
        run<bf16>(experts, routed, memory, threads);
    else
        run<float>(experts, routed, memory, threads);
}
}
