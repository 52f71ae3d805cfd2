// Attention that walks block tables: a tile of queries, and all heads that share a key head, against KEYS keys at a
// time, with a running softmax (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). Long contexts of
// few queries are cut over threads and put together again (Dao et al., "Flash-Decoding").
#include "kernels.h"
#include "products.h"
#include <omp.h>

#ifndef ISA
#error "compile with -DISA=name"
#endif

namespace {

const int KEYS = KEYS_AT_ONCE;
const float LOG2_E = 1.44269504f;

INLINE float lowest() { return -__builtin_inff(); }

// Of few queries each number of a key is multiplied where it is: to lay keys out for a product takes longer than that.
const int FEW_ROWS = 4;

// Asks for rows that come next, of so many numbers.
template <class T> INLINE void ask_for_row(const T *row, int length) {
    for (int at = 0; at < length; at += 64 / (int)sizeof(T)) ask_for(row + at);
}

// Adds LANES units of queries times those of keys; of keys that end before them unless they are `WHOLE`.
template <class Units, bool WHOLE, class T, int ROWS, int KEYS_NOW>
INLINE void add_scores(
    const uint32_t *queries, int depth, const T *const *keys, int at, int length, vf (&sums)[ROWS][KEYS_NOW]) {
    const int units = LANES * Units::size, from = at * Units::size;
    vi query[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) memcpy(&query[r], queries + r * depth + at, sizeof query[r]);
#pragma GCC unroll 16
    for (int k = 0; k < KEYS_NOW; k++) {
        vi key = units_of<Units>(keys[k] + from, WHOLE ? units : length - from);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sums[r][k] = Units::dot(sums[r][k], query[r], key);
    }
}

// scores [ROWS, LANES] of some queries, as units, with LANES keys.
template <class Units, class T, int ROWS>
INLINE void few_scores(
    const uint32_t *queries, int depth, const T *const *keys, const T *const *next, int length, float *scores) {
    const int AT_ONCE = LANES / (ROWS == 3 ? 4 : ROWS);  // keys, whose sums are in registers
    vi sums[ROWS][LANES];
    for (int k = 0; k < LANES; k += AT_ONCE) {
        vf some[ROWS][AT_ONCE] = {};
        for (int i = 0; i < AT_ONCE; i++) ask_for_row(next[k + i], length);
        int at = 0;
        for (; (at + LANES) * Units::size <= length; at += LANES)
            add_scores<Units, true>(queries, depth, keys + k, at, length, some);
        if (at < depth) add_scores<Units, false>(queries, depth, keys + k, at, length, some);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < AT_ONCE; i++) sums[r][k + i] = (vi)some[r][i];
    }
    for (int r = 0; r < ROWS; r++) {
        transpose(sums[r]);
        vf parts[4] = {};
        for (int i = 0; i < LANES; i++) parts[i % 4] += (vf)sums[r][i];
        store(scores + r * KEYS, (parts[0] + parts[1]) + (parts[2] + parts[3]));
    }
}

// sums [ROWS, width] += weights [ROWS, keys] values, of VECTORS vectors of a head, of which all is there if they are `WHOLE`.
template <bool WHOLE, int ROWS, int VECTORS, class T>
INLINE void few_sums(const float *weights, const T *const *values, const T *const *next, int columns, int at, int length,
                     float *sums, int width) {
    vf some[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) some[r][v] = load(sums + r * width + at + v * LANES);
    for (int t = 0; t < columns; t++) {
        if (at == 0) ask_for_row(next[t], length);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            int from = at + v * LANES;
            vf value = load_some(values[t] + from, WHOLE ? LANES : length - from);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) some[r][v] += weights[r * KEYS + t] * value;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * width + at + v * LANES, some[r][v]);
}

// One thread's memory, as offsets in units of four bytes.
struct Room {
    int queries, scores, sums, keys, values, top, total, rest;  // `total`: of exponentials
    int width, depth;  // of a head: of its values, and its units, both padded

    Room(const Layer *layer, int unit) {
        int rows = tile_queries(layer->group) * layer->group;
        width = rounded_up(layer->head_dim, LANES);
        depth = rounded_up(layer->head_dim, LANES * unit) / unit;
        queries = 0;
        scores = queries + rows * depth;
        sums = scores + rows * KEYS;
        keys = sums + rows * width;
        values = keys + depth * KEYS;
        top = values + KEYS * width;
        total = top + rounded_up(rows, 16);
        rest = total + rounded_up(rows, 16);
    }
};

