"""How much memory graphs will take, before the KV cache is given the rest."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_engine.worker.graphs.dispatcher import GraphKey
from pagefleet_engine.worker.graphs.graph_forward import GraphForward
from pagefleet_engine.worker.graphs.modes import GraphMode


def estimate_graph_bytes(forward: GraphForward, keys: Sequence[GraphKey]) -> int:
    """Bytes of the device that capturing all `keys` (largest first) will take.

    The largest graph of each mode and the one after it are captured and let go. All graphs share one pool, which the
    first fills: each of the others takes about what the second does, mostly the driver's own memory for its nodes.
    Needs `forward` to work, with a KV pool of any size, its buffers holding padding.

    Raises:
        ConfigError: as `GraphForward.capture`.
    """
    total = 0
    for mode in (GraphMode.PIECEWISE, GraphMode.FULL):
        of_mode = [key for key in keys if key[0] is mode]
        first = forward.capture_keys(of_mode[:1]).memory
        second = forward.capture_keys(of_mode[1:2]).memory
        total += max(first, 0) + max(second, 0) * max(len(of_mode) - 1, 0)
    forward.discard()
    return total
