// A product with a matrix in numbers of 4, 6 or 8 bits, and what follows it. Compiled once for every instruction set.
#include "finish.h"
#include "quantized.h"

namespace {

const int MOST_ASKED = 16;  // lines at once: more would wait for each other

// One strip's products with all rows.
template <class T>
void run_strip(const Packed *matrix, const Product *product, const Rounded &from, int strip, int next) {
    int64_t bytes = strip_bytes(matrix);
    const uint8_t *ahead = matrix->packed + next * bytes;
    int tiles = (product->rows + ROWS_BESIDE - 1) / ROWS_BESIDE, blocks = matrix->inputs / matrix->input_block;
    // The first rows wait for the strip itself, the others may ask for the one after it.
    int64_t each = tiles < 2 ? 0 : (bytes / (tiles - 1) + 63) / 64;
    int ask = (int)((each + blocks - 1) / blocks);
    if (ask > MOST_ASKED) ask = MOST_ASKED;
    float sums[ROWS_BESIDE * STRIP];
    for (int row = 0, nth = 0; row < product->rows; row += ROWS_BESIDE, nth++) {
        int rows = tile_rows(row, product->rows);
        int64_t done = (nth - 1) * (int64_t)ask * blocks * 64;
        bool asks = nth > 0 && done + (int64_t)ask * blocks * 64 <= bytes;
        NAMED(strip_sums, ISA)(rows, matrix, strip, &from, row, sums, ahead + (asks ? done : 0), asks ? ask : 0);
        for (int r = 0; r < rows; r++) put<T>(product, matrix->outputs, row + r, strip * STRIP, STRIP, sums + r * STRIP);
    }
}

// The next strips of a thread for a single row, of which memory is the limit: they follow each other, as what is read from
// end to end comes faster. Few at last, so that all threads end together.
INLINE bool take_strips(int32_t *taken, int strips, int threads, int *begin, int *end) {
    *begin = __atomic_load_n(taken, __ATOMIC_RELAXED);
    do {
        if (*begin >= strips) return false;
        *end = *begin + (strips - *begin + 2 * threads - 1) / (2 * threads);
    } while (!__atomic_compare_exchange_n(taken, begin, *end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return true;
}

template <class T> void run(const Packed *matrix, const Product *product, char *memory, int threads) {
    Memory room = {memory, 0};
    int32_t *taken = room.take<int32_t>(1);  // strips
    Rounded rows = room_of(matrix, product->rows, room);
    int strips = (matrix->outputs + STRIP - 1) / STRIP;
    *taken = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int row = 0; row < product->rows; row++)
            round_row(matrix, (const T *)product->x + row * product->x_stride,
                      product->scales ? product->scales + row : nullptr, row, product->rows, rows);
        if (product->rows == 1) {
            for (int strip, end; take_strips(taken, strips, threads, &strip, &end);)
                for (; strip < end; strip++) run_strip<T>(matrix, product, rows, strip, strip);
        } else {
            for (int strip = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED), next; strip < strips; strip = next) {
                next = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
                run_strip<T>(matrix, product, rows, strip, next < strips ? next : strip);
            }
        }
    }
}

}  // namespace

extern "C" {

int64_t NAMED(product_room, ISA)(const Packed *matrix, int32_t rows) {
    Memory room = {nullptr, 0};
    room.take<int32_t>(1);
    room_of(matrix, rows, room);
    return room.taken;
}

void NAMED(run_product, ISA)(const Packed *matrix, const Product *product, char *memory, int32_t threads) {
    alignas(64) char own[OWN_ROOM];
    if (!memory) memory = own;
    if (product->is_bf16)
        run<bf16>(matrix, product, memory, threads);
    else
        run<float>(matrix, product, memory, threads);
}
}
