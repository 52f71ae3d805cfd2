"""The forward pass, as a graph where there is one for the step's sizes and kernel by kernel where there is none.

Shapes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pagefleet_engine.attention.backend import AttentionBackend, AttentionStep
from pagefleet_engine.core.step import CommonStep
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.worker.forward import CausalModel, EagerForward, StepShape
from pagefleet_engine.worker.graphs.capture import DeviceGraph, DeviceGraphs
from pagefleet_engine.worker.graphs.dispatcher import BatchDescriptor, GraphDispatcher, GraphKey
from pagefleet_engine.worker.graphs.modes import GraphMode
from pagefleet_engine.worker.graphs.piecewise import (
    BreakBuffers,
    BreakingStep,
    PiecewiseGraph,
    capture_piecewise,
)
from pagefleet_engine.worker.out_of_memory import naming_the_remedy
from pagefleet_engine.worker.step_inputs import StepInputBuilder, StepInputs, StepRows


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What capturing gave and took."""

    count: int
    seconds: float
    memory: int
    """Bytes of the device."""

    def describe(self) -> str:
        """For the log."""
        return f"captured {self.count} CUDA graphs in {self.seconds:.1f} s: {self.memory / 2**20:.0f} MiB"


class GraphForward:
    """Implements `Forward`. Everything here is called within `torch.inference_mode()`."""

    def __init__(
        self,
        model: CausalModel,
        backend: AttentionBackend,
        dispatcher: GraphDispatcher,
        graphs: DeviceGraphs,
        excerpt: CausalModel | None = None,
    ) -> None:
        """Until `capture`, and for what it did not capture, steps run without graphs.

        `excerpt`: launches all kernels of `model`, see `Model.excerpt`; by default the model itself.
        """
        self._model = model
        self._excerpt = model if excerpt is None else excerpt
        self._backend = backend
        self._eager, self._brief = EagerForward(model, backend), EagerForward(self._excerpt, backend)
        self._dispatcher = dispatcher
        self._graphs = graphs
        largest = max((key.num_tokens for _, key in dispatcher.keys), default=0)
        self._hidden = _HiddenBuffer(largest)
        self._breaks = BreakBuffers(largest)
        self._full: dict[BatchDescriptor, DeviceGraph] = {}
        self._pieces: dict[BatchDescriptor, PiecewiseGraph] = {}

    @property
    def keys(self) -> Sequence[GraphKey]:
        """Every graph there is to capture, largest first."""
        return self._dispatcher.keys

    def capture(
        self,
        inputs: StepInputBuilder,
        keys: Sequence[GraphKey] | None = None,
        count: Callable[[int, int], None] | None = None,
    ) -> CaptureReport:
        """Capture the graphs of these keys, or of all, over these buffers; what they held is lost.

        `count` is called with how many are captured, and how many there are.

        Raises:
            ConfigError: the device's memory does not suffice, or the pass cannot be captured; names the flag to give.
        """
        graphs, keys = self._graphs, self.keys if keys is None else keys
        started, used = time.monotonic(), graphs.memory_used()
        inputs.clear()  # capturing runs the model: it must not write to anybody's pages
        with graphs.session(), _explained(graphs):
            for number, (mode, key) in enumerate(keys, 1):
                view = inputs.view(key.rows_for(1), key.num_tokens, key.max_query_len)
                if mode is GraphMode.FULL:
                    self._full[key] = self._capture_full(view)
                else:
                    self._pieces[key] = self._capture_pieces(view)
                if count is not None:
                    count(number, len(keys))
        return CaptureReport(len(keys), time.monotonic() - started, graphs.memory_used() - used)

    def discard(self) -> None:
        """Let all graphs go."""
        self._full.clear()
        self._pieces.clear()

    def shape(self, rows: StepRows, num_common_blocks: int) -> StepShape:
        """See Forward."""
        _, key = self._dispatch(rows, num_common_blocks)
        return StepShape(key.rows_for(len(rows.slots_S)), key.num_tokens)

    def run(self, rows: StepRows, num_common_blocks: int, inputs: StepInputBuilder) -> Tensor:
        """See Forward."""
        mode, key = self._dispatch(rows, num_common_blocks)
        num_tokens = rows.num_tokens
        match mode:
            case GraphMode.FULL:
                self._full[key].replay()
            case GraphMode.PIECEWISE:
                step = self._backend.begin(inputs.inputs(rows, num_common_blocks).geometry)
                self._pieces[key].replay(step, num_tokens)
            case _:
                return self._eager.run(rows, num_common_blocks, inputs)
        return self._hidden.first(num_tokens)

    def run_empty(self, inputs: StepInputBuilder, common: CommonStep | None) -> None:
        """See Forward. A graph of tokens that are all padding."""
        found = None if common is None else self._captured(*self._dispatcher.dispatch_common(common))
        if found is None:
            self._eager.run_empty(inputs, common)
            return
        inputs.clear()
        mode, key = found
        if mode is GraphMode.FULL:
            self._full[key].replay()
        else:
            self._pieces[key].replay(self._backend.begin(inputs.view(1, 1, 1).geometry), 1)

    def _dispatch(self, rows: StepRows, num_common_blocks: int) -> GraphKey:
        num_tokens, num_rows, longest = rows.num_tokens, len(rows.slots_S), rows.max_query_len
        if rows.common is None:
            found = self._dispatcher.dispatch(num_tokens, num_rows, longest, num_common_blocks > 0)
        else:
            found = self._dispatcher.dispatch_common(rows.common)
        uniform = longest == 1 and num_tokens == num_rows
        return self._captured(*found) or (GraphMode.NONE, BatchDescriptor(num_tokens, num_rows, uniform))

    def _captured(self, mode: GraphMode, key: BatchDescriptor) -> GraphKey | None:
        return (mode, key) if key in self._full or key in self._pieces else None

    def _capture_full(self, view: StepInputs) -> DeviceGraph:
        # Libraries and kernels load what they need for these shapes, which a capture forbids.
        self._hidden.keep(self._brief.compute(view))
        self._graphs.begin()
        self._hidden.keep(self._eager.compute(view))
        return self._graphs.end()

    def _capture_pieces(self, view: StepInputs) -> PiecewiseGraph:
        def begin() -> AttentionStep:
            return self._backend.begin(view.geometry)

        def run(model: CausalModel, step: AttentionStep) -> None:
            self._hidden.keep(model.forward(view.entering, view.positions_T, step))

        run(self._excerpt, BreakingStep(begin(), begin(), self._breaks, nullcontext))
        return capture_piecewise(self._graphs, begin, partial(run, self._model), self._breaks)


class _HiddenBuffer:
    """Where every graph leaves its result, so that none of them has to keep one of its own."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._hidden_TD: Tensor | None = None

    def keep(self, hidden_TD: Tensor) -> None:
        if self._hidden_TD is None:  # in the pass that warms up for the first capture
            self._hidden_TD = hidden_TD.new_zeros(self._max_tokens, hidden_TD.shape[1])
        self._hidden_TD[: len(hidden_TD)].copy_(hidden_TD)

    def first(self, num_tokens: int) -> Tensor:
        assert self._hidden_TD is not None, "nothing was captured"
        return self._hidden_TD[:num_tokens]


@contextmanager
def _explained(graphs: DeviceGraphs) -> Iterator[None]:
    """Say what to do when a capture fails, and leave none open."""
    try:
        with naming_the_remedy("graphs"):
            yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        remedy = "install gcc and Python's headers" if "compiler" in reason else "start with --cuda-graphs none"
        raise ConfigError(f"CUDA graphs cannot be captured here ({reason}): {remedy}") from error
    finally:
        graphs.abandon()
