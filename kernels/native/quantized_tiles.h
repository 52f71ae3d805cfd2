// The products of quantized.h in tiles of AMX, of more rows than registers hold sums of: the same integers, added up in the
// same order, so results are the same to the last bit. Of fewer rows memory is the limit, and vectors do.
//
// A tile of weights is fours of inputs of a panel's outputs, as they lie in a strip, unpacked to a byte each: once for up
// to 48 rows. A tile of inputs is 16 rows of up to 64 inputs, as many as have a scale in common: those of 32, the most
// frequent, fill half of one. Then sums are scaled in twice the time that they take to be multiplied.
#pragma once
#include "shapes.h"
#include "strips.h"

namespace {

const int TILE_ROWS = 16;
enum { SUMS_TILE = 0, INPUTS_TILE = 3, WEIGHTS_TILE = 6 };  // the first of each kind
typedef uint8_t TileRow __attribute__((vector_size(64)));

#define EACH_ROW_TILE(rows, DO)              \
    {                                        \
        DO(0);                               \
        if ((rows) > TILE_ROWS) DO(1);       \
        if ((rows) > 2 * TILE_ROWS) DO(2);   \
    }

// Of some rows, of which `at_once` inputs are read.
struct RowTiles {
    Shapes shapes;
    RowTiles(int rows, int at_once) {
        for (int t = 0; t * TILE_ROWS < rows; t++) {
            int height = rows - t * TILE_ROWS < TILE_ROWS ? rows - t * TILE_ROWS : TILE_ROWS;
            shapes.put(SUMS_TILE + t, height, sizeof(TileRow));
            shapes.put(INPUTS_TILE + t, height, at_once);
        }
        shapes.put(WEIGHTS_TILE, at_once / 4, sizeof(TileRow));
        shapes.begin();
    }
    ~RowTiles() { shapes.end(); }
};

// Four inputs of a panel, the NTH of sixteen, less what is taken from each number.
template <int KIND, int NTH>
INLINE void unpack(const Table &table, int less, const uint8_t *codes, uint8_t *to) {
    Codes four;
    if constexpr (KIND == BYTES)
        four = load_codes(codes + NTH * STEP);
    else
        four = fours_of<KIND, NTH>(codes);
    if constexpr (KIND == CODES) four = look_up(table, four);
    TileRow row;
    static_assert(sizeof row == sizeof four, "a panel");
    memcpy(&row, &four, sizeof row);
    row -= (uint8_t)less;
    memcpy(to + NTH * sizeof row, &row, sizeof row);
}

// Sums [rows, PANEL] of a panel with `length` inputs. `loads`: else the inputs are in their tiles, which has to be asked
// for again where they do not fit.
template <int KIND, bool SIGNED>
INLINE void tile_sums(const Table &table, int less, const uint8_t *codes, const int8_t *a, int rows, int length,
                      int at_once, bool loads, int32_t *sums) {
#define CLEAR(t) clear_tile<SUMS_TILE + t>()
    EACH_ROW_TILE(rows, CLEAR)
    for (int at = 0; at < length; at += at_once, a += rows * at_once) {
        alignas(64) uint8_t weights[TILE_ROWS * sizeof(TileRow)];
        for (int i = 0; i < at_once; i += 16, codes += STRIP * 16 * bits_of(KIND) / 8) {
            uint8_t *to = weights + i / 4 * sizeof(TileRow);
            unpack<KIND, 0>(table, less, codes, to);
            unpack<KIND, 1>(table, less, codes, to);
            unpack<KIND, 2>(table, less, codes, to);
            unpack<KIND, 3>(table, less, codes, to);
        }
        load_tile<WEIGHTS_TILE>(weights, sizeof(TileRow));
#define LOAD(t) load_tile<INPUTS_TILE + t>(a + t * TILE_ROWS * at_once, at_once)
        if (loads || length > at_once) EACH_ROW_TILE(rows, LOAD)
#define MULTIPLY(t) multiply_tiles<SIGNED, SUMS_TILE + t, INPUTS_TILE + t, WEIGHTS_TILE>()
        EACH_ROW_TILE(rows, MULTIPLY)
    }
#define STORE(t) store_tile<SUMS_TILE + t>(sums + t * TILE_ROWS * PANEL, sizeof(TileRow))
    EACH_ROW_TILE(rows, STORE)
#undef CLEAR
#undef LOAD
#undef MULTIPLY
#undef STORE
}

INLINE vi load_whole(const int32_t *p) {
    vi x;
    memcpy(&x, p, sizeof x);
    return x;
}

// Of a panel, as in strips.h.
INLINE void add_floats(const int32_t *whole, int rows, const uint16_t *of_outputs, const float *of_rows, float *sums) {
    for (int at = 0; at < PANEL; at += LANES) {
        vf scale = load_halves(of_outputs + at);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vf sum = __builtin_convertvector(load_whole(whole + r * PANEL + at), vf);
            store(sums + r * STRIP + at, load(sums + r * STRIP + at) + sum * (scale * of_rows[r]));
        }
    }
}

