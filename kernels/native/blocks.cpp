// GGUF's blocks: as floats, and laid out anew as quantized.cpp reads a matrix, in one pass. Compiled once for every
// instruction set; nothing is contracted, so that floats are torch's bit for bit.
//
// A block stands for `scale * code - offset` of each group within it. Where a kind has no offsets, its codes are around
// `MIDDLE`, and are stored around the middle of 4, 6 or 8 bits. Of the largest blocks groups' scales and offsets are numbers
// of 8 bits, times two of the block. Layouts of blocks: gguf/blocks.py, ggml's block_q*.
#include "bytes.h"
#include "kernels.h"

namespace {

const int STRIP = 64;    // outputs, of quantized.cpp
const int CHUNK = 256;   // inputs of a row that are taken apart at once: those of the largest block
const int GROUPS = 16;   // of a chunk, at most

INLINE float half_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
#if defined(__F16C__)
    return _cvtsh_ss(half);
#endif
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    float size = (half & 0x7c00) == 0x7c00 ? bits_float(bits | 0x7f800000u) : bits_float(bits) * 0x1p112f;
    return bits_float(float_bits(size) | sign);
}

// To the nearest, ties to even; of finite numbers below 65520.
INLINE void store_halves(uint16_t *to, vf x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < LANES; i++) {
        uint32_t bits = float_bits(x[i]), size = bits & 0x7fffffffu;
        if (size < 0x38800000u)  // below 2^-14 an addition rounds it to multiples of 2^-24
            size = float_bits(bits_float(size) + 0.5f) - float_bits(0.5f);
        else
            size = (size + 0xfffu + ((size >> 13) & 1) - (112u << 23)) >> 13;
        to[i] = (uint16_t)(size | (bits >> 16 & 0x8000u));
    }
#endif
}

INLINE void lower_nibbles(const uint8_t *from, int count, uint8_t *codes) {
    for (int i = 0; i < count; i++) codes[i] = from[i] & 15;
}

INLINE void upper_nibbles(const uint8_t *from, int count, uint8_t *codes) {
    for (int i = 0; i < count; i++) codes[i] = from[i] >> 4;
}

// Of 16 bytes, as compiled products have them: of eight inputs, four in lower halves and four in upper ones.
INLINE void pack_nibbles(const uint8_t *from, uint32_t *lower, uint32_t *upper) {
    const uint64_t mask = 0x0f0f0f0f0f0f0f0full;
    uint64_t some[2];
    memcpy(some, from, sizeof some);
    for (int i = 0; i < 2; i++) {
        uint64_t low = some[i] & mask, high = some[i] >> 4 & mask;
        lower[i] = (uint32_t)(low | low >> 28);
        upper[i] = (uint32_t)(high | high >> 28);
    }
}

// The same of 6 bits: of 16 inputs the lower halves of the first eight, of the others, and all upper bits.
INLINE void pack_sixes(const uint8_t *from, uint32_t *to) {
    const uint32_t lower = 0x0f0f0f0f, two = 0x03030303;
    uint32_t four[4];
    memcpy(four, from, sizeof four);
    to[0] = (four[0] & lower) | (four[1] & lower) << 4;
    to[1] = (four[2] & lower) | (four[3] & lower) << 4;
    to[2] = 0;
    for (int i = 0; i < 4; i++) to[2] |= (four[i] >> 4 & two) << 2 * i;
}

// 16 more where a bit of 32 is set.
INLINE void add_fifth_bits(const uint8_t *from, uint8_t *codes) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((bits >> i & 1) << 4);
}

// Of each kind: numbers and bytes of a block, numbers of a group, bits that a code is kept in, whether it has offsets,
// and the code of zero where it has none.
template <int NUMBERS_, int BYTES_, int GROUP_, int BITS_, bool HAS_OFFSETS_, int MIDDLE_> struct Kind {
    static constexpr int NUMBERS = NUMBERS_, BYTES = BYTES_, GROUP = GROUP_, BITS = BITS_, MIDDLE = MIDDLE_;
    static constexpr bool HAS_OFFSETS = HAS_OFFSETS_, IS_SHARED = false;
    static constexpr int FIRST = 0, RAW = 0;  // where words begin that `packed` takes, and how many; none: it is not there
};