template <class T> struct Tile {
    typedef typename UnitsOf<T>::type Units;
    const Layer *layer;
    const Step *step;
    Task task;
    int head, rows, first_position;
    Room room;
    uint32_t *memory;

    Tile(const Layer *layer, const Step *step, const Task &task, int head, uint32_t *memory)
        : layer(layer), step(step), task(task), head(head), room(layer, Units::size), memory(memory) {
        int num_queries = step->starts[task.seq + 1] - step->starts[task.seq];
        rows = task.num_queries * layer->group;
        first_position = step->seq_lens[task.seq] - num_queries + task.query;
    }

    float *floats(int offset) { return (float *)memory + offset; }

    // Where `count` keys from `first` on lie, and zeros up to a whole number of vectors.
    void find(int first, int count, const T **keys, const T **values, const T *zeros) {
        const int32_t *table = step->tables + task.seq * step->table_stride;
        int size = layer->block_size, width = layer->head_dim;
        int64_t of_head = head * layer->head_stride;
        for (int t = 0; t < count;) {
            int block = (first + t) / size, offset = (first + t) % size;
            int run = size - offset < count - t ? size - offset : count - t;
            int64_t at = table[block] * layer->block_stride + of_head + (int64_t)offset * width;
            for (int i = 0; i < run; i++, at += width) {
                keys[t + i] = (const T *)layer->keys + at;
                values[t + i] = (const T *)layer->values + at;
            }
            t += run;
        }
        for (int t = count; t < rounded_up(count, LANES); t++) keys[t] = values[t] = zeros;
    }

    void begin(const T *q, int64_t q_token, int64_t q_head) {
        for (int r = 0; r < rows; r++) {
            int token = step->starts[task.seq] + task.query + r / layer->group;
            const T *row = q + token * q_token + (head * layer->group + r % layer->group) * q_head;
            lay_out_row<Units>(row, layer->head_dim, memory + room.queries + r * room.depth);
            floats(room.top)[r] = lowest();
            floats(room.total)[r] = 0.0f;
        }
        memset(floats(room.sums), 0, sizeof(float) * rows * room.width);
    }

    int first_count() { return task.key_end - task.key_begin < KEYS ? task.key_end - task.key_begin : KEYS; }

    // `find_more` finds what probably comes after this tile. While some keys are looked at, those after them are asked for.
    template <class FindMore> void run(const T *zeros, const FindMore &find_more) {
        const T *keys[2][KEYS], *values[2][KEYS];
        for (int t = 0; t < KEYS; t++) keys[1][t] = values[1][t] = zeros;  // where fewer come next
        int now = 0, count = first_count();
        find(task.key_begin, count, keys[0], values[0], zeros);
        for (int first = task.key_begin; first < task.key_end; now ^= 1) {
            int next = first + count, next_count = task.key_end - next < KEYS ? task.key_end - next : KEYS;
            if (next_count > 0)
                find(next, next_count, keys[now ^ 1], values[now ^ 1], zeros);
            else
                find_more(keys[now ^ 1], values[now ^ 1]);
            int then = now ^ 1;
            if (rows <= FEW_ROWS)
                run_few(keys[now], values[now], keys[then], values[then], first, count);
            else
                run_many(keys[now], values[now], keys[then], values[then], first, count);
            first = next;
            count = next_count;
        }
    }

    void run_many(const T *const *keys, const T *const *values, const T *const *next_keys, const T *const *next_values,
                  int first, int count) {
        int columns = rounded_up(count, LANES);
        for (int t = 0; t < columns; t += LANES)
            lay_out_keys<Units>(keys + t, next_keys + t, layer->head_dim, memory + room.keys + t, KEYS);
        product<Units>(memory + room.queries, room.depth, Whole{memory + room.keys, KEYS}, room.depth,
                       floats(room.scores), KEYS, rows, columns, false);
        for (int r = 0; r < rows; r++) weigh<Units>(r, first, count);
        add_values(values, next_values, columns);
    }

    void run_few(const T *const *keys, const T *const *values, const T *const *next_keys, const T *const *next_values,
                 int first, int count) {
        switch (rows) {
            case 1: return run_rows<1>(keys, values, next_keys, next_values, first, count);
            case 2: return run_rows<2>(keys, values, next_keys, next_values, first, count);
            case 3: return run_rows<3>(keys, values, next_keys, next_values, first, count);
            default: return run_rows<4>(keys, values, next_keys, next_values, first, count);
        }
    }

    template <int ROWS>
    void run_rows(const T *const *keys, const T *const *values, const T *const *next_keys, const T *const *next_values,
                  int first, int count) {
        const int VECTORS = ROWS == 1 ? 8 : 4, length = layer->head_dim, columns = rounded_up(count, LANES);
        float *scores = floats(room.scores), *sums = floats(room.sums);
        for (int t = 0; t < columns; t += LANES)
            few_scores<Units, T, ROWS>(
                memory + room.queries, room.depth, keys + t, next_keys + t, length, scores + t);
        for (int r = 0; r < ROWS; r++) weigh<Singles>(r, first, count);
        int at = 0;
        for (; at + VECTORS * LANES <= length; at += VECTORS * LANES)
            few_sums<true, ROWS, VECTORS>(scores, values, next_values, columns, at, length, sums, room.width);
        for (; at < length; at += LANES)
            few_sums<false, ROWS, 1>(scores, values, next_values, columns, at, length, sums, room.width);
    }

    // Scores of a row become weights; its sums so far are scaled to the new maximum.
    template <class As> void weigh(int r, int first, int count) {
        float *scores = floats(room.scores) + r * KEYS;
        int position = first_position + r / layer->group, of_head = head * layer->group + r % layer->group;
        int low = first_seen(layer->window, layer->chunk, position) - first, high = position + 1 - first;
        if (high > count) high = count;
        int columns = rounded_up(count, LANES);
        float scale = layer->scale * LOG2_E, cap = layer->softcap;
        float slope = layer->slopes ? layer->slopes[of_head] * LOG2_E : 0.0f;
        bool is_masked = low > 0 || high < columns;
        vi lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        vf most = splat(lowest());
        for (int t = 0; t < columns; t += LANES) {
            vf x = load(scores + t);
            if (cap != 0.0f) {  // tanh(y) = 1 - 2 / (e^2y + 1), of |y|, so that nothing overflows
                vf y = x * (layer->scale / cap);
                vf size = (vf)((vi)y & 0x7fffffff);
                vf decay = exp2_of(size * (-2.0f * LOG2_E));
                vf tanh = (1.0f - decay) / (1.0f + decay);
                x = (vf)((vi)tanh | ((vi)y & (int32_t)0x80000000)) * (cap * LOG2_E);
            } else {
                x = x * scale;
            }
            if (slope != 0.0f) x = x - __builtin_convertvector(position - first - t - lane, vf) * slope;
            if (is_masked) {
                vi at = lane + t;
                x = choose((at >= low) & (at < high), x, splat(lowest()));
            }
            most = larger_of(x, most);
            store(scores + t, x);
        }
        float *top = floats(room.top) + r, *total = floats(room.total) + r;
        float old = *top, reached = max_of(most);
        reached = reached > old ? reached : old;
        float base = reached == lowest() ? 0.0f : reached;  // nothing seen yet, or no number
        vf sum = {};
        for (int t = 0; t < columns; t += LANES) {
            vf p = exp2_of(load(scores + t) - base);
            sum = sum + p;
            lay_out_weights(As(), scores, t, p);
        }
        if (reached > old) {
            float kept = old == lowest() ? 0.0f : exp2_of(splat(old - base))[0];
            float *sums = floats(room.sums) + r * room.width;
            for (int at = 0; at < room.width; at += LANES) store(sums + at, load(sums + at) * kept);
            *total *= kept;
            *top = reached;
        }
        *total += sum_of(sum);
    }

    void add_values(const T *const *values, const T *const *next, int columns) {
        uint32_t *weights = memory + room.scores;
        float *sums = floats(room.sums);
        if (sizeof(T) == sizeof(float) && layer->head_dim == room.width) {  // they are what is multiplied
            for (int t = 0; t < columns; t++)
                for (int at = 0; at < layer->head_dim; at += 16) ask_for(next[t] + at);
            Scattered rows_of_pages{(const uint32_t *const *)values};
            product<Units>(weights, KEYS, rows_of_pages, columns, sums, room.width, rows, room.width, true);
            return;
        }
        uint32_t *to = memory + room.values;
        for (int t = 0; t < columns; t += Units::size, to += room.width)
            lay_out_values(Units(), values + t, next + t, layer->head_dim, to);
        product<Units>(weights, KEYS, Whole{memory + room.values, room.width}, columns / Units::size, sums, room.width,
                       rows, room.width, true);
    }

    // The share of a head's sink, and the sums over the total.
    void finish(T *out) {
        int num_heads = layer->kv_heads * layer->group, width = layer->head_dim;
        for (int r = 0; r < rows; r++) {
            int token = step->starts[task.seq] + task.query + r / layer->group;
            int of_head = head * layer->group + r % layer->group;
            float top = floats(room.top)[r], total = floats(room.total)[r], factor;
            if (layer->sinks) {
                float sink = layer->sinks[of_head] * LOG2_E, base = sink > top ? sink : top;
                float kept = top == lowest() ? 0.0f : exp2_of(splat(top - base))[0];
                factor = kept / (total * kept + exp2_of(splat(sink - base))[0]);
            } else {
                factor = total == 0.0f ? 0.0f : 1.0f / total;
            }
            T *to = out + ((int64_t)token * num_heads + of_head) * width;
            const float *sums = floats(room.sums) + r * room.width;
            for (int at = 0; at < width; at += LANES) store_some(to + at, load(sums + at) * factor, width - at);
        }
    }

    // A part's result: its sums, then the maxima, then the totals.
    float *part(float *partials, int slot) {
        int all = tile_queries(layer->group) * layer->group;
        return partials + ((int64_t)slot * layer->kv_heads + head) * all * (room.width + 2);
    }

    void leave(float *partials) {
        float *to = part(partials, task.slot);
        memcpy(to, floats(room.sums), sizeof(float) * rows * room.width);
        memcpy(to + rows * room.width, floats(room.top), sizeof(float) * rows);
        memcpy(to + rows * room.width + rows, floats(room.total), sizeof(float) * rows);
    }

    void gather(float *partials) {
        for (int r = 0; r < rows; r++) {
            float top = lowest(), total = 0.0f;
            for (int i = 0; i < task.num_parts; i++) {
                float one = part(partials, task.first_slot + i)[rows * room.width + r];
                top = one > top ? one : top;
            }
            float base = top == lowest() ? 0.0f : top, *sums = floats(room.sums) + r * room.width;
            memset(sums, 0, sizeof(float) * room.width);
            for (int i = 0; i < task.num_parts; i++) {
                const float *from = part(partials, task.first_slot + i), *ends = from + rows * room.width;
                float kept = ends[r] == lowest() ? (ends[rows + r] == 0.0f ? 0.0f : 1.0f)  // 1: no number, to be kept
                                                 : exp2_of(splat(ends[r] - base))[0];
                for (int at = 0; at < room.width; at += LANES)
                    store(sums + at, load(sums + at) + load(from + r * room.width + at) * kept);
                total += ends[rows + r] * kept;
            }
            floats(room.top)[r] = top;
            floats(room.total)[r] = total;
        }
    }
};

