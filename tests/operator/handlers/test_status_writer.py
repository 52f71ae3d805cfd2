"""A status is written when it changed, and what was written is known before a watch tells it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_operator.apply.kinds import INFERENCE_SERVICE
from pagefleet_operator.errors import Unavailable
from pagefleet_operator.handlers.cluster_view import ClusterView, StoredService
from pagefleet_operator.handlers.status_writer import StatusWriter, merge_patch
from pagefleet_protocol.inference_status import InferenceServiceStatus, LiveStatus

from tests.fakes.kube_store import _merge_patched
from tests.fakes.kube_store_cluster import KINDS, StoreCluster

KEY = ("apps", "qwen")


class Lab:
    def __init__(self) -> None:
        self.cluster, self.view = StoreCluster(), ClusterView()
        self.cluster.add_namespace("apps")
        self.cluster.store.create(KINDS["InferenceService"], "apps", {"metadata": {"name": "qwen"}, "spec": {}})
        self.writer = StatusWriter(self.cluster)

    def seen(self) -> StoredService:
        self.view.note(INFERENCE_SERVICE, self.cluster.store.get(KINDS["InferenceService"], *KEY))
        found = self.view.service(KEY)
        assert found is not None
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.store.get(KINDS["InferenceService"], *KEY)["status"]
        return found

    def write(self, status: InferenceServiceStatus, seen: StoredService | None = None) -> bool:
        return asyncio.run(self.writer.write(KEY, seen or self.seen(), status))


@pytest.fixture
def lab() -> Lab:
    return Lab()


def made(**fields: Any) -> InferenceServiceStatus:
    return InferenceServiceStatus(observed_generation=1, model_name="qwen", **fields)


def live(at: str, running: int = 0) -> LiveStatus:
    return LiveStatus(requests_running=running, requests_waiting=0, tokens_per_second=0.0, kv_usage=0.0, at=at)


def test_a_status_is_written_once(lab: Lab) -> None:
    assert lab.write(made(ready="0/1"))
    assert not lab.write(made(ready="0/1"))
    assert lab.status()["ready"] == "0/1"


def test_what_is_no_more_goes(lab: Lab) -> None:
    lab.write(made(url="http://x"))
    assert lab.write(made())
    assert "url" not in lab.status()


def test_what_was_written_counts_before_the_watch_tells_it(lab: Lab) -> None:
    seen = lab.seen()
    lab.write(made(ready="0/1"), seen)
    assert not lab.write(made(ready="0/1"), seen)
    previous = lab.writer.previous(KEY, seen)
    assert previous is not None
    assert previous.ready == "0/1"


def test_what_somebody_else_wrote_is_put_right(lab: Lab) -> None:
    lab.write(made(ready="0/1"))
    asyncio.run(lab.cluster.patch_status(INFERENCE_SERVICE, *KEY, {"ready": "9/9"}))
    assert lab.write(made(ready="0/1"))
    assert lab.status()["ready"] == "0/1"


def test_the_same_numbers_read_later_are_not_written(lab: Lab) -> None:
    assert lab.write(made(live=live("2026-11-21T12:00:00Z")))
    assert not lab.write(made(live=live("2026-11-21T12:00:30Z")))
    assert lab.write(made(live=live("2026-11-21T12:01:00Z", running=1)))
    assert lab.status()["live"]["at"] == "2026-11-21T12:01:00Z"


def test_a_status_that_cannot_be_read_is_none(lab: Lab) -> None:
    assert lab.writer.previous(KEY, lab.seen()) is None
    asyncio.run(lab.cluster.patch_status(INFERENCE_SERVICE, *KEY, {"conditions": "many", "ready": 3}))
    assert lab.writer.previous(KEY, lab.seen()) is None
    assert lab.write(made(ready="0/1"))
    assert lab.status()["conditions"] == []


def test_what_was_not_written_is_tried_again(lab: Lab) -> None:
    lab.cluster.down = True
    with pytest.raises(Unavailable):
        lab.write(made(ready="0/1"))
    lab.cluster.down = False
    assert lab.write(made(ready="0/1"))
    lab.writer.forget(KEY)
    assert not lab.write(made(ready="0/1"))


JSON = st.recursive(
    st.integers(0, 3) | st.text("ab", max_size=2) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.sampled_from("abc"), JSON, max_size=3)


@given(before=OBJECT, after=OBJECT)
def test_a_patch_makes_one_document_of_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert _merge_patched(before, merge_patch(before, after)) == after
    assert merge_patch(after, after) == {}
