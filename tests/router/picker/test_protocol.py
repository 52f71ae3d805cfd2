"""The endpoint picker protocol (proposal 004 of Gateway API Inference Extension), and its conformance cases by name.

The published cases test gateways, with a picker of their own. Here the gateway is played, and the picker is the router:
what is held is the picker's half of each case. EppUnAvailableFailOpen and those about HTTPRoute and InferencePool's
status are the gateway's alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from pagefleet_router.signals.monitor import MonitorTiming

from tests.fakes.ext_proc_schema import BUFFERED, FULL_DUPLEX, NONE, STREAMED, ProcessingRequest
from tests.fakes.faulty_engine import Behaviour, stream, whole
from tests.fakes.gated_fleet import addresses, gated, in_flight, picks
from tests.fakes.played_gateway import PROCESS, ask

EVENTS = [b'data: {"n": %d}\n\n' % n for n in range(20)] + [b"data: [DONE]\n\n"]
THREE: Sequence[Behaviour] = (whole(), whole(), whole())


@pytest.mark.parametrize("request_mode", [FULL_DUPLEX, BUFFERED])
@pytest.mark.parametrize("answer_mode", [FULL_DUPLEX, STREAMED, BUFFERED, NONE])
@pytest.mark.parametrize("trailers", [False, True])
def test_a_request_goes_to_the_chosen_engine_and_comes_back(
    tmp_path: Path, request_mode: int, answer_mode: int, trailers: bool
) -> None:
    async def scenario() -> None:
        modes = {"request_mode": request_mode, "answer_mode": answer_mode}
        async with gated(tmp_path, whole(200, b'{"a":1}'), whole(200, b'{"a":1}'), of_gateway=modes) as (f, g):
            body = ask("ä" * 100_000)
            passed = await g.send(body, fields=[("x-request-id", "abc.1")], trailers=trailers)
            first, second = passed.destination.split(",")
            assert {first, second} == set(addresses(f))
            assert passed.served == first
            assert passed.engine_body == body
            assert passed.answer.status == 200
            assert passed.answer.headers["x-request-id"] == "abc.1"
            assert passed.answer.headers["x-pagefleet-engine"] in ("e0", "e1")
            if answer_mode != NONE:
                assert passed.answer.body == b'{"a":1}'
            await f.until(lambda: in_flight(f) == [0, 0])
            assert f.router.budget.live_requests == 0

    uvloop.run(scenario())


@pytest.mark.parametrize("tells_modes", [True, False])
def test_a_stream_passes_byte_for_byte_and_is_measured(tmp_path: Path, tells_modes: bool) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, stream(EVENTS, 0.001), of_gateway={"tells_modes": tells_modes}) as (f, g):
            passed = await g.send(ask(stream=True))
            assert passed.answer.body == b"".join(EVENTS)
            assert passed.answer.headers["content-type"].startswith("text/event-stream")
            await f.until(lambda: in_flight(f) == [0])
            page = (await f.get("/metrics")).body.decode()
            for line in (
                'pagefleet_router_picks_total{outcome="picked"} 1.0',
                "pagefleet_router_pick_seconds_count 1.0",
                'pagefleet_router_arrivals_total{model="m"} 1.0',
                'pagefleet_router_time_to_first_token_seconds_count{model="m"} 1.0',
                'pagefleet_router_inter_token_seconds_count{model="m"} 1.0',
                'pagefleet_router_requests_total{route="/v1/chat/completions",status="200"} 1.0',
            ):
                assert line in page

    uvloop.run(scenario())


@pytest.mark.parametrize("request_mode", [STREAMED, NONE])
def test_a_gateway_that_keeps_the_body_gets_a_choice_by_the_head_alone(tmp_path: Path, request_mode: int) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, *THREE, of_gateway={"request_mode": request_mode}) as (f, g):
            passed = await g.send(ask("x" * 50_000))
            assert passed.answer.status == 200
            assert passed.served in addresses(f)

    uvloop.run(scenario())


@pytest.mark.parametrize("chosen", [[2], [0, 1], [0, 1, 2]])
def test_gateway_following_epp_routing(tmp_path: Path, chosen: list[int]) -> None:
    """GatewayFollowingEPPRouting: one, two or all pods are designated, and no other gets a request of a hundred."""

    async def scenario() -> None:
        async with gated(tmp_path, *THREE) as (f, g):
            designated = [addresses(f)[number] for number in chosen]
            ten_at_once = asyncio.Semaphore(10)

            async def one() -> str:
                async with ten_at_once:
                    passed = await g.send(ask("Write as if you were a critic: San Francisco"), subset=designated)
                    assert passed.answer.status == 200
                    assert set(passed.destination.split(",")) <= set(designated)
                    return passed.served

            served = Counter(await asyncio.gather(*(one() for _ in range(100))))
            assert set(served) == set(designated)
            assert [bool(engine.seen) for engine in f.engines] == [number in chosen for number in range(3)]

    uvloop.run(scenario())


def test_gateway_following_epp_routing_with_data_parallelism(tmp_path: Path) -> None:
    """GatewayFollowingEPPRoutingWithDataParallelism: several ports of one address are endpoints of their own."""

    async def scenario() -> None:
        async with gated(tmp_path, *THREE, policy="round-robin") as (f, g):
            served = [(await g.send(ask(), subset=["127.0.0.1"])).served for _ in range(6)]
            assert sorted(served) == sorted(2 * addresses(f))

    uvloop.run(scenario())


def test_gateway_destination_endpoint_served(tmp_path: Path) -> None:
    """GatewayDestinationEndpointServed: the engine that answered counts, not the one that was chosen."""

    async def scenario() -> None:
        late = MonitorTiming(period=600.0)  # no probe finds out before
        settings: dict[str, Any] = {"policy": "round-robin", "monitor": late}
        async with gated(tmp_path, stream(EVENTS, 0.02), stream(EVENTS, 0.02), **settings) as (f, g):
            await f.engines[0].kill()
            task = asyncio.create_task(g.send(ask(stream=True)))
            await f.until(lambda: bool(f.engines[1].seen))
            await f.until(lambda: in_flight(f) == [0, 1])
            passed = await task
            assert passed.destination == ",".join(addresses(f))
            assert passed.served == addresses(f)[1]
            assert passed.answer.headers["x-pagefleet-engine"] == "e1"
            assert f.router.metrics.failures == {"unreachable": 1}
            assert f.router.metrics.retries == {"unreachable": 1}
            await f.until(lambda: in_flight(f) == [0, 0])

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (["{0}"], {0}),  # Match specific port only
        (["{0},{2}"], {0, 2}),  # one text with commas in a list
        ("{0}, {1}", {0, 1}),  # a text alone
        (["127.0.0.1"], {0, 1, 2}),  # Match all ports for IP when no port specified
        (["{1}", "10.0.0.9"], {1}),  # Mix of IP:Port and IP-only filters
        (["127.0.0.1:1"], None),  # No matching ports for the filtered IP
        ([], None),
        ("", None),
    ],
)
def test_a_subset_hint_is_kept_to(tmp_path: Path, hint: list[str] | str, expected: set[int] | None) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, *THREE, policy="round-robin") as (f, g):
            known = addresses(f)
            subset = hint.format(*known) if isinstance(hint, str) else [one.format(*known) for one in hint]
            for _ in range(4):
                passed = await g.send(ask(), subset=subset)
                if expected is None:
                    assert passed.answer.status == 503
                    assert passed.answer.error["code"] == "no_engine_ready"
                    assert not passed.destination
                else:
                    assert {known.index(one) for one in passed.destination.split(",")} == expected
            await f.until(lambda: in_flight(f) == [0, 0, 0])
            assert f.router.budget.live_requests == 0

    uvloop.run(scenario())


def test_without_a_ready_engine_the_answer_is_503(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole()) as (f, g):
            assert [await g.health(name) for name in ("", "liveness", "readiness")] == [1, 1, 1]
            assert await g.health("envoy.service.ext_proc.v3.ExternalProcessor") == 1
            f.engines[0].ready = 503
            await f.until(lambda: f.num_usable() == 0)
            answer = (await g.send(ask())).answer
            assert (answer.status, answer.error["code"]) == (503, "no_engine_ready")
            assert answer.headers["retry-after"]
            assert [await g.health(name) for name in ("", "liveness", "readiness")] == [2, 1, 2]
            assert await g.health("envoy.service.ext_proc.v3.ExternalProcessor") == 2
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await g.health("another")
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
            assert picks(f) == {"no_engine": 1}

    uvloop.run(scenario())


def test_what_is_no_message_is_refused_by_grpc(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole()) as (f, g):
            for data in (b"\x12\x7f", b"\x0b", ProcessingRequest().SerializeToString(), b"\xff" * 20):
                stream = g.channel.stream_stream(PROCESS)()
                await stream.write(data)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    assert await stream.read() is None
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await g.send(ask())).answer.status == 200
            for _ in range(500):  # a stream ends a moment after its answer
                if f.router.budget.live_requests:
                    await asyncio.sleep(0.01)
            assert f.router.budget.live_requests == 0

    uvloop.run(scenario())
