"""Rotary position embedding: angles of a step's tokens are worked out once, then every layer turns its heads by them.

The first half of a head rotates against its second half. Shapes: T tokens, N query heads, K key heads, M = N + K,
H head size, P positions.
"""

from __future__ import annotations

from typing import Protocol

import torch
from pagefleet_kernels.rotary import apply_rope
from torch import Tensor

from pagefleet_engine.layers.rotary_frequencies import RopeParameters, angles
from pagefleet_engine.layers.weight import Placement


class Rotation(Protocol):
    """The rotation of one step, for all layers."""

    def rotate(self, qk_TMH: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Query heads come first in `qk`; returns [T, N, H] queries and [T, K, H] keys."""
        ...


class RotaryEmbedding:
    """Makes a step's rotation: from a table for the kernel, computed for the step without."""

    __slots__ = ("_head_dim", "_placement", "_rope", "_table_PH")

    def __init__(self, rope: RopeParameters, head_dim: int, max_positions: int, placement: Placement) -> None:
        """`max_positions`: length of the table; without kernels positions have no bound."""
        self._rope, self._head_dim, self._placement = rope, head_dim, placement
        self._table_PH: Tensor | None = None
        if placement.use_kernels:
            turns = angles(rope, head_dim, torch.arange(max_positions, device=placement.device))
            self._table_PH = torch.cat((turns.cos(), turns.sin()), dim=-1) * rope.attention_factor

    def at(self, positions_T: Tensor) -> Rotation:
        """The rotation to integer positions [T]."""
        if self._table_PH is not None:
            return _KernelRotation(self._table_PH, positions_T)
        turns = angles(self._rope, self._head_dim, positions_T)
        cos, sin = turns.cos(), turns.sin()
        cos_sin = torch.cat((cos, cos, -sin, sin), dim=-1).mul_(self._rope.attention_factor)
        cos_T1H, sin_T1H = cos_sin.to(self._placement.dtype).unsqueeze(1).chunk(2, dim=-1)
        return _TorchRotation(cos_T1H, sin_T1H)


class _TorchRotation:
    """`x * cos + swapped(x) * sin`, where swapping a head's halves is a roll and the signs are in the sines."""

    __slots__ = ("_cos_T1H", "_half", "_sin_T1H")

    def __init__(self, cos_T1H: Tensor, sin_T1H: Tensor) -> None:
        self._cos_T1H, self._sin_T1H = cos_T1H, sin_T1H
        self._half = cos_T1H.shape[-1] // 2

    def rotate(self, qk_TMH: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
        """See Rotation."""
        swapped_TMH = qk_TMH.roll(self._half, -1)
        rotated_TMH = torch.addcmul(qk_TMH * self._cos_T1H, swapped_TMH, self._sin_T1H)
        q_TNH, k_TKH = rotated_TMH.split_with_sizes((heads, kv_heads), 1)
        return q_TNH, k_TKH


class _KernelRotation:
    """The Triton kernel reads the table at the positions."""

    __slots__ = ("_positions_T", "_table_PH")

    def __init__(self, table_PH: Tensor, positions_T: Tensor) -> None:
        self._table_PH, self._positions_T = table_PH, positions_T

    def rotate(self, qk_TMH: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
        """See Rotation."""
        q_TNH, k_TKH = qk_TMH.split_with_sizes((heads, kv_heads), 1)
        return apply_rope(q_TNH, k_TKH, self._table_PH, self._positions_T)
