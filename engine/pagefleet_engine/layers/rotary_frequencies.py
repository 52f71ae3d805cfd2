"""Rotary frequencies and their scalings: default, linear, dynamic, llama3, yarn. Arithmetic only.

Shapes: R/2 rotated pairs of a head, P positions. Sources: RoPE, Su et al., arXiv 2104.09864; dynamic NTK as in the
Hugging Face configurations; YaRN, Peng et al., arXiv 2309.00071; llama3 as published with Llama 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """How positions become angles. Fields that a type does not use keep their defaults."""

    rope_type: RopeType = "default"
    theta: float = 10_000.0
    """Base of the geometric series of wavelengths."""
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
    """yarn: multiplies cosines and sines, hence queries and keys."""
    truncate: bool = True
    """yarn: round the bounds between the two regimes to whole pairs."""


def angles(rope: RopeParameters, head_dim: int, positions_P: Tensor) -> Tensor:
    """Float32 [P, R/2] angles in radians at integer positions, on the positions' device.

    Each row depends on its own position only, so that cached keys stay valid however long a sequence grows. For
    `dynamic` this means the base that suits a context ending at that position: what token-by-token decoding gives.
    """
    positions_P1 = positions_P.to(torch.float32).unsqueeze(1)
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_P.device) / head_dim
    if rope.rope_type == "dynamic":
        length_P1 = (positions_P1 + 1).clamp(min=rope.original_max_position)
        growth_P1 = rope.factor * length_P1 / rope.original_max_position - (rope.factor - 1)
        base_P1 = rope.theta * growth_P1 ** (head_dim / (head_dim - 2))
        return positions_P1 / base_P1**exponent
    return positions_P1 * _scaled(rope, head_dim, 1.0 / rope.theta**exponent)


def _scaled(rope: RopeParameters, head_dim: int, frequencies: Tensor) -> Tensor:
    match rope.rope_type:
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, head_dim, frequencies)
        case _:
            return frequencies


def _llama3(rope: RopeParameters, frequencies: Tensor) -> Tensor:
    """Long wavelengths stretched, short ones kept, those between blended linearly in turns per original context."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _yarn(rope: RopeParameters, head_dim: int, frequencies: Tensor) -> Tensor:
    """As llama3, with the blend linear in the pair's index."""

    def pair_with_turns(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=frequencies.device)
    stretched = ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies
