// What tiles are of, for as long as they are used: none are left behind.
#pragma once
#if defined(TILES)
#include TILES
#else
#include "tiles.h"
#endif

namespace {

class Shapes {
   public:
    // A tile's rows, and the bytes of each.
    void put(int tile, int height, int bytes) { all[16 + 2 * tile] = (uint8_t)bytes, all[48 + tile] = (uint8_t)height; }
    void begin() { shape_tiles(all); }
    void end() { release_tiles(); }

   private:
    alignas(64) uint8_t all[64] = {1};
};

}  // namespace
