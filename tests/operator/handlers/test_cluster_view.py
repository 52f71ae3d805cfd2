"""What the watches told, by InferenceService."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_operator.apply.kinds import BY_NAME, INFERENCE_PROFILE, INFERENCE_SERVICE, POD
from pagefleet_operator.handlers.cluster_view import ClusterView, managed_selector

KEY = ("apps", "qwen")
DEPLOYMENT, CONFIG = BY_NAME["Deployment"], BY_NAME["ConfigMap"]


def meta(name: str, uid: str = "u1", version: str = "1", **more: Any) -> dict[str, Any]:
    return {"name": name, "namespace": "apps", "uid": uid, "resourceVersion": version, **more}


def service(uid: str = "s1", version: str = "1", generation: int = 1, **more: Any) -> dict[str, Any]:
    metadata = meta("qwen", uid, version, generation=generation)
    return {"metadata": metadata, "spec": {"model": {"uri": "builtin://tiny"}}, **more}


def child(name: str, uid: str = "u1", version: str = "1", service: str = "qwen", **more: Any) -> dict[str, Any]:
    owner = {"uid": "s1", "controller": True, "kind": "InferenceService", "name": service}
    labels = {"pagefleet.dev/service": service, "app.kubernetes.io/component": "engine"}
    return {"metadata": meta(name, uid, version, labels=labels, ownerReferences=[owner]), **more}


@pytest.fixture
def view() -> ClusterView:
    return ClusterView()


def test_a_service_is_known_from_its_first_event_to_its_last(view: ClusterView) -> None:
    assert view.note(INFERENCE_SERVICE, service()) == (KEY,)
    assert list(view.services()) == [KEY]
    stored = view.service(KEY)
    assert stored is not None
    assert stored.uid == "s1"
    assert view.note(INFERENCE_SERVICE, service(), deleted=True) == (KEY,)
    assert view.service(KEY) is None


def test_a_change_of_the_status_alone_wakes_nobody_but_is_kept(view: ClusterView) -> None:
    view.note(INFERENCE_SERVICE, service())
    assert view.note(INFERENCE_SERVICE, service(version="2", status={"ready": "1/1"})) == ()
    stored = view.service(KEY)
    assert stored is not None
    assert stored.status == b'{"ready":"1/1"}'
    assert view.note(INFERENCE_SERVICE, service(version="3", generation=2)) == (KEY,)


def test_what_kubectl_writes_into_annotations_is_not_kept(view: ClusterView) -> None:
    body = service()
    body["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 1000, "a": "b"}
    view.note(INFERENCE_SERVICE, body)
    stored = view.service(KEY)
    assert stored is not None
    assert b"xxx" not in stored.document
    assert b'"a":"b"' in stored.document


def test_children_are_found_by_their_label_and_are_ours_by_their_owner(view: ClusterView) -> None:
    assert view.note(CONFIG, child("qwen-openai", data={"a": "b"})) == (KEY,)
    children = view.children(KEY, "s1")
    found = children["ConfigMap", "qwen-openai"]
    assert found.ours
    assert found.body["data"] == {"a": "b"}
    assert (found.body["kind"], found.body["apiVersion"]) == ("ConfigMap", "v1")
    assert "resourceVersion" not in found.body["metadata"]
    assert not view.children(KEY, "another")["ConfigMap", "qwen-openai"].ours
    assert ("ConfigMap", "qwen-openai") in view.children(KEY, "s1", "ConfigMap")
    assert view.children(KEY, "s1", "Deployment") == {}


def test_a_child_that_looks_the_same_wakes_nobody(view: ClusterView) -> None:
    view.note(CONFIG, child("qwen-openai"))
    assert view.note(CONFIG, child("qwen-openai", version="2")) == ()
    assert view.version(CONFIG, ("apps", "qwen-openai")) == "2"


def test_who_scales_a_deployment_is_read_from_its_managed_fields(view: ClusterView) -> None:
    body = child("qwen-engine")
    fields: dict[str, Any] = {"f:spec": {"f:replicas": {}}}
    body["metadata"]["managedFields"] = [
        {"manager": "pagefleet-operator", "operation": "Apply", "fieldsV1": fields},
        {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": fields},
    ]
    by_hand = {"manager": "kubectl", "operation": "Update", "subresource": "scale", "fieldsV1": fields}
    body["metadata"]["managedFields"].append(by_hand)
    view.note(DEPLOYMENT, body)
    assert view.children(KEY, "s1")["Deployment", "qwen-engine"].scaled_by == ""
    body["metadata"]["managedFields"].append(
        {"manager": "kube-controller-manager", "operation": "Update", "subresource": "scale", "fieldsV1": fields}
    )
    assert view.note(DEPLOYMENT, body) == (KEY,)
    found = view.children(KEY, "s1")["Deployment", "qwen-engine"]
    assert found.scaled_by == "kube-controller-manager"
    assert "managedFields" not in found.body["metadata"]


def test_pods_come_by_name_and_wake_when_they_change(view: ClusterView) -> None:
    for name in ("qwen-engine-2", "qwen-engine-1"):
        assert view.note(POD, child(name)) == (KEY,)
    assert [pod.name for pod in view.pods(KEY)] == ["qwen-engine-1", "qwen-engine-2"]
    assert view.note(POD, child("qwen-engine-1", version="2")) == ()
    assert view.note(POD, child("qwen-engine-1", status={"phase": "Running"})) == (KEY,)
    view.note(POD, child("qwen-engine-1"), deleted=True)
    assert [pod.name for pod in view.pods(KEY)] == ["qwen-engine-2"]


def test_what_has_no_service_is_no_business_of_ours(view: ClusterView) -> None:
    body = child("theirs")
    del body["metadata"]["labels"]["pagefleet.dev/service"]
    assert view.note(CONFIG, body) == ()
    assert view.seen(CONFIG) == {}


def test_a_child_that_changes_its_service_leaves_the_one_before(view: ClusterView) -> None:
    view.note(CONFIG, child("one"))
    assert set(view.note(CONFIG, child("one", version="2", service="other"))) == {KEY, ("apps", "other")}
    assert view.children(KEY, "s1") == {}
    assert ("ConfigMap", "one") in view.children(("apps", "other"), "s1")


def test_a_late_word_of_a_deletion_does_not_take_the_next_object_of_that_name(view: ClusterView) -> None:
    view.note(CONFIG, child("one", uid="new"))
    assert view.note(CONFIG, child("one", uid="old"), deleted=True) == ()
    assert ("ConfigMap", "one") in view.children(KEY, "s1")


def test_what_is_no_more_is_forgotten_without_an_event(view: ClusterView) -> None:
    view.note(CONFIG, child("one", uid="1"))
    view.note(CONFIG, child("two", uid="2"))
    assert view.keep_only(CONFIG, "elsewhere", {}) == set()
    assert view.keep_only(CONFIG, "apps", {("apps", "two"): "2"}) == {KEY}
    assert list(view.children(KEY, "s1")) == [("ConfigMap", "two")]
    assert view.keep_only(CONFIG, "", {("apps", "two"): "3"}) == {KEY}
    assert view.children(KEY, "s1") == {}


def test_profiles_wake_everybody_and_bad_ones_say_why(view: ClusterView) -> None:
    view.note(INFERENCE_SERVICE, service())
    body = {"metadata": {"name": "h100", "uid": "p"}, "spec": {"gpuType": "h100"}}
    assert view.note(INFERENCE_PROFILE, body) == (KEY,)
    assert view.profiles["h100"].spec.gpu_type == "h100"
    assert view.note(INFERENCE_PROFILE, body) == ()
    assert view.note(INFERENCE_PROFILE, {**body, "spec": {"gpuMemory": "lots"}}) == (KEY,)
    assert view.profiles == {}
    assert "spec.gpuMemory" in view.invalid_profiles["h100"]
    assert view.note(INFERENCE_PROFILE, body, deleted=True) == (KEY,)
    assert view.invalid_profiles == {}


def test_our_own_kinds_are_watched_whole_and_others_by_our_label() -> None:
    assert managed_selector(INFERENCE_SERVICE) == ""
    assert managed_selector(POD) == "app.kubernetes.io/managed-by=pagefleet-operator"
