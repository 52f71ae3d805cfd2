"""How long a kernel takes, without what its launch costs the host: a GPU is kept busy until all calls are queued."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from pagefleet_engine.bench.roofline import event_seconds, median_seconds

_CALLS = 10
_REPEATS = 5
_PAUSE_CYCLES = 20_000_000  # some ten milliseconds, in which the host queues the calls


def kernel_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call; one that waits for the device is charged for that."""
    if device.type != "cuda":
        return median_seconds(run, device)

    def calls() -> None:
        for _ in range(_CALLS):
            run()

    calls()
    times = []
    for _ in range(_REPEATS):
        torch.cuda._sleep(_PAUSE_CYCLES)  # type: ignore[no-untyped-call]
        times.append(event_seconds(calls))
    return statistics.median(times) / _CALLS


def device_errors(device: torch.device) -> tuple[type[Exception], ...]:
    """What a kernel raises that this GPU cannot run; nothing on a CPU, where all of them run."""
    if device.type != "cuda":
        return ()
    from triton.errors import TritonError  # noqa: PLC0415 absent where there is no GPU

    return (RuntimeError, TritonError)
