"""The three gauges that matter, cut out of a Prometheus text without parsing the rest."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pagefleet_protocol import metric_names

_NAMES = (
    metric_names.ENGINE_REQUESTS_RUNNING,
    metric_names.ENGINE_REQUESTS_WAITING,
    metric_names.ENGINE_KV_USAGE_RATIO,
)
_SAMPLE = re.compile(
    rb"^(" + b"|".join(name.encode() for name in _NAMES) + rb")(?:\{[^\n]*\})? +(\S+)(?: +-?\d+)?[ \r]*$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Gauges:
    """Running, waiting and KV usage, summed over an engine's series (KV usage: the largest)."""

    num_running: float
    num_waiting: float
    kv_usage: float


def parse_gauges(text: bytes) -> Gauges | None:
    """Return the gauges; None when one is missing or no finite number from 0 up."""
    found: dict[bytes, list[float]] = {name.encode(): [] for name in _NAMES}
    for name, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            return None
        if not math.isfinite(number) or number < 0:
            return None
        found[name].append(number)
    running, waiting, usage = found.values()
    if not running or not waiting or not usage:
        return None
    return Gauges(sum(running), sum(waiting), max(usage))
