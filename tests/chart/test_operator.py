"""The operator's Deployment and what surrounds it."""

from __future__ import annotations

import pytest
from pagefleet_operator.handlers import operator
from pagefleet_operator.handlers.settings import OperateSettings
from pagefleet_operator.operate_cli import main

from tests.fakes.helm_chart import NAMESPACE, find, manifests, operator_container, render

DIGEST = "sha256:" + "ab" * 32
POLICY = {
    "allowedImages": ["registry.example.org/a/", "registry.example.org/b/"],
    "allowedHostPaths": ["/var/models"],
    "allowAnyPodTemplate": True,
    "hfEndpoint": "https://mirror.example.org",
    "networkPolicies": False,
}


def arguments(values: dict[str, object] | None = None, name: str = "") -> list[str]:
    """Return what a flag is given, or all flags with what they are given."""
    args = list(operator_container(render(values))["args"])
    return [arg.partition("=")[2] for arg in args if arg.startswith(f"--{name}=")] if name else args


def test_one_flag_for_each_setting() -> None:
    assert arguments() == [
        "--namespace=models",
        "--engine-image=pagefleet-engine:0.1.0",
        "--router-image=pagefleet-router:0.1.0",
        "--operator-image=pagefleet-operator:0.1.0",
        "--operator-namespace=models",
        "--lease-name=pagefleet-operator",
        "--port=8080",
        "--resync-seconds=300",
        "--workers=8",
        "--cluster-domain=cluster.local",
        "--api-server-port=443",
        "--api-server-port=6443",
    ]


def test_namespaces_are_the_releases_own_the_listed_or_all() -> None:
    assert arguments(name="namespace") == [NAMESPACE]
    assert arguments({"watch": {"namespaces": ["team-a", "team-b"]}}, "namespace") == ["team-a", "team-b"]
    assert arguments({"watch": {"all": True}}, "namespace") == []


def test_policy_becomes_flags() -> None:
    assert arguments({"policy": POLICY, "images": {"pullSecrets": ["key"]}})[-9:-2] == [
        "--image-pull-secret=key",
        "--allowed-image=registry.example.org/a/",
        "--allowed-image=registry.example.org/b/",
        "--allowed-host-path=/var/models",
        "--allow-any-pod-template",
        "--hf-endpoint=https://mirror.example.org",
        "--no-network-policies",
    ]


def started_with(values: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> OperateSettings:
    """Return what the operator makes of the command line that the chart gives it."""
    given: list[OperateSettings] = []

    def take(settings: OperateSettings) -> int:
        given.append(settings)
        return 0

    monkeypatch.setattr(operator, "operate", take)
    assert main(arguments(values)) == 0
    return given[0]


def test_the_operator_understands_every_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"policy": POLICY, "images": {"pullSecrets": ["key"]}, "watch": {"namespaces": ["team-a", "team-b"]}}
    values["networkPolicy"] = {"apiServerPorts": [16443]}
    settings = started_with({**values, "operator": {"workers": 4, "resyncSeconds": 60}}, monkeypatch)
    assert settings.namespaces == ("team-a", "team-b")
    assert (settings.workers, settings.timing.resync) == (4, 60)
    assert (settings.cluster.operator_namespace, settings.lease_name) == ("models", "pagefleet-operator")
    assert settings.cluster.engine_image == "pagefleet-engine:0.1.0"
    assert settings.cluster.image_pull_secret == ("key",)
    assert settings.cluster.allowed_image == ("registry.example.org/a/", "registry.example.org/b/")
    assert settings.cluster.allowed_host_path == ("/var/models",)
    assert settings.cluster.allow_any_pod_template
    assert not settings.cluster.network_policies
    assert settings.cluster.api_server_port == (16443,)
    assert settings.cluster.hf_endpoint == "https://mirror.example.org"


def test_by_default_the_operator_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = started_with({}, monkeypatch)
    assert settings.leader_election
    assert settings.namespaces == ("models",)
    assert settings.cluster.network_policies
    assert not settings.cluster.allow_any_pod_template
    assert settings.cluster.allowed_host_path == ()


def test_the_lease_goes_with_the_release_and_is_the_operators_to_fill() -> None:
    lease = find(render(name="llm"), "Lease")
    assert lease["metadata"]["name"] == "llm-pagefleet-operator"
    assert "spec" not in lease
    assert f"--lease-name={lease['metadata']['name']}" in operator_container(render(name="llm"))["args"]


def test_no_variable_of_a_service_is_taken_for_a_flag() -> None:
    """PAGEFLEET_OPERATOR_PORT would be both, in pods that are told of all Services."""
    assert find(render(), "Deployment")["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize(
    ("images", "reference"),
    [
        ({}, "pagefleet-operator:0.1.0"),
        ({"registry": "registry.example.org/team"}, "registry.example.org/team/pagefleet-operator:0.1.0"),
        ({"registry": "localhost:5000/"}, "localhost:5000/pagefleet-operator:0.1.0"),
        ({"operator": {"tag": "1.2.3"}}, "pagefleet-operator:1.2.3"),
        ({"operator": {"tag": "1.2.3", "digest": DIGEST}}, f"pagefleet-operator@{DIGEST}"),
        ({"registry": "r.example.org", "operator": {"repository": "op"}}, "r.example.org/op:0.1.0"),
    ],
)
def test_image_references(images: dict[str, object], reference: str) -> None:
    container = operator_container(render({"images": images}))
    assert container["image"] == reference
    assert f"--operator-image={reference}" in container["args"]


