"""Values: each one changes what is installed, a wrong one is refused in words that help."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.fakes.helm_chart import CHART, manifests

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "0" * 64
MONITORED = {"metrics": {name: {"enabled": True} for name in ("serviceMonitor", "alerts", "dashboards")}}

CHANGED: dict[str, Any] = {
    "fullnameOverride": "fleet",
    "images.registry": "registry.example.org/team",
    "images.pullPolicy": "Always",
    "images.pullSecrets": ["registry-key"],
    **{f"images.{image}.repository": "other" for image in ("operator", "router", "engine")},
    **{f"images.{image}.tag": "1.2.3" for image in ("operator", "router", "engine")},
    **{f"images.{image}.digest": DIGEST for image in ("operator", "router", "engine")},
    "crds.install": False,
    "watch.namespaces": ["team-a", "team-b"],
    "watch.all": True,
    "operator.replicas": 1,
    "operator.resources.requests.cpu": "1",
    "operator.resources.requests.memory": "1Gi",
    "operator.resources.requests.ephemeral-storage": "1Gi",
    "operator.resources.limits.memory": "1Gi",
    "operator.resources.limits.ephemeral-storage": "1Gi",
    "operator.resyncSeconds": 60,
    "operator.workers": 2,
    "operator.priorityClassName": "system-cluster-critical",
    "operator.nodeSelector": {"pool": "control"},
    "operator.tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
    "operator.podAnnotations": {"example.org/owner": "platform"},
    "policy.allowedImages": ["registry.example.org/team/"],
    "policy.allowedHostPaths": ["/var/models"],
    "policy.allowAnyPodTemplate": True,
    "policy.hfEndpoint": "https://mirror.example.org",
    "policy.networkPolicies": False,
    "clusterDomain": "cluster.example.org",
    "userRoles": False,
    "networkPolicy.enabled": False,
    "networkPolicy.apiServerPorts": [8443],
    "metrics.serviceMonitor.enabled": True,
    "metrics.serviceMonitor.interval": "10s",
    "metrics.serviceMonitor.labels": {"release": "prometheus"},
    "metrics.alerts.enabled": True,
    "metrics.alerts.labels": {"release": "prometheus"},
    "metrics.alerts.runbooks": "https://runbooks.example.org/pagefleet",
    "metrics.alerts.objective": 0.99,
    "metrics.alerts.ttftSeconds": 1,
    "metrics.alerts.itlSeconds": 0.05,
    "metrics.dashboards.enabled": True,
    "metrics.dashboards.labels.grafana_dashboard": "yes",
    "metrics.dashboards.annotations": {"grafana_folder": "pagefleet"},
    "profiles": {"h100": {"gpuType": "h100"}},
}
"""For every value another one."""


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted path of everything that is not a map with something in it."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def defaults() -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def test_the_table_of_changes_holds_every_value() -> None:
    assert set(CHANGED) == set(leaves(defaults()))


@pytest.mark.parametrize("path", CHANGED)
def test_every_value_changes_the_manifest(path: str) -> None:
    under = MONITORED if path.startswith("metrics.") and not path.endswith("enabled") else {}
    changed = helm_merge(under, nested(path, CHANGED[path]))
    before, after = (manifests(values, is_upgrade=True) for values in (under, changed))
    without_notes = [{name: text for name, text in texts.items() if name != "NOTES.txt"} for texts in (before, after)]
    assert without_notes[0] != without_notes[1]


def helm_merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for name, value in over.items():
        known = merged.get(name)
        merged[name] = helm_merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def test_every_object_of_the_schema_is_closed() -> None:
    with helm_python.Chart.load(CHART) as chart:
        schema = chart.schema
    assert schema is not None
    free = {"global", "engine", "resources"}  # Helm's own; fields of an InferenceProfile, which the API server checks

    def check(node: Any, name: str) -> None:
        if not isinstance(node, dict):
            return
        if node.get("type") == "object" and "properties" in node:
            assert node.get("additionalProperties") is False, name
        elif node.get("type") == "object":
            assert "additionalProperties" in node or name in free, name
        for key in ("properties", "$defs"):
            for child_name, child in node.get(key, {}).items():
                check(child, child_name)
        check(node.get("items"), name)

    check(schema, "")


@pytest.mark.parametrize(
    ("values", "path", "reason"),
    [
        ({"replicas": 3}, "", "additional properties 'replicas' not allowed"),
        ({"operator": {"replica": 3}}, "/operator", "additional properties 'replica' not allowed"),
        ({"operator": {"replicas": 0}}, "/operator/replicas", "minimum: got 0, want 1"),
        ({"operator": {"workers": "8"}}, "/operator/workers", "got string, want integer"),
        ({"operator": {"resyncSeconds": 1}}, "/operator/resyncSeconds", "minimum: got 1, want 10"),
        ({"operator": {"resources": {"limits": {"memory": "lots"}}}}, "/operator/resources/limits/memory", "pattern"),
        ({"images": {"engine": {"digest": "sha256:1"}}}, "/images/engine/digest", "'sha256:1' does not match pattern"),
        ({"images": {"router": {"tag": "a b"}}}, "/images/router/tag", "'a b' does not match pattern"),
        ({"images": {"pullPolicy": "Sometimes"}}, "/images/pullPolicy", "'Always', 'IfNotPresent', 'Never'"),
        ({"images": {"pullSecrets": [{"name": "key"}]}}, "/images/pullSecrets/0", "got object, want string"),
        ({"watch": {"namespaces": "team-a"}}, "/watch/namespaces", "got string, want array"),
        ({"watch": {"namespaces": ["Team"]}}, "/watch/namespaces/0", "'Team' does not match pattern"),
        ({"policy": {"allowedHostPaths": ["models"]}}, "/policy/allowedHostPaths/0", "does not match pattern"),
        ({"policy": {"hfEndpoint": "mirror"}}, "/policy/hfEndpoint", "'mirror' does not match pattern"),
        ({"networkPolicy": {"apiServerPorts": [70000]}}, "/networkPolicy/apiServerPorts/0", "maximum: got 70,000"),
        ({"metrics": {"serviceMonitor": {"interval": "30"}}}, "/metrics/serviceMonitor/interval", "pattern"),
        ({"metrics": {"alerts": {"objective": 99.9}}}, "/metrics/alerts/objective", "maximum: got 99.9"),
        ({"metrics": {"alerts": {"runbooks": "a b"}}}, "/metrics/alerts/runbooks", "pattern"),
        ({"profiles": {"H100": {}}}, "/profiles", "additional properties 'H100' not allowed"),
        ({"profiles": {"h100": {"gpuMem": "80Gi"}}}, "/profiles/h100", "additional properties 'gpuMem' not allowed"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(values: dict[str, Any], path: str, reason: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refused:
        manifests(values)
    assert f"at '{path}'" in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "argument", ["a\nb", "--namespace=x y", "$(HOME)", "a, --allow-any-pod-template", "x #", '"', "'"]
)
@pytest.mark.parametrize("path", ["policy.allowedImages", "watch.namespaces", "images.pullSecrets"])
def test_no_value_becomes_more_than_one_argument(path: str, argument: str) -> None:
    with pytest.raises(helm_python.HelmValuesError):
        manifests(nested(path, [argument]))


def test_all_namespaces_and_some_exclude_each_other() -> None:
    with pytest.raises(helm_python.HelmRenderError, match=re.escape("set watch.all to false")):
        manifests({"watch": {"all": True, "namespaces": ["team-a"]}})


def test_profiles_wait_for_their_kind() -> None:
    with pytest.raises(helm_python.HelmRenderError, match="install without profiles, then `helm upgrade` with them"):
        manifests({"profiles": {"h100": {}}})


def test_documents_name_values_that_exist() -> None:
    mention = re.compile(
        r"[` ]((?:images|crds|watch|operator|policy|networkPolicy|metrics)\.[A-Za-z*]+(?:\.[A-Za-z]+)*)[`=:]"
    )
    documents = [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md"), ROOT / "README.md", ROOT / "SECURITY.md"]
    named = {path for document in documents for path in mention.findall(document.read_text())}
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert len(named) >= 10
    assert sorted(path for path in named if not exists(path.split("."), defaults)) == []


def exists(path: list[str], values: object) -> bool:
    if not path:
        return True
    if not isinstance(values, dict):
        return False
    found = values.values() if path[0] == "*" else [values[path[0]]] if path[0] in values else []
    return any(exists(path[1:], one) for one in found)
