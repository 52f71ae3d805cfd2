// Products of rows with a matrix in floats, as dense.cpp and experts.cpp have them in common.
//
// The matrix lies as it is read, from end to end: of each strip of COLUMNS outputs (what is missing of the last is zeros)
// input after input. Where bfloat16 is multiplied (AVX-512 BF16, BF16 of Arm) that is pairs of inputs, as in products.h.
// Elsewhere it becomes floats in registers, which takes half an instruction for each vector: a word has one number of an
// output in its lower half, and of the output LANES further on in its upper half.
//
// Shapes: T rows, I inputs, O outputs.
#pragma once
#include "products.h"

namespace {

const int COLUMNS = MAX_VECTORS * LANES;

// Numbers of a matrix [O, I] whose rows are contiguous; zeros beyond it.
template <class T> struct Source {
    const T *first;
    int64_t stride;
    int inputs, outputs;
    INLINE uint32_t bits(const Source &w, int output, int input) {
        if (output >= w.outputs || input >= w.inputs) return 0;
        const T *p = w.first + output * w.stride + input;
        return sizeof(T) == 4 ? float_bits(*(const float *)p) : *(const bf16 *)p;
    }
};

struct Plain {  // floats
    typedef float Left;
    static const int inputs = 1, words = COLUMNS;  // of a step along the inputs
    INLINE uint32_t word(const Source<float> &w, int output, int nth, int step) {
        return Source<float>::bits(w, output + nth, step);
    }
    INLINE void step(const uint32_t *a, int64_t a_stride, const uint32_t *b, vf (*sums)[MAX_VECTORS], int rows) {
        vf right[MAX_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < MAX_VECTORS; v++) right[v] = load((const float *)b + v * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
            for (int v = 0; v < MAX_VECTORS; v++) sums[m][v] += bits_float(a[m * a_stride]) * right[v];
    }
};

struct Widened {  // bfloat16, as floats
    typedef float Left;
    static const int inputs = 1, words = COLUMNS / 2;
    INLINE uint32_t word(const Source<bf16> &w, int output, int nth, int step) {
        output += nth / LANES * 2 * LANES + nth % LANES;
        return Source<bf16>::bits(w, output, step) | Source<bf16>::bits(w, output + LANES, step) << 16;
    }
    INLINE void step(const uint32_t *a, int64_t a_stride, const uint32_t *b, vf (*sums)[MAX_VECTORS], int rows) {
        vf right[MAX_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < MAX_VECTORS; v += 2) {
            vu both;
            memcpy(&both, b + v / 2 * LANES, sizeof both);
            right[v] = (vf)(both << 16);
            right[v + 1] = (vf)(both & 0xffff0000u);
        }
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
            for (int v = 0; v < MAX_VECTORS; v++) sums[m][v] += bits_float(a[m * a_stride]) * right[v];
    }
};

#if defined(HAS_PAIRS)
struct Multiplied {  // bfloat16, two inputs at once
    typedef bf16 Left;
    static const int inputs = 2, words = COLUMNS;
    INLINE uint32_t word(const Source<bf16> &w, int output, int nth, int step) {
        output += nth;
        return Source<bf16>::bits(w, output, 2 * step) | Source<bf16>::bits(w, output, 2 * step + 1) << 16;
    }
    INLINE void step(const uint32_t *a, int64_t a_stride, const uint32_t *b, vf (*sums)[MAX_VECTORS], int rows) {
        Pairs::Vector right[MAX_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < MAX_VECTORS; v++) right[v] = Pairs::fetch(b + v * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
            for (int v = 0; v < MAX_VECTORS; v++) sums[m][v] = Pairs::madd(sums[m][v], a + m * a_stride, right[v]);
    }
};
typedef Multiplied Bf16Steps;
#else
typedef Widened Bf16Steps;
#endif

template <class T> struct StepsOf {
    typedef Plain type;
};
template <> struct StepsOf<bf16> {
    typedef Bf16Steps type;
};
template <class T> using Steps = typename StepsOf<T>::type;
// What rows are as the left matrix.
template <class T> using Left = typename Steps<T>::Left;

template <class T> int num_steps(int64_t inputs) { return (int)((inputs + Steps<T>::inputs - 1) / Steps<T>::inputs); }
template <class T> int64_t strip_words(int64_t inputs) { return (int64_t)num_steps<T>(inputs) * Steps<T>::words; }
int num_strips(int64_t outputs) { return (int)((outputs + COLUMNS - 1) / COLUMNS); }

INLINE void copy_row(const float *x, int64_t length, float *to) { memcpy(to, x, length * sizeof(float)); }
INLINE void copy_row(const bf16 *x, int64_t length, bf16 *to) { memcpy(to, x, length * sizeof(bf16)); }
INLINE void copy_row(const bf16 *x, int64_t length, float *to) {
    for (int64_t at = 0; at < length; at += LANES) store_some(to + at, load_some(x + at, (int)(length - at)), (int)(length - at));
}

// Sums [ROWS, COLUMNS] of a strip, in the order of the inputs however many rows there are. Memory is asked for ahead: where
// rows are few it is all that limits them, and processors ask too late by themselves.
template <class S, int ROWS>
__attribute__((noinline)) void strip_tile(const uint32_t *a, int64_t a_stride, const uint32_t *strip, int steps, float *sums) {
    const int WORDS_AHEAD = 512, LINE_STEPS = S::words < 16 ? 16 / S::words : 1;  // of 64 bytes
    vf found[ROWS][MAX_VECTORS];
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < MAX_VECTORS; v++) found[m][v] = (vf){};
    int k = 0;
    for (; k + LINE_STEPS <= steps; k += LINE_STEPS) {
#pragma GCC unroll 4
        for (int line = 0; line < S::words * LINE_STEPS; line += 16) ask_for(strip + WORDS_AHEAD + line);
#pragma GCC unroll 4
        for (int nth = 0; nth < LINE_STEPS; nth++, a++, strip += S::words) S::step(a, a_stride, strip, found, ROWS);
    }
    for (; k < steps; k++, a++, strip += S::words) S::step(a, a_stride, strip, found, ROWS);
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < MAX_VECTORS; v++) store(sums + m * COLUMNS + v * LANES, found[m][v]);
}

// The same of up to MAX_ROWS rows, `stride` numbers apart.
template <class T> INLINE void strip_sums(int rows, const Left<T> *x, int64_t stride, const uint32_t *strip, int steps, float *sums) {
    const uint32_t *a = (const uint32_t *)x;
    stride = stride * (int64_t)sizeof(Left<T>) / 4;
    switch (rows) {
        case 1: strip_tile<Steps<T>, 1>(a, stride, strip, steps, sums); break;
        case 2: strip_tile<Steps<T>, 2>(a, stride, strip, steps, sums); break;
        case 3: strip_tile<Steps<T>, 3>(a, stride, strip, steps, sums); break;
        case 4: strip_tile<Steps<T>, 4>(a, stride, strip, steps, sums); break;
        case 5: strip_tile<Steps<T>, 5>(a, stride, strip, steps, sums); break;
        default: strip_tile<Steps<T>, 6>(a, stride, strip, steps, sums);
    }
}

// Of tiles that are as even as possible: eight rows are four and four, as each tile reads the strip again.
INLINE int tile_height(int rows) {
    int tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    return tiles ? (rows + tiles - 1) / tiles : 1;
}

template <class T> void lay_out_strip(const Source<T> &w, int strip, uint32_t *to) {
    for (int step = 0, steps = num_steps<T>(w.inputs); step < steps; step++)
        for (int nth = 0; nth < Steps<T>::words; nth++) *to++ = Steps<T>::word(w, strip * COLUMNS, nth, step);
}

}  // namespace
