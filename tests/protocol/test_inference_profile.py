"""The InferenceProfile's types, and the forms that a model's URI may have."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_protocol.field_errors import InvalidDocument
from pagefleet_protocol.model_uri import ModelUri, parse_model_uri
from pagefleet_protocol.resource_documents import parse_inference_profile
from pydantic_core import PydanticCustomError

from tests.fakes.resource_documents import profile_document


def test_every_field_arrives() -> None:
    profile = parse_inference_profile(
        profile_document(
            gpuType="h100",
            gpuMemory="80Gi",
            spareGpus=True,
            runtimeClassName="nvidia",
            nodeSelector={"gpu": "h100"},
            tolerations=[{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            engine={"quantization": "fp8", "args": ["--seed", "1"]},
            resources={"gpus": 1, "memory": "64Gi"},
        )
    )
    assert profile.name == "h100"
    assert profile.spec.gpu_resource == "nvidia.com/gpu"
    assert (profile.spec.engine.quantization, profile.spec.engine.args) == ("fp8", ("--seed", "1"))
    assert profile.spec.tolerations[0].operator == "Exists"


def test_a_profile_may_say_nothing() -> None:
    profile = parse_inference_profile({key: value for key, value in profile_document().items() if key != "spec"})
    assert profile.spec.resources.gpus is None
    assert profile.spec.gpu_memory is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (profile_document("H100"), "metadata.name: must be at most 40 lower-case letters"),
        (profile_document(engine={"args": ["--port=1"]}), "spec.engine.args: must not hold what has its own"),
        (profile_document(engine={"env": [{"name": "A"}]}), "spec.engine.env[0]: give either value or valueFrom"),
        (profile_document(gpuMemory="80 GB"), "spec.gpuMemory: must be a Kubernetes quantity"),
        (profile_document(gpuResource="gpu"), "spec.gpuResource: must be a resource such as nvidia.com/gpu"),
        (profile_document(runtimeClassName=""), "spec.runtimeClassName: must be a Kubernetes object's name"),
        (profile_document(model={}), "spec.model: unknown field"),
    ],
)
def test_mistakes_are_told_with_their_paths(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        parse_inference_profile(wrong)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "scheme", "path"),
    [
        ("hf://Qwen/Qwen3-8B", "hf", "Qwen/Qwen3-8B"),
        ("s3://models/qwen/v1/", "s3", "models/qwen/v1/"),
        ("gs://models/.hidden/...", "gs", "models/.hidden/..."),
        ("oci://ghcr.io:443/org/qwen:v1", "oci", "ghcr.io:443/org/qwen:v1"),
        ("builtin://tiny", "builtin", "tiny"),
    ],
)
def test_uris_are_taken_apart(text: str, scheme: str, path: str) -> None:
    uri = parse_model_uri(text)
    assert uri == ModelUri(scheme, path)  # type: ignore[arg-type]
    assert uri.text == text
    assert uri.remote == (scheme in ("hf", "s3", "gs"))


def test_parts_of_a_claim_and_of_a_file() -> None:
    whole, part = parse_model_uri("pvc://models"), parse_model_uri("pvc://models/qwen/v1/")
    assert (whole.claim, whole.sub_path) == ("models", "")
    assert (part.claim, part.sub_path) == ("models", "qwen/v1")
    assert parse_model_uri("file:///a%20b").local_path == "/a b"


@pytest.mark.parametrize(
    "text",
    ["hf://one", "s3://bucket", "s3://b/x", "s3://bucket/../x", "gs://bucket/a/.", "pvc://claim/..", "oci://host/../a",
     "file://a", "builtin://other", "ftp://x", "hf:/a/b", "hf://a/b\n", "s3://bucket/a b", ""],
)  # fmt: skip
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(PydanticCustomError, match=r"write |give one of "):
        parse_model_uri(text)
