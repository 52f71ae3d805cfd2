"""A document for each way to break a rule about several fields, and the place that has to be told. No test in here."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_protocol.field_errors import InvalidDocument
from pagefleet_protocol.resource_documents import parse_inference_profile, parse_inference_service

from tests.fakes.resource_documents import profile_document, service_document

HF: dict[str, Any] = {"uri": "hf://org/name"}
PVC: dict[str, Any] = {"uri": "pvc://claim/model"}

BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("metadata.name", service_document("a" * 41)),
    ("metadata.name", service_document("1st")),
    ("metadata.name", service_document("qwen.eu-router")),
    ("metadata.name", service_document("qwen-eu-x0123456789")),
    ("metadata.name", service_document("qwen-router")),
    ("spec.model.uri", service_document(model={"uri": "hf://name"})),
    ("spec.model.uri", service_document(model={"uri": "https://huggingface.co/org/name"}, cache={"type": "pvc"})),
    ("spec.model.aliases", service_document(model={**HF, "name": "chat", "aliases": ["best", "chat"]})),
    ("spec.model.aliases", service_document(model={**HF, "aliases": ["qwen"]})),
    ("spec.model", service_document(model={"uri": "s3://bucket/model", "revision": "main"})),
    ("spec.model", service_document(model={**PVC, "secretRef": {"name": "token"}})),
    ("spec.model", service_document(model={"uri": "gs://bucket/model", "endpoint": "https://mirror"})),
    ("spec.cache.type", service_document(model=HF, cache={"type": "image"})),
    ("spec.cache.type", service_document(model={"uri": "oci://registry/model:1"}, cache={"type": "none"})),
    ("spec.cache.type", service_document(model=PVC, cache={"type": "none"})),
    ("spec.cache.type", service_document(cache={"type": "pvc"})),
    ("spec.cache", service_document(model=HF, cache={"size": "1Gi"})),
    ("spec.cache", service_document(model=HF, cache={"type": "pvc", "claim": "models", "size": "1Gi"})),
    ("spec.cache", service_document(model=HF, cache={"type": "pvc", "claim": "models", "storageClass": "fast"})),
    ("spec.cache", service_document(model=PVC, cache={"type": "pvc", "claim": "models"})),
    ("spec.cache.path", service_document(model=HF, cache={"type": "hostPath"})),
    ("spec.cache.path", service_document(model=HF, cache={"type": "none", "path": "/models"})),
    ("spec.rollout", service_document(rollout={"maxSurge": 0, "maxUnavailable": 0})),
    ("spec.expose", service_document(expose={"type": "Ingress"})),
    ("spec.expose", service_document(expose={"host": "llm.example.org"})),
    ("spec.expose", service_document(expose={"type": "Gateway", "host": "llm.example.org"})),
    (
        "spec.expose",
        service_document(expose={"type": "Ingress", "host": "llm.example.org", "gatewayRef": {"name": "edge"}}),
    ),
    (
        "spec.expose",
        service_document(
            expose={
                "type": "Gateway",
                "host": "llm.example.org",
                "gatewayRef": {"name": "edge"},
                "tls": {"secretName": "cert"},
            }
        ),
    ),
    ("spec.expose", service_document(expose={"className": "nginx"})),
    ("spec.parallelism", service_document(resources={"gpus": 3}, parallelism={"tensor": 2})),
    ("spec.parallelism", service_document(resources={"gpus": 8}, parallelism={"tensor": 8, "pipeline": 2}, nodes=3)),
    ("spec.parallelism", service_document(resources={"gpus": 8}, parallelism={"pipeline": 3})),
    ("spec.parallelism", service_document(parallelism={"tensor": 3}, nodes=2)),
    ("spec.parallelism.data", service_document(parallelism={"data": 2}, nodes=2)),
    ("spec.parallelism.data", service_document(resources={"gpus": 4}, parallelism={"tensor": 4, "data": 2})),
    ("spec.parallelism", service_document(parallelism={"tensor": 2}, disaggregation={"dataPlane": "cuda_ipc"})),
    ("spec.parallelism.data", service_document(parallelism={"data": 9}, router={"inferencePool": {}})),
    (
        "spec.parallelism",
        service_document(disaggregation={"dataPlane": "cuda_ipc", "prefill": {"parallelism": {"tensor": 2}}}),
    ),
    (
        "spec.parallelism",
        service_document(disaggregation={"dataPlane": "cuda_ipc", "decode": {"resources": {"gpus": 2}}}),
    ),
    ("spec.engine.args", service_document(engine={"args": ["-tp", "2"]})),
    (
        "spec.engine.env[0]",
        service_document(engine={"env": [{"name": "PAGEFLEET_ENGINE_KV_ROLE", "value": "both"}]}),
    ),
    ("spec.replicas", service_document(replicas=2, autoscaling={"max": 4})),
    ("spec.replicas", service_document(replicas=0, autoscaling={"max": 4, "mode": "Internal"})),
    ("spec.autoscaling.max", service_document(autoscaling={"min": 2})),
    ("spec.autoscaling.max", service_document(autoscaling={"min": 3, "max": 2})),
    ("spec.autoscaling.max", service_document(replicas=2, autoscaling={"mode": "Advisory"})),
    ("spec.autoscaling", service_document(autoscaling={"mode": "External", "max": 2})),
    ("spec.autoscaling", service_document(autoscaling={"mode": "External", "scaleToZero": {}})),
    ("spec.autoscaling.target", service_document(autoscaling={"max": 2, "target": {}})),
    ("spec.autoscaling.target", service_document(autoscaling={"max": 2, "target": {"ttftMs": 500, "queue": 4}})),
    ("spec.router.inferencePool", service_document(disaggregation={}, router={"inferencePool": {}})),
    ("spec.disaggregation", service_document(disaggregation={}, replicas=2)),
    ("spec.disaggregation", service_document(disaggregation={}, autoscaling={"max": 2})),
    ("spec.disaggregation", service_document(disaggregation={"prefill": {"replicas": 0}})),
    (
        "spec.disaggregation",
        service_document(
            disaggregation={
                "prefill": {"autoscaling": {"max": 2, "scaleToZero": {}}},
                "decode": {"autoscaling": {"max": 2, "scaleToZero": {"after": 60}}},
            }
        ),
    ),
    (
        "spec.disaggregation",
        service_document(disaggregation={"decode": {"autoscaling": {"max": 2, "scaleToZero": {}}}}),
    ),
    (
        "spec.disaggregation.prefill",
        service_document(disaggregation={"prefill": {"autoscaling": {"mode": "External"}}}),
    ),
    (
        "spec.disaggregation.prefill",
        service_document(disaggregation={"prefill": {"autoscaling": {"max": 2, "target": {"itlMs": 50}}}}),
    ),
    (
        "spec.disaggregation.prefill",
        service_document(disaggregation={"prefill": {"replicas": 2, "autoscaling": {"max": 2}}}),
    ),
    ("spec.disaggregation.decode", service_document(disaggregation={"decode": {"autoscaling": {"min": 3, "max": 2}}})),
    (
        "spec.disaggregation.decode",
        service_document(disaggregation={"decode": {"autoscaling": {"max": 2, "target": {"queue": 4}}}}),
    ),
    ("spec.disaggregation.prefill.args", service_document(disaggregation={"prefill": {"args": ["--kv-role=both"]}})),
    ("spec.disaggregation.decode.args", service_document(disaggregation={"decode": {"args": ["--port", "1"]}})),
    ("spec.engine.args", service_document(engine={"args": ["--seed", "1", "--port=9000"]})),
    ("spec.engine.args", service_document(engine={"args": ["--max-model", "9"]})),
    ("spec.engine.args", service_document(engine={"args": ["--kv-connector", "offload"]})),
    ("spec.engine.args", service_document(engine={"args": ["--kv-offload-dir=/kv"]})),
    ("spec.engine.kvOffload", service_document(engine={"kvOffload": {"memory": 8}})),
    ("spec.engine.kvOffload", service_document(engine={"kvOffload": {"memory": "800m"}})),
    ("spec.engine.kvOffload", service_document(engine={"kvOffload": {"memory": "1Gi", "disk": {"size": "1023Ki"}}})),
    (
        "spec.disaggregation.prefill.kvOffload",
        service_document(disaggregation={"prefill": {"kvOffload": {"memory": "1", "disk": {"size": "1Gi"}}}}),
    ),
    (
        "spec.disaggregation.decode.kvOffload",
        service_document(disaggregation={"decode": {"kvOffload": {"memory": "1Gi", "disk": {"size": 100}}}}),
    ),
    ("spec.engine.env[1]", service_document(engine={"env": [{"name": "A", "value": ""}, {"name": "B"}]})),
    (
        "spec.engine.env[0]",
        service_document(
            engine={"env": [{"name": "A", "value": "x", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}
        ),
    ),
]


BROKEN_PROFILES: list[tuple[str, dict[str, Any]]] = [
    ("metadata.name", profile_document("h100" * 11)),
    ("spec.engine.args", profile_document(engine={"args": ["--dtype=float16"]})),
    ("spec.engine.env[0]", profile_document(engine={"env": [{"name": "A"}]})),
    (
        "spec.engine.env[0]",
        profile_document(engine={"env": [{"name": "PAGEFLEET_ENGINE_KV_CONNECTOR", "value": "p2p"}]}),
    ),
    ("spec.engine.kvOffload", profile_document(engine={"kvOffload": {"memory": "32"}})),
]


def only_mistake(document: dict[str, Any]) -> tuple[str, str]:
    """The place and the words of the one mistake in a document."""
    parse = parse_inference_service if document["kind"] == "InferenceService" else parse_inference_profile
    with pytest.raises(InvalidDocument) as caught:
        parse(document)
    (mistake,) = caught.value.errors
    path, _, message = str(mistake).partition(": ")
    return path, message
