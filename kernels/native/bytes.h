// Sums of products of bytes: of weights without a sign, four inputs of each of PANEL outputs, by inputs with one. Where
// instructions want weights with a sign, 128 is taken from each, and `code_less` says so.
#pragma once
#include "simd.h"

namespace {

const int PANEL = 16;
const int VECTORS = PANEL / LANES;  // of a panel

// What a matrix is read as: bytes; halves of bytes; six bits; or halves of bytes that stand for one of sixteen bytes.
enum { BYTES, HALVES, SIXES, CODES };
constexpr int bits_of(int kind) { return kind == BYTES ? 8 : kind == SIXES ? 6 : 4; }

#if defined(__AVX512VNNI__)

struct Codes {
    __m512i of;
};
typedef __m512i Sums;
typedef __m512i Inputs;
typedef __m512i Table;

const int TILE_INPUTS = 6;
constexpr int panels_at(int) { return 4; }  // 24 sums in 32 registers
template <int KIND> constexpr int code_less() { return 0; }

INLINE Sums splat_sum(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Inputs splat_inputs(const int8_t *four) {
    int32_t bits;
    memcpy(&bits, four, 4);
    return _mm512_set1_epi32(bits);
}
INLINE Codes load_codes(const uint8_t *p) { return {_mm512_loadu_si512(p)}; }
INLINE Codes low_codes(const uint8_t *p) { return {_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15))}; }
INLINE Codes high_codes(const uint8_t *p) {
    return {_mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15))};
}
template <int NTH> INLINE Codes with_upper(const Codes &lower, const uint8_t *p) {
    __m512i bits = _mm512_loadu_si512(p);
    bits = NTH < 2 ? _mm512_slli_epi16(bits, (4 - 2 * NTH) & 7) : _mm512_srli_epi16(bits, (2 * NTH - 4) & 7);
    return {_mm512_ternarylogic_epi32(lower.of, bits, _mm512_set1_epi8(48), 0xf8)};  // lower | bits & 48
}
INLINE Table load_table(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
INLINE Codes look_up(Table table, const Codes &codes) { return {_mm512_shuffle_epi8(table, codes.of)}; }
template <int KIND> INLINE Sums add_products(Sums sums, const Codes &codes, Inputs inputs) {
    // As the intrinsic GCC 12 copies the sums around it, and has no registers left for a tile of them.
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes.of), "v"(inputs));
    return sums;
}
struct Small {
    __m512i of;
};
INLINE Small load_small(const uint8_t *p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))}; }
INLINE Sums add_scaled(Sums sums, const Sums &some, const Small &scales) {
    return _mm512_add_epi32(sums, _mm512_mullo_epi32(some, scales.of));
}
INLINE Sums add_small(Sums sums, const Small &numbers, int32_t by) {  // which fits 16 bits: whole products take longer
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(numbers.of), "v"(_mm512_set1_epi32(by & 0xffff)));
    return sums;
}
INLINE vf sum_floats(const Sums &sums, int) { return (vf)_mm512_cvtepi32_ps(sums); }

#elif defined(__AVX2__)

struct Codes {
    __m256i of[2];
};
struct Sums {
    __m256i of[2];
};
typedef __m256i Inputs;
typedef __m256i Table;

const int TILE_INPUTS = 4;
constexpr int panels_at(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }  // 8 sums in 16 registers, or 4
// Two products of eight bits by eight do not fit 16: weights are taken with a sign, which the inputs then get.
template <int KIND> constexpr int code_less() { return KIND == HALVES || KIND == SIXES ? 0 : 128; }

