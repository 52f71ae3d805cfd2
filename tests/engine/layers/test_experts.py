"""Every way between ranks with every form of experts, against each token's own matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from pagefleet_engine.layers.linear_kernel import activate
from pagefleet_engine.layers.moe.exchange import own_experts
from pagefleet_engine.layers.moe.expert_slots import EXPERT_NAMES, expert_slots
from pagefleet_engine.layers.moe.experts import Experts, HostExperts, over_scaled_inputs
from pagefleet_engine.layers.moe.grouped_experts import GroupedExperts
from pagefleet_engine.layers.moe.native_experts import NativeExperts, native_experts
from pagefleet_engine.layers.moe.routing import NOWHERE, Routes
from pagefleet_engine.layers.quantization_scheme import Quantization, QuantizationScheme, Rule
from pagefleet_engine.layers.shard import Shard, own_share, shard_of
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.weight_map import weight_map
from pagefleet_engine.models.quantization_config import read_quantization
from pagefleet_engine.ranks.group import RankGroup
from pagefleet_engine.ranks.parallelism import All2All
from pagefleet_protocol.model_config.fields import ConfigFields
from torch import Tensor

from tests.fakes.coded_checkpoints import Coded
from tests.fakes.native_kernels import native_libraries
from tests.fakes.packed_checkpoints import Packed, pack, quantize_packed
from tests.fakes.ranks import on_ranks

NUM_EXPERTS, HIDDEN, WIDTH, TOP_K, ROWS, BLOCK = 6, 64, 96, 3, 9, 16
SCHEMES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "fp8 tensor": {"number": "fp8", "weight_scales": "tensor", "input_scales": "token"},
    "fp8 tensor, fixed": {"number": "fp8", "weight_scales": "tensor", "input_scales": "tensor"},
    "fp8 channel": {"number": "fp8", "weight_scales": "channel", "input_scales": "token"},
    "fp8 block": {"number": "fp8", "weight_scales": "block", "input_scales": "group", "block": (BLOCK, BLOCK)},
    "fp8 weights alone": {"number": "fp8", "weight_scales": "channel", "input_scales": "none"},
    "fp8, bounded": {"number": "fp8", "weight_scales": "channel", "input_scales": "token", "input_bound": 2.0},
    "int8": {"number": "int8", "weight_scales": "channel", "input_scales": "token"},
    "int8, zeros": {"number": "int8", "weight_scales": "channel", "input_scales": "token", "input_zero_points": True},
    "int8, fixed zeros": {
        "number": "int8",
        "weight_scales": "channel",
        "input_scales": "tensor",
        "input_zero_points": True,
    },
    "fp8 on load": {"number": "fp8", "weight_scales": "channel", "input_scales": "token", "on_load": True},
}
FEW_BITS: dict[str, Packed | Coded] = {
    "int4 in act order": Packed("gptq", zeros=True, ordered=True),
    "int8 in groups": Packed("pack-quantized", 8),
    "w4a8": Packed("pack-quantized", inputs="int"),
    "nvfp4": Coded("nvfp4-pack-quantized"),
    "mxfp4": Coded("mxfp4-pack-quantized"),
}
NATIVE_FORMS = ("plain", "int8", "int8 in groups", "w4a8", "nvfp4", "mxfp4")
EXPERTS: dict[str, Callable[[int, Shard, Placement], Experts | None]] = {
    "host": lambda count, width, place: HostExperts(count, HIDDEN, width.size, "silu"),
    "grouped": lambda count, width, place: GroupedExperts(count, "silu"),
}
if libraries := native_libraries():
    EXPERTS["native"] = lambda count, width, place: native_experts(
        count, HIDDEN, width, "silu", (place.within("w").scheme(1),) * 2, replace(place, native=libraries[0])
    )
ALL = Shard(NUM_EXPERTS, (range(NUM_EXPERTS),))


def quantization_of(form: str) -> Quantization | None:
    if (how := FEW_BITS.get(form)) is not None:
        return read_quantization(ConfigFields({"quantization_config": how.config()}, "config.json"))
    fields = SCHEMES[form]
    return None if fields is None else Quantization(rules=(Rule(("Linear",), QuantizationScheme(**fields)),))


def unit_of(quantization: Quantization | None) -> int:
    """Inputs that ranks do not divide."""
    scheme = None if quantization is None else quantization.rules[-1].scheme
    return BLOCK if scheme is None or scheme.block is None else scheme.block[1]


def bound_of(form: str) -> float | None:
    return (SCHEMES.get(form) or {}).get("input_bound")


def rounds_inputs(form: str) -> bool:
    if (how := FEW_BITS.get(form)) is not None:
        return isinstance(how, Packed) and bool(how.inputs)
    fields = SCHEMES[form]
    return fields is not None and (fields["input_scales"] != "none" or "on_load" in fields)


def checkpoint(form: str) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor, Tensor]]]:
    """Tensors by name, and each expert's gate, up and down as the numbers that they stand for."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    meant = []
    for expert in range(NUM_EXPERTS):
        parts = []
        for part, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
            weight = torch.randn(shape, generator=generator) / 8
            stored, weight = store(form, weight, generator)
            tensors |= {f"experts.{expert}.{part}_proj.{kind}": tensor for kind, tensor in stored.items()}
            parts.append(weight)
        meant.append((parts[0], parts[1], parts[2]))
    return tensors, meant


