"""A mixture of experts in the place of an MLP: a router, experts, and the experts that every token shares.

Shapes: T tokens of the step, D hidden size, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from pagefleet_kernels.quantize import Activations
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, AttentionStep
from pagefleet_engine.layers.linear_kernel import LinearKernel, PlainLinear, linear_kernel
from pagefleet_engine.layers.moe.balanced import BalancedExperts
from pagefleet_engine.layers.moe.exchange import OwnExperts, own_experts
from pagefleet_engine.layers.moe.expert_slots import Stacked, bias_slots, expert_slots, of_stack
from pagefleet_engine.layers.moe.experts import Experts, HostExperts, over_scaled_inputs
from pagefleet_engine.layers.moe.grouped_experts import GroupedExperts
from pagefleet_engine.layers.moe.native_experts import NativeExperts, native_experts
from pagefleet_engine.layers.moe.routing import Routes, chooser
from pagefleet_engine.layers.norm import Residual
from pagefleet_engine.layers.quantization_scheme import Scheme
from pagefleet_engine.layers.shard import Shard, own_share, shard_of
from pagefleet_engine.layers.token_ranks import token_ranks
from pagefleet_engine.layers.weight import Placement, UnusableTensorError, Weight, prefixed
from pagefleet_engine.models.arch import ExpertsArch, ModelArch
from pagefleet_engine.models.blocks import MLP, Traits


class Router:
    """Which experts get which token. Never quantized; sigmoid gates, and those with a correction, are computed in
    float32, as they were trained."""

    def __init__(self, arch: ModelArch, experts: ExpertsArch, traits: Traits, placement: Placement) -> None:
        self._kernel: LinearKernel
        self._native = placement.native_layers
        self._bias_E: Tensor | None = None
        routing = experts.routing
        self._chooser = partial(chooser, routing, self._native)
        self._choose = self._chooser()
        dtype = torch.float32 if routing.scoring == "sigmoid" or traits.router_correction else None
        self._dtype = dtype or placement.dtype
        columns, count = arch.hidden_size, routing.num_experts
        names = traits.experts
        within = placement.within(names.router)
        self._slots = {f"{names.router}.weight": Weight((count,), columns, within, self._install, dtype=dtype)}
        if names.biased:
            self._slots[f"{names.router}.bias"] = Weight((count,), None, within, self._install_bias, dtype=dtype)
        if traits.router_correction:
            slot = Weight((count,), None, within, self._install_correction, dtype=torch.float32)
            self._slots[names.correction] = slot.stored_as((1, count)) if names.correction_is_row else slot

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights; names are those within the layer of experts."""
        yield from self._slots.items()

    def __call__(self, x_TD: Tensor) -> Routes:
        """The routes of every row, padding included."""
        return self._choose(self._kernel.linear(x_TD.to(self._dtype), self._bias_E))

    def _install(self, weight_ED: Tensor) -> None:
        self._kernel = PlainLinear(weight_ED) if self._native is None else linear_kernel(weight_ED, self._native)

    def _install_bias(self, bias_E: Tensor) -> None:
        self._bias_E = bias_E

    def _install_correction(self, correction_E: Tensor) -> None:
        if not correction_E.isfinite().all():  # it only chooses: no answer would show it
            raise UnusableTensorError("has values that are no numbers: download the checkpoint again")
        self._choose = self._chooser(correction_E)