INLINE Sums splat_sum(int32_t x) { return {{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}}; }
INLINE Inputs splat_inputs(const int8_t *four) {
    int32_t bits;
    memcpy(&bits, four, 4);
    return _mm256_set1_epi32(bits);
}
INLINE __m256i half_of(const uint8_t *p, int half) { return _mm256_loadu_si256((const __m256i *)p + half); }
INLINE Codes load_codes(const uint8_t *p) {
    const __m256i sign = _mm256_set1_epi8(-128);
    return {{_mm256_xor_si256(half_of(p, 0), sign), _mm256_xor_si256(half_of(p, 1), sign)}};
}
INLINE Codes low_codes(const uint8_t *p) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {{_mm256_and_si256(half_of(p, 0), mask), _mm256_and_si256(half_of(p, 1), mask)}};
}
INLINE Codes high_codes(const uint8_t *p) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {{_mm256_and_si256(_mm256_srli_epi16(half_of(p, 0), 4), mask),
             _mm256_and_si256(_mm256_srli_epi16(half_of(p, 1), 4), mask)}};
}
INLINE __m256i upper_of(__m256i bits, int nth) {
    bits = nth < 2 ? _mm256_slli_epi16(bits, 4 - 2 * nth) : _mm256_srli_epi16(bits, 2 * nth - 4);
    return _mm256_and_si256(bits, _mm256_set1_epi8(48));
}
template <int NTH> INLINE Codes with_upper(const Codes &lower, const uint8_t *p) {
    return {{_mm256_or_si256(lower.of[0], upper_of(half_of(p, 0), NTH)),
             _mm256_or_si256(lower.of[1], upper_of(half_of(p, 1), NTH))}};
}
INLINE Table load_table(const uint8_t *p) {
    __m128i bytes = _mm_xor_si128(_mm_loadu_si128((const __m128i *)p), _mm_set1_epi8(-128));
    return _mm256_broadcastsi128_si256(bytes);
}
INLINE Codes look_up(Table table, const Codes &codes) {
    return {{_mm256_shuffle_epi8(table, codes.of[0]), _mm256_shuffle_epi8(table, codes.of[1])}};
}
// Halves by bytes: of NARROW_INPUTS even all sums fit 16 bits, so that they are widened once.
#define NARROW_INPUTS 32
INLINE void add_narrow(Sums &sums, const Codes &codes, Inputs inputs) {
    for (int half = 0; half < 2; half++) {
        __m256i pairs = _mm256_maddubs_epi16(codes.of[half], inputs);
        // GCC would add up products first, and have no registers left for all of them.
        __asm__("vpaddw %1, %0, %0" : "+x"(sums.of[half]) : "x"(pairs));
    }
}
INLINE Sums widened(Sums sums, const Sums &narrow) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int half = 0; half < 2; half++)
        sums.of[half] = _mm256_add_epi32(sums.of[half], _mm256_madd_epi16(narrow.of[half], ones));
    return sums;
}
template <int KIND> INLINE Sums add_products(Sums sums, const Codes &codes, Inputs inputs) {
    Sums pairs;
    for (int half = 0; half < 2; half++)
        pairs.of[half] = code_less<KIND>() ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes.of[half]),
                                                                  _mm256_sign_epi8(inputs, codes.of[half]))
                                           : _mm256_maddubs_epi16(codes.of[half], inputs);
    return widened(sums, pairs);
}
struct Small {
    __m256i of[2];  // each twice, in 16 bits
};
INLINE Small load_small(const uint8_t *p) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return {{_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes)),
             _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(bytes, bytes))}};
}
INLINE Sums add_scaled(Sums sums, const Sums &narrow, const Small &scales) {
    for (int half = 0; half < 2; half++)
        sums.of[half] = _mm256_add_epi32(sums.of[half], _mm256_madd_epi16(narrow.of[half], scales.of[half]));
    return sums;
}
INLINE Sums add_small(Sums sums, const Small &numbers, int32_t by) {
    __m256i one = _mm256_set1_epi32(by & 0xffff);
    for (int half = 0; half < 2; half++)
        sums.of[half] = _mm256_add_epi32(sums.of[half], _mm256_madd_epi16(numbers.of[half], one));
    return sums;
}
#if LANES == 16
INLINE vf sum_floats(const Sums &sums, int) {
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(sums.of[0]), sums.of[1], 1);
    return (vf)_mm512_cvtepi32_ps(both);
}
#else
INLINE vf sum_floats(const Sums &sums, int vector) { return (vf)_mm256_cvtepi32_ps(sums.of[vector]); }
#endif

