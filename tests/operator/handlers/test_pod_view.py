"""What is read out of a pod."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pagefleet_operator.handlers.seen import pod_seen, timestamp
from pagefleet_operator.plan.observed import ContainerSeen


def pod(status: dict[str, Any] | None = None, component: str = "engine", **metadata: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": component, "pagefleet.dev/revision": "0123456789"}
    made = {"metadata": {"name": "qwen-engine-1", "uid": "u", "labels": labels, **metadata}}
    return made if status is None else {**made, "status": status}


def test_a_pod_that_was_just_made() -> None:
    seen = pod_seen(pod())
    assert seen is not None
    assert (seen.name, seen.component, seen.revision, seen.phase) == (
        "qwen-engine-1",
        "engine",
        "0123456789",
        "Pending",
    )
    assert not seen.ready
    assert not seen.deleting
    assert seen.containers == ()


@pytest.mark.parametrize("component", ["", "database"])
def test_a_pod_of_no_component_is_none_of_ours(component: str) -> None:
    assert pod_seen(pod(component=component)) is None


def test_a_running_pod() -> None:
    status = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-21T12:00:09Z"},
            {"type": "PodScheduled", "status": "True"},
        ],
        "containerStatuses": [{"name": "engine", "state": {"running": {}}, "restartCount": 2}],
    }
    body = {**pod(status, creationTimestamp="2026-11-21T12:00:00Z"), "spec": {"nodeName": "one"}}
    seen = pod_seen(body)
    assert seen is not None
    assert (seen.ready, seen.ip, seen.node, seen.unschedulable) == (True, "10.0.0.1", "one", "")
    assert seen.created == datetime(2026, 11, 21, 12, tzinfo=UTC)
    assert seen.turned == datetime(2026, 11, 21, 12, 0, 9, tzinfo=UTC)
    assert seen.containers == (ContainerSeen("engine", state="running", restarts=2),)


@pytest.mark.parametrize(("role", "seen"), [("prefill", "prefill"), ("decode", "decode"), ("king", None)])
def test_an_engine_tells_its_part(role: str, seen: str | None) -> None:
    body = pod()
    body["metadata"]["labels"]["pagefleet.dev/role"] = role
    found = pod_seen(body)
    assert found is not None
    assert found.role == seen


def test_a_pod_without_a_node_says_why() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    seen = pod_seen(pod({"conditions": [condition]}))
    assert seen is not None
    assert seen.unschedulable == "0/1 nodes"
    del condition["message"]
    seen = pod_seen(pod({"conditions": [condition]}))
    assert seen is not None
    assert seen.unschedulable == "Unschedulable"


def test_a_pod_that_was_put_out() -> None:
    seen = pod_seen(pod({"phase": "Failed", "reason": "Evicted", "message": "disk"}, deletionTimestamp="now"))
    assert seen is not None
    assert (seen.phase, seen.reason, seen.message, seen.deleting) == ("Failed", "Evicted", "disk", True)


def test_containers_that_wait_that_ended_and_that_ended_before() -> None:
    ended = {"exitCode": 137, "reason": "OOMKilled", "message": "killed"}
    status = {
        "initContainerStatuses": [{"name": "download", "state": {"terminated": {"exitCode": 0}}, "restartCount": 0}],
        "containerStatuses": [
            {
                "name": "engine",
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                "lastState": {"terminated": ended},
                "restartCount": 3,
            }
        ],
    }
    seen = pod_seen(pod(status))
    assert seen is not None
    assert seen.containers == (
        ContainerSeen("download", init=True, state="terminated", exit_code=0),
        ContainerSeen(
            "engine",
            state="waiting",
            reason="CrashLoopBackOff",
            message="back-off",
            restarts=3,
            last_reason="OOMKilled",
            last_message="killed",
            last_exit_code=137,
        ),
    )


@pytest.mark.parametrize("text", [None, "", "yesterday"])
def test_what_is_no_time_is_none(text: str | None) -> None:
    assert timestamp(text) is None
