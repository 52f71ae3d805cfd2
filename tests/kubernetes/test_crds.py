"""Our resources before a real API server: rules and their words, defaults, lists, scale and status, columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import httpx
import pytest
from pagefleet_protocol.inference_status import (
    Condition,
    ConditionType,
    InferenceServiceStatus,
    LiveStatus,
    ResolvedMemory,
    ResolvedStatus,
    Role,
    RoleStatus,
)
from pagefleet_protocol.resource_documents import parse_inference_service

from tests.fakes.broken_documents import BROKEN, BROKEN_PROFILES, only_mistake
from tests.fakes.kube_control_plane import apply
from tests.fakes.resource_documents import profile_document, service_document

pytestmark = pytest.mark.usefixtures("established")
GROUP = "/apis/pagefleet.dev/v1alpha1"
PROFILES = f"{GROUP}/inferenceprofiles"
TABLE = {"accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}


def services(namespace: str) -> str:
    return f"{GROUP}/namespaces/{namespace}/inferenceservices"


def try_create(admin: httpx.Client, path: str, document: Mapping[str, Any]) -> httpx.Response:
    return admin.post(path, params={"dryRun": "All"}, json=document)


@pytest.mark.parametrize(("path", "document"), BROKEN)
def test_a_broken_rule_is_told_in_the_same_words(
    admin: httpx.Client, namespace: str, path: str, document: dict[str, Any]
) -> None:
    found, message = only_mistake(document)
    refusal = try_create(admin, services(namespace), document)
    assert refusal.status_code == 422
    (cause,) = refusal.json()["details"]["causes"]
    assert found == cause["field"] == path
    assert cause["message"].endswith(f": {message}")


def test_profiles_have_the_rules_of_engines(admin: httpx.Client) -> None:
    for path, document in BROKEN_PROFILES:
        refusal = try_create(admin, PROFILES, document)
        assert refusal.status_code == 422
        (cause,) = refusal.json()["details"]["causes"]
        assert cause["field"] == path
        assert cause["message"].endswith(f": {only_mistake(document)[1]}")


def test_five_lines_get_the_defaults_that_we_have(admin: httpx.Client, namespace: str) -> None:
    created = admin.post(services(namespace), json=service_document()).raise_for_status().json()
    ours = parse_inference_service(service_document()).spec.model_dump(mode="json", exclude_none=True)
    assert _without_empty(created["spec"]) == _without_empty(ours)
    assert created["spec"]["router"] == {
        "console": True,
        "explain": False,
        "kvEvents": True,
        "policy": "auto",
        "queue": {"coldStartTimeout": 600},
        "replicas": 1,
        "resources": {},
        "workers": 1,
    }


def test_unknown_fields_are_dropped_and_pod_templates_kept(admin: httpx.Client, namespace: str) -> None:
    template = {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"example.com/nic": 1}}}]}}
    document = service_document(rooter={"replicas": 2}, podTemplate=template)
    created = admin.post(services(namespace), json=document).raise_for_status().json()
    assert "rooter" not in created["spec"]
    assert created["spec"]["podTemplate"] == template
    strict = admin.post(
        services(namespace), params={"fieldValidation": "Strict"}, json=service_document("other", rooter={})
    )
    assert strict.status_code == 400
    assert 'unknown field "spec.rooter"' in strict.json()["message"]


def test_variables_of_two_managers_are_merged_by_name(admin: httpx.Client, namespace: str) -> None:
    path = f"{services(namespace)}/qwen"
    for manager, name in (("chart", "A"), ("person", "B")):
        document = service_document(engine={"env": [{"name": name, "value": manager}]})
        apply(admin, path, document, manager=manager).raise_for_status()
    seen = admin.get(path).json()["spec"]["engine"]["env"]
    assert seen == [{"name": "A", "value": "chart"}, {"name": "B", "value": "person"}]


def test_scale_reads_and_writes_replicas(admin: httpx.Client, namespace: str) -> None:
    path = f"{services(namespace)}/qwen"
    admin.post(services(namespace), json=service_document(replicas=2)).raise_for_status()
    scale = admin.get(f"{path}/scale").raise_for_status().json()
    assert (scale["spec"], scale["status"]) == ({"replicas": 2}, {"replicas": 0})
    scale["spec"]["replicas"] = 5
    admin.put(f"{path}/scale", json=scale).raise_for_status()
    seen = admin.get(path).json()
    assert seen["spec"]["replicas"] == 5
    assert seen["metadata"]["generation"] == 2


def status_document(**fields: Any) -> dict[str, Any]:
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Serving",
        "message": "requests are answered",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }
    return {
        "observedGeneration": 1,
        "modelName": "qwen",
        "ready": "2/2",
        "replicas": 2,
        "selector": "pagefleet.dev/service=qwen",
        "url": "http://qwen.apps.svc.cluster.local",
        "conditions": [condition],
        **fields,
    }


def test_status_changes_nothing_else(admin: httpx.Client, namespace: str) -> None:
    path = f"{services(namespace)}/qwen"
    created = admin.post(services(namespace), json=service_document()).raise_for_status().json()
    patch = {"spec": {"replicas": 9}, "status": status_document()}
    headers = {"content-type": "application/merge-patch+json"}
    admin.patch(f"{path}/status", json=patch, headers=headers).raise_for_status()
    seen = admin.get(path).json()
    assert seen["spec"] == created["spec"]
    assert seen["metadata"]["generation"] == 1
    assert seen["status"]["ready"] == "2/2"
    admin.patch(path, json={"status": {"ready": "0/2"}}, headers=headers).raise_for_status()
    assert admin.get(path).json()["status"]["ready"] == "2/2"
    scale = admin.get(f"{path}/scale").json()
    assert scale["status"] == {"replicas": 2, "selector": "pagefleet.dev/service=qwen"}


def test_every_field_of_the_status_is_kept(admin: httpx.Client, namespace: str) -> None:
    moment = "2026-01-01T00:00:00Z"
    status = InferenceServiceStatus(
        observed_generation=1,
        model_name="qwen",
        mode="Paused",
        url="http://qwen.apps.svc.cluster.local",
        ready="1/2",
        replicas=2,
        selector="pagefleet.dev/service=qwen",
        conditions=tuple(
            Condition(
                type=kind,
                status="Unknown",
                reason="Waiting",
                message="waits",
                last_transition_time=moment,
                observed_generation=1,
            )
            for kind in get_args(ConditionType)
        ),
        roles=tuple(
            RoleStatus(name=role, replicas=2, ready=1, updated=2, revision="0123456789") for role in get_args(Role)
        ),
        resolved=ResolvedStatus(
            revision="main",
            profile="h100",
            image="registry/engine:1",
            dtype="bfloat16",
            quantization="fp8",
            cache="pvc",
            gpus=1,
            max_model_len=4096,
            memory=ResolvedMemory(weights=15.3, kv=0.5, device=80.0),
            why=("resources.gpus: 1, from profile h100",),
        ),
        live=LiveStatus(requests_running=1, requests_waiting=2, tokens_per_second=41.5, kv_usage=0.25, at=moment),
    ).model_dump(mode="json", exclude_none=True)
    admin.post(services(namespace), json=service_document()).raise_for_status()
    path = f"{services(namespace)}/qwen/status"
    headers = {"content-type": "application/merge-patch+json"}
    params = {"fieldValidation": "Strict"}
    seen = admin.patch(path, params=params, json={"status": status}, headers=headers).raise_for_status().json()
    assert seen["status"] == status
    assert InferenceServiceStatus.model_validate(seen["status"]).model_dump(mode="json", exclude_none=True) == status


def test_columns_tell_what_a_person_asks(admin: httpx.Client, namespace: str) -> None:
    path = services(namespace)
    admin.post(path, json=service_document()).raise_for_status()
    live = {
        "requestsRunning": 1,
        "requestsWaiting": 0,
        "tokensPerSecond": 41.5,
        "kvUsage": 0.1,
        "at": "2026-01-01T00:00:00Z",
    }
    admin.patch(
        f"{path}/qwen/status",
        json={"status": status_document(live=live)},
        headers={"content-type": "application/merge-patch+json"},
    ).raise_for_status()
    table = admin.get(path, headers=TABLE).json()
    names = [(column["name"], column["priority"]) for column in table["columnDefinitions"]]
    assert [name for name, priority in names if priority == 0] == [
        *("Name", "Model", "Ready", "Mode", "URL", "Reason", "Age"),
    ]
    shown = dict(zip([name for name, _ in names], table["rows"][0]["cells"], strict=True))
    assert shown | {"Age": ""} == {
        "Name": "qwen",
        "Model": "builtin://tiny",
        "Ready": "2/2",
        "Mode": "Aggregated",
        "URL": "http://qwen.apps.svc.cluster.local",
        "Reason": "Serving",
        "Profile": None,
        "Tokens/s": 41.5,
        "Age": "",
    }


def test_profiles_belong_to_the_cluster_and_are_listed(admin: httpx.Client) -> None:
    document = profile_document("a100", gpuType="a100", gpuMemory="80Gi", nodeSelector={"gpu": "a100"})
    admin.post(PROFILES, json=document).raise_for_status()
    try:
        table = admin.get(PROFILES, headers=TABLE).json()
        (row,) = (row["cells"] for row in table["rows"] if row["cells"][0] == "a100")
        assert row[:4] == ["a100", "a100", "80Gi", "nvidia.com/gpu"]
    finally:
        admin.delete(f"{PROFILES}/a100").raise_for_status()


def _without_empty(value: Any) -> Any:
    """Drop what is empty: `{}` and nothing at all mean the same in both."""
    if not isinstance(value, dict):
        return value
    kept = {key: _without_empty(one) for key, one in value.items()}
    return {key: one for key, one in kept.items() if one not in ({}, [])}
