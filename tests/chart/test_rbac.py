"""What the operator may do: written down in golden/rbac.yaml, and never more than a namespaced operator needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagefleet_operator.apply.kinds import CHILDREN

from tests.fakes.helm_chart import find, render

GOLDEN = Path(__file__).parent / "golden" / "rbac.yaml"
KINDS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
EVERYWHERE = {"watch": {"all": True}}
HARMLESS = {"get", "list", "watch"}


def rbac(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the objects that grant something, without labels, in order."""
    found = [one for one in render(values) if one["kind"] in KINDS]
    for one in found:
        one["metadata"] = {key: one["metadata"][key] for key in ("name", "namespace") if key in one["metadata"]}
    return sorted(found, key=lambda one: (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]))


def rules(values: dict[str, Any] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    for one in rbac(values):
        for rule in one.get("rules", []):
            yield one["kind"], rule


def test_the_rights_are_those_written_down() -> None:
    text = yaml.safe_dump_all(rbac(), sort_keys=False)
    assert text == GOLDEN.read_text(), "rights changed: read the difference, then write it to golden/rbac.yaml"


@pytest.mark.parametrize("values", [{}, EVERYWHERE], ids=["namespaced", "everywhere"])
def test_no_wildcard_no_secret_no_way_up(values: dict[str, Any]) -> None:
    for _, rule in rules(values):
        words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
        assert not any("*" in word for word in words)
        if "secrets" in words:
            assert rule == {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}
        assert not words & {"escalate", "bind", "impersonate", "pods/exec", "pods/attach", "nodes"}
        assert not any(word.endswith(("/exec", "/token", "/ephemeralcontainers", "/proxy")) for word in words)


def test_the_operator_may_write_the_kinds_that_it_makes_and_no_others() -> None:
    granted = {
        (group, resource)
        for rule in find(rbac(), "Role", "models-pagefleet-operator")["rules"]
        if "delete" in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert granted == {(kind.group, kind.plural) for kind in CHILDREN}


def test_outside_its_namespaces_the_operator_only_reads_profiles() -> None:
    bound = {one["roleRef"]["name"] for one in rbac() if one["kind"] == "ClusterRoleBinding"}
    (name,) = bound
    (rule,) = find(rbac(), "ClusterRole", name)["rules"]
    assert rule == {"apiGroups": ["pagefleet.dev"], "resources": ["inferenceprofiles"], "verbs": sorted(HARMLESS)}


def test_every_listed_namespace_gets_the_same_role_and_no_other_does() -> None:
    granted = rbac({"watch": {"namespaces": ["team-a", "team-b"]}})
    roles = [one for one in granted if one["kind"] == "Role" and not one["metadata"]["name"].endswith("-lease")]
    assert [one["metadata"]["namespace"] for one in roles] == ["team-a", "team-b"]
    assert roles[0]["rules"] == roles[1]["rules"] == find(rbac(), "Role", "models-pagefleet-operator")["rules"]
    bindings = [one for one in granted if one["kind"] == "RoleBinding"]
    assert {one["subjects"][0]["namespace"] for one in bindings} == {"models"}


def test_everywhere_is_the_same_rules_in_a_cluster_role() -> None:
    everywhere = find(rbac(EVERYWHERE), "ClusterRole", "models-pagefleet-operator")
    assert everywhere["rules"] == find(rbac(), "Role", "models-pagefleet-operator")["rules"]
    assert [one["metadata"]["name"] for one in rbac(EVERYWHERE) if one["kind"] == "Role"] == [
        "pagefleet-operator-lease"
    ]


@pytest.mark.parametrize("values", [{}, EVERYWHERE], ids=["namespaced", "everywhere"])
def test_each_binding_names_a_role_and_an_account_of_this_release(values: dict[str, Any]) -> None:
    granted = rbac(values)
    names = {(one["kind"], one["metadata"]["name"]) for one in granted}
    bindings = [one for one in granted if one["kind"].endswith("Binding")]
    assert len(bindings) == 3
    for binding in bindings:
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in names
        assert [("ServiceAccount", subject["name"]) for subject in binding["subjects"]] == [
            ("ServiceAccount", "pagefleet-operator")
        ]


def test_only_the_own_lease_can_be_changed() -> None:
    create, change = find(rbac(), "Role", "pagefleet-operator-lease")["rules"]
    assert (create["verbs"], create.get("resourceNames")) == (["create"], None)
    assert (change["verbs"], change["resourceNames"]) == (["get", "update"], ["pagefleet-operator"])


def test_tokens_are_mounted_where_they_are_used_only() -> None:
    objects = render()
    assert find(objects, "ServiceAccount")["automountServiceAccountToken"] is False
    pod = find(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if "serviceaccount" in one["mountPath"]]
    (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
    token, authority, namespace = volume["projected"]["sources"]
    assert token["serviceAccountToken"] == {"path": "token", "expirationSeconds": 3600}
    assert authority["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert namespace["downwardAPI"]["items"][0]["path"] == "namespace"


def test_users_get_inference_services_through_the_built_in_roles() -> None:
    objects = render()
    edit, view = (find(objects, "ClusterRole", f"models-pagefleet-operator-{who}") for who in ("edit", "view"))
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert all("inferenceservices/status" not in rule["resources"] for rule in edit["rules"])
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == HARMLESS