def test_probes_ask_the_operator_itself() -> None:
    container = operator_container(render())
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["ports"] == [{"name": "http", "containerPort": 8080}]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 120


def test_two_replicas_are_spread_and_never_evicted_together() -> None:
    objects = render()
    deployment = find(objects, "Deployment")["spec"]
    budget = find(objects, "PodDisruptionBudget")["spec"]
    assert deployment["replicas"] == 2
    assert budget["maxUnavailable"] == 1
    labels = deployment["template"]["metadata"]["labels"].items()
    spread = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert [one["topologyKey"] for one in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    selectors = [budget["selector"], deployment["selector"], *(one["labelSelector"] for one in spread)]
    assert all(selector["matchLabels"].items() <= labels for selector in selectors)


def test_one_replica_has_no_budget_that_would_block_a_drain() -> None:
    assert "PodDisruptionBudget" not in {one["kind"] for one in render({"operator": {"replicas": 1}})}


def test_service_and_policies_select_the_operators_pods() -> None:
    objects = render()
    labels = find(objects, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    service = find(objects, "Service")["spec"]
    assert service["selector"].items() <= labels
    assert find(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels
    test_pod = find(objects, "Pod")["metadata"]["labels"].items()
    assert not service["selector"].items() <= test_pod


def test_traffic_is_limited_both_ways() -> None:
    spec = find(render(), "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    (inward,) = spec["ingress"]
    assert inward["ports"] == [{"port": 8080, "protocol": "TCP"}]
    to_api_server, to_dns, to_children = spec["egress"]
    assert [one["port"] for one in to_api_server["ports"]] == [443, 6443]
    assert {(one["port"], one["protocol"]) for one in to_dns["ports"]} == {(53, "UDP"), (53, "TCP")}
    (peer,) = to_children["to"]
    assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/managed-by": "pagefleet-operator"}
    assert to_children["ports"] == [{"port": 8000, "protocol": "TCP"}]


def test_a_service_monitor_only_when_asked() -> None:
    assert "ServiceMonitor" not in {one["kind"] for one in render()}
    objects = render({"metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}})
    monitor = find(objects, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= find(objects, "Service")["metadata"]["labels"].items()
    endpoint = {"port": "http", "path": "/metrics", "interval": "30s", "honorLabels": True}
    assert monitor["spec"]["endpoints"] == [endpoint]


@pytest.mark.parametrize("release", ["pagefleet", "my-pagefleet", "llm", "a" * 53])
def test_names_fit_and_two_releases_never_meet(release: str) -> None:
    ours = {(one["kind"], one["metadata"]["name"]) for one in render(name=release)}
    other = {(one["kind"], one["metadata"]["name"]) for one in render(name="other")}
    crds = {key for key in ours if key[0] == "CustomResourceDefinition"}
    assert ours & other == crds
    assert all(len(name) <= 63 for _, name in ours - crds if not name.startswith(NAMESPACE))


def test_the_same_release_in_two_namespaces_shares_nothing_without_a_namespace() -> None:
    cluster_scoped = [
        {(one["kind"], one["metadata"]["name"]) for one in render(namespace=namespace) if "Cluster" in one["kind"]}
        for namespace in ("team-a", "team-b")
    ]
    assert cluster_scoped[0]
    assert not cluster_scoped[0] & cluster_scoped[1]


def test_profiles_come_with_an_upgrade() -> None:
    spec = {"gpuType": "h100", "gpuMemory": "80Gi", "resources": {"gpus": 1, "memory": "64Gi"}}
    objects = render({"profiles": {"h100": spec, "l4": {"gpuType": "l4"}}}, is_upgrade=True)
    assert find(objects, "InferenceProfile", "h100")["spec"] == spec
    assert find(objects, "InferenceProfile", "l4")["spec"] == {"gpuType": "l4"}


def test_the_notes_name_what_was_installed() -> None:
    notes = manifests({"watch": {"namespaces": ["team-a", "team-b"]}}, name="llm")["NOTES.txt"]
    assert "serves InferenceServices in team-a, team-b" in notes
    assert "kubectl -n models rollout status deployment/llm-pagefleet-operator" in notes
    assert "helm test llm -n models" in notes
    assert "\nEOF\n" in notes, "what is pasted ends only at the beginning of a line"
    assert "kubectl -n team-a get pfis -w" in notes
    assert "in all namespaces" in manifests({"watch": {"all": True}})["NOTES.txt"]


@pytest.mark.parametrize("registry", ["", "registry.example.org/team"])
def test_the_notes_warn_of_images_that_no_node_may_find(registry: str) -> None:
    notes = manifests({"images": {"registry": registry}})["NOTES.txt"]
    assert ("images.registry is empty: the nodes take pagefleet-operator:0.1.0" in notes) == (not registry)
