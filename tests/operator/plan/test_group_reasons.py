"""A group that was made anew is told of until it is ready, and of no group that is new for another reason."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pagefleet_operator.plan.group_reasons import group_troubles
from pagefleet_operator.plan.observed import EventSeen, GroupPlace, PodSeen
from pagefleet_operator.plan.pod_reasons import EventLog

from tests.operator.plan.kube_world import NOW, pod

SET = "qwen-engine"
BODY = {"metadata": {"name": SET, "namespace": "ns"}, "spec": {"replicas": 2}, "status": {"replicas": 2}}
FAILED_AT = NOW - timedelta(minutes=5)
ANEW = EventSeen(
    kind="LeaderWorkerSet",
    name=SET,
    reason="RecreateGroup",
    message=f"Worker pod {SET}-1-1 failed, deleted leader pod {SET}-1 to recreate group 1",
    last_seen=FAILED_AT,
)


def group(number: int, created_s: float, ready: bool) -> list[PodSeen]:
    """Return both pods of a group, made so long after the failure."""
    created = FAILED_AT + timedelta(seconds=created_s)
    names = (f"{SET}-{number}", f"{SET}-{number}-1")
    return [
        pod(name, ready=ready, created=created, place=GroupPlace(SET, number, node, 2, 1))
        for node, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("made", "told"),
    [
        pytest.param(group(1, 40, ready=False), True, id="on its way again"),
        pytest.param(group(1, 40, ready=True), False, id="back"),
        pytest.param(group(1, 40, ready=True) + group(2, 200, ready=False), False, id="back, and another is new"),
        pytest.param(group(1, 200, ready=False), False, id="replaced later, by a new revision"),
    ],
)
def test_what_is_told_of_a_group_that_was_made_anew(made: list[PodSeen], told: bool) -> None:
    found = [one.message for one in group_troubles(BODY, [*group(0, -900, ready=True), *made], EventLog((ANEW,)), NOW)]
    assert [one for one in found if "a group was made anew" in one and f"{SET}-1-1 failed" in one] == found
    assert bool(found) is told
