// Products with a matrix in numbers of 4 or 8 bits. Compiled once for every instruction set.
//
// Inputs are rounded to 8 bits, `input_block` of a row at a time, and bytes are multiplied by bytes: sums of a block are
// exact. Value of a weight: scale * (number - zero point), or scale * number - offset. So with x = d a for the inputs of
// a block, a group adds scale * sum(d * sum(number * a)) - offset * sum(d * sum(a)); where the zero point is the middle of
// all numbers, the sums of integers begin with what it takes away.
//
// The matrix lies as it is read, from end to end: of each STRIP of outputs (what is missing of the last is zeros) group
// after group; of each group its scales, its zero points or offsets, and then the numbers: four inputs of each output
// beside each other, and in the upper halves of bytes of 4 bits the four that follow.
//
// Shapes: T rows, I inputs, O outputs, G groups, B blocks of inputs.
#include "bytes.h"
#include "gates.h"
#include "kernels.h"

namespace {

const int STRIP = 4 * PANEL;
const int MOST_ASKED = 16;  // lines at once: more would wait for each other
const int STEP = 4 * STRIP;  // bytes: four inputs of a strip, or eight
const float SMALLEST_SCALE = 1e-12f;

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The rounded rows, in the memory that the caller gives. TILE_INPUTS of them lie beside each other: of all their first
// four inputs, then of all their next; so do what belongs to blocks and groups.
struct Rounded {
    int8_t *numbers;    // [T, I]
    float *scales;      // [T, B]
    int32_t *starts;    // [T, B], what the integers of a block begin with
    float *group_sums;  // [T, G], of the inputs
    int32_t *next;      // the strip that nobody has taken yet
};

// Rows of the tile that begins at a row.
int tile_rows(int row, int rows) { return rows - row < TILE_INPUTS ? rows - row : TILE_INPUTS; }

int64_t lay_out(const Packed *matrix, int64_t rows, char *memory, Rounded *rounded_rows) {
    int64_t at = 0, blocks = matrix->inputs / matrix->input_block, groups = matrix->inputs / matrix->group;
    auto take = [&](int64_t bytes) {
        char *here = memory + at;
        at += rounded(bytes);
        return here;
    };
    rounded_rows->next = (int32_t *)take(sizeof(int32_t));
    rounded_rows->scales = (float *)take(rows * blocks * sizeof(float));
    rounded_rows->starts = (int32_t *)take(rows * blocks * sizeof(int32_t));
    rounded_rows->group_sums = (float *)take(rows * groups * sizeof(float));
    rounded_rows->numbers = (int8_t *)take(rows * matrix->inputs);
    return at;
}

int middle_of(const Packed *matrix) { return matrix->zeros == ZEROS_MIDDLE ? 1 << (matrix->bits - 1) : 0; }

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

template <class T> void round_row(const Packed *matrix, const T *x, const float *scale, int row, int num_rows, const Rounded &to) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    int length = matrix->input_block, blocks = matrix->inputs / length, groups = matrix->inputs / matrix->group;
    int less = (matrix->bits == 8 ? code_less<8>() : code_less<4>()) - middle_of(matrix);
    int in_group = matrix->group / length, first = row / TILE_INPUTS * TILE_INPUTS;
    int beside = tile_rows(first, num_rows), nth = row - first;
    int8_t *numbers = to.numbers + (int64_t)first * matrix->inputs + 4 * nth;
    float *scales = to.scales + (int64_t)first * blocks + nth;
    int32_t *starts = to.starts + (int64_t)first * blocks + nth;
    float *group_sums = to.group_sums + (int64_t)first * groups + nth;
    float group_sum = 0.0f;
    for (int b = 0; b < blocks; b++, x += length) {
        float by = scale ? *scale : largest_of(x, length) / 127.0f;
        if (by < SMALLEST_SCALE) by = SMALLEST_SCALE;
        vi sums = {};
        for (int at = 0; at < length; at += LANES) {
            vf q = load(x + at) / by;
            q = choose(q > 127.0f, splat(127.0f), q);
            q = choose(q < -127.0f, splat(-127.0f), q);
            vi whole = (vi)(q + shift) - (int32_t)float_bits(shift);
            sums += whole;
            vs bytes = __builtin_convertvector(whole, vs);
            for (int i = 0; i < LANES; i += 4, numbers += 4 * beside) memcpy(numbers, (const int8_t *)&bytes + i, 4);
        }
        int32_t sum = 0;
        for (int i = 0; i < LANES; i++) sum += sums[i];
        scales[b * beside] = by;
        starts[b * beside] = less * sum;
        group_sum += by * (float)sum;
        if ((b + 1) % in_group == 0) {
            group_sums[b / in_group * beside] = group_sum;
            group_sum = 0.0f;
        }
    }
}

