// Vectors of the widest kind that the file is compiled for, by the compilers' own vector types: the same source serves
// AVX-512, AVX2, SSE2 and NEON. Everything is static: each instruction set has its own copy of all it calls.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(LANES)  // of 32 bits, as the compiler makes do
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

typedef uint16_t bf16;

INLINE float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE vf splat(float x) { return x - (vf){}; }  // x - 0 keeps the sign of a zero
INLINE vi splat_int(int32_t x) { return x + (vi){}; }

INLINE vf load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

// Of 16 bits to 32 and back, where nothing is lost: of these GCC makes one instruction only by name.
INLINE vu wide(vh h) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
    return __builtin_convertvector(h, vu);
#endif
}

INLINE vh narrow(vu x) {
#if defined(__AVX512F__)
    return (vh)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
    __m256i both = _mm256_packus_epi32((__m256i)x, (__m256i)x);
    return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 0x08));
#else
    return __builtin_convertvector(x, vh);
#endif
}

INLINE vf load(const bf16 *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(wide(h) << 16);
}

// The first n numbers, and zeros.
template <class T> INLINE vf load_some(const T *p, int n) {
    if (n >= LANES) return load(p);
    T some[LANES] = {};
    memcpy(some, p, n * sizeof(T));
    return load(some);
}

INLINE void store(float *p, vf x) { memcpy(p, &x, sizeof x); }

// To the nearest, ties to even; what is no number stays none.
INLINE vh to_bf16(vf x) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    bfloat16x4_t h = vcvt_bf16_f32((float32x4_t)x);
    return (vh)h;
#else
    vu bits = (vu)x;
    vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    vu quiet = bits | 0x400000u;
    vu is_nan = (vu)(x != x);
    return narrow(((rounded & ~is_nan) | (quiet & is_nan)) >> 16);
#endif
}

INLINE void store(bf16 *p, vf x) {
    vh h = to_bf16(x);
    memcpy(p, &h, sizeof h);
}

template <class T> INLINE void store_some(T *p, vf x, int n) {
    if (n >= LANES) return store(p, x);
    T some[LANES];
    store(some, x);
    memcpy(p, some, n * sizeof(T));
}

INLINE vf choose(vi which, vf yes, vf no) { return (vf)(((vi)yes & which) | ((vi)no & ~which)); }

// The larger of each; y where one of them is no number.
INLINE vf larger_of(vf x, vf y) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return choose(x > y, x, y);
#endif
}

INLINE vf power_of_part(vf part) {
    vf y = splat(1.5403530e-4f);
    y = y * part + 1.3333558e-3f;
    y = y * part + 9.6181291e-3f;
    y = y * part + 5.5504109e-2f;
    y = y * part + 2.4022651e-1f;
    y = y * part + 6.9314718e-1f;
    return y * part + 1.0f;
}

