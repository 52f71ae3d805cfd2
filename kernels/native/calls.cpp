// A step's calls, noted once and made again without anybody between them.
#include "kernels.h"

extern "C" {

// One call after the other, as they were noted.
void run_calls(const InstructionSet *set, const Call *calls, int32_t count) {
    for (const Call *call = calls; call < calls + count; call++) {
        void *const *at = call->at;
        const int64_t *strides = call->strides;
        const int32_t *counts = call->counts;
        switch (call->function) {
            case CALL_PLAN_ATTENTION:
                plan_attention((Step *)at[0], counts[0], counts[1], counts[2], counts[3], counts[4], (Plan *)at[1]);
                break;
            case CALL_WRITE_PAGES:
                set->write_pages((Layer *)at[0], at[1], at[2], strides[0], strides[1], strides[2], strides[3],
                                 (int64_t *)at[3], counts[0], counts[1]);
                break;
            case CALL_ATTEND:
                set->attend((Layer *)at[0], (Step *)at[1], (Plan *)at[2], at[3], strides[0], strides[1], at[4],
                            (uint32_t *)at[5], strides[2]);
                break;
            case CALL_RUN_EXPERTS:
                set->run_experts((Experts *)at[0], (Routed *)at[1], (char *)at[2], counts[0]);
                break;
            case CALL_RUN_QUANTIZED_EXPERTS:
                set->run_quantized_experts((QuantizedExperts *)at[0], (Routed *)at[1], (char *)at[2], counts[0]);
                break;
            case CALL_RUN_PRODUCT:
                set->run_product((Packed *)at[0], (Product *)at[1], (char *)at[2], counts[0]);
                break;
            case CALL_RUN_DENSE:
                set->run_dense((Dense *)at[0], counts[0], (Product *)at[1], strides[0], strides[1], (char *)at[2], counts[1]);
                break;
            case CALL_NORM: set->norm((Rows *)at[0], at[1], at[2], (float *)at[3], call->number); break;
            case CALL_ROTATE: set->rotate((Rows *)at[0], at[1], (Rotation *)at[2]); break;
            case CALL_ROUTE:
                route((Routing *)at[0], at[1], strides[0], counts[0], (float *)at[2], (int32_t *)at[3], counts[1], counts[2]);
                break;
            case CALL_DECODE_BLOCKS:
                set->decode_blocks(counts[0], (const uint8_t *)at[0], strides[0], at[1], counts[1]);
                break;
        }
    }
}
}
