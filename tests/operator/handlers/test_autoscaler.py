"""The loop that asks routers and decides: whose pages it reads, what it remembers, and whom it wakes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from pagefleet_operator.apply.kinds import BY_NAME, INFERENCE_SERVICE, POD
from pagefleet_operator.handlers.autoscaler import Autoscaler, engines_seen
from pagefleet_operator.handlers.cluster_view import ClusterView, Key
from pagefleet_operator.plan.observed import PodSeen
from pagefleet_protocol import metric_names as names

from tests.fakes.kube_operator import SilentPods

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

    def pod(self, name: str, component: str, ip: str, ready: bool = True) -> None:
        labels = {"pagefleet.dev/service": "qwen", "app.kubernetes.io/component": component}
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"podIP": ip, "phase": "Running", "conditions": conditions}
        self.view.note(POD, {"metadata": {"name": name, "namespace": "apps", "labels": labels}, "status": status})

    def deployment(self, replicas: int, refused: bool = False) -> None:
        owner = [{"uid": "s", "controller": True}]
        conditions = [{"type": "ReplicaFailure", "status": "True"}] if refused else []
        metadata = {"name": "qwen-engine", "namespace": "apps", "uid": "d", "ownerReferences": owner}
        body = {"spec": {"replicas": replicas}, "status": {"conditions": conditions}}
        labels = {"pagefleet.dev/service": "qwen"}
        self.view.note(BY_NAME["Deployment"], {"metadata": metadata | {"labels": labels}, **body})

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


def test_pods_that_may_not_be_created_are_counted() -> None:
    body = {"spec": {"replicas": 3}, "status": {"conditions": [{"type": "ReplicaFailure", "status": "True"}]}}
    assert engines_seen((), body).refused == 3
    assert engines_seen((), {"spec": {"replicas": 3}}).refused == 0
    engine = PodSeen("qwen-engine-1", "engine", "", phase="Running", ready=True)
    leaving = [replace(engine, deleting=True)] * 2
    assert engines_seen([engine, *leaving], body).refused == 0, "two come when two have left"
    assert engines_seen([engine, leaving[0]], body).refused == 1
