// Products of up to TILE_INPUTS rows with a strip of quantized.h, whose sums are in registers.
#pragma once
#include "quantized.h"

namespace {

INLINE void ask_for(const void *p) { __builtin_prefetch(p, 0, 2); }

// Of a panel: the first four inputs, or the upper four of halves.
template <int KIND> INLINE Codes codes_of(const Table &table, const uint8_t *p, bool upper) {
    if (KIND == BYTES) return load_codes(p);
    Codes codes = upper ? high_codes(p) : low_codes(p);
    return KIND == CODES ? look_up(table, codes) : codes;
}

// Whether a strip is read once, from end to end: then memory is all that limits its products, and is asked ahead of
// what the processor does by itself.
constexpr bool reads_alone(int rows, int panels) { return rows == 1 && panels * PANEL == STRIP; }
INLINE void ask_ahead(const uint8_t *codes) {
#pragma GCC unroll 4
    for (int line = 0; line < STEP; line += 64) ask_for(codes + 2048 + line);
}

// A group's scales, or none: what sums of a panel are multiplied by before they are added to others.
struct NoScales {};
template <int PANELS> struct Scales {
    Small of[PANELS];
};
template <int PANELS> INLINE Sums add_panel(Sums sums, const Sums &some, const Scales<PANELS> &scales, int panel) {
    return add_scaled(sums, some, scales.of[panel]);
}
#if defined(NARROW_INPUTS)
INLINE Sums add_panel(Sums sums, const Sums &some, NoScales, int) { return widened(sums, some); }

// Adds a block of inputs to sums of integers.
template <int ROWS, int PANELS, class By>
INLINE void add_halves(const uint8_t *codes, const int8_t *a, int length, Sums (&whole)[ROWS][PANELS], const By &scales) {
    for (int some; length > 0; length -= some) {
        Sums narrow[ROWS][PANELS] = {};
        some = length < NARROW_INPUTS ? length : NARROW_INPUTS;
        for (int i = 0; i < some; i += 8, codes += STEP, a += ROWS * 8) {
            if (reads_alone(ROWS, PANELS)) ask_ahead(codes);
#pragma GCC unroll 2
            for (int upper = 0; upper < 2; upper++) {
                Inputs x[ROWS];
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) x[r] = splat_inputs(a + 4 * (upper * ROWS + r));
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) {
                    Codes four = upper ? high_codes(codes + p * 64) : low_codes(codes + p * 64);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++) add_narrow(narrow[r][p], four, x[r]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) whole[r][p] = add_panel(whole[r][p], narrow[r][p], scales, p);
    }
}
#endif

// The same of any kind.
template <int KIND, int ROWS, int PANELS>
INLINE void add_block(const Table &table, const uint8_t *codes, const int8_t *a, int length, Sums (&whole)[ROWS][PANELS]) {
    const int fours = KIND == BYTES ? 1 : 2;  // that are read at once
#if defined(NARROW_INPUTS)
    if (KIND == HALVES) return add_halves(codes, a, length, whole, NoScales());
#endif
    for (int i = 0; i < length; i += 4 * fours, codes += STEP) {
        if (reads_alone(ROWS, PANELS)) ask_ahead(codes);
#pragma GCC unroll 2
        for (int upper = 0; upper < fours; upper++, a += 4 * ROWS) {
            Codes four[PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) four[p] = codes_of<KIND>(table, codes + p * 64, upper);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                Inputs x = splat_inputs(a + 4 * r);
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) whole[r][p] = add_products<KIND>(whole[r][p], four[p], x);
            }
        }
    }
}

// Sums of some outputs begin with zero.
INLINE void clear(float *sums, int rows, int columns) {
    for (int r = 0; r < rows; r++)
        for (int at = 0; at < columns; at += LANES) store(sums + r * STRIP + at, (vf){});
}

// Adds sums of integers to those in floats, times the scale of each output, the rows', and `times`.
template <int ROWS, int PANELS>
INLINE void add_floats(const Sums (&whole)[ROWS][PANELS], const uint16_t *of_outputs, const float *of_rows, float *sums,
                       float times = 1.0f) {
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const int at = p * PANEL + v * LANES;
            vf scale = load_halves(of_outputs + at) * times;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                float *to = sums + r * STRIP + at;
                store(to, load(to) + sum_floats(whole[r][p], v) * (scale * of_rows[r]));
            }
        }
}

// Takes a group's zeros from the sums of some outputs, the first of which is `column` of the strip.
INLINE void take_zeros(int zeros, const uint16_t *scales, const uint8_t *zeros_at, int column, int columns,
                       const float *group_sums, int rows, float *sums) {
    if (zeros == ZEROS_MIDDLE) return;
    for (int at = 0; at < columns; at += LANES) {
        vf offset = zeros == ZEROS_OFFSETS ? load_halves((const uint16_t *)zeros_at + column + at)
                                           : load_bytes(zeros_at + column + at) * load_halves(scales + at);
        for (int r = 0; r < rows; r++) {
            float *to = sums + r * STRIP + at;
            store(to, load(to) - offset * group_sums[r]);
        }
    }
}