template <class T>
void attend_tasks(const Layer *layer, const Step *step, const Plan *plan, const T *q, int64_t q_token, int64_t q_head,
                  T *out, uint32_t *memory, int32_t *next) {
    static const T zeros[1024] = {};
    int all = plan->num_tasks * layer->kv_heads;
    auto find_more = [&](const T **keys, const T **values) {
        int index = __atomic_load_n(next, __ATOMIC_RELAXED);
        if (index >= all) return;
        const Task &task = plan->tasks[index / layer->kv_heads];
        Tile<T> tile(layer, step, task, index % layer->kv_heads, memory);
        tile.find(task.key_begin, tile.first_count(), keys, values, zeros);
    };
    for (;;) {
        int index = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (index >= all) return;
        const Task &task = plan->tasks[index / layer->kv_heads];
        Tile<T> tile(layer, step, task, index % layer->kv_heads, memory);
        tile.begin(q, q_token, q_head);
        tile.run(zeros, find_more);
        if (task.slot >= 0) {
            tile.leave(plan->partials);
            int32_t *counter = plan->counters + task.tile * layer->kv_heads + tile.head;
            if (__atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL) < task.num_parts) continue;
            *counter = 0;
            tile.gather(plan->partials);
        }
        tile.finish(out);
    }
}

