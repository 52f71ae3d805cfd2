"""The emulated API server: what handlers and clients rely on, and every fault it can play."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest
from kubernetes.aio.client import ApiException

from tests.fakes.kube_api import KubeApi
from tests.fakes.kube_clients import dynamic_client, kopf_operator
from tests.fakes.kube_kinds import SERVICE_MONITOR

SERVICES = "/apis/pagefleet.dev/v1alpha1/namespaces/default/inferenceservices"
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
SERVICE = {"metadata": {"name": "qwen"}, "spec": {"model": {"uri": "builtin://tiny"}}}


def against_server(test: Callable[[KubeApi, aiohttp.ClientSession], Awaitable[None]]) -> Callable[[], None]:
    """Run an asynchronous test with a server and a plain HTTP client."""

    async def run() -> None:
        async with KubeApi() as api, aiohttp.ClientSession(api.address) as http:
            await asyncio.wait_for(test(api, http), 120)

    def as_test() -> None:
        asyncio.run(run())

    as_test.__name__ = test.__name__
    return as_test


async def events(http: aiohttp.ClientSession, path: str, **params: str) -> AsyncGenerator[dict[str, Any], None]:
    async with http.get(path, params={"watch": "true", **params}) as response:
        async for line in response.content:
            yield json.loads(line)


async def create(http: aiohttp.ClientSession, path: str, document: dict[str, Any]) -> dict[str, Any]:
    async with http.post(path, json=document) as response:
        assert response.status == 201, await response.text()
        return dict(await response.json())


async def until(condition: Callable[[], Any], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        await asyncio.sleep(0.01)


@against_server
async def test_objects_get_identity_and_versions(api: KubeApi, http: aiohttp.ClientSession) -> None:
    made = await create(http, SERVICES, SERVICE)
    async with http.patch(f"{SERVICES}/qwen", json={"spec": {"replicas": 2}}) as response:
        changed = await response.json()
    assert made["metadata"]["uid"] == changed["metadata"]["uid"]
    assert int(changed["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    assert (made["metadata"]["generation"], changed["metadata"]["generation"]) == (1, 2)
    assert changed["spec"] == {"model": {"uri": "builtin://tiny"}, "replicas": 2}


@against_server
async def test_status_and_the_rest_are_written_apart(api: KubeApi, http: aiohttp.ClientSession) -> None:
    made = await create(http, SERVICES, {**SERVICE, "status": {"ready": "1/1"}})
    async with http.patch(f"{SERVICES}/qwen", json={"status": {"ready": "1/1"}}) as response:
        ignored = await response.json()
    async with http.patch(f"{SERVICES}/qwen/status", json={"spec": {"x": 1}, "status": {"ready": "0/1"}}) as response:
        written = await response.json()
    assert "status" not in made
    assert ignored["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    assert (written["status"], written["spec"]) == ({"ready": "0/1"}, SERVICE["spec"])
    assert written["metadata"]["generation"] == 1


@against_server
async def test_two_writers_of_a_lease_conflict(api: KubeApi, http: aiohttp.ClientSession) -> None:
    path = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
    lease = await create(http, path, {"metadata": {"name": "leader"}, "spec": {"holderIdentity": "a"}})
    answers = []
    for holder in ("b", "c"):
        async with http.put(f"{path}/leader", json={**lease, "spec": {"holderIdentity": holder}}) as response:
            answers.append((response.status, await response.json()))
    assert [status for status, _ in answers] == [200, 409]
    assert answers[1][1]["reason"] == "Conflict"
    assert api.store.get(api.kind("Lease"), "default", "leader")["spec"] == {"holderIdentity": "b"}


@against_server
async def test_a_watch_tells_what_was_missed_and_what_comes(api: KubeApi, http: aiohttp.ClientSession) -> None:
    first = await create(http, SERVICES, SERVICE)
    await create(http, SERVICES, {**SERVICE, "metadata": {"name": "second", "labels": {"team": "a"}}})
    watch = events(http, SERVICES, resourceVersion=first["metadata"]["resourceVersion"])
    labelled = events(http, SERVICES, resourceVersion="0", labelSelector="team=a")
    missed = await anext(watch)
    known = await anext(labelled)
    api.set_status("InferenceService", "default", "second", {"ready": "1/1"})
    async with http.patch(f"{SERVICES}/second", json={"metadata": {"labels": {"team": "b"}}}):
        pass
    told = [(event["type"], event["object"]["metadata"]["name"]) for event in (missed, await anext(watch))]
    assert told == [("ADDED", "second"), ("MODIFIED", "second")]
    assert [known["type"], (await anext(labelled))["type"], (await anext(labelled))["type"]] == [
        "ADDED",
        "MODIFIED",
        "DELETED",
    ]
    await watch.aclose()
    await labelled.aclose()
    await until(lambda: not api.watches)


@against_server
async def test_what_an_object_owns_goes_with_it(api: KubeApi, http: aiohttp.ClientSession) -> None:
    owner = await create(http, SERVICES, SERVICE)
    reference = {"kind": "InferenceService", "name": "qwen", "uid": owner["metadata"]["uid"]}
    await create(http, CONFIG_MAPS, {"metadata": {"name": "owned", "ownerReferences": [reference]}})
    async with http.delete(f"{SERVICES}/qwen") as response:
        assert response.status == 200
    async with http.get(f"{CONFIG_MAPS}/owned") as response:
        assert (response.status, (await response.json())["reason"]) == (404, "NotFound")


@against_server
async def test_a_namespace_must_exist_and_takes_its_objects_along(api: KubeApi, http: aiohttp.ClientSession) -> None:
    path = CONFIG_MAPS.replace("default", "team")
    async with http.post(path, json={"metadata": {"name": "a"}}) as response:
        assert response.status == 404
    api.add_namespace("team")
    await create(http, path, {"metadata": {"name": "a"}})
    async with http.delete("/api/v1/namespaces/team") as response:
        assert response.status == 200
    assert not list(api.store.all_of(api.kind("ConfigMap")))


@against_server
async def test_lists_come_in_pages(api: KubeApi, http: aiohttp.ClientSession) -> None:
    for number in range(5):
        await create(http, CONFIG_MAPS, {"metadata": {"name": f"c{number}"}})
    names, token = [], ""
    for _ in range(3):
        async with http.get(CONFIG_MAPS, params={"limit": "2", "continue": token}) as response:
            page = await response.json()
        names += [item["metadata"]["name"] for item in page["items"]]
        token = page["metadata"]["continue"]
    assert (names, token) == ([f"c{number}" for number in range(5)], "")
    assert page["kind"] == "ConfigMapList"
    assert "kind" not in page["items"][0]


@against_server
async def test_a_kind_is_served_once_it_is_installed(api: KubeApi, http: aiohttp.ClientSession) -> None:
    path = "/apis/monitoring.coreos.com/v1/namespaces/default/servicemonitors"
    async with http.get(path) as response:
        assert response.status == 404
    api.serve(SERVICE_MONITOR)
    await create(http, path, {"metadata": {"name": "qwen"}})
    async with http.get("/apis/monitoring.coreos.com/v1") as response:
        assert [one["name"] for one in (await response.json())["resources"]] == ["servicemonitors"]


@against_server
async def test_faults_befall_what_they_name(api: KubeApi, http: aiohttp.ClientSession) -> None:
    api.faults.answer(429, method="GET", path="/configmaps", times=2, skip=1, retry_after_s=3)
    seen = []
    for path in (CONFIG_MAPS, SERVICES, CONFIG_MAPS, CONFIG_MAPS, CONFIG_MAPS):
        async with http.get(path) as response:
            seen.append((response.status, response.headers.get("Retry-After")))
    assert seen == [(200, None), (200, None), (429, "3"), (429, "3"), (200, None)]


@against_server
async def test_a_request_hangs_until_it_is_released(api: KubeApi, http: aiohttp.ClientSession) -> None:
    fault = api.faults.hang(method="POST", path="/configmaps")
    writing = asyncio.create_task(create(http, CONFIG_MAPS, {"metadata": {"name": "late"}}))
    await fault.hit.wait()
    assert not list(api.store.all_of(api.kind("ConfigMap")))
    fault.released.set()
    assert (await writing)["metadata"]["name"] == "late"


@against_server
async def test_a_server_that_was_away_has_kept_its_objects(api: KubeApi, http: aiohttp.ClientSession) -> None:
    await create(http, CONFIG_MAPS, {"metadata": {"name": "kept"}})
    watch = events(http, CONFIG_MAPS)
    await anext(watch)
    await api.go_down()
    with pytest.raises(aiohttp.ClientError):
        await anext(watch)
    with pytest.raises(aiohttp.ClientConnectorError):
        await http.get(CONFIG_MAPS)
    await api.come_back()
    async with http.get(f"{CONFIG_MAPS}/kept") as response:
        assert response.status == 200


@against_server
async def test_watches_are_cut_silenced_and_expired(api: KubeApi, http: aiohttp.ClientSession) -> None:
    made = await create(http, CONFIG_MAPS, {"metadata": {"name": "a"}})
    silent, expired, cut = (events(http, CONFIG_MAPS) for _ in range(3))
    await anext(silent)
    assert api.silence_watches("/configmaps") == 1
    await anext(expired)
    assert api.expire_watches("/nothing") == 0
    assert api.expire_watches() == 2
    assert (await anext(expired))["object"]["code"] == 410
    old = events(http, CONFIG_MAPS, resourceVersion=str(int(made["metadata"]["resourceVersion"]) - 1))
    assert (await anext(old))["object"]["reason"] == "Expired"
    await anext(cut)
    assert api.cut_watches() == 2
    for watch in (silent, cut):
        with pytest.raises(aiohttp.ClientError):
            await anext(watch)


def test_the_dynamic_client_applies(tmp_path: Path) -> None:
    async def run() -> None:
        async with KubeApi() as api, dynamic_client(api, tmp_path / "discovery.json") as client:
            deployments = await client.resources.get(api_version="apps/v1", kind="Deployment")
            body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "qwen-engine"}}
            wanted = {**body, "spec": {"replicas": 2}}
            applied = [
                await deployments.server_side_apply(
                    body=wanted, namespace="default", field_manager="pagefleet-operator", force_conflicts=True
                )
                for _ in range(2)
            ]
            assert applied[0].metadata.resourceVersion == applied[1].metadata.resourceVersion
            assert applied[0].metadata.managedFields[0].manager == "pagefleet-operator"
            api.faults.answer(409, method="PATCH", path="/deployments/")
            with pytest.raises(ApiException) as refused:
                await deployments.server_side_apply(body=wanted, namespace="default", field_manager="other")
            assert refused.value.status == 409

    asyncio.run(run())


def test_kopf_indexes_and_events_run_against_it() -> None:
    registry = kopf.OperatorRegistry()
    seen: list[tuple[str | None, str, int]] = []

    @kopf.index("pods", id="pods", registry=registry)
    async def pods(name: str, **_: Any) -> dict[str, str]:
        return {"all": name}

    @kopf.on.event("pagefleet.dev", "v1alpha1", "inferenceservices", registry=registry)
    async def changed(*, event: Any, name: Any, **indexes: Any) -> None:
        seen.append((event["type"], name, len(list(indexes["pods"].get("all", [])))))

    async def run() -> None:
        async with KubeApi() as api:
            api.add("Pod", {"metadata": {"name": "p"}, "status": {"phase": "Running"}})
            api.add("InferenceService", SERVICE)
            async with kopf_operator(api, registry):
                await until(lambda: seen)
                api.set_status("InferenceService", "default", "qwen", {"ready": "1/1"})
                await until(lambda: len(seen) == 2)
                api.cut_watches("/inferenceservices")
                api.add("InferenceService", {**SERVICE, "metadata": {"name": "second"}})
                await until(lambda: len(seen) == 3)
        assert seen == [(None, "qwen", 1), ("MODIFIED", "qwen", 1), ("ADDED", "second", 1)]
        assert not api.writes()

    asyncio.run(run())
