"""The InferenceService's types: what is accepted, and that every mistake is told with its path and the remedy."""

from __future__ import annotations

import copy
import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.field_errors import FieldError, InvalidDocument, path_text
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.quantities import quantity
from pagefleet_protocol.resource_documents import parse_inference_service

FIVE_LINES = {
    "apiVersion": "pagefleet.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "qwen"},
    "spec": {"model": {"uri": "builtin://tiny"}},
}


def document(path: str, value: object) -> dict[str, Any]:
    """Return the five lines with one more field."""
    result = copy.deepcopy(FIVE_LINES)
    node: dict[str, Any] = result
    *parents, last = path.split(".")
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    return result


def problems(value: object) -> list[str]:
    with pytest.raises(InvalidDocument) as caught:
        parse_inference_service(value)
    return [str(error) for error in caught.value.errors]


def test_five_lines_are_enough() -> None:
    service = parse_inference_service(FIVE_LINES)
    assert service.name == service.model_name == "qwen"
    assert service.spec.replicas == 1
    assert service.spec.engine.dtype is None, "a profile may say it"
    assert service.spec.engine.max_model_len is None
    assert service.spec.resources.gpus is None
    assert service.spec.router.policy == "auto"
    assert service.metadata.namespace == "default"


def test_every_field_arrives() -> None:
    full = {
        **FIVE_LINES,
        "metadata": {
            "name": "a",
            "namespace": "prod",
            "labels": {"team": "x"},
            "annotations": {"note": "y"},
            "uid": "u",
            "generation": 4,
        },
        "spec": {
            "model": {
                "uri": "hf://Qwen/Qwen3-8B",
                "revision": "main",
                "name": "Qwen/Qwen3-8B",
                "aliases": ["qwen", "best"],
                "secretRef": {"name": "token"},
                "endpoint": "https://mirror.example.org",
            },
            "cache": {"type": "pvc", "size": "100Gi", "storageClass": "fast", "accessMode": "ReadWriteOnce"},
            "engine": {
                "image": "registry/engine:1",
                "args": ["--seed", "1"],
                "env": [
                    {"name": "A", "value": "1"},
                    {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                ],
                "dtype": "bfloat16",
                "quantization": "fp8",
                "maxModelLen": 4096,
            },
            "replicas": 3,
            "autoscaling": {
                "mode": "Advisory",
                "min": 2,
                "max": 8,
                "target": {"queue": 4, "kvUsage": 0.8},
                "scaleToZero": {"after": 300},
            },
            "resources": {"gpus": 4, "gpuType": "h100", "cpu": "1500m", "memory": "8Gi", "shm": "2Gi"},
            "parallelism": {"tensor": 4, "pipeline": 2, "data": 1},
            "nodes": 2,
            "router": {
                "replicas": 2,
                "workers": 2,
                "policy": "least-load",
                "kvEvents": False,
                "sessionHeader": "X-Session",
                "explain": True,
                "console": False,
                "queue": {"max": 100, "timeout": 10, "coldStartTimeout": 300},
                "auth": {"secretRef": {"name": "keys", "key": "api"}},
                "resources": {"cpu": "1", "memory": "1Gi"},
            },
            "rollout": {"maxSurge": 0, "maxUnavailable": 1, "drainSeconds": 60, "progressSeconds": 600},
            "expose": {
                "type": "Gateway",
                "host": "llm.example.org",
                "gatewayRef": {"name": "edge", "namespace": "infra", "sectionName": "https"},
            },
            "monitoring": {"serviceMonitor": True, "labels": {"release": "prometheus"}},
            "podTemplate": {"spec": {"priorityClassName": "high"}},
            "fleetKey": 2,
            "profileRef": {"name": "h100"},
            "paused": True,
        },
    }
    service = parse_inference_service(full)
    assert service.model_dump(mode="json", exclude_none=True) == full
    assert service.model_name == "Qwen/Qwen3-8B"


def test_every_field_of_a_disaggregation_arrives() -> None:
    role = {
        "replicas": 1,
        "args": ["--max-num-seqs", "64"],
        "parallelism": {"tensor": 1},
        "resources": {"gpus": 1, "gpuType": "h100", "cpu": "2", "memory": "8Gi", "shm": "2Gi"},
        "podTemplate": {"spec": {"priorityClassName": "high"}},
    }
    scaling = {"mode": "Internal", "min": 1, "max": 4}
    whole = {
        "prefill": {**role, "autoscaling": {**scaling, "target": {"ttftMs": 500, "queue": None}}},
        "decode": {**role, "autoscaling": {**scaling, "target": {"itlMs": 40}}},
        "connector": "p2p",
        "dataPlane": "nccl",
        "sendType": "Put",
        "threshold": 512,
        "fallback": "Fail",
    }
    found = parse_inference_service(document("spec.disaggregation", whole)).spec.disaggregation
    assert found is not None
    del whole["prefill"]["autoscaling"]["target"]["queue"]  # type: ignore[index]
    assert found.model_dump(mode="json", exclude_none=True) == whole


def test_an_empty_disaggregation_is_one_pair() -> None:
    found = parse_inference_service(document("spec.disaggregation", {})).spec.disaggregation
    assert found is not None
    assert (found.prefill.replicas, found.decode.replicas) == (1, 1)
    assert (found.connector, found.data_plane, found.send_type, found.fallback) == (
        "p2p",
        "auto",
        "PutAsync",
        "Recompute",
    )
    assert found.threshold is None


def test_a_field_without_a_value_is_a_field_not_written() -> None:
    empty = document("spec.engine", None)
    empty["spec"]["replicas"] = None
    empty["spec"]["monitoring"] = {"labels": {"release": None}}
    assert parse_inference_service(empty) == parse_inference_service(FIVE_LINES)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("apiVersion", "pagefleet.dev/v1", "apiVersion: must be pagefleet.dev/v1alpha1"),
        ("kind", "Inferenceservice", "kind: must be InferenceService"),
        ("metadata.name", "Qwen_3", "metadata.name: must be at most 40 lower-case letters"),
        ("metadata.name", "a" * 41, "metadata.name: must be at most 40"),
        ("metadata.name", "ends-", "metadata.name: must be at most 40"),
        ("metadata.name", "qwen\n", "metadata.name: must be at most 40"),
        ("metadata.namespace", "-x", "metadata.namespace: must be at most 63"),
        ("metadata.labels", {"a": 1}, "metadata.labels.a: must be text (put it in quotes), not the number 1"),
        (
            "spec.model.uri",
            "hf://Qwen3-8B",
            "spec.model.uri: must be one of organization/name, hf://organization/name,",
        ),
        ("spec.model.uri", "s3://bucket/../x", "spec.model.uri: must be one of"),
        ("spec.model.uri", "/models/qwen", "spec.model.uri: must be one of"),
        ("spec.model.uri", "file://relative", "file:///absolute/path, builtin://tiny"),
        ("spec.model.uri", "hf://a/" + "b" * 1024, "spec.model.uri: has 1031 characters; at most 1024 are allowed"),
        ("spec.model.aliases", ["a", "b", "a"], "spec.model.aliases: has 'a' twice; every entry must be there once"),
        (
            "spec.engine.env",
            [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}],
            "spec.engine.env: has 'A' twice; every name must be there once",
        ),
        ("spec.cache.path", "models", "spec.cache.path: must be an absolute path"),
        ("spec.resources.gpuType", "", "spec.resources.gpuType: must not be empty"),
        ("spec.profileRef", {"name": "H100"}, "spec.profileRef.name: must be a Kubernetes object's name"),
        ("spec.monitoring.labels", {"a": "b c"}, "spec.monitoring.labels.a: must be a label's value"),
        ("spec.monitoring.tracesEndpoint", "c:4317", "spec.monitoring.tracesEndpoint: must be a URL such as http://"),
        ("spec.monitoring.tracesEndpoint", "http://c:65536", "spec.monitoring.tracesEndpoint: must be a URL such as"),
        ("spec.monitoring.tracesEndpoint", "http://u:p@c", "spec.monitoring.tracesEndpoint: must be a URL such as"),
        ("spec.monitoring.tracesSample", 1.1, "spec.monitoring.tracesSample: must be at most 1"),
        ("spec.model.uri", None, "spec.model.uri: must be text (put it in quotes), not empty"),
        ("spec.model.name", "two words", "spec.model.name: must be at most 128 letters"),
        (
            "spec.engine.dtype",
            "bf16",
            "spec.engine.dtype: must be auto, float32, bfloat16 or float16, not the text 'bf16'",
        ),
        ("spec.engine.maxModelLen", "12", "spec.engine.maxModelLen: must be a whole number, not the text '12'"),
        ("spec.engine.maxModelLen", 0, "spec.engine.maxModelLen: must be at least 1, not the number 0"),
        ("spec.engine.maxModelLen", 1.5, "spec.engine.maxModelLen: must be a whole number"),
        ("spec.engine.max_model_len", 1, "spec.engine.max_model_len: unknown field. Did you mean maxModelLen?"),
        ("spec.engine.args", "--seed 1", "spec.engine.args: must be a list, not the text"),
        ("spec.engine.args", ["--seed", 1], "spec.engine.args[1]: must be text (put it in quotes), not the number 1"),
        ("spec.engine.args", ["--port=1"], "spec.engine.args: must not hold what has its own field: --host, --port"),
        ("spec.engine.args", ["--por", "1"], "spec.engine.args: must not hold what has its own field: --host"),
        ("spec.engine.args", ["--dtype", "x"], "--dtype (spec.engine.dtype)"),
        (
            "spec.engine.args",
            ["--kv-conn", "file"],
            "--kv-connector (spec.engine.kvOffload or spec.disaggregation)",
        ),
        ("spec.engine.kvOffload", {}, "spec.engine.kvOffload.memory: is required: Host memory of each engine"),
        ("spec.engine.kvOffload", {"disk": {"size": "9Gi"}}, "spec.engine.kvOffload.memory: is required"),
        ("spec.engine.kvOffload", {"memory": 0}, "spec.engine.kvOffload.memory: must be a Kubernetes quantity over 0"),
        ("spec.engine.kvOffload", {"memory": "-8Gi"}, "spec.engine.kvOffload.memory: must be a Kubernetes quantity"),
        ("spec.engine.kvOffload", {"memory": "8GB"}, "spec.engine.kvOffload.memory: must be a Kubernetes quantity"),
        ("spec.engine.kvOffload", {"memory": "8"}, "as disk.size: give a unit with the number, as in 8Gi"),
        (
            "spec.engine.kvOffload",
            {"memory": "8Gi", "disk": "9Gi"},
            "spec.engine.kvOffload.disk: must be a mapping of fields, not the text '9Gi'",
        ),
        (
            "spec.engine.kvOffload",
            {"memory": "8Gi", "disk": {"size": "9Gi", "path": "/kv"}},
            "spec.engine.kvOffload.disk.path: unknown field. Fields here: size, storageClass",
        ),
        (
            "spec.engine.kvOffload",
            {"memory": "8Gi", "eviction": "LRU"},
            "spec.engine.kvOffload.eviction: must be lru or arc, not the text 'LRU'. Did you mean lru?",
        ),
        ("spec.engine.args", ["-x"] * 65, "spec.engine.args: has 65 entries; at most 64 are allowed"),
        ("spec.engine.args", ["x" * 1025], "spec.engine.args[0]: must be at most 1024 characters"),
        ("spec.replicas", True, "spec.replicas: must be a whole number, not the truth value True"),
        ("spec.replicas", -1, "spec.replicas: must be at least 0, not the number -1"),
        ("spec.replicas", 257, "spec.replicas: must be at most 256"),
        ("spec.resources.gpus", 17, "spec.resources.gpus: must be at most 16"),
        ("spec.parallelism.tensor", 65, "spec.parallelism.tensor: must be at most 64"),
        ("spec.parallelism.tensor", 0, "spec.parallelism.tensor: must be at least 1"),
        (
            "spec.resources.cpu",
            0.25,
            'spec.resources.cpu: must be a Kubernetes quantity over 0 such as 2, "500m", "0.25"',
        ),
        ("spec.resources.cpu", 0, "spec.resources.cpu: must be a Kubernetes quantity over 0"),
        ("spec.resources.memory", "8 GB", "spec.resources.memory: must be a Kubernetes quantity"),
        ("spec.router", [], "spec.router: must be a mapping of fields, not a list"),
        ("spec.router.policy", "least_load", "Did you mean least-load?"),
        (
            "spec.speculation",
            {},
            "spec.speculation: unknown field. Fields here: model, cache, engine, replicas, autoscaling,",
        ),
    ],
)
def test_a_mistake_is_told_with_path_and_remedy(path: str, value: object, said: str) -> None:
    found = problems(document(path, value))
    assert len(found) == 1
    assert said in found[0]


