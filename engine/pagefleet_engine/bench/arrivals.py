"""When requests arrive: independently at a rate, burstier or steadier than that, or all at once."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start, rising.

    Gaps are gamma distributed with mean 1 / rate and shape `burstiness`: 1 is a Poisson process, less is burstier,
    more is steadier. An infinite rate sends everything at 0.
    """
    generator = random.Random(seed)  # noqa: S311 nothing is kept secret
    now = 0.0
    for _ in range(num_requests):
        yield now
        if not math.isinf(rate):
            now += generator.gammavariate(burstiness, 1.0 / (rate * burstiness))
