"""What the worker and the loader need of a model, and which file makes one of which `model_type`.

Shapes: T tokens of the step, S rows asked for, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Protocol, cast

from pagefleet_protocol.model_config.shape import ModelShape
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionStep
from pagefleet_engine.layers.embedding import LMHead
from pagefleet_engine.layers.weight import Placement, Weight
from pagefleet_engine.models.arch import ModelArch

MODEL_MODULES = {
    "bloom": "pagefleet_engine.models.bloom",
    "cohere": "pagefleet_engine.models.cohere",
    "cohere2": "pagefleet_engine.models.cohere",
    "deepseek_v2": "pagefleet_engine.models.deepseek_v2",
    "deepseek_v3": "pagefleet_engine.models.deepseek_v3",
    "dots1": "pagefleet_engine.models.dots1",
    "ernie4_5": "pagefleet_engine.models.ernie4_5",
    "ernie4_5_moe": "pagefleet_engine.models.ernie4_5_moe",
    "exaone4": "pagefleet_engine.models.exaone4",
    "falcon": "pagefleet_engine.models.falcon",
    "gemma": "pagefleet_engine.models.gemma",
    "gemma2": "pagefleet_engine.models.gemma2",
    "gemma3": "pagefleet_engine.models.gemma3",
    "gemma3_text": "pagefleet_engine.models.gemma3",
    "gemma3n": "pagefleet_engine.models.gemma3n",
    "gemma3n_text": "pagefleet_engine.models.gemma3n",
    "glm": "pagefleet_engine.models.glm4",
    "glm4": "pagefleet_engine.models.glm4",
    "glm4_moe": "pagefleet_engine.models.glm4_moe",
    "glm4_moe_lite": "pagefleet_engine.models.deepseek_v3",
    "gpt2": "pagefleet_engine.models.gpt2",
    "gpt_oss": "pagefleet_engine.models.gpt_oss",
    "granite": "pagefleet_engine.models.granite",
    "granitemoe": "pagefleet_engine.models.granitemoe",
    "hunyuan_v1_dense": "pagefleet_engine.models.hunyuan",
    "hunyuan_v1_moe": "pagefleet_engine.models.hunyuan",
    "kimi_k2": "pagefleet_engine.models.deepseek_v3",
    "llama": "pagefleet_engine.models.llama",
    "llama4": "pagefleet_engine.models.llama4",
    "llama4_text": "pagefleet_engine.models.llama4",
    "minimax_m2": "pagefleet_engine.models.minimax_m2",
    "mistral": "pagefleet_engine.models.mistral",
    "mixtral": "pagefleet_engine.models.mixtral",
    "mpt": "pagefleet_engine.models.mpt",
    "olmo2": "pagefleet_engine.models.olmo2",
    "olmo3": "pagefleet_engine.models.olmo3",
    "olmoe": "pagefleet_engine.models.olmoe",
    "opt": "pagefleet_engine.models.opt",
    "phi": "pagefleet_engine.models.phi",
    "phi3": "pagefleet_engine.models.phi3",
    "phimoe": "pagefleet_engine.models.phimoe",
    "qwen2": "pagefleet_engine.models.qwen2",
    "qwen2_moe": "pagefleet_engine.models.qwen2_moe",
    "qwen3": "pagefleet_engine.models.qwen3",
    "qwen3_moe": "pagefleet_engine.models.qwen3_moe",
    "seed_oss": "pagefleet_engine.models.seed_oss",
    "smollm3": "pagefleet_engine.models.smollm3",
    "stablelm": "pagefleet_engine.models.stablelm",
}
"""`model_type` of a configuration to the module that is its `ModelFamily`, imported only when it is asked for."""


class Model(Protocol):
    """A causal language model over a paged KV cache; call it within `torch.inference_mode()`."""

    @property
    def arch(self) -> ModelArch:
        """The shape that it was built from; of a rank, of its part; of a stage, of its layers."""
        ...

    @property
    def divided_head(self) -> LMHead | None:
        """Gives the logits of this rank's tokens alone; None where it has all of them."""
        ...

    def forward(self, entering: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        """Hidden states [T, D] after the final norm, or of a stage before the last after its layers.

        `entering`: tokens (int32 or int64), or what the stage before gave, which may be overwritten; of tokens at these
        positions (int32 or int64).
        """
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """[S, V] in the model's dtype, for those rows of the hidden states that are asked for."""
        ...

    def excerpt(self) -> Model:
        """The model with few of its layers, once their weights have arrived. A step of it launches every kernel that
        the same step of the whole model launches, in a fraction of the time; what it computes means nothing."""
        ...

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Every slot to fill, named as in Hugging Face checkpoints save for merged ones (`loader.weight_map`)."""
        ...


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
