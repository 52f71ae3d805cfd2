"""What all routers of a service say together, now and over the last minute.

Each router counts its own requests, so those add up; what they learned of engines is averaged; of the fleet's figures,
which every router sees alike, the freshest word counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pagefleet_operator.autoscale.router_page import FleetMoment, Histogram, RouterReading
from pagefleet_operator.plan.pair_ratio import PairLoad

STALE_S = 10.0
"""A router that has said nothing for so long is missing."""
ARRIVALS_S = 5.0
"""Nobody asks where no request came for so long: some readings, and little beside any scaleToZero.after."""
SHORT_S = 30.0
"""Of flows that a change must show in before an engine has started because of it; single prompts must not."""
LONG_S = 60.0
"""Of latencies, and of flows that only a lasting change shows in."""
_DENSE_S = 36.0
_SPARSE_S = 8.0
"""Readings older than _DENSE_S are kept so far apart: they are many, and only differences count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSignals(FleetMoment):
    """Everything that a decision depends on, apart from the engines that exist."""

    routers: int = 0
    """That should speak."""
    fresh: int = 0
    """That spoke of late."""
    age_s: float = float("inf")
    """Of the oldest word that counts; infinite where a router has never spoken."""
    arrivals: float = 0.0
    """Requests within ARRIVALS_S."""
    prompt_tokens_per_s: float | None = None
    """Uncached prompt tokens sent to engines, over SHORT_S; None: no router counts them."""
    generated_per_s: float = 0.0
    """Over SHORT_S."""
    tokens_per_prompt: float = 0.0
    """Uncached, mean over LONG_S; 0: nothing arrived."""
    first_token: Histogram = field(default_factory=Histogram)
    """Over LONG_S."""
    between_tokens: Histogram = field(default_factory=Histogram)
    """Over LONG_S."""

    @property
    def complete(self) -> bool:
        """Whether every router spoke of late, and there is one."""
        return self.routers > 0 and self.fresh == self.routers

    @property
    def work(self) -> float:
        """Requests that somebody waits for an answer to."""
        return self.held + self.queued + self.running + self.waiting

    @property
    def seconds_between_tokens(self) -> float | None:
        """Mean time between two tokens of a request now; None: hardly any are generated."""
        return self.running / self.generated_per_s if self.running >= 1 and self.generated_per_s >= 1 else None

    def of_whole(self, endpoints: int) -> FleetSignals:
        """Return the same by engines that have so many endpoints each, where routers count these."""
        rate = None if self.prefill_rate is None else self.prefill_rate * endpoints
        return replace(self, engines=self.engines / endpoints, prefill_rate=rate)

    @property
    def idle(self) -> bool:
        """Whether nobody asks: nothing arrived, and nothing is under way."""
        return self.arrivals == 0 and self.work == 0 and self.queued_tokens == 0 and self.prefill_tokens == 0


@dataclass(frozen=True, slots=True)
class _Read:
    at: float
    reading: RouterReading


class FleetWindow:
    """Keeps a minute of readings of each router. Times are monotonic seconds of one clock."""

    def __init__(self) -> None:
        self._routers: dict[str, deque[_Read]] = {}

    def add(self, router: str, reading: RouterReading, at: float) -> None:
        """Take in what a router said at `at`, which is not before the time before."""
        reads = self._routers.setdefault(router, deque())
        # Of the older ones, those that stand too close to the one before them go.
        for place in range(len(reads) - 2, 0, -1):
            if at - reads[place].at > _DENSE_S:
                if reads[place].at - reads[place - 1].at < _SPARSE_S:
                    del reads[place]
                break
        reads.append(_Read(at, reading))
        while len(reads) > 2 and at - reads[1].at > LONG_S:
            reads.popleft()

    def heard(self, router: str) -> bool:
        return router in self._routers

    def signals(self, routers: Collection[str], now: float) -> FleetSignals:
        """Return what the routers say together; what others said is forgotten.

        Args:
            routers: that should speak, by name.
        """
        for gone in self._routers.keys() - set(routers):
            del self._routers[gone]
        ages = [now - self._routers[name][-1].at if name in self._routers else float("inf") for name in routers]
        fresh = [reads for reads in self._routers.values() if now - reads[-1].at <= STALE_S]
        if not fresh:
            return FleetSignals(routers=len(routers), age_s=max(ages, default=float("inf")))
        return _together(fresh, len(routers), max(ages))


