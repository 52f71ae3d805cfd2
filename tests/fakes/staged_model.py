"""The stages of a pipeline as one model: each gets what the one before gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagefleet_engine.attention.backend import AttentionSpec
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.model import Model
from pagefleet_engine.ranks.parallelism import Parallelism
from torch import Tensor

from tests.fakes.dense_attention import DenseStep


class StagedModel:
    """Has what tests call of a `Model`; steps know layers by their numbers in the whole."""

    def __init__(self, stages: Sequence[Model]) -> None:
        self.stages = stages

    def forward(self, entering: Tensor, positions_T: Tensor, step: Any) -> Tensor:
        first = 0
        for stage in self.stages:
            entering = stage.forward(entering, positions_T, _FromLayer(step, first))  # type: ignore[arg-type]
            first += stage.arch.num_layers
        return entering

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return self.stages[-1].logits(hidden_SD)


class _FromLayer:
    def __init__(self, step: DenseStep, first: int) -> None:
        self._step = step
        self._first = first

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        self._step.write(self._whole(spec), k_TKH, v_TKH)

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        return self._step.attend(self._whole(spec), q_TNH)

    def _whole(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, layer=spec.layer + self._first)


def load_stages(folder: Path, arch: ModelArch, placement: Placement, parallel: Parallelism, form: Any) -> StagedModel:
    """Load every stage; `form`: "auto" or "dummy"."""
    layers = arch.stage_layers(parallel)
    return StagedModel([load_model(folder, arch, replace(placement, layers=own), form, 5) for own in layers])
