// A layer of experts: each row through its experts, weighted and added up. Compiled once for every instruction set.
//
// Matrices are packed: of each BLOCK of outputs (the last may be narrower) unit after unit, so that one is read from end
// to end, once for all rows of its expert. Shapes: R rows, K experts of each, P = R * K pairs, sorted by expert; D hidden
// size, G width of an expert.
#include "gates.h"
#include "kernels.h"
#include "products.h"

namespace {

const int BLOCK = 64;
const int ROWS = 48;  // that pass a block of gate and of up at a time

// What lies in the memory that the caller gives.
template <class T> struct Room {
    T *rows;          // [P, D]
    T *gated;         // [P, G]
    float *results;   // [P, D]
    int32_t *starts;  // [E + 1], of each expert's pairs
    int32_t *places;  // [P], where each of the rows' order is; -1: nowhere
    int32_t *used;    // [E], the experts that anything goes to
    int32_t num_used;
};

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

template <class T> int64_t lay_out(const Experts *experts, int64_t num_pairs, char *memory, Room<T> *room) {
    int64_t at = 0;
    auto take = [&](int64_t bytes) {
        char *here = memory + at;
        at += rounded(bytes);
        return here;
    };
    room->rows = (T *)take(num_pairs * experts->hidden * sizeof(T));
    room->gated = (T *)take(num_pairs * experts->width * sizeof(T));
    room->results = (float *)take(num_pairs * experts->hidden * sizeof(float));
    room->starts = (int32_t *)take((experts->num_experts + 1) * sizeof(int32_t));
    room->places = (int32_t *)take(num_pairs * sizeof(int32_t));
    room->used = (int32_t *)take(experts->num_experts * sizeof(int32_t));
    return at;
}

template <class T> void sort_pairs(const Experts *experts, const Routed *routed, Room<T> *room) {
    int num_pairs = routed->num_rows * routed->top_k, next = 0;
    int32_t *starts = room->starts;
    memset(starts, 0, (experts->num_experts + 1) * sizeof(int32_t));
    for (int p = 0; p < num_pairs; p++)
        if (routed->experts[p] >= 0) starts[routed->experts[p] + 1]++;
    room->num_used = 0;
    for (int e = 0; e < experts->num_experts; e++) {
        if (starts[e + 1]) room->used[room->num_used++] = e;
        int count = starts[e + 1];
        starts[e + 1] = next;  // for now where the next pair of expert e goes
        next += count;
    }
    for (int p = 0; p < num_pairs; p++) {
        int expert = routed->experts[p];
        room->places[p] = expert < 0 ? -1 : starts[expert + 1]++;
    }
}

template <class T> void gather_row(const Experts *experts, const Routed *routed, Room<T> *room, int row) {
    int64_t hidden = experts->hidden;
    for (int p = row * routed->top_k; p < (row + 1) * routed->top_k; p++)
        if (room->places[p] >= 0)
            memcpy(room->rows + room->places[p] * hidden, (const T *)routed->x + row * routed->x_stride,
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

INLINE int columns_at(int column, int64_t end) { return end - column < BLOCK ? (int)end - column : BLOCK; }

// A block of an expert's gate and up, joined.
template <class T> void gate_block(const Experts *experts, Room<T> *room, int expert, int column) {
    int64_t hidden = experts->hidden, width = experts->width;
    int columns = columns_at(column, width);
    const char *gate_w = (const char *)experts->gate_up[expert], *up_w = gate_w + width * hidden * sizeof(T);
    const float *bias = experts->gate_up_bias ? experts->gate_up_bias + expert * 2 * width + column : nullptr;
    float gate[ROWS][BLOCK], up[ROWS][BLOCK];
    int stop = room->starts[expert + 1];
    for (int first = room->starts[expert]; first < stop; first += ROWS) {
        int rows = stop - first < ROWS ? stop - first : ROWS;
        const T *x = room->rows + first * hidden;
        multiply(x, hidden, gate_w, column, columns, gate[0], BLOCK, rows);
        multiply(x, hidden, up_w, column, columns, up[0], BLOCK, rows);
        for (int m = 0; m < rows; m++) {
            T *to = room->gated + (first + m) * width + column;
            for (int n = 0; n < columns; n += LANES) {
                vf g = load(gate[m] + n), u = load(up[m] + n);
                if (bias) g += load(bias + n), u += load(bias + width + n);
                store(to + n, joined(experts->gate, g, u));
            }
        }
    }
}

template <class T> void down_block(const Experts *experts, Room<T> *room, int expert, int column) {
    int64_t hidden = experts->hidden, width = experts->width;
    int first = room->starts[expert], rows = room->starts[expert + 1] - first;
    multiply(room->gated + first * width, width, experts->down[expert], column, columns_at(column, hidden),
             room->results + first * hidden + column, hidden, rows);
}

template <class T> void add_up_row(const Experts *experts, const Routed *routed, Room<T> *room, int row) {
    int64_t hidden = experts->hidden;
    T *to = (T *)routed->out + row * hidden;
    for (int column = 0; column < hidden; column += LANES) {
        vf sum = {};
        for (int p = row * routed->top_k; p < (row + 1) * routed->top_k; p++) {
            if (room->places[p] < 0) continue;
            vf result = load(room->results + room->places[p] * hidden + column);
            if (experts->down_bias) result += load(experts->down_bias + routed->experts[p] * hidden + column);
            sum += routed->weights[p] * result;
        }
        store(to + column, sum);
    }
}

template <class T> void run(const Experts *experts, const Routed *routed, char *memory, int threads) {
    Room<T> room;
    lay_out(experts, (int64_t)routed->num_rows * routed->top_k, memory, &room);
    sort_pairs(experts, routed, &room);
    int gate_blocks = (experts->width + BLOCK - 1) / BLOCK, down_blocks = (experts->hidden + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int row = 0; row < routed->num_rows; row++) gather_row(experts, routed, &room, row);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < room.num_used * gate_blocks; task++)
            gate_block(experts, &room, room.used[task / gate_blocks], task % gate_blocks * BLOCK);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < room.num_used * down_blocks; task++)
            down_block(experts, &room, room.used[task / down_blocks], task % down_blocks * BLOCK);
#pragma omp for
        for (int row = 0; row < routed->num_rows; row++) add_up_row(experts, routed, &room, row);
    }
}

}  // namespace

extern "C" {

int64_t NAMED(experts_room, ISA)(const Experts *experts, int32_t num_pairs) {
    Room<float> room;  // no smaller than that of another type
    return lay_out(experts, num_pairs, (char *)nullptr, &room);
}

void NAMED(run_experts, ISA)(const Experts *experts, const Routed *routed, char *memory, int32_t threads) {
    if (experts->is_bf16)
        run<bf16>(experts, routed, memory, threads);
    else
        run<float>(experts, routed, memory, threads);
}
}
