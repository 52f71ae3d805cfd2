"""Engines over two pods each, which a LeaderWorkerSet makes: right answers, and groups that come and go as a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import openai
import pytest
from pagefleet_protocol.kube_names import LABEL_REVISION

from e2e.kubernetes.cluster import Cluster, Images, wait_until
from e2e.kubernetes.conftest import FLEET
from e2e.kubernetes.groups import GroupController, is_installed
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.load import Load
from e2e.kubernetes.node import kill_processes
from e2e.kubernetes.service import Service
from e2e.kubernetes.test_models import REPOSITORY, answers, hub
from tests.fakes.leader_worker_set import GROUP, NAME, NODE
from tiny.dataset import Exchange

__all__ = ["hub"]
SPREAD: Mapping[str, Any] = {
    **FLEET,
    "engine": {**FLEET["engine"], "kvOffload": {"memory": "64Mi"}},
    "nodes": 2,
    "parallelism": {"tensor": 2},
}
PATIENCE_S = 600
"""On a small node six engines' processes start at once, and in a rollout three groups one after the other."""
Pod = dict[str, Any]


@pytest.fixture(scope="module")
def groups(cluster: Cluster, installation: Installation) -> Iterator[GroupController]:
    """The resource comes to a cluster whose operator runs already, as with those who need it later."""
    assert installation.operators()
    if is_installed(cluster):
        pytest.skip("the cluster has LeaderWorkerSets of its own, and these tests play their controller")
    with GroupController(cluster) as running:
        yield running


@pytest.fixture(scope="module")
def spread(cluster: Cluster, installation: Installation, groups: GroupController) -> Iterator[Service]:
    """Two engines of two ranks, each rank in a pod of its own."""
    assert groups
    service = Service(cluster, installation.namespace, "spread")
    service.apply(**SPREAD)
    service.wait_until_settled(PATIENCE_S)
    yield service
    service.delete()
    wait_until(lambda: not groups_of(cluster, service), "its groups are gone", PATIENCE_S)


@pytest.fixture
def load(cluster: Cluster, images: Images, spread: Service) -> Iterator[Load]:
    with Load(cluster, images.operator, spread) as running:
        yield running


@pytest.fixture
def copies(cluster: Cluster, installation: Installation, groups: GroupController, hub: str) -> Iterator[Service]:
    """An engine of two data ranks that share a mixture's experts, each in a pod of its own."""
    assert groups
    service = Service(cluster, installation.namespace, "copies")
    model = {"uri": f"hf://{REPOSITORY}", "revision": "mixture", "endpoint": f"http://hub.{service.namespace}.svc:8000"}
    service.apply(**{**SPREAD, "replicas": 1, "model": model, "parallelism": {"data": 2, "expert": True}})
    service.wait_until_settled(PATIENCE_S)
    assert service.status["resolved"]["revision"] != hub
    yield service
    service.delete()
    wait_until(lambda: not groups_of(cluster, service), "its group is gone", PATIENCE_S)


def groups_of(cluster: Cluster, service: Service) -> dict[int, dict[int, Pod]]:
    """Return the pods of each group by their node's number, without those on their way out."""
    found: dict[int, dict[int, Pod]] = defaultdict(dict)
    for pod in cluster.list("v1", "Pod", service.namespace, f"pagefleet.dev/service={service.name},{NAME}"):
        if not pod["metadata"].get("deletionTimestamp"):
            labels = pod["metadata"]["labels"]
            found[int(labels[GROUP])][int(labels[NODE])] = pod
    return dict(found)


def uids(pods: Mapping[int, Pod]) -> dict[int, str]:
    return {node: str(pod["metadata"]["uid"]) for node, pod in pods.items()}


def is_anew(cluster: Cluster, service: Service, before: Mapping[int, Pod]) -> bool:
    """Whether both pods of a group are there, and others than before."""
    group = int(before[0]["metadata"]["labels"][GROUP])
    now = set(uids(groups_of(cluster, service).get(group, {})).values())
    return len(now) == 2 and now.isdisjoint(uids(before).values())


