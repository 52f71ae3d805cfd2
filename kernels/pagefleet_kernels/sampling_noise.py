"""Random numbers for sampling that depend on nothing but (seed, output position, token id).

A counter-based generator has no state to carry, so a seeded request draws the same noise in any batch, row order or
chunking, and again after a preemption. The kernels and the twins hash to the same bits. Not for cryptography.

Shapes: R rows, C columns.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_kernels._triton import jit, tl

UInt64Array = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# Multipliers of Knuth's multiplicative hash and of murmur3's 32-bit finalizer, as the signed integers of torch.
_SPREAD = 0x9E3779B1 - 2**32
_ROUND_1 = 0x85EBCA6B - 2**32
_ROUND_2 = 0xC2B2AE35 - 2**32

_UNIT = 2.0**-31
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def mix64(x: UInt64Array) -> UInt64Array:
    """Scramble 64-bit integers one to one (the output function of SplitMix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _MIX_1
        x = (x ^ (x >> np.uint64(27))) * _MIX_2
        return x ^ (x >> np.uint64(31))


def row_keys(seeds_R: UInt64Array, positions_R: NDArray[np.int64]) -> NDArray[np.int32]:
    """Two 32-bit keys [R, 2] per row, from its seed and the position of the token to draw."""
    keys = mix64(mix64(seeds_R) ^ positions_R.astype(np.uint64))
    return keys.view(np.int32).reshape(-1, 2)


def spread_token_ids(token_ids: Tensor) -> Tensor:
    """First, key-free part of the hash of token ids, any shape; int32. Done once for a whole vocabulary."""
    return token_ids.to(torch.int32).mul_(_SPREAD)


def subtract_log_exponential_(scores: Tensor, spread_ids: Tensor, keys_R2: Tensor) -> Tensor:
    """Subtract log(E) from each score in place, E exponentially distributed; the argmax is then a draw from softmax.

    -log(E) is Gumbel noise, so this is the Gumbel-max trick. The noise has 2^31 levels: tokens down to a probability
    of about 1e-9 are drawn at their rate.

    Args:
        scores: float32 [R, C], log-probabilities up to a constant per row; -inf is never drawn.
        spread_ids: `spread_token_ids` of the columns, [C] or [R, C].
        keys_R2: int32 [R, 2] from `row_keys`.
    """
    h = torch.bitwise_xor(spread_ids, keys_R2[:, :1])
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    h.mul_(_ROUND_1).add_(keys_R2[:, 1:])
    h ^= (h >> 13).bitwise_and_(0x7FFFF)
    h.mul_(_ROUND_2)
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    uniform = h.bitwise_and_(0x7FFFFFFF).to(torch.float32).mul_(_UNIT).add_(_UNIT / 2)
    # The upper tail of the noise comes from uniforms near 0, where float32 is finest; log1p keeps it.
    exponential = uniform.clamp_(max=_LARGEST_BELOW_ONE).neg_().log1p_().neg_()
    return scores.sub_(exponential.log_())


@jit()
def gumbel_noise(seed, position, token):  # type: ignore[no-untyped-def]
    """-log(E) as in `subtract_log_exponential_`, for an int64 seed and position and a tile of token ids."""
    key = seed.to(tl.uint64, bitcast=True)
    for turn in tl.static_range(2):  # mix64(mix64(seed) ^ position)
        key = key + 0x9E3779B97F4A7C15
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB
        key = key ^ (key >> 31)
        if turn == 0:
            key = key ^ position.to(tl.uint64, bitcast=True)
    h = (token.to(tl.uint32) * 0x9E3779B1) ^ key.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B + (key >> 32).to(tl.uint32)
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    # every literal is a power of two, or one less, so that fusing the product and the sum changes nothing
    uniform = (h & 0x7FFFFFFF).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.9999999403953552)
    # log1p(-u) = log(w) * -u / (w - 1) with w = 1 - u rounded: the rounding cancels (Kahan)
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, rest - 1.0)
    exponential = tl.where(rest == 1.0, uniform, tl.log(rest) * uniform / lost)
    return -tl.log(exponential)
