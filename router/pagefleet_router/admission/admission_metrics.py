"""What the gate shows of itself at /metrics."""

from __future__ import annotations

from collections.abc import Iterator

from pagefleet_protocol import metric_names as names
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pagefleet_router.admission.gate import Gate

PREFIX = "pagefleet_router_"


def collect_admission(gate: Gate) -> Iterator[Metric]:
    """Yield every family of a gate."""
    held = GaugeMetricFamily(names.ROUTER_HELD, "Requests that wait for a model's first engine.", labels=("model",))
    queued = GaugeMetricFamily(names.ROUTER_QUEUED, "Requests that wait for engines with room.", labels=("model",))
    tokens = GaugeMetricFamily(names.ROUTER_QUEUED_TOKENS, "Prompt tokens of both.", labels=("model",))
    for model, one in gate.gates.items():
        num_waiting = one.line.num_waiting
        held.add_metric((model,), 0 if one.has_engines else num_waiting)
        queued.add_metric((model,), num_waiting if one.has_engines else 0)
        tokens.add_metric((model,), one.line.num_prompt_tokens)
    yield from (held, queued, tokens)
    refused = CounterMetricFamily(PREFIX + "admission_refusals", "Requests not let in.", labels=("code",))
    for code, count in gate.refused.items():
        refused.add_metric((code,), count)
    yield refused
    waits = HistogramMetricFamily(PREFIX + "admission_wait_seconds", "Wait of requests that had to wait and got in.")
    waits.add_metric((), gate.waits.buckets(), gate.waits.total)
    yield waits
