"""The loop that asks routers and decides: whose pages it reads, what it remembers, and whom it wakes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pagefleet_operator.apply.kinds import BY_NAME, INFERENCE_SERVICE, POD
from pagefleet_operator.handlers.autoscaler import Autoscaler, engines_seen
from pagefleet_operator.handlers.cluster_view import ClusterView, Key
from pagefleet_operator.plan.observed import ContainerSeen, GroupPlace, PodSeen
from pagefleet_protocol import metric_names as names

from tests.fakes.kube_operator import SilentPods

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = ("apps", "qwen")
SCALING = {"min": 1, "max": 4, "target": {"queue": 2}, "scaleToZero": {"after": 10}}


def page(arrivals: int = 0, waiting: int = 0, running: int = 0, held: int = 0) -> bytes:
    return "\n".join(
        f"{name} {value}"
        for name, value in (
            (names.ROUTER_ARRIVALS, arrivals),
            (names.ROUTER_HELD, held),
            (names.ROUTER_FLEET_ENGINES, 1),
            (names.ROUTER_FLEET_REQUESTS_RUNNING, running),
            (names.ROUTER_FLEET_REQUESTS_WAITING, waiting),
        )
    ).encode()


class Lab:
    def __init__(self) -> None:
        self.clock, self.reasons = 0.0, list[str]()
        self.pods, self.view = SilentPods(), ClusterView()
        self.scaler = self.fresh()
        self.service(autoscaling=SCALING)
        self.pod("r1", "router", "10.0.0.1", ready=False)
        self.pod("e1", "engine", "10.0.0.9")

    def fresh(self) -> Autoscaler:
        return Autoscaler(self.pods, self.view, self.reasons.append, lambda: self.clock)

    def service(self, uid: str = "s", status: dict[str, Any] | None = None, **spec: Any) -> None:
        body = {
            "metadata": {"name": "qwen", "namespace": "apps", "uid": uid},
            "spec": {"model": {"uri": "builtin://tiny"}, **spec},
            "status": status or {},
        }
        self.view.note(INFERENCE_SERVICE, body)

    def pod(
        self, name: str, component: str, ip: str, ready: bool = True, service: str = "qwen", restarts: int = 0
    ) -> None:
        labels = {"pagefleet.dev/service": service, "app.kubernetes.io/component": component}
        conditions = [{"type": "Ready", "status": str(ready)}]
        containers = [{"name": component, "restartCount": restarts}]
        status = {"podIP": ip, "phase": "Running", "conditions": conditions, "containerStatuses": containers}
        self.view.note(POD, {"metadata": {"name": name, "namespace": "apps", "labels": labels}, "status": status})

    def deployment(self, replicas: int, refused: bool = False, kind: str = "Deployment") -> None:
        owner = [{"uid": "s", "controller": True}]
        conditions = [{"type": "ReplicaFailure", "status": "True"}] if refused else []
        metadata = {"name": "qwen-engine", "namespace": "apps", "uid": "d", "ownerReferences": owner}
        body = {"spec": {"replicas": replicas}, "status": {"conditions": conditions}}
        labels = {"pagefleet.dev/service": "qwen"}
        self.view.note(BY_NAME[kind], {"metadata": metadata | {"labels": labels}, **body})

    def look(self, said: bytes | None = None, times: int = 1) -> list[Key]:
        woken: list[Key] = []
        for _ in range(times):
            self.clock += 2.0
            self.pods.pages = {"10.0.0.1": said} if said is not None else {}
            woken += asyncio.run(self.scaler.look())
        return woken

    def seen(self) -> tuple[int, str]:
        found = self.scaler.seen(KEY)
        assert found is not None
        return found.desired, found.reason


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_waiting_requests_scale_up_and_wake_the_reconcile_once(lab: Lab) -> None:
    assert lab.look(page(arrivals=1)) == [KEY], "the first decision"
    woken = lab.look(page(arrivals=9, waiting=7, running=2), times=8)
    assert lab.seen()[0] == 4
    assert len(woken) <= 2
    assert lab.reasons[-1] in ("Demand", "Panic", "Steady", "CoolingDown")


def test_a_router_that_is_silent_holds_the_number(lab: Lab) -> None:
    lab.deployment(3)
    lab.look(times=400)
    assert lab.seen() == (3, "SignalsMissing")
    (gauge,) = lab.scaler.gauges()
    assert (gauge.desired, gauge.current, gauge.age_s) == (3, 1, float("inf"))


def test_a_router_that_has_only_begun_to_run_is_not_missing_yet(lab: Lab) -> None:
    lab.look(page(arrivals=1, running=1))
    lab.pod("r2", "router", "10.0.0.2", ready=False)
    lab.look(page(arrivals=1, running=1), times=4)
    assert lab.seen() == (1, "Steady")
    lab.look(page(arrivals=1, running=1), times=3)
    assert lab.seen() == (1, "SignalsMissing")


def test_an_idle_service_goes_to_zero_and_the_first_request_wakes_it(lab: Lab) -> None:
    lab.look(page(arrivals=5), times=9)
    assert lab.seen() == (0, "Idle")
    assert lab.look(page(arrivals=6, held=1)) == [KEY]
    assert lab.seen() == (1, "WokenUp")


def test_a_new_leader_goes_on_from_the_status(lab: Lab) -> None:
    scaling = {"mode": "Internal", "current": 3, "desired": 3, "reason": "Steady", "at": "2026-01-01T00:00:00Z"}
    lab.service(status={"observedGeneration": 1, "modelName": "qwen", "scaling": scaling}, autoscaling=SCALING)
    lab.look(page(arrivals=1, running=1))
    assert lab.seen()[0] == 3
    lab.scaler.start_over()
    assert lab.scaler.seen(KEY) is None


def test_a_new_leader_counts_on_no_step_of_one_kind_of_engines_replacing_the_other(lab: Lab) -> None:
    scaling = {"mode": "Internal", "current": 4, "desired": 4, "reason": "Steady", "at": "2026-01-01T00:00:00Z"}
    lab.service(status={"observedGeneration": 1, "modelName": "qwen", "scaling": scaling}, autoscaling=SCALING)
    lab.deployment(3)
    lab.deployment(1, kind="LeaderWorkerSet")
    lab.look(page(arrivals=1, running=1))
    assert lab.seen()[0] == 4


@pytest.mark.parametrize("spec", [{}, {"autoscaling": {"mode": "External"}}])
def test_others_are_not_asked(lab: Lab, spec: dict[str, Any]) -> None:
    lab.look(page())
    lab.service(**spec)
    assert lab.look(page()) == []
    assert lab.scaler.seen(KEY) is None


def test_an_edit_that_is_wrong_changes_nothing_and_one_that_is_right_counts(lab: Lab) -> None:
    lab.look(page(running=1))
    lab.service(autoscaling={"min": 9, "max": 2})
    lab.look(page(running=1))
    assert lab.seen()[0] == 1
    lab.service(autoscaling={"min": 2, "max": 3})
    lab.look(page(running=1))
    assert lab.seen()[0] == 2


def test_a_paused_service_has_no_gauge_and_is_not_decided_for(lab: Lab) -> None:
    lab.look(page(running=1))
    assert len(list(lab.scaler.gauges())) == 1
    lab.service(autoscaling=SCALING, paused=True)
    lab.look(page(running=1))
    assert (list(lab.scaler.gauges()), lab.scaler.seen(KEY)) == ([], None)
    lab.service(autoscaling=SCALING)
    lab.look(page(running=1))
    assert (len(list(lab.scaler.gauges())), lab.seen()[0]) == (1, 1)


def test_many_dead_routers_take_no_longer_than_one(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked all at once: each is answered only when all of them have been asked."""
    asked = set[str]()
    all_asked = asyncio.Event()

    async def router_page(ip: str) -> bytes | None:
        asked.add(ip)
        if len(asked) == 61:
            all_asked.set()
        await all_asked.wait()
        return page(arrivals=1, running=1) if ip == "10.0.0.1" else None

    monkeypatch.setattr(lab.pods, "router_page", router_page)
    monkeypatch.setattr("pagefleet_operator.handlers.autoscaler.ASK_S", 60.0)
    for number in range(60):
        body = {"metadata": {"name": f"s{number}", "namespace": "apps", "uid": str(number)}, "status": {}}
        spec = {"model": {"uri": "builtin://tiny"}, "autoscaling": SCALING}
        lab.view.note(INFERENCE_SERVICE, {**body, "spec": spec})
        lab.pod(f"dead{number}", "router", f"10.0.1.{number}", service=f"s{number}")
    lab.look()
    assert len(asked) == 61


