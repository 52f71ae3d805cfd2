"""Prometheus metrics: plain integers on the way of a request, read by a collector when somebody scrapes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from statistics import fmean

from pagefleet_protocol import metric_names as names
from pagefleet_protocol.version import VERSION
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pagefleet_router.engines.endpoints import EngineView, PolledLoad, Snapshot
from pagefleet_router.telemetry.histogram import SecondsHistogram
from pagefleet_router.telemetry.revisions import RevisionMetrics

PREFIX = "pagefleet_router_"
STATES = ("ready", "unready", "ejected", "draining")


class RouterMetrics(Collector):
    """What the router counts.

    Args:
        snapshot: returns the engines as they are now.
        in_flight: returns the number of requests in flight.
        generated: returns the number of tokens that the engines have generated so far.
    """

    def __init__(
        self, snapshot: Callable[[], Snapshot], in_flight: Callable[[], int], generated: Callable[[], float]
    ) -> None:
        self._snapshot = snapshot
        self._in_flight = in_flight
        self._generated = generated
        self.requests: Counter[tuple[str, int]] = Counter()
        """Finished requests by route and status; 499: the client left before an answer."""
        self.durations: defaultdict[str, SecondsHistogram] = defaultdict(SecondsHistogram)
        self.first_byte = SecondsHistogram()
        self.retries: Counter[str] = Counter()
        self.retries_denied = 0
        self.failures: Counter[str] = Counter()
        self.ejections = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.streams_cut = 0
        self.access_lines_dropped = 0
        self.arrivals: Counter[str] = Counter()
        """Requests by model, whatever became of them."""
        self.prompt_tokens: Counter[str] = Counter()
        """Uncached ones by model, as predicted when requests were sent."""
        self.first_token: defaultdict[str, SecondsHistogram] = defaultdict(SecondsHistogram)
        self.token_seconds: defaultdict[str, SecondsHistogram] = defaultdict(SecondsHistogram)
        self.continued: Counter[str] = Counter()
        self.pairs = PairMetrics()
        self.revisions = RevisionMetrics()
        self.num_connections = 0
        self.gather: Callable[[], Awaitable[bytes]] | None = None
        """Returns the exposition of all processes of this router; None where it is the only one."""
        self._included: list[Callable[[], Iterable[Metric]]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def finished(self, route: str, status: int, seconds: float) -> None:
        """Count a request's end."""
        self.requests[route, status] += 1
        self.durations[route].observe(seconds)

    def include(self, *collect: Callable[[], Iterable[Metric]]) -> None:
        """Show what other parts count, too."""
        self._included += collect

    def text(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield InfoMetricFamily(PREFIX + "build", "The version.", {"version": VERSION})
        requests = CounterMetricFamily(PREFIX + "requests", "Finished requests.", labels=("route", "status"))
        for (route, status), count in self.requests.items():
            requests.add_metric((route, str(status)), count)
        yield requests
        durations = HistogramMetricFamily(PREFIX + "request_seconds", "Until the answer's end.", labels=("route",))
        for route, histogram in self.durations.items():
            durations.add_metric((route,), histogram.buckets(), histogram.total)
        yield durations
        first = HistogramMetricFamily(PREFIX + "upstream_first_byte_seconds", "Until an engine's answer begins.")
        first.add_metric((), self.first_byte.buckets(), self.first_byte.total)
        yield first
        yield _by_reason("retries", "Requests sent again to another engine.", self.retries)
        yield _by_reason("upstream_failures", "Attempts without a good answer.", self.failures)
        yield from self._by_model()
        yield from self._totals()
        yield from self._gauges()
        yield from self.pairs.collect(self._engines(), time.monotonic())
        yield from self.revisions.collect()
        for collect in self._included:
            yield from collect()

    def _engines(self) -> Sequence[EngineView]:
        """Return all but those that are yet to come: they are no part of the fleet's mean."""
        return [engine for engine in self._snapshot().engines if not engine.endpoint.coming]

    def _by_model(self) -> Iterator[Metric]:
        for name, text, counts in (
            (names.ROUTER_ARRIVALS, "Requests, whatever became of them.", self.arrivals),
            (
                names.ROUTER_PROMPT_TOKENS,
                "Prompt tokens sent that engines probably had not cached.",
                self.prompt_tokens,
            ),
            (PREFIX + "streams_continued", "Streams that went on at another engine.", self.continued),
        ):
            counter = CounterMetricFamily(name.removesuffix("_total"), text, labels=("model",))
            for model, count in counts.items():
                counter.add_metric((model,), count)
            yield counter
        for name, text, histograms in (
            (names.ROUTER_FIRST_TOKEN_SECONDS, "Until the first byte of a stream.", self.first_token),
            (names.ROUTER_TOKEN_SECONDS, "Between two reads of a stream, mean of the stream.", self.token_seconds),
        ):
            family = HistogramMetricFamily(name, text, labels=("model",))
            for model, histogram in histograms.items():
                family.add_metric((model,), histogram.buckets(), histogram.total)
            yield family

    def _totals(self) -> Iterator[Metric]:
        for name, text, value in (
            ("retries_denied", "Retries that the budget did not allow.", self.retries_denied),
            ("ejections", "Engines ejected for failing in a row.", self.ejections),
            ("prefix_queries_tokens", "Prompt tokens looked up in the prefix index.", self.prefix_queries),
            ("prefix_hits_tokens", "Those that the chosen engine probably had.", self.prefix_hits),
            ("access_log_lines_dropped", "Lines that nobody read in time.", self.access_lines_dropped),
            ("streams_cut", "Streams that ended with an error event.", self.streams_cut),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)

    def _gauges(self) -> Iterator[Metric]:
        engines = self._engines()
        yield GaugeMetricFamily(PREFIX + "requests_in_flight", "Requests in flight.", value=self._in_flight())
        yield GaugeMetricFamily(PREFIX + "client_connections", "Open connections.", value=self.num_connections)
        states = GaugeMetricFamily(PREFIX + "endpoints", "Engines by state.", labels=("state",))
        for state in STATES:
            states.add_metric((state,), sum(engine.state == state for engine in engines))
        yield states
        yield from _rates(engines)
        in_flight = "Requests that this router has there."
        yield _per_engine("requests_in_flight", in_flight, ((one.id, one.tally.num_requests) for one in engines))
        yield from self._loads([(one.id, one.load) for one in engines if one.load is not None])

    def _loads(self, loads: Sequence[tuple[str, PolledLoad]]) -> Iterator[Metric]:
        """Yield what the engines said at the last poll, of each and of all that answer."""
        running = [(name, load.num_running) for name, load in loads]
        waiting = [(name, load.num_waiting) for name, load in loads]
        usage = [(name, load.kv_usage) for name, load in loads]
        yield _per_engine("requests_running", "Running there, as of the last poll.", running)
        yield _per_engine("requests_waiting", "Waiting there, as of the last poll.", waiting)
        yield _per_engine("kv_usage_ratio", "KV blocks in use there, as of the last poll.", usage)
        for name, text, value in (
            (names.ROUTER_FLEET_ENGINES, "Engines that the figures of the fleet stand for.", len(loads)),
            (names.ROUTER_FLEET_REQUESTS_RUNNING, "Running in the fleet.", sum(value for _, value in running)),
            (names.ROUTER_FLEET_REQUESTS_WAITING, "Waiting in the fleet.", sum(value for _, value in waiting)),
            (
                names.ROUTER_FLEET_KV_USAGE_RATIO,
                "KV blocks in use, mean over the engines.",
                sum(value for _, value in usage) / max(1, len(usage)),
            ),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        tokens = names.ROUTER_FLEET_GENERATED_TOKENS.removesuffix("_total")
        yield CounterMetricFamily(tokens, "Tokens generated since this router looks.", value=self._generated())


def _rates(engines: Sequence[EngineView]) -> Iterator[Metric]:
    """Yield, for each model, the prompts that are being computed and what is learned of its engines."""
    waiting = GaugeMetricFamily(
        names.ROUTER_PREFILL_TOKENS, "Uncached prompt tokens not yet computed.", labels=("model",)
    )
    prefill = GaugeMetricFamily(names.ROUTER_PREFILL_RATE, "Prompt tokens an engine computes.", labels=("model",))
    decode = GaugeMetricFamily(names.ROUTER_DECODE_RATE, "Tokens an engine generates.", labels=("model",))
    by_model: defaultdict[str, list[EngineView]] = defaultdict(list)
    for engine in engines:
        by_model[engine.endpoint.model].append(engine)
    now = time.monotonic()
    for model, its in by_model.items():
        waiting.add_metric((model,), sum(engine.tally.queued(now) for engine in its))
        for family, rates in (
            (prefill, [engine.rates.prefill for engine in its if engine.rates.prefill.is_learned]),
            (decode, [engine.rates.decode for engine in its if engine.rates.decode.is_learned]),
        ):
            if rates:
                family.add_metric((model,), fmean(rate.value for rate in rates))
    yield from (waiting, prefill, decode)


def _per_engine(name: str, text: str, values: Iterable[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}engine_{name}", text, labels=("engine",))
    for engine_id, value in values:
        family.add_metric((engine_id,), value)
    return family


def _by_reason(name: str, text: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=("reason",))
    for reason, count in counts.items():
        family.add_metric((reason,), count)
    return family


_PREFIX = "pagefleet_router_pd_"


class PairMetrics:
    """Counts; engines by role are shown only where some engine has one."""

    def __init__(self) -> None:
        self.choices: Counter[str] = Counter()
        """Times that a request was sent, by `Choice.kind`."""
        self.retries: Counter[str] = Counter()
        """Requests whose K/V did not come, by why."""
        self.recomputed = 0
        """Of these, those whose prompt the decode engine computed in the end."""
        self.handover = SecondsHistogram()
        self.flows: dict[tuple[str, str], tuple[int, float]] = {}
        """By the ids of both engines: prompts whose K/V went from the first to the second, and its bytes."""

    def came(self, source: str, target: str, num_bytes: float) -> None:
        """Count a prompt whose K/V one engine computed and another has."""
        count, total = self.flows.get((source, target), (0, 0.0))
        self.flows[source, target] = count + 1, total + num_bytes

    def forget(self, engine_id: str) -> None:
        """Drop the flows of an engine that left."""
        self.flows = {pair: flow for pair, flow in self.flows.items() if engine_id not in pair}

    def collect(self, engines: Sequence[EngineView], now: float) -> Iterator[Metric]:
        """Yield every family.

        Args:
            engines: all.
            now: on the clock of their tallies.
        """
        requests = CounterMetricFamily(_PREFIX + "requests", "Requests sent, by who computes.", labels=("choice",))
        for choice, count in self.choices.items():
            requests.add_metric((choice,), count)
        yield requests
        retries = CounterMetricFamily(_PREFIX + "retries", "Requests whose K/V did not come.", labels=("reason",))
        for reason, count in self.retries.items():
            retries.add_metric((reason,), count)
        yield retries
        yield CounterMetricFamily(
            _PREFIX + "recomputed", "Prompts computed by the decode engine in the end.", value=self.recomputed
        )
        handover = HistogramMetricFamily(_PREFIX + "handover_seconds", "From the prompt's end to the first byte.")
        handover.add_metric((), self.handover.buckets(), self.handover.total)
        yield handover
        if any(engine.role != "both" for engine in engines):
            yield from _by_role(engines, now)


def _by_role(engines: Sequence[EngineView], now: float) -> Iterator[Metric]:
    found: defaultdict[tuple[str, str], list[EngineView]] = defaultdict(list)
    for engine in engines:
        found[engine.endpoint.model, engine.role].append(engine)
    bandwidth = GaugeMetricFamily(
        names.ROUTER_TRANSFER_RATE, "Learned: K/V that reaches an engine.", labels=("engine",)
    )
    for engine in engines:
        if engine.rates.transfer.bandwidth.is_learned and engine.role != "prefill":
            bandwidth.add_metric((engine.id,), engine.rates.transfer.bandwidth.value)
    yield bandwidth
    labels = ("model", "role")
    for name, text, value in (
        (names.ROUTER_ROLE_ENGINES, "Ready engines.", lambda those: sum(one.ready for one in those)),
        (names.ROUTER_ROLE_REQUESTS, "Requests there.", lambda those: sum(one.num_requests for one in those)),
        (names.ROUTER_ROLE_WAITING, "Requests that wait there.", _waiting),
        (names.ROUTER_ROLE_PREFILL_TOKENS, "Not yet computed.", lambda those: sum(_queued(one, now) for one in those)),
        (names.ROUTER_ROLE_KV_USAGE, "KV in use, mean.", lambda those: sum(one.kv_usage for one in those) / len(those)),
    ):
        family = GaugeMetricFamily(name, text, labels=labels)
        for key, those in found.items():
            family.add_metric(key, value(those))
        yield family


def _waiting(engines: Sequence[EngineView]) -> float:
    return sum(0.0 if engine.load is None else engine.load.num_waiting for engine in engines)


def _queued(engine: EngineView, now: float) -> int:
    return engine.tally.queued(now)
