// Which instruction sets this library and this processor have in common, and the plan of a step's attention.
#include <omp.h>

#include "kernels.h"

#define EACH_SET(DO) EACH_SET_OF_MACHINE(DO) DO(plain)
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define EACH_SET_OF_MACHINE(DO) DO(avx512_bf16) DO(avx512_vnni) DO(avx512) DO(avx2)
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define EACH_SET_OF_MACHINE(DO) DO(neon_bf16) DO(neon_dot)
#else
#define EACH_SET_OF_MACHINE(DO)
#endif

#define DECLARE(isa)                                                                                                   \
    int32_t room_##isa(const Layer *);                                                                                 \
    int32_t part_##isa(const Layer *, int32_t);                                                                        \
    int64_t experts_room_##isa(const Experts *, int32_t);                                                              \
    int64_t dense_bytes_##isa(const Dense *);                                                                          \
    void lay_out_dense_##isa(const Dense *, const void *, int64_t, void *, int32_t);                                   \
    int64_t dense_room_##isa(const Dense *, int32_t);                                                                  \
    void run_dense_##isa(const Dense *, int32_t, const Product *, int64_t, int64_t, char *, int32_t);                  \
    int64_t sampling_room_##isa(int32_t, int32_t);                                                                     \
    void sample_##isa(const Sampling *, int32_t *, char *);                                                            \
    void norm_##isa(const Rows *, const void *, void *, const float *, float);                                         \
    void rotate_##isa(const Rows *, void *, const Rotation *);                                                         \
    void write_pages_##isa(const Layer *, const void *, const void *, int64_t, int64_t, int64_t, int64_t,              \
                           const int64_t *, int32_t, int32_t);                                                         \
    void decode_blocks_##isa(int32_t, const uint8_t *, int64_t, void *, int32_t);                                      \
    int32_t lay_out_blocks_##isa(const Blocks *, uint8_t *, float *, int32_t);

// What a set with tiles has of its own.
#define DECLARE_OWN(isa)                                                                                               \
    void attend_##isa(const Layer *, const Step *, const Plan *, const void *, int64_t, int64_t, void *, uint32_t *,   \
                      int64_t);                                                                                        \
    void run_experts_##isa(const Experts *, const Routed *, char *, int32_t);                                          \
    int64_t quantized_experts_room_##isa(const QuantizedExperts *, int32_t);                                           \
    void run_quantized_experts_##isa(const QuantizedExperts *, const Routed *, char *, int32_t);                       \
    int64_t product_room_##isa(const Packed *, int32_t);                                                               \
    void run_product_##isa(const Packed *, const Product *, char *, int32_t);

extern "C" {
EACH_SET(DECLARE)
EACH_SET(DECLARE_OWN)
#if defined(__x86_64__)
DECLARE_OWN(avx512_amx)
#endif
}

namespace {

// The kernels of a set, and those that another has of its own.
#define ENTRY_OF(name, isa, own)                                                                                   \
    {#name,                                                                                                        \
     room_##isa,                                                                                                   \
     part_##isa,                                                                                                   \
     attend_##own,                                                                                                 \
     experts_room_##isa,                                                                                           \
     run_experts_##own,                                                                                            \
     quantized_experts_room_##own,                                                                                 \
     run_quantized_experts_##own,                                                                                  \
     product_room_##own,                                                                                           \
     run_product_##own,                                                                                            \
     dense_bytes_##isa,                                                                                            \
     lay_out_dense_##isa,                                                                                          \
     dense_room_##isa,                                                                                             \
     run_dense_##isa,                                                                                              \
     sampling_room_##isa,                                                                                          \
     sample_##isa,                                                                                                 \
     norm_##isa,                                                                                                   \
     rotate_##isa,                                                                                                 \
     write_pages_##isa,                                                                                            \
     decode_blocks_##isa,                                                                                          \
     lay_out_blocks_##isa},
#define ENTRY(isa) ENTRY_OF(isa, isa, isa)
const InstructionSet SETS[] = {
#if defined(__x86_64__)
    ENTRY_OF(avx512_amx, avx512_bf16, avx512_amx)
#endif
        EACH_SET(ENTRY)};
const int NUM_SETS = sizeof SETS / sizeof SETS[0];

#if defined(__x86_64__)
// Whether the processor multiplies bytes and bfloat16 in tiles, and Linux lets this process, all threads of it, have the
// registers: they are so large that they have to be asked for (arch_prctl's ARCH_REQ_XCOMP_PERM, Linux 5.16).
bool has_tiles() {
    const unsigned kinds = 3u << 24 | 1u << 22;  // AMX-TILE, AMX-INT8, AMX-BF16
    const long ask_for = 0x1023, tile_data = 18;
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kinds) == kinds &&
           syscall(SYS_arch_prctl, ask_for, tile_data) == 0;
}
#endif

bool has_set(int index) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    switch (index) {
        case 0: return bf16 && has_tiles();
        case 1: return bf16;
        case 2: return vnni;
        case 3: return avx512;
        case 4: return avx2;
    }
#elif defined(__aarch64__)
    // As Linux numbers them, which older headers do not all know.
    bool dot = getauxval(AT_HWCAP) & (1ul << 20), bf16 = getauxval(AT_HWCAP2) & (1ul << 14);
    switch (index) {
        case 0: return dot && bf16;
        case 1: return dot;
    }
#endif
    return index == NUM_SETS - 1;
}

