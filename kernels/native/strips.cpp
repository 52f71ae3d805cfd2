// Sums of some rows with a strip of numbers in 4, 6 or 8 bits, by what suits so many rows. Compiled once for every
// instruction set; one with tiles takes another's VECTORS for few rows.
#if defined(TILES)
#include "quantized_tiles.h"

STRIP_SUMS(VECTORS);
#else
#include "strips.h"
#endif

STRIP_SUMS(ISA) {
    const uint8_t *codes = matrix->packed + strip * strip_bytes(matrix);
#if defined(TILES)
    if (!goes_by_tiles(rows)) return NAMED(strip_sums, VECTORS)(rows, matrix, strip, from, row, sums, next, ask);
    sums_by_tiles(rows, matrix, codes, *from, row, sums, next, ask);
#else
    sums_by_vectors(rows, matrix, codes, *from, row, sums, next, ask);
#endif
    int left = matrix->outputs - strip * STRIP;
    for (int at = 0; at < STRIP && at < left; at += LANES) {
        vf scale = load_some(matrix->row_scales + strip * STRIP + at, left - at);
        for (int r = 0; r < rows; r++) store(sums + r * STRIP + at, load(sums + r * STRIP + at) * scale);
    }
}
