"""One router's /metrics page, as far as scaling depends on it.

Routers are not trusted: what cannot be read is left out, and every number that remains is such that no sum, product or
quotient of them is infinite.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagefleet_protocol import metric_names as names


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by their upper bounds, cumulative as Prometheus has them."""

    bounds: tuple[float, ...] = ()
    """Seconds, rising; the last one is infinite."""
    counts: tuple[float, ...] = ()
    """Observations of at most each bound."""
    seconds: float = 0.0
    """Sum of all observations."""

    @property
    def total(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        """Mean in seconds; None without observations."""
        return self.seconds / self.total if self.total > 0 else None

    def since(self, before: Histogram) -> Histogram:
        """Return what was observed after `before`; all of it where the process counts from the start again."""
        restarted = self.bounds != before.bounds or any(
            now < then for now, then in zip(self.counts, before.counts, strict=True)
        )
        if restarted:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Histogram(self.bounds, counts, max(0.0, self.seconds - before.seconds))

    def plus(self, other: Histogram) -> Histogram:
        """Return both together. Of two versions with other bounds, the one that has seen more speaks for both."""
        if self.bounds == other.bounds:
            counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
            return Histogram(self.bounds, counts, self.seconds + other.seconds)
        return self if self.total >= other.total else other

    def share_within(self, seconds: float) -> float | None:
        """Return the share of observations of at most `seconds`, 0 to 1; None without observations."""
        if self.total <= 0:
            return None
        lower, below = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if seconds < bound:
                # Evenly spread within a bucket; of the last one, which has no end, nothing is within.
                part = (seconds - lower) / (bound - lower) if bound != float("inf") else 0.0
                return (below + (count - below) * max(0.0, part)) / self.total
            lower, below = bound, count
        return 1.0

    def quantile(self, share: float) -> float | None:
        """Return seconds that `share` of the observations do not exceed; None without observations."""
        if self.total <= 0:
            return None
        wanted, lower, below = share * self.total, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= wanted:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * ((wanted - below) / (count - below) if count > below else 1.0)
            lower, below = bound, count
        return lower


_SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*",?)*)\})? ([^ ]+)')
_BOUND = re.compile(r'(?:^|,)le="([^"]+)"')
_PREFIX = "pagefleet_router_"
_FOREVER = float("inf")
_MOST = 1e15
"""No fleet counts so far."""
_LEAST_RATE = 1e-3
"""Tokens per second; what is slower was not learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMoment:
    """What is so now, by the word of one router or of all."""

    held: float = 0.0
    queued: float = 0.0
    queued_tokens: float = 0.0
    """Prompt tokens of the held and the queued."""
    prefill_tokens: float = 0.0
    """Uncached prompt tokens at the engines whose answer has not begun."""
    engines: float = 0.0
    """That the fleet's figures stand for."""
    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    """Mean share of the engines' KV cache in use, 0 to 1."""
    prefill_rate: float | None = None
    """Uncached prompt tokens per second and engine; None: not learned yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReading(FleetMoment):
    """What one router says at one moment, summed over the names that its models go by."""

    arrivals: float = 0.0
    """Requests since the router started."""
    prompt_tokens: float | None = None
    """Uncached prompt tokens that were sent to engines since the router started; None: it does not count them."""
    generated: float = 0.0
    """Tokens that the fleet's engines generated since they started."""
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)


def read_router_page(page: bytes) -> RouterReading | None:
    """Return what a page in Prometheus' text format says; None: it is not a router's, or an older one's."""
    values: dict[str, list[float]] = defaultdict(list)
    bounds: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for line in page.decode(errors="replace").splitlines():
        found = _SAMPLE.match(line) if line.startswith(_PREFIX) else None
        value = count_of(found[3]) if found else None
        if found is None or value is None:
            continue
        name, labels = found[1], found[2] or ""
        if name.endswith("_bucket"):
            bound = _BOUND.search(labels)
            limit = _bound(bound[1]) if bound else None
            if limit is not None:
                bounds[name.removesuffix("_bucket")][limit] += value
        else:
            values[name].append(value)
    if names.ROUTER_ARRIVALS not in values and names.ROUTER_FLEET_ENGINES not in values:
        return None
    return _reading(values, bounds)


def _reading(values: Mapping[str, list[float]], bounds: Mapping[str, Mapping[float, float]]) -> RouterReading:
    def total(name: str) -> float:
        return sum(values.get(name, ()))

    def learned(name: str) -> float | None:
        known = [value for value in values.get(name, ()) if value >= _LEAST_RATE]
        return sum(known) / len(known) if known else None

    def histogram(name: str) -> Histogram:
        found = sorted(bounds.get(name, {}).items())
        if not found or found[-1][0] != _FOREVER:
            return Histogram()
        rising, most = [], 0.0
        for _, count in found:
            most = max(most, count)
            rising.append(most)
        return Histogram(tuple(bound for bound, _ in found), tuple(rising), total(f"{name}_sum"))

    return RouterReading(
        arrivals=total(names.ROUTER_ARRIVALS),
        prompt_tokens=total(names.ROUTER_PROMPT_TOKENS) if names.ROUTER_PROMPT_TOKENS in values else None,
        generated=total(names.ROUTER_FLEET_GENERATED_TOKENS),
        held=total(names.ROUTER_HELD),
        queued=total(names.ROUTER_QUEUED),
        queued_tokens=total(names.ROUTER_QUEUED_TOKENS),
        prefill_tokens=total(names.ROUTER_PREFILL_TOKENS),
        engines=total(names.ROUTER_FLEET_ENGINES),
        running=total(names.ROUTER_FLEET_REQUESTS_RUNNING),
        waiting=total(names.ROUTER_FLEET_REQUESTS_WAITING),
        kv_usage=min(1.0, total(names.ROUTER_FLEET_KV_USAGE_RATIO)),
        prefill_rate=learned(names.ROUTER_PREFILL_RATE),
        first_token=histogram(names.ROUTER_FIRST_TOKEN_SECONDS),
        between_tokens=histogram(names.ROUTER_TOKEN_SECONDS),
    )


def count_of(text: str) -> float | None:
    """Return the value of a sample; None: it is none that a router gives."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= _MOST else None


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return bound if bound > 0 else None
