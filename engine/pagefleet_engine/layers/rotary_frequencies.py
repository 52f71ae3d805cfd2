"""Rotary frequencies and their scalings: default, linear, dynamic, llama3, yarn, longrope. Arithmetic only.

Shapes: R/2 rotated pairs of a head, P positions. Sources: RoPE, Su et al., arXiv 2104.09864; dynamic NTK as in the
Hugging Face configurations; YaRN, Peng et al., arXiv 2309.00071; llama3 as published with Llama 3.1; LongRoPE, Ding et
al., arXiv 2402.13753.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """How positions become angles. Fields that a type does not use keep their defaults."""

    rope_type: RopeType = "default"
    """none: heads stay as they are, but for `query_growth`."""
    theta: float = 10_000.0
    """Base of the geometric series of wavelengths."""
    rotated_share: float = 1.0
    """Part of each head that rotates: its first dimensions."""
    factor: float = 1.0
    """How many times the context was stretched."""
    original_max_position: int = 0
    """Context before stretching."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths over original_max_position / this are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths under original_max_position / this are left alone."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this over the original context are left alone."""
    beta_slow: float = 1.0
    """yarn: pairs that turn less often than this are stretched in full."""
    attention_factor: float = 1.0
    """yarn, longrope: multiplies cosines and sines, hence queries and keys."""
    long_attention_factor: float | None = None
    """longrope: the same where a sequence may pass original_max_position, if it is another."""
    truncate: bool = True
    """yarn: round the bounds between the two regimes to whole pairs."""
    short_factors: tuple[float, ...] = ()
    """longrope: what each pair is stretched by where no sequence passes original_max_position."""
    long_factors: tuple[float, ...] = ()
    """longrope: and where one may."""
    longest: int = 0
    """longrope: longest sequence that is served; decides between the two for all sequences."""
    query_growth: float = 0.0
    """none: a query at position p is multiplied by `1 + growth * ln(1 + floor((p + 1) / growth_step))`, so that the
    softmax stays sharp over long contexts (arXiv 2501.19399)."""
    growth_step: float = 1.0

    @property
    def is_long(self) -> bool:
        """longrope: whether a sequence may pass the first context."""
        return self.longest > self.original_max_position

    @property
    def magnitude(self) -> float:
        """Multiplies cosines and sines."""
        if self.is_long and self.long_attention_factor is not None:
            return self.long_attention_factor
        return self.attention_factor

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head rotate."""
        return int(head_dim * self.rotated_share)


NO_ROPE = RopeParameters(rope_type="none")
"""Of layers whose heads do not rotate."""


def query_scales(rope: RopeParameters, positions_P: Tensor) -> Tensor:
    """Float32 [P]: what queries at integer positions are multiplied by where heads do not rotate."""
    steps_P = ((positions_P.to(torch.float32) + 1.0) / rope.growth_step).floor_()
    return steps_P.log1p_().mul_(rope.query_growth).add_(1.0)


def angles(rope: RopeParameters, rotary_dim: int, positions_P: Tensor) -> Tensor:
    """Float32 [P, R/2] angles in radians at integer positions, on the positions' device; `rotary_dim` is R."""
    return angles_of(rope, rotary_dim, positions_P.device)(positions_P)


def angles_of(rope: RopeParameters, rotary_dim: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """What makes `angles` of positions on a device; what does not depend on these is worked out here.

    Each row depends on its own position only, so that cached keys stay valid however long a sequence grows. For
    `dynamic` this means the base that suits a context ending at that position: what token-by-token decoding gives.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    if rope.rope_type == "dynamic":
        return partial(_dynamic, rope, rotary_dim, exponent)
    if rope.rope_type == "longrope":
        factors = rope.long_factors if rope.is_long else rope.short_factors
        stretch = torch.tensor(factors, dtype=torch.float32, device=device)
        frequencies = 1.0 / (stretch * rope.theta**exponent)
    else:
        frequencies = _scaled(rope, rotary_dim, 1.0 / rope.theta**exponent)
    return lambda positions_P: positions_P.to(torch.float32).unsqueeze(1) * frequencies


def _dynamic(rope: RopeParameters, rotary_dim: int, exponent: Tensor, positions_P: Tensor) -> Tensor:
    positions_P1 = positions_P.to(torch.float32).unsqueeze(1)
    length_P1 = (positions_P1 + 1).clamp(min=rope.original_max_position)
    growth_P1 = rope.factor * length_P1 / rope.original_max_position - (rope.factor - 1)
    base_P1 = rope.theta * growth_P1 ** (rotary_dim / (rotary_dim - 2))
    return positions_P1 / base_P1**exponent


def _scaled(rope: RopeParameters, rotary_dim: int, frequencies: Tensor) -> Tensor:
    match rope.rope_type:
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, rotary_dim, frequencies)
        case _:
            return frequencies


def _llama3(rope: RopeParameters, frequencies: Tensor) -> Tensor:
    """Long wavelengths stretched, short ones kept, those between blended linearly in turns per original context."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    # Llama 4 Scout has both factors 1: a step.
    kept = (turns - rope.low_freq_factor) / max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _yarn(rope: RopeParameters, rotary_dim: int, frequencies: Tensor) -> Tensor:
    """As llama3, with the blend linear in the pair's index."""

    def pair_with_turns(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device=frequencies.device)
    stretched = ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies
