"""Documents before our types and before a real API server: both take them, or both refuse them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pagefleet_protocol.field_errors import InvalidDocument
from pagefleet_protocol.resource_documents import parse_inference_profile, parse_inference_service

from tests.example_counts import examples
from tests.fakes.resource_documents import profile_document, service_document

pytestmark = pytest.mark.usefixtures("established")
GROUP = "/apis/pagefleet.dev/v1alpha1"
HF = {"uri": "hf://org/name"}

VALUES: dict[str, tuple[Any, ...]] = {
    "model.uri": (
        *("hf://org/name", "hf://name", "hf://../name", "s3://bucket/a/b/", "s3://bucket", "s3://bucket/../a"),
        *("s3://bucket/...", "s3://bucket/a b", "s3://bucket/a\u00a0b", "gs://bucket/.a", "gs://bucket/a/.."),
        *("pvc://claim", "pvc://claim/a/./b", "pvc://Claim", "oci://ghcr.io/org/model:1", "oci://host:5000/a/../b"),
        *(
            "file:///models/a",
            "file:///models/../a",
            "file://models",
            "file:///a\nb",
            "builtin://tiny",
            "builtin://big",
        ),
        *("org/name", "Org/Name-0.6B", "name", "org/../x", "./org/name", "/org/name", "org/name/x", "org/na:me"),
        *("hf://org/name\n", "hf://org/" + "n" * 1024, "", 5, None),
    ),
    "model.revision": ("main", "a b", "a" * 129, "", "refs/pr/1", None),
    "model.name": ("Org/Name", "two words", "-x", "n" * 129, "qwen"),
    "model.aliases": (["a"], ["a", "a"], [], ["a", ""], [f"a{number}" for number in range(9)], "a", ["qwen"]),
    "model.secretRef": ({"name": "token"}, {"name": "Token"}, {}, {"name": "a" * 254}),
    "model.endpoint": ("https://mirror.example.org/hf", "mirror", "https://a b", "https://user@host", "http://h?x"),
    "cache.type": ("auto", "none", "pvc", "hostPath", "image", "Image"),
    "cache.size": ("100Gi", 5, 0, -1, "0", "0.0", "0.5", "00.50Gi", "1e3", "1" * 33, 10**15, "8 Gi", "", True),
    "cache.claim": ("models", "-models"),
    "cache.storageClass": ("fast", ""),
    "cache.path": ("/models", "models", "/a:b", "/"),
    "engine.image": ("registry/name:1", "bad image", "a" * 513),
    "engine.args": (["--seed", "1"], ["--port"], ["--p=1"], ["--"], ["--=x"], ["a" * 1025], ["-x"] * 65, [1], ["\x00"]),
    "engine.env": (
        [{"name": "A", "value": "1"}],
        [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}],
        [{"name": "1A", "value": ""}],
        [{"name": "A"}],
        [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k/k"}}}],
        [{"name": "A", "value": None}],
    ),
    "engine.dtype": ("auto", "bf16", None),
    "engine.quantization": ("fp8", "int4"),
    "engine.maxModelLen": (1, 0, 4096, 16_777_217, "5", "32k", "9999Ki", "0k", "1.5k", "32M", "32k\n", None),
    "engine.kvOffload": (
        {"memory": "8Gi"},
        {"memory": "8Gi", "disk": {"size": "100Gi", "storageClass": "fast"}, "eviction": "arc"},
        {"memory": 2**20, "disk": {"size": 2**20}, "eviction": "lru"},
        {"memory": 2**20 - 1},
        {"memory": "1048576"},
        {"memory": "1048575999m"},
        {"memory": "1.5Mi", "disk": {"size": "0.9Mi"}},
        {"memory": "8GB"},
        {"memory": ""},
        {"memory": "1" * 33},
        {"memory": 0},
        {"memory": -1},
        {"memory": None},
        {"memory": "9" * 31},
        {"memory": "8Gi", "disk": {}},
        {"memory": "8Gi", "disk": {"size": "1Gi", "storageClass": "Fast"}},
        {"memory": "8Gi", "eviction": "fifo"},
        {"disk": {"size": "1Gi"}},
        {},
        None,
    ),
    "replicas": (0, 256, 257, -1, "1", None, True),
    "resources.gpus": (0, 1, 2, 16, 17, None),
    "parallelism": (
        {"tensor": 1},
        {"tensor": 2},
        {"tensor": 64},
        {"tensor": 65},
        {"tensor": 0},
        {"tensor": "2"},
        {"pipeline": 2, "data": 1},
        {"pipeline": 0},
        {"data": 17},
        {},
        None,
    ),
    "nodes": (1, 2, 64, 65, 0, "2", None),
    "resources.gpuType": ("h100", "", "t" * 64),
    "resources.cpu": ("500m", 4, 0),
    "resources.shm": ("1Gi", "1gi"),
    "router.replicas": (1, 0, 17),
    "router.policy": ("auto", "prefix", "least-load", "session", "round-robin", "random"),
    "router.workers": (1, 0, 17),
    "router.kvEvents": (False, "no"),
    "router.explain": (True, 1),
    "router.sessionHeader": ("X-Session", "x session", "", None),
    "router.queue": (
        {"max": 0, "timeout": 5, "coldStartTimeout": 0},
        {"max": -1},
        {"timeout": 1.5},
        {"coldStartTimeout": 86_401},
        {},
    ),
    "autoscaling": (
        {"max": 4, "target": {"ttftMs": 500, "itlMs": 50}, "scaleToZero": {"after": 60}},
        {"max": 4, "target": {"queue": 4, "kvUsage": 0.8}, "mode": "Advisory"},
        {"max": 4, "target": {"kvUsage": 1}, "scaleToZero": {}},
        {"max": 4, "target": {"kvUsage": 1.5}},
        {"max": 4, "target": {"ttftMs": 500, "kvUsage": 0.5}},
        {"max": 4, "target": {}},
        {"max": 4, "scaleToZero": {"after": 5}},
        {"max": 4, "min": 0},
        {"max": 4, "min": 5},
        {"max": 4, "mode": "External"},
        {"mode": "External"},
        {"min": 2, "mode": "External"},
        {"mode": "internal", "max": 4},
        {},
        None,
    ),
    "disaggregation": (
        {},
        {"prefill": {"replicas": 2}, "decode": {"replicas": 256}, "threshold": 0},
        {"prefill": {"replicas": 0}, "decode": {"replicas": 0}},
        {"prefill": {"replicas": 0}},
        {"prefill": {"replicas": 257}},
        {"prefill": {"autoscaling": {"max": 4, "target": {"ttftMs": 500}}}},
        {"prefill": {"autoscaling": {"max": 4, "target": {"kvUsage": 0.5}}}},
        {"prefill": {"autoscaling": {"max": 4, "min": 5}}},
        {"prefill": {"autoscaling": {"mode": "External"}}},
        {"prefill": {"autoscaling": {"max": 4}, "replicas": 3}},
        {"prefill": {"autoscaling": {"max": 4, "mode": "Advisory"}, "replicas": 3}},
        {"decode": {"autoscaling": {"max": 4, "target": {"itlMs": 50}}}},
        {"decode": {"autoscaling": {"max": 4, "target": {"queue": 5}}}},
        {"decode": {"autoscaling": {"max": 4, "scaleToZero": {}}}},
        {role: {"autoscaling": {"max": 4, "scaleToZero": {}}} for role in ("prefill", "decode")},
        {"prefill": {"args": ["--seed", "1"]}, "decode": {"args": ["--kv-send-type=get"]}},
        {"prefill": {"args": ["--kv-p", "1"]}},
        {"prefill": {"podTemplate": {"spec": {"priorityClassName": "a"}}}, "decode": {"resources": {"gpus": 2}}},
        {"prefill": {"resources": {"gpus": 2}}},
        {"decode": {"resources": {"gpus": 1}}},
        {"prefill": {"kvOffload": {"memory": "8Gi"}}, "decode": {"kvOffload": {"memory": "8Mi", "eviction": "arc"}}},
        {"prefill": {"kvOffload": {"memory": "8"}}},
        {"decode": {"kvOffload": {"memory": "8Gi", "disk": {"size": "8"}}}},
        {"connector": "p2p", "dataPlane": "nccl", "sendType": "Get", "fallback": "Fail"},
        {"connector": "file"},
        {"dataPlane": "rdma"},
        {"sendType": "PUT_ASYNC"},
        {"fallback": "recompute"},
        {"threshold": -1},
        [],
        None,
    ),
    "fleetKey": (1, 2, 0, "2", None, 10**12),
    "router.auth": ({"secretRef": {"name": "keys", "key": "api"}}, {}, {"secretRef": {"name": "keys"}}),
    "router.inferencePool": (
        {},
        {"failureMode": "FailOpen", "tls": False, "gatewayCidrs": ["10.0.0.0/8", "fd00::/8", "FD00::A:1/128", "::/0"]},
        {"gatewayCidrs": ["999.1.1.1/99"]},
        {"gatewayCidrs": ["1::2::3/64"]},
        {"failureMode": "failOpen"},
        {"gatewayCidrs": ["10.0.0.0"]},
        {"gatewayCidrs": ["fd00/8"]},
        {"gatewayCidrs": "10.0.0.0/8"},
        None,
    ),
    "rollout.maxSurge": (0, 1, 257),
    "rollout.maxUnavailable": (0, 1),
    "rollout.drainSeconds": (0, 3601),
    "rollout.progressSeconds": (29, 30),
    "expose.type": ("ClusterIP", "Ingress", "Gateway", "LoadBalancer"),
    "expose.host": ("llm.example.org", "LLM.example.org", "a..b", "h" * 254),
    "expose.gatewayRef": ({"name": "edge"}, {"name": "edge", "namespace": "infra", "sectionName": "https"}, {}),
    "expose.tls": ({"secretName": "cert"}, {}),
    "expose.className": ("nginx",),
    "monitoring.serviceMonitor": (True, False, "yes"),
    "monitoring.labels": ({"release": "prom"}, {"release": "a b"}, {"release": None}, {"release": 1}, {}),
    "podTemplate": ({}, {"spec": {"nodeName": None}}, [], "x"),
    "profileRef": ({"name": "h100"}, {"name": "H100"}),
    "paused": (True, "true"),
}


PROFILE_VALUES: dict[str, tuple[Any, ...]] = {
    "gpuType": ("h100", "", "t" * 64),
    "gpuMemory": ("80Gi", 80, "80 GB", 0),
    "gpuResource": ("nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "gpu", "", "NVIDIA.com/gpu", "r" * 254),
    "spareGpus": (True, "yes"),
    "runtimeClassName": ("nvidia", "Nvidia", "", None),
    "nodeSelector": ({"gpu": "h100"}, {"gpu": "a b"}, {f"l{number}": "" for number in range(17)}, {"gpu": None}),
    "tolerations": (
        [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        [{}],
        [{"operator": "In"}],
        [{"effect": None}],
        [{}] * 17,
    ),
    "engine": (
        *({"dtype": "float16"}, {"args": ["--port", "1"]}, {"env": [{"name": "A"}]}, {"dtype": "int8"}, None),
        *({"kvOffload": {"memory": "8Gi"}}, {"kvOffload": {"memory": 8}}),
    ),
    "resources": ({"gpus": 1, "memory": "8Gi"}, {"gpus": 8}, {"gpus": 17}, {"gpus": "1"}),
}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    spec: dict[str, Any] = {"model": {"uri": "builtin://tiny"}}
    for path in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=4, unique=True)):
        *parents, last = path.split(".")
        node = spec
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = copy.deepcopy(draw(st.sampled_from(VALUES[path])))
    return service_document(**spec)


def single_fields() -> Iterator[dict[str, Any]]:
    for path, values in VALUES.items():
        for value in values:
            first, _, second = path.partition(".")
            spec: dict[str, Any] = {"model": {"uri": "hf://org/name"}}
            if second:
                spec.setdefault(first, {})[second] = value
            else:
                spec[first] = value
            yield service_document(**spec)


def assert_judged_alike(admin: httpx.Client, namespace: str, document: dict[str, Any]) -> None:
    is_service = document["kind"] == "InferenceService"
    refused = ""
    try:
        (parse_inference_service if is_service else parse_inference_profile)(document)
    except InvalidDocument as invalid:
        refused = str(invalid)
    path = f"{GROUP}/namespaces/{namespace}/inferenceservices" if is_service else f"{GROUP}/inferenceprofiles"
    answer = admin.post(path, params={"dryRun": "All"}, json=document)
    assert answer.status_code in (201, 400, 422), answer.text
    assert bool(refused) == (answer.status_code != 201), f"{document}\nours: {refused}\ntheirs: {answer.text}"


def test_each_value_is_judged_alike_by_us_and_by_the_api_server(admin: httpx.Client, namespace: str) -> None:
    for document in single_fields():
        assert_judged_alike(admin, namespace, document)


def test_each_value_of_a_profile_is_judged_alike(admin: httpx.Client, namespace: str) -> None:
    for field, values in PROFILE_VALUES.items():
        for value in values:
            assert_judged_alike(admin, namespace, profile_document(**{field: value}))


@example(document=service_document(model=HF, cache={"type": "pvc", "claim": "models"}))
@example(document=service_document(model={"uri": "org/name", "revision": "v1", "endpoint": "https://m.example"}))
@example(document=service_document(model={"uri": "org/name", "secretRef": {"name": "hf"}}, cache={"type": "pvc"}))
@example(document=service_document(model={"uri": "org/name"}, cache={"type": "image"}))
@given(document=documents())
@settings(
    max_examples=examples(250),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_documents_are_judged_alike_by_us_and_by_the_api_server(
    admin: httpx.Client, namespace: str, document: dict[str, Any]
) -> None:
    assert_judged_alike(admin, namespace, document)
