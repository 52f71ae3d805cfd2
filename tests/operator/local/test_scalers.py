"""How a service on this machine is scaled: what its routers are asked, what is decided, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest
from pagefleet_operator.autoscale.demand import EnginesSeen
from pagefleet_operator.autoscale.policy import Tempo
from pagefleet_operator.local.probe import fetch
from pagefleet_operator.local.scalers import Scalers, Surroundings
from pagefleet_operator.local.settings import Timing
from pagefleet_operator.plan.roles import PAIR_ROLES
from pagefleet_protocol import metric_names
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import EngineRole, InferenceServiceStatus, ScalingStatus

AT_ONCE = Tempo(
    up_window=0.0, one_up_window=0.0, down_window=0.3, one_down_window=0.3, down_after_up=0.3, one_down_after_up=0.3,
    first_down=0.3, down_pause=0.0, panic_window=0.0, panic_lasts=0.0, ceiling_lasts=60.0,
)  # fmt: skip
PATIENCE_S = 60.0
NEW_YEAR = "2026-01-01T00:00:00Z"
PAGE = "{} 3\n{} {}\n"


class Site:
    """Answers every request with the same bytes."""

    def __init__(self, reply: bytes) -> None:
        self.reply = reply
        self.num_asked = 0

    async def serve(self, check: Callable[[str], Awaitable[None]]) -> None:
        """Run `check` with the URL."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            await check(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.num_asked += 1
        writer.write(self.reply)
        await writer.drain()
        writer.close()


def page(queued: int) -> bytes:
    text = PAGE.format(metric_names.ROUTER_ARRIVALS, metric_names.ROUTER_QUEUED, queued)
    return b"HTTP/1.1 200 OK\r\n\r\n" + text.encode()


class NoTasks:
    """In place of a TaskGroup: nothing is asked but by the test."""

    def create_task(self, work: Coroutine[Any, Any, None]) -> NoTasks:
        work.close()
        return self

    def cancel(self) -> None:
        """Nothing runs."""


Make = Callable[..., Scalers]


@pytest.fixture
def make(build: Any) -> Make:
    """Make the autoscaler of a service in surroundings that stay as they are; `told` takes what it tells."""

    def made(here: Surroundings, told: list[str], desired: int, **fields: Any) -> Scalers:
        scalers = Scalers(
            Timing(tempo=AT_ONCE, probe_timeout=PATIENCE_S),
            cast("asyncio.TaskGroup", NoTasks()),
            lambda role: here,
            told.append,
        )
        service = build(autoscaling={"max": 4, "target": {"queue": 2}, **fields})
        scaling = ScalingStatus(mode="Internal", current=desired, desired=desired, reason="Idle", at=NEW_YEAR)
        status = InferenceServiceStatus(observed_generation=1, model_name="qwen", scaling=scaling)
        scalers.follow(service.model_copy(update={"status": status}), lambda role: desired)
        return scalers

    return made


def wanted(scalers: Scalers) -> int:
    found = scalers.desired("engine")
    assert found is not None
    return found.desired


@pytest.mark.parametrize(("mode", "said"), [("Internal", "scaled from 1 to "), ("Advisory", "would scale from 1 to ")])
def test_a_decision_is_told_once_with_its_numbers(make: Make, mode: str, said: str) -> None:
    async def check(url: str) -> None:
        told: list[str] = []
        made = make(Surroundings(EnginesSeen(ready=1), {"r-0": url}), told, 1, mode=mode)
        assert (made.seen("engine"), wanted(made)) == (None, 1)
        for _ in range(4):
            await made.step()
        changes = [text for text in told if text]
        assert changes[0].startswith(said)
        assert "8 requests wait, target 2 per engine" in changes[0]
        assert len(changes) == len({text.partition(":")[0] for text in changes})
        seen = made.seen("engine")
        assert seen is not None
        assert seen.desired == wanted(made) > 1

    asyncio.run(Site(page(8)).serve(check))


@pytest.mark.parametrize(("held", "said"), [(1, "1 request waits"), (2, "2 requests wait")], ids=["one", "several"])
def test_a_held_request_wakes_a_service_without_engines(make: Make, held: int, said: str) -> None:
    async def check(url: str) -> None:
        told: list[str] = []
        made = make(Surroundings(EnginesSeen(), {"r-0": url}), told, 0, scaleToZero={"after": 10})
        await made.step()
        assert told == [f"scaled from 0 to 1: {said} for an engine (WokenUp)"]

    asyncio.run(Site(page(held)).serve(check))


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 503 X\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\nsome other page"])
def test_a_router_that_says_nothing_changes_nothing(make: Make, reply: bytes) -> None:
    async def check(url: str) -> None:
        told: list[str] = []
        made = make(Surroundings(EnginesSeen(ready=3), {"r-0": url, "r-1": None}), told, 3)
        await made.step()
        await made.step()
        seen = made.seen("engine")
        assert seen is not None
        assert (wanted(made), seen.reason, told) == (3, "SignalsMissing", [""])
        assert seen.signal == "2 of 2 routers say nothing: it stays at 3 engines"

    asyncio.run(Site(reply).serve(check))


