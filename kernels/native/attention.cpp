// Attention that walks block tables: a tile of queries, and all heads that share a key head, against KEYS keys at a
// time, with a running softmax (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). Long contexts of
// few queries are cut over threads and put together again (Dao et al., "Flash-Decoding").
#include "eights.h"
#include "kernels.h"
#include "products.h"
#include <omp.h>
#if defined(TILED)  // the name of the set whose kernels multiply by tiles besides
#include "pair_tiles.h"
#endif

#ifndef ISA
#error "compile with -DISA=name"
#endif

namespace {

struct PairTiles;

const int KEYS = KEYS_AT_ONCE;
const float LOG2_E = 1.44269504f;

INLINE float lowest() { return -__builtin_inff(); }

// Of few queries each number of a key is multiplied where it is: to lay keys out for a product takes longer than that,
// of up to so many with AVX2. A product of pairs is twice as fast, so that of more than these it is thought to pay.
#if defined(HAS_PAIRS)
const int FEW_ROWS = 4;
#else
const int FEW_ROWS = 16;
#endif

// So many rows of a head are multiplied at a time; of fewer memory is what they wait for.
const int ROWS_AT_ONCE = 4;

// Keys of a head that are looked at before the next head's, unless its rows are fewer than those.
const int STRETCH = 16;

// So much is asked for ahead of fewer rows: of as much again some leaves the nearest cache before its turn.
const int BYTES_AHEAD = 4096;

// Pieces of work for each thread, if heads are looked at together: with fewer, one waits for another.
const int WORK_PER_THREAD = 4;

// What goes into registers beside each other, of so many sums each, as a power of two.
constexpr int in_registers(int sums, int most) { return sums * most <= MAX_ROWS * MAX_VECTORS ? most : in_registers(sums, most / 2); }

// Asks for a row that comes later, of so many numbers.
template <class T> INLINE void ask_for_row(const T *row, int length) {
    for (int at = 0; at < length; at += 64 / (int)sizeof(T)) ask_for(row + at);
}

// Adds LANES units of queries times those of keys; of keys that end before them unless they are `WHOLE`.
template <class Units, bool WHOLE, class T, int ROWS, int KEYS_NOW>
INLINE void add_scores(const uint32_t *queries, int depth, const T *const *keys, int64_t offset, int left,
                       vf (&sums)[ROWS][KEYS_NOW]) {
    vi query[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) memcpy(&query[r], queries + r * depth, sizeof query[r]);
#pragma GCC unroll 16
    for (int k = 0; k < KEYS_NOW; k++) {
        vi key = units_of<Units>(keys[k] + offset, WHOLE ? LANES * Units::size : left);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sums[r][k] = Units::dot(sums[r][k], query[r], key);
    }
}

// scores [ROWS, LANES] of some queries, as units, with LANES keys, which lie at `offset` from `keys`.
template <class Units, class T, int ROWS>
INLINE void few_scores(
    const uint32_t *queries, int depth, const T *const *keys, int64_t offset, int length, int ahead, float *scores) {
    const int AT_ONCE = in_registers(ROWS, LANES), step = LANES * Units::size;
    vf sums[ROWS][LANES];
#pragma GCC unroll 4
    for (int k = 0; k < LANES; k += AT_ONCE) {
        vf some[ROWS][AT_ONCE] = {};
        // Keys lie beside each other but for a block's end. Of few rows they are asked for a little at a time, as memory answers.
        const bool LITTLE = ROWS < ROWS_AT_ONCE;
        const T *next = keys[ahead + k] + offset;
        for (int i = 0; i < AT_ONCE && !LITTLE; i++) ask_for_row(keys[ahead + k + i] + offset, length);
        int at = 0;
        for (; at + step <= length; at += step, next += AT_ONCE * step) {
            if (LITTLE) ask_for_row(next, AT_ONCE * step);
            add_scores<Units, true>(queries + at / Units::size, depth, keys + k, offset + at, step, some);
        }
        if (at < length)
            add_scores<Units, false>(queries + at / Units::size, depth, keys + k, offset + at, length - at, some);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < AT_ONCE; i++) sums[r][k + i] = some[r][i];
    }
    for (int r = 0; r < ROWS; r++) store(scores + r * KEYS, sum_each(sums[r]));
}