// Of blocks whose groups' scales are small numbers, `small`, times what is `shared` of 16 bits; then the same of offsets.
template <class K> struct Shared {
    static constexpr bool IS_SHARED = true;
    static void scales(const uint8_t *block, float *scales, float *offsets) {
        int8_t small[2][K::NUMBERS / K::GROUP];
        uint16_t shared[2];
        K::parts(block, small[0], small[1], shared);
        for (int g = 0; g < K::NUMBERS / K::GROUP; g++) {
            scales[g] = half_at((const uint8_t *)shared) * (float)small[0][g];
            if (K::HAS_OFFSETS) offsets[g] = half_at((const uint8_t *)(shared + 1)) * (float)small[1][g];
        }
    }
};

struct Q4_0 : Kind<32, 18, 32, 4, false, 8> {
    static void scales(const uint8_t *block, float *scales, float *) { *scales = half_at(block); }
    static void codes(const uint8_t *block, uint8_t *codes) {
        lower_nibbles(block + 2, 16, codes);
        upper_nibbles(block + 2, 16, codes + 16);
    }
    static void words(const uint8_t *block, uint32_t *to) { pack_nibbles(block + 2, to, to + 2); }
};

struct Q4_1 : Kind<32, 20, 32, 4, true, 0> {
    static void scales(const uint8_t *block, float *scales, float *offsets) {
        *scales = half_at(block);
        *offsets = -half_at(block + 2);
    }
    static void codes(const uint8_t *block, uint8_t *codes) { Q4_0::codes(block + 2, codes); }
    static void words(const uint8_t *block, uint32_t *to) { Q4_0::words(block + 2, to); }
};

struct Q5_0 : Kind<32, 22, 32, 8, false, 16> {
    static void scales(const uint8_t *block, float *scales, float *) { *scales = half_at(block); }
    static void codes(const uint8_t *block, uint8_t *codes) {
        Q4_0::codes(block + 4, codes);
        add_fifth_bits(block + 2, codes);
    }
};

struct Q5_1 : Kind<32, 24, 32, 8, true, 0> {
    static void scales(const uint8_t *block, float *scales, float *offsets) { Q4_1::scales(block, scales, offsets); }
    static void codes(const uint8_t *block, uint8_t *codes) { Q5_0::codes(block + 2, codes); }
};

struct Q8_0 : Kind<32, 34, 32, 8, false, 128> {
    static void scales(const uint8_t *block, float *scales, float *) { *scales = half_at(block); }
    static void codes(const uint8_t *block, uint8_t *codes) {
        for (int i = 0; i < 32; i++) codes[i] = block[2 + i] ^ 0x80;
    }
};

struct Q4_K : Kind<256, 144, 32, 4, true, 0>, Shared<Q4_K> {
    using Shared<Q4_K>::IS_SHARED;
    static void parts(const uint8_t *block, int8_t *scales, int8_t *offsets, uint16_t *shared) {
        const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, upper = 0x30303030;
        memcpy(shared, block, 4);
        uint32_t packed[3];
        memcpy(packed, block + 4, 12);
        uint32_t of_scales[2] = {packed[0] & six, (packed[2] & four) | (packed[0] >> 2 & upper)};
        uint32_t of_offsets[2] = {packed[1] & six, (packed[2] >> 4 & four) | (packed[1] >> 2 & upper)};
        memcpy(scales, of_scales, 8);
        memcpy(offsets, of_offsets, 8);
    }
    static void nibbles(const uint8_t *from, uint8_t *codes) {
        for (int part = 0; part < 4; part++, from += 32, codes += 64) {
            lower_nibbles(from, 32, codes);
            upper_nibbles(from, 32, codes + 32);
        }
    }
    static void codes(const uint8_t *block, uint8_t *codes) { nibbles(block + 16, codes); }
    static constexpr int FIRST = 16, RAW = 32;
    template <class Put> static void packed(const vu *raw, const Put &put) {
        for (int part = 0; part < 4; part++)
            for (int i = 0; i < 4; i++, raw += 2) {
                put(part * 8 + i, (raw[0] & 0x0f0f0f0fu) | (raw[1] & 0x0f0f0f0fu) << 4);
                put(part * 8 + 4 + i, (raw[0] >> 4 & 0x0f0f0f0fu) | (raw[1] & 0xf0f0f0f0u));
            }
    }
};

struct Q5_K : Kind<256, 176, 32, 6, true, 0>, Shared<Q5_K> {
    using Shared<Q5_K>::IS_SHARED;
    static void parts(const uint8_t *block, int8_t *scales, int8_t *offsets, uint16_t *shared) {
        Q4_K::parts(block, scales, offsets, shared);
    }
    static void codes(const uint8_t *block, uint8_t *codes) {
        const uint8_t *bits = block + 16;
        Q4_K::nibbles(block + 48, codes);
        for (int group = 0; group < 8; group++)
            for (int i = 0; i < 32; i++) codes[group * 32 + i] |= (uint8_t)((bits[i] >> group & 1) << 4);
    }
};

