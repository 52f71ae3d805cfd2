"""What an engine's metrics say: the few figures that matter, and what the fleet has generated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pagefleet_protocol import metric_names
from pagefleet_protocol.exposition import metric_mark, sample_values

from pagefleet_router.engines.rates import TransferFigures

_NAMES = (
    metric_names.ENGINE_REQUESTS_RUNNING,
    metric_names.ENGINE_REQUESTS_WAITING,
    metric_names.ENGINE_KV_USAGE_RATIO,
    metric_names.ENGINE_GENERATION_TOKENS,
    metric_names.ENGINE_KV_RECEIVED_BYTES,
    metric_names.ENGINE_KV_EXPOSED_SECONDS,
    metric_names.ENGINE_KV_HIDDEN_SECONDS,
)
_MARKS = tuple(map(metric_mark, _NAMES))


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What one engine says of itself, summed over its series (KV usage: the largest)."""

    num_running: float
    num_waiting: float
    kv_usage: float
    num_generated: float | None
    """Tokens since it started; None where it does not count them."""
    transfer: TransferFigures | None = None
    """None: it takes no K/V from others."""


def parse_figures(text: bytes) -> EngineFigures | None:
    """Return the figures; None when a gauge is missing or a value is no finite number from 0 up."""
    text = b"\n" + text
    try:
        found = [list(map(float, sample_values(text, mark))) for mark in _MARKS]
    except ValueError:
        return None
    if not all(math.isfinite(number) and number >= 0 for numbers in found for number in numbers):
        return None
    running, waiting, usage, generated, *kv = found
    if not running or not waiting or not usage:
        return None
    return EngineFigures(
        sum(running),
        sum(waiting),
        max(usage),
        sum(generated) if generated else None,
        TransferFigures(*map(sum, kv)) if all(kv) else None,
    )


class GeneratedTokens:
    """Adds up what the engines' own counters grew by while this router looked.

    An engine that is seen for the first time adds nothing: what it did before is not known to be new.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._last: dict[str, float] = {}

    def observe(self, engine_id: str, count: float) -> None:
        """Note an engine's counter. A lower value than before: it restarted, and has generated that many since."""
        last = self._last.get(engine_id, count)
        self.total += count - last if count >= last else count
        self._last[engine_id] = count

    def forget(self, engine_ids: Iterable[str]) -> None:
        """Drop engines that left the list; what they generated stays counted."""
        for engine_id in engine_ids:
            self._last.pop(engine_id, None)