// 2^x for x <= 0 or a little over; 0 far below 2^-126; of what is no number, none.
#if defined(__AVX512F__)
INLINE vf exp2_of(vf x) {
    vf near = larger_of(splat(-200.0f), x);
    __m512 whole = _mm512_roundscale_ps((__m512)near, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (vf)_mm512_scalef_ps((__m512)power_of_part(near - (vf)whole), whole);
}
#else
INLINE vf exp2_of(vf x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    vi tiny = x < -126.0f;
    vf near = choose(tiny, splat(-126.0f), x);
    vf shifted = near + shift;
    vf whole = shifted - shift;
    vf part = near - whole;
    vi exponent = ((vi)shifted - (int32_t)float_bits(shift) + 127) << 23;
    return choose(tiny, (vf){}, power_of_part(part) * (vf)exponent);
}
#endif

// What is left of four lanes; halves are taken together before.
typedef float v4 __attribute__((vector_size(16)));

#if defined(__AVX512F__)
INLINE v4 quarter(vf x, int i) {
    if (i == 0) return (v4)_mm512_castps512_ps128((__m512)x);
    if (i == 1) return (v4)_mm512_extractf32x4_ps((__m512)x, 1);
    if (i == 2) return (v4)_mm512_extractf32x4_ps((__m512)x, 2);
    return (v4)_mm512_extractf32x4_ps((__m512)x, 3);
}
#elif defined(__AVX2__)
INLINE v4 quarter(vf x, int i) {
    if (i == 0) return (v4)_mm256_castps256_ps128((__m256)x);
    return (v4)_mm256_extractf128_ps((__m256)x, 1);
}
#else
INLINE v4 quarter(vf x, int i) {
    v4 part;
    memcpy(&part, (const float *)&x + 4 * i, sizeof part);
    return part;
}
#endif

INLINE float sum_of(vf x) {
    v4 sum = quarter(x, 0);
    for (int i = 1; i < LANES / 4; i++) sum = sum + quarter(x, i);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

INLINE float larger(float x, float y) { return x > y ? x : y; }

INLINE float max_of(vf x) {
    v4 most = quarter(x, 0);
    for (int i = 1; i < LANES / 4; i++) {
        v4 other = quarter(x, i);
        most = other > most ? other : most;
    }
    return larger(larger(most[0], most[1]), larger(most[2], most[3]));
}

// Rows become columns.
#if defined(__AVX512F__)
INLINE void transpose(vi *r) {
    __m512i t[16], u[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32((__m512i)r[2 * i], (__m512i)r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)r[2 * i], (__m512i)r[2 * i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; j++) {  // quarter q of u[4 i + j] has column 4 q + j of rows 4 i to 4 i + 3
        __m512i even = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88), odd = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd);
        __m512i even_2 = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88);
        __m512i odd_2 = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
        r[j] = (vi)_mm512_shuffle_i32x4(even, even_2, 0x88);
        r[4 + j] = (vi)_mm512_shuffle_i32x4(odd, odd_2, 0x88);
        r[8 + j] = (vi)_mm512_shuffle_i32x4(even, even_2, 0xdd);
        r[12 + j] = (vi)_mm512_shuffle_i32x4(odd, odd_2, 0xdd);
    }
}
#elif defined(__AVX2__)
INLINE void transpose(vi *r) {
    __m256i t[8], u[8];
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_epi32((__m256i)r[2 * i], (__m256i)r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32((__m256i)r[2 * i], (__m256i)r[2 * i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        r[j] = (vi)_mm256_permute2x128_si256(u[j], u[4 + j], 0x20);
        r[4 + j] = (vi)_mm256_permute2x128_si256(u[j], u[4 + j], 0x31);
    }
}
#elif defined(__aarch64__)
INLINE void transpose(vi *r) {
    int32x4_t t[4];
    for (int i = 0; i < 2; i++) {  // of rows 2 i and 2 i + 1: even columns, odd columns
        t[2 * i] = vtrn1q_s32((int32x4_t)r[2 * i], (int32x4_t)r[2 * i + 1]);
        t[2 * i + 1] = vtrn2q_s32((int32x4_t)r[2 * i], (int32x4_t)r[2 * i + 1]);
    }
    for (int j = 0; j < 2; j++) {
        int64x2_t upper = vreinterpretq_s64_s32(t[j]), lower = vreinterpretq_s64_s32(t[2 + j]);
        r[j] = (vi)vtrn1q_s64(upper, lower);
        r[2 + j] = (vi)vtrn2q_s64(upper, lower);
    }
}
#else
INLINE void transpose(vi *r) {
    vi columns[LANES];
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) columns[i][j] = r[j][i];
    for (int i = 0; i < LANES; i++) r[i] = columns[i];
}
#endif

#if LANES == 8
// Of each half of x and y the sums of neighbours, those of x first.
INLINE vf add_neighbours(vf x, vf y) {
    return (vf)_mm256_shuffle_ps((__m256)x, (__m256)y, 0x88) + (vf)_mm256_shuffle_ps((__m256)x, (__m256)y, 0xdd);
}
#endif

// The sum of each vector's lanes, in one vector.
INLINE vf sum_each(const vf (&x)[LANES]) {
#if LANES == 8
    vf pairs[4], fours[2];
    for (int i = 0; i < 4; i++) pairs[i] = add_neighbours(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 2; i++) fours[i] = add_neighbours(pairs[2 * i], pairs[2 * i + 1]);
    return (vf)_mm256_permute2f128_ps((__m256)fours[0], (__m256)fours[1], 0x20) +
           (vf)_mm256_permute2f128_ps((__m256)fours[0], (__m256)fours[1], 0x31);
#else
    vi rows[LANES];
    memcpy(rows, x, sizeof rows);
    transpose(rows);
    vf parts[4] = {};
    for (int i = 0; i < LANES; i++) parts[i % 4] += (vf)rows[i];
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
#endif
}

}  // namespace
