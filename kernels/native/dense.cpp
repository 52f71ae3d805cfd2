// A product with a matrix in floats, and what follows it. Compiled once for every instruction set.
#include "dense.h"
#include "finish.h"
#include "memory.h"

namespace {

const int64_t CHUNK_BYTES = 1 << 17;  // of strips that one thread takes at once: a part of its own cache
const int MOST_STRIPS = 16;           // of a chunk
const int CHUNKS_PER_THREAD = 4;

// Rows in bfloat16 are copied as the left matrix: not a power of two apart, as several would meet in a few lines of the
// cache, and of whole steps.
int64_t padded(int64_t inputs) { return (inputs + 15) / 16 * 16 + 16; }

template <class T> constexpr bool copies() { return sizeof(T) < sizeof(float); }

template <class T> int64_t room(const Dense *matrix, int64_t rows) {
    Memory room = {nullptr, 0};
    room.take<int32_t>(1);
    if (copies<T>()) room.take<Left<T>>(rows * padded(matrix->inputs));
    return room.taken;
}

int chunk_of(int64_t strip_bytes, int strips, int threads) {
    int64_t most = CHUNK_BYTES / strip_bytes, shared = strips / (threads * CHUNKS_PER_THREAD);
    if (most > MOST_STRIPS) most = MOST_STRIPS;
    if (most > shared) most = shared;
    return most < 1 ? 1 : (int)most;
}

// Some rows times the strips from `strip` on.
template <class T>
void run_chunk(const Dense *matrix, const Product *product, const Left<T> *x, int64_t stride, int strip, int end) {
    int steps = num_steps<T>(matrix->inputs), height = tile_height(product->rows);
    int64_t words = strip_words<T>(matrix->inputs);
    float sums[MAX_ROWS * COLUMNS];
    for (int row = 0; row < product->rows; row += height) {
        int rows = product->rows - row < height ? product->rows - row : height;
        for (int s = strip; s < end; s++) {
            strip_sums<T>(rows, x + row * stride, stride, (const uint32_t *)matrix->packed + s * words, steps, sums);
            for (int r = 0; r < rows; r++)
                put<T>(product, matrix->outputs, row + r, s * COLUMNS, COLUMNS, sums + r * COLUMNS);
        }
    }
}

template <class T>
void run(const Dense *matrices, int count, const Product *product, int64_t x_step, int64_t out_step, char *memory, int threads) {
    Memory given = {memory, 0};
    int32_t *taken = given.take<int32_t>(1);  // chunks
    const Left<T> *x = (const Left<T> *)product->x;
    int64_t stride = product->x_stride, step = x_step;
    int rows = product->rows, inputs = matrices->inputs, strips = num_strips(matrices->outputs);
    if (copies<T>()) {
        stride = padded(inputs);
        step = rows * stride;
        x = given.take<Left<T>>(count * step);
    }
    int chunk = chunk_of(4 * strip_words<T>(inputs), strips * count, threads);
    if (chunk > strips) chunk = strips;
    int chunks = (strips + chunk - 1) / chunk;  // of a matrix
    *taken = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (copies<T>()) {
#pragma omp for
            for (int one = 0; one < count * rows; one++) {
                Left<T> *to = (Left<T> *)x + one * stride;
                copy_row((const T *)product->x + one / rows * x_step + one % rows * product->x_stride, inputs, to);
                if (inputs % Steps<T>::inputs) to[inputs] = 0;
            }
        }
        for (;;) {
            int next = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED), matrix = next / chunks, strip = next % chunks * chunk;
            if (matrix >= count) break;
            Product own = *product;
            own.out = (T *)product->out + matrix * out_step;
            run_chunk<T>(matrices + matrix, &own, x + matrix * step, stride, strip, strip + chunk < strips ? strip + chunk : strips);
        }
    }
}

template <class T> void lay_out(const Source<T> &w, uint32_t *to, int threads) {
    int64_t words = strip_words<T>(w.inputs);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int strip = 0; strip < num_strips(w.outputs); strip++) lay_out_strip(w, strip, to + strip * words);
}

}  // namespace

extern "C" {

int64_t NAMED(dense_bytes, ISA)(const Dense *matrix) {
    int64_t words = matrix->is_bf16 ? strip_words<bf16>(matrix->inputs) : strip_words<float>(matrix->inputs);
    return 4 * words * num_strips(matrix->outputs);
}

void NAMED(lay_out_dense, ISA)(const Dense *matrix, const void *w, int64_t stride, void *to, int32_t threads) {
    if (matrix->is_bf16)
        lay_out<bf16>({(const bf16 *)w, stride, matrix->inputs, matrix->outputs}, (uint32_t *)to, threads);
    else
        lay_out<float>({(const float *)w, stride, matrix->inputs, matrix->outputs}, (uint32_t *)to, threads);
}

int64_t NAMED(dense_room, ISA)(const Dense *matrix, int32_t rows) {
    return matrix->is_bf16 ? room<bf16>(matrix, rows) : room<float>(matrix, rows);
}

void NAMED(run_dense, ISA)(const Dense *matrices, int32_t count, const Product *product, int64_t x_step, int64_t out_step,
                           char *memory, int32_t threads) {
    alignas(64) char own[OWN_ROOM];
    if (!memory) memory = own;
    if (matrices->is_bf16)
        run<bf16>(matrices, count, product, x_step, out_step, memory, threads);
    else
        run<float>(matrices, count, product, x_step, out_step, memory, threads);
}
}