int64_t cost_of(int keys, int rows) { return (int64_t)keys * (rows + 8); }  // loading keys costs as 8 rows

const int SHORTEST_PART = 2 * KEYS_AT_ONCE;
const int PARTS_PER_THREAD = 4;
const int64_t WORTH_A_THREAD = 1 << 13;

}  // namespace

extern "C" {

int32_t abi_version() { return 15; }
int32_t most_experts() { return MOST_EXPERTS; }
int32_t parts_per_thread() { return PARTS_PER_THREAD; }

// The best set first; null where there are no more.
const InstructionSet *instruction_set(int32_t nth) {
    for (int index = 0; index < NUM_SETS; index++)
        if (has_set(index) && nth-- == 0) return &SETS[index];
    return nullptr;
}

// The tasks of a step for layers that see as far as `window` and `chunk` say. Without a plan it only counts.
PlanSize plan_attention(const Step *step, int32_t group, int32_t kv_heads, int32_t window, int32_t chunk,
                        int32_t threads, Plan *plan) {
    PlanSize size = {0, 0, 0, threads, 0};
    int tile = tile_queries(group), together = heads_together(group, kv_heads);
    int64_t longest = 0;  // that a task may take
    for (int pass = 0; pass < 2; pass++) {  // first the cost of all, then the tasks
        for (int s = 0; s < step->num_seqs; s++) {
            int queries = step->starts[s + 1] - step->starts[s], begin = step->seq_lens[s] - queries;
            int last = queries > 0 ? (queries - 1) / tile * tile : -1;
            for (int query = last; query >= 0; query -= tile) {  // those that see most come first
                int count = queries - query < tile ? queries - query : tile;
                int low = first_seen(window, chunk, begin + query), high = begin + query + count;
                if (high < low) high = low;
                int64_t cost = cost_of(high - low, count * group);
                if (pass == 0) {
                    longest += cost * kv_heads;
                    continue;
                }
                int64_t beside = count * group <= ROWS_TOGETHER ? cost * together : cost;
                int64_t parts = threads > 1 && longest > 0 ? (beside + longest - 1) / longest : 1;
                int64_t most = (high - low) / SHORTEST_PART;
                if (parts > most) parts = most;
                if (parts < 1) parts = 1;
                int length = (int)(((high - low + parts - 1) / parts + KEYS_AT_ONCE - 1) / KEYS_AT_ONCE * KEYS_AT_ONCE);
                int num_parts = length > 0 ? (high - low + length - 1) / length : 1;
                if (num_parts < 1) num_parts = 1;
                for (int part = 0; part < num_parts; part++) {
                    if (plan) {
                        int from = low + part * length, to = part == num_parts - 1 ? high : from + length;
                        bool is_cut = num_parts > 1;
                        plan->tasks[size.tasks] = {s, query, count, from, to, is_cut ? size.slots + part : -1,
                                             size.slots, num_parts, size.tiles};
                    }
                    size.tasks++;
                }
                if (num_parts > 1) {
                    size.slots += num_parts;
                    size.tiles++;
                    if (count > size.queries) size.queries = count;
                }
            }
        }
        if (pass == 0 && longest < WORTH_A_THREAD) size.threads = threads = 1;
        if (pass == 0) longest = longest / (threads * PARTS_PER_THREAD);
    }
    if (plan) plan->num_tasks = size.tasks, plan->threads = size.threads;
    return size;
}

// The CPU that OpenMP gave the calling thread, if it binds threads and gives each a CPU of its own; else -1.
int32_t own_cpu() {
    int place = omp_get_place_num(), cpu = -1;
    if (place >= 0 && omp_get_place_num_procs(place) == 1) omp_get_place_proc_ids(place, &cpu);
    return cpu;
}
}
