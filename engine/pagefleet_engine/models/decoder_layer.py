"""A decoder layer: attention, then MLP, each added to the residual stream; families differ in where they normalise.

Shapes: T tokens of the step, U those that a rank has of the residual stream, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from pagefleet_kernels.quantize import Activations, QuantizeSpec
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionStep
from pagefleet_engine.layers.norm import LayerNorm, Norm, Residual, RMSNorm
from pagefleet_engine.layers.rotary import Rotation
from pagefleet_engine.layers.token_ranks import token_ranks
from pagefleet_engine.layers.weight import Placement, Weight, prefixed
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import MLP, Attention, FeedForward, Traits, UngatedMLP
from pagefleet_engine.models.latent_attention import LatentAttention
from pagefleet_engine.models.sparse_mlp import SparseMLP


class DecoderLayer(Protocol):
    """One layer of a decoder."""

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        ...

    def __call__(self, stream: Residual, rotation: Rotation, step: AttentionStep) -> Residual:
        """The residual stream before and after the layer; the former may be overwritten."""
        ...


class PreNormLayer:
    """Attention and MLP read normalised; what they give is added inside their last product, or by the next norm."""

    def __init__(self, arch: ModelArch, layer: int, traits: Traits, placement: Placement) -> None:
        self._tokens, self._names = token_ranks(placement), traits.names
        self._input_norm = block_norm(arch, traits, placement)
        attention = Attention if arch.latent is None else LatentAttention
        self._attention = attention(arch, layer, traits, placement.within(self._names.attention))
        self._post_attention_norm = block_norm(arch, traits, placement)
        self._mlp_name, self._mlp = _feed_forward(arch, layer, traits, placement)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed(self._names.input_norm, self._input_norm)
        yield from prefixed(self._names.attention, self._attention)
        yield from prefixed(self._names.post_attention_norm, self._post_attention_norm)
        yield from prefixed(self._mlp_name, self._mlp)

    def __call__(self, stream: Residual, rotation: Rotation, step: AttentionStep) -> Residual:
        """See DecoderLayer."""
        num, read = rotation.num_tokens, self._tokens.read
        hidden_UD, x_TD = read(self._input_norm, stream, num, self._attention.rounding)
        stream = self._attention.add_to(hidden_UD, x_TD, rotation, step)
        hidden_UD, x_TD = read(self._post_attention_norm, stream, num, self._mlp.rounding)
        return self._mlp.add_to(hidden_UD, x_TD, step)


class ScaledResidualLayer(PreNormLayer):
    """The same, what attention and MLP give times `ModelArch.residual_scale`."""

    def __init__(self, arch: ModelArch, layer: int, traits: Traits, placement: Placement) -> None:
        super().__init__(arch, layer, traits, placement)
        self._scale = arch.residual_scale

    def __call__(self, stream: Residual, rotation: Rotation, step: AttentionStep) -> Residual:
        """See DecoderLayer."""
        num, read = rotation.num_tokens, self._tokens.read
        hidden_UD, x_TD = read(self._input_norm, stream, num, self._attention.rounding)
        hidden_UD = hidden_UD.add_(self._attention(x_TD, rotation, step), alpha=self._scale)
        hidden_UD, x_TD = read(self._post_attention_norm, (hidden_UD, None), num, self._mlp.rounding)
        return hidden_UD.add_(self._mlp(x_TD, step), alpha=self._scale), None


class SumNormLayer(PreNormLayer):
    """Attention and MLP read the stream as it is, and it is normalised after each (Vaswani et al., 1706.03762)."""

    def __call__(self, stream: Residual, rotation: Rotation, step: AttentionStep) -> Residual:
        """See DecoderLayer."""
        num, gather = rotation.num_tokens, self._tokens.gather
        hidden_UD, _ = stream
        stream = self._attention.add_to(hidden_UD, gather(hidden_UD, num), rotation, step)
        hidden_UD = _normed(self._input_norm, stream)
        return _normed(self._post_attention_norm, self._mlp.add_to(hidden_UD, gather(hidden_UD, num), step)), None


class ParallelLayer:
    """Attention and MLP stand side by side: both read the layer's input, through one norm or each through its own."""

    def __init__(self, arch: ModelArch, layer: int, traits: Traits, placement: Placement) -> None:
        self._tokens, self._names = token_ranks(placement), traits.names
        self._input_norm = block_norm(arch, traits, placement)
        self._mlp_norm = block_norm(arch, traits, placement) if traits.layer_norms == "apart" else None
        self._attention = Attention(arch, layer, traits, placement.within(self._names.attention))
        self._mlp_name, self._mlp = _feed_forward(arch, layer, traits, placement)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed(self._names.input_norm, self._input_norm)
        yield from prefixed(self._names.attention, self._attention)
        if self._mlp_norm is not None:
            yield from prefixed(self._names.post_attention_norm, self._mlp_norm)
        yield from prefixed(self._mlp_name, self._mlp)

    def __call__(self, stream: Residual, rotation: Rotation, step: AttentionStep) -> Residual:
        """See DecoderLayer."""
        num, read = rotation.num_tokens, self._tokens.read
        hidden_UD, x_TD = read(self._input_norm, stream, num)
        mlp_x_TD = x_TD if self._mlp_norm is None else read(self._mlp_norm, (hidden_UD, None), num)[1]
        hidden_UD, pending_UD = self._attention.add_to(hidden_UD, x_TD, rotation, step)
        if pending_UD is not None:
            hidden_UD = hidden_UD.add_(pending_UD)
        return self._mlp.add_to(hidden_UD, mlp_x_TD, step)


