// Pairs of neighbours in bfloat16, multiplied and added in one instruction (AVX-512 BF16, BF16 of Arm); see products.h.
#pragma once
#include "simd.h"

namespace {

#if defined(__AVX512BF16__)
#define HAS_PAIRS

struct Pairs {
    typedef __m512i Vector;
    static const int size = 2;
    INLINE vf madd(vf sum, const uint32_t *a, Vector b) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)*a), (__m512bh)b);
    }
    INLINE Vector fetch(const uint32_t *p) { return _mm512_loadu_si512(p); }
    INLINE vf dot(vf sum, vi a, vi b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
};

// One of the first row, one of the second, LANES of each.
INLINE void take_turns(const bf16 *first, const bf16 *second, uint32_t *to) {
    __m512i order;  // one of the lower half, one of the upper
    uint16_t turns[32];
    for (int i = 0; i < 32; i++) turns[i] = i / 2 + i % 2 * 16;
    memcpy(&order, turns, sizeof order);
    __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first));
    both = _mm512_inserti64x4(both, _mm256_loadu_si256((const __m256i *)second), 1);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
}

#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIRS

struct Pairs {
    typedef bfloat16x8_t Vector;
    static const int size = 2;
    INLINE vf madd(vf sum, const uint32_t *a, Vector b) {
        return (vf)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_u32(vdupq_n_u32(*a)), b);
    }
    INLINE Vector fetch(const uint32_t *p) { return vreinterpretq_bf16_u32(vld1q_u32(p)); }
    INLINE vf dot(vf sum, vi a, vi b) { return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b); }
};

INLINE void take_turns(const bf16 *first, const bf16 *second, uint32_t *to) {
    uint16x4x2_t both = {{vld1_u16(first), vld1_u16(second)}};
    vst2_u16((uint16_t *)to, both);
}
#endif

}  // namespace