// sums [ROWS, width] += weights [ROWS, keys] values, of VECTORS vectors, of which all is there if they are `WHOLE`.
template <bool WHOLE, int ROWS, int VECTORS, class T>
INLINE void few_sums(
    const float *weights, const T *const *values, int64_t offset, int count, int left, int ahead, float *sums, int width) {
    vf some[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) some[r][v] = load(sums + r * width + v * LANES);
    for (int t = 0; t < count; t++) {
        ask_for_row(values[ahead + t] + offset, VECTORS * LANES);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            vf value = load_some(values[t] + offset + v * LANES, WHOLE ? LANES : left);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) some[r][v] += weights[r * KEYS + t] * value;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * width + v * LANES, some[r][v]);
}

// One thread's memory, as offsets in units of four bytes.
struct Room {
    int queries, scores, sums, keys, values, top, total, rest;  // `total`: of exponentials
    int width, depth;  // of a head: of its values, and its units, both padded

    Room(const Layer *layer, int unit) {
        int rows = rounded_up(tile_queries(layer->group) * layer->group, 16);
        width = rounded_up(layer->head_dim, LANES);
        depth = rounded_up(layer->head_dim, LANES * unit) / unit;
        queries = 0;
        scores = queries + rows * depth;
        sums = scores + rows * KEYS;
        keys = sums + rows * width;
        values = keys + depth * KEYS;
        top = values + KEYS * width;
        total = top + rows;
        rest = total + rows;
    }
};

