"""RMSNorm over the last axis (Zhang and Sennrich, arXiv 1910.07467), for hidden states and for single heads.

Shapes: T tokens, D width, N query heads, K key heads, M = N + K, H head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from pagefleet_kernels.norm import rms_norm
from torch import Tensor

from pagefleet_engine.layers.weight import Placement, Weight


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * w`."""

    __slots__ = ("_eps", "_shape", "_slot", "_use_kernels", "_weight_D")

    def __init__(self, width: int, eps: float, placement: Placement) -> None:
        self._weight_D: Tensor
        self._shape = (width,)
        self._eps = eps
        self._use_kernels = placement.use_kernels
        self._slot = Weight((width,), None, placement, self._install)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield "weight", self._slot

    def __call__(self, x_TD: Tensor) -> Tensor:
        """A new tensor of x's shape and dtype."""
        if self._use_kernels:
            return rms_norm(x_TD, self._weight_D, self._eps)
        return F.rms_norm(x_TD, self._shape, self._weight_D, self._eps)

    def _install(self, weight_D: Tensor) -> None:
        self._weight_D = weight_D


class HeadNorm:
    """RMSNorm of each query head by one weight and of each key head by another, in one pass over both."""

    __slots__ = ("_eps", "_heads", "_kv_heads", "_ones_H", "_parts", "_slots", "_use_kernels", "_weight_MH")

    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float, placement: Placement) -> None:
        self._weight_MH: Tensor
        self._ones_H: Tensor
        self._heads, self._kv_heads, self._eps = heads, kv_heads, eps
        self._use_kernels = placement.use_kernels
        self._parts: dict[str, Tensor] = {}
        self._slots = {
            name: Weight((head_dim,), None, placement, partial(self._install, name)) for name in ("q_norm", "k_norm")
        }

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        for name, slot in self._slots.items():
            yield f"{name}.weight", slot

    def __call__(self, qk_TMH: Tensor) -> Tensor:
        """Queries first, then keys; a new tensor of the same shape and dtype."""
        if self._use_kernels:
            return rms_norm(qk_TMH, self._ones_H, self._eps).mul_(self._weight_MH)
        return F.rms_norm(qk_TMH, qk_TMH.shape[-1:], None, self._eps).mul_(self._weight_MH)

    def _install(self, name: str, weight_H: Tensor) -> None:
        self._parts[name] = weight_H
        if len(self._parts) == len(self._slots):
            q_H, k_H = self._parts["q_norm"], self._parts["k_norm"]
            self._weight_MH = torch.cat((q_H.expand(self._heads, -1), k_H.expand(self._kv_heads, -1)))
            self._ones_H = torch.ones_like(q_H)
            self._parts.clear()
