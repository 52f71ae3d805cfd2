"""Routers that do not talk to each other know what each engine has cached; nobody without the fleet's key does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagefleet_protocol import headers
from pagefleet_protocol.kube_names import KV_EVENTS_PORT

from e2e.kubernetes.cluster import Cluster, Images, restricted_pod, wait_until
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.service import Service
from e2e.kubernetes.test_troubles import LIGHT
from e2e.kubernetes.tunnel import PodTunnel

BLOCK = 16
LISTENER = Path(__file__).with_name("listen_pod.py")
MADE_AGAIN_WITHIN_S = 120


@dataclass(frozen=True, slots=True)
class Answered:
    """What an answer says of itself."""

    engine: str
    prompt_tokens: int
    cached_tokens: int

    @property
    def all_cached(self) -> int:
        """Cached tokens where everything is cached that can be."""
        return (self.prompt_tokens - 1) // BLOCK * BLOCK


def document(name: str) -> str:
    """Return a prompt that shares no block with others, and is long enough for routers to tokenize it."""
    return " ".join(f"{name} {number} says what a page fleet is, and what it is not." for number in range(45))


def ask(url: str, model: str, prompt: str) -> Answered:
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    usage: dict[str, Any] = reply.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answered(reply.headers[headers.ENGINE_ID], usage["prompt_tokens"], cached)


def metric(url: str, name: str) -> float:
    """Return a metric of a router or an engine that has one series; 0 where it has none."""
    page = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    found = re.search(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def follows(url: str, engines: int) -> bool:
    return metric(url, "pagefleet_router_kv_engines_followed") == engines


@pytest.fixture
def routers(cluster: Cluster, fleet: Service) -> Iterator[tuple[str, str]]:
    """Addresses of the fleet's two routers, which know both engines."""
    first, second = sorted(fleet.pod_names("router"))
    with PodTunnel(cluster, fleet.namespace, first) as one, PodTunnel(cluster, fleet.namespace, second) as other:
        for url in (one.url, other.url):
            wait_until(lambda url=url: follows(url, 2), "a router hears both engines")  # type: ignore[misc]
        yield one.url, other.url


def test_a_router_finds_what_came_through_the_other(fleet: Service, routers: tuple[str, str]) -> None:
    first, second = routers
    for number in count():  # the second one may still fetch the tokenizer
        assert number < 20, "what came through the other router is not found"
        prompts = [document(f"Page {number} {letter}") for letter in "ABCD"]
        known = metric(second, "pagefleet_router_kv_blocks")
        told = [ask(first, fleet.name, prompt) for prompt in prompts]
        more = sum(one.prompt_tokens // BLOCK for one in told)
        wait_until(lambda: metric(second, "pagefleet_router_kv_blocks") >= known + more, "the other hears of it")  # noqa: B023
        again = [ask(second, fleet.name, prompt) for prompt in prompts]
        if [one.engine for one in again] == [one.engine for one in told]:
            break
    assert len({one.engine for one in told}) == 2, "both engines are used"
    assert [one.cached_tokens for one in again] == [one.all_cached for one in told]
    assert all(one.all_cached > 500 for one in told)


def test_events_are_heard_with_the_fleets_key_only(
    cluster: Cluster, images: Images, fleet: Service, routers: tuple[str, str]
) -> None:
    engine = fleet.pods("engine")[0]
    address = f"tcp://{engine['status']['podIP']}:{KV_EVENTS_PORT}"
    # Of the images that hold the fleet key's reader, the operator's has no ZeroMQ.
    pod = restricted_pod(
        "listener", {"image": images.router, "command": ["python", "-c", LISTENER.read_text(), address, "/fleet/key"]}
    )
    pod["spec"]["volumes"].append({"name": "fleet", "secret": {"secretName": f"{fleet.name}-fleet"}})
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "fleet", "mountPath": "/fleet"})
    cluster.apply(pod, fleet.namespace)
    wait_until(lambda: cluster.pod_is_ready("listener", fleet.namespace), "the listener runs")
    numbers = count()

    def heard() -> dict[str, int] | None:
        """Ask something new of whichever engine it is, and return what was heard of that."""
        ask(routers[0], fleet.name, document(f"Overheard {next(numbers)}"))
        lines = cluster.logs("listener", fleet.namespace).splitlines()
        told: dict[str, int] = json.loads(lines[-1]) if lines else {}
        return told if told.get("own", 0) >= 3 else None

    told = wait_until(heard, "who has the key hears the engine")
    assert told is not None
    assert (told["none"], told["another"]) == (0, 0)
    cluster.delete("v1", "Pod", "listener", fleet.namespace)


def test_a_lost_key_is_made_again_when_a_pod_needs_it(cluster: Cluster, installation: Installation) -> None:
    lone = Service(cluster, installation.namespace, "lone")
    lone.apply(router=LIGHT, rollout={"drainSeconds": 0}, resources={"cpu": "100m"})
    lone.wait_until_settled()
    before = key_of(cluster, lone)
    cluster.delete("v1", "Secret", "lone-fleet", lone.namespace)
    before_pods = lone.pod_names("engine") | lone.pod_names("router")
    for role in ("engine", "router"):
        restart(cluster, lone, role)
    wait_until(lambda: key_of(cluster, lone), "the key is made again", MADE_AGAIN_WITHIN_S)
    wait_until(lambda: not before_pods & (lone.pod_names("engine") | lone.pod_names("router")), "the pods are new")
    lone.wait_until_settled()
    assert key_of(cluster, lone) != before
    (router,) = lone.pod_names("router")
    with PodTunnel(cluster, lone.namespace, router) as tunnel:
        wait_until(lambda: follows(tunnel.url, 1), "the new router hears the new engine")
    lone.delete()


def restart(cluster: Cluster, service: Service, role: str) -> None:
    """What `kubectl rollout restart deployment` does."""
    metadata = {"annotations": {"kubectl.kubernetes.io/restartedAt": datetime.now(UTC).isoformat()}}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": f"{service.name}-{role}"}}
    cluster.apply({**deployment, "spec": {"template": {"metadata": metadata}}}, service.namespace)


def key_of(cluster: Cluster, service: Service) -> str:
    """Return the fleet key, Base64; empty: there is none."""
    found = cluster.get("v1", "Secret", f"{service.name}-fleet", service.namespace) or {}
    (key,) = (found.get("data") or {"": ""}).values()
    return str(key)
