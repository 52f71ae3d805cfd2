"""What is applied, what is left alone, and what is not applied over and over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from pagefleet_operator.apply.applier import FIGHT_APPLIES, FIGHT_WINDOW_S, Applied, Applier
from pagefleet_operator.errors import Refused, Unavailable
from pagefleet_operator.plan.observed import Child, ChildKey
from pagefleet_operator.render.drift import differences

from tests.fakes.kube_store_cluster import KINDS, StoreCluster

SERVICE = ("apps", "qwen")


class Lab:
    def __init__(self) -> None:
        self.now = 0.0
        self.cluster = StoreCluster()
        self.cluster.add_namespace("apps")
        self.applier = Applier(self.cluster, differences, lambda: self.now)

    def make_so(self, *objects: dict[str, Any], delete: tuple[ChildKey, ...] = ()) -> Applied:
        return asyncio.run(self.applier.make_so(SERVICE, objects, self.children(), delete))

    def children(self) -> Mapping[ChildKey, Child]:
        found = {}
        for (kind, where, name), entry in self.cluster.store._entries.items():
            if where == "apps":
                ours = entry.document["metadata"].get("labels", {}).get("ours") == "yes"
                found[kind.name, name] = Child(entry.document, ours)
        return found

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return self.cluster.store.get(KINDS[kind], "apps", name)

    def applies(self) -> int:
        return sum(verb == "apply" for verb, _, _ in self.cluster.requests)


def body(kind: str = "ConfigMap", name: str = "one", wanted: str = "1", **more: Any) -> dict[str, Any]:
    annotations = {"pagefleet.dev/applied": wanted}
    metadata = {"name": name, "namespace": "apps", "labels": {"ours": "yes"}, "annotations": annotations}
    version = {"ConfigMap": "v1", "Deployment": "apps/v1", "ServiceAccount": "v1", "Job": "batch/v1"}[kind]
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **more}


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_what_pods_need_is_applied_before_the_pods(lab: Lab) -> None:
    done = lab.make_so(body("Deployment", "d"), body("ConfigMap", "c"), body("ServiceAccount", "s"))
    assert done == Applied(written=3)
    assert [name for _, _, name in lab.cluster.requests] == ["s", "c", "d"]


class Waiting(StoreCluster):
    """Answers no write before as many are under way as it waits for."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self.under_way = asyncio.Barrier(together)

    async def apply(self, body: Mapping[str, Any]) -> dict[str, Any]:
        await self.under_way.wait()
        return await super().apply(body)

    async def delete(self, kind: Any, namespace: str, name: str, uid: str) -> None:
        await self.under_way.wait()
        await super().delete(kind, namespace, name, uid)


def test_objects_of_one_kind_are_written_together() -> None:
    async def both() -> list[Applied]:
        cluster = Waiting(2)
        cluster.add_namespace("apps")
        applier, pair = Applier(cluster, differences), [body("Deployment", name) for name in ("prefill", "decode")]
        made = await applier.make_so(SERVICE, pair, {}, ())
        children = {
            ("Deployment", name): Child(cluster.store.get(KINDS["Deployment"], "apps", name), True)
            for name in ("prefill", "decode")
        }
        return [made, await applier.make_so(SERVICE, (), children, tuple(children))]

    async def in_time() -> list[Applied]:
        async with asyncio.timeout(120):
            return await both()

    assert asyncio.run(in_time()) == [Applied(written=2), Applied(written=2)]


def test_no_answer_about_one_leaves_none_of_its_kind_under_way(lab: Lab) -> None:
    def gate(verb: str, kind: str, name: str) -> None:
        if name == "one":
            raise Unavailable("no answer")

    lab.cluster.gate = gate
    with pytest.raises(Unavailable):
        lab.make_so(body("ConfigMap", "one"), body("ConfigMap", "two"), body("Deployment", "d"))
    assert [name for _, _, name in lab.cluster.requests] == ["one", "two"]
    assert lab.get("ConfigMap", "two")["metadata"]["name"] == "two"


def test_what_is_as_wanted_is_left_alone(lab: Lab) -> None:
    lab.make_so(body(data={"a": "1"}))
    assert lab.make_so(body(data={"a": "1"})) == Applied()
    assert lab.make_so(body(data={"a": "2"}, wanted="2")).written == 1


def test_what_somebody_else_has_is_not_touched(lab: Lab) -> None:
    lab.cluster.store.create(KINDS["ConfigMap"], "apps", {"metadata": {"name": "one"}, "data": {"theirs": "1"}})
    done = lab.make_so(body(data={"a": "1"}), delete=(("ConfigMap", "one"),))
    assert done.written == 0
    assert (done.failures[0].reason, done.failures[0].status) == ("NameTaken", 409)
    assert lab.get("ConfigMap", "one")["data"] == {"theirs": "1"}


