// Numbers of 8 bits in pages: OCP e4m3 ("fn": no infinity) and e5m2, each the code of a number that a layer's scale multiplies.
// Source: Micikevicius et al., arXiv 2209.05433.
#pragma once
#include "bytes.h"

namespace {

struct e4m3 {
    uint8_t code;
    static constexpr int FRACTION = 3, BIAS = 7;
    static constexpr float LARGEST = 448.0f;
};
struct e5m2 {
    uint8_t code;
    static constexpr int FRACTION = 2, BIAS = 15;
    static constexpr float LARGEST = 57344.0f;
};

// What a number is times when it is read as `load` does.
template <class T> constexpr float unit_of() { return 1.0f; }
template <> constexpr float unit_of<e4m3>() { return 0x1p8f; }

// Codes, their uppermost bit in all that are above them.
INLINE vh load_signed(const void *p) {
#if defined(__AVX512F__)
    return (vh)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vh)_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
#else
    vs codes;
    memcpy(&codes, p, sizeof codes);
    return __builtin_convertvector(codes, vh);
#endif
}

// e5m2 is the upper half of a float16.
INLINE vf load(const e5m2 *p) { return of_halves(load_signed(p) << 8); }

// As a float16 with the same bits, whose exponents begin 8 lower; float32's begin so much lower that small numbers would
// be below all exponents, which processors take long over.
INLINE vf load(const e4m3 *p) {
    vh bits = load_signed(p) << 7;
    vh no_number = (vh)((bits & 0x3f80) == 0x3f80);
    return of_halves((bits & 0xbfff) | no_number);
}

// To the nearest, ties to even; what is too large becomes the largest, and what is no number stays none.
template <class T> INLINE void store_codes(T *p, vf x, int count) {
    const int CUT = 23 - T::FRACTION;
    const float LAST_PLACE = (float)(1 << (24 - T::BIAS - T::FRACTION));  // its own is that of the smallest numbers
    vf size = (vf)((vi)x & 0x7fffffff);
    size = choose(size > T::LARGEST, splat(T::LARGEST), size);
    vu bits = (vu)size;
    vu normal = ((bits + ((1u << (CUT - 1)) - 1) + (bits >> CUT & 1u)) >> CUT) - ((127u - T::BIAS) << T::FRACTION);
    vi small = (vi)(size + LAST_PLACE) - (vi)splat(LAST_PLACE);
    vi is_small = (vi)bits < (128 - T::BIAS) << 23, is_none = x != x;
    vi code = (small & is_small) | ((vi)normal & ~is_small);
    code = (code & ~is_none) | (is_none & 0x7f) | (((vi)x >> 24) & 0x80);
    for (int i = 0; i < LANES && i < count; i++) p[i].code = (uint8_t)code[i];
}

}  // namespace
