"""Which turns of a status become Kubernetes Events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from pagefleet_operator.plan.announcements import announcements
from pagefleet_operator.plan.observed import ContainerSeen
from pagefleet_operator.plan.verdict import Verdict, make_conditions
from pagefleet_protocol.inference_status import ConditionType, InferenceServiceStatus

from tests.operator.plan.kube_world import HF, World, event, service

GOOD: dict[ConditionType, tuple[bool | None, str]] = {
    "Ready": (True, "Serving"),
    "ModelCached": (True, "Cached"),
    "EngineReady": (True, "AllReady"),
    "RouterReady": (True, "AllReady"),
    "Progressing": (False, "Settled"),
    "Degraded": (False, "AsWanted"),
}


def status(
    changed: Mapping[ConditionType, tuple[bool | None, str]] | None = None, message: str = "words"
) -> InferenceServiceStatus:
    verdicts = {kind: Verdict(holds, reason, message) for kind, (holds, reason) in {**GOOD, **(changed or {})}.items()}
    return InferenceServiceStatus(
        observed_generation=1, model_name="m", conditions=make_conditions(verdicts, None, 1, "2026-03-01T12:00:00Z")
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {}, []),
        ({}, {"Ready": (False, "CrashLoop"), "EngineReady": (False, "CrashLoop")}, [("Warning", "CrashLoop")]),
        ({"Ready": (False, "CrashLoop")}, {"Ready": (False, "OutOfMemory")}, [("Warning", "OutOfMemory")]),
        ({"Ready": (False, "CrashLoop")}, {}, [("Normal", "Serving")]),
        ({}, {"Ready": (False, "Starting")}, []),
        ({}, {"Degraded": (True, "PartlyReady")}, []),
        ({"Degraded": (True, "PartlyReady")}, {}, []),
        ({"ModelCached": (False, "Downloading")}, {}, [("Normal", "Cached")]),
        ({}, {"ModelCached": (False, "Downloading")}, [("Normal", "Downloading")]),
        ({}, {"ModelCached": (None, "ProfileNotFound")}, []),
        ({}, {"Progressing": (True, "RollingOut")}, [("Normal", "RollingOut")]),
        ({"Progressing": (True, "RollingOut")}, {}, [("Normal", "Settled")]),
        ({}, {"Progressing": (False, "RolloutStopped"), "Degraded": (True, "RolloutStopped")},
         [("Warning", "RolloutStopped")]),
        ({}, {"Ready": (False, "ScaledToZero")}, [("Normal", "ScaledToZero")]),
    ],
)  # fmt: skip
def test_turns(
    before: Mapping[ConditionType, tuple[bool | None, str]],
    after: Mapping[ConditionType, tuple[bool | None, str]],
    expected: list[tuple[str, str]],
) -> None:
    assert [(one.type, one.reason) for one in announcements(status(before), status(after))] == expected


def test_words_alone_are_no_news() -> None:
    assert announcements(status(message="40 %"), status(message="41 %")) == ()


def test_a_first_status_tells_trouble_and_no_more_than_that_it_serves() -> None:
    assert [one.reason for one in announcements(None, status({"Degraded": (True, "InvalidSpec")}))] == [
        "InvalidSpec",
        "Serving",
        "Cached",
    ]


def test_the_life_of_a_service_in_events() -> None:
    world = World(service(**HF, replicas=2))
    said: list[str] = []

    def run(steps: int) -> list[str]:
        said.clear()
        for _ in range(steps):
            before = world.status
            world.step()
            assert world.status is not None
            said.extend(one.reason for one in announcements(before, world.status))
        return list(said)

    assert run(12) == ["Inspecting", "Serving", "Settled"]
    assert run(5) == []
    world.edit(**HF, replicas=2, engine={"args": ["--seed", "1"]})
    assert run(12) == ["RollingOut", "Settled"]
    world.edit(**HF, replicas=2, engine={"args": ["--wrong"]})
    broken = ContainerSeen("engine", state="terminated", exit_code=2, message="no such flag")
    world.breaks = {world.plan().status.roles[0].revision: lambda one: replace(one, containers=(broken,))}
    assert run(12) == ["RollingOut", "RolloutStopped"]
    assert run(5) == []


def test_a_start_is_no_trouble_though_routers_are_ready_after_their_engines() -> None:
    world = World(service())
    routers = world.plan().status.roles[1].revision
    world.breaks = {routers: lambda one: one}
    said: list[tuple[str, str]] = []
    for _ in range(8):
        if any(one.ready for one in world.of("engine")):
            world.breaks = {}
        probed = [one.name for one in world.of("router") if not one.ready]
        world.events = tuple(event("Unhealthy", "Readiness probe failed: statuscode: 503", name) for name in probed)
        before = world.status
        world.step()
        assert world.status is not None
        said += [(one.type, one.reason) for one in announcements(before, world.status)]
    assert said == [("Normal", "Serving"), ("Normal", "Settled")]
