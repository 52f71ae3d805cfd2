// Products of pairs in bfloat16 for processors without them: in the place of pairs.h, of vectors of any length.
#pragma once
#include "simd.h"

#define HAS_PAIRS

namespace {

struct Pairs {
    typedef vi Vector;
    static const int size = 2;
    INLINE vf dot(vf sum, vi a, vi b) {
        vf odd = (vf)(a & (int32_t)0xffff0000) * (vf)(b & (int32_t)0xffff0000);
        return sum + odd + (vf)(a << 16) * (vf)(b << 16);
    }
    INLINE vf madd(vf sum, const uint32_t *a, Vector b) { return dot(sum, splat_int((int32_t)*a), b); }
    INLINE Vector fetch(const uint32_t *p) {
        Vector x;
        memcpy(&x, p, sizeof x);
        return x;
    }
};

INLINE void take_turns(const bf16 *first, const bf16 *second, uint32_t *to) {
    for (int i = 0; i < LANES; i++) to[i] = first[i] | (uint32_t)second[i] << 16;
}

}  // namespace
