"""RMSNorm over the last axis (Zhang and Sennrich, arXiv 1910.07467), for hidden states and for single heads.

Shapes: T tokens, D width, N query heads, K key heads, M = N + K, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from pagefleet_kernels.norm import rms_norm
from torch import Tensor

from pagefleet_engine.layers.weight import Placement, Weight


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * w`."""

    __slots__ = ("_apply", "_eps", "_slot", "_use_kernels")

    def __init__(self, width: int, eps: float, placement: Placement) -> None:
        self._apply: Callable[[Tensor], Tensor]
        self._eps = eps
        self._use_kernels = placement.use_kernels
        self._slot = Weight((width,), None, placement, self._install)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield "weight", self._slot

    def __call__(self, x_TD: Tensor) -> Tensor:
        """A new tensor of x's shape and dtype."""
        return self._apply(x_TD)

    def _install(self, weight_D: Tensor) -> None:
        if self._use_kernels:
            self._apply = partial(rms_norm, weight_D=weight_D, eps=self._eps)
        else:
            self._apply = _TorchNorm(weight_D, self._eps)


class HeadNorm:
    """RMSNorm of each query head by one weight and of each key head by another, in one pass over both."""

    __slots__ = ("_apply", "_eps", "_heads", "_kv_heads", "_parts", "_slots", "_use_kernels")

    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float, placement: Placement) -> None:
        self._apply: Callable[[Tensor], Tensor]
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
        return self._apply(qk_TMH)

    def _install(self, name: str, weight_H: Tensor) -> None:
        self._parts[name] = weight_H
        if len(self._parts) < len(self._slots):
            return
        q_H, k_H = self._parts["q_norm"], self._parts["k_norm"]
        weight_MH = torch.cat((q_H.expand(self._heads, -1), k_H.expand(self._kv_heads, -1)))
        self._apply = (_KernelHeadNorm if self._use_kernels else _TorchNorm)(weight_MH, self._eps)
        self._parts.clear()


class _KernelHeadNorm:
    """The kernel takes one weight for all heads: it gets ones, and the heads' own weights follow."""

    __slots__ = ("_eps", "_ones_H", "_weight_MH")

    def __init__(self, weight_MH: Tensor, eps: float) -> None:
        self._weight_MH, self._eps = weight_MH, eps
        self._ones_H = torch.ones_like(weight_MH[0])

    def __call__(self, x_TMH: Tensor) -> Tensor:
        return rms_norm(x_TMH, self._ones_H, self._eps).mul_(self._weight_MH)


class _TorchNorm:
    """`x * (w sqrt(D)) / hypot(|x|, sqrt(D eps))`: the same value in fewer passes, a quarter faster than F.rms_norm.

    Computed in float32 and rounded once.
    """

    __slots__ = ("_floor", "_scaled_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight` broadcasts over what is normalised; its last axis is the normalised one, D long."""
        width = weight.shape[-1]
        self._scaled_weight = weight.to(torch.float32, copy=True).mul_(width**0.5)
        self._floor = torch.tensor((width * eps) ** 0.5, dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32, copy=True)
        length = torch.linalg.vector_norm(y, 2, -1, True).hypot_(self._floor)
        return y.div_(length).mul_(self._scaled_weight).to(x.dtype)