def tokens(url: str, model: str, prompts: Sequence[str]) -> list[list[str]]:
    """Return the tokens that continue each prompt."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as asked:
        answers = [
            asked.completions.create(model=model, prompt=one, max_tokens=24, temperature=0, logprobs=0)
            for one in prompts
        ]
    return [answer.choices[0].logprobs.tokens for answer in answers]  # type: ignore[union-attr, misc]


def test_two_pods_answer_as_one_does(
    cluster: Cluster,
    spread: Service,
    served: Service,
    service_url: Callable[..., str],
    exchanges: Sequence[Exchange],
) -> None:
    assert {group: set(pods) for group, pods in groups_of(cluster, spread).items()} == {0: {0, 1}, 1: {0, 1}}
    assert len(spread.pods("engine")) == 2, "only leaders are engines"
    served.wait_until_settled()
    prompts = [str(one.messages[-1]["content"]) for one in exchanges[:8]]
    one_pod, two_pods = (
        tokens(service_url(f"{one.name}.{one.namespace}.svc"), one.name, prompts) for one in (served, spread)
    )
    assert all(one_pod)
    assert two_pods == one_pod


def test_a_rank_that_is_killed_takes_its_group_and_no_answer(
    cluster: Cluster, images: Images, privileged: str, spread: Service, load: Load
) -> None:
    before = groups_of(cluster, spread)
    kill_processes(cluster, images.operator, privileged, before[1][1])
    told: list[str] = []

    def anew() -> bool:
        told.append(spread.condition("EngineReady").get("message", ""))
        return is_anew(cluster, spread, before[1])

    wait_until(anew, "both pods of the group are others", PATIENCE_S)
    spread.wait_until_settled(PATIENCE_S)
    assert any("spread-engine-1-1" in one for one in told), set(told)
    assert uids(groups_of(cluster, spread)[0]) == uids(before[0])
    assert load.go_on().failures == ()


def test_a_rollout_replaces_whole_groups(cluster: Cluster, spread: Service, load: Load) -> None:
    before = groups_of(cluster, spread)
    spread.edit(engine={**SPREAD["engine"], "maxModelLen": 1536})
    spread.wait_for("Progressing", "RollingOut")

    def settled() -> bool:
        found = groups_of(cluster, spread)
        for pods in found.values():
            assert len({pod["metadata"]["labels"][LABEL_REVISION] for pod in pods.values()}) == 1
        return spread.is_settled and len(found) == 2  # who follows in the one too many goes after its leader

    wait_until(settled, "all groups are of the new revision", PATIENCE_S)
    after = groups_of(cluster, spread)
    assert {group: set(pods) for group, pods in after.items()} == {0: {0, 1}, 1: {0, 1}}
    for group, pods in after.items():
        assert set(uids(pods).values()).isdisjoint(uids(before[group]).values())
    assert load.go_on().failures == ()


def test_copies_on_two_nodes_have_each_expert_once_and_are_lost_together(
    cluster: Cluster, images: Images, privileged: str, copies: Service, exchanges: Sequence[Exchange]
) -> None:
    before = groups_of(cluster, copies)
    assert {group: set(pods) for group, pods in before.items()} == {0: {0, 1}}
    for one in exchanges[:2]:
        answers(cluster, images, copies, one)
    kill_processes(cluster, images.operator, privileged, before[0][1])
    wait_until(lambda: is_anew(cluster, copies, before[0]), "both pods are others", PATIENCE_S)
    copies.wait_until_settled(PATIENCE_S)
    answers(cluster, images, copies, exchanges[0])


def test_without_the_definition_it_says_so_until_it_is_there(
    groups: GroupController, cluster: Cluster, installation: Installation
) -> None:
    late = Service(cluster, installation.namespace, "late")
    with groups.absent():
        late.apply(**{**SPREAD, "replicas": 1})
        message = late.wait_for("Degraded", "KindMissing")
        assert "LeaderWorkerSet" in message
    late.wait_until_settled(PATIENCE_S)
    late.delete()
