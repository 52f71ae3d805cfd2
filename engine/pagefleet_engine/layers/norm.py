"""Norms over the last axis, of hidden states, projections and single heads: RMSNorm (Zhang and Sennrich, arXiv
1910.07467) and LayerNorm (Ba et al., arXiv 1607.06450).

With `unit_offset` a weight is stored less one, as Gemma's are. Shapes: T tokens, D width, N query heads, K key heads,
M = N + K, L = N + 2K, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from pagefleet_kernels.native.layers import NativeNorm
from pagefleet_kernels.norm import layer_norm, rms_norm
from pagefleet_kernels.quantize import Activations, QuantizeSpec
from torch import Tensor

from pagefleet_engine.layers.shard import Shard
from pagefleet_engine.layers.weight import Placement, Weight, prefixed

Residual = tuple[Tensor, Tensor | None]
"""The residual stream between two blocks, both [T, D]: the total, and what the last block gave where its product did
not add it: the next norm does so along the way. A plain tuple, as each layer makes two per step."""


class Norm:
    """A norm of hidden states, alone or with what stands around it."""

    __slots__ = ("_apply", "_kernel", "_slots")

    def __init__(self) -> None:
        self._apply: Callable[[Tensor], Tensor]
        self._kernel: Callable[..., Any] | None = None
        """Also takes what is to be added before, and how to round."""
        self._slots: dict[str, Weight]

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._slots.items()

    def __call__(self, x_TD: Tensor) -> Tensor:
        """A new tensor of x's shape and dtype."""
        return self._apply(x_TD)

    def read(self, stream: Residual, rounding: QuantizeSpec | None = None) -> tuple[Tensor, Activations]:
        """The stream's total, nothing pending, and its norm, rounded where that is asked for (by kernels only).

        The stream must not be read afterwards.
        """
        total_TD, pending_TD = stream
        if rounding is None and pending_TD is None:
            return total_TD, self._apply(total_TD)
        assert self._kernel is not None, "only products by kernels leave sums and roundings to others"
        if pending_TD is None:
            return total_TD, self._kernel(total_TD, quantize=rounding)
        return total_TD, self._kernel(pending_TD, residual_TD=total_TD, quantize=rounding)

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        """`residual + norm(x)`; the residual must not be read afterwards."""
        return residual_TD.add_(self._apply(x_TD))


class RMSNorm(Norm):
    """`x / sqrt(mean(x^2) + eps) * w`."""

    __slots__ = ("_placement", "_unit_offset", "eps", "weight_D")

    def __init__(self, width: int, eps: float, placement: Placement, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight_D: Tensor
        """As stored; only kernels read it."""
        self.eps, self._unit_offset = eps, unit_offset
        self._placement = placement
        self._slots = {"weight": Weight((width,), None, placement, self._install)}

    def _install(self, weight_D: Tensor) -> None:
        if self._placement.use_kernels:
            self.weight_D = weight_D
            self._kernel = partial(rms_norm, weight_D=weight_D, eps=self.eps, unit_offset=self._unit_offset)
            self._apply = self._kernel
        else:
            self._apply = _host_norm(self._placement, weight_D, self.eps, self._unit_offset)


class LayerNorm(Norm):
    """`(x - mean(x)) / sqrt(var(x) + eps) * w + b`."""

    __slots__ = ("_arrived", "_eps", "_use_kernels")

    def __init__(self, width: int, eps: float, placement: Placement, bias: bool = True) -> None:
        super().__init__()
        self._eps, self._use_kernels = eps, placement.use_kernels
        self._arrived: dict[str, Tensor] = {}
        self._slots = {
            name: Weight((width,), None, placement, partial(self._install, name))
            for name in (("weight", "bias") if bias else ("weight",))
        }

    def _install(self, name: str, value_D: Tensor) -> None:
        self._arrived[name] = value_D
        if len(self._arrived) < len(self._slots):
            return
        weight_D, bias_D = self._arrived["weight"], self._arrived.get("bias")
        if self._use_kernels:
            self._kernel = partial(layer_norm, weight_D=weight_D, bias_D=bias_D, eps=self._eps)
            self._apply = self._kernel
        else:
            self._apply = partial(
                F.layer_norm, normalized_shape=weight_D.shape, weight=weight_D, bias=bias_D, eps=self._eps
            )


class HeadNorm:
    """RMSNorm of each query head by one weight and of each key head by another.

    By torch in one pass over both; a kernel that prepares heads takes the weights and does it along the way. Without
    key heads there are no weights for them.
    """

    __slots__ = (
        "_apply",
        "_heads",
        "_kv_heads",
        "_placement",
        "_slots",
        "eps",
        "factors_2H",
        "query_factors_H",
        "unit_offset",
        "weights_H",
    )

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, eps: float, placement: Placement, unit_offset: bool = False
    ) -> None:
        self._apply: Callable[[Tensor], Tensor]
        self._heads, self._kv_heads = heads, kv_heads
        self.eps, self.unit_offset = eps, unit_offset
        self.weights_H: dict[str, Tensor] = {}
        """`q_norm` and `k_norm`, as stored."""
        self.factors_2H: Tensor
        """The same in float32, as they are multiplied by."""
        self.query_factors_H: Tensor | None = None
        """float32, what queries are multiplied by once they are rotated, where keys are kept without weights."""
        self._placement = placement
        names = ("q_norm", "k_norm") if kv_heads else ("q_norm",)
        self._slots = {name: Weight((head_dim,), None, placement, partial(self._install, name)) for name in names}

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        for name, slot in self._slots.items():
            yield f"{name}.weight", slot

    def __call__(self, qk_TMH: Tensor) -> Tensor:
        """Queries first, then keys; a new tensor of the same shape and dtype."""
        return self._apply(qk_TMH)

    def _install(self, name: str, weight_H: Tensor) -> None:
        self.weights_H[name] = weight_H
        if len(self.weights_H) < len(self._slots):
            return
        factors_2H = torch.stack([self.weights_H[name] for name in self._slots]).to(torch.float32)
        self.factors_2H = factors_2H.add_(1.0) if self.unit_offset else factors_2H
        heads = {"q_norm": self._heads, "k_norm": self._kv_heads}
        weight_MH = torch.cat([self.weights_H[name].expand(heads[name], -1) for name in self._slots])
        self._apply = _host_norm(self._placement, weight_MH, self.eps, self.unit_offset)