def test_nothing_is_decided_while_a_service_is_paused(make: Make) -> None:
    async def check(url: str) -> None:
        told: list[str] = []
        made = make(Surroundings(EnginesSeen(ready=1), {"r-0": url}, paused=True), told, 1)
        await made.step()
        assert (made.seen("engine"), told) == (None, [])

    asyncio.run(Site(page(8)).serve(check))


def test_a_machine_without_a_free_gpu_is_told_as_the_reason(make: Make) -> None:
    async def check(url: str) -> None:
        made = make(Surroundings(EnginesSeen(ready=2, refused=1), {"r-0": url}), [], 3)
        await made.step()
        seen = made.seen("engine")
        assert seen is not None
        assert (wanted(made), seen.reason) == (2, "AtQuota")
        assert seen.signal.endswith("; no GPU of this machine is free for more")

    asyncio.run(Site(page(9)).serve(check))


BOTH_SCALE = {
    "prefill": {"autoscaling": {"max": 4, "target": {"queue": 2}}},
    "decode": {"autoscaling": {"max": 4, "target": {"kvUsage": 0.8}}},
}


class Following:
    """The autoscalers of one service, which has one router; they ask by themselves once, then in an hour."""

    def __init__(self, url: str, tasks: asyncio.TaskGroup) -> None:
        self._url = url
        self._told = asyncio.Event()
        timing = dataclasses.replace(Timing(tempo=AT_ONCE), scaling_period=3600.0, probe_timeout=PATIENCE_S)
        self.scalers = Scalers(timing, tasks, self._look, lambda text: self._told.set())
        self.paused = False
        self.num_looks = 0

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what they say."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._told.clear()
                await self._told.wait()

    def _look(self, role: EngineRole) -> Surroundings:
        self.num_looks += 1
        self._told.set()
        return Surroundings(EnginesSeen(ready=1), {"r-0": self._url}, self.paused)


@contextlib.asynccontextmanager
async def both_decided(url: str, service: InferenceService) -> AsyncIterator[Scalers]:
    """Autoscalers of both parts that have asked once, and end with the block."""
    async with asyncio.TaskGroup() as tasks:
        made = Following(url, tasks)
        made.scalers.follow(service, lambda role: 1)
        await made.until(lambda: all(made.scalers.seen(role) for role in PAIR_ROLES))
        yield made.scalers
        made.scalers.follow(None, lambda role: 1)


def test_a_router_is_asked_once_for_both_parts_of_a_pair(build: Any) -> None:
    site = Site(page(9))

    async def check(url: str) -> None:
        async with both_decided(url, build(disaggregation=BOTH_SCALE)) as scalers:
            assert site.num_asked == 1
            prefill = scalers.seen("prefill")
            assert prefill is not None
            assert "9 requests wait" in prefill.signal
            await scalers.step()
            assert site.num_asked == 2

    asyncio.run(site.serve(check))


def test_routers_are_left_alone_while_a_service_is_paused(build: Any) -> None:
    site = Site(page(9))

    async def check(url: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            made = Following(url, tasks)
            made.paused = True
            made.scalers.follow(build(disaggregation=BOTH_SCALE), lambda role: 1)
            await made.until(lambda: made.num_looks == 2 * len(PAIR_ROLES))
            assert (site.num_asked, made.scalers.seen("prefill")) == (0, None)
            made.paused = False
            await made.scalers.step()
            assert site.num_asked == 1
            assert made.scalers.seen("prefill") is not None
            made.scalers.follow(None, lambda role: 1)

    asyncio.run(site.serve(check))


def test_a_part_that_scales_no_more_has_no_decision(build: Any) -> None:
    site = Site(page(9))

    async def check(url: str) -> None:
        async with both_decided(url, build(disaggregation=BOTH_SCALE)) as scalers:
            scalers.follow(build(disaggregation={**BOTH_SCALE, "decode": {"replicas": 2}}), lambda role: 1)
            assert (scalers.seen("decode"), scalers.desired("decode")) == (None, None)
            assert scalers.seen("prefill") is not None
            await scalers.step()
            assert site.num_asked == 2
            scalers.follow(None, lambda role: 1)
            assert scalers.desired("prefill") is None

    asyncio.run(site.serve(check))


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nbody", b"body"),
        (b"HTTP/1.1 200 OK\r\nx: y\r\n\r\na\r\n\r\nb", b"a\r\n\r\nb"),
        (b"HTTP/1.1 404 X\r\n\r\nbody", None),
        (b"HTTP/1.1 200 OK\r\nx: y\r\n", None),
        (b"nothing of HTTP\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 20), None),
        (b"x" * 100_000, None),
    ],
    ids=["whole", "with a header", "missing", "cut", "no http", "too long", "a line without end"],
)
def test_a_page_is_fetched_or_not(reply: bytes, body: bytes | None) -> None:
    async def check(url: str) -> None:
        assert await fetch(f"{url}/metrics", 30.0) == body

    asyncio.run(Site(reply).serve(check))


