// Products with a matrix in numbers of 4, 6 or 8 bits, as quantized.cpp and quantized_experts.cpp have them in common:
// how the matrix lies, and how inputs are rounded. strips.cpp multiplies.
//
// Inputs are rounded to 8 bits, `input_block` of a row at a time, and bytes are multiplied by bytes: sums of a block are
// exact. Value of a weight: scale * (number - zero point), or scale * number - offset. So with x = d a for the inputs of
// a block, a group adds scale * sum(d * sum(number * a)) - offset * sum(d * sum(a)); where the zero point is the middle of
// all numbers, the sums of integers begin with what it takes away. With a table, a number says which of its bytes is
// meant, whose middle is 128.
//
// The matrix lies as it is read, from end to end: of each STRIP of outputs (what is missing of the last is zeros) group
// after group; of each group its scales, its zero points or offsets, and then the numbers: four inputs of each output
// beside each other, and in the upper halves of bytes of 4 bits the four that follow. Of 6 bits there are 16 inputs in
// three parts: lower halves of the first eight and of the others, and then the upper two bits of all, four to a byte.
//
// Where groups share scales, a block of inputs is all that do, and theirs are integers, by which sums are multiplied as
// integers. Block after block: the shared scales, the shared scales of offsets, all groups' scales, all groups' offsets,
// and then all numbers.
//
// Shapes: T rows, I inputs, O outputs, G groups, B blocks of inputs.
#pragma once
#include "bytes.h"
#include "gates.h"
#include "kernels.h"
#include "memory.h"

// The rounded rows, in the memory that the caller gives. ROWS_BESIDE of them lie beside each other: of all their first
// inputs, as many as are read at once, then of all their next; so do what belongs to blocks and groups.
struct Rounded {
    int8_t *numbers;    // [T, I]
    float *scales;      // [T, B]
    int32_t *starts;    // [T, B], what the integers of a block begin with
    float *group_sums;  // [T, G], of the inputs
    int32_t *whole;     // [T, G], the same before they are scaled, where groups share scales
};

// Sums [rows, STRIP] of up to ROWS_BESIDE rows from `row` on with a whole strip, each times its output's own scale. Meanwhile
// `ask` lines of what is read `next` are asked for with each block of inputs.
#define STRIP_SUMS(isa)                                                                                               \
    extern "C" __attribute__((visibility("hidden"))) void NAMED(strip_sums, isa)(                                     \
        int rows, const Packed *matrix, int strip, const Rounded *from, int row, float *sums, const uint8_t *next, int ask)
STRIP_SUMS(ISA);

