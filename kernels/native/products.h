// Products of small matrices that lie in a core's caches, and how rows of pages are laid out for them.
//
// `Units` are what the inner index counts: one float, or where bfloat16 is multiplied (AVX-512 BF16, BF16 of Arm) a pair
// of neighbours, multiplied and added in one instruction. A row of the left matrix is units beside each other; of the right one, unit k of LANES columns is a
// vector.
#pragma once
#if defined(PAIRS)
#include PAIRS
#else
#include "pairs.h"
#endif

namespace {

template <int NUMBER> struct Fixed {
    static const int value = NUMBER;
};

// Runs with each number below COUNT.
template <int COUNT, class Run> INLINE void for_each(const Run &run) {
    if constexpr (COUNT > 0) {
        for_each<COUNT - 1>(run);
        run(Fixed<COUNT - 1>());
    }
}

struct Singles {
    typedef vf Vector;
    static const int size = 1;
    INLINE vf madd(vf sum, const uint32_t *a, Vector b) { return sum + bits_float(*a) * b; }
    INLINE Vector fetch(const uint32_t *p) { return load((const float *)p); }
    INLINE vf dot(vf sum, vi a, vi b) { return sum + (vf)a * (vf)b; }
};

template <class T> struct UnitsOf {
    typedef Singles type;
};
#if defined(HAS_PAIRS)
template <> struct UnitsOf<bf16> {
    typedef Pairs type;
};
#endif

#if LANES == 16 || defined(__aarch64__)
const int MAX_VECTORS = 4, MAX_ROWS = 6;  // 24 sums in 32 registers
#else
const int MAX_VECTORS = 2, MAX_ROWS = 6;  // 12 in 16
#endif

// The right matrix as one piece, or as rows that lie anywhere.
struct Whole {
    const uint32_t *first;
    int stride;
    INLINE const uint32_t *row(const Whole &b, int k) { return b.first + (int64_t)k * b.stride; }
};
struct Scattered {
    const uint32_t *const *rows;
    INLINE const uint32_t *row(const Scattered &b, int k) { return b.rows[k]; }
};

template <class Units, class Right, int ROWS, int VECTORS>
__attribute__((noinline)) void product_tile(
    const uint32_t *a, int a_stride, Right b, int column, int num_units, float *c, int c_stride, bool add) {
    vf sums[ROWS][VECTORS];
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++)
            sums[m][v] = add ? load(c + (int64_t)m * c_stride + v * LANES) : (vf){};
    for (int k = 0; k < num_units; k++) {
        const uint32_t *from = Right::row(b, k) + column;
        typename Units::Vector right[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) right[v] = Units::fetch(from + v * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                sums[m][v] = Units::madd(sums[m][v], a + (int64_t)m * a_stride + k, right[v]);
    }
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++) store(c + (int64_t)m * c_stride + v * LANES, sums[m][v]);
}

template <class Units, class Right, int VECTORS>
INLINE void product_columns(
    const uint32_t *a, int a_stride, Right b, int column, int units, float *c, int c_stride, int rows, bool add) {
    for (int m = 0; m < rows; m += MAX_ROWS) {
        const uint32_t *from = a + (int64_t)m * a_stride;
        float *to = c + (int64_t)m * c_stride + column;
        switch (rows - m) {
            case 1: product_tile<Units, Right, 1, VECTORS>(from, a_stride, b, column, units, to, c_stride, add); break;
            case 2: product_tile<Units, Right, 2, VECTORS>(from, a_stride, b, column, units, to, c_stride, add); break;
            case 3: product_tile<Units, Right, 3, VECTORS>(from, a_stride, b, column, units, to, c_stride, add); break;
            case 4: product_tile<Units, Right, 4, VECTORS>(from, a_stride, b, column, units, to, c_stride, add); break;
            case 5: product_tile<Units, Right, 5, VECTORS>(from, a_stride, b, column, units, to, c_stride, add); break;
            default: product_tile<Units, Right, 6, VECTORS>(from, a_stride, b, column, units, to, c_stride, add);
        }
    }
}

