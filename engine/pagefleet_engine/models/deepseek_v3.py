"""DeepSeek-V3 and R1 (arXiv 2412.19437), Kimi K2 and GLM-4.7-Flash: attention over latents, experts chosen by sigmoid
gates with a correction, by groups. Layers that only draft (multi-token prediction) are not loaded."""

from __future__ import annotations

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import read_sigmoid_routing
from pagefleet_engine.models.latent_config import read_deepseek


def read(shape: ModelShape) -> ModelArch:
    """What is common to DeepSeek's, with sigmoid gates.

    Raises:
        ModelLoadError: experts are chosen in another way.
    """
    fields = shape.fields
    method, scoring = fields.text("topk_method", "noaux_tc"), fields.text("scoring_func", "sigmoid")
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise ModelLoadError(
            f"{fields.source}: topk_method is {method} with scoring_func {scoring}; pagefleet runs noaux_tc with "
            "sigmoid"
        )
    return read_deepseek(shape, read_sigmoid_routing(shape))


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """Nothing is left to the configuration."""
    return DecoderModel(arch, Traits(router_correction=True), placement)