namespace {

const int STRIP = 4 * PANEL;
const int STEP = 4 * STRIP;  // bytes: four inputs of a strip, or eight
const float SMALLEST_SCALE = 1e-12f;

#if defined(TILES)
const int ROWS_BESIDE = 48;  // of three tiles
#else
const int ROWS_BESIDE = TILE_INPUTS;
#endif

// Rows beside each other from a row on.
int tile_rows(int row, int rows) { return rows - row < ROWS_BESIDE ? rows - row : ROWS_BESIDE; }

// Whether so many rows are multiplied in tiles of AMX, and how many of `length` inputs are read at once.
constexpr bool goes_by_tiles(int rows) { return ROWS_BESIDE > TILE_INPUTS && rows > TILE_INPUTS; }
INLINE int inputs_at_once(int rows, int length) {
    if (!goes_by_tiles(rows)) return 4;
    return length % 64 == 0 ? 64 : length % 32 == 0 ? 32 : 16;
}

Rounded room_of(const Packed *matrix, int64_t rows, Memory &memory) {
    int64_t blocks = matrix->inputs / matrix->input_block, groups = matrix->inputs / matrix->group;
    Rounded room;
    room.scales = memory.take<float>(rows * blocks);
    room.starts = memory.take<int32_t>(rows * blocks);
    room.group_sums = memory.take<float>(matrix->shared ? 0 : rows * groups);
    room.whole = memory.take<int32_t>(matrix->shared ? rows * groups : 0);
    room.numbers = memory.take<int8_t>(rows * matrix->inputs);
    return room;
}

int kind_of(const Packed *matrix) {
    return matrix->table ? CODES : matrix->bits == 8 ? BYTES : matrix->bits == 6 ? SIXES : HALVES;
}

// What is taken from each number before it is multiplied, less what instructions take themselves.
int less_of(const Packed *matrix) {
    int kind = kind_of(matrix), middle = matrix->zeros == ZEROS_MIDDLE ? kind == HALVES ? 8 : 128 : 0;
    return middle - (kind == HALVES ? code_less<HALVES>() : code_less<BYTES>());
}

// As an integer the size of what is no number is above all others: the scale is none either, and so is the product.
template <class T> INLINE float largest_of(const T *x, int length) {
    vi largest = {};
    for (int at = 0; at < length; at += LANES) {
        vi size = (vi)load(x + at) & 0x7fffffff;
        largest = (vi)choose(size > largest, (vf)size, (vf)largest);
    }
    int32_t most = 0;
    for (int i = 0; i < LANES; i++) most = largest[i] > most ? largest[i] : most;
    return bits_float((uint32_t)most);
}

// Some inputs, times 1 / `by`, as integers, a row's `at_once`, a power of two, beside those of the next; returns their sum.
template <class T>
INLINE int32_t round_some(const T *x, int length, float by, int8_t *numbers, int beside, int at_once) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    vi sums = {};
    for (int at = 0; at < length; at += LANES) {
        vf q = load(x + at) / by;
        q = choose(q > 127.0f, splat(127.0f), q);
        q = choose(q < -127.0f, splat(-127.0f), q);
        vi whole = (vi)(q + shift) - (int32_t)float_bits(shift);
        sums += whole;
        vs bytes = to_bytes(whole);
        for (int i = 0; i < LANES; i += 4)
            memcpy(numbers + ((at + i) & -at_once) * beside + ((at + i) & (at_once - 1)), (const int8_t *)&bytes + i, 4);
    }
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

// `scale`: of the row; null: blocks have their own.
template <class T>
void round_row(const Packed *matrix, const T *x, const float *scale, int row, int num_rows, const Rounded &to) {
    int length = matrix->input_block, blocks = matrix->inputs / length, groups = matrix->inputs / matrix->group;
    int some = matrix->shared ? matrix->group : length;  // whose sum is asked for
    int less = less_of(matrix), in_group = matrix->group / some, first = row / ROWS_BESIDE * ROWS_BESIDE;
    int beside = tile_rows(first, num_rows), nth = row - first, at_once = inputs_at_once(beside, some);
    int8_t *numbers = to.numbers + (int64_t)first * matrix->inputs + at_once * nth;
    float *scales = to.scales + (int64_t)first * blocks + nth;
    int32_t *starts = to.starts + (int64_t)first * blocks + nth;
    float *group_sums = to.group_sums + (int64_t)first * groups + nth;
    int32_t *whole = to.whole + (int64_t)first * groups + nth;
    float group_sum = 0.0f;
    for (int b = 0; b < blocks; b++) {
        float by = scale ? *scale : largest_of(x, length) / 127.0f;
        if (by < SMALLEST_SCALE) by = SMALLEST_SCALE;
        scales[b * beside] = by;
        for (int at = 0; at < length; at += some, x += some, numbers += some * beside) {
            int32_t sum = round_some(x, some, by, numbers, beside, at_once);
            if (matrix->shared) {
                *whole = sum, whole += beside;
                continue;
            }
            starts[b * beside] = -less * sum;
            group_sum += by * (float)sum;
        }
        if (!matrix->shared && (b + 1) % in_group == 0) {
            group_sums[b / in_group * beside] = group_sum;
            group_sum = 0.0f;
        }
    }
}

int header_of(const Packed *matrix) {
    static const int OF_ZEROS[] = {0, STRIP, 2 * STRIP};
    return 2 * STRIP + OF_ZEROS[matrix->zeros];
}

// Before a block's numbers, where groups share scales: of these and, for offsets, of as many more.
int shared_header_of(const Packed *matrix) {
    return STRIP * (2 + matrix->shared / matrix->group) * (matrix->zeros == ZEROS_OFFSETS ? 2 : 1);
}

int64_t strip_bytes(const Packed *matrix) {
    int64_t headers = matrix->shared ? matrix->inputs / matrix->shared * shared_header_of(matrix)
                                     : matrix->inputs / matrix->group * header_of(matrix);
    return headers + (int64_t)STRIP * matrix->inputs * matrix->bits / 8;
}

}  // namespace
