"""Which file knows which `model_type`. A file is imported only when its model is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.model import Model

MODEL_MODULES = {
    "gemma2": "pagefleet_engine.models.gemma2",
    "gemma3": "pagefleet_engine.models.gemma3",
    "gemma3_text": "pagefleet_engine.models.gemma3",
    "llama": "pagefleet_engine.models.llama",
    "mistral": "pagefleet_engine.models.mistral",
    "olmo2": "pagefleet_engine.models.olmo2",
    "phi3": "pagefleet_engine.models.phi3",
    "qwen2": "pagefleet_engine.models.qwen2",
    "qwen3": "pagefleet_engine.models.qwen3",
}
"""`model_type` of a configuration to the module that is its `ModelFamily`."""


class ModelFamily(Protocol):
    """What a module in `models/` offers."""

    def read(self, shape: ModelShape) -> ModelArch:
        """The architecture of a configuration of the family; ModelLoadError for what cannot be run."""
        ...

    def build(self, arch: ModelArch, placement: Placement) -> Model:
        """A model whose weights have not arrived yet."""
        ...


def model_family(model_type: str) -> ModelFamily:
    """The family of a type that is in `MODEL_MODULES`."""
    return cast(ModelFamily, import_module(MODEL_MODULES[model_type]))


def build_model(arch: ModelArch, placement: Placement) -> Model:
    """A model whose weights have not arrived yet."""
    return model_family(arch.model_type).build(arch, placement)
