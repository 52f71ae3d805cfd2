"""Health is what gets done."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest
from pagefleet_operator.errors import PortError
from pagefleet_operator.handlers.health import SILENT_S, STUCK_S, HealthServer, Vitals, role, sickness
from pagefleet_operator.handlers.metrics import Gauges, OperatorMetrics

WELL = Vitals(
    leads=lambda: True,
    synced=lambda: True,
    stalled_s=lambda: 0.0,
    longest_work_s=lambda: 0.0,
    watch_lag_s=lambda: 0.0,
    cluster_answers=lambda: True,
)


def test_who_gets_things_done_is_well() -> None:
    assert sickness(WELL) == ""


@pytest.mark.parametrize(
    ("vitals", "says"),
    [
        (replace(WELL, stalled_s=lambda: STUCK_S + 1), "no look has ended for 121 s"),
        (replace(WELL, longest_work_s=lambda: STUCK_S + 1), "worked on for 121 s"),
        (replace(WELL, watch_lag_s=lambda: SILENT_S + 1), "behind for 601 s"),
    ],
)
def test_who_hangs_says_how(vitals: Vitals, says: str) -> None:
    assert says in sickness(vitals)
    assert sickness(replace(vitals, cluster_answers=lambda: False)) == ""  # the API server's fault


def test_who_does_not_lead_need_not_get_anything_done() -> None:
    waiting = replace(WELL, stalled_s=lambda: 10_000.0)
    assert sickness(replace(waiting, leads=lambda: False)) == ""
    assert sickness(replace(waiting, synced=lambda: False)) == ""


def test_the_role_is_told() -> None:
    assert role(WELL) == "leader"
    assert role(replace(WELL, leads=lambda: False)) == "standby"
    assert role(replace(WELL, synced=lambda: False)) == "starting"


def answers(vitals: Vitals) -> dict[str, tuple[int, str]]:
    async def scenario() -> dict[str, tuple[int, str]]:
        server = HealthServer(vitals, lambda: b"metrics\n")
        port = await server.start("127.0.0.1", 0)
        found = {}
        async with aiohttp.ClientSession() as session:
            for path in ("/livez", "/readyz", "/metrics", "/else"):
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    found[path] = (answer.status, (await answer.text()).strip())
        await server.stop()
        return found

    return asyncio.run(scenario())


def test_probes_and_metrics_over_http() -> None:
    found = answers(WELL)
    assert (found["/livez"], found["/readyz"]) == ((200, "live"), (200, "leader"))
    assert found["/metrics"] == (200, "metrics")
    assert found["/else"][0] == 404
    sick = answers(replace(WELL, longest_work_s=lambda: 500.0))
    assert sick["/livez"][0] == sick["/readyz"][0] == 503
    assert "500 s" in sick["/livez"][1]


def test_a_port_that_is_taken_is_named() -> None:
    async def scenario() -> None:
        first, second = HealthServer(WELL, bytes), HealthServer(WELL, bytes)
        port = await first.start("127.0.0.1", 0)
        try:
            with pytest.raises(PortError, match=f"127.0.0.1:{port}"):
                await second.start("127.0.0.1", port)
        finally:
            await first.stop()
            await second.stop()

    asyncio.run(scenario())


def test_metrics_count_reconciles_requests_and_services() -> None:
    metrics = OperatorMetrics()
    assert not metrics.cluster_answers()
    metrics.reconcile_done(0.03, "")
    metrics.reconcile_done(0.3, "Throttled")
    metrics.request_done("apply", "Service", 0, 0.01)
    assert not metrics.cluster_answers()
    metrics.request_done("apply", "Service", 200, 0.01)
    metrics.request_done("apply", "Service", 422, 0.01)
    assert metrics.cluster_answers()
    metrics.show(
        Gauges(
            leads=lambda: True,
            queue_depth=lambda: 3,
            oldest_key_s=lambda: 1.5,
            watch_lag_s=lambda: 0.0,
            watch_restarts=lambda: 2,
            readiness=lambda: [("True", "Serving"), ("True", "Serving"), ("False", "Starting")],
        )
    )
    text = metrics.text().decode()
    for line in (
        "pagefleet_operator_reconcile_seconds_count 2.0",
        'pagefleet_operator_reconcile_errors_total{error="Throttled"} 1.0',
        'pagefleet_operator_applies_total{kind="Service"} 1.0',
        'pagefleet_operator_api_answers_total{status="422"} 1.0',
        "pagefleet_operator_leader 1.0",
        "pagefleet_operator_queue_depth 3.0",
        "pagefleet_operator_watch_restarts_total 2.0",
        'pagefleet_operator_services{ready="True",reason="Serving"} 2.0',
    ):
        assert line in text.splitlines()
