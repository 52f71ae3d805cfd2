"""What a manifest asks of this machine: settings in force, what cannot run here, and what has no effect here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pagefleet_operator.errors import ManifestError
from pagefleet_operator.local.manifest import Source, parse_manifest
from pagefleet_operator.local.wanted import Wanted, check_gpus, ignored_fields, read_wanted

from tests.fakes.resource_documents import profile_document

HF = {"uri": "hf://org/name"}


def read(*documents: dict[str, Any], **environment: str) -> tuple[Wanted, ...]:
    source = Source(Path("f.yaml"), yaml.safe_dump_all(documents).encode())
    return read_wanted(parse_manifest((source,)), environment)


def problems(*documents: dict[str, Any], **environment: str) -> tuple[str, ...]:
    with pytest.raises(ManifestError) as caught:
        read(*documents, **environment)
    return caught.value.problems


def test_profiles_of_the_manifest_count_wherever_they_stand(document: Any) -> None:
    profile = profile_document("big", gpuType="h100", engine={"maxModelLen": 4096})
    (named,) = read(document(profileRef={"name": "big"}, resources={"gpus": 0}), profile)
    (typed,) = read(profile, document(resources={"gpuType": "h100"}))
    assert named.resolved.max_model_len == typed.resolved.max_model_len == 4096
    assert (named.gpus, typed.gpus) == (0, 1)


def test_what_needs_a_cluster_is_told_with_what_to_do_here(document: Any) -> None:
    secret = {"secretKeyRef": {"name": "tokens", "key": "k"}}
    found = problems(
        document("a", model={"uri": "pvc://claim/m"}),
        document("c", profileRef={"name": "h200"}),
        document("d", engine={"env": [{"name": "API_TOKEN", "valueFrom": secret}]}),
    )
    assert [line[:60] for line in found] == [
        "a: spec.model.uri: pvc:// is a volume of a cluster: on this ",
        "c: spec.profileRef.name: there is no InferenceProfile h200; ",
        "d: spec.engine.env: API_TOKEN comes from the Secret tokens, ",
    ]
    assert found[2].endswith("on this machine set the environment variable API_TOKEN")


def test_a_secret_of_a_cluster_is_a_variable_here(document: Any) -> None:
    env = [{"name": "API_TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    (wanted,) = read(document(engine={"env": env}), API_TOKEN="x")
    assert [variable.name for variable in wanted.resolved.env] == ["API_TOKEN"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, []),
        ({"resources": {"gpus": 0, "cpu": 1}, "rollout": {"drainSeconds": 1}, "expose": {"type": "ClusterIP"}}, []),
        ({"resources": {"memory": "1Gi"}}, ["spec.resources.memory (--kv-cache-memory in spec.engine.args bounds"]),
        ({"resources": {"shm": "1Gi"}}, ["spec.resources.shm"]),
        ({"engine": {"kvOffload": {"memory": "1Gi", "disk": {"size": "1Gi"}}}}, []),
        (
            {"engine": {"kvOffload": {"memory": "1Gi", "disk": {"size": "1Gi", "storageClass": "fast"}}}},
            ["spec.engine.kvOffload.disk.storageClass (the state folder holds it"],
        ),
        ({"resources": {"gpuType": "h100"}}, ["spec.resources.gpuType (no InferenceProfile here has it)"]),
        ({"engine": {"image": "registry/engine:1"}}, ["spec.engine.image"]),
        ({"model": HF, "cache": {"type": "pvc", "size": "1Gi"}}, ["spec.cache"]),
        ({"model": {**HF, "secretRef": {"name": "t"}}}, ["spec.model.secretRef (credentials come from the env"]),
        (
            {"router": {"auth": {"secretRef": {"name": "k", "key": "a"}}}},
            ["spec.router.auth (routers ask for keys where P"],
        ),
        ({"router": {"resources": {"cpu": 1}}}, ["spec.router.resources"]),
        ({"router": {"inferencePool": {}}}, ["spec.router.inferencePool"]),
        ({"autoscaling": {"max": 3}}, []),
        ({"autoscaling": {"max": 3, "mode": "Advisory"}, "replicas": 2}, []),
        ({"autoscaling": {"mode": "External"}}, ["spec.autoscaling (mode External: nobody scales here, spec.replicas"]),
        (
            {
                "expose": {"type": "Ingress", "host": "a.b"},
                "monitoring": {"serviceMonitor": True, "tracesEndpoint": "http://127.0.0.1:4318"},
                "podTemplate": {"a": 1},
            },
            ["spec.expose", "spec.monitoring.serviceMonitor", "spec.podTemplate"],
        ),
    ],
)
def test_fields_without_effect_are_named(document: Any, spec: dict[str, Any], said: list[str]) -> None:
    (wanted,) = read(document(**spec))
    found = ignored_fields(wanted)
    assert len(found) == len(said)
    assert all(field.startswith(beginning) for field, beginning in zip(found, said, strict=True))


def test_gpus_that_are_not_there_are_told_with_the_count(document: Any) -> None:
    wanted = read(document("a", replicas=2, resources={"gpus": 1}), document("b"))
    assert check_gpus(wanted, 2) == []
    assert check_gpus(wanted[1:], 0) == []
    (missing,) = check_gpus(wanted, 1)
    assert "2 GPUs are asked for (a 2) and this machine has 1; lower replicas" in missing
    (absent,) = check_gpus(wanted, 0)
    assert "this machine has no GPU; set it to 0 to compute on the CPU" in absent


def test_an_engine_of_more_gpus_than_there_are_is_told_so(document: Any) -> None:
    wanted = read(document("a", resources={"gpus": 4}), document("b", resources={"gpus": 1}))
    assert check_gpus(wanted, 5) == []
    (missing,) = check_gpus(wanted, 2)
    assert "5 GPUs are asked for (a 4, b 1) and this machine has 2; one engine takes 4: lower it" in missing


def test_gpus_have_to_be_there_for_the_least_engines_only(document: Any) -> None:
    scaled = {"resources": {"gpus": 1}, "autoscaling": {"min": 2, "max": 8}}
    wanted = read(document("a", **scaled))
    assert check_gpus(wanted, 2) == []
    (missing,) = check_gpus(wanted, 1)
    assert missing.endswith("this machine has 1; lower replicas, or autoscaling.min")
