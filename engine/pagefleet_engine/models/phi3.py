"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905, 2503.01743): Llama with merged projections in the checkpoint, LongRoPE
for long contexts, and in Phi-4-mini heads that rotate in part."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel


def read(shape: ModelShape) -> ModelArch:
    """One window for all layers, or none."""
    return replace(read_shared(shape), attention_bias=False, mlp_bias=False)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """There are no biases, whatever the configuration says."""
    return DecoderModel(arch, Traits(merged_in_checkpoint=True), placement)
