"""The whole operator against an emulated API server and routers that say what a test makes them say.

The emulator has no controllers: the test is those of Deployments and ResourceQuotas. Time passes with every look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from pagefleet_operator.handlers.settings import OperateSettings
from pagefleet_protocol import metric_names as names
from pagefleet_protocol.kube_names import FIELD_MANAGER, LABEL_COMPONENT, LABEL_MANAGED_BY, LABEL_SERVICE

from tests.fakes.kube_operator import NAMESPACE, SETTINGS, Running, SilentPods, World, until, world

QUICK = replace(SETTINGS, timing=replace(SETTINGS.timing, scaling=0.04))
ELECTED = replace(QUICK, leader_election=True)
SCALING = {"max": 3, "target": {"queue": 2}, "scaleToZero": {"after": 30}}
ROUTER_IP = "10.0.0.1"


class TalkingPods(SilentPods):
    """Pods whose one router tells of its requests. Every look at it takes two seconds of the autoscaler's time."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.arrivals, self.engines = 0.0, 0, 1
        self.waiting, self.held, self.speaks = 0, 0, True

    async def router_page(self, ip: str) -> bytes | None:
        self.now += 2.0
        self.arrivals += self.waiting + self.held
        if ip != ROUTER_IP or not self.speaks:
            return None
        said = {
            names.ROUTER_ARRIVALS: self.arrivals,
            names.ROUTER_HELD: self.held,
            names.ROUTER_FLEET_ENGINES: self.engines,
            names.ROUTER_FLEET_REQUESTS_RUNNING: min(self.waiting, 4 * self.engines),
            names.ROUTER_FLEET_REQUESTS_WAITING: self.waiting,
        }
        return "".join(f"{name} {value}\n" for name, value in said.items()).encode()


class Site:
    """A cluster with one service that scales itself, and one router of it."""

    def __init__(self, w: World, pods: TalkingPods) -> None:
        self.w, self.pods = w, pods
        self.pod("qwen-router-1", "router", ROUTER_IP)

    def pod(self, name: str, component: str, ip: str = "10.0.0.9") -> None:
        labels = {LABEL_SERVICE: "qwen", LABEL_COMPONENT: component, LABEL_MANAGED_BY: FIELD_MANAGER}
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"podIP": ip, "phase": "Running", "conditions": conditions}
        self.w.api.add("Pod", {"metadata": {"name": name, "labels": labels}, "status": status}, NAMESPACE)

    @property
    def wanted(self) -> int:
        """Replicas of the engines' Deployment; -1: there is none."""
        found = self.w.find("Deployment", "qwen-engine")
        return int(found["spec"]["replicas"]) if found else -1

    @property
    def scaling(self) -> dict[str, Any]:
        return dict((self.w.get("InferenceService", "qwen").get("status") or {}).get("scaling") or {})

    def events(self) -> list[str]:
        """Return the reasons of the events about scaling."""
        found = self.w.api.store.all_of(self.w.api.kind("Event"), NAMESPACE)
        return [one["reason"] for one in found if one["reason"].startswith(("Scal", "Woken"))]

    def carry_out(self, most: int = 99) -> None:
        """Make or take away ready engines as the Deployment asks for, up to what a quota allows."""
        pods = self.w.api.store.all_of(self.w.api.kind("Pod"), NAMESPACE)
        have = sorted(one["metadata"]["name"] for one in pods if "engine" in one["metadata"]["name"])
        for number in range(len(have), min(self.wanted, most)):
            self.pod(f"qwen-engine-{number}", "engine")
        for name in have[max(0, self.wanted) :]:
            self.w.delete("Pod", name)
        refused = [{"type": "ReplicaFailure", "status": "True"}] if self.wanted > most else []
        self.w.api.set_status("Deployment", NAMESPACE, "qwen-engine", {"conditions": refused})
        self.pods.engines = min(self.wanted, most)

    async def one_engine(self) -> None:
        """Wait until the service runs with its first engine."""
        self.pods.waiting = 1
        await until(lambda: self.wanted == 1)
        self.carry_out()
        await until(lambda: self.w.condition("Ready").get("reason") == "Serving")


def run(
    scenario: Callable[[Site, Running], Awaitable[None]],
    settings: OperateSettings = QUICK,
    **spec: Any,
) -> None:
    async def in_world() -> None:
        async with world() as made:
            pods = TalkingPods()
            made.pods, made.clock = pods, lambda: pods.now
            async with made.operator(settings) as running:
                site = Site(made, pods)
                made.apply(**(spec or {"autoscaling": SCALING}))
                await scenario(site, running)

    asyncio.run(in_world())


