"""The chart's dashboards and alerts: current, about metrics that exist, and alerts that speak when they should.

`promtool` (of Debian's package `prometheus`) reads and tries the rules as the chart renders them. That each panel shows
something is `e2e/test_dashboards.py`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts.monitoring.__main__ import FOLDER, files
from charts.monitoring.alerts import ALERTS, Alert
from charts.monitoring.dashboards import DASHBOARDS
from charts.monitoring.grafana import chosen
from tests.architecture.test_docs import places
from tests.architecture.test_metrics_document import ROW
from tests.fakes.helm_chart import ROOT, find, render

METRICS = {row["name"]: row for row in ROW.finditer((ROOT / "docs" / "metrics.md").read_text())}
CHAPTERS = places(ROOT / "docs" / "troubleshooting.md")
QUERIES = {f"{one.name}: {panel.title}": panel.queries for one in DASHBOARDS for panel in one.panels}
PROMTOOL = shutil.which("promtool") or ""
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="promtool is not here: apt-get install prometheus")


def test_the_charts_files_are_those_that_the_description_makes() -> None:
    found = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert found == files(), "run `make monitoring`"


def test_nothing_of_it_is_there_unless_asked_for() -> None:
    assert {one["kind"] for one in render()} & {"PrometheusRule", "ConfigMap"} == set()


def test_dashboards_come_as_config_maps_that_a_sidecar_finds() -> None:
    given = {"enabled": True, "labels": {"board": "yes"}, "annotations": {"grafana_folder": "pagefleet"}}
    made = [one for one in render({"metrics": {"dashboards": given}}) if one["kind"] == "ConfigMap"]
    assert len(made) == len(DASHBOARDS)
    for one in made:
        assert one["metadata"]["labels"]["board"] == "yes"
        assert one["metadata"]["annotations"] == {"grafana_folder": "pagefleet"}
        ((name, text),) = one["data"].items()
        assert json.loads(text) == json.loads((FOLDER / name).read_text())


def test_every_panel_has_its_place_and_no_two_share_one() -> None:
    for dashboard in DASHBOARDS:
        panels = json.loads(files()[f"{dashboard.name}.json"])["panels"]
        spots = {(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels}
        assert len(spots) == len({one["id"] for one in panels}) == len(panels) == len(dashboard.panels)


@pytest.mark.parametrize("query", [query for one in QUERIES.values() for query in one.values()])
def test_panels_ask_for_metrics_and_labels_that_exist(query: str) -> None:
    check_names(query)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda one: str(one.name))
def test_alerts_ask_for_metrics_that_exist_and_lead_to_a_chapter(alert: Alert) -> None:
    check_names(alert.query)
    if "{{" not in alert.chapter:
        assert (alert.chapter or alert.name.lower()) in CHAPTERS


def check_names(query: str) -> None:
    """Hold a query's names and the labels that it groups by against docs/metrics.md."""
    found = re.findall(r"pagefleet_(?:engine|router|operator)_\w+", query)
    assert found
    known = [METRICS.get(re.sub(r"_(bucket|sum|count)$", "", name)) or METRICS.get(name) for name in found]
    assert None not in known, query
    labels = {label for row in known if row for label in re.findall(r"`(\w+)`", row["labels"])}
    grouped = {label.strip() for one in re.findall(r"by \(([^)]*)\)", query) for label in one.split(",")}
    assert grouped <= labels | {"le", "instance", "namespace", "pagefleet_dev_service"}, query


def test_what_is_chosen_goes_into_every_metric_and_keeps_its_labels() -> None:
    both = 'namespace=~"$namespace",pagefleet_dev_service=~"$service"'
    query = 'rate(pagefleet_router_a_total{status="500"}[5m]) / pagefleet_engine_b'
    assert chosen(query) == (
        f'rate(pagefleet_router_a_total{{{both},status="500"}}[5m]) / pagefleet_engine_b{{{both}}}'
    )
    assert chosen("pagefleet_operator_leader") == "pagefleet_operator_leader"


