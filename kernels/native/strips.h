// Sums of some rows with a strip of a matrix in few bits, by what suits so many rows.
#pragma once
#include "quantized.h"
#if defined(TILES)
#include "quantized_tiles.h"
#endif

namespace {

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

// Sums [rows, STRIP] of up to ROWS_BESIDE rows with a whole strip, each times its output's own scale.
INLINE void strip_sums(int rows, const Packed *matrix, int strip, const Rounded &from, int row, float *sums,
                       const uint8_t *next = nullptr, int ask = 0) {
    const uint8_t *at = matrix->packed + strip * strip_bytes(matrix);
#if defined(TILES)
    if (goes_by_tiles(rows))
        sums_by_tiles(rows, matrix, at, from, row, sums, next, ask);
    else
#endif
        sums_by_vectors(rows, matrix, at, from, row, sums, next, ask);
    int left = matrix->outputs - strip * STRIP;
    for (int at = 0; at < STRIP && at < left; at += LANES) {
        vf scale = load_some(matrix->row_scales + strip * STRIP + at, left - at);
        for (int r = 0; r < rows; r++) store(sums + r * STRIP + at, load(sums + r * STRIP + at) * scale);
    }
}

}  // namespace
