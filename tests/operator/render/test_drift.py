"""What counts as a difference, and what the API server and others may add."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_operator.render.drift import differences

from tests.fakes.kube_fields import merged
from tests.operator.render.server_defaults import server_default
from tests.operator.render.service_table import TABLE, TINY, by_key

Object = dict[str, Any]


def deployment(container: Object, **spec: Any) -> Object:
    template = {"spec": {"containers": [{"name": "engine", **container}], **spec}}
    return {"kind": "Deployment", "metadata": {"name": "qwen"}, "spec": {"template": template}}


def pod_differences(wanted: Object, seen: Object) -> tuple[str, ...]:
    found = differences(deployment(wanted), deployment(seen))
    return tuple(one.removeprefix("spec.template.spec.containers[engine].") for one in found)


@pytest.mark.parametrize("name", TABLE)
def test_what_the_api_server_makes_of_an_object_is_no_difference(name: str) -> None:
    for child in TABLE[name].wanted():
        assert differences(child, server_default(child)) == ()


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        ("1", "1000m"),
        ("1500m", "1.5"),
        ("0.5", "500m"),
        ("1024Mi", "1Gi"),
        ("1e3", "1k"),
        ("1000000n", "1m"),
        ("1Ei", "1024Pi"),
        (2, "2"),
        ("0.1", "100m"),
    ],
)
def test_quantities_are_compared_as_numbers(wanted: Any, seen: str) -> None:
    for part in ("requests", "limits"):
        assert pod_differences({"resources": {part: {"x": wanted}}}, {"resources": {part: {"x": seen}}}) == ()
    shm = {"name": "shm", "emptyDir": {"sizeLimit": wanted}}
    other = {"name": "shm", "emptyDir": {"sizeLimit": seen}}
    assert differences(deployment({}, volumes=[shm]), deployment({}, volumes=[other])) == ()


@pytest.mark.parametrize(("wanted", "seen"), [("1", "2"), ("1Gi", "1G"), ("1", "1m"), ("x", "1"), ("1", None)])
def test_other_quantities_differ(wanted: str, seen: str | None) -> None:
    found = pod_differences({"resources": {"limits": {"cpu": wanted}}}, {"resources": {"limits": {"cpu": seen}}})
    assert found == ("resources.limits.cpu",)


def test_texts_that_look_like_quantities_are_texts() -> None:
    wanted, seen = {"env": [{"name": "A", "value": "1000m"}]}, {"env": [{"name": "A", "value": "1"}]}
    assert pod_differences(wanted, seen) == ("env[A].value",)


def test_ports_are_numbers_or_texts() -> None:
    assert (
        pod_differences(
            {"readinessProbe": {"httpGet": {"port": "8000"}}}, {"readinessProbe": {"httpGet": {"port": 8000}}}
        )
        == ()
    )
    assert pod_differences(
        {"readinessProbe": {"httpGet": {"port": "http"}}}, {"readinessProbe": {"httpGet": {"port": 8000}}}
    )


def test_a_port_is_known_by_number_and_protocol() -> None:
    wanted = {"ports": [{"containerPort": 8000, "name": "http"}]}
    tcp = {"containerPort": 8000, "protocol": "TCP", "name": "http"}
    udp = {"containerPort": 8000, "protocol": "UDP", "name": "dns"}
    assert pod_differences(wanted, {"ports": [udp, tcp]}) == ()
    assert pod_differences(wanted, {"ports": [udp]}) == ("ports[8000,TCP]",)


def test_the_order_of_items_with_a_key_does_not_matter() -> None:
    first, second = {"name": "A", "value": "1"}, {"name": "B", "value": "2"}
    assert pod_differences({"env": [first, second]}, {"env": [second, {"name": "C", "value": "3"}, first]}) == ()


def test_the_order_and_number_of_other_items_does() -> None:
    assert pod_differences({"args": ["a", "b"]}, {"args": ["b", "a"]}) == ("args[0]", "args[1]")
    assert pod_differences({"args": ["a"]}, {"args": ["a", "b"]}) == ("args",)


def test_another_source_in_a_network_policy_is_a_hole() -> None:
    wanted = by_key(TINY.wanted())["NetworkPolicy", "qwen-engine"]
    seen = server_default(wanted)
    seen["spec"]["ingress"][0]["ports"].append({"port": 22, "protocol": "TCP"})
    assert differences(wanted, seen) == ("spec.ingress[0].ports",)


@pytest.mark.parametrize(
    ("field", "value"), [("stdin", False), ("workingDir", ""), ("args", []), ("minReadySeconds", 0), ("resources", {})]
)
def test_what_the_api_server_leaves_out_is_no_difference(field: str, value: Any) -> None:
    assert pod_differences({field: value}, {}) == ()
    assert pod_differences({field: None}, {}) == ()
    assert pod_differences({field: None}, {field: "x"}) == ()


@pytest.mark.parametrize(
    ("field", "value"), [("allowPrivilegeEscalation", False), ("runAsUser", 0), ("emptyDir", {}), ("tty", True)]
)
def test_what_would_mean_something_else_when_absent_is_a_difference(field: str, value: Any) -> None:
    assert pod_differences({field: value}, {}) == (field,)


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [({"a": 1}, {"a": True}), ({"a": False}, {"a": 0}), ({"a": {"b": 1}}, {"a": "b"}), ({"a": ["b"]}, {"a": "b"})],
)
def test_another_type_is_a_difference(wanted: Object, seen: Object) -> None:
    assert pod_differences(wanted, seen) == ("a",)


def test_what_is_no_list_in_place_of_a_list_is_a_difference() -> None:
    assert pod_differences({"env": [{"name": "A"}]}, {"env": "A"}) == ("env",)
    assert pod_differences({"env": [{"name": "A"}]}, {"env": ["A"]}) == ("env[A]",)


def test_items_of_lists_come_without_kind() -> None:
    child = by_key(TINY.wanted())["Service", "qwen"]
    seen = {name: value for name, value in server_default(child).items() if name not in ("kind", "apiVersion")}
    assert differences(child, seen) == ()
    seen["spec"]["ports"][0]["targetPort"] = 80
    assert differences(child, seen) == ("spec.ports[80,TCP].targetPort",)


def test_another_owner_beside_ours_is_no_difference() -> None:
    child = by_key(TINY.wanted())["ConfigMap", "qwen-openai"]
    seen = server_default(child)
    seen["metadata"]["ownerReferences"].insert(0, {"uid": "other", "kind": "Application"})
    assert differences(child, seen) == ()
    seen["metadata"]["ownerReferences"].pop()
    assert len(differences(child, seen)) == 1


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places of scalars in a document, but for names by which items are known."""
    if isinstance(value, dict):
        return [one for name, below in value.items() for one in paths(below, (*path, name))]
    if isinstance(value, list):
        return [one for number, below in enumerate(value) for one in paths(below, (*path, number))]
    return [path]


