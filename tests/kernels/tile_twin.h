// What AMX's instructions do, as Intel has published it, for processors without them: in the place of tiles.h. Ends the
// process where a processor would.
#pragma once
#include <stdlib.h>

#include "simd.h"

namespace {

struct Register {
    int rows, bytes;
    uint8_t of[16][64];
};
thread_local Register tiles[8];

INLINE void need(bool what) {
    if (!what) abort();
}

void shape_tiles(const uint8_t (&shapes)[64]) {
    need(shapes[0] == 1);
    for (int t = 0; t < 8; t++) {
        tiles[t] = Register();
        tiles[t].bytes = shapes[16 + 2 * t] | shapes[17 + 2 * t] << 8, tiles[t].rows = shapes[48 + t];
        need(tiles[t].rows <= 16 && tiles[t].bytes <= 64 && !tiles[t].rows == !tiles[t].bytes);
    }
}
void release_tiles() {
    for (Register &tile : tiles) tile = Register();
}

template <int TILE> void clear_tile() {
    need(tiles[TILE].rows);
    memset(tiles[TILE].of, 0, sizeof tiles[TILE].of);
}
template <int TILE> void load_tile(const void *p, int64_t stride) {
    clear_tile<TILE>();
    for (int row = 0; row < tiles[TILE].rows; row++)
        memcpy(tiles[TILE].of[row], (const char *)p + row * stride, tiles[TILE].bytes);
}
template <int TILE> void store_tile(void *p, int64_t stride) {
    need(tiles[TILE].rows);
    for (int row = 0; row < tiles[TILE].rows; row++)
        memcpy((char *)p + row * stride, tiles[TILE].of[row], tiles[TILE].bytes);
}
template <bool SIGNED, int TO, int LEFT, int RIGHT> void multiply_tiles() {
    Register &to = tiles[TO];
    const Register &left = tiles[LEFT], &right = tiles[RIGHT];
    need(to.rows && to.rows == left.rows && to.bytes == right.bytes && left.bytes == 4 * right.rows);
    for (int row = 0; row < to.rows; row++)
        for (int column = 0; column < to.bytes / 4; column++) {
            int32_t sum;
            memcpy(&sum, to.of[row] + 4 * column, 4);
            for (int k = 0; k < left.bytes; k++) {
                uint8_t byte = right.of[k / 4][4 * column + k % 4];
                sum += (int8_t)left.of[row][k] * (SIGNED ? (int8_t)byte : byte);
            }
            memcpy(to.of[row] + 4 * column, &sum, 4);
        }
}

// Sums of the even and of the odd of each pair are added to what there was.
template <int TO, int LEFT, int RIGHT> void multiply_pairs() {
    Register &to = tiles[TO];
    const Register &left = tiles[LEFT], &right = tiles[RIGHT];
    need(to.rows && to.rows == left.rows && to.bytes == right.bytes && left.bytes == 4 * right.rows);
    auto number = [](const uint8_t *p) {
        bf16 x;
        memcpy(&x, p, 2);
        return bits_float((uint32_t)x << 16);
    };
    for (int row = 0; row < to.rows; row++)
        for (int column = 0; column < to.bytes / 4; column++) {
            float sum, some[2] = {0, 0};
            memcpy(&sum, to.of[row] + 4 * column, 4);
            for (int k = 0; k < left.bytes / 2; k++)
                some[k % 2] += number(left.of[row] + 2 * k) * number(right.of[k / 2] + 4 * column + k % 2 * 2);
            sum += some[0] + some[1];
            memcpy(to.of[row] + 4 * column, &sum, 4);
        }
}

}  // namespace