struct Q6_K : Kind<256, 210, 16, 6, false, 32>, Shared<Q6_K> {
    using Shared<Q6_K>::IS_SHARED;
    static void parts(const uint8_t *block, int8_t *scales, int8_t *, uint16_t *shared) {
        memcpy(scales, block + 192, 16);
        memcpy(shared, block + 208, 2);
    }
    static void codes(const uint8_t *block, uint8_t *codes) {
        const uint8_t *low = block, *high = block + 128;
        for (int half = 0; half < 2; half++, low += 64, high += 32, codes += 128) {
            lower_nibbles(low, 64, codes);
            upper_nibbles(low, 64, codes + 64);
            for (int part = 0; part < 4; part++)
                for (int i = 0; i < 32; i++) codes[part * 32 + i] |= (uint8_t)((high[i] >> 2 * part & 3) << 4);
        }
    }
    static constexpr int FIRST = 0, RAW = 48;
    template <class Put> static void packed(const vu *raw, const Put &put) {
        const vu *low = raw, *high = raw + 32;
        for (int half = 0; half < 2; half++, low += 16, high += 8)
            for (int at = 0; at < 32; at += 4) {  // four words of codes become three
                auto lower = [&](int i) { return low[(at + i) % 16] >> at / 16 * 4 & 0x0f0f0f0fu; };
                auto upper = [&](int i) { return high[(at + i) % 8] >> at / 8 * 2 & 0x03030303u; };
                int word = (half * 32 + at) / 4 * 3;
                put(word, lower(0) | lower(1) << 4);
                put(word + 1, lower(2) | lower(3) << 4);
                put(word + 2, upper(0) | upper(1) << 2 | upper(2) << 4 | upper(3) << 6);
            }
    }
};

template <class K> void decode(const uint8_t *blocks, int64_t count, void *out, bool is_bf16) {
    alignas(64) uint8_t codes[K::NUMBERS];
    alignas(64) float scales[K::NUMBERS / K::GROUP], offsets[K::NUMBERS / K::GROUP];
    int64_t at = 0;
    for (int64_t b = 0; b < count; b++, blocks += K::BYTES) {
        K::scales(blocks, scales, offsets);
        K::codes(blocks, codes);
        for (int i = 0; i < K::NUMBERS; i += LANES, at += LANES) {
            vf value = (load_bytes(codes + i) - (float)K::MIDDLE) * scales[i / K::GROUP];
            if (K::HAS_OFFSETS) value = value - offsets[i / K::GROUP];
            if (is_bf16)
                store((bf16 *)out + at, value);
            else
                store((float *)out + at, value);
        }
    }
}

bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// 1; no number where one of the scales is none. As a strip is read across its rows, which no processor foresees, each is
// asked for whole.
template <class K> float factor_of_shared(const uint8_t *row, int inputs) {
    bool finite = true;
    for (const uint8_t *end = row + (int64_t)(inputs / K::NUMBERS) * K::BYTES; row < end; row += K::BYTES) {
        for (int line = 0; line < K::BYTES; line += 64) __builtin_prefetch(row + line);
        int8_t small[2][K::NUMBERS / K::GROUP];
        uint16_t shared[2] = {};
        K::parts(row, small[0], small[1], shared);
        finite &= is_finite(shared[0]) && is_finite(shared[1]);
    }
    return finite ? 1.0f : __builtin_nanf("");
}

// A power of two not above the largest scale, beside which the offsets fit 16 bits; 1 where all are zeros. No number
// where one of them is none.
template <class K> float factor_of(const uint8_t *row, int inputs) {
    if constexpr (K::IS_SHARED) return factor_of_shared<K>(row, inputs);
    float scales[GROUPS], offsets[GROUPS], most = 0.0f, furthest = 0.0f;
    bool finite = true;
    for (int at = 0; at < inputs; at += K::NUMBERS, row += K::BYTES) {
        K::scales(row, scales, offsets);
        for (int g = 0; g < K::NUMBERS / K::GROUP; g++) {
            float scale = bits_float(float_bits(scales[g]) & 0x7fffffffu);
            finite &= scale < __builtin_inff();
            most = larger(scale, most);
            if (!K::HAS_OFFSETS) continue;
            float offset = bits_float(float_bits(offsets[g]) & 0x7fffffffu);
            finite &= offset < __builtin_inff();
            furthest = larger(offset, furthest);
        }
    }
    if (!finite) return __builtin_nanf("");
    most = larger(most, furthest * 0x1p-14f);
    if (most == 0.0f) return 1.0f;
    return larger(bits_float(float_bits(most) & 0x7f800000u), 0x1p-100f);
}

