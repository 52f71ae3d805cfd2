"""The KV connector's totals and gauges as Prometheus has them. Their names come complete from the engine core."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

_NAME = re.compile(r'([a-z_][a-z0-9_]*)(?:\{([a-z_]+)="([^"\\\n]*)"\})?')
_TEXT = "Of the KV connector: docs/metrics.md says what it is."


def transfer_series(model_name: str, stats: Mapping[str, float]) -> Iterator[Metric]:
    """Yield a family for each name: `..._total` counts, `..._sum` with `..._count` is a summary, others are gauges.

    A name may have one label, as in `..._bytes{tier="host"}`; all have `model_name`.
    """
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for full_name, value in stats.items():
        found = _NAME.fullmatch(full_name)
        assert found is not None, f"{full_name} is no name of a series"
        name, label, label_value = found.groups()
        if name.endswith("_count"):
            continue  # told with its sum
        if name.endswith("_sum"):
            count = stats[name.removesuffix("_sum") + "_count"]
            summary = SummaryMetricFamily(name.removesuffix("_sum"), _TEXT, labels=("model_name",))
            summary.add_metric((model_name,), int(count), value)
            yield summary
            continue
        family = families.get(name)
        if family is None:
            family = families[name] = _family(name, label)
        family.add_metric((model_name,) if label is None else (model_name, label_value), value)
    yield from families.values()


def _family(name: str, label: str | None) -> CounterMetricFamily | GaugeMetricFamily:
    labels = ("model_name",) if label is None else ("model_name", label)
    if name.endswith("_total"):
        return CounterMetricFamily(name.removesuffix("_total"), _TEXT, labels=labels)
    return GaugeMetricFamily(name, _TEXT, labels=labels)
