"""A disaggregated service in a cluster of dicts: its objects, its roll-outs, the ways into it and out of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pagefleet_operator.plan.announcements import announcements
from pagefleet_operator.plan.kv_link import KvEngineSeen
from pagefleet_operator.plan.observed import ScalingSeen
from pagefleet_operator.plan.pair_ratio import PairLoad
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.roles import PAIR_ROLES, role_view
from pagefleet_operator.plan.status import invalid_service_status
from pagefleet_protocol.field_errors import FieldError, InvalidDocument
from pagefleet_protocol.kube_names import LABEL_COMPONENT, LABEL_REVISION, LABEL_ROLE

from tests.operator.plan.kube_world import World, condition, container, pod, profile, service, told
from tests.operator.render.service_table import HF, by_key

TWO = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
LINKED = (KvEngineSeen("a", "prefill", "x"), KvEngineSeen("b", "decode", "x"))


def running(**spec: Any) -> World:
    world = World(service(**spec), kv_engines=LINKED)
    world.settle()
    return world


def counts(world: World) -> dict[str, tuple[int, int]]:
    """Engines that are asked for, by revision: prefill and decode."""
    found: dict[str, list[int]] = {}
    for (kind, _), body in world.children.items():
        role = body["metadata"]["labels"].get(LABEL_ROLE)
        if kind == "Deployment" and role:
            pair = found.setdefault(body["metadata"]["labels"][LABEL_REVISION], [0, 0])
            pair[role == "decode"] = body["spec"]["replicas"]
    return {name: (pair[0], pair[1]) for name, pair in found.items()}


def ready(world: World, role: str | None = None) -> int:
    return sum(one.ready for one in world.of("engine") if role is None or one.role == role)


def roll(world: World, least: int, most: int = 60) -> list[dict[str, tuple[int, int]]]:
    """Go on until nothing changes; never fewer ready decode engines than `least`."""
    steps = [counts(world)]
    for _ in range(most):
        if not world.step():
            return steps
        assert sum(one.ready and one.role != "prefill" for one in world.of("engine")) >= least
        steps.append(counts(world))
    raise AssertionError("nothing settled")


def test_an_empty_disaggregation_is_one_pair_that_serves() -> None:
    world = running(disaggregation={})
    status = world.status
    assert status is not None
    (pair,) = counts(world).values()
    assert pair == (1, 1)
    assert (status.mode, status.ready, status.replicas) == ("Disaggregated", "2/2", 2)
    assert [(one.name, one.replicas, one.ready) for one in status.roles] == [
        ("prefill", 1, 1),
        ("decode", 1, 1),
        ("router", 1, 1),
    ]
    for kind in ("Ready", "EngineReady", "PrefillReady", "DecodeReady", "KVLinkReady", "RouterReady"):
        assert condition(status, kind).status == "True", kind
    assert told(status, "Progressing") == ("False", Reason.SETTLED)
    assert told(status, "Degraded") == ("False", Reason.AS_WANTED)


def test_a_service_that_is_whole_says_nothing_of_parts() -> None:
    status = running().status
    assert status is not None
    assert not {"PrefillReady", "DecodeReady", "KVLinkReady"} & {one.type for one in status.conditions}
    assert status.mode == "Aggregated"


@pytest.mark.parametrize("rollout", [{}, {"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 2}])
def test_every_revision_keeps_both_parts_through_a_rollout(rollout: dict[str, int]) -> None:
    world = running(disaggregation=TWO, rollout=rollout)
    before = set(counts(world))
    world.edit(disaggregation=TWO, rollout=rollout, engine={"maxModelLen": 512})
    steps = roll(world, least=2 - rollout.get("maxUnavailable", 0))
    for step in steps:
        assert all((prefill > 0) == (decode > 0) for prefill, decode in step.values()), step
        most = 2 + rollout.get("maxSurge", 1)
        assert all(sum(pair[part] for pair in step.values()) <= most for part in (0, 1)), step
    assert list(steps[-1].values()) == [(2, 2)]
    assert not before & set(steps[-1])
    assert world.status is not None
    assert told(world.status, "Progressing") == ("False", Reason.SETTLED)


def test_a_change_of_one_part_makes_a_new_revision_of_both() -> None:
    world = running(disaggregation={})
    before = set(counts(world))
    world.edit(disaggregation={"decode": {"args": ["--max-num-seqs", "8"]}})
    assert not before & set(roll(world, least=1)[-1])


def test_more_engines_are_no_new_revision() -> None:
    world = running(disaggregation={})
    before = set(counts(world))
    world.edit(disaggregation={"decode": {"replicas": 3}})
    assert roll(world, least=1)[-1] == dict.fromkeys(before, (1, 3))


def test_a_revision_that_fails_takes_nothing_down_and_is_told() -> None:
    world = running(disaggregation=TWO)
    (old,) = counts(world)
    world.edit(disaggregation=TWO, engine={"args": ["--bad"]})
    world.step()
    (new,) = set(counts(world)) - {old}
    failed = container(state="terminated", exit_code=2, message="error: unrecognized arguments: --bad", restarts=3)
    world.breaks = {new: lambda one: pod(one.name, revision=new, role=one.role, containers=(failed,))}
    for _ in range(8):
        world.step()
    assert counts(world)[old] == (2, 2)
    assert world.status is not None
    assert told(world.status, "Progressing") == ("False", Reason.ROLLOUT_STOPPED)
    assert condition(world.status, "Ready").status == "True"
    three = {**TWO, "decode": {"replicas": 3}}
    world.edit(disaggregation=three, engine={"args": ["--bad"]})
    assert roll(world, least=2)[-1] == {old: (2, 3), new: (1, 1)}
    assert ready(world, "decode") == 3, "more are wanted, and come of what serves"
    world.edit(disaggregation=TWO)
    assert roll(world, least=2)[-1] == {old: (2, 2)}


def test_one_engine_that_fails_is_not_its_revision() -> None:
    four = {"prefill": {"replicas": 4}, "decode": {"replicas": 4}}
    world = running(disaggregation=four, rollout={"maxSurge": 2})
    (old,) = counts(world)
    world.edit(disaggregation=four, rollout={"maxSurge": 2}, engine={"args": ["--seed", "1"]})
    world.step()
    (new,) = set(counts(world)) - {old}
    bad = next(one for one in world.of("engine") if (one.revision, one.role) == (new, "decode"))
    failed = container(state="terminated", exit_code=2, message="error: no GPU", restarts=3)
    world.breaks = {new: lambda one: replace(one, ready=one.name != bad.name, containers=(failed,))}
    assert roll(world, least=4)[-1] == {old: (1, 1), new: (4, 4)}


def test_from_whole_requests_to_parts_and_back_without_a_gap() -> None:
    world = running(replicas=2)
    world.edit(disaggregation=TWO)
    assert list(roll(world, least=2)[-1].values()) == [(2, 2)]
    assert ("Deployment", "qwen-engine") not in world.children
    assert ("Service", "qwen-prefill") in world.children
    world.edit(replicas=2)
    assert roll(world, least=2)[-1] == {}
    assert [one.role for one in world.of("engine")] == [None, None]
    assert ("Service", "qwen-prefill") not in world.children
    assert ("NetworkPolicy", "qwen-decode") not in world.children
    assert world.status is not None
    assert (world.status.mode, world.status.ready) == ("Aggregated", "2/2")


def test_none_of_either_part() -> None:
    world = running(disaggregation={"prefill": {"replicas": 0}, "decode": {"replicas": 0}})
    assert list(counts(world).values()) == [(0, 0)]
    assert world.status is not None
    for kind in ("Ready", "EngineReady", "PrefillReady", "DecodeReady"):
        assert told(world.status, kind) == ("False", Reason.SCALED_TO_ZERO), kind
        assert "spec.disaggregation has replicas 0" in condition(world.status, kind).message, kind


def test_one_part_alone_still_answers_and_is_told() -> None:
    world = running(disaggregation={})
    world.pods = [one for one in world.pods if one.role != "prefill"]
    status = world.plan().status
    assert condition(status, "Ready").status == "True"
    assert condition(status, "PrefillReady").status == "False"
    assert told(status, "KVLinkReady") == ("False", Reason.WAITING)
    assert told(status, "Degraded") == ("True", Reason.PARTLY_READY)


def test_parts_that_do_not_fit_each_other_are_a_degradation() -> None:
    world = running(disaggregation={})
    world.kv_engines = (LINKED[0], KvEngineSeen("b", "decode", "y"))
    status = world.plan().status
    assert told(status, "Degraded") == ("True", Reason.KV_INCOMPATIBLE)
    assert condition(status, "Ready").status == "True", "decode engines compute prompts themselves"


@pytest.mark.parametrize(
    ("peers", "reason"),
    [
        ({}, Reason.KV_LINKED),
        ({"suspect": 1}, Reason.KV_LINKED),
        ({"dead": 1, "ready": 1}, Reason.KV_LINKED),
        ({"dead": 1}, Reason.KV_LINK_DOWN),
        ({"dead": 1, "refused": 2}, Reason.KV_LINK_DOWN),
    ],
)
def test_a_link_is_down_where_no_known_peer_answers(peers: dict[str, int], reason: Reason) -> None:
    world = running(disaggregation={})
    world.kv_engines = (LINKED[0], KvEngineSeen("b", "decode", LINKED[0].compatibility, peers))
    assert condition(world.plan().status, "KVLinkReady").reason == reason


@pytest.mark.parametrize(
    ("fallback", "said"),
    [
        ("Recompute", "prompts are computed by decode engines meanwhile"),
        ("Fail", "requests whose prompts go to prefill engines end with 503 meanwhile"),
    ],
)
def test_who_cannot_reach_its_peers_is_told_with_what_that_does_to_requests(fallback: str, said: str) -> None:
    world = running(disaggregation={"fallback": fallback})
    world.kv_engines = (LINKED[0], KvEngineSeen("b", "decode", LINKED[0].compatibility, {"dead": 1}))
    status = world.plan().status
    assert told(status, "Degraded") == ("True", Reason.KV_LINK_DOWN)
    for kind in ("KVLinkReady", "Degraded"):
        message = condition(status, kind).message
        assert said in message, kind
        assert ("computed by decode engines" in message) == (fallback == "Recompute"), kind


@pytest.mark.parametrize("fallback", ["Recompute", "Fail"])
def test_prompts_that_are_sent_to_no_prefill_engine_are_refused_by_no_fallback(fallback: str) -> None:
    world = running(disaggregation={"fallback": fallback})
    world.kv_engines = (LINKED[0], KvEngineSeen("b", "decode", "y"))
    assert "decode engines compute prompts themselves" in condition(world.plan().status, "KVLinkReady").message
    world.pods = [one for one in world.pods if one.role != "prefill"]
    assert "decode engines compute prompts themselves" in condition(world.plan().status, "KVLinkReady").message


def test_each_part_follows_its_own_autoscaler() -> None:
    both = {
        "prefill": {"autoscaling": {"min": 1, "max": 4, "target": {"ttftMs": 500}, "scaleToZero": {}}},
        "decode": {"autoscaling": {"min": 2, "max": 8, "target": {"itlMs": 50}, "scaleToZero": {}}},
    }
    world = World(service(disaggregation=both), kv_engines=LINKED)
    world.role_scaling = {"prefill": ScalingSeen(3, "Demand", "p"), "decode": ScalingSeen(5, "Steady", "d")}
    status = world.settle()
    first = status
    assert list(counts(world).values()) == [(3, 5)]
    assert [(one.name, one.scaling.desired, one.scaling.signal) for one in status.role_scaling] == [
        ("prefill", 3, "p"),
        ("decode", 5, "d"),
    ]
    assert condition(status, "ScalingActive").status == "True"
    world.role_scaling = {"prefill": ScalingSeen(0, "Idle", "p"), "decode": ScalingSeen(5, "Steady", "d")}
    world.settle()
    assert list(counts(world).values()) == [(1, 5)], "none of one part waits for the other"
    assert world.status is not None
    assert [one.scaling.desired for one in world.status.role_scaling] == [1, 5]
    world.role_scaling = {"prefill": ScalingSeen(0, "Idle", "p"), "decode": ScalingSeen(0, "Idle", "d")}
    status = world.settle()
    assert list(counts(world).values()) == [(0, 0)]
    assert told(status, "Ready") == ("True", Reason.IDLE)
    events = [(one.reason, one.message) for one in announcements(first, status)]
    assert events == [
        ("ScaledToZero", "from 3 to 0 prefill engines (Idle): p"),
        ("ScaledToZero", "from 5 to 0 decode engines (Idle): d"),
    ]


def test_a_part_has_what_the_spec_says_unless_it_says_otherwise() -> None:
    spec = {
        "resources": {"gpuType": "h100", "cpu": "4"},
        "engine": {"args": ["--seed", "1"]},
        "disaggregation": {"prefill": {"resources": {"cpu": "8"}, "args": ["--max-num-batched-tokens", "4096"]}},
    }
    one = service(**spec)
    views = {role: role_view(one, role) for role in PAIR_ROLES}
    assert (views["prefill"].spec.resources.cpu, views["prefill"].spec.resources.gpu_type) == ("8", "h100")
    assert views["decode"].spec.resources.cpu == "4"
    assert views["prefill"].spec.engine.args == ("--seed", "1", "--max-num-batched-tokens", "4096")
    assert views["decode"].spec.engine.args == ("--seed", "1")


def test_a_part_may_ask_for_no_more_than_the_administrator_allows() -> None:
    patch = {"spec": {"hostNetwork": True}}
    world = World(service(disaggregation={"decode": {"podTemplate": patch}}), profiles={"h100": profile()})
    status = world.plan().status
    assert told(status, "Degraded") == ("True", Reason.NOT_ALLOWED)
    assert "spec.disaggregation.decode.podTemplate.spec.hostNetwork" in condition(status, "Degraded").message


def test_another_fleet_key_replaces_engines_and_routers() -> None:
    world = running(disaggregation={})
    (before,) = counts(world)
    world.edit(disaggregation={}, fleetKey=2)
    assert world.plan().needs_fleet_key
    roll(world, least=1)
    assert before not in counts(world)
    for (kind, _), body in world.children.items():
        if kind == "Deployment":
            volumes = body["spec"]["template"]["spec"]["volumes"]
            assert [one["secret"]["secretName"] for one in volumes if one["name"] == "fleet-key"] == ["qwen-fleet-2"]


def test_the_measured_load_becomes_advice() -> None:
    world = running(disaggregation={})
    assert world.status is not None
    assert world.status.ratio is None
    world.pair_load = PairLoad(prompt_tokens_per_s=19_000.0, prefill_rate=10_000.0, kv_usage=0.2, engines=2.0)
    advice = world.plan().status.ratio
    assert advice is not None
    assert (advice.prefill, advice.decode) == (2.0, 0.5)
    assert advice.message.startswith("more prefill engines are needed: ")


def test_of_an_edit_that_cannot_be_read_what_runs_is_told() -> None:
    world = running(disaggregation=TWO)
    problem = InvalidDocument([FieldError(("spec", "disaggregation"), "is wrong")])
    status = invalid_service_status(("ns", "qwen"), problem, world.status, world.observed())
    assert status.ready == "4/4"
    assert status.mode == "Disaggregated"
    assert told(status, "Ready") == ("True", Reason.SERVING)
    assert world.status is not None
    assert status.roles == world.status.roles
    for kind in ("PrefillReady", "DecodeReady", "KVLinkReady"):
        assert condition(status, kind).status == "True", kind
    world.pods = [one for one in world.pods if one.role != "decode"]
    again = invalid_service_status(("ns", "qwen"), problem, status, world.observed())
    assert (again.ready, told(again, "PrefillReady")[0], told(again, "DecodeReady")[0]) == ("2/4", "True", "False")


@pytest.mark.parametrize(("nodes", "plane"), [(1, "nccl"), (2, "nccl"), (2, "tcp")])
def test_pods_that_follow_reach_each_other_where_their_ranks_pass_k_v(nodes: int, plane: str) -> None:
    case = replace(
        HF.changed(
            disaggregation={"dataPlane": plane, "prefill": {"nodes": nodes}},
            resources={"gpuType": "h100", "gpus": 2},
        ),
        kinds=frozenset({"Ingress", "LeaderWorkerSet"}),
    )
    policies = by_key(case.wanted())
    for own, other in (("prefill", "decode"), ("decode", "prefill")):
        spec: Any = policies["NetworkPolicy", f"qwen-{own}"]["spec"]
        followers = nodes > 1 and plane == "nccl"
        assert spec["podSelector"]["matchLabels"][LABEL_ROLE] == own
        rules = [*spec.get("ingress", ()), *spec.get("egress", ())]
        chosen = [one["podSelector"] for rule in rules for one in (*rule.get("from", ()), *rule.get("to", ()))]
        assert {one["matchLabels"][LABEL_ROLE] for one in chosen} == {other}
        for one in (spec["podSelector"], *chosen):
            assert (LABEL_COMPONENT not in one["matchLabels"]) == followers
