"""K/V that an engine's pool gives up, in memory and on a disk of its pod: a restarted container finds the latter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from e2e.kubernetes.cluster import Cluster, Images, wait_until
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.node import kill_processes
from e2e.kubernetes.service import Service
from e2e.kubernetes.test_troubles import LIGHT
from e2e.kubernetes.tunnel import PodTunnel

EXAMPLE = Path(__file__).parents[2] / "examples/11-kv-offload/inferenceservice.yaml"
KEPT = "pagefleet_engine_kv_transfer_offload_bytes"
PROMPTS = [
    f"Text {number}. " + f"Engine {number} keeps the KV cache of a prompt for later. " * 12 for number in range(8)
]
"""Three of them fill the pool."""


@pytest.fixture(scope="module")
def service(cluster: Cluster, installation: Installation) -> Iterator[Service]:
    found = Service(cluster, installation.namespace, "offload")
    spec = yaml.safe_load(EXAMPLE.read_text())["spec"]
    found.apply(**{**spec, "router": LIGHT, "resources": {"cpu": "100m"}})
    found.wait_until_settled(300)
    yield found
    found.delete()


def num_cached_tokens(cluster: Cluster, service: Service) -> int:
    """Ask all prompts of the one engine; returns how many of their tokens it did not compute."""
    (pod,) = service.pod_names("engine")
    cached = 0
    with PodTunnel(cluster, service.namespace, pod) as tunnel:
        for prompt in PROMPTS:
            body = {"model": service.name, "prompt": prompt, "max_tokens": 2, "temperature": 0}
            reply = httpx.post(f"{tunnel.url}/v1/completions", json=body, timeout=60, trust_env=False)
            assert reply.status_code == 200, reply.text
            cached += reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def on_disk(cluster: Cluster, service: Service) -> float:
    """Return the bytes that the engine has on its disk."""
    (pod,) = service.pod_names("engine")
    with PodTunnel(cluster, service.namespace, pod) as tunnel:
        page = httpx.get(f"{tunnel.url}/metrics", timeout=30, trust_env=False).text
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return sum(one.value for one in samples if one.name == KEPT and one.labels["tier"] == "disk")


def test_a_restarted_container_finds_what_its_pod_keeps(
    cluster: Cluster, images: Images, privileged: str, service: Service
) -> None:
    """The old process was killed amid whatever it did, and its hold on the folder has to be gone with it."""
    assert num_cached_tokens(cluster, service) == 0
    (pod,) = service.pods("engine")
    (volume,) = (one for one in pod["spec"]["volumes"] if one["name"] == "kv")
    assert volume["emptyDir"]["sizeLimit"] == "64Mi"
    wait_until(lambda: on_disk(cluster, service) > 0, "blocks reach the disk")
    assert num_cached_tokens(cluster, service) > 0

    kill_processes(cluster, images.operator, privileged, pod)

    def restarted() -> bool:
        (now,) = service.pods("engine")
        assert now["metadata"]["uid"] == pod["metadata"]["uid"], "the pod's volumes would be new ones"
        (container,) = now["status"]["containerStatuses"]
        return bool(container["restartCount"] and container["ready"])

    wait_until(restarted, "the container is there again", 180)
    assert on_disk(cluster, service) > 0
    assert num_cached_tokens(cluster, service) > 0
