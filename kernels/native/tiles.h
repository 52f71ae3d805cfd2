// Tiles: the eight registers of AMX, each of up to 16 rows of 64 bytes, and products of two that are added to a third.
//
// They are written out, since of compilers' own functions GCC does not know what memory they read.
#pragma once
#include "simd.h"

namespace {

// How many rows and bytes of a row each has, as the processor reads it; all of them become zeros.
INLINE void shape_tiles(const uint8_t (&shapes)[64]) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }

// As other libraries expect to find them.
INLINE void release_tiles() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int TILE> INLINE void clear_tile() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(TILE)); }

// Rows lie `stride` bytes apart.
template <int TILE> INLINE void load_tile(const void *p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE> INLINE void store_tile(void *p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
}

// Adds sums of four products each: bytes of a row of LEFT, which have a sign, by those of a column of RIGHT, whose rows have
// four of each column beside each other.
template <bool SIGNED, int TO, int LEFT, int RIGHT> INLINE void multiply_tiles() {
    if (SIGNED)
        __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(TO), "i"(LEFT), "i"(RIGHT));
    else
        __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(TO), "i"(LEFT), "i"(RIGHT));
}

// The same of pairs in bfloat16, whose sums are floats.
template <int TO, int LEFT, int RIGHT> INLINE void multiply_pairs() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(TO), "i"(LEFT), "i"(RIGHT));
}

}  // namespace
