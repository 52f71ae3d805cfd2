"""What a new user does: install, five lines, look, ask."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from pagefleet_protocol.kube_names import RESERVED_SUFFIXES

from e2e.kubernetes.cluster import Cluster, Images, restricted_pod, wait_until
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.service import API_VERSION, Service
from e2e.kubernetes.tunnel import ServiceTunnel
from tiny.dataset import Exchange

QUICKSTART = Path(__file__).parents[2] / "examples" / "01-quickstart" / "inferenceservice.yaml"
ASK = """
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": os.environ["QUESTION"]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
request.add_header("Content-Type", "application/json")
with urllib.request.urlopen(request) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""


@pytest.fixture(scope="module")
def url(cluster: Cluster, images: Images, served: Service) -> Iterator[str]:
    served.wait_for("Ready", "Serving", 180)
    with ServiceTunnel(cluster, images.operator, served.namespace, served.name) as tunnel:
        yield tunnel.url


def test_the_quickstart_is_served(cluster: Cluster, served: Service) -> None:
    cluster.apply(yaml.safe_load(QUICKSTART.read_text()), served.namespace)
    served.wait_for("Ready", "Serving", 180)
    status = served.status
    assert status["url"] == f"http://{served.name}.{served.namespace}.svc.cluster.local"
    assert (status["ready"], status["modelName"]) == ("1/1", "tiny")
    assert {one["type"]: one["reason"] for one in status["conditions"]} == {
        "Ready": "Serving",
        "ModelCached": "NotNeeded",
        "EngineReady": "AllReady",
        "RouterReady": "AllReady",
        "Progressing": "Settled",
        "Degraded": "AsWanted",
    }
    wait_until(lambda: {"Serving", "Settled"} <= {event["reason"] for event in served.events()}, "events tell of it")


def test_columns_tell_model_ready_mode_url_and_reason(cluster: Cluster, served: Service, url: str) -> None:
    accept = "application/json;as=Table;v=v1;g=meta.k8s.io"
    path = f"/apis/{API_VERSION}/namespaces/{served.namespace}/inferenceservices/{served.name}"
    answer: Any = cluster.connection.call_api(
        "GET", f"{cluster.connection.configuration.host}{path}", {"Accept": accept}
    )
    answer.read()
    table = yaml.safe_load(answer.data)
    shown = {
        column["name"]: cell for column, cell in zip(table["columnDefinitions"], table["rows"][0]["cells"], strict=True)
    }
    assert shown.pop("Age")
    shown = {name: shown[name] for name in ("Model", "Ready", "Mode", "Reason", "URL")}
    assert list(shown.values()) == ["builtin://tiny", "1/1", "Aggregated", "Serving", served.status["url"]]


def test_the_openai_client_gets_answers_and_streams(url: str, exchanges: Sequence[Exchange]) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        for exchange in exchanges[:3]:
            messages: Any = exchange.messages
            answer = client.chat.completions.create(model="tiny", temperature=0, messages=messages)
            assert answer.choices[0].message.content == exchange.answer
            stream = client.chat.completions.create(model="tiny", temperature=0, messages=messages, stream=True)
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
            assert "".join(pieces) == exchange.answer
            assert len(pieces) > 3


def test_a_mistake_is_told_to_the_client(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"model": "other", "prompt": "x"}, trust_env=False)
    assert answer.status_code == 404
    assert "'other' does not exist" in answer.json()["error"]["message"]


def test_an_application_needs_only_the_config_map(
    cluster: Cluster, images: Images, served: Service, url: str, exchanges: Sequence[Exchange]
) -> None:
    question = next(one for one in exchanges if len(one.messages) == 1)
    container = {
        "image": images.operator,
        "command": ["python", "-c", ASK],
        "env": [{"name": "QUESTION", "value": question.messages[0]["content"]}],
        "envFrom": [{"configMapRef": {"name": f"{served.name}-openai"}}],
    }
    pod = restricted_pod("application", container)
    pod["spec"]["restartPolicy"] = "Never"
    cluster.apply(pod, served.namespace)

    def ended() -> bool:
        found = cluster.get("v1", "Pod", "application", served.namespace) or {}
        return found.get("status", {}).get("phase") in ("Succeeded", "Failed")

    wait_until(ended, "the application ends")
    assert cluster.logs("application", served.namespace).strip() == question.answer
    cluster.delete("v1", "Pod", "application", served.namespace)


def test_the_charts_own_test_passes(installation: Installation) -> None:
    assert installation.test().splitlines() == [
        "operator: ready",
        "API server: knows InferenceProfile and InferenceService",
    ]


def test_a_mistake_in_the_yaml_is_refused_with_the_fix(cluster: Cluster, served: Service) -> None:
    other = Service(cluster, served.namespace, "tiny-engine")
    with pytest.raises(Exception, match=", ".join(RESERVED_SUFFIXES)):
        other.apply()
    with pytest.raises(Exception, match="replicas"):
        Service(cluster, served.namespace, "many").apply(replicas=-1)


def test_live_numbers_come_within_half_a_minute(served: Service, url: str) -> None:
    body = {"model": "tiny", "prompt": "The", "max_tokens": 50, "ignore_eos": True}
    deadline = time.monotonic() + 60
    while "live" not in served.status and time.monotonic() < deadline:
        httpx.post(f"{url}/v1/completions", json=body, trust_env=False).raise_for_status()
    live = served.status["live"]
    assert 0 <= live["kvUsage"] <= 1
    assert live["requestsRunning"] >= 0