def rendered(**values: Any) -> dict[str, Any]:
    """Return the rules as Prometheus gets them."""
    spec = find(render({"metrics": {"alerts": {"enabled": True, **values}}}), "PrometheusRule")["spec"]
    assert isinstance(spec, dict)
    return spec


def test_objectives_and_runbooks_are_the_charts_values() -> None:
    rules = rendered(objective=0.99, ttftSeconds=1.5, itlSeconds=0.07, runbooks="https://example.org/t")
    by_name = {one["alert"]: one for one in rules["groups"][0]["rules"]}
    assert "> 14.4 * (1 - 0.99)" in by_name["PagefleetErrorsFast"]["expr"]
    assert by_name["PagefleetFirstTokenSlow"]["expr"].endswith("> 1.5")
    assert by_name["PagefleetTokensSlow"]["expr"].endswith("> 0.07")
    assert by_name["PagefleetNoEngine"]["annotations"]["runbook_url"] == "https://example.org/t#pagefleetnoengine"
    assert not re.search(r"RUNBOOKS|OBJECTIVE|_SECONDS", yaml.safe_dump(rules))


OF = 'namespace="apps",pagefleet_dev_service="qwen"'
ENGINE = f'{OF},instance="e0"'
Series = Mapping[str, str]


def took(histogram: str, over: str, at_most: str) -> Series:
    """Return a histogram whose observations are all between two bounds."""
    counts = {over: "0x60", at_most: "0+60x60", "+Inf": "0+60x60"}
    return {f'pagefleet_router_{histogram}_bucket{{{OF},le="{bound}"}}': count for bound, count in counts.items()}


def requests(failed: int) -> Series:
    name = f'pagefleet_router_requests_total{{{OF},route="/v1/chat/completions"'
    return {f'{name},status="200"}}': f"0+{1000 - failed}x800", f'{name},status="500"}}': f"0+{failed}x800"}