template <class T> struct Tile {
    typedef typename UnitsOf<T>::type Units;
    const Layer *layer;
    const Step *step;
    Task task;
    int head, heads, rows, first_position;  // `rows` of each head
    const PairTiles *tiles = nullptr;       // by which they are multiplied; null: by vectors
    Room room;
    uint32_t *memory;

    // Of `heads` key heads from `head` on; of one unless it has few rows.
    Tile(const Layer *layer, const Step *step, const Task &task, int head, int heads, uint32_t *memory)
        : layer(layer), step(step), task(task), head(head), heads(heads), room(layer, Units::size), memory(memory) {
        int num_queries = step->starts[task.seq + 1] - step->starts[task.seq];
        rows = task.num_queries * layer->group;
        first_position = step->seq_lens[task.seq] - num_queries + task.query;
    }

    float *floats(int offset) { return (float *)memory + offset; }

    bool has_few() { return rows <= FEW_ROWS && heads * rows <= tile_queries(layer->group) * layer->group; }

    int query_head(int h, int r) { return (head + h) * layer->group + r % layer->group; }
    int token(int r) { return step->starts[task.seq] + task.query + r / layer->group; }

    // Runs with each row: the number of its head, its own among the head's, and that among all.
    template <class Run> void in_rows(const Run &run) {
        for (int h = 0, all = 0; h < heads; h++)
            for (int r = 0; r < rows; r++, all++) run(h, r, all);
    }

    // Where rows of `pages` lie, keys or values, `count` from `first` on of the first head.
    void find(const void *pages, int first, int count, const T **to) {
        const int32_t *table = step->tables + task.seq * step->table_stride;
        int size = layer->block_size, width = layer->head_dim;
        for (int t = 0; t < count;) {
            int block = (first + t) / size, offset = (first + t) % size;
            int run = size - offset < count - t ? size - offset : count - t;
            const T *at = (const T *)pages + table[block] * layer->block_stride + head * layer->head_stride;
            for (int i = 0; i < run; i++) to[t + i] = at + (int64_t)(offset + i) * width;
            t += run;
        }
    }

    // Runs with null of the type that queries have: that of pages, unless those hold codes.
    template <class Run> void in_type_of_queries(const Run &run) {
        if constexpr (sizeof(T) > 1)
            run((const T *)nullptr);
        else if (layer->is_bf16)
            run((const bf16 *)nullptr);
        else
            run((const float *)nullptr);
    }

    void begin(const void *q, int64_t q_token, int64_t q_head) {
        in_type_of_queries([&](auto type) {
            in_rows([&](int h, int r, int all) {
                const auto *row = (decltype(type))q + token(r) * q_token + query_head(h, r) * q_head;
                lay_out_row<Units>(row, layer->head_dim, memory + room.queries + all * room.depth);
                floats(room.top)[all] = lowest();
                floats(room.total)[all] = 0.0f;
            });
        });
        memset(floats(room.sums), 0, sizeof(float) * heads * rows * room.width);
    }

    // What is looked at first.
    void find_first(const T **to) {
        int count = task.key_end - task.key_begin;
        if (count > 0) find(layer->keys, task.key_begin, count < AHEAD ? count : AHEAD, to);
    }

    // Finds `count` rows, and repeats the last up to so many.
    void find_whole(const void *pages, int first, int count, int columns, const T **to) {
        find(pages, first, count, to);
        for (int t = count; t < columns; t++) to[t] = to[count - 1];
    }

    // `find_more` finds what is probably looked at after this tile. While some rows are looked at, those that come AHEAD
    // rows later are asked for: values after keys, and then the next keys.
    template <class FindMore> void run(bool by_tiles, const FindMore &find_more) {
        const T *keys[KEYS + AHEAD], *values[KEYS + AHEAD];
#if defined(TILED)
        by_tiles = by_tiles && Units::size == 2 && !has_few();
        PairTiles of_rows(by_tiles ? rows : 0, room.depth);
        if (by_tiles) tiles = &of_rows;
#endif
        for (int first = task.key_begin, count; first < task.key_end; first += count) {
            count = task.key_end - first < KEYS ? task.key_end - first : KEYS;
            int columns = rounded_up(count, tiles ? 2 * LANES : LANES), left = task.key_end - first - count;
            find_whole(layer->keys, first, count, columns, keys);
            find_whole(layer->values, first, count, columns, values);
            for (int t = 0; t < AHEAD; t++) keys[columns + t] = values[columns + t] = values[t < count ? t : 0];
            if (left > 0)
                find(layer->keys, first + count, left < AHEAD ? left : AHEAD, values + columns);
            else
                find_more(values + columns);
            if (has_few())
                run_few(keys, values, first, count, columns);
            else
                run_many(keys, values, first, count, columns);
        }
    }

    // c [rows, columns] = or += a [rows, units] b [units, columns].
    void multiply(const uint32_t *a, int a_stride, Whole b, int units, float *c, int c_stride, int columns, bool add) {
#if defined(TILED)
        if (tiles) return tiles->product(a, a_stride, b, units, c, c_stride, rows, columns, add);
#endif
        product<Units>(a, a_stride, b, units, c, c_stride, rows, columns, add);
    }

    // Keys where they lie could be multiplied by queries laid out, but then weights would have to be laid out for the values:
    // of more rows than half a head's numbers that takes longer.
    void run_many(const T *const *keys, const T *const *values, int first, int count, int columns) {
        for (int t = 0; t < columns; t += LANES)
            lay_out_keys<Units>(keys + t, layer->head_dim, memory + room.keys + t, KEYS);
        multiply(memory + room.queries, room.depth, Whole{memory + room.keys, KEYS}, room.depth, floats(room.scores), KEYS,
                 columns, false);
        in_rows([&](int h, int r, int all) { weigh<Units>(h, r, all, first, count, columns); });
        add_values(values, columns);
    }

    void run_few(const T *const *keys, const T *const *values, int first, int count, int columns) {
        for (int t = 0; t < columns; t += stretch())
            in_few_rows([&](auto few, int r) { score<few.value>(keys, r, t, columns); });
        in_rows([&](int h, int r, int all) { weigh<Singles>(h, r, all, first, count, columns); });
        for (int t = 0; t < columns; t += stretch())
            in_few_rows([&](auto few, int r) { add_stretch<few.value>(values, r, t, columns); });
    }

    int stretch() { return rows < ROWS_AT_ONCE ? KEYS : STRETCH; }

    int rows_ahead() {
        if (rows >= ROWS_AT_ONCE) return AHEAD;
        int fit = BYTES_AHEAD / (layer->head_dim * (int)sizeof(T));
        return fit < LANES ? LANES : fit < AHEAD ? fit : AHEAD;
    }

    // Runs with as many rows of a head at a time as go into registers.
    template <class Run> void in_few_rows(const Run &run) {
        for (int r = 0; r < heads * rows;) {
            int left = rows - r % rows;
            switch (left) {
                case 1: run(Fixed<1>(), r); break;
                case 2: run(Fixed<2>(), r); break;
                case 3: run(Fixed<3>(), r); break;
                default: run(Fixed<ROWS_AT_ONCE>(), r);
            }
            r += left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
        }
    }

    template <int ROWS> void score(const T *const *keys, int r, int t, int columns) {
        const uint32_t *queries = memory + room.queries + r * room.depth;
        float *scores = floats(room.scores) + r * KEYS;
        int64_t offset = r / rows * layer->head_stride;
        for (int end = t + stretch() < columns ? t + stretch() : columns; t < end; t += LANES)
            few_scores<Units, T, ROWS>(queries, room.depth, keys + t, offset, layer->head_dim, rows_ahead(), scores + t);
    }

    template <int ROWS> void add_stretch(const T *const *values, int r, int t, int columns) {
        const int length = layer->head_dim, width = room.width, VECTORS = in_registers(ROWS, 64 / LANES);
        const float *weights = floats(room.scores) + r * KEYS + t;
        float *sums = floats(room.sums) + r * width;
        int count = columns - t < stretch() ? columns - t : stretch(), ahead = rows_ahead(), at = 0;
        int64_t offset = r / rows * layer->head_stride;
        for (; at + VECTORS * LANES <= length; at += VECTORS * LANES)
            few_sums<true, ROWS, VECTORS>(weights, values + t, offset + at, count, LANES, ahead, sums + at, width);
        for (; at < length; at += LANES)
            few_sums<false, ROWS, 1>(weights, values + t, offset + at, count, length - at, ahead, sums + at, width);
    }

    // Scores of a row, of `count` keys and the last again, become weights; its sums so far are scaled to the new maximum.
    template <class As> void weigh(int h, int r, int all, int first, int count, int columns) {
        float *scores = floats(room.scores) + all * KEYS;
        int position = first_position + r / layer->group, of_head = query_head(h, r);
        int low = first_seen(layer->window, layer->chunk, position) - first, high = position + 1 - first;
        if (high > count) high = count;
        float of_logits = layer->scale * layer->k_scale * unit_of<T>();
        float scale = of_logits * LOG2_E, cap = layer->softcap;
        float slope = layer->slopes ? layer->slopes[of_head] * LOG2_E : 0.0f;
        bool is_masked = low > 0 || high < columns;
        vi lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        vf most = splat(lowest());
        for (int t = 0; t < columns; t += LANES) {
            vf x = load(scores + t);
            if (cap != 0.0f) {  // tanh(y) = 1 - 2 / (e^2y + 1), of |y|, so that nothing overflows
                vf y = x * (of_logits / cap);
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
        float *top = floats(room.top) + all, *total = floats(room.total) + all;
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
            float *sums = floats(room.sums) + all * room.width;
            for (int at = 0; at < room.width; at += LANES) store(sums + at, load(sums + at) * kept);
            *total *= kept;
            *top = reached;
        }
        *total += sum_of(sum);
    }

    void add_values(const T *const *values, int columns) {
        uint32_t *weights = memory + room.scores;
        float *sums = floats(room.sums);
        if (sizeof(T) == sizeof(float) && layer->head_dim == room.width) {  // they are what is multiplied
            for (int t = 0; t < columns; t++)
                for (int at = 0; at < layer->head_dim; at += 16) ask_for(values[AHEAD + t] + at);
            Scattered rows_of_pages{(const uint32_t *const *)values};
            product<Units>(weights, KEYS, rows_of_pages, columns, sums, room.width, rows, room.width, true);
            return;
        }
        uint32_t *to = memory + room.values;
        for (int t = 0; t < columns; t += Units::size, to += room.width)
            lay_out_values(Units(), values + t, layer->head_dim, to);
        multiply(weights, KEYS, Whole{memory + room.values, room.width}, columns / Units::size, sums, room.width, room.width, true);
    }

    // The share of a head's sink, and the sums over the total.
    void finish(void *out) {
        in_type_of_queries([&](auto type) { finish_as(decltype(type)(out)); });
    }

    template <class Q> void finish_as(const Q *out) {
        int num_heads = layer->kv_heads * layer->group, width = layer->head_dim;
        in_rows([&](int h, int r, int all) {
            int of_head = query_head(h, r);
            float top = floats(room.top)[all], total = floats(room.total)[all], factor;
            if (layer->sinks) {
                float sink = layer->sinks[of_head] * LOG2_E, base = sink > top ? sink : top;
                float kept = top == lowest() ? 0.0f : exp2_of(splat(top - base))[0];
                factor = kept / (total * kept + exp2_of(splat(sink - base))[0]);
            } else {
                factor = total == 0.0f ? 0.0f : 1.0f / total;
            }
            factor *= layer->v_scale * unit_of<T>();
            Q *to = (Q *)out + ((int64_t)token(r) * num_heads + of_head) * width;
            const float *sums = floats(room.sums) + all * room.width;
            for (int at = 0; at < width; at += LANES) store_some(to + at, load(sums + at) * factor, width - at);
        });
    }

    // A part's result of head h of the tile: its sums, then the maxima, then the totals.
    float *part(const Plan *plan, int slot, int h) {
        return plan->partials + ((int64_t)slot * layer->kv_heads + head + h) * plan->part;
    }

    void leave(const Plan *plan) {
        for (int h = 0; h < heads; h++) {
            float *to = part(plan, task.slot, h);
            memcpy(to, floats(room.sums) + h * rows * room.width, sizeof(float) * rows * room.width);
            memcpy(to + rows * room.width, floats(room.top) + h * rows, sizeof(float) * rows);
            memcpy(to + rows * room.width + rows, floats(room.total) + h * rows, sizeof(float) * rows);
        }
    }

    void gather(const Plan *plan) {
        in_rows([&](int h, int r, int all) {
            float top = lowest(), total = 0.0f;
            for (int i = 0; i < task.num_parts; i++) {
                float one = part(plan, task.first_slot + i, h)[rows * room.width + r];
                top = one > top ? one : top;
            }
            float base = top == lowest() ? 0.0f : top, *sums = floats(room.sums) + all * room.width;
            memset(sums, 0, sizeof(float) * room.width);
            for (int i = 0; i < task.num_parts; i++) {
                const float *from = part(plan, task.first_slot + i, h), *ends = from + rows * room.width;
                float kept = ends[r] == lowest() ? (ends[rows + r] == 0.0f ? 0.0f : 1.0f)  // 1: no number, to be kept
                                                 : exp2_of(splat(ends[r] - base))[0];
                for (int at = 0; at < room.width; at += LANES)
                    store(sums + at, load(sums + at) + load(from + r * room.width + at) * kept);
                total += ends[rows + r] * kept;
            }
            floats(room.top)[all] = top;
            floats(room.total)[all] = total;
        });
    }
};

// Heads that a thread takes together, so that so many threads find enough to do.
int heads_at_once(const Layer *layer, const Plan *plan, int threads) {
    int heads = heads_together(layer->group, layer->kv_heads);
    int enough = threads > 1 ? threads * WORK_PER_THREAD : 1;
    while (heads > 1 && (layer->kv_heads % heads || plan->num_tasks * (layer->kv_heads / heads) < enough)) heads--;
    return heads;
}

// What threads take from, one head of a task after the other; of few queries the first of `heads` stands for all.
template <class T> struct Work {
    const Layer *layer;
    const Step *step;
    const Plan *plan;
    int heads;
    bool by_tiles;

    int count() { return plan->num_tasks * layer->kv_heads; }
    Tile<T> tile(int index, uint32_t *memory) {
        Tile<T> tile(layer, step, plan->tasks[index / layer->kv_heads], index % layer->kv_heads, heads, memory);
        if (!tile.has_few()) tile.heads = 1;
        return tile;
    }
};

template <class T>
void attend_tasks(Work<T> work, const void *q, int64_t q_token, int64_t q_head, void *out, uint32_t *memory, int32_t *next) {
    auto find_more = [&](const T **rows) {
        for (int index = __atomic_load_n(next, __ATOMIC_RELAXED); index < work.count(); index++) {
            Tile<T> tile = work.tile(index, memory);
            if (tile.head % tile.heads == 0) return tile.find_first(rows);
        }
    };
    for (;;) {
        int index = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (index >= work.count()) return;
        Tile<T> tile = work.tile(index, memory);
        if (tile.head % tile.heads) continue;
        const Task &task = tile.task;
        tile.begin(q, q_token, q_head);
        tile.run(work.by_tiles, find_more);
        if (task.slot >= 0) {
            tile.leave(work.plan);
            int32_t *counter = work.plan->counters + task.tile * work.layer->kv_heads + tile.head;
            if (__atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL) < task.num_parts) continue;
            *counter = 0;
            tile.gather(work.plan);
        }
        tile.finish(out);
    }
}