INLINE void ask_for(const void *p) { __builtin_prefetch(p, 0, 2); }

int header_of(const Packed *matrix) {
    static const int OF_ZEROS[] = {0, STRIP, 2 * STRIP};
    return 2 * STRIP + OF_ZEROS[matrix->zeros];
}

int64_t strip_bytes(const Packed *matrix) {
    int64_t groups = matrix->inputs / matrix->group;
    return groups * header_of(matrix) + (int64_t)STRIP * matrix->inputs * matrix->bits / 8;
}

// Sums [ROWS, STRIP] of some rows with PANELS panels of a strip. Meanwhile `ask` lines of what is read `next` are asked
// for with each block.
template <int BITS, int ROWS, int PANELS>
__attribute__((noinline)) void tile(const Packed *matrix, const uint8_t *strip, int panel, const Rounded &from, int row,
                                    float *sums, const uint8_t *next, int ask) {
    const int inputs = matrix->inputs, length = matrix->input_block, groups = inputs / matrix->group;
    const int blocks = inputs / length, in_group = matrix->group / length, zeros = matrix->zeros;
    const int at_once = BITS == 4 ? 8 : 4, header = header_of(matrix);
    const int8_t *a = from.numbers + (int64_t)row * inputs;
    const float *scales = from.scales + (int64_t)row * blocks;
    const int32_t *starts = from.starts + (int64_t)row * blocks;
    const float *group_sums = from.group_sums + (int64_t)row * groups;
    sums += panel * PANEL;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PANELS * VECTORS; v++) store(sums + r * STRIP + v * LANES, (vf){});
    for (int g = 0; g < groups; g++, group_sums += ROWS) {
        const uint16_t *group_scales = (const uint16_t *)strip + panel * PANEL;
        const uint8_t *zeros_at = strip + 2 * STRIP;
        strip += header;
        for (int b = 0; b < in_group; b++) {
            for (int line = 0; line < ask; line++, next += 64) ask_for(next);
            Sums whole[ROWS][PANELS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) whole[r][p] = splat_sum(starts[r]);
            for (int i = 0; i < length; i += at_once, strip += STEP, a += ROWS * at_once) {
                const uint8_t *codes = strip + panel * 4 * PANEL;
                Codes four[PANELS];
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++)
                    four[p] = BITS == 8 ? load_codes(codes + p * 64) : low_codes(codes + p * 64);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    Inputs x = splat_inputs(a + 4 * r);
#pragma GCC unroll 4
                    for (int p = 0; p < PANELS; p++) whole[r][p] = add_products<BITS>(whole[r][p], four[p], x);
                }
                if (BITS == 8) continue;
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) four[p] = high_codes(codes + p * 64);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    Inputs x = splat_inputs(a + 4 * (ROWS + r));
#pragma GCC unroll 4
                    for (int p = 0; p < PANELS; p++) whole[r][p] = add_products<BITS>(whole[r][p], four[p], x);
                }
            }
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    vf scale = load_halves(group_scales + p * PANEL + v * LANES);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++) {
                        float *to = sums + r * STRIP + p * PANEL + v * LANES;
                        store(to, load(to) + sum_floats(whole[r][p], v) * (scale * scales[r]));
                    }
                }
            scales += ROWS, starts += ROWS;
        }
        if (zeros == ZEROS_MIDDLE) continue;
        for (int v = 0; v < PANELS * VECTORS; v++) {
            int at = panel * PANEL + v * LANES;
            vf offset = zeros == ZEROS_OFFSETS ? load_halves((const uint16_t *)zeros_at + at)
                                               : load_bytes(zeros_at + at) * load_halves(group_scales + v * LANES);
            for (int r = 0; r < ROWS; r++) {
                float *to = sums + r * STRIP + v * LANES;
                store(to, load(to) - offset * group_sums[r]);
            }
        }
    }
}

