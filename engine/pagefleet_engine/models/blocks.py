"""Attention and MLP as decoders share them; what differs between these is `Traits` and the `ModelArch`.

Shapes: T tokens of the step, D hidden size, N query heads, K key/value heads, L = N + 2K, H head size, G MLP width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from pagefleet_kernels.quantize import Activations, Quantized, QuantizeSpec
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, AttentionStep, RoundingStep
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear import ActivatedLinear, GatedLinear, Linear, input_linear
from pagefleet_engine.layers.moe.expert_slots import EXPERT_NAMES, ExpertNames
from pagefleet_engine.layers.norm import (
    DividedProjectionNorm,
    HeadLayerNorm,
    HeadNorm,
    ProjectionNorm,
    Residual,
    TurnedHeadNorm,
    UnitHeadNorm,
    projection_norm,
)
from pagefleet_engine.layers.rotary import Heads, Rotation
from pagefleet_engine.layers.shard import Shard, in_groups, own_heads, own_share, stacked
from pagefleet_engine.layers.weight import Kept, Placement, Weight, prefixed
from pagefleet_engine.models.arch import LayerNorms, ModelArch
from pagefleet_engine.models.names import Names

QueryKeyNorm = Literal["none", "heads", "rotated heads", "turned heads", "projection", "layer", "stacked layer"]
"""Normalise queries and keys before they are rotated: each head, or without weights and only where heads rotate, or all
heads of a token together; or by a LayerNorm for each head, whose weights the checkpoint has one by one or in one
tensor. "turned heads": each head, after it is rotated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a family departs from plain Llama, whatever its configurations say."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: QueryKeyNorm = "none"
    interleaved_rotation: bool = False
    """Neighbours rotate against each other, not one half of a head against the other."""
    sinks: bool = False
    """Each head has a learned logit more in its softmax, which has no value."""
    layer_norms: LayerNorms = "before"
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm, of the residual stream."""
    norm_bias: bool = True
    """LayerNorm has one."""
    norm_unit_offset: bool = False
    """Norms store their weights less one."""
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    """The embedding is normalised."""
    merged_in_checkpoint: bool = False
    """The checkpoint, too, has query, key and value in one matrix, and gate and up in another."""
    merged_gate_up: bool = False
    """It has gate and up so, and no more."""
    heads_in_groups: bool = False
    """In one matrix of query, key and value each key head, and then its value head, follows the query heads that read
    it."""
    transposed: bool = False
    """The checkpoint's matrices have a row for each input."""
    names: Names = Names()  # noqa: RUF009 frozen
    experts: ExpertNames = EXPERT_NAMES
    """What the checkpoint calls experts, where the configuration has any."""
    router_correction: bool = False
    """The checkpoint has a correction that chooses experts and does not weigh them."""
    shared_expert_gate: bool = False
    """A sigmoid gate weighs what the shared experts give."""


