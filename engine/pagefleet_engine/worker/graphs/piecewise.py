"""A forward pass captured in pieces: capture stops where attention is asked for and goes on with its result.

    graph 0 | attend layer 0 | graph 1 | attend layer 1 | ... | graph L

The model knows nothing of it: it is given an `AttentionStep` that breaks the capture. Keys and values are written
within the graphs, at addresses that never change. Shapes: T tokens, N query heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, AttentionStep, Pages
from pagefleet_engine.worker.graphs.capture import DeviceGraph, DeviceGraphs


class BreakBuffers:
    """Fixed tensors through which queries leave a graph and results enter the next.

    One per kind of head serves all layers and all graphs: a result takes the place of the queries that it answers.
    Were each graph to keep its own queries, a model of 36 layers would hold gigabytes of them.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._buffers: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def reserve(self, num_tokens: int, heads: int, head_dim: int, like: Tensor) -> Tensor:
        """[T, N, H] of the buffer for such heads, in the type and on the device of `like`; makes it when it is first
        asked for (not within a capture)."""
        key = (heads, head_dim, like.dtype)
        if key not in self._buffers:
            self._buffers[key] = like.new_zeros(self._max_tokens, heads, head_dim)
        assert num_tokens <= self._max_tokens, "the step is larger than the largest graph"
        return self._buffers[key][:num_tokens]


@dataclass(frozen=True, slots=True)
class Break:
    """One attention between two graphs."""

    spec: AttentionSpec
    q_TNH: Tensor
    out_TNH: Tensor
    """Takes the result: the queries' own memory, where values are as large."""

    def attend(self, step: AttentionStep, num_tokens: int) -> None:
        """Attend the first `num_tokens`; the rest is padding, made zero lest stale numbers reach a shared scale."""
        self.out_TNH[:num_tokens].copy_(step.attend(self.spec, self.q_TNH[:num_tokens]))
        if num_tokens < len(self.out_TNH):
            self.out_TNH[num_tokens:].zero_()


class BreakingStep:
    """Implements `AttentionStep`: writes as part of the graph, attends outside of it."""

    def __init__(
        self,
        writer: AttentionStep,
        reader: AttentionStep,
        buffers: BreakBuffers,
        suspended: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`writer` was begun within the capture, `reader` outside; `suspended()`: no capture while within."""
        self._writer, self._reader = writer, reader
        self._buffers = buffers
        self._suspended = suspended
        self.breaks: list[Break] = []

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See AttentionStep."""
        self._writer.write(spec, k_TKH, v_TKH)

    def pages(self, spec: AttentionSpec) -> Pages:
        """See AttentionStep."""
        return self._writer.pages(spec)

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See AttentionStep; the result's memory is taken back by the next call."""
        num_tokens, num_heads, head_dim = q_TNH.shape
        kept_TNH = self._buffers.reserve(num_tokens, num_heads, head_dim, q_TNH)
        kept_TNH.copy_(q_TNH)
        value_dim = head_dim if spec.latent is None else spec.latent.value_dim
        out_TNH = kept_TNH
        if value_dim != head_dim:
            out_TNH = self._buffers.reserve(num_tokens, num_heads, value_dim, q_TNH)
        found = Break(spec, kept_TNH, out_TNH)
        with self._suspended():
            found.attend(self._reader, num_tokens)
        self.breaks.append(found)
        return out_TNH


@dataclass(slots=True)
class PiecewiseGraph:
    """The pieces of one forward pass, in order: a graph before, between and after the breaks."""

    graphs: list[DeviceGraph] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)

    def replay(self, step: AttentionStep, num_tokens: int) -> None:
        """Run the pass with this step's attention over its first `num_tokens` tokens."""
        for graph, found in zip(self.graphs, self.breaks, strict=False):
            graph.replay()
            found.attend(step, num_tokens)
        self.graphs[-1].replay()


def capture_piecewise(
    graphs: DeviceGraphs,
    begin: Callable[[], AttentionStep],
    run: Callable[[AttentionStep], None],
    buffers: BreakBuffers,
) -> PiecewiseGraph:
    """Capture what `run` does with a step; `begin` makes one of the backend's. Both are called once or twice.

    `buffers` must have served `run` before, in a pass without capture.
    """
    found = PiecewiseGraph()

    @contextmanager
    def suspended() -> Iterator[None]:
        found.graphs.append(graphs.end())
        yield
        graphs.begin()

    reader = begin()
    graphs.begin()
    step = BreakingStep(begin(), reader, buffers, suspended)
    run(step)
    found.graphs.append(graphs.end())
    found.breaks = step.breaks
    return found
