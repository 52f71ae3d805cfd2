"""The seed of a request: its own, or one that follows from the engine's. What it seeds: the kernels' noise."""

from __future__ import annotations

import numpy as np
from pagefleet_kernels.sampling_noise import mix64


def request_seed(seed: int | None, engine_seed: int, counter: int) -> int:
    """The 64-bit seed of one request: its own, else one derived from the engine's seed and a running number."""
    if seed is not None:
        return seed % 2**64
    pair = np.array([engine_seed % 2**64, counter], dtype=np.uint64)
    mixed = mix64(pair)
    return int(mix64(mixed[:1] ^ (mixed[1:] << np.uint64(1)))[0])