def test_all_mistakes_are_told_at_once() -> None:
    wrong = document("spec.replicas", "two")
    wrong["spec"]["model"] = {}
    wrong["spec"]["rooter"] = {}
    found = problems(wrong)
    assert [line.partition(":")[0] for line in found] == ["spec.model.uri", "spec.replicas", "spec.rooter"]
    assert found[0].startswith("spec.model.uri: is required: organization/name of the hub (hf://organization/name), s3")
    assert "Did you mean router?" in found[2]


@pytest.mark.parametrize("value", [None, [], "text", 5])
def test_a_document_that_is_no_mapping_is_refused(value: object) -> None:
    assert problems(value)[0].startswith("document: must be a mapping of fields, not ")


def test_a_huge_value_is_not_repeated_in_full() -> None:
    assert len(problems(document("spec.engine.dtype", "x" * 100_000))[0]) < 200


def test_nothing_can_be_changed_after_reading() -> None:
    service = parse_inference_service(FIVE_LINES)
    with pytest.raises(ValueError, match="frozen"):
        service.spec.replicas = 2


@pytest.mark.parametrize(
    ("text", "number"), [("2", 2), ("500m", 0.5), ("1.5", 1.5), ("8Gi", 8 * 1024**3), ("3M", 3e6), ("1Ki", 1024)]
)
def test_quantities(text: str, number: float) -> None:
    assert quantity(text) == number


