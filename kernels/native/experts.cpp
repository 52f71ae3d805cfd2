// A layer of experts in floats: each row through its experts, weighted and added up. Compiled once for every instruction
// set. Matrices lie in strips, and each is read from end to end once for all rows of its expert.
#include "dense.h"
#include "experts.h"
#if defined(TILED)  // the name of the set whose kernels multiply by tiles besides
#include "pair_tiles.h"
#endif

namespace {

#if defined(TILED)
const int MOST_ROWS = TILES_BELOW * TILE_HEIGHT;
#else
const int MOST_ROWS = MAX_ROWS;
#endif

// Products of an expert's rows with strips of so many inputs. Tiles are for more rows than vectors hold sums of: memory limits
// fewer.
template <class T> struct Products {
    int inputs, height;  // rows at once
#if defined(TILED)
    PairTiles tiles;
    static bool pays(bool by_tiles, int rows) { return by_tiles && sizeof(T) == sizeof(bf16) && rows > MAX_ROWS; }
    Products(bool by_tiles, int rows, int inputs)
        : inputs(inputs), height(tile_height(rows)), tiles(pays(by_tiles, rows) ? rows : 0, num_steps<T>(inputs)) {
        if (tiles.height) height = TILES_BELOW * tiles.height;
    }
#else
    Products(bool, int rows, int inputs) : inputs(inputs), height(tile_height(rows)) {}
#endif

    // Sums [rows, COLUMNS] of up to `height` rows, of which the first ones ask for the strip.
    void add_up(int rows, const Left<T> *x, const uint32_t *strip, bool asks, float *sums) const {
        int steps = num_steps<T>(inputs);
#if defined(TILED)
        if (tiles.height)
            return tiles.product((const uint32_t *)x, inputs / 2, Whole{strip, COLUMNS}, steps, sums, COLUMNS, rows, COLUMNS,
                                 false, asks);
#endif
        strip_sums<T>(rows, x, inputs, strip, steps, sums);
    }
};

// What lies in the memory that the caller gives.
template <class T> struct Room {
    Order order;
    Left<T> *rows;   // [P, D], and what is read beyond the last
    Left<T> *gated;  // [P, G]
    bool by_tiles;

    Room(const Experts *experts, int64_t num_pairs, bool by_tiles, Memory &memory) : by_tiles(by_tiles) {
        order = room_of(experts, num_pairs, memory);
        rows = memory.take<Left<T>>((num_pairs + MOST_ROWS) * experts->hidden);
        gated = memory.take<Left<T>>((num_pairs + MOST_ROWS) * experts->width);
    }
};

template <class T> void gather_row(const Experts *experts, const Routed *routed, const Room<T> &room, int row) {
    int64_t hidden = experts->hidden;
    for (int p = row * routed->top_k; p < (row + 1) * routed->top_k; p++)
        if (room.order.places[p] >= 0)
            copy_row((const T *)routed->x + row * routed->x_stride, hidden, room.rows + room.order.places[p] * hidden);
}

// A strip of an expert's gate and up, joined.
template <class T> void gate_strip(const Experts *experts, const Room<T> &room, int expert, int strip) {
    int64_t hidden = experts->hidden, width = experts->width, words = strip_words<T>(hidden);
    int column = strip * COLUMNS, columns = columns_at(column, COLUMNS, width);
    const uint32_t *gate_w = (const uint32_t *)experts->gate_up[expert] + strip * words;
    const uint32_t *up_w = gate_w + num_strips(width) * words;
    float gate[MOST_ROWS * COLUMNS], up[MOST_ROWS * COLUMNS];
    int first = room.order.starts[expert], stop = room.order.starts[expert + 1];
    Products<T> products(room.by_tiles, stop - first, hidden);
    for (int row = first; row < stop; row += products.height) {
        int rows = stop - row < products.height ? stop - row : products.height;
        products.add_up(rows, room.rows + row * hidden, gate_w, row == first, gate);
        products.add_up(rows, room.rows + row * hidden, up_w, row == first, up);
        for (int m = 0; m < rows; m++)
            join_row(experts, expert, column, columns, gate + m * COLUMNS, up + m * COLUMNS,
                     room.gated + (row + m) * width + column);
    }
}

template <class T> void down_strip(const Experts *experts, const Room<T> &room, int expert, int strip) {
    int64_t hidden = experts->hidden, width = experts->width;
    int column = strip * COLUMNS, columns = columns_at(column, COLUMNS, hidden);
    const uint32_t *w = (const uint32_t *)experts->down[expert] + strip * strip_words<T>(width);
    float sums[MOST_ROWS * COLUMNS];
    int first = room.order.starts[expert], stop = room.order.starts[expert + 1];
    Products<T> products(room.by_tiles, stop - first, width);
    for (int row = first; row < stop; row += products.height) {
        int rows = stop - row < products.height ? stop - row : products.height;
        products.add_up(rows, room.gated + row * width, w, row == first, sums);
        for (int m = 0; m < rows; m++)
            memcpy(room.order.results + (row + m) * hidden + column, sums + m * COLUMNS, columns * sizeof(float));
    }
}

template <class T> void run(const Experts *experts, const Routed *routed, char *memory, int threads, bool by_tiles = false) {
    Memory given = {memory, 0};
    Room<T> room(experts, (int64_t)routed->num_rows * routed->top_k, by_tiles, given);
    sort_pairs(experts, routed, &room.order);
    int gate_strips = num_strips(experts->width), down_strips = num_strips(experts->hidden);
    int num_used = room.order.num_used;
    const int32_t *used = room.order.used;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int row = 0; row < routed->num_rows; row++) gather_row(experts, routed, room, row);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < num_used * gate_strips; task++)
            gate_strip(experts, room, used[task / gate_strips], task % gate_strips);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < num_used * down_strips; task++)
            down_strip(experts, room, used[task / down_strips], task % down_strips);
#pragma omp for
        for (int row = 0; row < routed->num_rows; row++) add_up_row<T>(experts, routed, room.order, row);
    }
}

}  // namespace

extern "C" {

int64_t NAMED(experts_room, ISA)(const Experts *experts, int32_t num_pairs) {
    Memory room = {nullptr, 0};
    Room<float>(experts, num_pairs, false, room);  // no smaller than that of another type
    return room.taken;
}

void NAMED(run_experts, ISA)(const Experts *experts, const Routed *routed, char *memory, int32_t threads) {
    if (experts->is_bf16)
        run<bf16>(experts, routed, memory, threads);
    else
        run<float>(experts, routed, memory, threads);
}

#if defined(TILED)
void NAMED(run_experts, TILED)(const Experts *experts, const Routed *routed, char *memory, int32_t threads) {
    if (!experts->is_bf16) return NAMED(run_experts, ISA)(experts, routed, memory, threads);
    run<bf16>(experts, routed, memory, threads, true);
}
#endif
}