class Attention:
    """Grouped-query attention."""

    def __init__(self, arch: ModelArch, layer: int, traits: Traits, placement: Placement) -> None:
        ranks = placement.tensor
        own, own_kv = own_heads(arch.num_heads, arch.num_kv_heads, ranks.index, ranks.size)
        heads, kv_heads, head_dim, eps = own.size, own_kv.size, arch.head_dim, arch.rms_norm_eps
        q_width, k_width = own.times(head_dim), own_kv.times(head_dim)
        self._shape = (-1, heads + 2 * kv_heads, head_dim)
        self._names = names = traits.names
        rows: tuple[Shard, ...] = (q_width, k_width, k_width)
        if traits.merged_in_checkpoint:
            rows = (in_groups(own, own_kv, head_dim) if traits.heads_in_groups else stacked(rows),)
        self._qkv_proj = Linear(arch.hidden_size, rows, traits.qkv_bias, placement.within(names.qkv))
        self._o_proj = input_linear(q_width, arch.hidden_size, traits.output_bias, placement.within(names.output))
        self._project: Callable[[Activations], Tensor] = self._qkv_proj
        if (limit := arch.clip_qkv) is not None:
            self._project = lambda x_TD: self._qkv_proj(x_TD).clamp_(-limit, limit)
        head_norm = _head_norm(arch, layer, traits, (heads, kv_heads), placement)
        self._norm: HeadNorm | HeadLayerNorm | ProjectionNorm | DividedProjectionNorm | None = head_norm
        if traits.query_key_norm == "projection":
            self._norm = norm = projection_norm(q_width, k_width, eps, placement)
            self._project = lambda x_TD: norm(self._qkv_proj(x_TD))
        elif traits.query_key_norm in ("layer", "stacked layer"):
            parts, is_stacked = {names.q_norm: own, names.k_norm: own_kv}, traits.query_key_norm == "stacked layer"
            self._norm = each = HeadLayerNorm(parts, head_dim, eps, placement, is_stacked)
            self._project = lambda x_TD: each(self._qkv_proj(x_TD))
        slopes_N = None
        if arch.alibi_slopes:
            slopes = [arch.alibi_slopes[head] for heads in own.ranges for head in heads]
            slopes_N = torch.tensor(slopes, dtype=torch.float32, device=placement.device)
        self._sinks: Weight | None = None
        sinks_N = None
        if traits.sinks:
            sinks_N = torch.empty(heads, dtype=torch.float32, device=placement.device)
            kept = Kept(torch.float32, is_copy=True)
            self._sinks = Weight((own,), None, placement, partial(_fill, sinks_N), dtype=torch.float32, kept=kept)
        spec = AttentionSpec(
            layer=layer,
            scale=arch.query_scale,
            window=None if arch.chunked else arch.windows[layer],
            chunk=arch.windows[layer] if arch.chunked else None,
            softcap=arch.attention_softcap,
            sinks_N=sinks_N,
            alibi_slopes_N=slopes_N,
        )
        self._heads = Heads(heads, kv_heads, head_norm, spec, traits.interleaved_rotation)
        self._kv_scales = KVScales(placement, self._heads.scale_cache)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed(self._names.qkv, self._qkv_proj)
        yield from prefixed(self._names.output, self._o_proj)
        if self._norm is not None:
            yield from self._norm.weights()
        if self._sinks is not None:
            yield "sinks", self._sinks
        yield from self._kv_scales.weights()

    @property
    def rounding(self) -> QuantizeSpec | None:
        """See Linear."""
        return self._qkv_proj.rounding

    def __call__(self, x_TD: Activations, rotation: Rotation, step: AttentionStep) -> Tensor:
        """[T, D] to a new tensor [T, D], or of this rank's tokens."""
        return self._o_proj(self._attend(x_TD, rotation, step))

    def add_to(self, residual_TD: Tensor, x_TD: Activations, rotation: Rotation, step: AttentionStep) -> Residual:
        """`residual + attention(x)`, both as a rank has them; the residual must not be read afterwards."""
        return self._o_proj.add_to(residual_TD, self._attend(x_TD, rotation, step))

    def _attend(self, x_TD: Activations, rotation: Rotation, step: AttentionStep) -> Activations:
        return attend(self._heads, self._project(x_TD).view(self._shape), rotation, step, self._o_proj.rounding)

    @property
    def spec(self) -> AttentionSpec:
        """How it attends; final once all weights have arrived."""
        return self._heads.spec


def _head_norm(
    arch: ModelArch, layer: int, traits: Traits, heads: tuple[int, int], placement: Placement
) -> HeadNorm | None:
    """What is done as heads are rotated, or where they would be; `heads` of queries and of keys."""
    names, sizes = traits.names, (*heads, arch.head_dim, arch.rms_norm_eps, placement)
    match traits.query_key_norm:
        case "heads":
            return HeadNorm(*sizes, traits.norm_unit_offset)
        case "rotated heads" if arch.ropes[arch.layer_ropes[layer]].rope_type != "none":
            return UnitHeadNorm(*sizes)
        case "turned heads":
            return TurnedHeadNorm(*sizes, (names.q_norm, names.k_norm))
    return None


def attend(
    heads: Heads, qkv_TLH: Tensor, rotation: Rotation, step: AttentionStep, rounding: QuantizeSpec | None
) -> Activations:
    """From projected heads to [T, N * H], rounded as asked for where that costs nothing; `qkv` must not be read
    afterwards."""
    q_TNH = rotation.prepare(heads, qkv_TLH, step)
    if heads.norm is not None and heads.norm.query_factors_H is not None:
        q_TNH = q_TNH.mul_(heads.norm.query_factors_H)
    if rounding is None or not isinstance(step, RoundingStep):
        return step.attend(heads.spec, q_TNH).flatten(1)
    out = step.attend_rounded(heads.spec, q_TNH, rounding)
    return out if isinstance(out, Quantized) else out.flatten(1)


def _fill(target: Tensor, value: Tensor) -> None:
    target.copy_(value)


class FeedForward(Protocol):
    """What follows attention in a layer."""

    @property
    def rounding(self) -> QuantizeSpec | None:
        """See Linear."""
        ...

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        ...

    def __call__(self, x_TD: Activations, step: AttentionStep) -> Tensor:
        """[T, D] to a new tensor [T, D], or of this rank's tokens."""
        ...

    def add_to(self, residual_TD: Tensor, x_TD: Activations, step: AttentionStep) -> Residual:
        """`residual + mlp(x)`, both as a rank has them; the residual must not be read afterwards."""
        ...


