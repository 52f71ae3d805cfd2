"""A new revision that is tried out in a cluster: what exists at each step, and what the status says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pagefleet_operator.plan.announcements import announcements
from pagefleet_operator.plan.canary import Latency, RevisionFigures, TrialFigures
from pagefleet_operator.plan.observed import PodSeen, ScalingSeen
from pagefleet_protocol.kube_names import LABEL_CANARY, LABEL_REVISION

from tests.operator.plan.kube_world import World, condition, container, service, told

STEPS = [{"percent": 10, "seconds": 20}, {"percent": 50, "seconds": 20}]
CANARY = {"steps": STEPS, "analysis": {"minRequests": 20, "patience": 60}}
GOOD = RevisionFigures(answered=90, first_token=Latency(90, 9.0), between_tokens=Latency(90, 0.9))
EQUAL = TrialFigures(GOOD, GOOD)
WORSE = TrialFigures(replace(GOOD, failed=10), GOOD)
STABLE = ("Deployment", "qwen-engine")


def spec(length: int = 1024, replicas: int = 4, **more: Any) -> dict[str, Any]:
    return {"replicas": replicas, "engine": {"maxModelLen": length}, "rollout": {"canary": CANARY}, **more}


def edited(figures: TrialFigures | None = EQUAL, **more: Any) -> World:
    """Return a service that serves, and whose spec has just become another one."""
    world = World(service(**spec(**more)))
    world.settle()
    world.trial = figures
    world.edit(**spec(2048, **more))
    return world


def trials(world: World) -> dict[str, int]:
    """Return the engines asked for by Deployments of revisions that are tried out."""
    return {
        name: body["spec"]["replicas"]
        for (kind, name), body in world.children.items()
        if kind == "Deployment" and name.startswith("qwen-engine-")
    }


def share(world: World) -> str:
    found = world.children["Service", "qwen-engine"]["metadata"]["labels"].get(LABEL_CANARY, "")
    return str(found).partition(".")[2]


def phase(world: World) -> str:
    status = world.status.canary if world.status else None
    return f"{status.phase} {status.step}" if status else ""


def revision(world: World) -> str:
    return str(world.children[STABLE]["spec"]["template"]["metadata"]["labels"][LABEL_REVISION])


def until(world: World, wanted: str, most: int = 30) -> None:
    for _ in range(most):
        if phase(world) == wanted:
            return
        world.step()
        serving = [one for one in world.of("engine") if one.ready]
        assert len(serving) >= 4, "the old engines all stay, and the new ones replace one after the other"
    raise AssertionError(f"{phase(world)} is no {wanted}")


def test_step_by_step_beside_the_old_engines_and_then_in_their_place() -> None:
    world = edited()
    old = revision(world)
    world.step()
    assert (phase(world), list(trials(world).values()), share(world)) == ("Starting 1", [1], "0")
    until(world, "Analysing 1")
    assert (revision(world), share(world), world.children[STABLE]["spec"]["replicas"]) == (old, "10", 4)
    assert world.status is not None
    assert told(world.status, "Progressing") == ("True", "Canary")
    assert "gets 10 % of the requests for 20 s, and at least 20" in condition(world.status, "Progressing").message
    until(world, "Starting 2")
    until(world, "Analysing 2")
    assert (list(trials(world).values()), share(world)) == ([2], "50")
    until(world, "Promoted 2")
    world.settle()
    assert revision(world) != old
    assert (trials(world), share(world)) == ({}, "")
    assert {one.revision for one in world.of("engine")} == {revision(world)}
    assert len(world.of("engine")) == 4
    assert told(world.status, "Progressing") == ("False", "Settled")
    assert phase(world) == "Promoted 2"


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (2, 0), (0, 1), (1, 1)])
def test_replaces_the_old_engines_where_no_device_is_left(surge: int, unavailable: int) -> None:
    world = edited(rollout={"canary": CANARY, "maxSurge": surge, "maxUnavailable": unavailable})
    old, world.devices = revision(world), 4 + 2
    until(world, "Promoted 2")
    left = list(trials(world).values())
    for _ in range(20):
        world.step()
        assert sum(one.ready for one in world.of("engine")) >= 4
    assert (revision(world) != old, trials(world)) == (True, {})
    assert [(one.revision, one.ready) for one in world.of("engine")] == [(revision(world), True)] * 4
    assert left == ([2] if unavailable else []), "they stand in for engines that may be missing, and for no others"
    assert told(world.status, "Progressing") == ("False", "Settled")  # type: ignore[arg-type]


def test_the_pods_of_a_trial_have_the_revision_that_then_serves_and_are_known_by_their_names() -> None:
    world = edited()
    until(world, "Analysing 1")
    ((name, _),) = trials(world).items()
    (new,) = [one for one in world.of("engine") if one.name.startswith(f"{name}-")]
    assert name == f"qwen-engine-{new.revision}"
    selector = world.children["Deployment", name]["spec"]["selector"]["matchLabels"]
    assert selector[LABEL_REVISION] == new.revision
    until(world, "Promoted 2")
    world.settle()
    assert revision(world) == new.revision


def test_goes_back_and_stays_back_until_another_revision_is_wanted() -> None:
    world = edited(WORSE)
    old = revision(world)
    until(world, "RolledBack 1")
    world.settle()
    assert (revision(world), trials(world), share(world)) == (old, {}, "0")
    assert {one.revision for one in world.of("engine")} == {old}
    assert world.status is not None
    for kind, status in (("Progressing", "False"), ("Degraded", "True")):
        assert told(world.status, kind) == (status, "CanaryFailed")  # type: ignore[arg-type]
    assert "10 of its 100 requests fail" in condition(world.status, "Degraded").message
    assert told(world.status, "Ready") == ("True", "Serving")
    world.edit(**spec())
    world.settle()
    assert (phase(world), share(world)) == ("", "")
    assert told(world.status, "Progressing") == ("False", "Settled")
    world.trial = EQUAL
    world.edit(**spec(4096))
    world.step()
    assert phase(world) == "Starting 1"


def crash(one: PodSeen) -> PodSeen:
    return replace(one, containers=(container(state="terminated", exit_code=2, message="no such flag"),))


def test_engines_that_crash_go_back_at_once() -> None:
    world = edited()
    world.step()
    (name,) = trials(world)
    world.breaks = {name.removeprefix("qwen-engine-"): crash}
    until(world, "RolledBack 1", 4)
    assert world.status is not None
    assert world.status.canary is not None
    assert "its engines fail" in world.status.canary.message


def test_without_a_word_of_routers_it_waits_and_then_goes_back() -> None:
    world = edited(None)
    until(world, "Analysing 1")
    until(world, "RolledBack 1", 10)
    assert world.status is not None
    assert world.status.canary is not None
    assert "no router said" in world.status.canary.message


def test_what_went_back_does_not_come_when_nobody_looks() -> None:
    world = edited(WORSE, autoscaling={"max": 4, "scaleToZero": {}}, replicas=1)
    world.scaling = ScalingSeen(4, "Steady", "")
    world.settle()
    until(world, "RolledBack 1")
    old = revision(world)
    world.scaling = ScalingSeen(0, "Idle", "")
    world.settle()
    assert (world.children[STABLE]["spec"]["replicas"], revision(world)) == (0, old)
    world.edit(**spec(2048, replicas=1, autoscaling={"max": 4, "scaleToZero": {}}, paused=True))
    world.step()
    assert phase(world) == "RolledBack 1"


def test_what_does_not_serve_is_replaced_at_once() -> None:
    world = World(service(**spec()))
    world.settle()
    world.pods = [replace(one, ready=False) if one.component == "engine" else one for one in world.pods]
    world.edit(**spec(2048))
    world.step()
    assert (phase(world), trials(world)) == ("", {})


def test_the_first_engines_of_a_service_are_no_trial() -> None:
    world = World(service(**spec()))
    world.settle()
    assert (phase(world), trials(world), share(world)) == ("", {}, "")


@pytest.mark.parametrize("figures", [EQUAL, WORSE])
def test_each_step_and_the_end_are_events(figures: TrialFigures) -> None:
    world, said = edited(figures), []
    for _ in range(20):
        before = world.status
        world.step()
        assert world.status is not None
        said += [one for one in announcements(before, world.status) if one.reason.startswith("Canary")]
    reasons = [one.reason for one in said]
    started = ["CanaryStarting", "CanaryAnalysing"]
    assert reasons == ([*started, *started, "CanaryPromoted"] if figures is EQUAL else [*started, "CanaryFailed"])
    assert said[-1].type == ("Normal" if figures is EQUAL else "Warning")
