"""The forward pass, as a graph where there is one for the step's sizes and kernel by kernel where there is none.

Shapes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionBackend, AttentionStep
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.worker.graphs.capture import DeviceGraph, DeviceGraphs
from pagefleet_engine.worker.graphs.descriptor import BatchDescriptor
from pagefleet_engine.worker.graphs.dispatcher import GraphKey
from pagefleet_engine.worker.graphs.modes import GraphMode
from pagefleet_engine.worker.graphs.piecewise import (
    BreakBuffers,
    BreakingStep,
    PiecewiseGraph,
    capture_piecewise,
    uncut,
)
from pagefleet_engine.worker.step_inputs import StepInputs

_ADVICE = "give fewer or smaller --cuda-graph-sizes, lower --gpu-memory-utilization, or start with --cuda-graphs none"


class ForwardModel(Protocol):
    """The part of a model that makes hidden states."""

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        """Hidden states [T, D]."""
        ...


class InputViews(Protocol):
    """The buffers that every step's inputs are written to."""

    def view(self, num_rows: int, num_tokens: int, max_query_len: int) -> StepInputs:
        """Their first rows and tokens, for any batch of these sizes: no lengths on the host."""
        ...


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
    """Runs a model's forward pass. Everything here is called within `torch.inference_mode()`."""

    def __init__(
        self,
        model: ForwardModel,
        backend: AttentionBackend,
        inputs: InputViews,
        keys: Sequence[GraphKey],
        graphs: DeviceGraphs | None,
    ) -> None:
        """`keys`: what `capture` captures, largest first; `graphs`: None where the device has none."""
        assert graphs is not None or not keys, "captures need a device with graphs"
        self._model = model
        self._backend = backend
        self._inputs = inputs
        self._keys = keys
        self._graphs = graphs
        largest = max((key.num_tokens for _, key in keys), default=0)
        self._hidden = _HiddenBuffer(largest)
        self._breaks = BreakBuffers(largest)
        self._full: dict[BatchDescriptor, DeviceGraph] = {}
        self._pieces: dict[BatchDescriptor, PiecewiseGraph] = {}

    def capture(self) -> CaptureReport:
        """Capture every key's graph. The input buffers hold nothing but padding meanwhile (no token has a slot).

        Raises:
            ConfigError: the device's memory does not suffice, or the pass cannot be captured; names the flag to give.
        """
        return self.capture_keys(self._keys)

    def capture_keys(self, keys: Sequence[GraphKey]) -> CaptureReport:
        """As `capture`, only these keys."""
        graphs = self._graphs
        if graphs is None or not keys:
            return CaptureReport(0, 0.0, 0)
        started, used = time.monotonic(), graphs.memory_used()
        with graphs.session(), _explained(graphs):
            for mode, key in keys:
                if mode is GraphMode.FULL:
                    self._capture_full(graphs, key)
                else:
                    self._capture_pieces(graphs, key)
        return CaptureReport(len(keys), time.monotonic() - started, graphs.memory_used() - used)

    def discard(self) -> None:
        """Let all graphs go."""
        self._full.clear()
        self._pieces.clear()

    def forward(self, mode: GraphMode, key: BatchDescriptor, inputs: StepInputs, num_tokens: int) -> Tensor:
        """Hidden states [num_tokens, D] of a step that the dispatcher gave `mode` and `key`.

        The buffers hold the step, padded to the sizes of `key`. `inputs` is the step's own: its geometry has the real
        rows; a full graph does not look at it. The result of a graph is good until the next call.
        """
        match mode:
            case GraphMode.FULL:
                self._full[key].replay()
            case GraphMode.PIECEWISE:
                self._pieces[key].replay(self._backend.begin(inputs.geometry), num_tokens)
            case _:
                return self._run(inputs, self._backend.begin(inputs.geometry))
        return self._hidden.first(num_tokens)

    def _capture_full(self, graphs: DeviceGraphs, key: BatchDescriptor) -> None:
        inputs = self._view(key)

        def run() -> None:
            self._hidden.keep(self._run(inputs, self._backend.begin(inputs.geometry)))

        run()  # libraries and kernels load what they need for these shapes, which a capture forbids
        graphs.begin()
        run()
        self._full[key] = graphs.end()

    def _capture_pieces(self, graphs: DeviceGraphs, key: BatchDescriptor) -> None:
        inputs = self._view(key)

        def begin() -> AttentionStep:
            return self._backend.begin(inputs.geometry)

        def run(step: AttentionStep) -> None:
            self._hidden.keep(self._run(inputs, step))

        run(BreakingStep(begin(), begin(), self._breaks, uncut))
        self._pieces[key] = capture_piecewise(graphs, begin, run, self._breaks)

    def _view(self, key: BatchDescriptor) -> StepInputs:
        return self._inputs.view(key.rows_for(1), key.num_tokens, key.max_query_len)

    def _run(self, inputs: StepInputs, step: AttentionStep) -> Tensor:
        return self._model.forward(inputs.token_ids_T, inputs.positions_T, step)


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
    """Say what to do when a capture fails."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        graphs.abandon()
        raise ConfigError(f"the device ran out of memory while CUDA graphs were captured: {_ADVICE}") from error
    except RuntimeError as error:
        graphs.abandon()
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"CUDA graphs cannot be captured here ({reason}): start with --cuda-graphs none") from error