// A block's numbers as compiled products have them.
template <class K> INLINE void words_of(const uint8_t *block, uint32_t *to) {
    if constexpr (K::BITS == 4) {
        K::words(block, to);
    } else {
        alignas(64) uint8_t codes[K::NUMBERS];
        K::codes(block, codes);
        if constexpr (K::BITS == 6) {
            for (int i = 0; i < K::NUMBERS; i += 16, to += 3) pack_sixes(codes + i, to);
            return;
        }
        if (!K::HAS_OFFSETS && K::MIDDLE != 128)
            for (int i = 0; i < K::NUMBERS; i++) codes[i] += 128 - K::MIDDLE;
        memcpy(to, codes, K::NUMBERS);
    }
}

// Scales and offsets of some inputs of a strip: each group's precede its numbers.
template <class K> struct OwnScales {
    static constexpr int PARTS = K::HAS_OFFSETS ? 2 : 1, OF_GROUP = PARTS * 2 * STRIP, OF_BLOCK = 0;
    alignas(64) float of[PARTS][GROUPS][STRIP] = {};
    void take(const uint8_t *block, int first_group, int row, float inverse) {
        float own[2][GROUPS];
        K::scales(block, own[0], own[1]);
        for (int part = 0; part < PARTS; part++)
            for (int g = 0; g < K::NUMBERS / K::GROUP; g++) of[part][first_group + g][row] = own[part][g] * inverse;
    }
    void put(int groups, int group_bytes, uint8_t *to) const {
        for (int g = 0; g < groups; g++)
            for (int part = 0; part < PARTS; part++)
                for (int row = 0; row < STRIP; row += LANES)
                    store_halves((uint16_t *)(to + g * group_bytes) + part * STRIP + row, load(of[part][g] + row));
    }
};

// The same where groups share them: those of all precede the numbers.
template <class K> struct SharedScales {
    static constexpr int PARTS = K::HAS_OFFSETS ? 2 : 1, COUNT = K::NUMBERS / K::GROUP;
    static constexpr int OF_GROUP = 0, OF_BLOCK = PARTS * (2 + COUNT) * STRIP;
    struct {
        uint16_t shared[PARTS][STRIP];
        int8_t of[PARTS][COUNT][STRIP];
    } all = {};
    void take(const uint8_t *block, int, int row, float) {
        int8_t own[2][COUNT];
        uint16_t shared[2];
        K::parts(block, own[0], own[1], shared);
        for (int part = 0; part < PARTS; part++) {
            all.shared[part][row] = shared[part];
            for (int g = 0; g < COUNT; g++) all.of[part][g][row] = own[part][g];
        }
    }
    void put(int, int, uint8_t *to) const {
        static_assert(sizeof all == OF_BLOCK, "as they lie");
        memcpy(to, &all, sizeof all);
    }
};
template <class K, bool IS_SHARED = K::IS_SHARED> struct ScalesOf {
    typedef OwnScales<K> type;
};
template <class K> struct ScalesOf<K, true> {
    typedef SharedScales<K> type;
};

// Words of LANES rows' blocks, each word of all rows beside each other, as compiled products have them.
template <class K, class Put> INLINE void pack_together(const uint8_t *const *blocks, const Put &put) {
    static_assert(K::RAW % LANES == 0, "whole vectors");
    vi raw[K::RAW];
    for (int at = 0; at < K::RAW; at += LANES) {
        for (int i = 0; i < LANES; i++) memcpy(&raw[at + i], blocks[i] + K::FIRST + at * 4, sizeof raw[at]);
        transpose(raw + at);
    }
    K::packed((const vu *)raw, put);
}

