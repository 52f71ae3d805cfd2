"""The client against an emulated API server: what it sends and when, and what becomes of each failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.exceptions import ApiException
from pagefleet_operator.apply.kinds import BY_NAME, CHILDREN, LEASE, Kind, children_present
from pagefleet_operator.apply.kube_cluster import PAGE_SIZE, KubeCluster, TokenBucket, cluster_error, connect
from pagefleet_operator.errors import Conflict, NotLeading, Refused, Throttled, Unavailable

from tests.fakes.kube_api import KubeApi

CONFIG, DEPLOYMENT = BY_NAME["ConfigMap"], BY_NAME["Deployment"]


class Fence:
    def __init__(self) -> None:
        self.open = True
        self.seconds = 5.0

    def check(self) -> float:
        if not self.open:
            raise NotLeading("another leads")
        return self.seconds


class Requests:
    def __init__(self) -> None:
        self.done: list[tuple[str, str, int]] = []

    def request_done(self, verb: str, kind: str, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.done.append((verb, kind, status))


class Lab:
    def __init__(self, api: KubeApi, cluster: KubeCluster, fence: Fence, requests: Requests) -> None:
        self.api, self.cluster, self.fence, self.requests = api, cluster, fence, requests


def run(scenario: Callable[[Lab], Awaitable[None]]) -> None:
    async def in_lab() -> None:
        async with KubeApi() as api:
            client, fence, requests = connect(Configuration(host=api.address)), Fence(), Requests()
            try:
                cluster = KubeCluster(client, fence, TokenBucket(1000, 1000), requests)
                await scenario(Lab(api, cluster, fence, requests))
            finally:
                await client.close()

    asyncio.run(in_lab())


def config(name: str = "one", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "1"}, **more}


def test_an_object_is_applied_read_annotated_and_deleted() -> None:
    async def scenario(lab: Lab) -> None:
        made = await lab.cluster.apply(config())
        assert made["metadata"]["managedFields"][0]["manager"] == "pagefleet-operator"
        assert made["metadata"]["managedFields"][0]["operation"] == "Apply"
        await lab.cluster.annotate(CONFIG, "default", "one", {"x/y": "z"})
        await lab.cluster.apply(config(data={"a": "2"}))
        read = await lab.cluster.get(CONFIG, "default", "one")
        assert read is not None
        assert read["data"] == {"a": "2"}
        assert read["metadata"]["annotations"] == {"x/y": "z"}
        await lab.cluster.delete(CONFIG, "default", "one", made["metadata"]["uid"])
        assert await lab.cluster.get(CONFIG, "default", "one") is None
        assert lab.requests.done[0] == ("apply", "ConfigMap", 200)

    run(scenario)


def test_what_another_wrote_is_taken_back() -> None:
    async def scenario(lab: Lab) -> None:
        lab.api.store.create(lab.api.kind("ConfigMap"), "default", config(data={"a": "theirs", "b": "theirs"}))
        assert (await lab.cluster.apply(config()))["data"] == {"a": "1", "b": "theirs"}

    run(scenario)


def test_only_the_object_that_was_seen_is_deleted() -> None:
    async def scenario(lab: Lab) -> None:
        await lab.cluster.apply(config())
        await lab.cluster.delete(CONFIG, "default", "one", "another-uid")
        await lab.cluster.delete(CONFIG, "default", "never-there", "uid")
        assert await lab.cluster.get(CONFIG, "default", "one") is not None

    run(scenario)


def test_the_status_is_merged_and_the_spec_left() -> None:
    async def scenario(lab: Lab) -> None:
        kind = lab.api.kind("Deployment")
        lab.api.store.create(kind, "default", {"metadata": {"name": "one"}, "spec": {"replicas": 2}})
        await lab.cluster.patch_status(DEPLOYMENT, "default", "one", {"replicas": 1})
        await lab.cluster.patch_status(DEPLOYMENT, "default", "one", {"readyReplicas": 1})
        seen = lab.api.store.get(kind, "default", "one")
        assert seen["status"] == {"replicas": 1, "readyReplicas": 1}
        assert seen["spec"] == {"replicas": 2}

    run(scenario)


def test_a_lease_is_created_once_and_replaced_only_as_it_was_read() -> None:
    async def scenario(lab: Lab) -> None:
        body = {"metadata": {"name": "one", "namespace": "default"}, "spec": {"holderIdentity": "a"}}
        made = await lab.cluster.create(LEASE, "default", body)
        with pytest.raises(Conflict):
            await lab.cluster.create(LEASE, "default", body)
        await lab.cluster.replace(LEASE, "default", {**made, "spec": {"holderIdentity": "b"}})
        with pytest.raises(Conflict):
            await lab.cluster.replace(LEASE, "default", made)

    run(scenario)


def test_metadata_is_listed_page_by_page() -> None:
    async def scenario(lab: Lab) -> None:
        kind = lab.api.kind("ConfigMap")
        for number in range(PAGE_SIZE + 3):
            labels = {"app": "a" if number else "b"}
            lab.api.store.create(kind, "default", {"metadata": {"name": f"c{number}", "labels": labels}})
        found = [one["name"] async for one in lab.cluster.list_metadata(CONFIG, "", "app=a")]
        assert len(found) == len(set(found)) == PAGE_SIZE + 2
        assert lab.requests.done.count(("list", "ConfigMap", 200)) == 2

    run(scenario)


def test_events_are_listed_by_what_they_are_about() -> None:
    async def scenario(lab: Lab) -> None:
        for name in ("one", "two"):
            event = {"metadata": {"name": name}, "involvedObject": {"kind": "Pod", "name": name}, "reason": "Failed"}
            lab.api.store.create(lab.api.kind("Event"), "default", event)
        assert [one["metadata"]["name"] for one in await lab.cluster.list_events("default", "Pod", "two")] == ["two"]
        assert len(await lab.cluster.list_events("default", "Pod", "")) == 2
        assert await lab.cluster.list_events("default", "Job", "") == []

    run(scenario)


def test_kinds_that_are_there_are_told_from_those_that_are_not() -> None:
    async def scenario(lab: Lab) -> None:
        absent = Kind("Nothing", "nothings", "v1", "nobody.example.org")
        assert await lab.cluster.kinds_present((DEPLOYMENT, CONFIG, absent)) == {"Deployment", "ConfigMap"}

    run(scenario)


@pytest.mark.parametrize(
    ("status", "error"),
    [(409, Conflict), (403, Refused), (422, Refused), (404, Refused), (500, Unavailable), (503, Unavailable)],
)
def test_a_failure_says_what_kind_it_is(status: int, error: type[Exception]) -> None:
    async def scenario(lab: Lab) -> None:
        lab.api.faults.answer(status, method="PATCH")
        with pytest.raises(error, match="injected") as caught:
            await lab.cluster.apply(config())
        assert getattr(caught.value, "status") == status  # noqa: B009
        assert lab.requests.done == [("apply", "ConfigMap", status)]

    run(scenario)


@pytest.mark.parametrize(("told", "waited"), [(7, 7.0), (None, 1.0), (100_000, 300.0)])
def test_a_pause_that_is_asked_for_is_told(told: int | None, waited: float) -> None:
    async def scenario(lab: Lab) -> None:
        lab.api.faults.answer(429, method="PATCH", retry_after_s=told)
        with pytest.raises(Throttled) as caught:
            await lab.cluster.apply(config())
        assert caught.value.retry_after_s == waited

    run(scenario)


def test_no_answer_is_a_failure_in_time() -> None:
    async def scenario(lab: Lab) -> None:
        lab.fence.seconds = 0.1  # a write may not last longer than the lease
        hanging = lab.api.faults.hang(method="PATCH")
        with pytest.raises(Unavailable, match="apply ConfigMap: TimeoutError"):
            await lab.cluster.apply(config())
        hanging.released.set()
        await lab.api.go_down()
        with pytest.raises(Unavailable):
            await lab.cluster.get(CONFIG, "default", "one")
        assert [status for _, _, status in lab.requests.done] == [0, 0]

    run(scenario)


def test_nothing_is_sent_past_a_closed_fence() -> None:
    async def scenario(lab: Lab) -> None:
        lab.fence.open = False
        for write in (
            lab.cluster.apply(config()),
            lab.cluster.annotate(CONFIG, "default", "one", {}),
            lab.cluster.patch_status(CONFIG, "default", "one", {}),
            lab.cluster.delete(CONFIG, "default", "one", "uid"),
            lab.cluster.create(CONFIG, "default", config()),
            lab.cluster.replace(CONFIG, "default", config()),
        ):
            with pytest.raises(NotLeading):
                await write
        assert lab.api.writes() == []
        assert await lab.cluster.get(CONFIG, "default", "one") is None  # reading is free

    run(scenario)


@pytest.mark.parametrize("body", [None, "", "<html>bad gateway</html>", "[1]", b'{"message": "said", "reason": "R"}'])
def test_an_answer_of_something_else_than_the_api_server_is_understood(body: Any) -> None:
    failure = ApiException(status=502, reason="Bad Gateway")
    failure.body = body
    error = cluster_error(failure)
    assert isinstance(error, Unavailable)
    assert error.message in ("Bad Gateway", "said")


def test_optional_kinds_are_children_where_they_exist() -> None:
    names = {kind.kind for kind in children_present(frozenset({"HTTPRoute"}))}
    assert "HTTPRoute" in names
    assert "ServiceMonitor" not in names
    assert {kind.kind for kind in CHILDREN if not kind.optional} < names
    assert (BY_NAME["Job"].root, BY_NAME["Pod"].root) == ("/apis/batch/v1", "/api/v1")


class Time:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_a_burst_passes_and_what_follows_waits_its_turn() -> None:
    time = Time()
    bucket = TokenBucket(10.0, 3, time.clock, time.sleep)

    async def scenario() -> None:
        for _ in range(6):
            await bucket.take()

    asyncio.run(scenario())
    assert [round(seconds, 6) for seconds in time.slept] == [0.1, 0.2, 0.3]


def test_it_fills_again_up_to_the_burst() -> None:
    time = Time()
    bucket = TokenBucket(10.0, 2, time.clock, time.sleep)

    async def scenario() -> None:
        for _ in range(2):
            await bucket.take()
        time.now = 100.0
        for _ in range(3):
            await bucket.take()

    asyncio.run(scenario())
    assert [round(seconds, 6) for seconds in time.slept] == [0.1]
