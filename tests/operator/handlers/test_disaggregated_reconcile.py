"""A disaggregated service through the reconcile, over a store that applies as the API server does."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from pagefleet_operator.handlers.pod_http import FRESH_S
from pagefleet_operator.handlers.reconciler import wake_asleep
from pagefleet_operator.plan.kv_link import KvEngineSeen
from pagefleet_operator.plan.observed import Observed, ScalingSeen
from pagefleet_operator.plan.roles import PAIR_ROLES
from pagefleet_protocol.inference_status import InferenceServiceStatus, RoleScalingStatus, ScalingStatus

from tests.fakes.kube_operator import NAMESPACE, writer
from tests.fakes.kube_store import Write
from tests.fakes.kube_store_cluster import KINDS
from tests.operator.handlers.test_reconciler import KEY, NOW, Bench

TWO = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}


def pairs(bench: Bench) -> dict[str, dict[str, int]]:
    """Engines of each part that are asked for, by revision."""
    found: dict[str, dict[str, int]] = {}
    for (kind, _), body in bench.objects().items():
        labels = body["metadata"].get("labels", {})
        if kind == "Deployment" and "pagefleet.dev/role" in labels:
            found.setdefault(labels["pagefleet.dev/revision"], {})[labels["pagefleet.dev/role"]] = body["spec"][
                "replicas"
            ]
    return found


def get_ready(bench: Bench) -> None:
    """Have every engine that is asked for become ready."""
    for (kind, name), body in bench.objects().items():
        if kind == "Deployment":
            status = {"status": {"availableReplicas": body["spec"]["replicas"]}}
            bench.cluster.store.merge_patch(KINDS["Deployment"], NAMESPACE, name, status, subresource())


def subresource() -> Write:
    return replace(writer(), subresource="status")


def test_pairs_are_made_rolled_over_and_left_without_a_revision_losing_one_part() -> None:
    bench = Bench()
    bench.apply(disaggregation=TWO)
    bench.look()
    (first,) = pairs(bench)
    assert pairs(bench) == {first: {"prefill": 2, "decode": 2}}
    assert {"qwen-prefill", "qwen-engine"} <= {name for kind, name in bench.objects() if kind == "Service"}
    assert ("Secret", "qwen-fleet") in bench.objects()
    get_ready(bench)
    bench.look()
    before = len(bench.writes())
    bench.look()
    assert len(bench.writes()) == before, "what is as wanted is left alone"
    bench.apply(disaggregation=TWO, engine={"args": ["--seed", "1"]})
    seen = []
    for _ in range(12):
        bench.look()
        seen.append(pairs(bench))
        get_ready(bench)
    (second,) = seen[-1]
    assert second != first
    assert seen[-1] == {second: {"prefill": 2, "decode": 2}}
    assert {first: {"prefill": 1, "decode": 1}, second: {"prefill": 2, "decode": 2}} in seen
    assert all(len(pair) == 2 for step in seen for pair in step.values())
    bench.apply(disaggregation=None, engine=None)
    both = {("NetworkPolicy", "qwen-prefill"), ("NetworkPolicy", "qwen-decode")}
    for _ in range(12):
        bench.look()
        assert not pairs(bench) or both <= bench.objects().keys(), "those that are left pass K/V on"
        get_ready(bench)
    assert not both & bench.objects().keys()
    assert pairs(bench) == {}
    assert bench.get("Deployment", "qwen-engine")["spec"]["replicas"] == 1
    assert ("Service", "qwen-prefill") not in bench.objects()


def test_engines_are_asked_whether_they_reach_each_other() -> None:
    bench = Bench()
    bench.apply(disaggregation={})
    bench.look()
    (revision,) = pairs(bench)
    for number, role in enumerate(("prefill", "decode")):
        labels = {
            "app.kubernetes.io/component": "engine",
            "app.kubernetes.io/managed-by": "pagefleet-operator",
            "pagefleet.dev/service": "qwen",
            "pagefleet.dev/role": role,
            "pagefleet.dev/revision": revision,
        }
        name, ip = f"qwen-{role}-{revision}-a", f"10.0.0.{number}"
        bench.cluster.store.create(KINDS["Pod"], NAMESPACE, {"metadata": {"name": name, "labels": labels}})
        status = {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]}
        bench.cluster.store.merge_patch(KINDS["Pod"], NAMESPACE, name, {"status": status}, subresource())
        bench.pods.kv_engines[ip] = KvEngineSeen(name, "prefill" if number == 0 else "decode", "same")
    bench.look()
    assert bench.condition("KVLinkReady")["reason"] == "KVLinked"
    bench.pods.kv_engines["10.0.0.1"] = KvEngineSeen("d", "decode", "another")
    bench.look()
    assert bench.condition("KVLinkReady")["reason"] == "KVLinked", "they were asked a moment ago"
    bench.clock += FRESH_S
    assert bench.look() is not None
    assert bench.condition("KVLinkReady")["reason"] == "KVIncompatible"
    assert bench.condition("Degraded")["status"] == "True"


def test_both_parts_wake_together_though_the_spec_is_refused() -> None:
    bench = Bench()
    bench.apply(disaggregation={"prefill": {"replicas": 0}, "decode": {"replicas": 0}})
    bench.look()
    (revision,) = pairs(bench)
    assert pairs(bench) == {revision: {"prefill": 0, "decode": 0}}
    scaling = ScalingStatus(mode="Internal", current=0, desired=0, reason="Idle", signal="", at="2026-01-01T00:00:00Z")
    stored = InferenceServiceStatus.model_validate(bench.get("InferenceService")["status"])
    parts = tuple(RoleScalingStatus(name=role, scaling=scaling) for role in PAIR_ROLES)
    previous = stored.model_copy(update={"role_scaling": parts})
    bench.cluster.show(bench.view)
    children = bench.view.children(KEY, bench.get("InferenceService")["metadata"]["uid"])
    asleep = Observed(now=NOW, children=children, role_scaling={role: ScalingSeen(0, "", "") for role in PAIR_ROLES})
    asyncio.run(wake_asleep(bench.cluster, KEY, previous, asleep))
    assert pairs(bench) == {revision: {"prefill": 0, "decode": 0}}, "nobody asks"
    asked = replace(asleep, role_scaling={**asleep.role_scaling, "decode": ScalingSeen(2, "WokenUp", "")})
    asyncio.run(wake_asleep(bench.cluster, KEY, stored, asked))
    assert pairs(bench) == {revision: {"prefill": 0, "decode": 0}}, "somebody else scales it"
    asyncio.run(wake_asleep(bench.cluster, KEY, previous, asked))
    assert pairs(bench) == {revision: {"prefill": 1, "decode": 2}}, "neither answers alone"
