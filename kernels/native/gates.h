// Activations, and how gate and up are joined; see `Gate` in expert_gates.py.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace {

// 1 / (1 + e^-x)
INLINE vf sigmoid(vf x) {
    vi positive = x > 0.0f;
    vf small = exp2_of(choose(positive, -x, x) * 1.442695041f);
    return choose(positive, splat(1.0f), small) / (small + 1.0f);
}

INLINE vf at_most(vf x, float most) { return choose(x > most, splat(most), x); }
INLINE vf at_least(vf x, float least) { return choose(x < least, splat(least), x); }

INLINE vf activated(int kind, vf x) {
    switch (kind) {
        case GATE_SILU: return x * sigmoid(x);
        case GATE_GELU_TANH: return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
        default: return at_least(x, 0.0f);
    }
}

INLINE vf joined(int kind, vf gate, vf up) {
    if (kind != GATE_SWIGLUOAI) return activated(kind, gate) * up;
    gate = at_most(gate, 7.0f);  // gpt-oss's
    return gate * sigmoid(1.702f * gate) * (at_least(at_most(up, 7.0f), -7.0f) + 1.0f);
}

}  // namespace