#elif defined(__ARM_FEATURE_DOTPROD)

struct Codes {
    int8x16_t of[4];
};
struct Sums {
    int32x4_t of[4];
};
typedef int8x16_t Inputs;
typedef int8x16_t Table;

const int TILE_INPUTS = 6;
constexpr int panels_at(int) { return 1; }  // 24 sums in 32 registers
template <int KIND> constexpr int code_less() { return KIND == HALVES || KIND == SIXES ? 0 : 128; }

INLINE Sums splat_sum(int32_t x) { return {{vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}}; }
INLINE Inputs splat_inputs(const int8_t *four) {
    int32_t bits;
    memcpy(&bits, four, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(bits));
}
INLINE int8x16_t signed_bytes(const uint8_t *p) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(128))); }
INLINE int8x16_t low_halves(const uint8_t *p) { return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15))); }
INLINE int8x16_t high_halves(const uint8_t *p) { return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4)); }
INLINE Codes load_codes(const uint8_t *p) {
    return {{signed_bytes(p), signed_bytes(p + 16), signed_bytes(p + 32), signed_bytes(p + 48)}};
}
INLINE Codes low_codes(const uint8_t *p) {
    return {{low_halves(p), low_halves(p + 16), low_halves(p + 32), low_halves(p + 48)}};
}
INLINE Codes high_codes(const uint8_t *p) {
    return {{high_halves(p), high_halves(p + 16), high_halves(p + 32), high_halves(p + 48)}};
}
template <int NTH> INLINE Codes with_upper(const Codes &lower, const uint8_t *p) {
    Codes codes;
    for (int i = 0; i < 4; i++) {
        uint8x16_t bits = vld1q_u8(p + 16 * i);
        bits = NTH < 2 ? bits << (4 - 2 * NTH & 7) : bits >> (2 * NTH - 4 & 7);
        codes.of[i] = vorrq_s8(lower.of[i], vreinterpretq_s8_u8(vandq_u8(bits, vdupq_n_u8(48))));
    }
    return codes;
}
INLINE Table load_table(const uint8_t *p) { return signed_bytes(p); }
INLINE Codes look_up(Table table, const Codes &codes) {
    Codes found;
    for (int i = 0; i < 4; i++) found.of[i] = vqtbl1q_s8(table, vreinterpretq_u8_s8(codes.of[i]));
    return found;
}
template <int KIND> INLINE Sums add_products(Sums sums, const Codes &codes, Inputs inputs) {
    for (int i = 0; i < 4; i++) sums.of[i] = vdotq_s32(sums.of[i], codes.of[i], inputs);
    return sums;
}
typedef Sums Small;
INLINE Small load_small(const uint8_t *p) {
    int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
             vmovl_s16(vget_high_s16(high))}};
}
INLINE Sums add_scaled(Sums sums, const Sums &some, const Small &scales) {
    for (int i = 0; i < 4; i++) sums.of[i] = vmlaq_s32(sums.of[i], some.of[i], scales.of[i]);
    return sums;
}
INLINE Sums add_small(Sums sums, const Small &numbers, int32_t by) {
    for (int i = 0; i < 4; i++) sums.of[i] = vmlaq_n_s32(sums.of[i], numbers.of[i], by);
    return sums;
}
INLINE vf sum_floats(const Sums &sums, int vector) { return (vf)vcvtq_f32_s32(sums.of[vector]); }

#else

struct Codes {
    uint8_t of[4 * PANEL];
};
struct Sums {
    int32_t of[PANEL];
};
typedef const int8_t *Inputs;
typedef const uint8_t *Table;

const int TILE_INPUTS = 1;
constexpr int panels_at(int) { return 1; }
template <int KIND> constexpr int code_less() { return 0; }

