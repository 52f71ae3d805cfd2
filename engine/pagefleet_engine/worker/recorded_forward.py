"""Steps of decoding on a CPU, recorded when their number of rows first comes, then done with no Python between kernels.

Shapes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

import logging

from pagefleet_kernels.native.recording import CannotRecordError, Recording, RecordingMemory
from torch import Tensor

from pagefleet_engine.attention.native_backend import NativeBackend
from pagefleet_engine.core.step import CommonStep
from pagefleet_engine.worker.forward import CausalModel, EagerForward, StepShape
from pagefleet_engine.worker.step_inputs import StepInputBuilder, StepRows

_log = logging.getLogger(__name__)

MOST_ROWS = 128
"""A larger step computes for so long that Python between its kernels takes next to nothing of it."""
MEMORY = 1 << 30
"""What processors of some 200 threads may need, of which others use little."""


class RecordedForward:
    """Implements `Forward` for a model that exchanges nothing with other ranks.

    Steps that compute prompts, and sizes that cannot be recorded, run one operation after another. Weights and pages
    must stay where they are: whoever puts others in their place makes a new one of these.
    """

    def __init__(self, model: CausalModel, backend: NativeBackend) -> None:
        self._library = backend.library
        self._eager = EagerForward(model, backend)
        self._memory = RecordingMemory(MEMORY)
        self._recordings: dict[int, Recording | None] = {}
        """By number of rows; None: it cannot be recorded."""

    def shape(self, rows: StepRows, num_common_blocks: int) -> StepShape:
        """See Forward."""
        return self._eager.shape(rows, num_common_blocks)

    def run(self, rows: StepRows, num_common_blocks: int, inputs: StepInputBuilder) -> Tensor:
        """See Forward."""
        num_rows = rows.num_tokens
        if rows.max_query_len == 1 and num_rows <= MOST_ROWS:
            if num_rows not in self._recordings:
                self._recordings[num_rows] = recording = self._record(num_rows, inputs)
                if recording is not None:
                    return recording.result
            elif (recording := self._recordings[num_rows]) is not None:
                return recording.run()
        return self._eager.run(rows, num_common_blocks, inputs)

    def run_empty(self, inputs: StepInputBuilder, common: CommonStep | None) -> None:
        """See Forward."""
        self._eager.run_empty(inputs, common)

    def _record(self, num_rows: int, inputs: StepInputBuilder) -> Recording | None:
        """Compute the step that is prepared, and note how."""
        view = inputs.view(num_rows, num_rows, 1)
        try:
            return Recording(self._library, self._memory, lambda: self._eager.compute(view))
        except CannotRecordError as error:
            _log.info("steps of %d tokens run one operation after another: %s", num_rows, error)
            return None
