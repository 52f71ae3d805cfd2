// Memory that the caller gives for the time of a call.
#pragma once
#include <stdint.h>

namespace {

// A buffer that is given out from its start; of none the size is counted.
struct Memory {
    char *first;
    int64_t taken;
    template <class T> T *take(int64_t count) {
        char *here = first + taken;
        taken += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
        return (T *)here;
    }
};

}  // namespace
