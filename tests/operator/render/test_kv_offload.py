"""kvOffload in a cluster: the engine's flags, memory and disk of its pod, what is replaced by a change."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from pagefleet_protocol.kube_names import LABEL_REVISION

from tests.operator.render.service_table import H100, HF, TINY, Case, by_key

Object = dict[str, Any]
MEMORY = {"memory": "32Gi"}
DISK = {**MEMORY, "disk": {"size": "200Gi"}}
CLASS = {**MEMORY, "disk": {"size": "200Gi", "storageClass": "nvme"}}
GIB = 2**30


def pod(case: Case, name: str = "qwen-engine") -> Object:
    """The pod template of the engines, or of the part whose Deployment's name begins so."""
    (found,) = [one for key, one in by_key(case.wanted()).items() if key[0] == "Deployment" and key[1].startswith(name)]
    template: Object = found["spec"]["template"]
    return template


def container(case: Case, name: str = "qwen-engine") -> Object:
    found: Object = pod(case, name)["spec"]["containers"][0]
    return found


def flags(case: Case, name: str = "qwen-engine") -> dict[str, str]:
    """The flags about K/V, each with its value."""
    args = container(case, name)["args"]
    return {flag: value for flag, value in pairwise(args) if flag.startswith("--kv-")}


def offload(fields: Object, **spec: Any) -> Case:
    return TINY.changed(engine={"kvOffload": fields}, router={"kvEvents": False}, **spec)


def test_memory_alone_is_flags_and_memory() -> None:
    case = offload(MEMORY, resources={"memory": "16Gi"})
    assert flags(case) == {
        "--kv-connector": "offload",
        "--kv-offload-memory": str(32 * GIB),
        "--kv-offload-policy": "lru",
    }
    assert container(case)["resources"] == {"requests": {"memory": "48Gi"}, "limits": {"memory": "48Gi"}}
    assert {one["name"] for one in pod(case)["spec"]["volumes"]} == {"tmp", "shm"}


@pytest.mark.parametrize(
    ("own", "kept", "together"),
    [
        ("16Gi", "32Gi", "48Gi"),
        ("1.5Gi", "512Mi", "2Gi"),
        ("8Gi", "2048Ki", "8194Mi"),
        ("8G", "2M", "8002000000"),
        ("1Ti", "1Ti", "2Ti"),
    ],
)
def test_memory_is_added_exactly(own: str, kept: str, together: str) -> None:
    found = container(offload({"memory": kept}, resources={"memory": own}))["resources"]
    assert found["requests"]["memory"] == found["limits"]["memory"] == together


def test_without_a_limit_a_node_still_has_to_have_the_memory() -> None:
    assert container(offload(MEMORY))["resources"] == {"requests": {"memory": "32Gi"}}


def test_a_disk_is_a_part_of_the_nodes_own_with_a_bound_above_what_the_engine_fills() -> None:
    case = offload({**DISK, "eviction": "arc"})
    made = flags(case)
    assert (made["--kv-offload-policy"], int(made["--kv-offload-disk"])) == ("arc", 180 * GIB)
    assert {"name": "kv", "emptyDir": {"sizeLimit": "200Gi"}} in pod(case)["spec"]["volumes"]
    assert {"name": "kv", "mountPath": made["--kv-offload-dir"]} in container(case)["volumeMounts"]
    assert container(case)["resources"] == {"requests": {"memory": "32Gi", "ephemeral-storage": "200Gi"}}


def test_a_disk_of_a_class_is_a_claim_of_each_pod() -> None:
    case = offload(CLASS)
    (volume,) = [one for one in pod(case)["spec"]["volumes"] if one["name"] == "kv"]
    claim = volume["ephemeral"]["volumeClaimTemplate"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "nvme",
        "resources": {"requests": {"storage": "200Gi"}},
    }
    assert claim["metadata"]["labels"]["pagefleet.dev/service"] == "qwen"
    assert "ephemeral-storage" not in container(case)["resources"]["requests"]