ENGINE = by_key(TABLE["auth"].wanted())["Deployment", "qwen-router"]
PLACES = [path for path in paths(ENGINE) if path[0] not in ("apiVersion", "kind")]
SAME_WHEN_ABSENT = ("optional", "blockOwnerDeletion")


@pytest.mark.parametrize("value", ["edited", 77, None])
def test_every_edit_of_ours_is_found_and_an_apply_ends_it(value: Any) -> None:
    assert len(PLACES) > 80
    for place in PLACES:
        seen = server_default(ENGINE)
        below: Any = seen
        for step in place[:-1]:
            below = below[step]
        if value is None and isinstance(below, dict):
            del below[place[-1]]
        else:
            below[place[-1]] = value
        assert differences(ENGINE, seen) or (value is None and place[-1] in SAME_WHEN_ABSENT), place
        assert differences(ENGINE, merged(seen, ENGINE)) == ()


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4)),
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(st.text(max_size=4), below, max_size=3)),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["spec", "metadata", "data", "kind"]), JSON))
def test_no_object_of_others_is_too_strange(seen: Object) -> None:
    wanted = copy.deepcopy(ENGINE)
    assert differences(wanted, seen)
    assert wanted == ENGINE


@given(JSON)
def test_nothing_differs_from_itself(value: Any) -> None:
    assert differences({"spec": value}, {"spec": copy.deepcopy(value)}) == ()


@pytest.mark.parametrize("name", ["selector", "podSelector", "namespaceSelector", "nodeSelector"])
def test_what_somebody_adds_to_a_selector_is_a_difference(name: str) -> None:
    wanted = {"kind": "Service", "spec": {name: {"a": "1"}}}
    assert differences(wanted, {"kind": "Service", "spec": {name: {"a": "1", "b": "2"}}}) == (f"spec.{name}",)
    assert differences(wanted, wanted) == ()
