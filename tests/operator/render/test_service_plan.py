"""What is made, kept, left alone and deleted, case by case."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from pagefleet_operator.plan.observed import ApplyFailure, Child, ChildKey, ScalingSeen
from pagefleet_operator.plan.obstacles import apply_refused, key_of
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.status import rfc3339
from pagefleet_operator.render.service_plan import ANNOTATION_FACTS, ServicePlan, plan_service
from pagefleet_protocol.kube_names import LABEL_REVISION

from tests.operator.plan.kube_world import (
    COMMIT,
    FACTS,
    GIB,
    HF,
    NOW,
    SETTINGS,
    World,
    condition,
    container,
    profile,
    result,
    service,
    told,
)

ENGINE: ChildKey = ("Deployment", "qwen-engine")
ROUTER: ChildKey = ("Deployment", "qwen-router")
CLAIM: ChildKey = ("PersistentVolumeClaim", "qwen-model")
CACHED = {**HF, "cache": {"type": "pvc"}}


def keys(plan: ServicePlan) -> set[ChildKey]:
    return {key_of(one) for one in plan.objects}


def body(plan: ServicePlan, key: ChildKey) -> dict[str, Any]:
    return next(one for one in plan.objects if key_of(one) == key)


def job_of(world: World) -> tuple[ChildKey, dict[str, Any]]:
    [(key, found)] = [(key, found) for key, found in world.children.items() if key[0] == "Job"]
    return key, found


def test_engines_wait_for_the_model_and_routers_do_not() -> None:
    world = World(service(**CACHED))
    plan = world.plan()
    assert ENGINE not in keys(plan)
    assert {ROUTER, CLAIM} < keys(plan)
    assert told(plan.status, "EngineReady") == ("False", "WaitingForModel")
    assert plan.look_again_s == 10
    world.settle()
    assert ENGINE in keys(world.plan())


def test_all_engines_load_the_commit_that_the_branch_meant_at_first() -> None:
    world = World(service(**HF))
    world.settle()
    [init] = body(world.plan(), ENGINE)["spec"]["template"]["spec"]["initContainers"]
    assert f"--revision={COMMIT}" in init["args"]
    assert world.status is not None
    assert world.status.resolved is not None
    assert world.status.resolved.revision == COMMIT
    world.facts = msgspec.structs.replace(FACTS, revision="feed" * 10)
    world.settle()
    assert body(world.plan(), ENGINE)["spec"]["template"]["spec"]["initContainers"] == [init]


def test_another_model_is_fetched_while_the_old_one_serves() -> None:
    world = World(service(**CACHED))
    world.settle()
    old = world.children[ENGINE]["spec"]["template"]
    (_, old_job), _ = job_of(world)
    world.edit(model={"uri": "hf://org/other"}, cache={"type": "pvc"})
    plan = world.plan()
    assert body(plan, ENGINE)["spec"]["template"] == old
    assert plan.delete == (("Job", old_job),)
    assert told(plan.status, "Ready") == ("True", "Serving")
    assert told(plan.status, "ModelCached") == ("False", "Downloading")
    assert told(plan.status, "Progressing") == ("True", "Waiting")
    assert "the engines before serve on" in condition(plan.status, "Progressing").message
    world.settle()
    assert world.children[ENGINE]["spec"]["template"] != old


def test_facts_that_were_kept_on_the_job_outlive_its_pods() -> None:
    world = World(service(**HF))
    world.settle()
    before = world.plan().objects
    _, job = job_of(world)
    world.pods = [one for one in world.pods if one.component != "model"]
    lost = world.plan()
    assert told(lost.status, "ModelCached") == ("False", "Inspecting")
    assert body(lost, ENGINE) == next(one for one in before if key_of(one) == ENGINE)
    job["metadata"].setdefault("annotations", {})[ANNOTATION_FACTS] = result(facts=FACTS)
    assert told(world.plan().status, "ModelCached") == ("True", "NotNeeded")
    job["metadata"]["annotations"][ANNOTATION_FACTS] = "not a result"
    assert told(world.plan().status, "ModelCached") == ("False", "Inspecting")


def test_a_job_whose_facts_are_lost_is_made_anew() -> None:
    world = World(service(**HF))
    world.settle()
    world.pods = [one for one in world.pods if one.component != "model"]
    key, _ = job_of(world)
    world.now += timedelta(minutes=3)
    plan = world.plan()
    assert plan.delete == (key,)
    assert key not in keys(plan)
    assert told(world.settle(), "Ready") == ("True", "Serving")


def test_a_failed_job_is_made_anew_after_ten_minutes() -> None:
    world = World(service(**HF))
    world.step()
    key, job = job_of(world)
    failed = {"type": "Failed", "status": "True", "lastTransitionTime": rfc3339(world.now), "message": "backoff"}
    job["status"] = {"conditions": [failed]}
    words = container("download", state="terminated", exit_code=2, message=result("AccessDenied", "token expired"))
    world.pods = [
        replace(one, phase="Failed", containers=(words,)) if one.component == "model" else one for one in world.pods
    ]
    plan = world.plan()
    assert told(plan.status, "Ready") == ("False", "AccessDenied")
    assert "token expired" in condition(plan.status, "Ready").message
    assert f"kubectl -n ns delete job {key[1]}" in condition(plan.status, "Ready").message
    assert (plan.delete, plan.look_again_s) == ((), 30)
    world.now += timedelta(minutes=9, seconds=45)
    assert world.plan().look_again_s == 15
    world.now += timedelta(seconds=15)
    assert world.plan().delete == (key,)
    assert told(world.settle(), "Ready") == ("True", "Serving")


def test_a_model_that_does_not_fit_starts_no_engine_and_ends_none() -> None:
    spec = {**HF, "profileRef": {"name": "h100"}, "resources": {"gpus": 1}}
    world = World(service(**spec), profiles={"h100": profile()})
    world.settle()
    running = world.children[ENGINE]
    world.edit(**spec, engine={"maxModelLen": 131072})
    world.profiles = {"h100": profile(gpuMemory="24Gi")}
    status = world.settle()
    assert world.children[ENGINE]["spec"] == running["spec"]
    assert told(status, "Ready") == ("True", "Serving")
    assert told(status, "Degraded") == ("True", "DoesNotFit")
    assert told(status, "Progressing") == ("False", "Waiting")
    assert (
        "weights 16.0 GiB + KV cache of one sequence of 131072 tokens 16.0 GiB" in condition(status, "Degraded").message
    )
    assert status.resolved is not None
    assert status.resolved.memory is not None
    assert (status.resolved.memory.weights, status.resolved.memory.kv, status.resolved.memory.device) == (16, 16, 24)


@pytest.mark.parametrize(
    "edit",
    [
        {"profileRef": {"name": "nowhere"}},
        {"podTemplate": {"spec": {"hostNetwork": True}}},
        {"cache": {"type": "hostPath", "path": "/etc"}, **HF},
    ],
)
def test_a_refused_edit_takes_nothing_down(edit: dict[str, Any]) -> None:
    world = World(service(replicas=2))
    world.settle()
    before = dict(world.children)
    world.edit(**edit)
    plan = world.plan()
    assert (plan.objects, plan.delete) == ((), ())
    assert told(plan.status, "Ready") == ("True", "Serving")
    assert condition(plan.status, "Degraded").status == "True"
    assert told(plan.status, "Progressing") == ("False", "Waiting")
    world.settle()
    assert world.children == before
    assert plan.status.resolved == world.plan().status.resolved is not None


def test_a_refused_first_spec_says_so_in_the_column() -> None:
    status = World(service(profileRef={"name": "nowhere"})).plan().status
    assert told(status, "Ready") == ("False", "ProfileNotFound")
    assert told(status, "ModelCached") == ("Unknown", "ProfileNotFound")
    assert status.resolved is None


def test_paused_touches_nothing_and_tells_what_is() -> None:
    world = World(service())
    world.settle()
    world.edit(paused=True, replicas=5)
    plan = world.plan()
    assert (plan.objects, plan.delete, plan.look_again_s) == ((), (), None)
    assert (plan.status.mode, plan.status.ready) == ("Paused", "1/5")
    assert told(plan.status, "Ready") == ("True", "Serving")
    assert "nothing is changed" in condition(plan.status, "Ready").message
    assert told(World(service(paused=True)).plan().status, "Ready") == ("False", "Paused")


def test_paused_while_asleep_does_not_promise_to_wake() -> None:
    autoscaling = {"max": 3, "scaleToZero": {"after": 10}}
    world = World(service(autoscaling=autoscaling))
    world.settle()
    world.scaling = ScalingSeen(0, "Idle", "nobody asked for 10 s")
    world.settle()
    assert told(world.plan().status, "Ready") == ("True", "Idle")
    world.edit(autoscaling=autoscaling, paused=True)
    status = world.plan().status
    assert told(status, "Ready") == told(status, "EngineReady") == ("False", "Paused")
    assert told(status, "ScalingActive") == ("False", "Paused")


def test_what_belongs_to_others_is_left_alone_and_the_rest_is_made() -> None:
    world = World(service())
    owner = {"kind": "Other", "name": "theirs", "controller": True}
    world.strangers[ENGINE] = {"kind": ENGINE[0], "metadata": {"name": ENGINE[1], "ownerReferences": [owner]}}
    plan = world.plan()
    assert ENGINE not in keys(plan)
    assert ROUTER in keys(plan)
    assert told(plan.status, "Degraded") == ("True", "NameTaken")
    assert "Deployment qwen-engine belongs to Other theirs" in condition(plan.status, "Degraded").message
    assert told(plan.status, "Ready")[0] == "False"


def test_children_of_the_service_before_of_that_name_are_waited_for() -> None:
    world = World(service())
    owner = {"kind": "InferenceService", "name": "qwen", "controller": True, "uid": "older"}
    world.strangers[ROUTER] = {"kind": ROUTER[0], "metadata": {"name": ROUTER[1], "ownerReferences": [owner]}}
    plan = world.plan()
    assert "that was deleted" in condition(plan.status, "Degraded").message
    assert plan.look_again_s == 30
    world.strangers.clear()
    assert told(world.settle(), "Degraded") == ("False", "AsWanted")


def test_what_is_wanted_no_more_goes_and_what_is_anothers_stays() -> None:
    world = World(service(monitoring={"serviceMonitor": True}))
    world.settle()
    world.strangers["ConfigMap", "notes"] = {"kind": "ConfigMap", "metadata": {"name": "notes"}}
    world.edit()
    assert world.plan().delete == (("ServiceMonitor", "qwen"),)
    world.children["ServiceMonitor", "qwen"]["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    assert world.plan().delete == ()


def test_a_claim_goes_last() -> None:
    world = World(service(**CACHED, replicas=3))
    old = world.settle().roles[0].revision
    world.edit(**HF, replicas=3)
    steps = 0
    while CLAIM in world.children:
        claimed = [one for one in world.of("engine") if one.revision == old]
        world.step()
        steps += 1
        assert steps < 40
    assert claimed == []
    wanted = world.children[ENGINE]["spec"]["template"]["metadata"]["labels"][LABEL_REVISION]
    assert [(one.revision, one.ready) for one in world.of("engine")] == [(wanted, True)] * 3


def test_a_claim_of_the_users_is_never_ours_to_delete() -> None:
    world = World(service(**HF, cache={"type": "pvc", "claim": "theirs"}))
    world.settle()
    theirs = ("PersistentVolumeClaim", "theirs")
    world.strangers[theirs] = {"kind": theirs[0], "metadata": {"name": theirs[1]}}
    world.edit()
    plan = world.plan()
    assert theirs not in plan.delete
    assert told(plan.status, "Degraded") == ("False", "AsWanted")


def test_replicas_of_another_manager_are_kept_and_counted() -> None:
    world = World(service(replicas=1))
    world.settle()
    observed = world.observed()
    scaled = {**world.children[ENGINE], "spec": {**world.children[ENGINE]["spec"], "replicas": 3}}
    children = {**observed.children, ENGINE: Child(scaled, ours=True, scaled_by="hpa")}
    plan = plan_service(world.service, world.status, replace(observed, children=children), SETTINGS)
    assert "replicas" not in body(plan, ENGINE)["spec"]
    assert (plan.status.ready, plan.status.roles[0].replicas) == ("1/3", 3)


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ({"monitoring": {"serviceMonitor": True}}, "ServiceMonitor", "the Prometheus operator"),
        ({"expose": {"type": "Ingress", "host": "a.example"}}, "Ingress", "networking.k8s.io"),
        (
            {"expose": {"type": "Gateway", "host": "a.example", "gatewayRef": {"name": "g"}}},
            "HTTPRoute",
            "the Gateway API",
        ),
        ({"router": {"inferencePool": {}}}, "InferencePool", "the Gateway API Inference Extension"),
    ],
)
def test_a_kind_that_is_missing_is_named_with_what_brings_it(spec: Any, kind: str, words: str) -> None:
    world = World(service(**spec), optional_kinds=frozenset())
    status = world.settle()
    assert told(status, "Degraded") == ("True", "KindMissing")
    assert f" {kind}, which this cluster does not know" in condition(status, "Degraded").message
    assert words in condition(status, "Degraded").message
    assert told(status, "Ready") == ("True", "Serving")
    world.optional_kinds = frozenset({kind})
    assert told(world.settle(), "Degraded") == ("False", "AsWanted")
    assert kind in {key[0] for key in world.children}


FORBIDDEN = 'deployments.apps "q" is forbidden: User "system:serviceaccount:p:o" cannot patch resource "deployments"'


@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        (403, 'services "q" is forbidden: exceeded quota: few, requested: services=1', "ResourceQuota raised"),
        (403, FORBIDDEN, "upgrade the chart"),
        (403, "unable to create new content in namespace ns because it is being terminated", "another one"),
        (403, 'admission webhook "p.example" denied the request: no', "A policy of this cluster"),
        (422, 'Deployment.apps "q" is invalid: spec.selector: field is immutable', "it is made anew"),
        (422, 'Deployment.apps "q" is invalid: spec.template.spec.x: Required value', "Correct the field"),
        (409, "Apply failed with 1 conflict", "--show-managed-fields"),
        (503, "etcdserver: request timed out", "did not take Deployment q: etcdserver: request timed out. It is tried"),
        (0, "", "did not take Deployment q: no answer"),
    ],
)
def test_a_no_of_the_api_server_is_told_with_what_to_do(status: int, message: str, words: str) -> None:
    found = apply_refused([ApplyFailure("Deployment", "q", status, "", message)], "ns")
    assert found is not None
    assert (found.holds, found.reason) == (True, Reason.APPLY_REFUSED)
    assert words in found.message


def test_a_lasting_no_is_told_before_one_that_may_pass() -> None:
    passing = ApplyFailure("Service", "a", 503, "", "later")
    found = apply_refused([passing, ApplyFailure("Deployment", "b", 422, "Invalid", "never"), passing], "ns")
    assert found is not None
    assert "refused Deployment b (and 2 more): never" in found.message
    assert apply_refused([], "ns") is None


def test_gpu_rollouts_end_one_before_they_start_one() -> None:
    spec = {"resources": {"gpus": 1}, "replicas": 3}
    world = World(service(**spec))
    world.settle()
    world.edit(**spec, engine={"args": ["--seed", "1"]})
    most = 0
    for _ in range(20):
        world.step()
        most = max(most, len(world.of("engine")))
    assert most == 3
    assert told(world.settle(), "Progressing") == ("False", "Settled")


def test_a_rollout_that_takes_too_long_has_stopped() -> None:
    world = World(service(replicas=2))
    world.settle()
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    world.edit(replicas=2, engine={"args": ["--seed", "1"]})
    world.breaks = {world.plan().status.roles[0].revision: lambda one: one}
    for _ in range(3):
        world.step()
    assert told(world.plan().status, "Progressing") == ("True", "RollingOut")
    world.children[ENGINE]["status"] = {"conditions": [late]}
    status = world.plan().status
    assert told(status, "Progressing") == ("False", "RolloutStopped")
    assert "2 of 2 engines keep serving" in condition(status, "Progressing").message
    assert "loads the model" not in condition(status, "Progressing").message


def test_the_job_of_a_claim_waits_where_its_claim_does() -> None:
    world = World(service(**CACHED))
    world.step()
    pending = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"
    world.pods = [
        replace(one, phase="Pending", node="", unschedulable=pending, containers=())
        if one.component == "model"
        else one
        for one in world.pods
    ]
    status = world.plan().status
    assert told(status, "Ready") == ("False", "ClaimPending")
    assert told(status, "EngineReady") == ("False", "WaitingForModel")
    assert told(status, "Progressing") == ("False", "Waiting")


def test_weights_that_grew_are_seen_in_the_status() -> None:
    world = World(service(**HF), facts=msgspec.structs.replace(FACTS, weights_bytes=3 * GIB))
    status = world.settle()
    assert status.resolved is not None
    assert status.resolved.memory is not None
    assert (status.resolved.memory.weights, status.resolved.memory.device) == (3, None)
    assert any("was not checked" in line for line in status.resolved.why)
    assert world.now > NOW


@pytest.mark.parametrize(
    ("unschedulable", "expected"),
    [
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", ("True", "RollingOut")),
        ('0/1 nodes are available: persistentvolumeclaim "models" not found.', ("False", "RolloutStopped")),
    ],
)
def test_a_rollout_waits_for_what_may_pass(unschedulable: str, expected: tuple[str, str]) -> None:
    world = World(service())
    world.settle()
    world.edit(engine={"args": ["--seed", "1"]})
    waits: dict[str, Any] = {"phase": "Pending", "node": "", "unschedulable": unschedulable, "containers": ()}
    world.breaks = {world.plan().status.roles[0].revision: lambda one: replace(one, **waits)}
    status = world.settle()
    assert told(status, "Progressing") == expected
    assert "qwen-engine" in condition(status, "Progressing").message
    assert told(status, "EngineReady") == ("True", "AllReady")


def test_engines_do_not_move_because_a_profile_cannot_be_read() -> None:
    world = World(service(resources={"gpuType": "h100"}), profiles={"h100": profile()})
    world.settle()
    broken = replace(world.observed(), profiles={}, invalid_profiles={"h100": "spec.gpuMemory: must be a quantity"})
    plan = plan_service(world.service, world.status, broken, SETTINGS)
    assert (plan.objects, plan.delete) == ((), ())
    assert told(plan.status, "Degraded") == ("True", "ProfileInvalid")
    assert "spec.resources.gpuType: InferenceProfile h100" in condition(plan.status, "Degraded").message
    another = replace(broken, profiles={"mine": profile("mine")})
    assert plan_service(world.service, world.status, another, SETTINGS).objects
