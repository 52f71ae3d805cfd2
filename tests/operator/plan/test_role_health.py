"""Groups that are late, and the revision that they are of where nobody wants another."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pagefleet_operator.plan.observed import Child, GroupPlace, Observed
from pagefleet_operator.plan.role_health import see_role
from pagefleet_operator.plan.role_seen import RoleSeen

from tests.operator.plan.kube_world import NOW, pod

SET = "qwen-engine"
LEADER = pod(SET + "-0", created=NOW, place=GroupPlace(SET, 0, 0, 2, 1))
FOLLOWER = replace(LEADER, name=SET + "-0-1", component="follower", place=GroupPlace(SET, 0, 1, 2, 1))


def see(*pods: Any, revision: str = "new") -> RoleSeen:
    waits = {"type": "Progressing", "status": "True", "lastTransitionTime": str(NOW - timedelta(hours=1))}
    labels = {"pagefleet.dev/revision": "new"}
    body = {
        "kind": "LeaderWorkerSet",
        "metadata": {"name": SET, "annotations": {"pagefleet.dev/progress-seconds": "300"}},
        "spec": {"replicas": 1, "leaderWorkerTemplate": {"leaderTemplate": {"metadata": {"labels": labels}}}},
        "status": {"conditions": [waits]},
    }
    children = {("LeaderWorkerSet", SET): Child(body, ours=True)}
    return see_role("engine", ("ns", "qwen"), 1, revision, Observed(now=NOW, children=children, pods=pods))


def test_the_revision_of_groups_under_a_spec_that_is_not_read_is_their_own() -> None:
    ready = replace(LEADER, ready=True, turned=NOW)
    assert see(ready, revision="").revision == "new"
    assert see(ready, revision="") == see(ready)


@pytest.mark.parametrize(
    ("since", "follower", "late"), [(400, False, True), (200, False, False), (400, True, True), (200, True, True)]
)
def test_groups_are_late_where_no_leader_got_ready_lately(since: int, follower: bool, late: bool) -> None:
    turned = NOW - timedelta(seconds=since)
    one = replace(FOLLOWER if follower else LEADER, ready=True, turned=turned)
    assert see(one).late is late
