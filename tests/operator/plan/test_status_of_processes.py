"""Conditions and counts of a service on one machine, from what was seen of its processes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from pagefleet_operator.plan.kv_link import KvEngineSeen
from pagefleet_operator.plan.observed import Observed, ScalingSeen
from pagefleet_operator.plan.role_health import see_instances
from pagefleet_operator.plan.role_seen import both_parts
from pagefleet_operator.plan.rollout import Instance, State
from pagefleet_operator.plan.status import Situation, service_status
from pagefleet_operator.plan.verdict import Verdict, find_condition
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import InferenceServiceStatus

from tests.fakes.local_plans import local_plan, resolved_of

HERE = Verdict(True, "NotNeeded", "the model is on this machine")
EARLIER, NOW = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
WAITS = Verdict(False, "WaitingForModel", "engines wait for the model; ModelCached says more")
PAUSED = Verdict(False, "Paused", "none are started while spec.paused is true")
URL = "http://127.0.0.1:8000"


def status_of(
    service: InferenceService,
    engines: list[Instance],
    routers: list[Instance] | None = None,
    now: str = NOW,
    model: Verdict = HERE,
    scaling: ScalingSeen | None = None,
) -> InferenceServiceStatus:
    """Return the status; revision `new` stands for the wanted one, and a router is ready unless said otherwise."""
    plan = local_plan(service, scaling=scaling)

    def resolve(instances: list[Instance], revision: str) -> tuple[Instance, ...]:
        return tuple(
            Instance(one.number, revision, one.state, one.served, one.restarts, one.detail)
            if one.revision == "new"
            else one
            for one in instances
        )

    routers = [Instance(0, "new", State.READY)] if routers is None else routers
    return service_status(
        Situation(
            service=service,
            previous=service.status,
            observed=Observed(now=datetime.fromisoformat(now), generation=3, scaling=scaling),
            url=URL,
            model=model,
            engines=see_instances(plan.engine, resolve(engines, plan.engine.revision)),
            routers=see_instances(plan.router, resolve(routers, plan.router.revision)),
            resolved=resolved_of(service),
            gate=None if model.holds else WAITS,
            nothing=PAUSED if service.spec.paused else None,
        )
    )


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
    assert facts(status, "ModelCached")[:2] == ("True", "NotNeeded")
    assert facts(status, "Degraded") == ("False", "AsWanted", "everything is as the spec wants it")
    assert (status.mode, status.replicas) == ("Aggregated", 1)
    assert (status.url, status.model_name, status.ready, status.observed_generation) == (URL, "qwen", "1/1", 3)


@pytest.mark.parametrize(
    ("fallback", "said"), [("Recompute", "computed by decode engines meanwhile"), ("Fail", "end with 503 meanwhile")]
)
def test_a_pair_without_a_link_says_what_becomes_of_requests(build: Any, fallback: str, said: str) -> None:
    service = build(disaggregation={"fallback": fallback})
    cut_off = KvEngineSeen("d", "decode", "x", {"dead": 1})
    said_so = (KvEngineSeen("p", "prefill", "x"), cut_off)
    plan = local_plan(service)
    prefill, decode = (see_instances(one, [READY]) for one in plan.parts)
    status = service_status(
        Situation(
            service=service,
            previous=None,
            observed=Observed(now=datetime.fromisoformat(NOW), kv_engines=said_so),
            url=URL,
            model=HERE,
            engines=both_parts(prefill, decode),
            routers=see_instances(plan.router, [READY]),
            parts=(prefill, decode),
            resolved=resolved_of(service),
        )
    )
    for kind in ("KVLinkReady", "Degraded"):
        assert facts(status, kind)[1] == "KVLinkDown"
        assert said in facts(status, kind)[2]


@pytest.mark.parametrize(
    ("engines", "reason", "said"),
    [
        ([], "Starting", "0 of 2 engines ready"),
        ([Instance(0, "new", State.STARTING, detail="loading 40 %")], "Starting", "qwen-engine-0: loading 40 %"),
        ([READY, Instance(1, "new", State.STARTING)], "Starting", "1 of 2 engines ready"),
        (
            [READY, Instance(1, "new", State.FAILED, restarts=1, detail="model folder missing: /m")],
            "CrashLoop",
            "1 of 2 engines ready; qwen-engine-1 stopped: model folder missing: /m",
        ),
        (
            [Instance(0, "new", State.STARTING, restarts=4, detail="x")],
            "CrashLoop",
            "qwen-engine-0 stopped (4 times): x",
        ),
        (
            [READY, Instance(1, "new", State.NOT_READY, served=True, detail="/readyz answers 503")],
            "NotReady",
            "qwen-engine-1 runs but takes no traffic: /readyz answers 503",
        ),
        (
            [Instance(0, "new", State.STARTING), Instance(1, "new", State.FAILED, restarts=1, detail="broken")],
            "CrashLoop",
            "qwen-engine-1 stopped: broken",
        ),
    ],
)
def test_why_engines_are_not_ready(build: Any, engines: list[Instance], reason: str, said: str) -> None:
    status = status_of(build(replicas=2), engines)
    holds, found, message = facts(status, "EngineReady")
    assert (holds, found) == ("False", reason)
    assert said in message
    if READY in engines:
        assert facts(status, "Ready") == (
            *("True", "Serving", f"requests are answered at {URL}; 1 of 2 engines ready"),
        )
    else:
        assert facts(status, "Ready") == facts(status, "EngineReady")


def test_a_router_that_is_not_ready_is_told_when_engines_are(build: Any) -> None:
    status = status_of(build(), [READY], [Instance(0, "new", State.FAILED, restarts=1, detail="address in use")])
    assert facts(status, "Ready") == (
        "False",
        "CrashLoop",
        "0 of 1 routers ready; qwen-router-0 stopped: address in use",
    )


def test_zero_replicas_say_what_to_do(build: Any) -> None:
    status = status_of(build(replicas=0), [])
    assert facts(status, "Ready")[1:] == (
        "ScaledToZero",
        "spec.replicas is 0: set it to 1 or more to have requests answered",
    )
    assert status.ready == "0/0"


def test_a_paused_service_does_not_promise_to_wake(build: Any) -> None:
    scaling = ScalingSeen(0, "Idle", "nobody asked for 10 s")
    service = build(autoscaling={"max": 3, "scaleToZero": {"after": 10}})
    asleep = status_of(service, [], scaling=scaling)
    paused = service.model_copy(update={"status": asleep, "spec": service.spec.model_copy(update={"paused": True})})
    status = status_of(paused, [], scaling=scaling)
    assert facts(status, "Ready")[:2] == facts(status, "EngineReady")[:2] == ("False", "Paused")
    assert "set it to false" in facts(status, "Ready")[2]
    assert facts(status, "ScalingActive")[:2] == ("False", "Paused")


def test_a_service_that_sleeps_and_wakes_is_ready_all_the_while(build: Any) -> None:
    service = build(autoscaling={"max": 3, "scaleToZero": {"after": 10}})
    asleep = status_of(service, [], scaling=ScalingSeen(0, "Idle", "nobody asked for 10 s"))
    assert facts(asleep, "Ready")[:2] == ("True", "Idle")
    assert facts(asleep, "EngineReady")[:2] == ("True", "Idle")
    assert facts(asleep, "Degraded")[0] == "False"
    assert (asleep.ready, asleep.scaling and asleep.scaling.reason) == ("0/0", "Idle")
    service = service.model_copy(update={"status": asleep})
    wakes = ScalingSeen(1, "WokenUp", "2 requests wait for an engine")
    waking = status_of(service, [Instance(0, "new", State.STARTING)], scaling=wakes)
    assert facts(waking, "Ready")[:2] == ("True", "Waking")
    assert waking.scaling is not None
    assert (waking.scaling.desired, waking.scaling.signal) == (1, "2 requests wait for an engine")
    broken = status_of(service, [Instance(0, "new", State.FAILED, restarts=1, detail="no memory")], scaling=wakes)
    assert facts(broken, "Ready")[:2] == ("False", "CrashLoop")
    awake = status_of(service.model_copy(update={"status": waking}), [READY], scaling=wakes)
    assert facts(awake, "Ready")[:2] == ("True", "Serving")


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
        "the new revision fails. 1 of 1 engines keep serving. Correct the spec, or undo the edit: "
        "qwen-engine-1 stopped (2 times): out of memory"
    )
    assert facts(status, "Ready")[0] == "True"


CACHED = Verdict(True, "Cached", "the model is in /cache/m")
DOWNLOADING = Verdict(False, "Downloading", "this machine downloads the model: 75 %")
REFUSED = Verdict(False, "AccessDenied", "give HF_TOKEN")


@pytest.mark.parametrize(
    ("model", "progressing", "degraded"),
    [(CACHED, "Scaling", "AsWanted"), (DOWNLOADING, "Waiting", "AsWanted"), (REFUSED, "Waiting", "AccessDenied")],
)
def test_a_model_on_its_way_is_told(build: Any, model: Verdict, progressing: str, degraded: str) -> None:
    status = status_of(build(), [], model=model)
    found = facts(status, "ModelCached")
    assert found == (model.status, model.reason, model.message)
    assert facts(status, "Progressing")[1] == progressing
    assert facts(status, "Degraded")[1] == degraded
    if not model.holds:
        assert facts(status, "Ready") == found
        assert facts(status, "EngineReady")[1] == "WaitingForModel"


def test_a_download_moves_and_a_refused_one_does_not(build: Any) -> None:
    assert facts(status_of(build(), [], model=DOWNLOADING), "Progressing")[0] == "True"
    assert facts(status_of(build(), [], model=REFUSED), "Progressing")[0] == "False"


def test_engines_of_the_model_before_serve_while_the_next_one_comes(build: Any) -> None:
    status = status_of(build(), [OLD], model=DOWNLOADING)
    assert facts(status, "Ready")[0] == "True"
    assert facts(status, "ModelCached")[0] == "False"
    assert facts(status, "Progressing")[:2] == ("True", "Waiting")


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([READY, Instance(1, "new", State.NOT_READY, served=True, detail="slow")], ("True", "PartlyReady")),
        ([OLD, Instance(1, "new", State.FAILED, restarts=1)], ("True", "RolloutStopped")),
        ([READY, Instance(1, "new", State.READY)], ("False", "AsWanted")),
        ([], ("False", "AsWanted")),
    ],
)
def test_what_is_wrong_although_something_serves(
    build: Any, engines: list[Instance], expected: tuple[str, str]
) -> None:
    assert facts(status_of(build(replicas=2), engines), "Degraded")[:2] == expected


def test_a_paused_service_says_so_and_what_runs_is_told_as_it_is(build: Any) -> None:
    paused = build(paused=True)
    status = status_of(paused, [READY])
    assert status.mode == "Paused"
    assert facts(status, "Ready")[0] == "True"
    assert facts(status, "Progressing")[:2] == ("False", "Paused")
    nothing = status_of(paused, [], [])
    assert facts(nothing, "Ready") == (
        "False",
        "Paused",
        "spec.paused is true and nothing was made yet: set it to false",
    )


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
    assert changed == {
        "Ready": NOW,
        "ModelCached": EARLIER,
        "EngineReady": NOW,
        "RouterReady": EARLIER,
        "Progressing": EARLIER,
        "Degraded": NOW,
    }


def test_a_service_without_status_has_no_condition() -> None:
    assert find_condition(None, "Ready") is None
