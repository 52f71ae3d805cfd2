"""Attention over latents (MLA, DeepSeek-V2, arXiv 2405.04434): one vector of each token stands for all keys and values.

Tensor ranks divide the heads; what is kept of a token is the same on all of them.

Shapes: T tokens of the step, D hidden size, N query heads, H size of a query, R rank of the latent, W width of what is
kept of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from pagefleet_kernels.native.dense import HeadProducts
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.quantize import Activations, QuantizeSpec
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, AttentionStep, CompiledMaps, LatentMaps
from pagefleet_engine.layers.linear import Linear, input_linear
from pagefleet_engine.layers.matrix import Matrix, matrix_slots
from pagefleet_engine.layers.norm import Residual, RMSNorm
from pagefleet_engine.layers.rotary import LatentHeads, Rotation
from pagefleet_engine.layers.shard import Shard, own_heads
from pagefleet_engine.layers.weight import Placement, Weight, prefixed
from pagefleet_engine.models.arch import LatentArch, ModelArch
from pagefleet_engine.models.blocks import KVScales, Traits


class LatentAttention:
    """Queries from the hidden state or from a latent of their own, keys and values from latents that are kept."""

    def __init__(self, arch: ModelArch, layer: int, traits: Traits, placement: Placement) -> None:
        latent = _latent(arch)
        own, _ = own_heads(arch.num_heads, 1, placement.tensor.index, placement.tensor.size)
        hidden, bias = arch.hidden_size, arch.attention_bias
        self._query_shape = (-1, own.size, arch.head_dim)
        self._queries = _Queries(arch, latent, own.times(arch.head_dim), placement)
        self._kv_a = Linear(hidden, (latent.spec.dim,), bias, placement.within("kv_a_proj_with_mqa"))
        spec = AttentionSpec(layer=layer, scale=arch.query_scale)
        norm = RMSNorm(latent.rank, arch.rms_norm_eps, placement)
        self._heads = LatentHeads(norm, latent.interleaved, spec)
        self._maps = _MapSlots(latent, own, placement, self._install_maps)
        self._o_proj = input_linear(own.times(latent.value_dim), hidden, bias, placement.within("o_proj"))
        self._kv_scales = KVScales(placement, self._scale_cache)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._queries.weights()
        yield from prefixed("kv_a_proj_with_mqa", self._kv_a)
        yield from prefixed("kv_a_layernorm", self._heads.norm)
        yield from self._maps.weights()
        yield from prefixed("o_proj", self._o_proj)
        yield from self._kv_scales.weights()

    @property
    def rounding(self) -> QuantizeSpec | None:
        """See Linear: that of all that reads the hidden state, where it is one."""
        rounding = self._queries.rounding
        return rounding if rounding == self._kv_a.rounding else None

    def __call__(self, x_TD: Activations, rotation: Rotation, step: AttentionStep) -> Tensor:
        """[T, D] to a new tensor [T, D], or of this rank's tokens."""
        return self._o_proj(self._attend(x_TD, rotation, step))

    def add_to(self, residual_TD: Tensor, x_TD: Activations, rotation: Rotation, step: AttentionStep) -> Residual:
        """`residual + attention(x)`, both as a rank has them; the residual must not be read afterwards."""
        return self._o_proj.add_to(residual_TD, self._attend(x_TD, rotation, step))

    def _attend(self, x_TD: Activations, rotation: Rotation, step: AttentionStep) -> Tensor:
        q_TNH = self._queries(x_TD).view(self._query_shape)
        q_TNH = rotation.prepare_latents(self._heads, q_TNH, self._kv_a(x_TD), step)
        return step.attend(self._heads.spec, q_TNH).flatten(1)

    def _install_maps(self, maps: LatentMaps) -> None:
        self._heads.spec = replace(self._heads.spec, latent=maps)

    def _scale_cache(self, k_scale: float, v_scale: float) -> None:
        self._heads.spec = replace(self._heads.spec, k_scale=k_scale)


