"""Conditions and counts from what was seen."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_operator.plan.rollout import Instance, State
from pagefleet_operator.plan.status import Observation, find_condition, service_status
from pagefleet_operator.plan.workloads import plan_workloads
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import InferenceServiceStatus

EARLIER, NOW = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
URL = "http://127.0.0.1:8000"


def status_of(
    service: InferenceService, engines: list[Instance], routers: list[Instance] | None = None, now: str = NOW
) -> InferenceServiceStatus:
    """Return the status; revision `new` stands for the wanted one, and a router is ready unless said otherwise."""
    plan = plan_workloads(service, 30)

    def resolve(instances: list[Instance], revision: str) -> tuple[Instance, ...]:
        return tuple(
            Instance(one.number, revision, one.state, one.served, one.restarts, one.detail)
            if one.revision == "new"
            else one
            for one in instances
        )

    seen = Observation(
        engines=resolve(engines, plan.engine.revision),
        routers=resolve([Instance(0, "new", State.READY)] if routers is None else routers, plan.router.revision),
        generation=3,
        url=URL,
    )
    return service_status(service, plan, seen, now)


def facts(status: InferenceServiceStatus, kind: Any) -> tuple[str, str, str]:
    condition = find_condition(status, kind)
    assert condition is not None
    return condition.status, condition.reason, condition.message


READY = Instance(0, "new", State.READY, served=True)


def test_everything_runs(build: Any) -> None:
    status = status_of(build(), [READY])
    assert facts(status, "Ready") == ("True", "Serving", f"requests are answered at {URL}")
    assert facts(status, "EngineReady") == ("True", "AllReady", "1 of 1 engines ready")
    assert facts(status, "RouterReady") == ("True", "AllReady", "1 of 1 routers ready")
    assert facts(status, "Progressing") == ("False", "Settled", "everything runs as the spec says")
    assert (status.url, status.model_name, status.ready, status.observed_generation) == (URL, "qwen", "1/1", 3)


@pytest.mark.parametrize(
    ("engines", "reason", "said"),
    [
        ([], "Starting", "0 of 2 engines ready"),
        ([Instance(0, "new", State.STARTING, detail="loading 40 %")], "Starting", "qwen-engine-0: loading 40 %"),
        ([READY, Instance(1, "new", State.STARTING)], "Starting", "1 of 2 engines ready"),
        (
            [READY, Instance(1, "new", State.FAILED, restarts=1, detail="model folder missing: /m")],
            "Crashing",
            "1 of 2 engines ready; qwen-engine-1 stopped: model folder missing: /m",
        ),
        (
            [Instance(0, "new", State.STARTING, restarts=4, detail="x")],
            "Crashing",
            "qwen-engine-0 stopped (4 times): x",
        ),
        (
            [READY, Instance(1, "new", State.NOT_READY, served=True, detail="/readyz answers 503")],
            "NotReady",
            "qwen-engine-1 runs but takes no traffic: /readyz answers 503",
        ),
        (
            [Instance(0, "new", State.STARTING), Instance(1, "new", State.FAILED, restarts=1, detail="broken")],
            "Crashing",
            "qwen-engine-1 stopped: broken",
        ),
    ],
)
def test_why_engines_are_not_ready(build: Any, engines: list[Instance], reason: str, said: str) -> None:
    status = status_of(build(replicas=2), engines)
    holds, found, message = facts(status, "EngineReady")
    assert (holds, found) == ("False", reason)
    assert said in message
    assert facts(status, "Ready") == facts(status, "EngineReady")


def test_a_router_that_is_not_ready_is_told_when_engines_are(build: Any) -> None:
    status = status_of(build(), [READY], [Instance(0, "new", State.FAILED, restarts=1, detail="address in use")])
    assert facts(status, "Ready") == (
        "False",
        "Crashing",
        "0 of 1 routers ready; qwen-router-0 stopped: address in use",
    )


def test_zero_replicas_say_what_to_do(build: Any) -> None:
    status = status_of(build(replicas=0), [])
    assert facts(status, "Ready")[1:] == (
        "ScaledToZero",
        "spec.replicas is 0: set it to 1 or more to have requests answered",
    )
    assert status.ready == "0/0"


OLD = Instance(0, "old", State.READY, served=True)


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([OLD, Instance(1, "new", State.STARTING)], ("True", "RollingOut", "1 of 1 engines run the new settings")),
        ([OLD], ("True", "RollingOut", "0 of 1 engines run the new settings")),
        ([], ("True", "Scaling", "0 engines exist, 1 are wanted")),
        ([READY, Instance(1, "new", State.DRAINING)], ("True", "Scaling", "2 engines exist, 1 are wanted")),
        ([Instance(0, "new", State.STARTING)], ("True", "Starting", "0 of 1 engines ready")),
        (
            [Instance(0, "new", State.FAILED, restarts=1)],
            ("False", "Waiting", "waits for engines to recover; EngineReady says why"),
        ),
    ],
)
def test_progress(build: Any, engines: list[Instance], expected: tuple[str, str, str]) -> None:
    assert facts(status_of(build(), engines), "Progressing") == expected


def test_a_failing_revision_stops_the_rollout_while_the_old_one_serves(build: Any) -> None:
    failing = Instance(1, "new", State.FAILED, restarts=2, detail="out of memory")
    status = status_of(build(), [OLD, failing])
    holds, reason, message = facts(status, "Progressing")
    assert (holds, reason) == ("False", "RolloutStopped")
    assert message == (
        "qwen-engine-1 of the new revision stopped: out of memory. "
        "The old revision keeps serving: correct the spec, or undo the edit"
    )
    assert facts(status, "Ready")[0] == "True"


def test_roles_count_what_is_ready_and_what_is_updated(build: Any) -> None:
    engines = [OLD, Instance(1, "new", State.READY), Instance(2, "new", State.DRAINING)]
    engine, router = status_of(build(replicas=2), engines).roles
    assert (engine.name, engine.replicas, engine.ready, engine.updated) == ("engine", 2, 2, 1)
    assert (router.name, router.replicas, router.ready, router.updated) == ("router", 1, 1, 1)


def test_a_condition_keeps_its_time_until_it_changes(build: Any) -> None:
    service = build()
    service = service.model_copy(update={"status": status_of(service, [READY], now=EARLIER)})
    same = status_of(service, [READY])
    assert {one.last_transition_time for one in same.conditions} == {EARLIER}
    other = status_of(service, [Instance(0, "new", State.NOT_READY, served=True)])
    changed = {one.type: one.last_transition_time for one in other.conditions}
    assert changed == {"Ready": NOW, "EngineReady": NOW, "RouterReady": EARLIER, "Progressing": EARLIER}


def test_a_service_without_status_has_no_condition() -> None:
    assert find_condition(None, "Ready") is None
