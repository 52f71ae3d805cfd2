"""What the operator counts about itself, in a registry of its own."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagefleet_operator.handlers.autoscaler import ScalingGauge
from pagefleet_operator.handlers.cluster_view import Key

_RECONCILE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)

ANSWER_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class TrialGauge:
    """What metrics say of a new revision that is tried out."""

    key: Key
    phase: str
    percent: int
    """Share of the requests that it gets."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is read at the moment somebody asks for metrics."""

    leads: Callable[[], bool]
    queue_depth: Callable[[], int]
    oldest_key_s: Callable[[], float]
    watch_lag_s: Callable[[], float]
    watch_restarts: Callable[[], int]
    readiness: Callable[[], Iterable[tuple[str, str]]]
    """Status and reason of the Ready condition of each InferenceService."""
    scaling: Callable[[], Iterable[ScalingGauge]] = tuple
    """Of each service that scales by itself."""
    trials: Callable[[], Iterable[TrialGauge]] = tuple
    """Of each service whose new revision is tried out, or went back."""


class OperatorMetrics:
    """Counts requests and reconciles."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._answered_at = float("-inf")
        self._reconciles = Histogram(
            "pagefleet_operator_reconcile_seconds",
            "Time of one look at one InferenceService.",
            buckets=_RECONCILE_BUCKETS,
            registry=self.registry,
        )
        self._errors = Counter(
            "pagefleet_operator_reconcile_errors",
            "Looks that have to be repeated, by class of error.",
            ["error"],
            registry=self.registry,
        )
        self._requests = Histogram(
            "pagefleet_operator_api_request_seconds",
            "Requests to the API server, watches not counted.",
            ["verb", "kind"],
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._answers = Counter(
            "pagefleet_operator_api_answers",
            "Answers of the API server by HTTP status; 0: none.",
            ["status"],
            registry=self.registry,
        )
        self._applies = Counter(
            "pagefleet_operator_applies", "Objects applied, by kind.", ["kind"], registry=self.registry
        )

        self._decisions = Counter(
            "pagefleet_operator_scaling_decisions",
            "Decisions of the autoscaler, one every two seconds and service, by reason.",
            ["reason"],
            registry=self.registry,
        )

    def scaling_decided(self, reason: str) -> None:
        self._decisions.labels(reason).inc()

    def reconcile_done(self, seconds: float, error: str) -> None:
        self._reconciles.observe(seconds)
        if error:
            self._errors.labels(error).inc()

    def request_done(self, verb: str, kind: str, status: int, seconds: float) -> None:
        self._requests.labels(verb, kind).observe(seconds)
        self._answers.labels(str(status)).inc()
        if status:
            self._answered_at = time.monotonic()
        if verb == "apply" and status == 200:
            self._applies.labels(kind).inc()

    def cluster_answers(self) -> bool:
        """Return whether the API server answered within the last minute, be it with an error."""
        return time.monotonic() - self._answered_at < ANSWER_WINDOW_S

    def show(self, gauges: Gauges) -> None:
        """Serve these gauges too. Once."""
        self.registry.register(_Live(gauges))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Live(Collector):
    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        gauges = self._gauges
        single = (
            ("leader", "1 while this process leads.", float(gauges.leads())),
            ("queue_depth", "InferenceServices that wait for a look.", float(gauges.queue_depth())),
            ("queue_oldest_seconds", "How long the first of them has waited.", gauges.oldest_key_s()),
            ("watch_lag_seconds", "How long a watch has been behind.", gauges.watch_lag_s()),
        )
        for name, text, value in single:
            yield GaugeMetricFamily(f"pagefleet_operator_{name}", text, value=value)
        yield CounterMetricFamily(
            "pagefleet_operator_watch_restarts",
            "How often the watches were started again.",
            value=float(gauges.watch_restarts()),
        )
        services = GaugeMetricFamily(
            "pagefleet_operator_services",
            "InferenceServices by their Ready condition.",
            labels=["ready", "reason"],
        )
        for (ready, reason), number in sorted(Tally(gauges.readiness()).items()):
            services.add_metric([ready, reason], number)
        yield services
        yield from _scaling(gauges.scaling())
        trials = GaugeMetricFamily(
            "pagefleet_operator_canary_percent",
            "Share of the requests that a revision on trial gets.",
            labels=["namespace", "service", "phase"],
        )
        for one in gauges.trials():
            trials.add_metric([*one.key, one.phase], one.percent)
        yield trials


def _scaling(services: Iterable[ScalingGauge]) -> Iterable[Metric]:
    labels = ("namespace", "service", "role")
    desired, current, age = (
        GaugeMetricFamily(f"pagefleet_operator_scaling_{name}", text, labels=labels)
        for name, text in (
            ("desired_engines", "Engines that the autoscaler wants."),
            ("current_engines", "Engines that exist, ready or not."),
            ("signal_age_seconds", "Age of the oldest word of a router that scaling depends on."),
        )
    )
    for one in services:
        of = (*one.key, one.role)
        desired.add_metric(of, one.desired)
        current.add_metric(of, one.current)
        age.add_metric(of, one.age_s)
    yield from (desired, current, age)
