"""What breaks takes with it at most what was in flight there; who is asked next answers."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections import Counter

import pytest

from e2e.kubernetes.cluster import Cluster, Images, wait_until
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.load import ASKERS, STREAMERS, Account, Load
from e2e.kubernetes.node import kill_processes
from e2e.kubernetes.service import Service

FAILOVER_S = 20
API_SERVER_AWAY_S = 60


def failed(before: Account, after: Account) -> Counter[str]:
    """Count what failed in between, by `ask` and `stream`."""
    new = after.failures[len(before.failures) :]
    return Counter(failure.split()[1].rstrip(":") for failure in new)


def test_deleted_engines_and_routers_drain(cluster: Cluster, fleet: Service, load: Load) -> None:
    names = [min(fleet.pod_names("engine")), min(fleet.pod_names("router"))]
    for name in names:
        cluster.delete("v1", "Pod", name, fleet.namespace)
    wait_until(lambda: not any(cluster.get("v1", "Pod", name, fleet.namespace) for name in names), "both are gone")
    fleet.wait_until_settled()
    assert load.go_on().failures == ()


def test_a_killed_engine_fails_only_the_streams_that_it_had(
    cluster: Cluster, images: Images, privileged: str, fleet: Service, load: Load
) -> None:
    before = load.go_on()
    kill_processes(cluster, images.operator, privileged, fleet.pods("engine")[0])
    after = load.go_on(asked=40, streamed=4)
    lost = failed(before, after)
    assert lost["ask"] == 0, f"the router asks the other engine again: {after.failures}"
    assert lost["stream"] <= STREAMERS, after.failures
    fleet.wait_until_settled()
    assert load.go_on().failures == after.failures


def test_a_killed_router_fails_only_what_it_had(
    cluster: Cluster, images: Images, privileged: str, fleet: Service, load: Load
) -> None:
    before = load.go_on()
    kill_processes(cluster, images.operator, privileged, fleet.pods("router")[0])
    fleet.wait_until_settled()
    after = load.go_on()
    # Until its node has noticed, the Service leads to the killed one, too: connections that never came about.
    ends = [failure for failure in after.failures if "ConnectionRefused" not in failure]
    assert len(ends) <= ASKERS + STREAMERS, ends
    assert load.go_on().failures == after.failures
    assert before.failures == ()


def test_another_operator_takes_over_from_a_killed_one(
    cluster: Cluster, images: Images, privileged: str, installation: Installation, fleet: Service, load: Load
) -> None:
    wait_until(lambda: installation.leader() in installation.operator_names(), "an operator leads")
    leader = installation.leader()
    (pod,) = (one for one in installation.operators() if one["metadata"]["name"] == leader)
    kill_processes(cluster, images.operator, privileged, pod)

    began = time.monotonic()
    fleet.edit(rollout={"drainSeconds": 20, "progressSeconds": 1600})
    wait_until(lambda: progress_seconds(cluster, fleet) == 1600, "an edit takes effect", FAILOVER_S)
    assert time.monotonic() - began < FAILOVER_S
    assert load.go_on().failures == ()


def test_without_any_operator_everything_serves_on(
    cluster: Cluster, installation: Installation, fleet: Service, load: Load
) -> None:
    engines = fleet.pod_names("engine")
    installation.scale(0)
    try:
        cluster.delete("v1", "Pod", min(engines), fleet.namespace)
        assert load.go_on(asked=60, streamed=6).failures == ()
        wait_until(lambda: len(ready(cluster, fleet)) == 2, "Kubernetes replaces the engine by itself", 120)
        fleet.edit(rollout={"drainSeconds": 20, "progressSeconds": 1700})
    finally:
        installation.scale(2)
    fleet.wait_until_settled()
    assert progress_seconds(cluster, fleet) == 1700, "what was asked for meanwhile is done now"
    assert load.go_on().failures == ()


def ready(cluster: Cluster, fleet: Service) -> list[str]:
    return [name for name in fleet.pod_names("engine") if cluster.pod_is_ready(name, fleet.namespace)]


def progress_seconds(cluster: Cluster, fleet: Service) -> int:
    """Return what the engines' Deployment has of rollout.progressSeconds, which changes no pod."""
    deployment = cluster.get("apps/v1", "Deployment", f"{fleet.name}-engine", fleet.namespace)
    assert deployment is not None
    return int(deployment["spec"]["progressDeadlineSeconds"])


def test_without_an_api_server_everything_serves_on(
    cluster: Cluster, installation: Installation, fleet: Service, load: Load
) -> None:
    commands = [os.environ.get(f"PAGEFLEET_E2E_{verb}_API_SERVER") for verb in ("STOP", "START")]
    if not all(commands):
        pytest.skip("PAGEFLEET_E2E_STOP_API_SERVER and PAGEFLEET_E2E_START_API_SERVER name no commands")
    stop, start = (shlex.split(str(command)) for command in commands)
    restarts = installation.restarts()
    before = load.go_on()
    subprocess.run(stop, check=True)
    try:
        time.sleep(API_SERVER_AWAY_S)
    finally:
        subprocess.run(start, check=True)
    fleet.edit(rollout={"drainSeconds": 20, "progressSeconds": 1550})
    # Watches and looks each rest for up to half a minute by now, and the lease is to be had again.
    wait_until(lambda: progress_seconds(cluster, fleet) == 1550, "an edit takes effect", 120)
    after = load.go_on()
    assert after.failures == ()
    assert after.asked > before.asked + 40, "answers came while it was away"
    assert installation.restarts() == restarts, "an operator without an API server is as well as it can be"
