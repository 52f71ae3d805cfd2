"""The emulated LeaderWorkerSet controller: what it makes, and when it ends what."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.leader_worker_set import EXCLUSIVE, GROUP, LEADER_UID, NODE, Body, decide

NOW = "2026-11-23T05:00:00Z"


def made(replicas: int = 2, image: str = "engine:1", surge: int = 0, missing: int = 1, topology: str = "") -> Body:
    template = {"metadata": {"labels": {"app": "engine"}}, "spec": {"containers": [{"name": "engine", "image": image}]}}
    return {
        "metadata": {
            "name": "qwen-engine",
            "namespace": "ns",
            "uid": "set",
            "annotations": {EXCLUSIVE: topology} if topology else {},
        },
        "spec": {
            "replicas": replicas,
            "leaderWorkerTemplate": {"size": 3, "leaderTemplate": template, "workerTemplate": template},
            "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
            "rolloutStrategy": {"rollingUpdateConfiguration": {"maxSurge": surge, "maxUnavailable": missing}},
        },
    }


class Site:
    """Pods as they are made and ended at once."""

    def __init__(self) -> None:
        self.pods: dict[str, Body] = {}
        self.services: set[str] = set()
        self.born = 0
        self.slow: set[str] = set()
        """Pods that do not get ready."""

    def turn(self, wanted: Body) -> Any:
        """Do what is decided; pods are ready by the next turn."""
        for name, pod in self.pods.items():
            ready = str(name not in self.slow)
            pod.setdefault("status", {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]})
        decided = decide(wanted, self.pods.values(), self.services, NOW)
        for name in decided.delete:
            self.pods.pop(name, None)
        for body in decided.create:
            if body["kind"] == "Service":
                self.services.add(body["metadata"]["name"])
            else:
                self.born += 1
                body["metadata"]["uid"] = str(self.born)
                assert body["metadata"]["name"] not in self.pods
                self.pods[body["metadata"]["name"]] = body
        return decided

    def settle(self, wanted: Body) -> Body:
        for _ in range(40):
            decided = self.turn(wanted)
            if not decided.create and not decided.delete:
                return dict(decided.status)
        raise AssertionError("it never ends")

    def ready(self) -> int:
        """Return how many groups are whole."""
        groups: dict[str, int] = {}
        for pod in self.pods.values():
            groups[pod["metadata"]["labels"][GROUP]] = groups.get(pod["metadata"]["labels"][GROUP], 0) + (
                "status" in pod
            )
        return sum(count == 3 for count in groups.values())


def test_groups_have_the_names_and_variables_that_containers_rely_on() -> None:
    site = Site()
    status = site.settle(made())
    assert sorted(site.pods) == [f"qwen-engine-{group}{tail}" for group in (0, 1) for tail in ("", "-1", "-2")]
    assert site.services == {"qwen-engine-0", "qwen-engine-1"}
    follower = site.pods["qwen-engine-1-2"]
    assert (follower["metadata"]["labels"][GROUP], follower["metadata"]["labels"][NODE]) == ("1", "2")
    assert (follower["spec"]["hostname"], follower["spec"]["subdomain"]) == ("qwen-engine-1-2", "qwen-engine-1")
    assert follower["spec"]["containers"][0]["env"] == [
        {"name": "LWS_LEADER_ADDRESS", "value": "qwen-engine-1.qwen-engine-1.ns"},
        {"name": "LWS_GROUP_SIZE", "value": "3"},
        {"name": "LWS_WORKER_INDEX", "value": "2"},
    ]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    assert [one["type"] for one in status["conditions"] if one["status"] == "True"] == ["Available"]


@pytest.mark.parametrize("broken", ["qwen-engine-0", "qwen-engine-0-2"])
def test_a_container_that_ends_costs_its_group_and_no_other(broken: str) -> None:
    site = Site()
    site.settle(made())
    site.turn(made())
    before = {name: pod["metadata"]["uid"] for name, pod in site.pods.items()}
    site.pods[broken]["status"]["containerStatuses"] = [{"name": "engine", "restartCount": 1}]
    decided = site.turn(made())
    assert set(decided.delete) == {"qwen-engine-0", "qwen-engine-0-1", "qwen-engine-0-2"}
    assert decided.events == (
        ("RecreateGroup", f"Worker pod {broken} failed, deleted leader pod qwen-engine-0 to recreate group 0"),
    )
    site.settle(made())
    after = {name: pod["metadata"]["uid"] for name, pod in site.pods.items()}
    assert {name for name in after if after[name] != before[name]} == set(decided.delete)
    assert site.pods["qwen-engine-0-1"]["metadata"]["annotations"][LEADER_UID] == after["qwen-engine-0"]


def test_a_leader_that_is_told_to_go_keeps_those_that_follow_until_it_has_gone() -> None:
    site = Site()
    site.settle(made())
    site.turn(made())
    site.pods["qwen-engine-1"]["metadata"]["deletionTimestamp"] = NOW
    decided = decide(made(1), site.pods.values(), site.services, NOW)
    assert (decided.create, decided.delete) == ((), ())
    del site.pods["qwen-engine-1"]
    site.settle(made(1))
    assert sorted(site.pods) == ["qwen-engine-0", "qwen-engine-0-1", "qwen-engine-0-2"]


@pytest.mark.parametrize(("surge", "missing", "least", "most"), [(0, 1, 1, 2), (1, 0, 2, 3), (1, 1, 1, 3)])
def test_a_new_template_replaces_group_by_group_within_the_limits(
    surge: int, missing: int, least: int, most: int
) -> None:
    site = Site()
    site.settle(made(surge=surge, missing=missing))
    site.turn(made(surge=surge, missing=missing))
    after = made(image="engine:2", surge=surge, missing=missing)
    ready, there = [], []
    for _ in range(30):
        decided = site.turn(after)
        ready.append(site.ready())
        there.append(len({pod["metadata"]["labels"][GROUP] for pod in site.pods.values()}))
    assert decided.status["updatedReplicas"] == decided.status["replicas"] == 2
    assert min(ready) >= least
    assert max(there) <= most
    images = {pod["spec"]["containers"][0]["image"] for pod in site.pods.values()}
    assert images == {"engine:2"}


def test_a_new_template_that_does_not_work_stops_at_the_first_group() -> None:
    site = Site()
    site.settle(made())
    site.turn(made())
    site.slow = {"qwen-engine-1-1"}
    for _ in range(10):
        site.turn(made(image="engine:2"))
    assert site.pods["qwen-engine-0"]["spec"]["containers"][0]["image"] == "engine:1"


def test_pods_of_an_exclusive_topology_come_once_their_leader_has_a_node() -> None:
    site = Site()
    wanted = made(1, topology="block")
    site.settle(wanted)
    assert list(site.pods) == ["qwen-engine-0"]
    terms = site.pods["qwen-engine-0"]["spec"]["affinity"]
    assert set(terms) == {"podAffinity", "podAntiAffinity"}
    site.pods["qwen-engine-0"]["spec"]["nodeName"] = "n1"
    site.settle(wanted)
    assert len(site.pods) == 3
