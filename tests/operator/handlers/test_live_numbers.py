"""What the routers of each service say, every half minute."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from pagefleet_operator.apply.kinds import INFERENCE_SERVICE, POD
from pagefleet_operator.handlers.cluster_view import ClusterView, Key
from pagefleet_operator.handlers.live_numbers import LiveNumbers
from pagefleet_protocol.metric_names import (
    ROUTER_FLEET_GENERATED_TOKENS,
    ROUTER_FLEET_KV_USAGE_RATIO,
    ROUTER_FLEET_REQUESTS_RUNNING,
    ROUTER_FLEET_REQUESTS_WAITING,
)

from tests.fakes.kube_operator import SilentPods

KEY = ("apps", "qwen")
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


class Lab:
    def __init__(self) -> None:
        self.clock = 0.0
        self.pods, self.view = SilentPods(), ClusterView()
        self.live = LiveNumbers(self.pods, self.view, lambda: NOW, lambda: self.clock)
        self.view.note(INFERENCE_SERVICE, {"metadata": {"name": "qwen", "namespace": "apps", "uid": "s"}})
        self.router("r1", "10.0.0.1")

    def router(self, name: str, ip: str, ready: str = "True") -> None:
        labels = {"pagefleet.dev/service": "qwen", "app.kubernetes.io/component": "router"}
        status = {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]}
        self.view.note(POD, {"metadata": {"name": name, "namespace": "apps", "labels": labels}, "status": status})

    def says(self, ip: str = "10.0.0.1", tokens: float = 0.0, running: int = 0) -> None:
        self.pods.metrics[ip] = {
            ROUTER_FLEET_REQUESTS_RUNNING: running,
            ROUTER_FLEET_REQUESTS_WAITING: 2,
            ROUTER_FLEET_KV_USAGE_RATIO: 0.12345,
            ROUTER_FLEET_GENERATED_TOKENS: tokens,
        }

    def look(self) -> list[Key]:
        return list(asyncio.run(self.live.look()))


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_numbers_come_from_a_ready_router(lab: Lab) -> None:
    lab.says(running=3)
    assert lab.look() == [KEY]
    sample = lab.live.sample(KEY)
    assert sample is not None
    assert (sample.requests_running, sample.requests_waiting, sample.kv_usage) == (3, 2, 0.123)
    assert (sample.tokens_per_second, sample.at) == (0.0, NOW)


def test_tokens_per_second_are_the_difference_of_two_readings_of_one_router(lab: Lab) -> None:
    lab.says(tokens=1000)
    lab.look()
    lab.clock = 30.0
    lab.says(tokens=1600)
    assert lab.look() == [KEY]
    sample = lab.live.sample(KEY)
    assert sample is not None
    assert sample.tokens_per_second == 20.0
    lab.clock = 60.0
    lab.says(tokens=5)  # it was started again
    lab.look()
    sample = lab.live.sample(KEY)
    assert sample is not None
    assert sample.tokens_per_second == 0.0


def test_the_same_numbers_wake_nobody(lab: Lab) -> None:
    lab.says()
    assert lab.look() == [KEY]
    lab.clock = 30.0
    assert lab.look() == []
    assert lab.live.sample(KEY) is not None


def test_a_router_that_says_nothing_is_followed_by_the_next(lab: Lab) -> None:
    lab.router("r2", "10.0.0.2")
    lab.says("10.0.0.2", running=7)
    lab.look()
    sample = lab.live.sample(KEY)
    assert sample is not None
    assert sample.requests_running == 7


def test_without_a_word_there_is_no_sample(lab: Lab) -> None:
    lab.says()
    lab.look()
    lab.pods.metrics.clear()
    assert lab.look() == [KEY]
    assert lab.live.sample(KEY) is None
    lab.says()
    lab.router("r1", "10.0.0.1", ready="False")
    assert lab.look() == []
    assert lab.live.sample(KEY) is None


def test_a_service_that_is_gone_is_forgotten(lab: Lab) -> None:
    lab.says()
    lab.look()
    lab.view.note(INFERENCE_SERVICE, {"metadata": {"name": "qwen", "namespace": "apps", "uid": "s"}}, deleted=True)
    assert lab.look() == []
    assert lab.live.sample(KEY) is None


def test_it_asks_again_and_again(lab: Lab) -> None:
    woken: list[Key] = []

    async def scenario() -> None:
        lab.says()
        running = asyncio.create_task(lab.live.run(woken.extend))
        async with asyncio.timeout(120):
            while not woken:  # noqa: ASYNC110 - the list has no event
                await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    assert woken[0] == KEY
