"""What all conversations with gateways share, and what is counted of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagefleet_protocol import metric_names as names
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from pagefleet_router.errors import Refusal, no_engine, overloaded
from pagefleet_router.exchange.front import FrontDoor
from pagefleet_router.exchange.services import Services
from pagefleet_router.picker.picked_request import PickedRequest
from pagefleet_router.telemetry.histogram import SecondsHistogram
from pagefleet_router.wire.access import Kind
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.memory import BodyMemory


class Picks:
    """What is counted of choices."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.seconds = SecondsHistogram()

    def picked(self, request: PickedRequest, seconds: float) -> None:
        """Count a choice.

        Args:
            request: chosen for.
            seconds: that it took, apart from the wait for an engine with room.
        """
        assert request.choice is not None
        self.outcomes["cached" if request.choice.cached_tokens else "picked"] += 1
        self.seconds.observe(seconds)

    def refused(self, refusal: Refusal, request: ClientRequest) -> None:
        """Count a request that goes nowhere."""
        wants_engine = request.route is not None and request.route.kind is Kind.PROXY
        if wants_engine and refusal.code == no_engine().code:
            outcome = "no_engine"
        else:
            outcome = "shed" if refusal.status == 429 or refusal.code == overloaded().code else "refused"
        self.outcomes[outcome] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        picks = CounterMetricFamily(
            names.ROUTER_PICKS.removesuffix("_total"), "Requests asked for.", labels=("outcome",)
        )
        for outcome, count in self.outcomes.items():
            picks.add_metric((outcome,), count)
        yield picks
        seconds = HistogramMetricFamily(names.ROUTER_PICK_SECONDS, "From a request's body to the choice.")
        seconds.add_metric((), self.seconds.buckets(), self.seconds.total)
        yield seconds


@dataclass(slots=True)
class Picker:
    """The router's parts: a gateway's requests pass the same checks and gate, and count at the same engines."""

    front: FrontDoor
    services: Services
    memory: BodyMemory
    max_body_bytes: int
    inside: set[PickedRequest] = field(default_factory=set)
    """Those that are not over."""
    picks: Picks = field(default_factory=Picks)
