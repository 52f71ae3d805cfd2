// Products of pairs (products.h) in tiles of AMX. What vectors multiply lies as tiles want it: pairs of 16 columns are a
// row of a tile. Only sums are added up in another order, an even and an odd one of each 16 pairs.
#pragma once
#include "products.h"
#include "shapes.h"

namespace {

const int TILE_HEIGHT = 16, TILE_PAIRS = 16, TILE_COLUMNS = 16;  // at most
const int TILES_BELOW = 2;  // each other, of a product's rows, which then take as many columns beside each other

// Of some rows, in tiles that are as even as possible: a processor takes as long as they are high.
struct PairTiles {
    int height = 0, pairs = 0;  // of a tile of rows
    Shapes shapes;

    // Of no rows it does nothing. `units` are a multiple of 8.
    PairTiles(int rows, int units) {
        if (!rows) return;
        int tiles = (rows + TILE_HEIGHT - 1) / TILE_HEIGHT;
        height = (rows + tiles - 1) / tiles, pairs = units % TILE_PAIRS ? TILE_PAIRS / 2 : TILE_PAIRS;
        for (int tile = 0; tile < 4; tile++) shapes.put(SUMS + tile, height, 4 * TILE_COLUMNS);
        for (int tile = 0; tile < 2; tile++) {
            shapes.put(LEFT + tile, height, 4 * pairs);
            shapes.put(RIGHT + tile, pairs, 4 * TILE_COLUMNS);
        }
        shapes.begin();
    }
    ~PairTiles() {
        if (height) shapes.end();
    }

    // c [rows, columns] = or += a [rows, units] b [units, columns]; columns are a multiple of 16. Of a and c there are rows
    // up to a multiple of `height`, whatever they hold. `asks` for b's rows before they are read.
    void product(const uint32_t *a, int64_t a_stride, Whole b, int units, float *c, int64_t c_stride, int rows, int columns,
                 bool add, bool asks = false) const {
        for (int row = 0; row < rows; row += TILES_BELOW * height) {
            const uint32_t *from = a + row * a_stride;
            float *to = c + row * c_stride;
            bool is_last = rows - row <= height;
            for (int column = 0, tiles; column < columns; column += tiles * TILE_COLUMNS, asks = false) {
                int left = (columns - column) / TILE_COLUMNS;
                Whole right = {b.first + column, b.stride};
                if (is_last && left >= 4)
                    tiles = sums<1, 4>(from, a_stride, right, units, to + column, c_stride, add, asks);
                else if (is_last)
                    tiles = sums<1, 1>(from, a_stride, right, units, to + column, c_stride, add, asks);
                else if (left >= 2)
                    tiles = sums<2, 2>(from, a_stride, right, units, to + column, c_stride, add, asks);
                else
                    tiles = sums<2, 1>(from, a_stride, right, units, to + column, c_stride, add, asks);
            }
        }
    }

   private:
    enum { SUMS = 0, LEFT = 4, RIGHT = 6 };  // the first of each kind

    // Of so many tiles, of which one waits less for itself the more there are.
    template <int BELOW, int BESIDE>
    int sums(const uint32_t *a, int64_t a_stride, Whole b, int units, float *c, int64_t c_stride, bool add, bool asks) const {
        for_each<BELOW * BESIDE>([&](auto nth) {
            const int tile = nth.value;
            if (add)
                load_tile<SUMS + tile>(c + tile / BESIDE * height * c_stride + tile % BESIDE * TILE_COLUMNS, 4 * c_stride);
            else
                clear_tile<SUMS + tile>();
        });
        for (int k = 0; k < units; k += pairs) {
            const uint32_t *right = b.first + (int64_t)k * b.stride;
            for (int line = 0; asks && line < pairs * b.stride; line += 16) ask_for(right + pairs * b.stride + line);
            for_each<BELOW>([&](auto row) { load_tile<LEFT + row.value>(a + row.value * height * a_stride + k, 4 * a_stride); });
            for_each<BESIDE>([&](auto column) {
                load_tile<RIGHT + column.value % 2>(right + column.value * TILE_COLUMNS, 4 * (int64_t)b.stride);
                for_each<BELOW>([&](auto row) {
                    multiply_pairs<SUMS + row.value * BESIDE + column.value, LEFT + row.value, RIGHT + column.value % 2>();
                });
            });
        }
        for_each<BELOW * BESIDE>([&](auto nth) {
            const int tile = nth.value;
            store_tile<SUMS + tile>(c + tile / BESIDE * height * c_stride + tile % BESIDE * TILE_COLUMNS, 4 * c_stride);
        });
        return BESIDE;
    }
};

}  // namespace
