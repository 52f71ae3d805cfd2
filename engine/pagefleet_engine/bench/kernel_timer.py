"""How long a kernel takes, without what its launch costs the host: on a GPU many calls are replayed as one graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from pagefleet_engine.bench.roofline import median_seconds

_CALLS = 10
_REPLAYS = 5


def kernel_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call that needs nothing of the host."""
    if device.type != "cuda":
        return median_seconds(run, device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            run()
    times = [median_seconds(graph.replay, device, repeats=1) for _ in range(_REPLAYS)]
    return statistics.median(times) / _CALLS
