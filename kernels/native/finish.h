// What follows a product, in the same pass as its sums.
#pragma once
#include "gates.h"
#include "kernels.h"
#include "simd.h"

namespace {

// Writes the sums of a row for some columns from `column` on, of `outputs` in all.
template <class T>
INLINE void put(const Product *product, int outputs, int row, int column, int columns, const float *sums) {
    int left = outputs - column < columns ? outputs - column : columns;
    T *out = (T *)product->out + (int64_t)row * product->out_stride + column;
    const T *other = (const T *)product->other;
    if (other) other += (int64_t)row * product->other_stride + column;
    for (int at = 0; at < left; at += LANES) {
        int some = left - at;
        vf y = load(sums + at);
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

}  // namespace
