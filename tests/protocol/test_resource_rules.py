"""Rules about several fields: each is broken by a document and told at its place, and right documents pass."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_protocol.engine_rules import ENGINE_RULES, OWN_FLAGS
from pagefleet_protocol.resource_base import Rule
from pagefleet_protocol.resource_documents import parse_inference_service
from pagefleet_protocol.resource_rules import PROFILE_RULES, SERVICE_RULES

from tests.fakes.broken_documents import BROKEN, BROKEN_PROFILES, HF, PVC, only_mistake
from tests.fakes.resource_documents import service_document

EDGE = {"type": "Gateway", "host": "llm.example.org", "gatewayRef": {"name": "edge"}}

NO_SUBDOMAIN = ("metadata.name", service_document("qwen..eu"))
"""The API server refuses this one by a rule of its own, too."""


@pytest.mark.parametrize(("path", "document"), [*BROKEN, *BROKEN_PROFILES, NO_SUBDOMAIN])
def test_a_broken_rule_is_told_at_its_place(path: str, document: dict[str, Any]) -> None:
    assert only_mistake(document)[0] == path


def test_every_rule_has_a_document_that_breaks_it() -> None:
    assert {only_mistake(document)[1] for _, document in BROKEN} == {rule.message for rule in SERVICE_RULES}
    assert {only_mistake(document)[1] for _, document in BROKEN_PROFILES} == {rule.message for rule in PROFILE_RULES}


def test_there_are_few_rules_and_none_says_the_same() -> None:
    assert len(SERVICE_RULES) <= 30
    assert len({rule.cel for rule in SERVICE_RULES}) == len({rule.message for rule in SERVICE_RULES})
    assert set(ENGINE_RULES) <= set(PROFILE_RULES) & set(SERVICE_RULES)


@pytest.mark.parametrize("rule", SERVICE_RULES, ids=lambda rule: rule.field or ".".join(rule.at))
def test_messages_are_sentences_that_go_on_from_their_path(rule: Rule) -> None:
    assert rule.message == rule.message.strip()
    assert not rule.message.endswith(".")
    assert len(rule.message) < 900
    assert "\n" not in rule.cel


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {**HF, "revision": "main", "secretRef": {"name": "token"}, "endpoint": "https://mirror"}},
        {"model": {"uri": "s3://bucket/model", "secretRef": {"name": "keys"}, "endpoint": "https://minio"}},
        {"model": {**HF, "name": "chat", "aliases": ["qwen"]}},
        {"model": HF, "cache": {"type": "pvc", "claim": "models"}},
        {"model": HF, "cache": {"type": "pvc", "size": "1Gi", "storageClass": "fast"}},
        {"model": HF, "cache": {"type": "hostPath", "path": "/models"}},
        {"model": PVC, "cache": {"type": "pvc"}},
        {"model": {"uri": "oci://registry/model:1"}, "cache": {"type": "image"}},
        {"cache": {"type": "none"}},
        {"rollout": {"maxSurge": 0}},
        {"rollout": {"maxUnavailable": 0}},
        {"rollout": {"maxSurge": 0, "maxUnavailable": 1}},
        {"expose": EDGE},
        {"expose": {"type": "Ingress", "host": "a.b", "className": "nginx", "tls": {"secretName": "cert"}}},
        {"engine": {"env": [{"name": "A", "value": ""}]}},
        {"engine": {"kvOffload": {"memory": "1Mi"}}},
        {
            "engine": {
                "kvOffload": {"memory": 2**33, "disk": {"size": "1.5T", "storageClass": "fast"}, "eviction": "arc"}
            }
        },
        {"engine": {"kvOffload": {"memory": "8Gi"}}, "disaggregation": {"prefill": {"kvOffload": {"memory": "64Gi"}}}},
        {"resources": {"gpus": 8}},
        {"resources": {"gpus": 2}, "parallelism": {"tensor": 2}},
        {"resources": {"gpus": 0}, "parallelism": {"tensor": 2}},
        {"parallelism": {"tensor": 16}},
        {"resources": {"gpus": 8}, "parallelism": {"tensor": 8, "pipeline": 2}},
        {"resources": {"gpus": 8}, "parallelism": {"tensor": 16}, "nodes": 2},
        {"resources": {"gpus": 8}, "parallelism": {"pipeline": 4}, "nodes": 2},
        {"resources": {"gpus": 8}, "parallelism": {"tensor": 2, "pipeline": 2, "data": 2}},
        {"parallelism": {"pipeline": 2, "data": 2}},
        {"nodes": 2},
        {"parallelism": {"tensor": 4}, "nodes": 2},
        {"resources": {"gpus": 2}, "engine": {"kvOffload": {"memory": "8Gi"}}},
        {"resources": {"gpus": 4}, "disaggregation": {"decode": {"resources": {"gpus": 2}}}},
        {"disaggregation": {"dataPlane": "tcp", "prefill": {"parallelism": {"tensor": 2}}}},
        {"disaggregation": {"dataPlane": "nccl", "prefill": {"parallelism": {"tensor": 2}}}},
        {"resources": {"gpus": 2}, "parallelism": {"data": 2}, "engine": {"kvOffload": {"memory": "8Gi"}}},
        {"parallelism": {"tensor": 1}, "disaggregation": {"decode": {"resources": {"gpus": 1}}}},
        {"autoscaling": {"max": 1}},
        {"replicas": 1, "autoscaling": {"min": 2, "max": 8, "target": {"ttftMs": 500}, "scaleToZero": {"after": 60}}},
        {"replicas": 3, "autoscaling": {"max": 8, "mode": "Advisory", "target": {"queue": 4, "kvUsage": 0.8}}},
        {"replicas": 3, "autoscaling": {"mode": "External"}},
        {"autoscaling": {"max": 8, "target": {"ttftMs": 500, "itlMs": 50}}},
        {"disaggregation": {}},
        {"disaggregation": {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}},
        {"disaggregation": {"prefill": {"replicas": 2, "args": ["--max-num-batched-tokens", "8192"]}}},
        {
            "disaggregation": {
                "prefill": {"autoscaling": {"max": 4, "target": {"ttftMs": 500}, "scaleToZero": {"after": 60}}},
                "decode": {"autoscaling": {"max": 8, "target": {"itlMs": 50}, "scaleToZero": {"after": 60}}},
                "connector": "p2p",
                "dataPlane": "tcp",
                "sendType": "Get",
                "threshold": 0,
                "fallback": "Fail",
            }
        },
    ],
)
def test_what_belongs_together_is_taken(spec: dict[str, Any]) -> None:
    assert parse_inference_service(service_document(**spec)).name == "qwen"


@pytest.mark.parametrize("flag", OWN_FLAGS)
def test_every_form_of_our_own_flags_is_refused(flag: str) -> None:
    for given in (flag, f"{flag}=1", flag[:4], f"{flag[:5]}=x=y"):
        path, message = only_mistake(service_document(engine={"args": [given]}))
        assert path == "spec.engine.args"
        told = {
            one: remedy.rstrip(")")
            for flags, _, remedy in (
                part.rpartition(" (")
                for part in message.removeprefix("must not hold what has its own field: ").split("; ")
            )
            for one in flags.split(", ")
        }
        assert told == OWN_FLAGS
