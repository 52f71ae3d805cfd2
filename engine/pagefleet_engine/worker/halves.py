"""Steps as two halves, of which one computes while what the other sends is on its way.

Shapes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pagefleet_engine.attention.backend import aligned
from pagefleet_engine.core.dual_batch import Half, halves
from pagefleet_engine.core.step import CommonStep
from pagefleet_engine.ranks.turns import Turns
from pagefleet_engine.worker.forward import EagerForward, Forward, StepShape
from pagefleet_engine.worker.step_inputs import StepInputBuilder, StepInputs, StepRows


class HalvedForward:
    """Implements `Forward`: steps that are to be computed in halves by two passes that take turns, others as before.

    All ranks that the model exchanges something with do the same.
    """

    def __init__(self, whole: Forward, eager: EagerForward, turns: Turns) -> None:
        """`eager` computes the halves, `whole` all else."""
        self._whole, self._eager = whole, eager
        self._turns = turns

    def shape(self, rows: StepRows, num_common_blocks: int) -> StepShape:
        """See Forward."""
        return (self._eager if rows.in_halves else self._whole).shape(rows, num_common_blocks)

    def run(self, rows: StepRows, num_common_blocks: int, inputs: StepInputBuilder) -> Tensor:
        """See Forward."""
        if not rows.in_halves:
            return self._whole.run(rows, num_common_blocks, inputs)
        step = inputs.inputs(rows, num_common_blocks)
        first, second = (partial(self._compute, _part(step, half)) for half in halves(rows.new_S))
        return torch.cat(self._turns.take(first, second))

    def run_empty(self, inputs: StepInputBuilder, common: CommonStep | None) -> None:
        """See Forward. Such a step is whole on all ranks."""
        self._whole.run_empty(inputs, common)

    @torch.inference_mode()  # it is a thread's own
    def _compute(self, inputs: StepInputs) -> Tensor:
        return self._eager.compute(inputs)


def _part(step: StepInputs, half: Half) -> StepInputs:
    of_tokens = slice(half.tokens.start, half.tokens.stop)
    entering, positions_T = aligned(step.entering[of_tokens]), aligned(step.positions_T[of_tokens])
    return StepInputs(entering, positions_T, step.geometry.part(half.rows, half.tokens))
