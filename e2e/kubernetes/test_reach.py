"""The cluster itself, before anything of ours is installed: an engine's pod answers through a Service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai

from e2e.kubernetes.cluster import Cluster, Images, restricted_pod, wait_until
from tiny.dataset import Exchange


def test_an_engine_answers_through_a_service(
    cluster: Cluster,
    images: Images,
    namespace: str,
    service_url: Callable[..., str],
    exchanges: Sequence[Exchange],
) -> None:
    arguments = ["serve", "builtin://tiny", "--host", "0.0.0.0", "--port", "8000"]
    probe = {"httpGet": {"path": "/readyz", "port": 8000}, "periodSeconds": 1}
    one_thread = [{"name": "OMP_NUM_THREADS", "value": "1"}]  # more would wait for each other on a busy node
    container = {"image": images.engine, "args": arguments, "readinessProbe": probe, "env": one_thread}
    cluster.apply(restricted_pod("engine", container, {"app": "engine"}), namespace)
    ports = [{"port": 80, "targetPort": 8000}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "engine"}}
    cluster.apply({**service, "spec": {"selector": {"app": "engine"}, "ports": ports}}, namespace)
    wait_until(lambda: cluster.pod_is_ready("engine", namespace), "the engine's pod is ready", timeout_s=120)

    url = service_url("engine")
    assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for exchange in exchanges[:3]:
            messages: Any = exchange.messages
            answer = client.chat.completions.create(model="tiny", temperature=0, messages=messages)
            assert answer.choices[0].message.content == exchange.answer
        stream = client.completions.create(model="tiny", prompt="Hello", max_tokens=8, stream=True)
        assert len([chunk for chunk in stream if chunk.choices]) > 1
