"""What is said of a cluster: from what a make-believe kubectl answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pagefleet_protocol.doctor.checks import Finding, Level
from pagefleet_protocol.doctor.cluster import Kubectl, check_cluster
from pagefleet_protocol.doctor.machine import ProgramFailed

Answers = Mapping[str, Any]


def met(kind: str) -> Mapping[str, Any]:
    return {"conditions": [{"type": kind, "status": "True", "reason": "Serving"}]}


def named(name: str, **more: Any) -> Mapping[str, Any]:
    return {"metadata": {"name": name, "namespace": "models"}, **more}


CRDS = [
    named(f"{plural}.pagefleet.dev", status=met("Established")) for plural in ("inferenceservices", "inferenceprofiles")
]
OPERATOR = named("pagefleet-operator", spec={"replicas": 2}, status={"readyReplicas": 2})
NODE = named("a", status={**met("Ready"), "allocatable": {"nvidia.com/gpu": "4"}})
WELL: Answers = {
    "version": {"serverVersion": {"major": "1", "minor": "33+", "gitVersion": "v1.33.1"}},
    "customresourcedefinitions": CRDS,
    "deployments": [OPERATOR],
    "nodes": [NODE],
    "pods": [named("tiny-engine-1", status={"containerStatuses": [{"image": "e:1", "state": {"running": {}}}]})],
    "inferenceservices.pagefleet.dev": [named("tiny", status=met("Ready"))],
    "auth": "yes",
}


def check(**changed: Any) -> list[Finding]:
    answers = {**WELL, **changed}

    def run(command: Sequence[str]) -> str:
        word = next(one for one in command if one in answers)
        answer = answers[word]
        if isinstance(answer, Exception):
            raise answer
        if word == "auth":
            return str(answer)
        return json.dumps({"items": answer} if isinstance(answer, list) else answer)

    return list(check_cluster(Kubectl(run, "models")))


def test_a_cluster_that_is_well() -> None:
    found = check()
    assert [one for one in found if one.level is not Level.WELL] == []
    assert {one.subject for one in found} == {
        "API server", "definitions", "operator", "rights", "nodes", "images", "services"
    }  # fmt: skip
    assert "GPUs: a 4; an engine may have up to 4 (resources.gpus)" in {one.text for one in found}


WAITING = {"image": "registry/e:9", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
FAILED = {"conditions": [{"type": "Ready", "status": "False", "reason": "DiskFull", "message": "no room"}]}


@pytest.mark.parametrize(
    ("changed", "level", "text", "do"),
    [
        ({"version": ProgramFailed("kubectl is not on PATH")}, Level.WRONG, "not on PATH", "get-contexts"),
        ({"version": {"serverVersion": {"major": "1", "minor": "29"}}}, Level.WRONG, "unknown version", "1.30"),
        (
            {"customresourcedefinitions": CRDS[:1]},
            Level.WRONG,
            "inferenceprofiles.pagefleet.dev is not",
            "helm install",
        ),
        ({"customresourcedefinitions": [named("inferenceservices.pagefleet.dev")]}, Level.WRONG, "established", "crd"),
        ({"deployments": []}, Level.WRONG, "none is installed", "helm install"),
        ({"deployments": [named("o", spec={"replicas": 2}, status={})]}, Level.WRONG, "none of 2", "describe pods"),
        ({"auth": ProgramFailed("no")}, Level.NOTE, "you may not get, create, patch, delete", "edit"),
        ({"nodes": [named("a", status=met("Ready"))]}, Level.NOTE, "none of 1 has nvidia.com/gpu", "device plugin"),
        (
            {"nodes": [named("b", status={"allocatable": {"nvidia.com/gpu": "1"}})]},
            Level.WRONG,
            "not ready: b",
            "node b",
        ),
        ({"nodes": ProgramFailed("forbidden")}, Level.NOTE, "cannot be looked at: forbidden", "who may"),
        ({"pods": [named("p", status={"containerStatuses": [WAITING]})]}, Level.WRONG, "registry/e:9", "Secret"),
        (
            {"inferenceservices.pagefleet.dev": [named("t", status=FAILED)]},
            Level.WRONG,
            "DiskFull: no room",
            "#diskfull",
        ),
        ({"inferenceservices.pagefleet.dev": [named("t")]}, Level.WRONG, "no operator has looked", "helm install"),
    ],
)
def test_what_is_found_has_its_level_and_its_remedy(changed: Answers, level: Level, text: str, do: str) -> None:
    found = [one for one in check(**changed) if text in one.text]
    assert [one.level for one in found] == [level]
    assert do in found[0].do


def test_the_namespace_is_told_to_kubectl() -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> str:
        commands.append(command)
        raise ProgramFailed("no")

    list(check_cluster(Kubectl(run, "models")))
    assert commands == [["kubectl", "--request-timeout", "15s", "--namespace", "models", "version", "-o", "json"]]
