"""How a prepared step goes through the model: operation by operation, or (`graphs`) as a captured graph.

Shapes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pagefleet_engine.attention.backend import AttentionBackend, AttentionSpec, AttentionStep, Pages
from pagefleet_engine.core.step import CommonStep
from pagefleet_engine.worker.step_inputs import StepInputBuilder, StepInputs, StepRows


@dataclass(frozen=True, slots=True)
class StepShape:
    """The batch as it is computed: the step's rows and tokens, and padding after them."""

    num_rows: int
    num_tokens: int


class Forward(Protocol):
    """The model over the input buffers."""

    def shape(self, rows: StepRows, num_common_blocks: int) -> StepShape:
        """The size to which the step's inputs must be filled up; known without asking the device."""
        ...

    def run(self, rows: StepRows, num_common_blocks: int, inputs: StepInputBuilder) -> Tensor:
        """Hidden states [T, D] of the step's own tokens; valid until the next run."""
        ...

    def run_empty(self, inputs: StepInputBuilder, common: CommonStep | None) -> None:
        """Take part in what layers exchange in a step that has no tokens here; what `inputs` held is lost. `common`:
        see StepPlan."""
        ...


class CausalModel(Protocol):
    """The part of a model that a step needs."""

    def forward(self, entering: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        """Hidden states [T, D]; see Model."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """[S, V]."""
        ...


class EagerForward:
    """Implements `Forward` one operation after another, without padding."""

    def __init__(self, model: CausalModel, backend: AttentionBackend) -> None:
        self._model = model
        self._backend = backend

    def shape(self, rows: StepRows, num_common_blocks: int) -> StepShape:
        """See Forward."""
        return StepShape(len(rows.slots_S), rows.num_tokens)

    def run(self, rows: StepRows, num_common_blocks: int, inputs: StepInputBuilder) -> Tensor:
        """See Forward."""
        return self.compute(inputs.inputs(rows, num_common_blocks))

    def run_empty(self, inputs: StepInputBuilder, common: CommonStep | None) -> None:
        """See Forward. Kernels are given a token that is padding."""
        none = inputs.view(0, 0, 1)
        if none.positions_T.device.type == "cpu":
            self._model.forward(none.entering, none.positions_T, NoTokens())
        else:
            inputs.clear()
            self.compute(inputs.view(1, 1, 1))

    def compute(self, inputs: StepInputs) -> Tensor:
        """Hidden states of any inputs, padding included."""
        step = self._backend.begin(inputs.geometry)
        return self._model.forward(inputs.entering, inputs.positions_T, step)


class NoTokens:
    """Implements `AttentionStep`: there is nothing to write or to attend to."""

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See AttentionStep."""

    def pages(self, spec: AttentionSpec) -> Pages:
        """See AttentionStep; asked for by kernels of GPUs alone."""
        raise AssertionError("kernels are given a token that is padding")

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See AttentionStep."""
        return q_TNH if spec.latent is None else q_TNH.new_empty(0, q_TNH.shape[1], spec.latent.value_dim)