SAID: dict[str, tuple[Series, Series]] = {
    "PagefleetServiceNotReady": (
        {'pagefleet_operator_services{ready="False",reason="ModelNotFound"}': "1x60"},
        {'pagefleet_operator_services{ready="False",reason="Paused"}': "1x60"},
    ),
    "PagefleetErrorsFast": (requests(20), requests(10)),
    "PagefleetErrorsSlow": (requests(10), requests(5)),
    "PagefleetFirstTokenSlow": (
        took("time_to_first_token_seconds", "5", "30"),
        took("time_to_first_token_seconds", "1", "2.5"),
    ),
    "PagefleetTokensSlow": (took("inter_token_seconds", "0.25", "0.5"), took("inter_token_seconds", "0.025", "0.05")),
    "PagefleetRequestsRefused": (
        {
            f'pagefleet_router_admission_refusals_total{{{OF},code="queue_full"}}': "0+6x60",
            f'pagefleet_router_arrivals_total{{{OF},model="qwen"}}': "0+100x60",
        },
        {
            f'pagefleet_router_admission_refusals_total{{{OF},code="queue_full"}}': "0+4x60",
            f'pagefleet_router_arrivals_total{{{OF},model="qwen"}}': "0+100x60",
        },
    ),
    "PagefleetNoEngine": (
        {
            f'pagefleet_router_endpoints{{{OF},state="ready"}}': "0x60",
            f'pagefleet_router_requests_held{{{OF},model="qwen"}}': "3x60",
        },
        {
            f'pagefleet_router_endpoints{{{OF},state="ready"}}': "0x60",
            f'pagefleet_router_requests_held{{{OF},model="qwen"}}': "0x60",
        },
    ),
    "PagefleetEngineFails": (
        {f'pagefleet_router_endpoints{{{OF},state="ejected"}}': "1x60"},
        {f'pagefleet_router_endpoints{{{OF},state="draining"}}': "1x60"},
    ),
    "PagefleetPreemptions": (
        {f"pagefleet_engine_preemptions_total{{{ENGINE}}}": "0+10x60"},
        {f"pagefleet_engine_preemptions_total{{{ENGINE}}}": "0+1x60"},
    ),
    "PagefleetOutOfMemory": (
        {f"pagefleet_engine_out_of_memory_steps_total{{{ENGINE}}}": "0x50 1x10"},
        {f"pagefleet_engine_out_of_memory_steps_total{{{ENGINE}}}": "7x60"},
    ),
    "PagefleetNotANumber": (
        {f"pagefleet_engine_nan_requests_total{{{ENGINE}}}": "0x50 1x10"},
        {f"pagefleet_engine_nan_requests_total{{{ENGINE}}}": "7x60"},
    ),
    "PagefleetTransfersFail": (
        {
            f"pagefleet_engine_kv_transfer_failures_total{{{ENGINE}}}": "0+2x60",
            f'pagefleet_router_pd_requests_total{{{OF},choice="remote"}}': "0+10x60",
        },
        {
            f"pagefleet_engine_kv_transfer_failures_total{{{ENGINE}}}": "0+1x60",
            f'pagefleet_router_pd_requests_total{{{OF},choice="remote"}}': "0+60x60",
        },
    ),
    "PagefleetScalingBlind": (
        {'pagefleet_operator_scaling_signal_age_seconds{namespace="apps",service="qwen",role="engine"}': "90x60"},
        {'pagefleet_operator_scaling_signal_age_seconds{namespace="apps",service="qwen",role="engine"}': "2x60"},
    ),
    "PagefleetScalingAtMaximum": (
        {'pagefleet_operator_scaling_decisions_total{reason="AtMaximum"}': "0+30x60"},
        {'pagefleet_operator_scaling_decisions_total{reason="Steady"}': "0+30x60"},
    ),
    "PagefleetNoOperator": (
        {'pagefleet_operator_leader{pod="a"}': "0x60"},
        {'pagefleet_operator_leader{pod="a"}': "0x60", 'pagefleet_operator_leader{pod="b"}': "1x60"},
    ),
    "PagefleetCanaryBack": (
        {'pagefleet_operator_canary_percent{namespace="apps",service="qwen",phase="RolledBack"}': "0x60"},
        {'pagefleet_operator_canary_percent{namespace="apps",service="qwen",phase="Analysing"}': "25x60"},
    ),
    "PagefleetOperatorBehind": (
        {"pagefleet_operator_queue_oldest_seconds": "300x60"},
        {"pagefleet_operator_queue_oldest_seconds": "1x60"},
    ),
}
"""Of each alert a series at which it speaks, and one at which it does not."""


def test_every_alert_has_its_series() -> None:
    assert set(SAID) == {one.name for one in ALERTS}


def promtool(*arguments: str) -> str:
    ran = subprocess.run([PROMTOOL, *arguments], check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@needs_promtool
def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rendered()))
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", str(tmp_path / "alerts.yaml"))


@needs_promtool
def test_each_alert_speaks_when_it_should_and_not_before(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rendered()))
    tests = [trial(name, series, fires=not place) for name, both in SAID.items() for place, series in enumerate(both)]
    cases = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    promtool("test", "rules", str(tmp_path / "cases.yaml"))


def trial(name: str, series: Series, *, fires: bool) -> dict[str, Any]:
    """Return one test of promtool's: after 59 minutes that alert speaks, or not."""
    query = f'count by (alertname) (ALERTS{{alertname="{name}",alertstate="firing"}})'
    wanted: Sequence[object] = [{"labels": f'{{alertname="{name}"}}', "value": 1}] if fires else []
    return {
        "name": f"{name}, {fires}",
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "59m", "exp_samples": wanted}],
    }