class _Queries:
    """The product, or two with a norm between them, that give queries."""

    def __init__(self, arch: ModelArch, latent: LatentArch, width: Shard, placement: Placement) -> None:
        hidden, rank = arch.hidden_size, latent.query_rank
        self._norm: RMSNorm | None = None
        if rank is None:
            self._first = self._last = Linear(hidden, (width,), False, placement.within("q_proj"))
            return
        self._first = Linear(hidden, (rank,), arch.attention_bias, placement.within("q_a_proj"))
        self._norm = RMSNorm(rank, arch.rms_norm_eps, placement)
        self._last = Linear(rank, (width,), False, placement.within("q_b_proj"))

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        if self._norm is None:
            yield from prefixed("q_proj", self._last)
            return
        yield from prefixed("q_a_proj", self._first)
        yield from prefixed("q_a_layernorm", self._norm)
        yield from prefixed("q_b_proj", self._last)

    @property
    def rounding(self) -> QuantizeSpec | None:
        """See Linear."""
        return self._first.rounding

    def __call__(self, x_TD: Activations) -> Tensor:
        """[T, D] to [T, N * H]."""
        q_TI = self._first(x_TD)
        if self._norm is None:
            return q_TI
        _, normed_TI = self._norm.read((q_TI, None), self._last.rounding)
        return self._last(normed_TI)


class _MapSlots:
    """`kv_b_proj`: for each head the part of its key over its value; or each of these in a tensor of its own, that of
    the key transposed. Kept in the model's type, however they are stored."""

    def __init__(
        self, latent: LatentArch, own: Shard, placement: Placement, install: Callable[[LatentMaps], None]
    ) -> None:
        self._latent, self._heads, self._placement, self._install = latent, own.size, placement, install
        self._arrived: dict[str, Tensor] = {}
        rank, nope, value = latent.rank, latent.nope_dim, latent.value_dim
        self._slots: dict[str, Weight] = {}
        if latent.maps_apart:
            self._add("k_b_proj", nope, own.times(rank))
            self._add("v_b_proj", rank, own.times(value))
        else:
            self._add("kv_b_proj", rank, own.times(nope + value))

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights; relative to attention."""
        yield from self._slots.items()

    def _add(self, name: str, inputs: int, rows: Shard) -> None:
        placement = self._placement.within(name)
        scheme = placement.scheme(1)
        if scheme is not None and scheme.on_load:  # numbers would be rounded for nothing
            placement = replace(placement, quantization=None)
        slots = matrix_slots(inputs, (rows,), placement, partial(self._take, name))
        self._slots |= {f"{name}.{kind}": slot for kind, slot in slots.items()}

    def _take(self, name: str, matrix: Matrix) -> None:
        rank, nope = self._latent.rank, self._latent.nope_dim
        if name == "kv_b_proj":
            maps_NXR = matrix.plain().view(self._heads, -1, rank)
        else:
            self._arrived[name] = matrix.plain()
            if len(self._arrived) < 2:
                return
            keys_NRX = self._arrived.pop("k_b_proj").view(self._heads, rank, nope)
            values_NXR = self._arrived.pop("v_b_proj").view(self._heads, -1, rank)
            maps_NXR = torch.cat((keys_NRX.transpose(1, 2), values_NXR), 1)
        self._install(latent_maps(maps_NXR, nope, self._placement.native_layers))


def latent_maps(made_NXR: Tensor, nope_dim: int, library: Library | None) -> LatentMaps:
    """See LatentMaps; `library`: compiled kernels that take its type."""
    if library is None:
        return LatentMaps(made_NXR, nope_dim)
    keys_NRP, values_NVR = made_NXR[:, :nope_dim].transpose(1, 2), made_NXR[:, nope_dim:]
    return LatentMaps(
        made_NXR, nope_dim, CompiledMaps(HeadProducts(library, keys_NRP), HeadProducts(library, values_NVR))
    )


def _latent(arch: ModelArch) -> LatentArch:
    assert arch.latent is not None, "built for models that have latents"
    return arch.latent
