"""What the watches told is compared with what there is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pagefleet_operator.apply.kinds import BY_NAME, INFERENCE_PROFILE, INFERENCE_SERVICE
from pagefleet_operator.errors import Refused, Unavailable
from pagefleet_operator.handlers.audit import RELIST_S, Auditor, Scope
from pagefleet_operator.handlers.cluster_view import ClusterView, Key

from tests.fakes.kube_operator import writer
from tests.fakes.kube_store_cluster import KINDS, StoreCluster

CONFIG = BY_NAME["ConfigMap"]
SCOPE = Scope((INFERENCE_SERVICE, INFERENCE_PROFILE, CONFIG), ("apps",))
KEY = ("apps", "qwen")
LABELS = {"app.kubernetes.io/managed-by": "pagefleet-operator", "pagefleet.dev/service": "qwen"}


class Lab:
    def __init__(self) -> None:
        self.now = 0.0
        self.cluster, self.view = StoreCluster(), ClusterView()
        self.cluster.add_namespace("apps")
        self.auditor = Auditor(self.cluster, self.view, lambda: self.now)
        self.woken: list[Key] = []

    def config(self, name: str) -> None:
        self.cluster.store.create(KINDS["ConfigMap"], "apps", {"metadata": {"name": name, "labels": LABELS}})

    def show(self, name: str) -> None:
        self.view.note(CONFIG, self.cluster.store.get(KINDS["ConfigMap"], "apps", name))

    def edit(self, name: str, **data: Any) -> None:
        self.cluster.store.merge_patch(KINDS["ConfigMap"], "apps", name, {"data": data}, writer())

    def audit(self) -> None:
        asyncio.run(self.auditor.audit(SCOPE, self.woken.extend))


@pytest.fixture
def lab() -> Lab:
    made = Lab()
    made.config("one")
    made.show("one")
    return made


def test_a_scope_is_every_kind_in_every_namespace() -> None:
    places = Scope((INFERENCE_SERVICE, INFERENCE_PROFILE), ("a", "b")).places()
    assert [(kind.kind, namespace) for kind, namespace in places] == [
        ("InferenceService", "a"),
        ("InferenceService", "b"),
        ("InferenceProfile", ""),
    ]
    assert Scope((CONFIG,), ()).places() == [(CONFIG, "")]


def test_what_is_as_it_was_told_wakes_nobody(lab: Lab) -> None:
    lab.audit()
    assert lab.woken == []
    assert lab.auditor.longest_lag_s() == 0.0


def test_what_is_gone_without_a_word_is_forgotten(lab: Lab) -> None:
    lab.cluster.store.delete(KINDS["ConfigMap"], "apps", "one")
    lab.audit()
    assert lab.woken == [KEY]
    assert lab.view.children(KEY, "") == {}


def test_what_was_told_while_the_list_was_on_its_way_is_kept(lab: Lab) -> None:
    class Late(StoreCluster):
        async def list_metadata(self, kind: Any, namespace: str, selector: str) -> Any:
            async for metadata in lab.cluster.list_metadata(kind, namespace, selector):
                yield metadata
            if kind == CONFIG:
                lab.config("two")
                lab.show("two")

    auditor = Auditor(Late(lab.cluster.store), lab.view, lambda: 0.0)
    asyncio.run(auditor.audit(SCOPE, lab.woken.extend))
    assert lab.woken == []
    assert ("ConfigMap", "two") in lab.view.children(KEY, "")


def test_a_silent_watch_is_behind_until_it_tells(lab: Lab) -> None:
    lab.edit("one", a="1")
    lab.audit()
    lab.now = 50.0
    lab.edit("one", a="2")
    lab.audit()
    assert lab.auditor.longest_lag_s() == 50.0
    lab.show("one")
    lab.audit()
    assert lab.auditor.longest_lag_s() == 0.0


def test_an_api_server_that_does_not_answer_is_an_error_and_forgets_nothing(lab: Lab) -> None:
    lab.cluster.down = True
    with pytest.raises(Unavailable):
        lab.audit()
    assert ("ConfigMap", "one") in lab.view.children(KEY, "")


def test_what_must_not_be_listed_holds_up_nothing_else(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    class Narrow(StoreCluster):
        async def list_metadata(self, kind: Any, namespace: str, selector: str) -> Any:
            if kind == CONFIG:
                raise Refused("configmaps is forbidden", status=403, reason="Forbidden")
            async for metadata in lab.cluster.list_metadata(kind, namespace, selector):
                yield metadata

    auditor = Auditor(Narrow(lab.cluster.store), lab.view, lambda: 0.0)
    asyncio.run(auditor.audit(SCOPE, lab.woken.extend))
    asyncio.run(auditor.wait_until_seen(SCOPE))
    assert lab.woken == []
    assert ("ConfigMap", "one") in lab.view.children(KEY, "")
    assert "ConfigMap in apps cannot be listed: configmaps is forbidden" in caplog.text


def test_a_start_is_complete_when_all_that_was_listed_was_seen(lab: Lab) -> None:
    async def scenario() -> None:
        lab.config("two")
        waiting = asyncio.create_task(lab.auditor.wait_until_seen(SCOPE, pause_s=0.001))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        lab.show("two")
        await asyncio.wait_for(waiting, 120)

    asyncio.run(scenario())


def test_a_start_does_not_wait_for_what_went_meanwhile(lab: Lab) -> None:
    async def scenario() -> None:
        lab.config("two")
        waiting = asyncio.create_task(lab.auditor.wait_until_seen(SCOPE, pause_s=0.001))
        await asyncio.sleep(0.01)
        lab.cluster.store.delete(KINDS["ConfigMap"], "apps", "two")  # before any watch began
        lab.now += RELIST_S
        await asyncio.wait_for(waiting, 120)

    asyncio.run(scenario())