def mlp_width(arch: ModelArch, first: Placement, num_parts: int, down: Placement) -> Shard:
    """This rank's part of an MLP's width: whole blocks of both its matrices, of which the first has so many parts."""
    schemes = (first.scheme(num_parts), down.scheme(1))
    unit = math.lcm(*(size for scheme in schemes if scheme is not None for size in scheme.block or ()))
    return own_share(arch.intermediate_size, down.tensor, "an MLP", unit)


class MLP:
    """Gated MLP; implements `FeedForward`."""

    def __init__(self, arch: ModelArch, traits: Traits, placement: Placement, *, leaves_parts: bool = False) -> None:
        """`leaves_parts`: a rank gives its own part of the sums, which others add up."""
        hidden, bias = arch.hidden_size, traits.mlp_bias
        gate_up, down = placement.within("gate_up_proj"), placement.within("down_proj")
        merged = traits.merged_in_checkpoint or traits.merged_gate_up
        width = mlp_width(arch, gate_up, 1 if merged else 2, down)
        rows = (stacked((width, width)),) if merged else (width, width)
        self._gate_up_proj = GatedLinear(hidden, rows, bias, gate_up, arch.activation)
        if leaves_parts:
            self._down_proj = Linear(width, (hidden,), bias, down)
        else:
            self._down_proj = input_linear(width, hidden, bias, down)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed("gate_up_proj", self._gate_up_proj)
        yield from prefixed("down_proj", self._down_proj)

    @property
    def rounding(self) -> QuantizeSpec | None:
        """See Linear."""
        return self._gate_up_proj.rounding

    def __call__(self, x_TD: Activations, step: AttentionStep) -> Tensor:
        """See FeedForward."""
        return self._down_proj(self._gate_up_proj(x_TD, self._down_proj.rounding))

    def add_to(self, residual_TD: Tensor, x_TD: Activations, step: AttentionStep) -> Residual:
        """See FeedForward."""
        return self._down_proj.add_to(residual_TD, self._gate_up_proj(x_TD, self._down_proj.rounding))


class UngatedMLP:
    """Two matrices with an activation between; implements `FeedForward`."""

    def __init__(self, arch: ModelArch, traits: Traits, placement: Placement) -> None:
        self._names = names = traits.names
        up, down = placement.within(names.up), placement.within(names.down)
        width = mlp_width(arch, up, 1, down)
        self._up_proj = ActivatedLinear(arch.hidden_size, (width,), traits.mlp_bias, up, arch.activation)
        self._down_proj = input_linear(width, arch.hidden_size, traits.mlp_bias, down)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed(self._names.up, self._up_proj)
        yield from prefixed(self._names.down, self._down_proj)

    @property
    def rounding(self) -> QuantizeSpec | None:
        """See Linear."""
        return self._up_proj.rounding

    def __call__(self, x_TD: Activations, step: AttentionStep) -> Tensor:
        """See FeedForward."""
        return self._down_proj(self._up_proj.activated(x_TD, self._down_proj.rounding))

    def add_to(self, residual_TD: Tensor, x_TD: Activations, step: AttentionStep) -> Residual:
        """See FeedForward."""
        return self._down_proj.add_to(residual_TD, self._up_proj.activated(x_TD, self._down_proj.rounding))


class KVScales:
    """Scales of a layer's KV cache: slots `k_scale` and `v_scale` where the checkpoint has them, else none."""

    __slots__ = ("_arrived", "_install", "_path", "_slots")

    def __init__(self, placement: Placement, install: Callable[[float, float], None]) -> None:
        """`install` gets both scales, once; a stored number stands for itself times its scale."""
        self._install, self._path = install, placement.path
        self._arrived: dict[str, float] = {}
        has_scales = placement.quantization is not None and placement.quantization.kv_scales
        self._slots = {
            name: Weight((1,), None, placement, partial(self._take, name), dtype=torch.float32)
            for name in (("k_scale", "v_scale") if has_scales else ())
        }

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._slots.items()

    def _take(self, name: str, value: Tensor) -> None:
        scale = float(value)
        if not 0.0 < scale < float("inf"):
            raise ModelLoadError(f"{self._path}.{name} is {scale}, no scale: give --kv-cache-dtype auto")
        self._arrived[name] = scale
        if len(self._arrived) == len(self._slots):
            self._install(self._arrived["k_scale"], self._arrived["v_scale"])
