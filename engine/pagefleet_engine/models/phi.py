"""Phi-1, 1.5 and 2 (arXiv 2306.11644, 2309.05463): LayerNorm, attention and an ungated MLP side by side, heads that
rotate in part."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.names import Names


def read(shape: ModelShape) -> ModelArch:
    """The head has a bias, too."""
    shape.fields.must_be_unset("qk_layernorm")
    return replace(
        read_shared(shape, eps_field="layer_norm_eps"),
        mlp_gate=False,
        head_bias=True,
        merged_qkv=shape.fields.flag("merged_qkv", False),  # in GGUF of the first files
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """Everything has a bias."""
    traits = Traits(
        norm="layer",
        layer_norms="shared",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        merged_in_checkpoint=arch.merged_qkv,
        names=Names(norm="model.final_layernorm", output="dense", up="fc1", down="fc2"),
    )
    return DecoderModel(arch, traits, placement)
