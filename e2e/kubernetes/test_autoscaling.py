"""A service that scales itself: to none and back, with its load, as far as a quota lets it; and no request is lost.

One service goes through all of it, so the tests run in this order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from e2e.kubernetes.cluster import Cluster, Images, wait_until
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.load import Load
from e2e.kubernetes.node import kill_processes
from e2e.kubernetes.service import Service
from e2e.kubernetes.test_scale_and_edits import scale
from e2e.kubernetes.tunnel import ServiceTunnel
from tiny.dataset import Exchange

PATIENCE_S = 120
COLD_START_S = 120
FIRST_COMMENT_S = 5
"""After which routers keep the connection of a stream that waits alive."""
SCALING: Mapping[str, Any] = {"max": 1, "target": {"queue": 2}, "scaleToZero": {"after": 15}}
SPEC: Mapping[str, Any] = {
    # Few requests at a time for each engine, so that others wait.
    "engine": {
        "args": ["--num-threads", "1", "--num-kv-blocks", "512", "--max-num-seqs", "4"],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    },
    "router": {
        "replicas": 2,
        "resources": {"cpu": "50m", "memory": "256Mi"},
        "queue": {"coldStartTimeout": COLD_START_S},
    },
    "resources": {"cpu": "100m"},
    "rollout": {"drainSeconds": 20},
}


@pytest.fixture(scope="module")
def elastic(
    cluster: Cluster, images: Images, installation: Installation, namespaces: tuple[str, str, str]
) -> Iterator[Service]:
    """A service in a namespace where nothing else runs."""
    service = Service(cluster, namespaces[1], "elastic")
    service.apply(**SPEC, autoscaling=SCALING)
    yield service
    service.delete()


@pytest.fixture(scope="module")
def url(cluster: Cluster, images: Images, elastic: Service) -> Iterator[str]:
    elastic.wait_for("RouterReady", "AllReady", PATIENCE_S)
    with ServiceTunnel(cluster, images.operator, elastic.namespace, elastic.name) as tunnel:
        yield tunnel.url


@pytest.fixture(scope="module")
def busy(cluster: Cluster, images: Images, elastic: Service) -> Iterator[Load]:
    """More requests than three engines take, however fast they are: few of the clients rest at a time."""
    with Load(cluster, images.operator, elastic, askers=48, streamers=32) as running:
        yield running


def events(service: Service, reason: str) -> list[str]:
    return [event["message"] for event in service.events() if event["reason"] == reason]


def scaling(service: Service) -> dict[str, Any]:
    return dict(service.status.get("scaling") or {})


def wait_for_engines(service: Service, engines: int) -> None:
    """Wait until so many are ready, and no more exist."""

    def so() -> bool:
        names = service.pod_names("engine")
        return len(names) == engines and all(service.cluster.pod_is_ready(one, service.namespace) for one in names)

    try:
        wait_until(so, f"{engines} engines", PATIENCE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}: {scaling(service)}") from None


def test_rests_when_nobody_asks(elastic: Service, url: str) -> None:
    elastic.wait_for("Ready", "Serving", PATIENCE_S)
    message = elastic.wait_for("Ready", "Idle", PATIENCE_S)
    assert "the first one waits for an engine to start" in message
    wait_until(lambda: not elastic.pods("engine"), "no engine is left")
    elastic.wait_for("ScalingActive", "Idle")
    assert elastic.condition("Ready")["status"] == "True"
    assert elastic.status["ready"] == "0/0"
    told = scaling(elastic)
    assert (told["mode"], told["current"], told["desired"], told["reason"]) == ("Internal", 0, 0, "Idle")
    (event,) = wait_until(lambda: events(elastic, "ScaledToZero"), "an event tells of it")
    assert event.startswith("from 1 to 0 engines (Idle): nobody asked for ")
    assert httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"] == elastic.name


def test_the_first_requests_wait_for_an_engine_and_are_answered(
    elastic: Service, url: str, exchanges: Sequence[Exchange]
) -> None:
    def answer(exchange: Exchange) -> str:
        body = {"model": elastic.name, "messages": exchange.messages, "temperature": 0}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=COLD_START_S, trust_env=False)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    def streamed(exchange: Exchange) -> tuple[str, int, float]:
        """Return the text, how many comments kept the connection alive, and the seconds that it took."""
        body = {"model": elastic.name, "messages": exchange.messages, "temperature": 0, "stream": True}
        text, comments, since = "", 0, time.monotonic()
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, timeout=COLD_START_S, trust_env=False
        ) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                comments += line.startswith(":")
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        return text, comments, time.monotonic() - since

    began = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        asked = threads.map(answer, exchanges[:3])
        stream = threads.submit(streamed, exchanges[3])
        assert list(asked) == [one.answer for one in exchanges[:3]]
        text, comments, seconds = stream.result()
    assert text == exchanges[3].answer
    assert comments >= 1 or seconds < FIRST_COMMENT_S + 1, "an engine may start sooner"
    print(f"answered {time.monotonic() - began:.1f} s after it was asked, with no engine then")
    (event,) = wait_until(lambda: events(elastic, "WokenUp"), "an event tells of it")
    assert event.startswith("from 0 to 1 engine (WokenUp): ")
    elastic.wait_for("Ready", "Serving", PATIENCE_S)


def test_adds_engines_up_to_what_a_quota_allows(cluster: Cluster, elastic: Service, busy: Load) -> None:
    wait_for_engines(elastic, 1)
    elastic.wait_for("ScalingActive", "AtMaximum")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods"}}
    pods = len(cluster.list("v1", "Pod", elastic.namespace))
    cluster.apply({**quota, "spec": {"hard": {"pods": str(pods + 1)}}}, elastic.namespace)
    elastic.edit(autoscaling={**SCALING, "max": 3})
    message = elastic.wait_for("ScalingActive", "AtQuota", PATIENCE_S)
    assert message.startswith("2 engines are wanted: ")
    assert f"kubectl -n {elastic.namespace} describe quota" in message
    wait_for_engines(elastic, 2)
    assert (scaling(elastic)["desired"], scaling(elastic)["reason"]) == (2, "AtQuota")
    assert events(elastic, "AtQuota")
    cluster.delete("v1", "ResourceQuota", "pods", elastic.namespace)
    assert busy.go_on().failures == ()


def test_another_operator_goes_on_from_a_killed_one(
    cluster: Cluster, images: Images, privileged: str, installation: Installation, elastic: Service, busy: Load
) -> None:
    wait_until(lambda: installation.leader() in installation.operator_names(), "an operator leads")
    leader = installation.leader()
    (pod,) = (one for one in installation.operators() if one["metadata"]["name"] == leader)
    kill_processes(cluster, images.operator, privileged, pod)
    wait_for_engines(elastic, 3)  # it knows of no quota
    told = wait_until(lambda: scaling(elastic)["current"] == 3 and scaling(elastic), "the status tells of it")
    assert told
    assert told["desired"] == 3
    assert [event for event in events(elastic, "ScaledUp") if event.startswith("from 2 to 3 engines (")]
    assert busy.go_on().failures == ()


def test_advice_is_only_written_and_engines_that_go_lose_nothing(elastic: Service, busy: Load) -> None:
    elastic.edit(autoscaling={**SCALING, "max": 3, "mode": "Advisory"}, replicas=1)
    message = elastic.wait_for("ScalingActive", "Advised")
    wait_for_engines(elastic, 1)
    assert message.startswith("in mode Internal 3 engines would be wanted: ")
    assert (scaling(elastic)["mode"], scaling(elastic)["desired"]) == ("Advisory", 3)
    assert busy.go_on(asked=60, streamed=6).failures == ()


def test_others_scale_in_mode_external(cluster: Cluster, elastic: Service, busy: Load) -> None:
    spec = {name: value for name, value in elastic.spec.items() if name not in ("model", "replicas")}
    elastic.apply(**{**spec, "autoscaling": {"mode": "External"}})
    scale(cluster, elastic, 2)
    elastic.wait_for("ScalingActive", "ScaledOutside")
    wait_for_engines(elastic, 2)
    wait_until(lambda: scaling(elastic)["current"] == 2, "the status tells of it")
    assert (scaling(elastic)["mode"], scaling(elastic)["desired"]) == ("External", 2)
    scale(cluster, elastic, 1)
    wait_for_engines(elastic, 1)
    assert busy.go_on(asked=60, streamed=6).failures == ()
