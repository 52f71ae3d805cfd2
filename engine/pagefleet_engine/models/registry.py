"""Which file builds which `model_type`. A file is imported only when its model is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefleet_engine.layers.weight import Placement
    from pagefleet_engine.models.arch import ModelArch
    from pagefleet_engine.models.model import Model

MODEL_MODULES = {
    "llama": "pagefleet_engine.models.llama",
    "mistral": "pagefleet_engine.models.mistral",
    "qwen2": "pagefleet_engine.models.qwen2",
    "qwen3": "pagefleet_engine.models.qwen3",
}
"""`model_type` of a configuration to the module whose `build` makes the model."""


def build_model(arch: ModelArch, placement: Placement) -> Model:
    """A model whose weights have not arrived yet."""
    model: Model = import_module(MODEL_MODULES[arch.model_type]).build(arch, placement)
    return model
