"""What the router counts of prompts that one engine computes for another, and of engines by what they are for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from pagefleet_protocol import metric_names as names
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pagefleet_router.endpoints import EngineView
from pagefleet_router.seconds_histogram import SecondsHistogram

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