template <class T>
void attend(const Layer *layer, const Step *step, const Plan *plan, const T *q, int64_t q_token, int64_t q_head, T *out,
            uint32_t *memory, int64_t per_thread, int32_t threads) {
    int32_t next = 0;
    if (threads <= 1) return attend_tasks(layer, step, plan, q, q_token, q_head, out, memory, &next);
#pragma omp parallel num_threads(threads)
    {
        uint32_t *own = memory + per_thread * omp_get_thread_num();
        attend_tasks(layer, step, plan, q, q_token, q_head, out, own, &next);
    }
}

}  // namespace

extern "C" {

int32_t NAMED(room, ISA)(const Layer *layer) {
    Room room(layer, layer->is_bf16 ? UnitsOf<bf16>::type::size : 1);
    return rounded_up(room.rest, 16);
}

int32_t NAMED(part, ISA)(const Layer *layer) {
    return tile_queries(layer->group) * layer->group * (rounded_up(layer->head_dim, LANES) + 2);
}

void NAMED(attend, ISA)(const Layer *layer, const Step *step, const Plan *plan, const void *q, int64_t q_token,
                        int64_t q_head, void *out, uint32_t *memory, int64_t per_thread, int32_t threads) {
    if (layer->is_bf16)
        attend(layer, step, plan, (const bf16 *)q, q_token, q_head, (bf16 *)out, memory, per_thread, threads);
    else
        attend(layer, step, plan, (const float *)q, q_token, q_head, (float *)out, memory, per_thread, threads);
}
}