class PostNormLayer:
    """What attention and MLP give is normalised before it is added; with `layer_norms` "around" what they read, too."""

    def __init__(self, arch: ModelArch, layer: int, traits: Traits, placement: Placement) -> None:
        self._tokens, self._names = token_ranks(placement), traits.names
        self._attention = Attention(arch, layer, traits, placement.within(self._names.attention))
        self._post_attention_norm = block_norm(arch, traits, placement)
        self._mlp = MLP(arch, traits, placement.within(self._names.mlp))
        self._post_mlp_norm = block_norm(arch, traits, placement)
        self._read_norms: dict[str, Norm] = {}
        if traits.layer_norms == "around":
            for name in (self._names.input_norm, self._names.pre_mlp_norm):
                self._read_norms[name] = block_norm(arch, traits, placement)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        for name, norm in self._read_norms.items():
            yield from prefixed(name, norm)
        yield from prefixed(self._names.attention, self._attention)
        yield from prefixed(self._names.post_attention_norm, self._post_attention_norm)
        yield from prefixed(self._names.mlp, self._mlp)
        yield from prefixed(self._names.post_mlp_norm, self._post_mlp_norm)

    def __call__(self, stream: Residual, rotation: Rotation, step: AttentionStep) -> Residual:
        """See DecoderLayer."""
        hidden_UD, _ = stream
        num = rotation.num_tokens
        x_TD = self._read(self._names.input_norm, hidden_UD, num, self._attention.rounding)
        hidden_UD = self._post_attention_norm.add_to(hidden_UD, self._attention(x_TD, rotation, step))
        x_TD = self._read(self._names.pre_mlp_norm, hidden_UD, num, self._mlp.rounding)
        return self._post_mlp_norm.add_to(hidden_UD, self._mlp(x_TD, step)), None

    def _read(self, name: str, hidden_UD: Tensor, num_tokens: int, rounding: QuantizeSpec | None) -> Activations:
        norm = self._read_norms.get(name)
        if norm is None:
            return self._tokens.gather(hidden_UD, num_tokens)
        return self._tokens.read(norm, (hidden_UD, None), num_tokens, rounding)[1]


def decoder_layer(arch: ModelArch, layer: int, traits: Traits, placement: Placement) -> DecoderLayer:
    """The layer of that index."""
    match traits.layer_norms:
        case "around" | "after":
            return PostNormLayer(arch, layer, traits, placement)
        case "shared" | "apart":
            return ParallelLayer(arch, layer, traits, placement)
        case "of sums":
            return SumNormLayer(arch, layer, traits, placement)
        case "before":
            kind = PreNormLayer if arch.residual_scale == 1.0 else ScaledResidualLayer
            return kind(arch, layer, traits, placement)


def _feed_forward(arch: ModelArch, layer: int, traits: Traits, placement: Placement) -> tuple[str, FeedForward]:
    """The layer's MLP or experts, and their name in the checkpoint."""
    experts = arch.experts
    if experts is None or not experts.layers[layer]:
        name = traits.names.mlp
        kind = MLP if arch.mlp_gate else UngatedMLP
        return name, kind(arch, traits, placement.within(name))
    name = traits.experts.block
    return name, SparseMLP(arch, experts, layer, traits, placement.within(name))


def block_norm(arch: ModelArch, traits: Traits, placement: Placement) -> Norm:
    """A norm of the residual stream."""
    if traits.norm == "layer":
        return LayerNorm(arch.hidden_size, arch.rms_norm_eps, placement, traits.norm_bias)
    return RMSNorm(arch.hidden_size, arch.rms_norm_eps, placement, traits.norm_unit_offset)


def _normed(norm: Norm, stream: Residual) -> Tensor:
    _, normed_UD = norm.read(stream)
    assert isinstance(normed_UD, Tensor), "nothing is rounded unless asked for"
    return normed_UD