template <int BITS, int PANELS>
INLINE void tile_of(int rows, const Packed *matrix, const uint8_t *strip, int panel, const Rounded &from, int row,
                    float *sums, const uint8_t *next, int ask) {
    switch (rows) {
        case 1: return tile<BITS, 1, PANELS>(matrix, strip, panel, from, row, sums, next, ask);
#if !defined(__AVX512VNNI__) && !defined(__AVX2__)
    }
#else
        case 2: return tile<BITS, 2, PANELS>(matrix, strip, panel, from, row, sums, next, ask);
        case 3: return tile<BITS, 3, PANELS>(matrix, strip, panel, from, row, sums, next, ask);
        case 4: return tile<BITS, 4, PANELS>(matrix, strip, panel, from, row, sums, next, ask);
#if defined(__AVX512VNNI__)
        case 5: return tile<BITS, 5, PANELS>(matrix, strip, panel, from, row, sums, next, ask);
        case 6: return tile<BITS, 6, PANELS>(matrix, strip, panel, from, row, sums, next, ask);
#endif
    }
#endif
}

template <class T> INLINE void put(const Packed *matrix, const Product *product, int row, int column, const float *sums) {
    int left = matrix->outputs - column < STRIP ? matrix->outputs - column : STRIP;
    T *out = (T *)product->out + (int64_t)row * product->out_stride + column;
    const T *other = (const T *)product->other;
    if (other) other += (int64_t)row * product->other_stride + column;
    for (int at = 0; at < left; at += LANES) {
        int some = left - at;
        vf y = load(sums + at) * load_some(matrix->row_scales + column + at, some);
        if (product->bias) y += load_some((const T *)product->bias + column + at, some);
        if (product->then == THEN_ADD)
            y += load_some(other + at, some);
        else if (product->then == THEN_MULTIPLY)
            y *= load_some(other + at, some);
        else if (product->then != THEN_NOTHING)
            y = activated(product->then - THEN_ACTIVATE, y);
        store_some(out + at, y, some);
    }
}

// One strip's products with all rows.
template <class T, int BITS>
void run_strip(const Packed *matrix, const Product *product, const Rounded &from, int strip, int next) {
    int64_t bytes = strip_bytes(matrix);
    const uint8_t *at = matrix->packed + strip * bytes, *ahead = matrix->packed + next * bytes;
    int tiles = (product->rows + TILE_INPUTS - 1) / TILE_INPUTS, blocks = matrix->inputs / matrix->input_block;
    // The first rows wait for the strip itself, the others may ask for the one after it.
    int64_t each = tiles < 2 ? 0 : (bytes / (tiles - 1) + 63) / 64;
    int ask = (int)((each + blocks - 1) / blocks);
    if (ask > MOST_ASKED) ask = MOST_ASKED;
    float sums[TILE_INPUTS * STRIP];
    for (int row = 0, nth = 0; row < product->rows; row += TILE_INPUTS, nth++) {
        int rows = tile_rows(row, product->rows);
        int64_t done = (nth - 1) * (int64_t)ask * blocks * 64;
        bool asks = nth > 0 && done + (int64_t)ask * blocks * 64 <= bytes;
        for (int panel = 0; panel < STRIP / PANEL; panel += TILE_PANELS)
            tile_of<BITS, TILE_PANELS>(rows, matrix, at, panel, from, row, sums, ahead + (asks ? done : 0),
                                       asks && panel == 0 ? ask : 0);
        for (int r = 0; r < rows; r++) put<T>(matrix, product, row + r, strip * STRIP, sums + r * STRIP);
    }
}

template <class T> void run(const Packed *matrix, const Product *product, char *memory, int threads) {
    Rounded rows;
    lay_out(matrix, product->rows, memory, &rows);
    int strips = (matrix->outputs + STRIP - 1) / STRIP;
    *rows.next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int row = 0; row < product->rows; row++)
            round_row(matrix, (const T *)product->x + row * product->x_stride,
                      product->scales ? product->scales + row : nullptr, row, product->rows, rows);
        for (int strip = __atomic_fetch_add(rows.next, 1, __ATOMIC_RELAXED), next; strip < strips; strip = next) {
            next = __atomic_fetch_add(rows.next, 1, __ATOMIC_RELAXED);
            int ahead = next < strips ? next : strip;
            if (matrix->bits == 8)
                run_strip<T, 8>(matrix, product, rows, strip, ahead);
            else
                run_strip<T, 4>(matrix, product, rows, strip, ahead);
        }
    }
}

}  // namespace

extern "C" {

int64_t NAMED(product_room, ISA)(const Packed *matrix, int32_t rows) {
    Rounded rounded_rows;
    return lay_out(matrix, rows, nullptr, &rounded_rows);
}

void NAMED(run_product, ISA)(const Packed *matrix, const Product *product, char *memory, int32_t threads) {
    if (product->is_bf16)
        run<bf16>(matrix, product, memory, threads);
    else
        run<float>(matrix, product, memory, threads);
}
}