def test_up_with_the_load_to_zero_without_and_up_again_for_the_first_request() -> None:
    async def scenario(site: Site, running: Running) -> None:
        await site.one_engine()
        site.pods.waiting = 20
        await until(lambda: site.wanted == 3)
        site.carry_out()
        await until(lambda: site.scaling.get("current") == 3)
        assert (site.scaling["mode"], site.scaling["desired"]) == ("Internal", 3)
        site.pods.waiting = 0
        await until(lambda: site.wanted == 0)
        site.carry_out()
        await until(lambda: site.w.condition("Ready").get("reason") == "Idle")
        assert site.w.condition("Ready")["status"] == "True"
        assert running.value("scaling_desired_engines", namespace=NAMESPACE, service="qwen", role="engine") == 0
        site.pods.held = 1
        await until(lambda: site.wanted == 1)
        await until(lambda: site.w.condition("Ready").get("reason") == "Waking")
        assert site.w.condition("Ready")["status"] == "True"
        site.pods.held = 0
        site.carry_out()
        await until(lambda: site.w.condition("Ready").get("reason") == "Serving")
        assert [site.events().count(reason) for reason in ("ScaledToZero", "WokenUp")] == [1, 1]
        assert "ScaledUp" in site.events()

    run(scenario)


@pytest.mark.parametrize("edit", [{"autoscaling": {"min": 9, "max": 2}}, {"profileRef": {"name": "gone"}}])
def test_a_sleeping_service_wakes_up_though_its_last_edit_is_refused(edit: dict[str, Any]) -> None:
    async def scenario(site: Site, running: Running) -> None:
        await site.one_engine()
        site.pods.waiting = 0
        await until(lambda: site.wanted == 0)
        site.carry_out()
        await until(lambda: site.scaling.get("current") == 0)
        site.w.apply(**{"autoscaling": SCALING, **edit})
        await until(lambda: site.w.condition("Degraded").get("status") == "True")
        image = site.w.get("Deployment", "qwen-engine")["spec"]["template"]
        assert site.wanted == 0, "nobody asks"
        site.pods.held = 1
        await until(lambda: site.wanted == 1)
        assert site.w.get("Deployment", "qwen-engine")["spec"]["template"] == image
        assert site.w.condition("Degraded")["status"] == "True"

    run(scenario)


def test_stops_at_a_quota_and_says_so() -> None:
    async def scenario(site: Site, running: Running) -> None:
        await site.one_engine()
        site.pods.waiting = 20
        await until(lambda: site.wanted == 3)
        site.carry_out(most=2)
        await until(lambda: site.wanted == 2)
        site.carry_out(most=2)
        await until(lambda: site.w.condition("ScalingActive").get("reason") == "AtQuota")
        message = site.w.condition("ScalingActive")["message"]
        assert message.startswith("2 engines are wanted: 20 requests wait")
        assert message.endswith("; more pods are refused: kubectl -n apps describe quota")
        await until(lambda: site.scaling.get("desired") == 2)
        assert "ScaledDown" not in site.events(), "nothing went"

    run(scenario)


def test_a_silent_router_takes_nothing_away() -> None:
    async def scenario(site: Site, running: Running) -> None:
        await site.one_engine()
        site.pods.waiting = 20
        await until(lambda: site.wanted == 3)
        site.carry_out()
        site.pods.speaks = False
        await until(lambda: site.w.condition("ScalingActive").get("reason") == "SignalsMissing")
        before = site.pods.now
        await until(lambda: site.pods.now > before + 60)
        assert site.wanted == 3
        assert site.w.condition("ScalingActive")["status"] == "False"

    run(scenario)


def test_advice_is_written_and_not_taken() -> None:
    async def scenario(site: Site, running: Running) -> None:
        await site.one_engine()
        site.pods.waiting = 20
        await until(lambda: site.scaling.get("desired") == 3)
        assert site.scaling["mode"] == "Advisory"
        assert site.w.condition("ScalingActive")["reason"] == "Advised"
        await site.w.settled()
        assert site.wanted == 1

    run(scenario, replicas=1, autoscaling={**SCALING, "mode": "Advisory"})


def test_another_operator_goes_on_from_the_status() -> None:
    async def scenario(site: Site, running: Running) -> None:
        await site.one_engine()
        site.pods.waiting = 20
        await until(lambda: site.wanted == 3)
        site.carry_out()
        await until(lambda: site.scaling.get("current") == 3)
        await running.kill()
        site.pods.waiting = 1
        patches = len(site.w.api.writes())
        async with site.w.operator(replace(ELECTED, identity="two")) as second:
            before = site.pods.now
            await until(lambda: site.pods.now > before + 60)
            assert second.value("scaling_desired_engines", namespace=NAMESPACE, service="qwen", role="engine") == 3
        assert site.wanted == 3
        assert not [write for write in site.w.api.writes()[patches:] if write.endswith("deployments/qwen-engine")]

    run(scenario, ELECTED)
