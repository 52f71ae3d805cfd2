"""Events are read about what is not well, seldom."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from pagefleet_operator.handlers.event_reader import KEPT_S, MAX_PODS, EventReader, event_seen, suspects
from pagefleet_operator.plan.observed import Child, Observed, PodSeen

from tests.fakes.kube_store_cluster import KINDS, StoreCluster

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def pod(name: str, **fields: Any) -> PodSeen:
    return PodSeen(name=name, component="engine", revision="r", **fields)


def observed(*pods: PodSeen, **children: dict[str, Any]) -> Observed:
    seen = {(kind, "qwen-x"): Child({"metadata": {}, **body}, ours=True) for kind, body in children.items()}
    return Observed(now=NOW, pods=pods, children=seen)


def event(name: str, kind: str, about: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "involvedObject": {"kind": kind, "name": about}, "reason": "Failed", **more}


def test_only_what_waits_is_suspect() -> None:
    pods = [pod("ready", ready=True), pod("going", deleting=True), pod("done", phase="Succeeded"), pod("waits")]
    assert suspects(observed(*pods), ["weights"]) == [("Pod", "waits"), ("PersistentVolumeClaim", "weights")]
    assert suspects(observed(pod("ready", ready=True)), ["weights"]) == []


def test_of_many_pods_a_few_are_asked_about() -> None:
    assert len(suspects(observed(*(pod(f"p{number}") for number in range(100))), [])) == MAX_PODS


def test_children_that_lack_something_are_suspect() -> None:
    claim = {"status": {"phase": "Pending"}}
    wanting = observed(
        PersistentVolumeClaim=claim, Job={}, Deployment={"spec": {"replicas": 2}, "status": {"replicas": 1}}
    )
    assert suspects(wanting, []) == [("PersistentVolumeClaim", "qwen-x"), ("Job", "qwen-x"), ("ReplicaSet", "")]
    content = observed(
        PersistentVolumeClaim={"status": {"phase": "Bound"}},
        Job={"status": {"active": 1}},
        Deployment={"spec": {"replicas": 0}},
    )
    assert suspects(content, []) == []


def test_events_come_the_oldest_first_and_those_of_other_services_not_at_all() -> None:
    cluster = StoreCluster()
    cluster.add_namespace("apps")
    for body in (
        event("b", "ReplicaSet", "qwen-engine-1", lastTimestamp="2026-11-21T12:00:02Z", message="late"),
        event("a", "ReplicaSet", "qwen-engine-1", lastTimestamp="2026-11-21T12:00:01Z", message="early"),
        event("c", "ReplicaSet", "other-engine-1", lastTimestamp="2026-11-21T12:00:01Z"),
    ):
        cluster.store.create(KINDS["Event"], "apps", body)
    found = asyncio.run(EventReader(cluster).read("apps", "qwen", [("ReplicaSet", "")]))
    assert [one.message for one in found] == ["early", "late"]


def test_an_answer_is_kept_for_a_moment() -> None:
    clock = [0.0]
    cluster = StoreCluster()
    cluster.add_namespace("apps")
    reader = EventReader(cluster, lambda: clock[0])

    async def scenario() -> None:
        for service in ("one", "two", "three"):
            await reader.read("apps", service, [("ReplicaSet", "")])
        assert len(cluster.requests) == 1
        clock[0] = KEPT_S
        await reader.read("apps", "one", [("ReplicaSet", "")])
        assert len(cluster.requests) == 2
        for number in range(1100):
            await reader.read("apps", "one", [("Pod", f"p{number}")])
        clock[0] += KEPT_S
        await reader.read("apps", "one", [("Pod", "last")])
        assert len(reader._answers) < 1000

    asyncio.run(scenario())


def test_both_generations_of_events_are_understood() -> None:
    new = {
        "metadata": {"creationTimestamp": "2026-11-21T11:00:00Z"},
        "regarding": {"kind": "Pod", "name": "p"},
        "reason": "Failed",
        "note": "why",
        "eventTime": "2026-11-21T11:30:00.5Z",
        "series": {"lastObservedTime": "2026-11-21T11:45:00.5Z"},
    }
    seen = event_seen(new)
    assert (seen.kind, seen.name, seen.reason, seen.message) == ("Pod", "p", "Failed", "why")
    assert seen.last_seen.minute == 45
    del new["series"]
    assert event_seen(new).last_seen.minute == 30
    assert event_seen({}).last_seen.year == 1970