def test_a_router_that_says_nothing_is_given_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(ip: str) -> bytes | None:
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(lab.pods, "router_page", never)
    monkeypatch.setattr("pagefleet_operator.handlers.autoscaler.ASK_S", 0.01)
    lab.look(times=10)
    assert lab.seen()[1] == "SignalsMissing"


def test_an_engine_that_fails_again_and_again_or_starts_for_too_long_is_not_on_its_way() -> None:
    starting = PodSeen("qwen-engine-1", "engine", "", phase="Running", created=NOW - timedelta(seconds=100))
    crashed = replace(starting, containers=(ContainerSeen("engine", restarts=3),))
    once = replace(starting, containers=(ContainerSeen("engine", restarts=1),))
    body = {"spec": {"replicas": 3, "progressDeadlineSeconds": 300}}
    found = engines_seen([starting, crashed, once], body, NOW)
    assert (found.ready, found.warming, found.failing, found.count) == (0, 2, 1, 3)
    assert engines_seen([starting], body, NOW + timedelta(seconds=250)).failing == 1


def test_a_group_that_crashes_again_and_again_is_not_on_its_way_though_its_pods_are_new() -> None:
    def leader(number: int, **seen: Any) -> PodSeen:
        place = GroupPlace("qwen-engine", number, 0, 2, 1)
        return PodSeen(f"qwen-engine-{number}", "engine", "r", place=place, created=NOW - timedelta(seconds=9), **seen)

    waits = {"type": "Progressing", "status": "True", "lastTransitionTime": "2025-12-31T23:00:00Z"}
    body = {
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "qwen-engine", "annotations": {"pagefleet.dev/progress-seconds": "300"}},
        "spec": {"replicas": 2},
        "status": {"conditions": [waits]},
    }
    other = PodSeen("qwen-engine-a", "engine", "r", created=NOW)
    found = engines_seen([leader(0), leader(1), other], body, NOW)
    assert (found.ready, found.warming, found.failing) == (0, 1, 2), "a Deployment's are judged by themselves"
    lately = leader(1, ready=True, turned=NOW - timedelta(seconds=200))
    assert engines_seen([leader(0), lately], body, NOW).warming == 1, "the last one got ready in time"
    follower = replace(lately, component="follower", ready=True)
    assert engines_seen([leader(0), follower], body, NOW).failing == 1, "those that follow are no engines"
    assert engines_seen([leader(0), lately], body, NOW + timedelta(seconds=101)).failing == 1