def _together(fresh: Collection[deque[_Read]], routers: int, age_s: float) -> FleetSignals:
    newest = [reads[-1].reading for reads in fresh]
    # One router's word for what all see: the one that spoke last.
    fleet = max(fresh, key=lambda reads: reads[-1].at)
    counted = [reads for reads in fresh if reads[-1].reading.prompt_tokens is not None]
    prompt_tokens = _sum_flow(counted, lambda one: one.prompt_tokens or 0.0, LONG_S)
    arrivals = _sum_flow(counted, lambda one: one.arrivals, LONG_S)
    return FleetSignals(
        routers=routers,
        fresh=len(fresh),
        age_s=age_s,
        arrivals=sum(_grown(reads, lambda one: one.arrivals, ARRIVALS_S)[0] for reads in fresh),
        held=sum(one.held for one in newest),
        queued=sum(one.queued for one in newest),
        queued_tokens=sum(one.queued_tokens for one in newest),
        prefill_tokens=sum(one.prefill_tokens for one in newest),
        prompt_tokens_per_s=_sum_flow(counted, lambda one: one.prompt_tokens or 0.0, SHORT_S) if counted else None,
        generated_per_s=_flow(fleet, lambda one: one.generated, SHORT_S),
        tokens_per_prompt=prompt_tokens / arrivals if arrivals > 0 else 0.0,
        engines=fleet[-1].reading.engines,
        running=fleet[-1].reading.running,
        waiting=fleet[-1].reading.waiting,
        kv_usage=fleet[-1].reading.kv_usage,
        prefill_rate=_mean(one.prefill_rate for one in newest),
        first_token=_observed(fresh, lambda one: one.first_token),
        between_tokens=_observed(fresh, lambda one: one.between_tokens),
    )


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _pairs(reads: Collection[_Read], window_s: float) -> Iterator[tuple[_Read, _Read]]:
    """Yield neighbouring readings of the last `window_s` seconds, and the pair that reaches beyond."""
    newest = max(read.at for read in reads)
    return ((before, after) for before, after in pairwise(reads) if after.at > newest - window_s)


def _flow(reads: Collection[_Read], value: Callable[[RouterReading], float], window_s: float) -> float:
    """Return a counter's growth per second over a window; 0 where it was read once."""
    grown, seconds = _grown(reads, value, window_s)
    return grown / seconds if seconds > 0 else 0.0


def _grown(reads: Collection[_Read], value: Callable[[RouterReading], float], window_s: float) -> tuple[float, float]:
    """Return a counter's growth over a window, and the seconds that it took."""
    grown, seconds = 0.0, 0.0
    for before, after in _pairs(reads, window_s):
        now, then = value(after.reading), value(before.reading)
        grown += now - then if now >= then else now  # a lower one began at zero again
        seconds += after.at - before.at
    return grown, seconds


def _sum_flow(routers: Collection[deque[_Read]], value: Callable[[RouterReading], float], window_s: float) -> float:
    return sum(_flow(reads, value, window_s) for reads in routers)


def _observed(routers: Collection[deque[_Read]], part: Callable[[RouterReading], Histogram]) -> Histogram:
    seen = Histogram()
    for reads in routers:
        for before, after in _pairs(reads, LONG_S):
            grown = part(after.reading).since(part(before.reading))
            seen = seen.plus(grown) if seen.bounds else grown
    return seen


def pair_load(signals: FleetSignals) -> PairLoad | None:
    """Return the measured load; None: a router is silent."""
    if not signals.complete:
        return None
    return PairLoad(
        prompt_tokens_per_s=signals.prompt_tokens_per_s or 0.0,
        prefill_rate=signals.prefill_rate,
        kv_usage=signals.kv_usage,
        engines=signals.engines,
    )
