"""gpt-oss (OpenAI, arXiv 2508.10925): windows in every other layer, a sink for each head, and experts with biases whose
gate is clamped."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.moe.expert_slots import ExpertNames, Stacked
from pagefleet_engine.layers.moe.routing import Routing
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import read_counts, read_experts

_APART = ExpertNames(router="router", biased=True)
_STACKED = replace(
    _APART,
    gate_up=Stacked("experts.gate_up_proj", transposed=True, in_turns=True),
    down=Stacked("experts.down_proj", transposed=True),
)
_GATE = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def read(shape: ModelShape) -> ModelArch:
    """A softmax over a token's own experts is one over all of them whose weights are made to add up to one."""
    fields, (count, top_k) = shape.fields, read_counts(shape)
    for name, value in _GATE.items():
        if fields.number(name) != value:
            raise ModelLoadError(f"{fields.source}: {name} is {fields.number(name):g}; pagefleet runs {value:g}")
    routing = Routing(num_experts=count, top_k=top_k, renormalize=True)
    experts = replace(read_experts(shape, routing, "intermediate_size"), gate="swigluoai")
    return replace(read_shared(shape), mlp_bias=False, experts=experts)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """All of attention has biases, unless a configuration says no."""
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        sinks=True,
        experts=_APART if arch.gguf_layout else _STACKED,
    )
    return DecoderModel(arch, traits, placement)
