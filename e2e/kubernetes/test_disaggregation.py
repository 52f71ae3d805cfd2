"""Prefill and decode engines in pods of their own: K/V goes from one to the other, and nothing is lost meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from pagefleet_protocol.kube_names import LABEL_REVISION

from e2e.kubernetes.cluster import Cluster, Images, wait_until
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.load import STREAMERS, Load
from e2e.kubernetes.node import kill_processes
from e2e.kubernetes.service import Service
from e2e.kubernetes.test_exact_prefix import metric
from e2e.kubernetes.test_troubles import LIGHT
from e2e.kubernetes.tunnel import PodTunnel

RECEIVED = "pagefleet_engine_kv_transfer_received_bytes_total"
LINK_TOLD_WITHIN_S = 120
SETTLED_WITHIN_S = 420
SENTENCES = 24
"""Of each prompt: some 350 tokens."""
BASE: Mapping[str, Any] = {
    # Threads that spin for each other starve on a shared machine.
    "engine": {"env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
    "router": LIGHT,
    "resources": {"cpu": "100m"},
    "rollout": {"drainSeconds": 20},
}
PAIR: Mapping[str, Any] = {"threshold": 0}
TWO_PAIRS: Mapping[str, Any] = {**PAIR, "prefill": {"replicas": 2}, "decode": {"replicas": 2}}


@pytest.fixture(scope="module")
def service(cluster: Cluster, installation: Installation) -> Iterator[Service]:
    found = Service(cluster, installation.namespace, "apart")
    yield found
    found.delete()


def settle(service: Service, disaggregation: Mapping[str, Any]) -> None:
    """Have so many engines, linked; their settings stay as a test left them, as each change replaces them all."""
    if service.spec.get("disaggregation") != disaggregation:
        service.apply(**{**BASE, **service.spec, "disaggregation": disaggregation})
    service.wait_until_settled(SETTLED_WITHIN_S)
    linked(service)


def linked(service: Service) -> str:
    return service.wait_for("KVLinkReady", "KVLinked", LINK_TOLD_WITHIN_S)


@pytest.fixture
def pair(service: Service) -> Service:
    """One engine of each part."""
    settle(service, PAIR)
    return service


@pytest.fixture
def two_pairs(service: Service) -> Service:
    """Two engines of each part."""
    settle(service, TWO_PAIRS)
    return service


@pytest.fixture
def load(cluster: Cluster, images: Images, service: Service) -> Iterator[Load]:
    """Long prompts, each of them new. Ask for the service before this."""
    with Load(cluster, images.operator, service, sentences=SENTENCES) as running:
        yield running


def received(cluster: Cluster, service: Service) -> float:
    """Return the bytes of K/V that decode engines have got."""
    total = 0.0
    for name in service.pod_names("decode"):
        with PodTunnel(cluster, service.namespace, name) as tunnel:
            total += metric(tunnel.url, RECEIVED)
    return total


def revisions(cluster: Cluster, service: Service) -> Mapping[str, tuple[int, int]]:
    """Return the engines that are asked for of each part, by revision."""
    found: dict[str, dict[str, int]] = {}
    for one in cluster.list("apps/v1", "Deployment", service.namespace, f"pagefleet.dev/service={service.name}"):
        marks = one["metadata"]["labels"]
        if role := marks.get("pagefleet.dev/role"):
            found.setdefault(marks[LABEL_REVISION], {})[role] = one["spec"]["replicas"]
    return {name: (counts.get("prefill", 0), counts.get("decode", 0)) for name, counts in found.items()}


def test_two_braces_more_than_five_lines(cluster: Cluster, installation: Installation) -> None:
    service = Service(cluster, installation.namespace, "braces")
    service.apply(disaggregation={})
    service.wait_until_settled(SETTLED_WITHIN_S)
    message = linked(service)
    reasons = {one["type"]: one["reason"] for one in service.status["conditions"]}
    assert (reasons["PrefillReady"], reasons["DecodeReady"]) == ("AllReady", "AllReady"), reasons
    assert "1 prefill engine" in message
    assert service.status["ready"] == "2/2"
    (revision,) = revisions(cluster, service)
    assert revisions(cluster, service) == {revision: (1, 1)}
    left = service.what_is_left()
    for part in ("prefill", "decode"):
        assert {f"Deployment braces-{part}-{revision}", f"NetworkPolicy braces-{part}"} <= set(left)
    assert "Service braces-prefill" in left
    service.delete()
    wait_until(lambda: not service.what_is_left(), "everything goes with the service", 120)
    assert cluster.get("v1", "Secret", "braces-fleet", service.namespace) is None


def test_prompts_are_computed_by_the_other_part(cluster: Cluster, pair: Service, load: Load) -> None:
    before = received(cluster, pair)
    load.go_on(asked=30)
    wait_until(lambda: received(cluster, pair) > before, "K/V goes from prefill to decode engines")
    assert load.account().failures == ()


def test_no_request_is_lost_with_a_prefill_engine(
    cluster: Cluster, images: Images, privileged: str, two_pairs: Service, load: Load
) -> None:
    load.go_on()
    kill_processes(cluster, images.operator, privileged, two_pairs.pods("prefill")[0])
    load.go_on(asked=30, streamed=4)
    two_pairs.wait_until_settled(SETTLED_WITHIN_S)
    before = received(cluster, two_pairs)
    load.go_on(asked=30)
    wait_until(lambda: received(cluster, two_pairs) > before, "K/V moves again")
    assert load.account().failures == ()


def test_a_killed_decode_engine_fails_only_the_streams_that_it_had(
    cluster: Cluster, images: Images, privileged: str, two_pairs: Service, load: Load
) -> None:
    before = load.go_on()
    kill_processes(cluster, images.operator, privileged, two_pairs.pods("decode")[0])
    after = load.go_on(asked=30, streamed=4)
    lost = after.failures[len(before.failures) :]
    assert not [one for one in lost if " stream:" not in one], lost
    assert len(lost) <= STREAMERS, lost
    two_pairs.wait_until_settled(SETTLED_WITHIN_S)
    linked(two_pairs)
    assert load.go_on().failures == after.failures


def test_pairs_are_replaced_together(cluster: Cluster, two_pairs: Service, load: Load) -> None:
    """Every revision that serves has both parts, at all times, and no request is lost."""
    engines = two_pairs.pod_names("engine")
    (old,) = revisions(cluster, two_pairs)
    seen: list[Mapping[str, tuple[int, int]]] = []
    two_pairs.edit(engine={**two_pairs.spec["engine"], "maxModelLen": 2000})

    def replaced() -> bool:
        if (now := revisions(cluster, two_pairs)) not in seen[-1:]:
            seen.append(now)
        return bool(now) and old not in now and two_pairs.is_settled

    wait_until(replaced, "the new revision serves alone", SETTLED_WITHIN_S)
    assert all(min(sum(one) for one in zip(*now.values(), strict=True)) >= 2 for now in seen), seen
    both = [now for now in seen if len(now) == 2]
    assert both, seen
    for now, after in pairwise(seen):
        # Two Deployments are two writes, so that one is seen without the other, for a moment.
        lone = [name for name, counts in now.items() if 0 in counts]
        assert not [name for name in lone if after.get(name, (0, 0)).count(0) == 1], seen
    assert not engines & two_pairs.pod_names("engine")
    assert load.go_on().failures == ()


def test_another_fleet_key_loses_no_request(cluster: Cluster, two_pairs: Service, load: Load) -> None:
    engines, routers = two_pairs.pod_names("engine"), two_pairs.pod_names("router")
    assert "fleetKey" not in two_pairs.spec
    two_pairs.edit(fleetKey=2)
    wait_until(lambda: cluster.get("v1", "Secret", "apart-fleet-2", two_pairs.namespace), "another key is made")
    wait_until(
        lambda: not engines & two_pairs.pod_names("engine") and not routers & two_pairs.pod_names("router"),
        "engines and routers are others",
        SETTLED_WITHIN_S,
    )
    two_pairs.wait_until_settled(SETTLED_WITHIN_S)
    linked(two_pairs)
    before = received(cluster, two_pairs)
    load.go_on(asked=30)
    wait_until(lambda: received(cluster, two_pairs) > before, "K/V goes with the new key")
    assert load.account().failures == ()


def test_each_part_has_its_own_number(cluster: Cluster, two_pairs: Service, load: Load) -> None:
    (revision,) = revisions(cluster, two_pairs)
    engines = two_pairs.pod_names("engine")
    two_pairs.edit(disaggregation={**two_pairs.spec["disaggregation"], "prefill": {"replicas": 1}})
    wait_until(lambda: revisions(cluster, two_pairs) == {revision: (1, 2)}, "one prefill engine goes")
    two_pairs.wait_until_settled(SETTLED_WITHIN_S)
    assert two_pairs.pod_names("engine") < engines, "a number is no setting: the others stay"
    assert two_pairs.status["ready"] == "3/3"
    assert load.go_on().failures == ()


def test_the_way_out_and_in_again_has_no_gap(cluster: Cluster, pair: Service, load: Load) -> None:
    pair.apply(**{field: value for field, value in pair.spec.items() if field != "disaggregation"})
    wait_until(lambda: not revisions(cluster, pair), "engines for whole requests replace both parts", SETTLED_WITHIN_S)
    pair.wait_until_settled(SETTLED_WITHIN_S)
    assert not {"PrefillReady", "KVLinkReady"} & {one["type"] for one in pair.status["conditions"]}
    wait_until(lambda: not any("-prefill" in one for one in pair.what_is_left()), "nothing of prefill engines is left")
    assert load.go_on().failures == ()
    settle(pair, PAIR)
    wait_until(lambda: not cluster.get("apps/v1", "Deployment", "apart-engine", pair.namespace), "whole ones go")
    assert load.go_on().failures == ()