// Sums [ROWS, STRIP] of some rows with PANELS panels of a strip.
template <int KIND, int ROWS, int PANELS>
__attribute__((noinline)) void tile(const Packed *matrix, const uint8_t *strip, int panel, const Rounded &from, int row,
                                    float *sums, const uint8_t *next, int ask) {
    const int inputs = matrix->inputs, length = matrix->input_block, groups = inputs / matrix->group;
    const int blocks = inputs / length, in_group = matrix->group / length, zeros = matrix->zeros;
    const int at_once = KIND == BYTES ? 4 : 8, header = header_of(matrix);
    const Table table = KIND == CODES ? load_table(matrix->table) : Table();
    const int8_t *a = from.numbers + (int64_t)row * inputs;
    const float *scales = from.scales + (int64_t)row * blocks;
    const int32_t *starts = from.starts + (int64_t)row * blocks;
    const float *group_sums = from.group_sums + (int64_t)row * groups;
    sums += panel * PANEL;
    clear(sums, ROWS, PANELS * PANEL);
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
            add_block<KIND>(table, strip + panel * 4 * PANEL, a, length, whole);
            strip += STEP * (length / at_once), a += ROWS * length;
            add_floats(whole, group_scales, scales, sums);
            scales += ROWS, starts += ROWS;
        }
        take_zeros(zeros, group_scales, zeros_at, panel * PANEL, PANELS * PANEL, group_sums, ROWS, sums);
    }
}

// Four inputs of a panel, of the four that follow each other where they are read.
template <int KIND, int NTH> INLINE Codes fours_of(const uint8_t *codes) {
    Codes halves = NTH % 2 ? high_codes(codes + NTH / 2 * STEP) : low_codes(codes + NTH / 2 * STEP);
    return KIND == SIXES ? with_upper<NTH>(halves, codes + 2 * STEP) : halves;
}

// Adds 16 inputs, times their group's scales.
template <int KIND, int ROWS, int PANELS>
INLINE void add_sixteen(
    const uint8_t *codes, const int8_t *a, Sums (&whole)[ROWS][PANELS], const Scales<PANELS> &scales) {
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) {
        Codes four[4] = {fours_of<KIND, 0>(codes + p * 64), fours_of<KIND, 1>(codes + p * 64),
                         fours_of<KIND, 2>(codes + p * 64), fours_of<KIND, 3>(codes + p * 64)};
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
#if defined(NARROW_INPUTS)  // of six bits half as many fit
            for (int half = 0; half < 4; half += 2) {
                Sums narrow = {};
                add_narrow(narrow, four[half], splat_inputs(a + 4 * (half * ROWS + r)));
                add_narrow(narrow, four[half + 1], splat_inputs(a + 4 * ((half + 1) * ROWS + r)));
                whole[r][p] = add_panel(whole[r][p], narrow, scales, p);
            }
#else
            Sums some = splat_sum(0);
            for (int i = 0; i < 4; i++)
                some = add_products<KIND>(some, four[i], splat_inputs(a + 4 * (i * ROWS + r)));
            whole[r][p] = add_panel(whole[r][p], some, scales, p);
#endif
        }
    }
}

// Adds a group of inputs, times its scales.
template <int KIND, int ROWS, int PANELS>
INLINE void add_group(
    const uint8_t *codes, const int8_t *a, int length, Sums (&whole)[ROWS][PANELS], const Scales<PANELS> &scales) {
#if defined(NARROW_INPUTS)
    if (KIND == HALVES) return add_halves(codes, a, length, whole, scales);
#endif
    const int step = KIND == SIXES ? 3 * STEP : 2 * STEP;
    for (int i = 0; i < length; i += 16, codes += step, a += 16 * ROWS) {
        if (reads_alone(ROWS, PANELS))
            for (int part = 0; part < step; part += STEP) ask_ahead(codes + part);
        add_sixteen<KIND>(codes, a, whole, scales);
    }
}

// What lies before a block's numbers where groups share scales, from an output on. What is taken of the inputs' sums: offsets,
// or, where zero is in the middle, so many scales.
struct SharedHeader {
    const uint16_t *shared, *shared_less;
    const uint8_t *small, *less;  // [groups, STRIP]
    float times;
};
INLINE SharedHeader shared_header(const Packed *matrix, const uint8_t *at, int column) {
    const bool has_offsets = matrix->zeros == ZEROS_OFFSETS;
    const uint16_t *shared = (const uint16_t *)at + column;
    const uint8_t *small = at + (has_offsets ? 4 : 2) * STRIP + column;
    if (has_offsets) return {shared, shared + STRIP, small, small + matrix->shared / matrix->group * STRIP, -1.0f};
    return {shared, shared, small, small, -(float)(1 << (matrix->bits - 1))};
}