// Adds a group's sums, times its scale of each output.
INLINE void add_group(const int32_t *some, int rows, const uint8_t *small, int32_t *whole) {
    for (int at = 0; at < PANEL; at += LANES) {
        vs bytes;
        memcpy(&bytes, small + at, sizeof bytes);
        vi by = __builtin_convertvector(bytes, vi);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vi sum = load_whole(whole + r * PANEL + at) + load_whole(some + r * PANEL + at) * by;
            memcpy(whole + r * PANEL + at, &sum, sizeof sum);
        }
    }
}

// As `tile`, of all panels.
template <int KIND, bool SIGNED>
__attribute__((noinline)) void many_rows(const Packed *matrix, const uint8_t *strip, const Rounded &from, int row, int rows,
                                         float *sums, const uint8_t *next, int ask) {
    const int inputs = matrix->inputs, length = matrix->input_block, groups = inputs / matrix->group;
    const int blocks = inputs / length, in_group = matrix->group / length, header = header_of(matrix);
    const int less = less_of(matrix), at_once = inputs_at_once(rows, length);
    const Table table = KIND == CODES ? load_table(matrix->table) : Table();
    const int8_t *a = from.numbers + (int64_t)row * inputs;
    const float *scales = from.scales + (int64_t)row * blocks;
    const float *group_sums = from.group_sums + (int64_t)row * groups;
    alignas(64) int32_t whole[ROWS_BESIDE * PANEL];
    RowTiles tiles(rows, at_once);
    clear(sums, rows, STRIP);
    for (int g = 0; g < groups; g++, group_sums += rows) {
        const uint16_t *group_scales = (const uint16_t *)strip;
        const uint8_t *zeros_at = strip + 2 * STRIP;
        strip += header;
        for (int b = 0; b < in_group; b++, scales += rows, a += rows * length) {
            for (int line = 0; line < ask; line++, next += 64) ask_for(next);
            for (int column = 0; column < STRIP; column += PANEL) {
                tile_sums<KIND, SIGNED>(table, less, strip + 4 * column, a, rows, length, at_once, column == 0, whole);
                add_floats(whole, rows, group_scales + column, scales, sums + column);
            }
            strip += STRIP * bits_of(KIND) * length / 8;
        }
        take_zeros(matrix->zeros, group_scales, zeros_at, 0, STRIP, group_sums, rows, sums);
    }
}

// As `shared_tile`, of all panels.
template <int KIND>
__attribute__((noinline)) void many_shared_rows(const Packed *matrix, const uint8_t *strip, const Rounded &from, int row,
                                                int rows, float *sums, const uint8_t *next, int ask) {
    const int inputs = matrix->inputs, group = matrix->group, groups = matrix->shared / group;
    const int blocks = inputs / matrix->shared, at_once = inputs_at_once(rows, group);
    const int group_bytes = STRIP * group * bits_of(KIND) / 8;
    const int8_t *a = from.numbers + (int64_t)row * inputs;
    const float *scales = from.scales + (int64_t)row * blocks;
    const int32_t *group_sums = from.whole + (int64_t)row * (inputs / group);
    alignas(64) int32_t some[ROWS_BESIDE * PANEL], whole[ROWS_BESIDE * PANEL];
    RowTiles tiles(rows, at_once);
    clear(sums, rows, STRIP);
    for (int b = 0; b < blocks; b++, scales += rows, group_sums += groups * rows, a += rows * matrix->shared) {
        for (int line = 0; line < ask; line++, next += 64) ask_for(next);
        const uint8_t *numbers = strip + shared_header_of(matrix);
        for (int column = 0; column < STRIP; column += PANEL) {
            const SharedHeader of = shared_header(matrix, strip, column);
            int r = 0;
            for (; r + 8 <= rows; r += 8)
                take_shared<8>(of, groups, group_sums + r, rows, scales + r, sums + r * STRIP + column);
            for (; r < rows; r++) take_shared<1>(of, groups, group_sums + r, rows, scales + r, sums + r * STRIP + column);
            memset(whole, 0, rows * PANEL * sizeof(int32_t));
            for (int g = 0; g < groups; g++) {
                const uint8_t *codes = numbers + g * group_bytes + 4 * column;
                tile_sums<KIND, true>(Table(), 0, codes, a + g * group * rows, rows, group, at_once, true, some);
                add_group(some, rows, of.small + g * STRIP, whole);
            }
            add_floats(whole, rows, of.shared, scales, sums + column);
        }
        strip = numbers + groups * group_bytes;
    }
}

// Sums [rows, STRIP] of up to ROWS_BESIDE rows with a whole strip.
void sums_by_tiles(int rows, const Packed *matrix, const uint8_t *strip, const Rounded &from, int row, float *sums,
                   const uint8_t *next, int ask) {
    const int kind = kind_of(matrix);
    if (kind == SIXES)
        many_shared_rows<SIXES>(matrix, strip, from, row, rows, sums, next, ask);
    else if (matrix->shared)
        many_shared_rows<HALVES>(matrix, strip, from, row, rows, sums, next, ask);
    else if (kind == HALVES)
        many_rows<HALVES, true>(matrix, strip, from, row, rows, sums, next, ask);
    else if (kind == CODES)
        many_rows<CODES, true>(matrix, strip, from, row, rows, sums, next, ask);
    else if (matrix->zeros == ZEROS_MIDDLE)
        many_rows<BYTES, true>(matrix, strip, from, row, rows, sums, next, ask);
    else
        many_rows<BYTES, false>(matrix, strip, from, row, rows, sums, next, ask);
}

}  // namespace