def test_nobody_who_listens_has_no_page() -> None:
    async def scenario() -> None:
        urls: list[str] = []

        async def check(url: str) -> None:
            urls.append(url)

        await Site(b"").serve(check)
        assert await fetch(f"{urls[0]}/metrics", 30.0) is None

    asyncio.run(scenario())


@pytest.fixture
def eager(quick: Timing) -> Timing:
    """Times of a fleet that scales in tenths of a second."""
    return dataclasses.replace(quick, scaling_period=0.05, tempo=AT_ONCE)


@pytest.mark.fleet
def test_engines_come_with_the_queue_and_go_with_it(start_fleet: Any, document: Any, eager: Timing) -> None:
    async def scenario() -> None:
        async with start_fleet(document(autoscaling={"max": 3, "target": {"queue": 2}}), timing=eager) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            await fleet.ask(path="/queue/6")
            await fleet.until(lambda: fleet.settled(3))
            assert fleet.reporter.heard("qwen: scaled from 1 to ")
            scaling = fleet.view().status.scaling
            assert (scaling.mode, scaling.desired) == ("Internal", 3)
            assert fleet.condition("ScalingActive").status == "True"
            await fleet.ask(path="/queue/0")
            await fleet.until(lambda: fleet.settled(1))
            assert not fleet.reporter.heard("router-0: draining")

    asyncio.run(scenario())


@pytest.mark.fleet
@pytest.mark.parametrize(("each", "total"), [(1, 3), (2, 6)])
def test_scaling_stops_where_the_gpus_end(
    start_fleet: Any, document: Any, eager: Timing, each: int, total: int
) -> None:
    async def scenario() -> None:
        scaled = document(autoscaling={"max": 4, "target": {"queue": 1}}, resources={"gpus": each})
        other = document("other", resources={"gpus": 1})
        async with start_fleet(scaled, other, timing=eager, gpus=[str(gpu) for gpu in range(total)]) as fleet:
            await fleet.until(lambda: fleet.settled(1) and fleet.settled(1, "other"))
            await fleet.ask(path="/queue/9")
            await fleet.until(lambda: fleet.settled(2))
            await fleet.until(lambda: fleet.condition("ScalingActive").reason == "AtQuota")
            assert "no GPU of this machine is free for more" in fleet.condition("ScalingActive").message
            assert fleet.settled(1, "other")
            assert not fleet.reporter.heard("waits for ")

    asyncio.run(scenario())


@pytest.mark.fleet
def test_replicas_become_autoscaling_without_losing_an_engine(start_fleet: Any, document: Any, eager: Timing) -> None:
    async def scenario() -> None:
        async with start_fleet(document(replicas=2), timing=eager) as fleet:
            await fleet.until(lambda: fleet.settled(2))
            await fleet.ask(path="/queue/6")
            before = sorted(fleet.pids())
            fleet.edit(document(autoscaling={"max": 2, "target": {"queue": 2}}))
            await fleet.until(lambda: fleet.view().status.scaling is not None)
            await fleet.until(lambda: fleet.condition("ScalingActive").reason in ("ScaledByDemand", "AtMaximum"))
            assert sorted(fleet.pids()) == before
            fleet.edit(document(autoscaling={"max": 2, "mode": "Advisory"}, replicas=2))
            await fleet.until(lambda: fleet.view().status.scaling.mode == "Advisory")
            assert sorted(fleet.pids()) == before
            fleet.edit(document(autoscaling={"mode": "External"}, replicas=1))
            await fleet.until(lambda: fleet.settled(1) and fleet.view().status.scaling.mode == "External")
            assert fleet.reporter.heard("without effect on this machine: spec.autoscaling (mode External: nobody sc")

    asyncio.run(scenario())
