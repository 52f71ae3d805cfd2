"""How a prepared step goes through the model: operation by operation, or (`graphs`) as a captured graph.

Shapes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pagefleet_engine.attention.backend import AttentionBackend, AttentionStep
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

    def compute(self, inputs: StepInputs) -> Tensor:
        """Hidden states of any inputs, padding included."""
        step = self._backend.begin(inputs.geometry)
        return self._model.forward(inputs.entering, inputs.positions_T, step)
