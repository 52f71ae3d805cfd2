"""What routers count of both revisions, since a step began, whatever becomes of routers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pagefleet_operator.autoscale.trial_window import TrialWindow
from pagefleet_operator.plan.canary import Latency
from pagefleet_protocol.endpoints import Endpoint, OnTrial
from pagefleet_protocol.inference_status import CanaryStatus
from pagefleet_router.engines.endpoints import EngineView, build_snapshot
from pagefleet_router.errors import Failure
from pagefleet_router.telemetry.revisions import RevisionMetrics
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

OLD = EngineView(Endpoint("a", "http://a:1", "m"), ready=True)
NEW = EngineView(Endpoint("n", "http://n:1", "m", on_trial=OnTrial("r2", 5)), ready=True)
TRIALS = build_snapshot([OLD, NEW]).trials


class Router(Collector):
    """A router's own counters, and its page."""

    def __init__(self) -> None:
        self.metrics = RevisionMetrics()

    def collect(self) -> Iterator[Metric]:
        return self.metrics.collect()

    def page(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def serve(self, engine: EngineView, count: int, seconds: float = 0.5) -> None:
        for _ in range(count):
            self.metrics.answered(engine, TRIALS, 200)
            self.metrics.first_token(engine, TRIALS, seconds)
            self.metrics.between_tokens(engine, TRIALS, seconds / 10)


def at_step(step: int) -> CanaryStatus:
    return CanaryStatus(revision="r2", phase="Analysing", step=step, percent=5, message="", since="")


def test_counts_of_all_routers_since_the_step_began() -> None:
    window, routers = TrialWindow(), {"r-1": Router(), "r-2": Router()}

    def hear() -> None:
        for name, router in routers.items():
            window.hear(name, router.page())

    window.follow(at_step(1))
    hear()
    assert window.figures() is None
    routers["r-1"].serve(NEW, 3)
    routers["r-2"].serve(NEW, 1)
    routers["r-2"].serve(OLD, 7)
    routers["r-2"].metrics.failed(NEW, TRIALS, Failure.RESET)
    routers["r-1"].metrics.answered(NEW, TRIALS, 404)
    hear()
    found = window.figures()
    assert found is not None
    assert (found.new.answered, found.new.refused, found.new.failed, found.old.requests) == (4, 1, 1, 7)
    assert found.new.first_token == Latency(4, 2.0)
    assert found.old.between_tokens.mean == pytest.approx(0.05)
    assert found.step == ("r2", "Analysing", 1)
    window.follow(at_step(2))
    routers["r-1"].serve(NEW, 2)
    hear()
    found = window.figures()
    assert found is not None
    assert (found.new.requests, found.old.requests, found.step) == (2, 0, ("r2", "Analysing", 2))


def test_a_router_that_begins_anew_and_one_that_is_met_late() -> None:
    window, router = TrialWindow(), Router()
    router.serve(NEW, 9)
    window.follow(at_step(2))
    window.hear("r-1", router.page())
    found = window.figures()
    assert found is not None
    assert found.new.requests == 0, "it may have counted that in another step"
    router.serve(NEW, 1)
    window.hear("r-1", router.page())
    again = Router()
    again.serve(NEW, 4)
    window.hear("r-1", again.page())
    found = window.figures()
    assert found is not None
    assert found.new.requests == 4
    window.keep_only(frozenset())
    assert window.figures() is None


def test_garbage_is_left_out() -> None:
    window = TrialWindow()
    window.follow(at_step(1))
    window.hear("r-1", b"")
    window.hear("r-1", b'pagefleet_router_revision_requests_total{revision="r2",outcome="failed"} NaN\n\xff\n')
    assert window.figures() is None