// Of a panel and some of the rows whose sums of groups lie `beside` each other.
template <int ROWS>
INLINE void take_shared(const SharedHeader &of, int groups, const int32_t *group_sums, int beside, const float *scales,
                        float *sums) {
    Sums taken[ROWS][1];
    for (int r = 0; r < ROWS; r++) taken[r][0] = splat_sum(0);
    for (int g = 0; g < groups; g++) {
        Small of_group = load_small(of.less + g * STRIP);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) taken[r][0] = add_small(taken[r][0], of_group, group_sums[g * beside + r]);
    }
    add_floats(taken, of.shared_less, scales, sums, of.times);
}

// As `tile`, where groups share scales.
template <int KIND, int ROWS, int PANELS>
__attribute__((noinline)) void shared_tile(const Packed *matrix, const uint8_t *strip, int panel, const Rounded &from,
                                           int row, float *sums, const uint8_t *next, int ask) {
    const int inputs = matrix->inputs, length = matrix->shared, group = matrix->group, groups = length / group;
    const int header = shared_header_of(matrix), blocks = inputs / length;
    const int8_t *a = from.numbers + (int64_t)row * inputs;
    const float *scales = from.scales + (int64_t)row * blocks;
    const int32_t *group_sums = from.whole + (int64_t)row * (inputs / group);
    sums += panel * PANEL;
    clear(sums, ROWS, PANELS * PANEL);
    for (int b = 0; b < blocks; b++, scales += ROWS, group_sums += groups * ROWS) {
        for (int line = 0; line < ask; line++, next += 64) ask_for(next);
        SharedHeader of = shared_header(matrix, strip, panel * PANEL);
        if (reads_alone(ROWS, PANELS))
            for (int at = 0; at < header; at += STEP) ask_ahead(strip + at);
        strip += header;
        const uint16_t *shared = of.shared;
        const uint8_t *small = of.small;
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++, of.less += PANEL, of.shared_less += PANEL)
            take_shared<ROWS>(of, groups, group_sums, ROWS, scales, sums + p * PANEL);
        Sums whole[ROWS][PANELS];
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) whole[r][p] = splat_sum(0);
        for (int g = 0; g < groups; g++, small += STRIP, a += ROWS * group) {
            Scales<PANELS> of_group;
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) of_group.of[p] = load_small(small + p * PANEL);
            add_group<KIND>(strip + panel * 4 * PANEL, a, group, whole, of_group);
            strip += STRIP * group * bits_of(KIND) / 8;
        }
        add_floats(whole, shared, scales, sums);
    }
}

template <int KIND>
INLINE void tile_of(int rows, const Packed *matrix, const uint8_t *strip, int panel, const Rounded &from, int row,
                    float *sums, const uint8_t *next, int ask) {
#define TILE_OF(ROWS)                                                                                                  \
    case ROWS: {                                                                                                       \
        constexpr int some = ROWS < TILE_INPUTS ? ROWS : TILE_INPUTS;                                                  \
        if constexpr (KIND == HALVES || KIND == SIXES)                                                                 \
            if (matrix->shared)                                                                                        \
                return shared_tile<KIND, some, panels_at(ROWS)>(matrix, strip, panel, from, row, sums, next, ask);     \
        if constexpr (KIND != SIXES)                                                                                   \
            return tile<KIND, some, panels_at(ROWS)>(matrix, strip, panel, from, row, sums, next, ask);                \
        return;                                                                                                        \
    }
    switch (rows) { TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6) }
#undef TILE_OF
}

// Sums [rows, STRIP] of up to TILE_INPUTS rows with a whole strip.
INLINE void sums_by_vectors(int rows, const Packed *matrix, const uint8_t *strip, const Rounded &from, int row, float *sums,
                            const uint8_t *next, int ask) {
    for (int panel = 0; panel < STRIP / PANEL; panel += panels_at(rows), ask = 0) {
        switch (kind_of(matrix)) {
            case BYTES: tile_of<BYTES>(rows, matrix, strip, panel, from, row, sums, next, ask); break;
            case HALVES: tile_of<HALVES>(rows, matrix, strip, panel, from, row, sums, next, ask); break;
            case SIXES: tile_of<SIXES>(rows, matrix, strip, panel, from, row, sums, next, ask); break;
            default: tile_of<CODES>(rows, matrix, strip, panel, from, row, sums, next, ask);
        }
    }
}

}  // namespace