class UnitHeadNorm(HeadNorm):
    """The same where all weights are one, and the checkpoint has none."""

    __slots__ = ()

    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float, placement: Placement) -> None:
        super().__init__(heads, kv_heads, head_dim, eps, placement)
        for slot in self._slots.values():
            slot.fill(0, torch.ones(head_dim))
        self._slots = {}


class TurnedHeadNorm(UnitHeadNorm):
    """RMSNorm of each query and key head after it is rotated.

    A head is as long before as after, and is normalised there. Of the weights a score sees the product: it multiplies
    rotated queries, and keys are kept without.
    """

    __slots__ = ("_arrived",)

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, eps: float, placement: Placement, names: tuple[str, str]
    ) -> None:
        super().__init__(heads, kv_heads, head_dim, eps, placement)
        self._arrived: list[Tensor] = []
        self.query_factors_H = torch.ones(head_dim)  # until both weights have arrived
        self._slots = {name: Weight((head_dim,), None, placement, self._take) for name in names}

    def _take(self, weight_H: Tensor) -> None:
        self._arrived.append(weight_H.to(torch.float32))
        if len(self._arrived) == len(self._slots):
            first_H, second_H = self._arrived
            self.query_factors_H = first_H * second_H


class ValueNorm:
    """RMSNorm of each value head, without a weight."""

    __slots__ = ("_apply", "_num_heads")

    def __init__(self, num_heads: int, head_dim: int, eps: float, placement: Placement) -> None:
        """`num_heads`: of queries and keys, which stand before the values."""
        ones_H = torch.ones(head_dim, dtype=placement.dtype, device=placement.device)
        self._num_heads = num_heads
        self._apply = _host_norm(placement, ones_H, eps, unit_offset=False)
        if placement.use_kernels:
            self._apply = partial(rms_norm, weight_D=ones_H, eps=eps)

    def __call__(self, qkv_TLH: Tensor) -> Tensor:
        """Queries, keys and values, [T, L, H]; the last are replaced."""
        v_TKH = qkv_TLH[:, self._num_heads :]
        v_TKH.copy_(self._apply(v_TKH))
        return qkv_TLH


class HeadLayerNorm:
    """LayerNorm of each query and key head by a weight of its own, without bias."""

    __slots__ = ("_apply", "_arrived", "_eps", "_order", "_shape", "_slots", "_use_kernels")

    def __init__(
        self, heads: Mapping[str, Shard], head_dim: int, eps: float, placement: Placement, is_stacked: bool
    ) -> None:
        """`heads`: those of queries and of keys, by the name of their norm; `is_stacked`: their weights are the rows of
        one tensor."""
        self._apply: Callable[[Tensor], Tensor]
        self._eps, self._use_kernels = eps, placement.use_kernels
        self._shape = (sum(own.size for own in heads.values()), head_dim)
        self._arrived: dict[str, Tensor] = {}
        self._slots: dict[str, Weight] = {}
        self._order: list[str] = []
        """Slots of this rank's heads."""
        for name, own in heads.items():
            if is_stacked:
                slot = f"{name}.weight"
                self._slots[slot] = Weight((own,), head_dim, placement, partial(self._install, slot))
                self._order.append(slot)
            else:
                slots = [f"{name}.norms.{head}.weight" for head in range(own.whole)]
                self._slots |= {
                    slot: Weight((head_dim,), None, placement, partial(self._install, slot)) for slot in slots
                }
                self._order += [slots[head] for own_range in own.ranges for head in own_range]

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._slots.items()

    def __call__(self, qkv_TI: Tensor) -> Tensor:
        """Queries, keys and values side by side, [T, L * H]; the first two are replaced."""
        num_heads, head_dim = self._shape
        qk_TMH = qkv_TI.view(len(qkv_TI), -1, head_dim)[:, :num_heads]
        qk_TMH.copy_(self._apply(qk_TMH))
        return qkv_TI

    def _install(self, slot: str, weight: Tensor) -> None:
        self._arrived[slot] = weight
        if len(self._arrived) < len(self._slots):
            return
        weight_MH, eps = torch.cat([self._arrived[slot] for slot in self._order]).view(self._shape), self._eps
        if self._use_kernels:
            self._apply = partial(layer_norm, weight_D=weight_MH, bias_D=None, eps=eps)
        else:
            self._apply = lambda x: F.layer_norm(x, weight_MH.shape[-1:], None, None, eps).mul_(weight_MH)