// A strip of rows, some of which may be missing; whether all of their scales are numbers.
template <class K>
bool lay_out_strip(const uint8_t *rows, int64_t row_bytes, int present, int inputs, uint8_t *to, float *row_scales) {
    typedef typename ScalesOf<K>::type Scales;
    constexpr int GROUP_WORDS = K::GROUP * K::BITS / 32, HEADER = Scales::OF_GROUP;
    constexpr int GROUP_BYTES = HEADER + GROUP_WORDS * 4 * STRIP;
    static_assert(!K::IS_SHARED || K::NUMBERS == CHUNK, "a chunk is one block then");
    Scales scales;
    float inverse[STRIP];
    for (int row = 0; row < present; row++) {
        float factor = factor_of<K>(rows + row * row_bytes, inputs);
        if (factor != factor) return false;
        row_scales[row] = factor;
        inverse[row] = 1.0f / factor;
    }
    alignas(64) uint32_t codes[K::RAW ? 1 : STRIP][CHUNK * K::BITS / 32] = {};
    const uint8_t nothing[K::BYTES] = {};
    for (int begin = 0; begin < inputs; begin += CHUNK) {
        int count = inputs - begin < CHUNK ? inputs - begin : CHUNK, groups = count / K::GROUP;
        const uint8_t *blocks[STRIP];
        for (int row = 0; row < STRIP; row++) {
            blocks[row] = row < present ? rows + row * row_bytes + (int64_t)(begin / K::NUMBERS) * K::BYTES : nothing;
            if (row >= present) continue;
            for (int at = 0; at < count; at += K::NUMBERS) {
                const uint8_t *block = blocks[row] + at / K::NUMBERS * K::BYTES;
                if constexpr (!K::RAW) words_of<K>(block, codes[row] + at * K::BITS / 32);
                scales.take(block, at / K::GROUP, row, inverse[row]);
            }
        }
        scales.put(groups, GROUP_BYTES, to);
        to += Scales::OF_BLOCK;
        auto place = [&](int word, int row) {
            return to + word / GROUP_WORDS * GROUP_BYTES + HEADER + (word % GROUP_WORDS * STRIP + row) * 4;
        };
        if constexpr (K::RAW) {
            for (int row = 0; row < STRIP; row += LANES)
                pack_together<K>(blocks + row, [&](int word, vu x) { memcpy(place(word, row), &x, sizeof x); });
        } else {
            int words = groups * GROUP_WORDS, word = 0;
            for (; word + LANES <= words; word += LANES)
                for (int row = 0; row < STRIP; row += LANES) {
                    vi some[LANES];
                    for (int i = 0; i < LANES; i++) memcpy(&some[i], codes[row + i] + word, sizeof some[i]);
                    transpose(some);
                    for (int i = 0; i < LANES; i++) memcpy(place(word + i, row), &some[i], sizeof some[i]);
                }
            for (; word < words; word++)
                for (int row = 0; row < STRIP; row++) memcpy(place(word, row), codes[row] + word, 4);
        }
        to += groups * GROUP_BYTES;
    }
    return true;
}

template <class K> int32_t lay_out(const Blocks *from, uint8_t *packed, float *row_scales, int32_t threads) {
    int strips = (from->outputs + STRIP - 1) / STRIP, finite = 1;
    typedef typename ScalesOf<K>::type Scales;
    int64_t headers = from->inputs / K::GROUP * Scales::OF_GROUP + from->inputs / K::NUMBERS * Scales::OF_BLOCK;
    int64_t strip_bytes = headers + (int64_t)STRIP * from->inputs * K::BITS / 8;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(&& : finite) if (threads > 1)
    for (int strip = 0; strip < strips; strip++) {
        int row = strip * STRIP, present = from->outputs - row < STRIP ? from->outputs - row : STRIP;
        bool usable = lay_out_strip<K>(from->blocks + row * from->row_bytes, from->row_bytes, present, from->inputs,
                                       packed + strip * strip_bytes, row_scales + row);
        finite = finite && usable;
    }
    return finite;
}

#define OF_KIND(kind, call)                   \
    switch (kind) {                           \
        case BLOCKS_Q4_0: return call(Q4_0);  \
        case BLOCKS_Q4_1: return call(Q4_1);  \
        case BLOCKS_Q5_0: return call(Q5_0);  \
        case BLOCKS_Q5_1: return call(Q5_1);  \
        case BLOCKS_Q8_0: return call(Q8_0);  \
        case BLOCKS_Q4_K: return call(Q4_K);  \
        case BLOCKS_Q5_K: return call(Q5_K);  \
        case BLOCKS_Q6_K: return call(Q6_K);  \
    }

}  // namespace

extern "C" {

void NAMED(decode_blocks, ISA)(int32_t kind, const uint8_t *blocks, int64_t count, void *out, int32_t is_bf16) {
#define DECODE(K) decode<K>(blocks, count, out, is_bf16)
    OF_KIND(kind, DECODE)
}

int32_t NAMED(lay_out_blocks, ISA)(const Blocks *from, uint8_t *packed, float *row_scales, int32_t threads) {
#define LAY_OUT(K) lay_out<K>(from, packed, row_scales, threads)
    OF_KIND(from->kind, LAY_OUT)
    return 0;
}
}
