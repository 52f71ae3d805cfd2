"""A real API server takes every example as it is written, and says what is wrong with a spoilt one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.fakes.kube_control_plane import apply

KEDA = "kind: ScaledObject"
"""In manifests of a kind that only clusters with KEDA know."""
MANIFESTS = [
    path for path in sorted((Path(__file__).parents[2] / "examples").glob("*/*.yaml")) if KEDA not in path.read_text()
]
COLLECTIONS = {
    "InferenceService": "/apis/pagefleet.dev/v1alpha1/namespaces/{namespace}/inferenceservices",
    "InferenceProfile": "/apis/pagefleet.dev/v1alpha1/inferenceprofiles",
    "HorizontalPodAutoscaler": "/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers",
}


@pytest.mark.usefixtures("established")
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_api_server_takes_it(path: Path, admin: httpx.Client, namespace: str) -> None:
    written: dict[str, Any] = yaml.safe_load(path.read_text())
    collection = COLLECTIONS[written["kind"]].format(namespace=namespace)
    answer = apply(admin, f"{collection}/{written['metadata']['name']}", written)
    assert answer.status_code == 201, answer.text
    assert set(written["spec"]) <= set(answer.json()["spec"])
    admin.delete(f"{collection}/{written['metadata']['name']}").raise_for_status()


@pytest.mark.usefixtures("established")
def test_a_misspelled_field_is_not_dropped_in_silence(admin: httpx.Client, namespace: str) -> None:
    path = next(path for path in MANIFESTS if path.parent.name == "04-gpu" and path.name == "inferenceservice.yaml")
    written = yaml.safe_load(path.read_text())
    written["spec"]["resources"] = {"gpuTyp": "h100"}
    answer = apply(admin, f"{COLLECTIONS['InferenceService'].format(namespace=namespace)}/qwen", written)
    assert answer.status_code >= 400
    assert "gpuTyp" in answer.json()["message"]