template <class T>
void attend(const Layer *layer, const Step *step, const Plan *plan, const void *q, int64_t q_token, int64_t q_head, void *out,
            uint32_t *memory, int64_t per_thread, bool by_tiles = false) {
    int threads = plan->threads;
    int32_t next = 0;
    Work<T> work = {layer, step, plan, heads_at_once(layer, plan, threads), by_tiles};
    if (threads <= 1) return attend_tasks(work, q, q_token, q_head, out, memory, &next);
#pragma omp parallel num_threads(threads)
    attend_tasks(work, q, q_token, q_head, out, memory + per_thread * omp_get_thread_num(), &next);
}

// Whether pages are multiplied as bfloat16.
bool has_bf16_pages(const Layer *layer) { return layer->is_bf16 && layer->pages == PAGES_PLAIN; }

}  // namespace

extern "C" {

int32_t NAMED(room, ISA)(const Layer *layer) {
    Room room(layer, has_bf16_pages(layer) ? UnitsOf<bf16>::type::size : 1);
    return rounded_up(room.rest, 16);
}

int32_t NAMED(part, ISA)(const Layer *layer, int32_t queries) {
    return queries * layer->group * (rounded_up(layer->head_dim, LANES) + 2);
}

void NAMED(attend, ISA)(const Layer *layer, const Step *step, const Plan *plan, const void *q, int64_t q_token,
                        int64_t q_head, void *out, uint32_t *memory, int64_t per_thread) {
    if (layer->pages == PAGES_E4M3)
        attend<e4m3>(layer, step, plan, q, q_token, q_head, out, memory, per_thread);
    else if (layer->pages == PAGES_E5M2)
        attend<e5m2>(layer, step, plan, q, q_token, q_head, out, memory, per_thread);
    else if (layer->is_bf16)
        attend<bf16>(layer, step, plan, q, q_token, q_head, out, memory, per_thread);
    else
        attend<float>(layer, step, plan, q, q_token, q_head, out, memory, per_thread);
}

#if defined(TILED)
void NAMED(attend, TILED)(const Layer *layer, const Step *step, const Plan *plan, const void *q, int64_t q_token,
                          int64_t q_head, void *out, uint32_t *memory, int64_t per_thread) {
    if (!has_bf16_pages(layer))
        return NAMED(attend, ISA)(layer, step, plan, q, q_token, q_head, out, memory, per_thread);
    attend<bf16>(layer, step, plan, q, q_token, q_head, out, memory, per_thread, true);
}
#endif
}