// c [rows, columns] = or += a [rows, units] b [units, columns]; columns is a multiple of LANES.
template <class Units, class Right>
INLINE void product(
    const uint32_t *a, int a_stride, Right b, int units, float *c, int c_stride, int rows, int columns, bool add) {
    int column = 0;
    for (; column + MAX_VECTORS * LANES <= columns; column += MAX_VECTORS * LANES)
        product_columns<Units, Right, MAX_VECTORS>(a, a_stride, b, column, units, c, c_stride, rows, add);
    for (; column < columns; column += LANES)
        product_columns<Units, Right, 1>(a, a_stride, b, column, units, c, c_stride, rows, add);
}

INLINE int rounded_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// LANES units of a row from p on, of which `left` elements are there; zeros after them.
template <class Units, class T> INLINE vi units_of(const T *p, int left) {
    if (left >= LANES * Units::size) {
        if (Units::size == 1) return (vi)load(p);
        vi x;
        memcpy(&x, p, sizeof x);
        return x;
    }
    T some[LANES * Units::size] = {};
    for (int i = 0; i < left; i++) some[i] = p[i];
    return units_of<Units>(some, LANES * Units::size);
}

// Queries as the left matrix: a row of units.
template <class Units, class T> INLINE void lay_out_row(const T *row, int length, uint32_t *to) {
    for (int at = 0; at < length; at += LANES * Units::size, to += LANES) {
        vi units = units_of<Units>(row + at, length - at);
        memcpy(to, &units, sizeof units);
    }
}

// So many rows after the one that is looked at the next are asked for.
const int AHEAD = 32;

// Asks for the memory at p, which is needed soon.
INLINE void ask_for(const void *p) { __builtin_prefetch(p, 0, 3); }

template <class Units, class T>
INLINE void lay_out_keys_at(const T *const *rows, int at, int left, uint32_t *to, int stride) {
    vi block[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        block[i] = units_of<Units>(rows[i] + at, left);
        ask_for(rows[AHEAD + i] + at);
    }
    transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) memcpy(to + i * stride, &block[i], sizeof block[i]);
}

// Keys as the right matrix: LANES rows become columns, `stride` units from one unit of a key to the next. Along the way
// those that come AHEAD rows later are asked for: all at once would wait for each other.
template <class Units, class T> INLINE void lay_out_keys(const T *const *rows, int length, uint32_t *to, int stride) {
    const int step = LANES * Units::size;
    int at = 0;
    for (; at + step <= length; at += step, to += LANES * stride) lay_out_keys_at<Units>(rows, at, step, to, stride);
    if (at < length) lay_out_keys_at<Units>(rows, at, length - at, to, stride);
}

// Values as the right matrix: a unit is one number of a row, or of two rows.
template <class T>
INLINE void lay_out_values(Singles, const T *const *rows, int length, uint32_t *to) {
    for (int at = 0; at < length; at += LANES, to += LANES) {
        ask_for(rows[AHEAD] + at);
        vf x = load_some(rows[0] + at, length - at);
        memcpy(to, &x, sizeof x);
    }
}
#if defined(HAS_PAIRS)
INLINE void lay_out_values(Pairs, const bf16 *const *rows, int length, uint32_t *to) {
    for (int at = 0; at < length; at += LANES, to += LANES) {
        ask_for(rows[AHEAD + at / LANES % 2] + at);
        bf16 some[2][LANES];
        const bf16 *first = rows[0] + at, *second = rows[1] + at;
        if (length - at < LANES) {
            memset(some, 0, sizeof some);
            for (int i = 0; i < length - at; i++) some[0][i] = first[i], some[1][i] = second[i];
            first = some[0], second = some[1];
        }
        take_turns(first, second, to);
    }
}
#endif

// Weights of the softmax as the left matrix, in place of the floats or before them.
INLINE void lay_out_weights(Singles, float *weights, int at, vf p) { store(weights + at, p); }
#if defined(HAS_PAIRS)
INLINE void lay_out_weights(Pairs, float *weights, int at, vf p) { store((bf16 *)weights + at, p); }
#endif

}  // namespace