def test_a_service_whose_engine_crashes_for_ever_goes_to_zero_when_nobody_asks(lab: Lab) -> None:
    lab.pod("e1", "engine", "10.0.0.9", ready=False, restarts=7)
    lab.look(page(arrivals=5), times=12)
    assert lab.seen() == (0, "Idle")


def test_pods_that_may_not_be_created_are_counted() -> None:
    body = {"spec": {"replicas": 3}, "status": {"conditions": [{"type": "ReplicaFailure", "status": "True"}]}}
    assert engines_seen((), body, NOW).refused == 3
    assert engines_seen((), {"spec": {"replicas": 3}}, NOW).refused == 0
    assert engines_seen((), {"spec": {"replicas": 3}}, NOW).endpoints == 1
    engine = PodSeen("qwen-engine-1", "engine", "", phase="Running", ready=True)
    leaving = [replace(engine, deleting=True)] * 2
    assert engines_seen([engine, *leaving], body, NOW).refused == 0, "two come when two have left"
    assert engines_seen([engine, leaving[0]], body, NOW).refused == 1


PART = {"min": 1, "max": 4}


def part_pod(lab: Lab, role: str) -> None:
    labels = {
        "pagefleet.dev/service": "qwen",
        "app.kubernetes.io/component": "engine",
        "pagefleet.dev/role": role,
        "pagefleet.dev/revision": "r",
    }
    status = {"podIP": "10.0.1.1", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    lab.view.note(
        POD, {"metadata": {"name": f"qwen-{role}-r-1", "namespace": "apps", "labels": labels}, "status": status}
    )
    metadata = {
        "name": f"qwen-{role}-r",
        "namespace": "apps",
        "uid": role,
        "labels": labels,
        "ownerReferences": [{"uid": "s", "controller": True}],
    }
    lab.view.note(BY_NAME["Deployment"], {"metadata": metadata, "spec": {"replicas": 1}})


def test_each_part_of_a_disaggregated_service_is_decided_about() -> None:
    lab = Lab()
    lab.view.note(POD, {"metadata": {"name": "e1", "namespace": "apps", "labels": {}}})
    lab.service(
        disaggregation={
            "prefill": {"autoscaling": {**PART, "target": {"queue": 2}}},
            "decode": {"autoscaling": {**PART, "target": {"kvUsage": 0.5}}},
        }
    )
    for role in ("prefill", "decode"):
        part_pod(lab, role)
    lab.look(page(arrivals=9, waiting=6, running=1), times=8)
    prefill, decode = lab.scaler.seen(KEY, "prefill"), lab.scaler.seen(KEY, "decode")
    assert prefill is not None
    assert decode is not None
    assert (prefill.desired, decode.desired) == (3, 1), "what waits is for prefill engines"
    assert lab.scaler.seen(KEY) is None, "there are no engines for whole requests"
    assert {(one.role, one.desired) for one in lab.scaler.gauges()} == {("prefill", 3), ("decode", 1)}


def test_a_part_that_is_added_keeps_what_the_other_knows() -> None:
    lab = Lab()
    lab.service(disaggregation={"prefill": {"autoscaling": {**PART, "target": {"queue": 2}}}})
    part_pod(lab, "prefill")
    part_pod(lab, "decode")
    lab.look(page(arrivals=9, waiting=6, running=1), times=8)
    lab.service(
        disaggregation={"prefill": {"autoscaling": {**PART, "target": {"queue": 2}}}, "decode": {"autoscaling": PART}}
    )
    lab.look(page(arrivals=9, waiting=6, running=1))
    prefill, decode = lab.scaler.seen(KEY, "prefill"), lab.scaler.seen(KEY, "decode")
    assert prefill is not None
    assert decode is not None
    assert (prefill.desired, decode.desired) == (3, 1)