@pytest.mark.parametrize(
    "args", [["--"], ["--=x"], ["-q"], ["--seed", "port"], ["--policy", "fcfs"], ["--max-num-seqs", "1"]]
)
def test_flags_that_are_nobody_elses_may_be_given(args: list[str]) -> None:
    assert parse_inference_service(document("spec.engine.args", args)).spec.engine.args == tuple(args)


def test_every_broken_rule_is_told() -> None:
    wrong = document("spec.model.revision", "main")
    wrong["metadata"] = {"name": "qwen-engine"}
    wrong["spec"]["cache"] = {"type": "hostPath"}
    wrong["spec"]["engine"] = {"env": [{"name": "A", "value": "1"}, {"name": "B"}]}
    assert [line.partition(": ")[0] for line in problems(wrong)] == [
        *("metadata.name", "spec.model", "spec.cache.type", "spec.cache.path", "spec.engine.env[1]"),
    ]


def test_paths_read_as_people_write_them() -> None:
    assert path_text(("spec", "engine", "args", 2)) == "spec.engine.args[2]"
    assert path_text(()) == "document"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PATHS = [
    "apiVersion",
    "metadata",
    "metadata.name",
    "spec",
    "spec.model",
    "spec.engine",
    "spec.engine.args",
    "spec.replicas",
    "spec.resources.cpu",
    "spec.router",
    "spec.cache",
    "spec.expose",
    "spec.podTemplate",
    "status",
]


