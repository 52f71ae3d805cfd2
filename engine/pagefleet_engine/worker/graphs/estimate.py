"""How much memory graphs will take, before the KV cache is given the rest."""

from __future__ import annotations

from pagefleet_engine.worker.graphs.graph_forward import GraphForward
from pagefleet_engine.worker.graphs.modes import GraphMode
from pagefleet_engine.worker.step_inputs import StepInputBuilder


def estimate_graph_bytes(forward: GraphForward, inputs: StepInputBuilder) -> int:
    """Bytes of the device that `forward.capture(inputs)` will take.

    The largest graph of each mode and the one after it are captured and let go. All graphs share one pool, which the
    first fills: each of the others takes about what the second does, mostly the driver's own memory for its nodes.
    The KV pool may be of any size: what a graph does with it needs no memory.

    Raises:
        ConfigError: as `GraphForward.capture`.
    """
    total = 0
    for mode in (GraphMode.PIECEWISE, GraphMode.FULL):
        keys = [key for key in forward.keys if key[0] is mode]
        first = forward.capture(inputs, keys[:1]).memory
        second = forward.capture(inputs, keys[1:2]).memory
        total += max(first, 0) + max(second, 0) * max(len(keys) - 1, 0)
    forward.discard()
    return total
