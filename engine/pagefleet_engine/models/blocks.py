"""Attention, MLP and decoder layer as Llama's descendants share them; what differs between these is `BlockTraits`.

Shapes: T tokens of the step, D hidden size, N query heads, K key/value heads, M = N + K, L = N + 2K,
H head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, AttentionStep
from pagefleet_engine.layers.linear import GatedLinear, Linear
from pagefleet_engine.layers.norm import HeadNorm, RMSNorm
from pagefleet_engine.layers.quantization.kv_scales import KVScales
from pagefleet_engine.layers.rotary import Rotation
from pagefleet_engine.layers.weight import Placement, Weight, prefixed
from pagefleet_engine.models.arch import ModelArch


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTraits:
    """How a family departs from plain Llama."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    """Normalise each query and key head before it is rotated."""


class Attention:
    """Grouped-query attention, plus the residual stream that it adds to."""

    def __init__(self, arch: ModelArch, layer: int, traits: BlockTraits, placement: Placement) -> None:
        heads, kv_heads, head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
        self._heads, self._kv_heads = heads, kv_heads
        self._rotated_and_not = (heads + kv_heads, kv_heads)
        self._shape = (-1, heads + 2 * kv_heads, head_dim)
        self._spec = AttentionSpec(layer=layer, scale=head_dim**-0.5, window=arch.windows[layer])
        self._kv_scales = KVScales(placement, self._install_kv_scales)
        rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self._qkv_proj = Linear(arch.hidden_size, rows, traits.qkv_bias, placement.within("qkv_proj"))
        self._o_proj = Linear(heads * head_dim, (arch.hidden_size,), traits.output_bias, placement.within("o_proj"))
        self._head_norm = (
            HeadNorm(heads, kv_heads, head_dim, arch.rms_norm_eps, placement) if traits.head_norm else None
        )

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed("qkv_proj", self._qkv_proj)
        yield from prefixed("o_proj", self._o_proj)
        yield from self._kv_scales.weights()
        if self._head_norm is not None:
            yield from self._head_norm.weights()

    def __call__(self, x_TD: Tensor, residual_TD: Tensor, rotation: Rotation, step: AttentionStep) -> Tensor:
        """`residual + attention(x)`, [T, D]."""
        heads_TLH = self._qkv_proj(x_TD).view(self._shape)
        qk_TMH, v_TKH = heads_TLH.split_with_sizes(self._rotated_and_not, 1)
        if self._head_norm is not None:
            qk_TMH = self._head_norm(qk_TMH)
        q_TNH, k_TKH = rotation.rotate(qk_TMH, self._heads, self._kv_heads)
        step.write(self._spec, k_TKH, v_TKH)
        out_TNH = step.attend(self._spec, q_TNH)
        return self._o_proj.add_to(residual_TD, out_TNH.flatten(1))

    def _install_kv_scales(self, k_scale: float, v_scale: float) -> None:
        self._spec = replace(self._spec, k_scale=k_scale, v_scale=v_scale)


class MLP:
    """Gated MLP, plus the residual stream that it adds to."""

    def __init__(self, arch: ModelArch, traits: BlockTraits, placement: Placement) -> None:
        self._gate_up_proj = GatedLinear(
            arch.hidden_size, (arch.intermediate_size,) * 2, traits.mlp_bias, placement.within("gate_up_proj")
        )
        self._down_proj = Linear(
            arch.intermediate_size, (arch.hidden_size,), traits.mlp_bias, placement.within("down_proj")
        )

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed("gate_up_proj", self._gate_up_proj)
        yield from prefixed("down_proj", self._down_proj)

    def __call__(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """`residual + mlp(x)`, [T, D]."""
        return self._down_proj.add_to(residual_TD, self._gate_up_proj(x_TD))


class DecoderLayer:
    """Attention, then MLP, each after its norm."""

    def __init__(self, arch: ModelArch, layer: int, traits: BlockTraits, placement: Placement) -> None:
        self._input_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, placement)
        self._attention = Attention(arch, layer, traits, placement.within("self_attn"))
        self._post_attention_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, placement)
        self._mlp = MLP(arch, traits, placement.within("mlp"))

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed("input_layernorm", self._input_norm)
        yield from prefixed("self_attn", self._attention)
        yield from prefixed("post_attention_layernorm", self._post_attention_norm)
        yield from prefixed("mlp", self._mlp)

    def __call__(self, hidden_TD: Tensor, rotation: Rotation, step: AttentionStep) -> Tensor:
        """The residual stream, [T, D], before and after the layer; the former may be overwritten."""
        hidden_TD = self._attention(self._input_norm(hidden_TD), hidden_TD, rotation, step)
        return self._mlp(self._post_attention_norm(hidden_TD), hidden_TD)
