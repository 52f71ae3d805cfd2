"""From a short description of a dashboard to the JSON that Grafana imports, version 8 and later.

A query names metrics bare, or with labels of its own: what the dashboard's variables choose is added to each of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RATE = "$__rate_interval"
RANGE = "$__range"

_METRIC = re.compile(r"(pagefleet_(?P<part>[a-z]+)_\w+)(?:\{(?P<labels>[^}]*)\})?")
_SERVICE = 'namespace=~"$namespace",pagefleet_dev_service=~"$service"'
_OF_OPERATOR = 'namespace=~"$namespace",service=~"$service"'
_OWN_SERVICE = re.compile("_scaling_(?!decisions)|_canary_")
"""What the operator tells of each service."""
_SOURCE = {"type": "prometheus", "uid": "$datasource"}
_COLUMNS, _HEIGHT, _PER_ROW = 24, 8, 3


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture over time."""

    title: str
    unit: str
    """Grafana's name for it: s, reqps, percentunit, bytes, Bps, short ..."""
    queries: Mapping[str, str]
    """PromQL by legend, in which {{label}} stands for a label's value."""
    note: str = ""
    """What to make of it, in a sentence."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page of panels, in rows of three."""

    name: str
    """Of its file and in its address."""
    title: str
    panels: tuple[Panel, ...]
    choices: Mapping[str, Mapping[str, str]] | None = None
    """More variables: values by the text that people choose from, the first by default."""


def rate(metric: str, *by: str) -> str:
    """Return how much a counter grows in a second, summed over all but these labels."""
    return f"sum{_by(by)}(rate({metric}[{RATE}]))"


def top(metric: str, *by: str) -> str:
    """Return a gauge that several routers tell of the same engines: one's word."""
    return f"max{_by(by)}({metric})"


def total(metric: str, *by: str) -> str:
    """Return a gauge summed over all but these labels."""
    return f"sum{_by(by)}({metric})"


def quantile(share: float, histogram: str, *by: str) -> str:
    """Return the time within which this share of what a histogram saw was done."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le', *by)})"


def quantiles(histogram: str) -> dict[str, str]:
    """Return the median, and what one in twenty and one in a hundred exceed, by legend."""
    return {f"p{round(share * 100)}": quantile(share, histogram) for share in (0.5, 0.95, 0.99)}


def share(part: str, whole: str, *by: str, over: str = RATE) -> str:
    """Return the share that one counter's growth has of another's."""
    return f"sum{_by(by)}(rate({part}[{over}])) / sum{_by(by)}(rate({whole}[{over}]))"


def mean(histogram: str, *by: str) -> str:
    """Return the mean of what a histogram saw."""
    return share(f"{histogram}_sum", f"{histogram}_count", *by)


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""


def chosen(query: str) -> str:
    """Return a query with what the dashboard's variables choose added to every metric that has it."""

    def with_choice(found: re.Match[str]) -> str:
        name, part, labels = found[1], found["part"], found["labels"]
        choice = _SERVICE if part != "operator" else _OF_OPERATOR if _OWN_SERVICE.search(name) else ""
        return f"{name}{{{','.join(filter(None, (choice, labels)))}}}" if choice or labels else name

    return _METRIC.sub(with_choice, query)


def document(dashboard: Dashboard) -> dict[str, Any]:
    """Return what Grafana imports."""
    panels = [_panel(number, panel) for number, panel in enumerate(dashboard.panels)]
    return {
        "uid": f"pagefleet-{dashboard.name}",
        "title": f"pagefleet / {dashboard.title}",
        "tags": ["pagefleet"],
        "schemaVersion": 36,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "title": "pagefleet", "tags": ["pagefleet"], "asDropdown": True}],
        "templating": {"list": _variables(dashboard)},
        "panels": panels,
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    width = _COLUMNS // _PER_ROW
    row, column = divmod(number, _PER_ROW)
    targets = [
        {"refId": chr(ord("A") + place), "expr": chosen(query), "legendFormat": legend}
        for place, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.note,
        "datasource": _SOURCE,
        "gridPos": {"x": column * width, "y": row * _HEIGHT, "w": width, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": targets,
    }


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    build = "pagefleet_router_build_info"
    asked = {
        "namespace": f"label_values({build}, namespace)",
        "service": f'label_values({build}{{namespace=~"$namespace"}}, pagefleet_dev_service)',
    }
    # The label is absent outside a cluster: .* takes that, too.
    every = {"includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    queried = [
        {"name": name, "type": "query", "datasource": _SOURCE, "query": query, "refresh": 2, **every}
        for name, query in asked.items()
    ]
    return [{"name": "datasource", "type": "datasource", "query": "prometheus"}, *queried, *_choices(dashboard)]


def _choices(dashboard: Dashboard) -> list[dict[str, Any]]:
    made = []
    for name, values in (dashboard.choices or {}).items():
        options = [{"text": text, "value": value} for text, value in values.items()]
        query = ",".join(f"{text} : {value}" for text, value in values.items())
        made.append({"name": name, "type": "custom", "query": query, "options": options, "current": options[0]})
    return made
