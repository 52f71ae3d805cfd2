"""Events about InferenceServices, one for each thing said and minute."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pagefleet_operator.errors import Refused
from pagefleet_operator.handlers.announcer import MAX_MESSAGE, Announcer
from pagefleet_operator.plan.announcements import Announcement

from tests.fakes.kube_store_cluster import KINDS, StoreCluster

KEY = ("apps", "qwen")
SAID = Announcement("Warning", "DoesNotFit", "80 GiB are needed")


class Lab:
    def __init__(self) -> None:
        self.now = datetime(2026, 11, 21, 12, tzinfo=UTC)
        self.cluster = StoreCluster()
        self.cluster.add_namespace("apps")
        self.announcer = Announcer(self.cluster, "one", lambda: self.now)

    def say(self, *announcements: Announcement) -> None:
        asyncio.run(self.announcer.announce(KEY, "uid", announcements))

    def events(self) -> list[dict[str, Any]]:
        return list(self.cluster.store.all_of(KINDS["Event"], "apps"))


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_an_event_says_what_about_whom(lab: Lab) -> None:
    lab.say(SAID)
    (event,) = lab.events()
    assert (event["type"], event["reason"], event["message"]) == ("Warning", "DoesNotFit", "80 GiB are needed")
    assert event["involvedObject"]["uid"] == "uid"
    assert event["lastTimestamp"] == "2026-11-21T12:00:00Z"
    assert event["source"] == {"component": "pagefleet-operator"}


def test_what_repeats_itself_is_said_once_a_minute(lab: Lab) -> None:
    lab.say(SAID)
    lab.say(SAID, Announcement("Normal", "Serving", "2 of 2"))
    assert [event["reason"] for event in lab.events()] == ["DoesNotFit", "Serving"]
    lab.now += timedelta(minutes=1)
    lab.say(SAID)
    assert len(lab.events()) == 3


def test_a_long_message_is_cut_to_what_an_event_holds(lab: Lab) -> None:
    lab.say(Announcement("Normal", "Serving", "x" * 5000))
    assert len(lab.events()[0]["message"]) == MAX_MESSAGE


def test_an_event_that_is_refused_is_lost(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def gate(verb: str, kind: str, name: str) -> None:
        raise Refused("no events here", status=403)

    lab.cluster.gate = gate
    lab.say(SAID, SAID)
    assert lab.events() == []
    assert caplog.text.count("no events here") == 1