def test_the_volume_belongs_to_the_pods_user() -> None:
    security = pod(offload(DISK))["spec"]["securityContext"]
    assert security["fsGroup"] == security["runAsUser"]


def test_both_parts_pass_on_what_they_keep() -> None:
    case = offload(DISK, disaggregation={})
    for role in ("prefill", "decode"):
        made = flags(case, f"qwen-{role}")
        assert (made["--kv-connector"], made["--kv-role"]) == ("p2p,offload", role)
        assert made["--kv-offload-memory"] == str(32 * GIB)
        assert container(case, f"qwen-{role}")["resources"]["requests"]["memory"] == "32Gi"


def test_a_part_may_keep_more_and_the_other_nothing() -> None:
    roles = {"prefill": {"kvOffload": DISK, "resources": {"memory": "8Gi"}}}
    case = TINY.changed(disaggregation=roles, resources={"memory": "4Gi"})
    assert flags(case, "qwen-prefill")["--kv-connector"] == "p2p,offload"
    assert container(case, "qwen-prefill")["resources"]["limits"] == {"memory": "40Gi"}
    assert flags(case, "qwen-decode")["--kv-connector"] == "p2p"
    assert container(case, "qwen-decode")["resources"]["limits"] == {"memory": "4Gi"}
    over = case.changed(engine={"kvOffload": MEMORY})
    assert "--kv-offload-disk" in flags(over, "qwen-prefill")
    assert "--kv-offload-disk" not in flags(over, "qwen-decode")


def test_a_profile_gives_it_with_its_reason_and_a_service_its_own() -> None:
    engine = {**H100["engine"], "kvOffload": DISK}
    case = Case(
        {"model": HF.spec["model"], "resources": {"gpuType": "h100"}}, profiles={"h100": {**H100, "engine": engine}}
    )
    assert container(case)["resources"]["limits"] == {"memory": "96Gi", "nvidia.com/gpu": "1"}
    assert "engine.kvOffload: 32Gi of memory, 200Gi of disk, lru, from profile h100" in case.resolved.why
    own = case.changed(engine={"kvOffload": {"memory": "64Gi"}})
    assert container(own)["resources"]["limits"]["memory"] == "128Gi"
    assert "--kv-offload-disk" not in flags(own)


def test_every_change_of_it_replaces_engines() -> None:
    fields = (MEMORY, {"memory": "33Gi"}, {**MEMORY, "eviction": "arc"}, DISK, CLASS)
    revisions = {pod(offload(one))["metadata"]["labels"][LABEL_REVISION] for one in fields}
    assert len(revisions) == len(fields)


def test_a_pod_template_has_the_last_word_about_the_volume() -> None:
    local = {"name": "kv", "hostPath": {"path": "/mnt/nvme"}, "emptyDir": None}
    case = offload(DISK, podTemplate={"spec": {"volumes": [local]}})
    assert {"name": "kv", "hostPath": {"path": "/mnt/nvme"}} in pod(case)["spec"]["volumes"]


def test_of_several_nodes_the_first_has_memory_and_disk() -> None:
    case = offload(DISK, resources={"memory": "16Gi"}, nodes=2)
    (found,) = [one for key, one in by_key(case.wanted()).items() if key[0] == "LeaderWorkerSet"]
    template = found["spec"]["leaderWorkerTemplate"]
    leader, follower = (template[one]["spec"] for one in ("leaderTemplate", "workerTemplate"))
    assert leader["containers"][0]["resources"]["limits"]["memory"] == "48Gi"
    assert follower["containers"][0]["resources"]["limits"]["memory"] == "16Gi"
    assert [one["name"] for one in leader["volumes"] if one["name"] == "kv"] == ["kv"]
    assert not [one for one in follower["volumes"] if one["name"] == "kv"]
    for pod_spec in (leader, follower):
        args = pod_spec["containers"][0]["args"]
        assert args[args.index("--kv-connector") + 1] == "offload"
        assert ("--kv-offload-dir" in args) == (pod_spec is leader)
