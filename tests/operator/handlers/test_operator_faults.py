"""The whole operator against an API server that fails: it converges after, and asks little meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
from pagefleet_operator.handlers.settings import OperateSettings

from tests.fakes.kube_operator import NAMESPACE, QUICK, SETTINGS, Running, World, run, until

OFTEN = replace(SETTINGS, timing=replace(QUICK, resync=0.3, audit_behind=0.1, watch_restart=0.2))
CONFIG = f"/api/v1/namespaces/{NAMESPACE}/configmaps"


async def made(w: World) -> None:
    """Wait until all children of one service exist and nothing is written any more."""
    w.apply()
    await until(lambda: len(w.children()) == 14 and w.condition("Ready"))
    await w.settled()


def test_a_conflict_is_tried_again() -> None:
    async def scenario(w: World) -> None:
        w.api.faults.answer(409, method="PATCH", path="deployments/qwen-engine", times=2)
        async with w.operator() as running:
            await made(w)
            # The fleet key is asked for again with every try, and is there.
            assert running.value("api_answers_total", status="409") == 4

    run(scenario)


def test_a_throttled_write_waits_as_long_as_it_is_told() -> None:
    async def scenario(w: World) -> None:
        fault = w.api.faults.answer(429, method="PATCH", path="serviceaccounts/qwen-engine", retry_after_s=1)
        async with w.operator() as running:
            w.apply()
            await fault.hit.wait()
            hit_at = asyncio.get_running_loop().time()
            w.apply(replicas=2)  # no reason to come back earlier
            await until(lambda: w.find("ServiceAccount", "qwen-engine"))
            assert asyncio.get_running_loop().time() - hit_at >= 0.95
            assert running.value("reconcile_errors_total", error="Throttled") == 1

    run(scenario)


def test_an_api_server_that_fails_for_a_while_ends_nothing() -> None:
    async def scenario(w: World) -> None:
        async with w.operator() as running:
            await made(w)
            w.api.faults.answer(500, method="GET|PATCH", path="namespaces/apps/.*/more", times=8)
            w.apply("more")
            await until(lambda: len(w.children()) == 28)
            assert running.value("reconcile_errors_total", error="Unavailable") >= 1

    run(scenario)


def test_watches_that_are_told_410_begin_again() -> None:
    async def scenario(w: World) -> None:
        async with w.operator():
            await made(w)
            assert w.api.expire_watches() >= 10
            w.patch("ConfigMap", "qwen-openai", {"data": {"OPENAI_MODEL": "another"}})
            await until(lambda: w.get("ConfigMap", "qwen-openai")["data"]["OPENAI_MODEL"] == "qwen")

    run(scenario)


def test_what_was_deleted_while_a_watch_was_broken_is_noticed() -> None:
    async def scenario(w: World) -> None:
        async with w.operator(OFTEN):
            await made(w)
            w.api.cut_watches()
            w.delete("ConfigMap", "qwen-openai")
            w.api.store.compact()  # so that no new watch tells of it
            await until(lambda: w.find("ConfigMap", "qwen-openai"))

    run(scenario)


def test_a_watch_that_has_gone_silent_is_noticed_and_started_again() -> None:
    async def scenario(w: World) -> None:
        async with w.operator(OFTEN) as running:
            await made(w)
            assert w.api.silence_watches(CONFIG) == 1
            w.patch("ConfigMap", "qwen-openai", {"data": {"OPENAI_MODEL": "another"}})
            await until(lambda: running.value("watch_lag_seconds") > 0)
            await until(lambda: w.get("ConfigMap", "qwen-openai")["data"]["OPENAI_MODEL"] == "qwen")
            assert running.value("watch_restarts_total") >= 1

    run(scenario)


def test_an_api_server_that_is_away_is_asked_little_and_the_process_stays() -> None:
    async def scenario(w: World, settings: OperateSettings = SETTINGS) -> None:
        async with w.operator(settings) as running:
            await made(w)
            for number in range(20):
                w.apply(f"more-{number}")
            await w.api.go_down()
            refused = running.value("api_answers_total", status="0")
            await asyncio.sleep(1.5)
            # 20 services whose retries start at 50 ms: unrestrained they would ask 30 times each.
            assert running.value("api_answers_total", status="0") - refused < 60
            assert await ask(running, "/livez") == 200
            w.delete("ConfigMap", "qwen-openai")
            await w.api.come_back()
            await until(lambda: len(w.children()) == 14 * 21, timeout_s=120)
            assert await ask(running, "/readyz") == 200

    run(scenario)


async def ask(running: Running, path: str) -> int:
    url = f"http://127.0.0.1:{running.operator.port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status


def test_an_operator_that_starts_without_an_api_server_waits_for_it() -> None:
    async def scenario(w: World) -> None:
        await w.api.go_down()
        async with w.operator() as running:
            await until(lambda: running.value("api_answers_total", status="0") >= 1)
            assert await ask(running, "/livez") == 200
            await w.api.come_back()
            await made(w)

    run(scenario)


def test_a_killed_operators_work_is_finished_by_the_next() -> None:
    async def scenario(w: World) -> None:
        async with w.operator() as first:
            w.apply()
            await until(lambda: len(w.children()) >= 4)
            await first.kill()
        assert len(w.children()) < 14
        async with w.operator():
            await until(lambda: len(w.children()) == 14)

    run(scenario)


def test_of_two_operators_one_leads_and_the_other_takes_over() -> None:
    now = 100.0

    async def scenario(w: World) -> None:
        nonlocal now
        w.lease_clock = lambda: now
        elected = replace(SETTINGS, leader_election=True)
        async with w.operator(elected) as first, w.operator(replace(elected, identity="two")) as second:
            await until(lambda: first.value("leader") + second.value("leader") == 1)
            leader, standby = (first, second) if first.value("leader") else (second, first)
            await made(w)
            assert standby.value("reconcile_seconds_count") == 0
            assert await ask(standby, "/readyz") == 200
            await leader.kill()
            assert standby.value("leader") == 0
            now += QUICK.lease.lease_s + 0.1  # it has to run out first
            await until(lambda: standby.value("leader") == 1)
            w.apply(replicas=3)
            await until(lambda: w.get("Deployment", "qwen-engine")["spec"]["replicas"] == 3)

    run(scenario)


def test_a_clean_stop_hands_the_lease_over_at_once() -> None:
    async def scenario(w: World) -> None:
        slow = replace(QUICK, lease=replace(QUICK.lease, lease_s=300.0, renew_deadline_s=200.0))
        elected = replace(SETTINGS, leader_election=True, timing=slow)
        async with w.operator(elected) as first:
            await until(lambda: first.value("leader") == 1)
            async with w.operator(replace(elected, identity="two")) as second:
                await asyncio.sleep(0.3)
                assert second.value("leader") == 0
                first.stopping.set()
                await until(lambda: second.value("leader") == 1)

    run(scenario)


def test_a_leader_cut_off_from_the_lease_stops_writing_and_leads_again_later() -> None:
    async def scenario(w: World) -> None:
        async with w.operator(replace(SETTINGS, leader_election=True)) as running:
            await made(w)
            w.api.faults.answer(500, path="leases", times=1000)
            await until(lambda: running.value("leader") == 0)
            w.apply(replicas=2)
            await asyncio.sleep(0.2)
            assert w.get("Deployment", "qwen-engine")["spec"]["replicas"] == 1
            w.api.faults.clear()
            await until(lambda: w.get("Deployment", "qwen-engine")["spec"]["replicas"] == 2)

    run(scenario)


def test_watches_that_are_not_let_in_for_a_while_come_back() -> None:
    async def scenario(w: World) -> None:
        async with w.operator() as running:
            await made(w)
            w.api.faults.answer(401, method="GET", path="(configmaps|services|pods)$", times=6)
            w.api.cut_watches()
            w.patch("ConfigMap", "qwen-openai", {"data": {"OPENAI_MODEL": "another"}})
            await until(lambda: w.get("ConfigMap", "qwen-openai")["data"]["OPENAI_MODEL"] == "qwen")
            assert running.value("watch_restarts_total") == 0

    run(scenario)


def test_what_a_watch_tells_that_nobody_understands_ends_nothing() -> None:
    async def scenario(w: World) -> None:
        async with w.operator() as running:
            await made(w)
            labels = {"app.kubernetes.io/managed-by": "pagefleet-operator", "pagefleet.dev/service": "qwen"}
            odd: dict[str, Any] = {
                "metadata": {"name": "odd", "labels": {**labels, "app.kubernetes.io/component": "engine"}},
                "status": {"containerStatuses": "none", "conditions": [{}]},
            }
            w.api.store.create(w.api.kind("Pod"), NAMESPACE, {"metadata": odd["metadata"]})
            w.api.set_status("Pod", NAMESPACE, "odd", odd["status"])
            await w.settled()
            w.apply(replicas=2)
            await until(lambda: w.get("Deployment", "qwen-engine")["spec"]["replicas"] == 2)
            assert running.value("watch_restarts_total") == 0

    run(scenario)
