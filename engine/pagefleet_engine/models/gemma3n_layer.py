"""A layer of Gemma 3n: attention beside a low-rank map, an MLP whose gate may be cut, and the layer's own input.

Shapes: T tokens of the step, U those that a rank has of the residual stream, A versions of it, D hidden size, P width
of a layer's own input, N query heads, K key/value heads, H head size, G MLP width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

import torch
from pagefleet_kernels.activation import gated_activation
from pagefleet_kernels.quantize import Activations
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionStep
from pagefleet_engine.layers.linear import ActivatedLinear, Linear, input_linear
from pagefleet_engine.layers.linear_kernel import activate
from pagefleet_engine.layers.norm import HeadNorm, RMSNorm, ValueNorm
from pagefleet_engine.layers.rotary import Heads, Rotation
from pagefleet_engine.layers.shard import own_heads
from pagefleet_engine.layers.token_ranks import token_ranks
from pagefleet_engine.layers.weight import HasWeights, Placement, Weight, prefixed
from pagefleet_engine.models.altup import AltUp
from pagefleet_engine.models.arch import AltUpArch, ModelArch
from pagefleet_engine.models.blocks import MLP, Attention, Traits, attend, mlp_width

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_per_layer_input_norm",
)


class KeepingAttention(Attention):
    """Attention that normalises values, too, and keeps them and the keys."""

    def __init__(self, arch: ModelArch, layer: int, traits: Traits, placement: Placement) -> None:
        super().__init__(arch, layer, traits, placement)
        num_before = self._heads.num_heads + self._heads.num_kv_heads
        norm, project = ValueNorm(num_before, arch.head_dim, arch.rms_norm_eps, placement), self._qkv_proj
        self._project = lambda x_TD: norm(project(x_TD).view(self._shape))


class ReadingAttention:
    """Attention over what an earlier layer keeps: it has queries alone."""

    def __init__(self, arch: ModelArch, kept_by: Attention, traits: Traits, placement: Placement) -> None:
        ranks = placement.tensor
        own, _ = own_heads(arch.num_heads, arch.num_kv_heads, ranks.index, ranks.size)
        self._kept_by, self._shape = kept_by, (-1, own.size, arch.head_dim)
        q_width, hidden = own.times(arch.head_dim), arch.hidden_size
        self._q_proj = Linear(hidden, (q_width,), traits.qkv_bias, placement.within("q_proj"))
        self._o_proj = input_linear(q_width, hidden, traits.output_bias, placement.within("o_proj"))
        self._norm = HeadNorm(own.size, 0, arch.head_dim, arch.rms_norm_eps, placement)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed("q_proj", self._q_proj)
        yield from prefixed("o_proj", self._o_proj)
        yield from self._norm.weights()

    def __call__(self, x_TD: Activations, rotation: Rotation, step: AttentionStep) -> Tensor:
        """[T, D] to a new tensor [U, D]."""
        heads = Heads(self._shape[1], 0, self._norm, self._kept_by.spec)
        q_TNH = self._q_proj(x_TD).view(self._shape)
        return self._o_proj(attend(heads, q_TNH, rotation, step, self._o_proj.rounding))


class CutMLP:
    """A gated MLP with most of its gate at zero: what is under the mean plus so many deviations of its token's gate, as
    many as leave the wanted share of a normal distribution below; the rest is lowered by as much."""

    def __init__(self, arch: ModelArch, sparsity: float, placement: Placement) -> None:
        hidden = arch.hidden_size
        gate_up, down = placement.within("gate_up_proj"), placement.within("down_proj")
        width = mlp_width(arch, gate_up, 2, down)
        self._ranks, self._own, self._whole = placement.tensor, width.size, width.whole
        self._deviations = NormalDist().inv_cdf(sparsity)
        self._activation, self._use_kernels = arch.activation, placement.use_kernels
        self._gate_up_proj = Linear(hidden, (width, width), False, gate_up)
        self._down_proj = input_linear(width, hidden, False, down)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed("gate_up_proj", self._gate_up_proj)
        yield from prefixed("down_proj", self._down_proj)

    def __call__(self, x_TD: Activations, step: AttentionStep) -> Tensor:
        """See FeedForward."""
        gate_up_TG2 = self._gate_up_proj(x_TD)
        gate_TG, up_TG = gate_up_TG2[:, : self._own], gate_up_TG2[:, self._own :]
        torch.relu_(gate_TG.sub_(self._cutoff(gate_TG)))
        if self._use_kernels:
            rounding = self._down_proj.rounding
            return self._down_proj(gated_activation(gate_up_TG2, self._activation, quantize=rounding))
        return self._down_proj(activate(gate_TG, self._activation) * up_TG)

    def _cutoff(self, gate_TG: Tensor) -> Tensor:
        """[T, 1], over the gates of all ranks."""
        # Sums in float32 that make no copy of the gates.
        square_T = torch.linalg.vector_norm(gate_TG, dim=-1, dtype=torch.float32).square_()
        sums_T2 = torch.stack((gate_TG.sum(-1, dtype=torch.float32), square_T), -1)
        mean_T, square_T = self._ranks.all_reduce(sums_T2).div_(self._whole).unbind(-1)
        deviation_T = (square_T - mean_T.square()).clamp_(min=0.0).sqrt_()
        return (mean_T + self._deviations * deviation_T).unsqueeze(1)


class Gemma3nLayer:
    """One layer. What ranks divide are attention's heads and the MLP's width; they have all else whole."""

    def __init__(
        self,
        arch: ModelArch,
        altup: AltUpArch,
        layer: int,
        traits: Traits,
        placement: Placement,
        kept_by: Attention | None,
    ) -> None:
        """`kept_by`: whose keys and values it reads; None: its own."""
        hidden, size, eps = arch.hidden_size, altup.per_layer_size, arch.rms_norm_eps
        self._tokens = token_ranks(placement)
        attention, mlp = placement.within("self_attn"), placement.within("mlp")
        self.attention: Attention | ReadingAttention
        if kept_by is None:
            self.attention = KeepingAttention(arch, layer, traits, attention)
        else:
            self.attention = ReadingAttention(arch, kept_by, traits, attention)
        sparsity = altup.sparsity[layer]
        self._mlp = CutMLP(arch, sparsity, mlp) if sparsity else MLP(arch, traits, mlp)
        self._altup = AltUp(arch, altup, placement)
        self._laurel = _Laurel(arch, altup, placement.within("laurel"))
        gate, project = placement.within("per_layer_input_gate"), placement.within("per_layer_projection")
        self._input_gate = ActivatedLinear(hidden, (size,), False, gate, arch.activation)
        self._input_projection = Linear(size, (hidden,), False, project)
        self._norms = {name: RMSNorm(hidden, eps, placement) for name in _NORMS}
        self._parts: dict[str, HasWeights] = {
            "self_attn": self.attention,
            "mlp": self._mlp,
            "altup": self._altup,
            "laurel": self._laurel,
            "per_layer_input_gate": self._input_gate,
            "per_layer_projection": self._input_projection,
            **self._norms,
        }

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        for name, part in self._parts.items():
            yield from prefixed(name, part)

    def __call__(self, stream_UAD: Tensor, own_UP: Tensor, rotation: Rotation, step: AttentionStep) -> Tensor:
        """The stream after the layer; `own`: what this layer gets of the tokens themselves."""
        predicted_UAD = self._altup.predict(stream_UAD)
        computed_UD = self._compute(self._altup.of(predicted_UAD), rotation, step)
        stream_UAD = self._altup.correct(predicted_UAD, computed_UD)
        gate_UP = self._input_gate.activated(self._altup.scaled(stream_UAD))
        assert isinstance(gate_UP, Tensor), "nothing is rounded unless asked for"
        added_UD = self._norms["post_per_layer_input_norm"](self._input_projection(gate_UP.mul_(own_UP)))
        stream_UAD[:, 1:].add_(added_UD.unsqueeze(1))
        return stream_UAD

    def _compute(self, x_UD: Tensor, rotation: Rotation, step: AttentionStep) -> Tensor:
        """What other families' layers do, to one version of the stream, [U, D]."""
        norms, num, gather = self._norms, rotation.num_tokens, self._tokens.gather
        normed_UD = norms["input_layernorm"](x_UD)
        laurel_UD = self._laurel(normed_UD)
        attended_UD = norms["post_attention_layernorm"](self.attention(gather(normed_UD, num), rotation, step))
        x_UD = attended_UD.add_(x_UD).add_(laurel_UD).mul_(math.sqrt(0.5))
        read_UD = norms["pre_feedforward_layernorm"](x_UD)
        return norms["post_feedforward_layernorm"].add_to(x_UD, self._mlp(gather(read_UD, num), step))


class _Laurel:
    """A learned residual: `x + norm(B A x)` with a low rank (LAuReL, Menghani et al., arXiv 2411.07501)."""

    def __init__(self, arch: ModelArch, altup: AltUpArch, placement: Placement) -> None:
        hidden, rank = arch.hidden_size, altup.laurel_rank
        self._left = Linear(hidden, (rank,), False, placement.within("linear_left"))
        self._right = Linear(rank, (hidden,), False, placement.within("linear_right"))
        self._norm = RMSNorm(hidden, arch.rms_norm_eps, placement)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed("linear_left", self._left)
        yield from prefixed("linear_right", self._right)
        yield from prefixed("post_laurel_norm", self._norm)

    def __call__(self, x_UD: Tensor) -> Tensor:
        """A new tensor."""
        return self._norm(self._right(self._left(x_UD))).add_(x_UD)
