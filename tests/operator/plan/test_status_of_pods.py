"""Fields of the status that are not reasons: times, counts, numbers, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from pagefleet_operator.plan.observed import LiveSample, Observed, ScalingSeen
from pagefleet_operator.plan.status import invalid_service_status, live_status, rfc3339
from pagefleet_operator.plan.verdict import Verdict, make_conditions, one_line
from pagefleet_operator.render.service_plan import plan_service
from pagefleet_protocol.field_errors import FieldError, InvalidDocument
from pagefleet_protocol.inference_status import InferenceServiceStatus, LiveStatus

from tests.operator.plan.kube_world import (
    FACTS,
    HF,
    NOW,
    SETTINGS,
    World,
    condition,
    container,
    event,
    profile,
    service,
    told,
)

MISTAKES = InvalidDocument(
    [FieldError(("spec", "replicas"), "must be at least 0, not -1"), FieldError(("spec", "x"), "unknown field")]
)


def sample(seconds: float, running: int = 1) -> LiveSample:
    return LiveSample(
        at=NOW + timedelta(seconds=seconds),
        requests_running=running,
        requests_waiting=2,
        kv_usage=0.12345,
        tokens_per_second=99.96,
    )


def at(status: LiveStatus | None) -> datetime:
    assert status is not None
    return datetime.fromisoformat(status.at)


def test_a_settled_service_reads_as_documented() -> None:
    world = World(service(**HF, replicas=2, router={"replicas": 1}))
    status = world.settle()
    assert (status.ready, status.replicas, status.mode, status.model_name) == ("2/2", 2, "Aggregated", "qwen")
    assert status.url == "http://qwen.ns.svc.cluster.local"
    assert status.selector == "pagefleet.dev/service=qwen,app.kubernetes.io/component=engine"
    assert [(one.name, one.replicas, one.ready, one.updated) for one in status.roles] == [
        ("engine", 2, 2, 2),
        ("router", 1, 1, 1),
    ]
    assert all(len(one.revision) == 10 for one in status.roles)
    assert status.resolved is not None
    assert (status.resolved.cache, status.resolved.image) == ("none", "pagefleet-engine:1")
    assert status.resolved.max_model_len == FACTS.max_position_embeddings


def test_one_of_two_serves() -> None:
    world = World(service(replicas=2))
    world.settle()
    first, *_ = world.of("engine")
    world.pods = [replace(one, ready=False) if one.name == first.name else one for one in world.pods]
    status = world.plan().status
    assert told(status, "Ready") == ("True", "Serving")
    assert condition(status, "Ready").message.endswith("; 1 of 2 engines ready")
    assert told(status, "EngineReady") == ("False", "LoadingModel")
    assert told(status, "Degraded") == ("True", "PartlyReady")
    assert status.ready == "1/2"


def test_no_router_no_service() -> None:
    world = World(service())
    world.settle()
    world.pods = world.of("engine")
    status = world.plan().status
    assert told(status, "Ready") == ("False", "Starting")
    assert told(status, "EngineReady") == ("True", "AllReady")


UNREADY = "Readiness probe failed: HTTP probe failed with statuscode: 503"


def test_routers_follow_engines_within_moments() -> None:
    world = World(service())
    world.settle()
    (engine,), (router,) = world.of("engine"), world.of("router")
    world.pods = [replace(engine, turned=world.now), replace(router, ready=False)]
    world.events = (event("Unhealthy", UNREADY, router.name),)
    for seconds, router_ready, progressing in ((14, "Starting", "Starting"), (16, "NotReady", "Waiting")):
        after = replace(world.observed(), now=world.now + timedelta(seconds=seconds))
        status = plan_service(world.service, world.status, after, SETTINGS).status
        assert told(status, "RouterReady") == ("False", router_ready)
        assert told(status, "Progressing")[1] == progressing


def test_a_router_that_was_just_born_may_not_be_ready() -> None:
    world = World(service())
    world.settle()
    (router,) = world.of("router")
    world.pods = [*world.of("engine"), replace(router, ready=False, created=world.now)]
    world.events = (event("Unhealthy", UNREADY, router.name),)
    world.now += timedelta(seconds=14)
    assert told(world.plan().status, "RouterReady") == ("False", "Starting")
    world.now += timedelta(seconds=2)
    assert told(world.plan().status, "RouterReady") == ("False", "NotReady")


def test_routers_without_an_engine_wait_for_one() -> None:
    world = World(service())
    world.settle()
    world.pods = [replace(one, ready=False) for one in world.pods]
    world.events = (event("Unhealthy", UNREADY, world.of("router")[0].name),)
    router = condition(world.plan().status, "RouterReady")
    assert router.reason == "Starting"
    assert "takes requests once an engine is ready" in router.message


def test_a_service_scaled_to_zero_is_settled_though_its_routers_are_not_ready() -> None:
    world = World(service(replicas=0))
    world.settle()
    world.pods = [replace(one, ready=False) for one in world.pods]
    assert told(world.plan().status, "Progressing") == ("False", "Settled")
    (router,) = world.pods
    world.pods = [replace(router, containers=(container("router", state="waiting", reason="ErrImagePull"),))]
    assert told(world.plan().status, "Progressing") == ("False", "Waiting")


@pytest.mark.parametrize(("seconds", "reason"), [(3, "Waiting"), (30, "SignalsMissing")])
def test_a_router_that_became_ready_a_moment_ago_was_not_asked_yet(seconds: float, reason: str) -> None:
    world = World(service(autoscaling={"max": 3}))
    world.settle()
    world.scaling = ScalingSeen(1, "SignalsMissing", "there is no router to ask: it stays at 1 engine")
    world.pods = [replace(one, turned=world.now - timedelta(seconds=seconds)) for one in world.pods]
    assert told(world.plan().status, "ScalingActive") == ("False", reason)


def test_transition_times_change_with_the_status_and_not_with_the_words() -> None:
    before = make_conditions({"Ready": Verdict(False, "A", "a")}, None, 1, "t1")
    old = InferenceServiceStatus(observed_generation=1, model_name="m", conditions=before)
    [same] = make_conditions({"Ready": Verdict(False, "B", "b")}, old, 2, "t2")
    [turned] = make_conditions({"Ready": Verdict(True, "B", "b")}, old, 2, "t2")
    [unknown] = make_conditions({"Ready": Verdict(None, "B", "b")}, old, 2, "t2")
    assert (same.last_transition_time, same.reason, same.observed_generation) == ("t1", "B", 2)
    assert (turned.last_transition_time, turned.status) == ("t2", "True")
    assert (unknown.last_transition_time, unknown.status) == ("t2", "Unknown")


def test_the_generation_is_the_one_that_was_planned() -> None:
    status = plan_service(service(), None, Observed(now=NOW, generation=7), SETTINGS).status
    assert status.observed_generation == 7
    assert {one.observed_generation for one in status.conditions} == {7}


def test_live_numbers_are_renewed_every_30_seconds_and_when_idle_every_five_minutes() -> None:
    first = live_status(None, sample(0), NOW)
    assert first == LiveStatus(
        requests_running=1, requests_waiting=2, tokens_per_second=100.0, kv_usage=0.123, at=rfc3339(NOW)
    )
    assert live_status(first, None, NOW + timedelta(minutes=9)) == first
    assert live_status(first, None, NOW + timedelta(minutes=10)) is None
    assert live_status(first, sample(29, running=5), NOW) == first
    assert at(live_status(first, sample(30, running=5), NOW)) == NOW + timedelta(seconds=30)
    assert live_status(first, sample(299), NOW) == first
    assert at(live_status(first, sample(300), NOW)) == NOW + timedelta(seconds=300)


def test_live_numbers_with_a_time_nobody_can_read_are_renewed() -> None:
    odd = LiveStatus(requests_running=0, requests_waiting=0, tokens_per_second=0, kv_usage=0, at="yesterday")
    assert at(live_status(odd, sample(0), NOW)) == NOW


def test_live_numbers_stay_in_the_status_until_there_are_newer_ones() -> None:
    world = World(service())
    world.settle()
    live = plan_service(world.service, world.status, replace(world.observed(), live=sample(0)), SETTINGS).status
    assert live.live is not None
    later = plan_service(world.service, live, world.observed(), SETTINGS).status
    assert later.live == live.live


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (datetime(2026, 3, 1, 13, 30, 59, 999999, tzinfo=timezone(timedelta(hours=1))), "2026-03-01T12:30:59Z"),
        (NOW.replace(tzinfo=None), "2026-03-01T12:00:00Z"),
    ],
)
def test_times_are_utc_in_whole_seconds(moment: datetime, text: str) -> None:
    assert rfc3339(moment) == text


def test_an_unreadable_edit_is_told_while_the_old_one_serves() -> None:
    world = World(service(replicas=2))
    before = world.settle()
    status = invalid_service_status(("ns", "qwen"), MISTAKES, before, replace(world.observed(), generation=4))
    assert told(status, "Ready") == ("True", "Serving")
    assert told(status, "EngineReady") == ("True", "AllReady")
    assert condition(status, "Degraded").message == (
        "2 mistakes: spec.replicas: must be at least 0, not -1; spec.x: unknown field"
    )
    assert (status.ready, status.url, status.resolved) == ("2/2", before.url, before.resolved)
    assert status.observed_generation == 4


def test_an_unreadable_first_spec_has_nothing_to_tell_of() -> None:
    status = invalid_service_status(("ns", "qwen"), MISTAKES, None, Observed(now=NOW))
    assert told(status, "Ready") == ("False", "InvalidSpec")
    assert {told(status, kind)[0] for kind in ("ModelCached", "EngineReady", "RouterReady")} == {"Unknown"}
    assert (status.model_name, status.url, status.ready) == ("qwen", None, "0/0")


def test_the_settings_in_force_are_told_with_their_sources() -> None:
    spec = {**HF, "resources": {"gpuType": "h100"}, "engine": {"quantization": "fp8"}}
    world = World(service(**spec), profiles={"h100": profile()})
    resolved = world.settle().resolved
    assert resolved is not None
    assert (resolved.profile, resolved.gpus, resolved.dtype, resolved.quantization) == ("h100", 1, "bfloat16", "fp8")
    assert resolved.memory is not None
    assert (resolved.memory.weights, resolved.memory.kv, resolved.memory.device) == (8.0, 16.0, 80.0)
    assert "resources.gpus: 1, as gpuType is h100" in resolved.why


def test_one_line_is_clean_and_short() -> None:
    assert one_line(" a\tb\r\n\x1b[31mc\x00 ") == "a b [31mc"
    assert one_line("x" * 600) == "x" * 497 + "..."
    assert one_line("x" * 10, 10) == "x" * 10
    assert one_line("\ud800") == ""
