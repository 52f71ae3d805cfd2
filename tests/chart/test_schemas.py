"""Every rendered object against Kubernetes' own OpenAPI schemas, oldest and newest supported; and Helm's linter."""

from __future__ import annotations

from typing import Any

import helm_python
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
from pagefleet_protocol.version import VERSION

from tests.fakes.helm_chart import CHART, Object, render

OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()
OTHERS = {"InferenceProfile", "PrometheusRule", "ServiceMonitor"}
"""Kinds that Kubernetes itself does not have."""
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everywhere": {"watch": {"all": True}, "operator": {"replicas": 1}},
    "everything": {
        "images": {"registry": "registry.example.org", "pullSecrets": ["key"]},
        "watch": {"namespaces": ["team-a", "team-b"]},
        "operator": {
            "priorityClassName": "high",
            "nodeSelector": {"pool": "control"},
            "tolerations": [{"operator": "Exists"}],
            "podAnnotations": {"a": "b"},
        },
        "policy": {"allowedImages": ["registry.example.org/"], "allowAnyPodTemplate": True},
        "metrics": {name: {"enabled": True} for name in ("serviceMonitor", "alerts", "dashboards")},
    },
}


def standard_objects(values: dict[str, Any]) -> list[Object]:
    return [one for one in render(values) if one["kind"] not in OTHERS]


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_objects_are_as_the_schemas_say(version: str, name: str) -> None:
    objects = standard_objects(VALUES[name])
    assert len(objects) > 10
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_schemas_find_a_misspelled_field() -> None:
    (deployment,) = [one for one in standard_objects({}) if one["kind"] == "Deployment"]
    deployment["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="'container' was unexpected"):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)


def test_nothing_is_rendered_twice() -> None:
    for values in VALUES.values():
        keys = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in render(values)]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", VALUES)
def test_helm_finds_nothing_to_warn_of(name: str) -> None:
    report = helm_python.lint(CHART, VALUES[name], strict=True, kube_version=f"v{OLDEST}.0")
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


def test_the_charts_version_is_that_of_its_programs() -> None:
    with helm_python.Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == VERSION