@given(path=st.sampled_from(PATHS), value=json_values)
def test_whatever_is_written_is_accepted_or_refused_in_words(path: str, value: object) -> None:
    service: InferenceService | None = None
    errors: tuple[FieldError, ...] = ()
    try:
        service = parse_inference_service(document(path, value))
    except InvalidDocument as invalid:
        errors = invalid.errors
    assert bool(service) != bool(errors)
    assert all("pydantic" not in str(error) and "\n" not in error.message for error in errors)
    if service:
        assert InferenceService.model_validate_json(service.model_dump_json(exclude_none=True)) == service


@pytest.mark.parametrize(("written", "tokens"), [(4096, 4096), ("32k", 32_000), ("32K", 32_768), ("8Ki", 8192)])
def test_a_length_as_people_write_it(written: object, tokens: int) -> None:
    assert parse_inference_service(document("spec.engine.maxModelLen", written)).spec.engine.max_model_len == tokens


CIDRS = "spec.router.inferencePool.gatewayCidrs"


@pytest.mark.parametrize(
    "cidr",
    ["0.0.0.0/0", "10.1.2.3/8", "255.249.199.9/32", "::/0", "FD00::A:1/128", "1:2:3:4:5:6:7::/9"],
)
def test_gateways_may_have_these_addresses(cidr: str) -> None:
    parse_inference_service(document(CIDRS, [cidr]))


@pytest.mark.parametrize(
    "cidr",
    ["999.1.1.1/9", "1.1.1.1/33", "1.1.1/8", "01.1.1.1/8", "1.1.1.1", "1::2::3/64", "::/129", "1:2/8"],
)
def test_gateways_cannot_have_these_addresses(cidr: str) -> None:
    (problem,) = problems(document(CIDRS, [cidr]))
    assert problem.startswith(f"{CIDRS}[0]: must be addresses such as 10.0.0.0/8")


_GROUPS = st.lists(st.sampled_from(["", "0", "fd00", "ABCD", "12345"]), min_size=1, max_size=9).map(":".join)
_BYTES = st.lists(st.integers(0, 300).map(str), min_size=3, max_size=5).map(".".join)


@given(_GROUPS | _BYTES | st.ip_addresses().map(lambda one: one.exploded), st.integers(0, 140))
def test_addresses_of_gateways_are_those_that_python_knows(address: str, length: int) -> None:
    cidr = f"{address}/{length}"
    try:
        ipaddress.ip_network(cidr, strict=False)
    except ValueError:
        problems(document(CIDRS, [cidr]))
    else:
        parse_inference_service(document(CIDRS, [cidr]))