def test_what_is_not_wanted_is_deleted_once(lab: Lab) -> None:
    lab.make_so(body())
    lab.cluster.store.merge_patch(
        KINDS["ConfigMap"], "apps", "one", {"metadata": {"finalizers": ["example.org/theirs"]}}, _by("they")
    )
    assert lab.make_so(delete=(("ConfigMap", "one"), ("ConfigMap", "never-there"))).written == 1
    assert lab.make_so(delete=(("ConfigMap", "one"),)).written == 0  # it is going already


def _by(manager: str) -> Any:
    from tests.fakes.kube_store import Write

    return Write(manager=manager, content_type="application/merge-patch+json")


def test_one_refusal_does_not_keep_the_rest_from_being_made(lab: Lab) -> None:
    def gate(verb: str, kind: str, name: str) -> None:
        if kind == "ConfigMap":
            raise Refused("exceeded quota", status=403, reason="Forbidden")

    lab.cluster.gate = gate
    done = lab.make_so(body("ConfigMap", "c"), body("Deployment", "d"))
    assert done.written == 1
    assert [(one.kind, one.name, one.status, one.message) for one in done.failures] == [
        ("ConfigMap", "c", 403, "exceeded quota")
    ]


def test_a_webhook_that_fails_does_not_keep_the_rest_from_being_made(lab: Lab) -> None:
    def gate(verb: str, kind: str, name: str) -> None:
        if kind == "ConfigMap":
            raise Unavailable("failed calling webhook", status=500, reason="InternalError")

    lab.cluster.gate = gate
    done = lab.make_so(body("ConfigMap", "c"), body("Deployment", "d"))
    assert done.written == 1
    assert [(one.kind, one.status, one.reason) for one in done.failures] == [("ConfigMap", 500, "InternalError")]


def test_no_answer_ends_the_round(lab: Lab) -> None:
    lab.cluster.down = True
    with pytest.raises(Unavailable):
        lab.make_so(body("ConfigMap", "c"), body("Deployment", "d"))
    assert lab.applies() == 1


def test_what_the_api_server_will_not_take_over_is_applied_once(
    lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = lab.cluster.store.apply

    def stubborn(kind: Any, namespace: Any, name: str, applied: Any, write: Any) -> Any:
        return apply(kind, namespace, name, {**applied, "data": {"a": "normalized"}}, write)

    monkeypatch.setattr(lab.cluster.store, "apply", stubborn)
    for _ in range(5):
        lab.make_so(body(data={"a": "1"}))
    assert lab.applies() == 1
    assert caplog.text.count("keeps data.a as it wants it") == 1
    lab.make_so(body(data={"a": "2"}, wanted="2"))  # what is new is tried
    assert lab.applies() == 2
    lab.cluster.store.merge_patch(
        KINDS["ConfigMap"], "apps", "one", {"metadata": {"labels": {"ours": "yes"}}}, _by("x")
    )
    patch = {"metadata": {"annotations": {"pagefleet.dev/applied": "changed"}}}
    lab.cluster.store.merge_patch(KINDS["ConfigMap"], "apps", "one", patch, _by("x"))
    lab.make_so(body(data={"a": "2"}, wanted="2"))  # and what differs elsewhere
    assert lab.applies() == 3


def test_a_tug_of_war_is_left_for_the_rest_of_a_minute(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def tug() -> Applied:
        patch = {"data": {"a": "theirs"}}
        if lab.cluster.store.find(KINDS["ConfigMap"], "apps", "one"):
            lab.cluster.store.merge_patch(KINDS["ConfigMap"], "apps", "one", patch, _by("they"))
        lab.now += 1
        return lab.make_so(body(data={"a": "1"}))

    rounds = [tug() for _ in range(20)]
    assert lab.applies() == FIGHT_APPLIES
    assert rounds[-1].held_back_s == pytest.approx(FIGHT_WINDOW_S - 19)
    assert caplog.text.count("somebody keeps changing data.a") == 1
    lab.now += FIGHT_WINDOW_S
    assert tug().written == 1


def test_an_object_that_somebody_deletes_is_made_again(lab: Lab) -> None:
    for _ in range(3):
        lab.make_so(body())
        lab.cluster.store.delete(KINDS["ConfigMap"], "apps", "one")
    assert lab.applies() == 3


def test_a_forgotten_service_begins_anew(lab: Lab) -> None:
    lab.make_so(body())
    lab.applier.forget(SERVICE)
    lab.applier.forget(SERVICE)
    assert lab.make_so(body()) == Applied()