class ProjectionNorm:
    """RMSNorm over all query heads of a token together, and over all its key heads together."""

    __slots__ = ("_k_norm", "_q_norm", "_widths")

    def __init__(self, q_width: int, k_width: int, eps: float, placement: Placement) -> None:
        """Of a rank that has all heads."""
        self._widths = (q_width, k_width)
        self._q_norm = RMSNorm(q_width, eps, placement)
        self._k_norm = RMSNorm(k_width, eps, placement)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed("q_norm", self._q_norm)
        yield from prefixed("k_norm", self._k_norm)

    def __call__(self, qkv_TI: Tensor) -> Tensor:
        """Queries, keys and values side by side, [T, L * H]; the first two are replaced."""
        q_width, k_width = self._widths
        q_TI, k_TI = qkv_TI[:, :q_width], qkv_TI[:, q_width : q_width + k_width]
        q_TI.copy_(self._q_norm(q_TI))
        k_TI.copy_(self._k_norm(k_TI))
        return qkv_TI


class DividedProjectionNorm:
    """`ProjectionNorm` of heads that are divided among ranks, which sum their squares in one message."""

    __slots__ = ("_eps", "_ranks", "_share_2", "_slots", "_weights", "_widths")

    def __init__(self, q_width: Shard, k_width: Shard, eps: float, placement: Placement) -> None:
        self._ranks, self._eps = placement.tensor, eps
        self._widths = (q_width.size, k_width.size)
        # What a rank's squares count for in the mean; keys that several ranks have count once.
        k_ranks = self._ranks.size * k_width.size / k_width.whole
        self._share_2 = torch.tensor([1 / q_width.whole, 1 / (k_width.whole * k_ranks)], device=placement.device)
        self._weights: dict[str, Tensor] = {}
        self._slots = {
            name: Weight((width,), None, placement, partial(self._weights.__setitem__, name))
            for name, width in (("q_norm", q_width), ("k_norm", k_width))
        }

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        for name, slot in self._slots.items():
            yield f"{name}.weight", slot

    def __call__(self, qkv_TI: Tensor) -> Tensor:
        """See ProjectionNorm; of this rank's heads."""
        q_width, k_width = self._widths
        parts = {"q_norm": qkv_TI[:, :q_width], "k_norm": qkv_TI[:, q_width : q_width + k_width]}
        squares_T2 = torch.stack([part_TI.to(torch.float32).square().sum(-1) for part_TI in parts.values()], -1)
        mean_T2 = self._ranks.all_reduce(squares_T2.mul_(self._share_2))
        factor_T2 = mean_T2.add_(self._eps).rsqrt_()
        for (name, part_TI), factor_T1 in zip(parts.items(), factor_T2.split_with_sizes((1, 1), -1), strict=True):
            part_TI.copy_(part_TI.to(torch.float32) * factor_T1 * self._weights[name])
        return qkv_TI


def projection_norm(
    q_width: Shard, k_width: Shard, eps: float, placement: Placement
) -> ProjectionNorm | DividedProjectionNorm:
    """The norm of heads that may be divided among ranks."""
    if placement.tensor.size == 1:
        return ProjectionNorm(q_width.size, k_width.size, eps, placement)
    return DividedProjectionNorm(q_width, k_width, eps, placement)


def _host_norm(placement: Placement, weight: Tensor, eps: float, unit_offset: bool) -> Callable[[Tensor], Tensor]:
    """RMSNorm without Triton."""
    if placement.native_layers is not None:
        return NativeNorm(placement.native_layers, weight, eps, unit_offset)
    return _TorchNorm(weight, eps, unit_offset)


class _TorchNorm:
    """`x * (w sqrt(D)) / hypot(|x|, sqrt(D eps))`: the same value in fewer passes, a quarter faster than F.rms_norm.

    Computed in float32 and rounded once.
    """

    __slots__ = ("_floor", "_scaled_weight")

    def __init__(self, weight: Tensor, eps: float, unit_offset: bool) -> None:
        """`weight` broadcasts over what is normalised; its last axis is the normalised one, D long."""
        width = weight.shape[-1]
        factor = weight.to(torch.float32, copy=True)
        self._scaled_weight = (factor.add_(1.0) if unit_offset else factor).mul_(width**0.5)
        self._floor = torch.tensor((width * eps) ** 0.5, dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32, copy=True)
        length = torch.linalg.vector_norm(y, 2, -1, True).hypot_(self._floor)
        return y.div_(length).mul_(self._scaled_weight).to(x.dtype)
