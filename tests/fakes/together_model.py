"""A Llama whose last layer exchanges something among the data ranks, as a plug-in model may.

`run` is an engine core that serves it in the place of every Llama.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pagefleet_engine.attention.backend import AttentionStep
from pagefleet_engine.engine_core.process import main
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models import llama
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.model import MODEL_MODULES
from pagefleet_protocol.model_config.shape import ModelShape
from torch import Tensor


def read(shape: ModelShape) -> ModelArch:
    return replace(llama.read(shape), steps_together=True)


class TogetherModel(DecoderModel):
    """Adds how far the ranks' steps are apart: nothing, if they step together."""

    def __init__(self, arch: ModelArch, placement: Placement) -> None:
        super().__init__(arch, Traits(), placement)
        self._data = placement.data
        self._num_steps = 0

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        hidden_TD = super().forward(token_ids_T, positions_T, step)
        self._num_steps += 1
        ends = self._data.all_reduce(torch.tensor([self._num_steps, -self._num_steps]), "max")
        return hidden_TD + ends.sum()


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    return TogetherModel(arch, placement)


def run() -> int:
    MODEL_MODULES["llama"] = "tests.fakes.together_model"
    return main()