INLINE Sums splat_sum(int32_t x) {
    Sums sums;
    for (int o = 0; o < PANEL; o++) sums.of[o] = x;
    return sums;
}
INLINE Inputs splat_inputs(const int8_t *four) { return four; }
INLINE Codes load_codes(const uint8_t *p) {
    Codes codes;
    memcpy(codes.of, p, sizeof codes.of);
    return codes;
}
INLINE Codes low_codes(const uint8_t *p) {
    Codes codes;
    for (int i = 0; i < 4 * PANEL; i++) codes.of[i] = p[i] & 15;
    return codes;
}
INLINE Codes high_codes(const uint8_t *p) {
    Codes codes;
    for (int i = 0; i < 4 * PANEL; i++) codes.of[i] = p[i] >> 4;
    return codes;
}
template <int NTH> INLINE Codes with_upper(const Codes &lower, const uint8_t *p) {
    Codes codes;
    for (int i = 0; i < 4 * PANEL; i++) codes.of[i] = lower.of[i] | (p[i] >> 2 * NTH & 3) << 4;
    return codes;
}
INLINE Table load_table(const uint8_t *p) { return p; }
INLINE Codes look_up(Table table, const Codes &codes) {
    Codes found;
    for (int i = 0; i < 4 * PANEL; i++) found.of[i] = table[codes.of[i]];
    return found;
}
template <int KIND> INLINE Sums add_products(Sums sums, const Codes &codes, Inputs inputs) {
    for (int o = 0; o < PANEL; o++)
        for (int i = 0; i < 4; i++) sums.of[o] += codes.of[4 * o + i] * inputs[i];
    return sums;
}
typedef Sums Small;
INLINE Small load_small(const uint8_t *p) {
    Small numbers;
    for (int o = 0; o < PANEL; o++) numbers.of[o] = (int8_t)p[o];
    return numbers;
}
INLINE Sums add_scaled(Sums sums, const Sums &some, const Small &scales) {
    for (int o = 0; o < PANEL; o++) sums.of[o] += some.of[o] * scales.of[o];
    return sums;
}
INLINE Sums add_small(Sums sums, const Small &numbers, int32_t by) {
    for (int o = 0; o < PANEL; o++) sums.of[o] += numbers.of[o] * by;
    return sums;
}
INLINE vf sum_floats(const Sums &sums, int vector) {
    vi part;
    memcpy(&part, sums.of + vector * LANES, sizeof part);
    return __builtin_convertvector(part, vf);
}
#endif

// Of 16 bits to 32, as IEEE 754 has them both.
INLINE vf of_halves(vh h) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)h));
#else
    vu bits = wide(h), has_no_size = (vu)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    vf size = (vf)((bits & 0x7fffu) << 13) * 0x1p112f;
    return (vf)((vu)size | has_no_size | (bits & 0x8000u) << 16);
#endif
}
INLINE vf load_halves(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return of_halves(h);
}

typedef uint8_t vb __attribute__((vector_size(LANES)));
typedef int8_t vs __attribute__((vector_size(LANES)));

INLINE vf load_bytes(const uint8_t *p) {
    vb bytes;
    memcpy(&bytes, p, sizeof bytes);
#if defined(__AVX512F__)
    return __builtin_convertvector((vi)_mm512_cvtepu8_epi32((__m128i)bytes), vf);
#elif defined(__AVX2__)
    return __builtin_convertvector((vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes)), vf);
#else
    return __builtin_convertvector(__builtin_convertvector(bytes, vi), vf);
#endif
}

// Of numbers that fit.
INLINE vs to_bytes(vi x) {
#if defined(__AVX512F__)
    return (vs)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32((__m256i)x, (__m256i)x), _mm256_setzero_si256());
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0));
    return (vs)_mm_cvtsi128_si64(_mm256_castsi256_si128(bytes));
#else
    return __builtin_convertvector(x, vs);
#endif
}

}  // namespace