def store(form: str, weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix's tensors, and the numbers that they stand for."""
    how = FEW_BITS.get(form)
    if isinstance(how, Packed):
        words = quantize_packed(weight, how)
        return pack(words, how), words.meant()
    if how is not None:
        return how.store(weight)
    fields = SCHEMES[form]
    scheme = None if fields is None else QuantizationScheme(**fields)
    if scheme is None or scheme.on_load:
        return {"weight": weight}, weight
    shapes = {"tensor": (1,), "channel": (len(weight), 1)}
    scale_shape = shapes.get(scheme.weight_scales, (len(weight) // BLOCK, weight.shape[1] // BLOCK))
    scale = (1 + torch.rand(scale_shape, generator=generator)) / 512
    wide = scale if scheme.block is None else scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    numbers = (weight / wide).clamp(-127, 127)
    numbers = (numbers.round() if scheme.number == "int8" else numbers).to(scheme.storage)
    fixed = {"input_scale": torch.tensor([0.05])} if scheme.input_scales == "tensor" else {}
    if fixed and scheme.input_zero_points:
        fixed["input_zero_point"] = torch.randint(-9, 9, (1,), generator=generator, dtype=torch.int8)
    return {"weight": numbers, "weight_scale": scale, **fixed}, numbers.float() * wide


def routes() -> Routes:
    """Of nine rows; the last goes nowhere, and nobody to the second expert."""
    generator = torch.Generator().manual_seed(1)
    liking = torch.rand(ROWS, NUM_EXPERTS, generator=generator)
    liking[:, 1] = -1
    experts = liking.topk(TOP_K, -1).indices.to(torch.int32)
    experts[-1] = NOWHERE
    return Routes(torch.rand(ROWS, TOP_K, generator=generator), experts)


def expected(x: Tensor, meant: list[tuple[Tensor, Tensor, Tensor]], bound: float | None = None) -> Tensor:
    """Row by row, expert by expert; what a matrix reads is cut off at the bound."""
    out, found = torch.zeros_like(x), routes()
    x = x.clamp(-bound, bound) if bound is not None else x
    for row, (experts, weights) in enumerate(zip(found.experts_TK.tolist(), found.weights_TK.tolist(), strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            if expert != NOWHERE:
                gate, up, down = meant[expert]
                inner = activate(gate @ x[row], "silu") * (up @ x[row])
                out[row] += weight * (down @ (inner.clamp(-bound, bound) if bound is not None else inner))
    return out


pytestmark = pytest.mark.usefixtures("one_thread")


BACKENDS: dict[str, All2All] = {name: name for name in get_args(All2All)}
EXCHANGES = [("width", 1), ("width", 2), ("tensor", 2), ("tensor", 4), *((name, 2) for name in BACKENDS)]


@pytest.mark.parametrize(("exchange", "size"), EXCHANGES)
@pytest.mark.parametrize(
    ("kind", "form"),
    [(kind, form) for kind in EXPERTS for form in (*SCHEMES, *FEW_BITS) if kind != "native" or form in NATIVE_FORMS],
)
@torch.inference_mode()
def test_every_combination(kind: str, form: str, exchange: str, size: int) -> None:
    tensors, meant = checkpoint(form)
    quantization = quantization_of(form)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(2))

    @torch.inference_mode()
    def rank(ranks: RankGroup) -> Tensor:
        place = Placement(torch.float32, torch.device("cpu"), kind == "grouped", quantization)
        if (backend := BACKENDS.get(exchange)) is not None:
            place = replace(place, data=ranks, expert_parallel=True, all2all_backend=backend)
        else:
            place = replace(place, tensor=ranks, expert_parallel=exchange == "tensor")
        width = own_share(WIDTH, ranks, "experts", unit_of(quantization)) if exchange == "width" else shard_of(WIDTH)
        share = own_experts(NUM_EXPERTS, place)
        own, way = share.experts, share.exchange
        experts, names = EXPERTS[kind](own.size, width, place), EXPERT_NAMES
        if experts is None:
            experts = EXPERTS["host"](own.size, width, place)
        assert experts is not None
        by_parts = rounds_inputs(form) and (exchange, size) == ("width", 2)  # a row's scale is that of all ranks
        assert kind != "native" or isinstance(experts, NativeExperts) or by_parts
        if isinstance(experts, NativeExperts):
            place = replace(place, native=libraries[0])
        slots = [
            *expert_slots(names.gate_up, own, HIDDEN, (width, width), place, experts.install_gate_up),
            *expert_slots(names.down, own, width, (HIDDEN,), place, experts.install_down),
        ]
        destinations = weight_map(slots)
        assert destinations.keys() <= {name for name in tensors if int(name.split(".")[1]) in own.ranges[0]}
        assert len({name.split(".")[1] for name in destinations}) == own.size
        for name, destination in destinations.items():
            destination.weight.fill(destination.part, tensors[name])
        all_routes, num_rows = routes(), ROWS - place.data.index  # copies have rows of their own, some fewer
        sent = way.prepare(
            x[:num_rows], Routes(all_routes.weights_TK[:num_rows], all_routes.experts_TK[:num_rows].contiguous())
        )
        return place.tensor.all_reduce(sent.finalize(experts(sent.x_RD, sent.routes)).contiguous())

    found = on_ranks(size, rank)
    assert exchange in BACKENDS or all(torch.equal(one, found[0]) for one in found)
    wanted = expected(x, meant, bound_of(form))
    exact = not rounds_inputs(form) and (kind != "native" or form == "plain")
    for one in found:
        error = (one - wanted[: len(one)]).abs().max() / wanted.abs().max()
        assert error < (1e-5 if exact else 0.1), f"{error}"
    assert not found[0][-1].any()


def filled(kind: str, form: str = "plain") -> Experts:
    """All of the checkpoint's, on one rank."""
    tensors, _ = checkpoint(form)
    quantization = quantization_of(form)
    native = native_libraries()[0] if kind == "native" else None
    place = Placement(torch.float32, torch.device("cpu"), kind == "grouped", quantization, native=native)
    experts = EXPERTS[kind](NUM_EXPERTS, shard_of(WIDTH), place)
    assert experts is not None
    for name, destination in weight_map(
        [
            *expert_slots(EXPERT_NAMES.gate_up, ALL, HIDDEN, (WIDTH, WIDTH), place, experts.install_gate_up),
            *expert_slots(EXPERT_NAMES.down, ALL, WIDTH, (HIDDEN,), place, experts.install_down),
        ]
    ).items():
        destination.weight.fill(destination.part, tensors[name])
    return experts


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (kind, form)
        for kind, forms in (("native", ("plain", "int8")), ("grouped", ("int8, zeros", "int8, fixed zeros")))
        for form in forms
        if kind in EXPERTS
    ],
)
@torch.inference_mode()
def test_experts_move_as_they_are(kind: str, form: str) -> None:
    experts, x = filled(kind, form), torch.randn(ROWS, HIDDEN)
    before, found = experts(x, routes()), routes()
    held = [[part.clone() for part in experts.stored(expert)] for expert in range(NUM_EXPERTS)]
    for slot, stored in enumerate(reversed(held)):
        experts.take(slot, stored)
    there = torch.where(found.experts_TK < 0, NOWHERE, NUM_EXPERTS - 1 - found.experts_TK)
    assert torch.equal(experts(x, Routes(found.weights_TK, there)), before)


@pytest.mark.parametrize("kind", EXPERTS)
@torch.inference_mode()
def test_no_rows_and_none_that_go_anywhere(kind: str) -> None:
    experts = filled(kind)
    nowhere = Routes(torch.rand(2, TOP_K), torch.full((2, TOP_K), NOWHERE, dtype=torch.int32))
    assert not experts(torch.ones(2, HIDDEN), nowhere).any()
    nobody = Routes(torch.rand(0, TOP_K), torch.empty(0, TOP_K, dtype=torch.int32))
    assert experts(torch.ones(0, HIDDEN), nobody).shape == (0, HIDDEN)
    assert over_scaled_inputs(experts, torch.ones(0, HIDDEN), nobody).shape == (0, HIDDEN)