class SparseMLP:
    """Implements `FeedForward` by experts; ranks have a part of each expert's width, or some experts whole."""

    rounding = None
    """The router reads its inputs as they are."""

    def __init__(self, arch: ModelArch, experts: ExpertsArch, layer: int, traits: Traits, placement: Placement) -> None:
        names, hidden = traits.experts, arch.hidden_size
        self._names = names
        self._use_kernels = placement.use_kernels
        # Tells padding: it is written nowhere.
        self._pages = AttentionSpec(layer=layer, scale=1.0)
        plain = replace(placement, quantization=None)
        self._router = Router(arch, experts, traits, plain)
        width, count, gate = _width(experts, traits, placement), experts.routing.num_experts, experts.gate
        share = own_experts(count, placement)
        own, self._exchange, self._map = share.experts, share.exchange, share.map
        moves, stored = share.map is not None, placement
        gate = gate or arch.activation
        made: Experts
        if placement.use_kernels:
            made = GroupedExperts(share.num_slots, gate)
        elif (native := _native_experts(arch, experts, width, share, traits, placement)) is not None:
            made = native
        else:
            made = HostExperts(share.num_slots, hidden, width.size, gate, keeps=moves)
            stored = replace(placement, traceable=placement.traceable or moves)  # what is packed could not move
        self._experts = partial(over_scaled_inputs, made) if experts.routing.scales_inputs else made
        self._slots = [
            *expert_slots(names.gate_up, own, hidden, (width, width), stored, made.install_gate_up),
            *expert_slots(names.down, own, width, (hidden,), stored, made.install_down),
        ]
        if share.map is not None and placement.balance is not None:
            bytes_each = sum(weight.nbytes for _, weight in self._slots) // own.size
            placement.balance.add(BalancedExperts(share.map, made, bytes_each, has_room=placement.use_kernels))
        if names.biased:
            # Where ranks add up parts of an expert's width, the first has the bias.
            install = made.install_down_bias if placement.tensor.index == 0 or not width.is_part else _leave
            self._slots += bias_slots(names.gate_up, own, (width, width), placement, made.install_gate_up_bias)
            self._slots += bias_slots(names.down, own, (hidden,), placement, install)
        self._tokens = token_ranks(placement)
        self._shared: MLP | None = None
        self._shared_gate_1D: Tensor
        self._shared_gate_slot: Weight | None = None
        if experts.shared_intermediate_size:
            shared_arch = replace(arch, intermediate_size=experts.shared_intermediate_size)
            self._shared = MLP(shared_arch, traits, placement.within(names.shared), leaves_parts=True)
            if traits.shared_expert_gate:
                self._shared_gate_slot = Weight((1,), hidden, plain, self._install_shared_gate)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._router.weights()
        yield from self._slots
        if self._shared is not None:
            yield from prefixed(self._names.shared, self._shared)
        if self._shared_gate_slot is not None:
            yield f"{self._names.shared}_gate.weight", self._shared_gate_slot

    def __call__(self, x_TD: Activations, step: AttentionStep) -> Tensor:
        """See FeedForward."""
        assert isinstance(x_TD, Tensor), "nothing is rounded unless asked for"
        routes = self._router(x_TD)
        if self._use_kernels:  # only graphs have padding
            routes = routes.without(step.pages(self._pages).slot_mapping_T < 0)
        if self._map is not None:
            routes = self._map.place(routes)
        sent = self._exchange.prepare(x_TD, routes)
        sums_TD = sent.finalize(self._experts(sent.x_RD, sent.routes))
        if self._shared is not None:
            shared_TD = self._shared(x_TD, step)
            if self._shared_gate_slot is not None:
                shared_TD = F.linear(x_TD, self._shared_gate_1D).sigmoid_() * shared_TD
            sums_TD += shared_TD
        return self._tokens.sum(sums_TD)

    def add_to(self, residual_TD: Tensor, x_TD: Activations, step: AttentionStep) -> Residual:
        """See FeedForward."""
        out_TD = self(x_TD, step)
        return (residual_TD, out_TD) if self._use_kernels else (residual_TD.add_(out_TD), None)

    def _install_shared_gate(self, weight_1D: Tensor) -> None:
        self._shared_gate_1D = weight_1D


def _leave(bias_ED: Tensor) -> None:
    """Another rank adds it."""


def _width(experts: ExpertsArch, traits: Traits, placement: Placement) -> Shard:
    """What a rank has of an expert's width."""
    if placement.expert_parallel:
        return shard_of(experts.intermediate_size)
    return own_share(experts.intermediate_size, placement.tensor, "an expert's MLP", _unit(traits, placement))


def _unit(traits: Traits, placement: Placement) -> int:
    """Rows of both matrices of an expert that share scales; ranks take whole ones."""
    schemes = (_scheme(traits.experts.gate_up, 2, placement), _scheme(traits.experts.down, 1, placement))
    return math.lcm(*(size for scheme in schemes if scheme is not None for size in scheme.block or ()))


def _native_experts(
    arch: ModelArch, experts: ExpertsArch, width: Shard, share: OwnExperts, traits: Traits, placement: Placement
) -> NativeExperts | None:
    """By compiled kernels, if they take the form of a rank's first expert: slots refuse others of another form."""
    names, first = traits.experts, share.experts.ranges[0].start
    schemes = _scheme(names.gate_up, 2, placement, first), _scheme(names.down, 1, placement, first)
    gate = experts.gate or arch.activation
    return native_experts(share.num_slots, arch.hidden_size, width, gate, schemes, placement)


def _scheme(name: str | Stacked, num_parts: int, placement: Placement, expert: int = 0) -> Scheme | None:
    if isinstance(name, Stacked):
        return of_stack(name, placement).scheme(1)
    return placement.within(name.format(expert)).scheme(num_parts)
