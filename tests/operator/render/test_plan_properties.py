"""What holds for every plan: it comes to rest, it never fails, and it depends on nothing but its arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagefleet_operator.plan.announcements import announcements
from pagefleet_operator.plan.observed import (
    ApplyFailure,
    Child,
    ContainerSeen,
    EventSeen,
    LiveSample,
    Observed,
    PodSeen,
)
from pagefleet_operator.plan.obstacles import key_of
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.status import invalid_service_status
from pagefleet_operator.render.drift import differences
from pagefleet_operator.render.service_plan import plan_service
from pagefleet_protocol.field_errors import FieldError, InvalidDocument
from pagefleet_protocol.inference_status import InferenceServiceStatus
from pagefleet_protocol.kube_names import LABEL_REVISION
from pagefleet_protocol.model_facts import Progress

from tests.example_counts import examples
from tests.operator.plan.kube_world import FACTS, NOW, SETTINGS, World, condition, profile, result, service, told

CONDITIONS = ["Ready", "ModelCached", "EngineReady", "RouterReady", "Progressing", "Degraded"]
SLOW_MACHINE = settings(deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])

MODELS: list[dict[str, Any]] = [
    {"model": {"uri": "builtin://tiny"}},
    {"model": {"uri": "hf://org/model"}},
    {"model": {"uri": "hf://org/model", "revision": "v2"}},
    {"model": {"uri": "hf://org/model"}, "cache": {"type": "pvc"}},
    {"model": {"uri": "s3://bucket/model"}, "cache": {"type": "pvc", "claim": "theirs"}},
    {"model": {"uri": "gs://bucket/model"}, "cache": {"type": "hostPath", "path": "/var/models"}},
    {"model": {"uri": "pvc://theirs/model"}},
    {"model": {"uri": "oci://registry.example/model:1"}},
]
SPECS = st.builds(
    lambda model, more: {**model, **more},
    st.sampled_from(MODELS),
    st.fixed_dictionaries(
        {
            "replicas": st.integers(0, 4),
            "router": st.builds(lambda count: {"replicas": count}, st.integers(1, 3)),
        },
        optional={
            "engine": st.sampled_from([{"args": ["--seed", "1"]}, {"dtype": "float16"}, {"maxModelLen": 4096}]),
            "resources": st.sampled_from([{"gpus": 1}, {"gpuType": "h100"}, {"memory": "64Gi"}]),
            "rollout": st.sampled_from(
                [{"maxSurge": 2}, {"maxSurge": 0}, {"maxUnavailable": 2}, {"maxUnavailable": 0}]
            ),
            "expose": st.sampled_from([{"type": "Ingress", "host": "llm.example.org"}]),
            "monitoring": st.just({"serviceMonitor": True}),
            "podTemplate": st.just({"spec": {"priorityClassName": "high"}}),
        },
    ),
)


@SLOW_MACHINE
@given(edits=st.lists(SPECS, min_size=1, max_size=3), steps=st.integers(0, 6))
def test_every_edit_at_any_moment_comes_to_rest(edits: list[dict[str, Any]], steps: int) -> None:
    world = World(service(**edits[0]), profiles={"h100": profile()})
    for edit in edits[1:]:
        for _ in range(steps):
            world.step()
        world.edit(**edit)
    status = world.settle()
    plan = world.plan()
    assert plan.delete == ()
    assert plan.status == status
    assert plan.look_again_s is None
    for wanted in plan.objects:
        assert not differences(wanted, world.children[key_of(wanted)])
    assert {key_of(one) for one in plan.objects} == set(world.children)
    replicas, routers = world.service.spec.replicas, world.service.spec.router.replicas
    assert (status.ready, len(world.of("engine")), len(world.of("router"))) == (
        f"{replicas}/{replicas}",
        replicas,
        routers,
    )
    assert told(status, "Ready") == (("True", "Serving") if replicas else ("False", "ScaledToZero"))
    assert told(status, "Progressing") == ("False", "Settled")
    assert told(status, "Degraded") == ("False", "AsWanted")
    assert {role.updated for role in status.roles} == {replicas, routers}


@SLOW_MACHINE
@given(
    spec=SPECS, surge=st.sampled_from([{"maxSurge": 1}, {"maxSurge": 0, "maxUnavailable": 1}]), count=st.integers(1, 4)
)
def test_an_edit_that_crashes_stops_and_leaves_what_it_may(spec: Any, surge: dict[str, int], count: int) -> None:
    wanted = spec | {"rollout": surge, "replicas": count, "resources": {}}
    world = World(service(**wanted), profiles={"h100": profile()})
    world.settle()
    world.edit(**wanted | {"engine": {"args": ["--seed", "7"]}})
    broken = ContainerSeen("engine", state="terminated", exit_code=2, message="no such flag")
    world.breaks = {world.plan().status.roles[0].revision: lambda one: replace(one, containers=(broken,))}
    status = world.settle()
    left = count if surge["maxSurge"] else count - 1
    assert status.ready == f"{left}/{count}"
    assert sum(one.ready for one in world.of("engine")) == left
    if left:
        assert told(status, "Ready") == ("True", "Serving")
        assert told(status, "Progressing") == ("False", "RolloutStopped")
        assert told(status, "Degraded") == ("True", "RolloutStopped")
        assert f"{left} of {count} engines keep serving" in condition(status, "Degraded").message
        assert "no such flag" in condition(status, "Degraded").message
    else:
        assert told(status, "Ready") == ("False", "SettingsRefused")
        assert told(status, "Progressing") == ("False", "Waiting")
    world.edit(**wanted)
    assert told(world.settle(), "Degraded") == ("False", "AsWanted")
    assert world.plan().status.ready == f"{count}/{count}"


TEXTS = st.text(max_size=40) | st.sampled_from(
    [
        "",
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        'persistentvolumeclaim "x" not found',
        'secret "x" not found',
        "couldn't find key a in Secret ns/x",
        'pods "a" is forbidden: exceeded quota: q',
        "CUDA out of memory",
        "x" * 5000,
        "\x1b[2J\x00\n\ud800\u2028",
        result("AccessDenied", "no"),
        result(facts=FACTS),
    ]
)
WORDS = st.sampled_from(
    ["", "Error", "OOMKilled", "ImagePullBackOff", "CreateContainerConfigError", "CrashLoopBackOff", "Evicted",
     "UnexpectedAdmissionError", "NodeLost", "OutOfcpu", "ContainerCreating", "PodInitializing", "Unheard"]
)  # fmt: skip
CODES = st.none() | st.sampled_from([0, 1, 2, 137, 255])
TIMES = st.integers(-100_000, 100_000).map(lambda seconds: NOW + timedelta(seconds=seconds))
BIRTHS = st.sampled_from([-100_000, -60, -5, 0, 60]).map(lambda seconds: NOW + timedelta(seconds=seconds))
"""Of pods: a second later no verdict depends on their age in another way."""
CONTAINERS = st.builds(
    ContainerSeen,
    name=st.sampled_from(["engine", "router", "download", "other"]),
    init=st.booleans(),
    state=st.sampled_from(["waiting", "running", "terminated"]),
    reason=WORDS,
    message=TEXTS,
    exit_code=CODES,
    restarts=st.integers(0, 9),
    last_reason=WORDS,
    last_message=TEXTS,
    last_exit_code=CODES,
)
PODS = st.builds(
    PodSeen,
    name=st.sampled_from(["qwen-engine-a", "qwen-engine-b", "qwen-router-a", "qwen-model-x-1"]),
    component=st.sampled_from(["engine", "router", "model"]),
    revision=st.sampled_from(["", "old", "older"]),
    phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
    ready=st.booleans(),
    deleting=st.booleans(),
    node=st.sampled_from(["", "n1"]),
    created=st.none() | BIRTHS,
    turned=st.none() | BIRTHS,
    reason=WORDS,
    message=TEXTS,
    unschedulable=TEXTS,
    containers=st.lists(CONTAINERS, max_size=2).map(tuple),
)
EVENTS = st.builds(
    EventSeen,
    kind=st.sampled_from(["Pod", "Job"]),
    name=st.sampled_from(["qwen-engine-a", "qwen-model-x-1"]),
    reason=st.sampled_from(["FailedMount", "Unhealthy", "NodeNotReady", "Failed", "FailedCreate"]),
    message=TEXTS,
    last_seen=TIMES,
)
ODD_STATUS = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["conditions", "type", "status"]), inner)
    ),
    max_leaves=6,
)
SENSIBLE_STATUS = st.fixed_dictionaries(
    {
        "conditions": st.lists(
            st.fixed_dictionaries(
                {
                    "type": st.sampled_from(["ReplicaFailure", "Progressing", "Failed", "Complete"]),
                    "status": st.sampled_from(["True", "False", "Unknown"]),
                },
                optional={
                    "reason": st.sampled_from(["ProgressDeadlineExceeded", "BackoffLimitExceeded"]),
                    "message": TEXTS,
                    "lastTransitionTime": st.just("2026-02-28T12:00:00Z") | TEXTS,
                },
            ),
            max_size=3,
        )
    }
)
FAILURES = st.builds(
    ApplyFailure,
    kind=st.sampled_from(["Deployment", "Service"]),
    name=st.just("qwen"),
    status=st.sampled_from([0, 403, 404, 409, 422, 429, 503]),
    reason=WORDS,
    message=TEXTS,
)


@st.composite
def observations(draw: st.DrawFn, spec: dict[str, Any]) -> Observed:
    """Return what might be seen of a service at any moment, also what should never be."""
    one = service(**spec)
    wanted = plan_service(one, None, Observed(now=NOW, profiles={"h100": profile()}), SETTINGS).objects
    children = {}
    for body in wanted:
        if draw(st.booleans()):
            status = draw(ODD_STATUS | SENSIBLE_STATUS)
            ours = draw(st.booleans())
            children[key_of(body)] = Child({**body, "status": status}, ours, draw(st.sampled_from(["", "hpa"])))
    revisions = [
        body["spec"]["template"]["metadata"]["labels"][LABEL_REVISION]
        for body in wanted
        if "template" in body.get("spec", {})
    ]
    pods = [
        replace(pod, revision=draw(st.sampled_from([pod.revision, *revisions])))
        for pod in draw(st.lists(PODS, max_size=4))
    ]
    return Observed(
        now=NOW,
        generation=draw(st.integers(1, 9)),
        children=children,
        pods=tuple(pods),
        events=tuple(draw(st.lists(EVENTS, max_size=3))),
        profiles={"h100": profile()},
        invalid_profiles=draw(st.sampled_from([{}, {"h100": "wrong"}])),
        optional_kinds=draw(st.sampled_from([frozenset(), frozenset({"Ingress", "ServiceMonitor"})])),
        progress=draw(st.none() | st.builds(Progress, st.sampled_from(["listing", "downloading", "verifying"]),
                                            st.integers(0, 9), st.integers(0, 9))),
        live=draw(st.none() | st.builds(LiveSample, TIMES, st.integers(0, 9), st.integers(0, 9), st.floats(0, 1),
                                        st.floats(0, 1e6))),
        failures=tuple(draw(st.lists(FAILURES, max_size=2))),
    )  # fmt: skip


def check_status(status: InferenceServiceStatus) -> None:
    """Hold what is so of every status."""
    assert [one.type for one in status.conditions] == CONDITIONS
    for one in status.conditions:
        assert one.reason in set(Reason), one
        assert one.message == one.message.strip() != ""
        assert len(one.message) <= 500
        assert one.message.isprintable()
        assert datetime.fromisoformat(one.last_transition_time).tzinfo
    serves = bool(status.roles[0].ready and status.roles[1].ready)
    assert told(status, "Ready")[0] == str(serves)
    written = json.loads(json.dumps(status.model_dump(mode="json", by_alias=True, exclude_none=True)))
    assert InferenceServiceStatus.model_validate(written, by_alias=True, by_name=False) == status


@SLOW_MACHINE
@given(data=st.data(), spec=SPECS, paused=st.booleans())
def test_whatever_is_seen_there_is_a_plan_and_the_same_one_again(data: Any, spec: Any, paused: bool) -> None:
    one = service(**spec, paused=paused)
    seen = data.draw(observations(spec))
    plan = plan_service(one, None, seen, SETTINGS)
    check_status(plan.status)
    assert plan_service(one, None, seen, SETTINGS) == plan
    ours = {key for key, child in seen.children.items() if child.ours}
    theirs = set(seen.children) - ours
    assert set(plan.delete) <= ours
    assert not {key_of(body) for body in plan.objects} & (theirs | set(plan.delete))
    if paused:
        assert (plan.objects, plan.delete) == ((), ())
    again = plan_service(one, plan.status, replace(seen, now=NOW + timedelta(seconds=1)), SETTINGS)
    assert again.status.conditions == plan.status.conditions
    assert announcements(plan.status, again.status) == ()


@SLOW_MACHINE
@given(data=st.data(), spec=SPECS, messages=st.lists(TEXTS, min_size=1, max_size=3), known=st.booleans())
def test_whatever_is_seen_an_unreadable_spec_gets_a_status(data: Any, spec: Any, messages: Any, known: bool) -> None:
    seen = data.draw(observations(spec))
    before = plan_service(service(**spec), None, seen, SETTINGS).status if known else None
    problems = InvalidDocument(FieldError(("spec", index), text) for index, text in enumerate(messages))
    status = invalid_service_status(("ns", "qwen"), problems, before, seen)
    check_status(status)
    assert told(status, "Degraded") == ("True", "InvalidSpec")
    assert status.observed_generation == seen.generation


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec["model"]["uri"])
def test_a_restarted_operator_plans_the_same(spec: dict[str, Any]) -> None:
    world = World(service(**spec))
    status = world.settle()
    fresh = plan_service(world.service, None, world.observed(), SETTINGS)
    assert fresh.objects == world.plan().objects
    assert [(one.type, one.status, one.reason, one.message) for one in fresh.status.conditions] == [
        (one.type, one.status, one.reason, one.message) for one in status.conditions
    ]
