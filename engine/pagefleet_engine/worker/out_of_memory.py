"""A device that is full at start: which part did not fit, and the flag that helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from pagefleet_engine.errors import ConfigError

Stage = Literal["weights", "profile", "graphs", "kv_pool", "warm_up"]

_SAID: dict[Stage, tuple[str, str]] = {
    "weights": (
        "while weights were loaded",
        "give --quantization fp8, a smaller model, or end what else uses the device",
    ),
    "profile": (
        "while the largest step was measured",
        "lower --max-num-batched-tokens or --max-num-seqs",
    ),
    "graphs": (
        "while CUDA graphs were captured",
        "give fewer --cuda-graph-sizes, --cuda-graphs none, or a lower --gpu-memory-utilization",
    ),
    "kv_pool": (
        "while the KV cache was allocated",
        "lower --gpu-memory-utilization, --kv-cache-memory, --num-kv-blocks or --max-num-seqs",
    ),
    "warm_up": (
        "in the first step",
        "lower --gpu-memory-utilization or --max-num-batched-tokens",
    ),
}


@contextmanager
def naming_the_remedy(stage: Stage) -> Iterator[None]:
    """Turn a device's lack of memory inside into a ConfigError of one line.

    Raises:
        ConfigError: the device has no room for what is done in this stage.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        when, remedy = _SAID[stage]
        raise ConfigError(f"the device ran out of memory {when}: {remedy}") from error
