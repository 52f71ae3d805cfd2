"""What the router decides and counts of requests that a gateway carries: the same as of those it carries itself."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop
from pagefleet_router.app import Router
from pagefleet_router.cli import main
from pagefleet_router.config import RouterConfig
from pagefleet_router.errors import ConfigError

from tests.fakes.faulty_engine import silent, stream, whole
from tests.fakes.free_ports import free_ports
from tests.fakes.gated_fleet import addresses, gated, in_flight, picks
from tests.fakes.pair_fleet import decode, long_chat, pair_fleet, prefill
from tests.fakes.played_gateway import Passed, ask, gateway
from tests.fakes.route_process import programmed_fleet
from tests.router.admission.test_admission_fleet import CAPACITY, Gated, make_small

KEYS = "sk-gold tenant=gold priority=5\n"


def test_prompts_with_one_beginning_go_where_it_is_cached(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole(), whole(), whole(), policy="auto", kv_events=False) as (f, g):
            first = (await g.send(ask("x" * 20_000))).served
            others = [(await g.send(ask("x" * 20_000 + str(n)))).served for n in range(5)]
            assert set(others) == {first}
            assert picks(f) == {"picked": 1, "cached": 5}

    uvloop.run(scenario())


def test_the_load_that_counts_is_that_of_gateways_and_clients_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, silent, silent) as (f, g):
            tasks = [asyncio.create_task(g.send(ask())) for _ in range(6)]
            await f.until(lambda: in_flight(f) == [3, 3])
            assert f.router.budget.live_requests == 6
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await f.until(lambda: in_flight(f) == [0, 0])  # the gateway gave up
            assert f.router.budget.live_requests == 0
            assert f.router.metrics.requests["/v1/chat/completions", 499] == 6

    uvloop.run(scenario())


def test_requests_beyond_the_room_wait_at_the_same_gate_and_beyond_the_queue_are_429(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole(), queue_size=2) as (f, g):
            held = f.engines[0].behave = Gated()
            await make_small(f)
            asked = [asyncio.create_task(g.send(ask())) for _ in range(CAPACITY)]
            await f.until(lambda: held.num_open == CAPACITY)
            asked += [asyncio.create_task(g.send(ask())) for _ in range(2)]
            await f.until(lambda: held.num_open == CAPACITY and f.router.gate.num_waiting == 2)
            refused = (await g.send(ask())).answer
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            asked.pop().cancel()
            await f.until(lambda: f.router.gate.num_waiting == 1)
            held.opened.set()
            assert {(await one).answer.status for one in asked} == {200}
            assert held.most_open == CAPACITY
            assert picks(f) == {"picked": CAPACITY + 1, "shed": 1}
            f.router.gate.check_integrity()

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("body", "fields", "status", "code"),
    [
        (b"{", {}, 400, None),
        (b"[1]", {}, 400, None),
        (ask(kv_transfer_params={"a": 1}), {}, 400, "unsupported_parameter"),
        (ask(model="other"), {}, 404, "model_not_found"),
        (ask(), {"x-pagefleet-priority": "high"}, 400, "invalid_value"),
        (ask("x" * 5000), {}, 413, "request_too_large"),
        (ask(), {":path": "/v1/nothing"}, 404, "unknown_url"),
        (ask(), {":path": "/v1/models"}, 405, "method_not_allowed"),
        (ask(), {":path": "/v1/chat/completions?api_key=sk-gold"}, 400, "key_in_url"),
        (None, {":path": "/v1/responses/resp_" + "0" * 32}, 404, "response_not_found"),
    ],
)
def test_what_the_router_refuses_the_picker_refuses_in_the_same_words(
    tmp_path: Path, body: bytes | None, fields: dict[str, str], status: int, code: str | None
) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole(), max_body_bytes=4096) as (f, g):
            answer = (await g.send(body, fields=list(fields.items()))).answer
            assert (answer.status, answer.error["code"]) == (status, code)
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-request-id"]
            assert not f.engines[0].seen
            assert f.router.budget.live_requests == 0
            assert picks(f) == {"refused": 1}

    uvloop.run(scenario())


def test_keys_are_asked_for_and_stay_here(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)

    async def scenario() -> None:
        async with gated(tmp_path, whole(), api_key_file=keys) as (f, g):
            refused = (await g.send(ask())).answer
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            forged = [
                ("authorization", "Bearer sk-gold"), ("x-pagefleet-cache-salt", "x"), ("x-pagefleet-kv-transfer", "x"),
                ("x-pagefleet-priority", "9"), ("x-gateway-destination-endpoint", "10.0.0.1:1"), ("a_b", "c"),
                ("accept", "a/b"),
            ]  # fmt: skip
            passed = await g.send(ask(), fields=forged)
            assert passed.answer.status == 200
            head = passed.engine_head
            assert head["accept"] == "a/b"
            assert head["x-pagefleet-priority"] == "5"
            assert head["x-gateway-destination-endpoint"] == passed.destination == addresses(f)[0]
            assert head["x-pagefleet-cache-salt"] != "x"
            assert not {"authorization", "x-pagefleet-kv-transfer", "a_b"} & set(head)
            listed = (await g.send(None, path="/v1/models", fields=[("x-api-key", "sk-gold")])).answer
            assert [one["id"] for one in listed.json["data"]] == ["m"]

    uvloop.run(scenario())


def test_what_an_engine_says_for_the_fleet_alone_does_not_reach_clients(tmp_path: Path) -> None:
    async def scenario() -> None:
        told = f"x-pagefleet-incarnation: {'1' * 32}\r\nx-pagefleet-model: m\r\nx-other: 1\r\n"
        async with gated(tmp_path, whole(200, b"{}", told), cors_origins=("https://a.example",)) as (_, g):
            answer = (await g.send(ask(), fields=[("origin", "https://a.example")])).answer
            assert {name for name in answer.headers if name.startswith("x-pagefleet-")} == {"x-pagefleet-engine"}
            assert answer.headers["x-other"] == "1"
            assert answer.headers["access-control-allow-origin"] == "https://a.example"

    uvloop.run(scenario())


def test_an_engine_that_fails_in_a_row_is_ejected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole(500), whole(), policy="round-robin") as (f, g):
            f.keep_ejected()
            for _ in range(20):
                await g.send(ask())
            engine = f.router.table.engine("e0")
            assert engine is not None
            assert engine.ejected
            assert f.router.metrics.failures["status"] >= 3
            assert f.router.metrics.ejections == 1

    uvloop.run(scenario())


def test_the_console_and_the_drain_know_of_requests_at_gateways(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, stream([b"data: 1\n\n"] * 3, 0.3), drain_timeout=20.0) as (f, g):
            task: asyncio.Task[Passed] = asyncio.create_task(g.send(ask(stream=True)))
            await f.until(lambda: in_flight(f) == [1])
            assert f.router.gateways is not None
            assert list(f.router.gateways.tenants_inside()) == [""]
            await f.router.drain()
            assert (await task).answer.body == b"data: 1\n\n" * 3
            assert f.router.budget.live_requests == 0

    uvloop.run(scenario())


def test_tls_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole(), endpoint_picker_tls=True) as (f, _):
            port = f.router.config.endpoint_picker_port
            assert port is not None
            certificate = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
            async with gateway(port, certificate.encode()) as g:
                assert (await g.send(ask())).answer.status == 200
                assert await g.health("readiness") == 1

    uvloop.run(scenario())


@pytest.mark.fleet
def test_several_processes_share_the_port(tmp_path: Path) -> None:
    async def scenario() -> None:
        port = free_ports()
        flags = ("--workers", "2", "--endpoint-picker-port", str(port), "--no-endpoint-picker-tls")
        async with programmed_fleet(tmp_path, [whole(), whole()], *flags) as f:
            for _ in range(8):  # each a connection of its own
                async with gateway(port) as g:
                    assert (await g.send(ask())).answer.status == 200
            assert await f.router.metric("picks_total", outcome="picked") == 8

    uvloop.run(scenario())


def test_without_its_packages_or_its_port_the_router_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole()) as (f, _):
            config = RouterConfig(
                endpoints_file=f.folder / "endpoints.json", port=0, endpoint_picker_tls=False,
                endpoint_picker_port=f.router.config.endpoint_picker_port,
            )  # fmt: skip
            with pytest.raises(ConfigError, match="give another --endpoint-picker-port"):
                async with Router(config).running():
                    pass

    uvloop.run(scenario())
    monkeypatch.setitem(sys.modules, "pagefleet_router.picker.server", None)
    assert main(["--endpoints-file", str(tmp_path / "endpoints.json"), "--endpoint-picker-port", "9002"]) == 2
    assert "pip install 'pagefleet-router[picker]'" in capsys.readouterr().err


def test_a_router_that_does_not_pick_loads_no_grpc(tmp_path: Path) -> None:
    code = "import sys, pagefleet_router.app, pagefleet_router.cli; print('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_with_parts_a_gateways_request_is_computed_whole_by_a_decode_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        port = free_ports()
        roles = [prefill(), prefill(), decode(), decode()]
        async with (
            pair_fleet(tmp_path, roles, endpoint_picker_port=port, endpoint_picker_tls=False) as f,
            gateway(port) as g,
        ):
            decodes = [f.engine(name).url.removeprefix("http://") for name in ("d0", "d1")]
            passed = [await g.send(json.dumps(long_chat(number)).encode()) for number in range(4)]
            assert {one.answer.status for one in passed} == {200}
            for one in passed:
                assert set(one.destination.split(",")) == set(decodes)
            assert not f.of("p")
            assert all(leg.transfer is None for leg in f.of("d"))
            assert f.metric('pagefleet_router_pd_requests_total{choice="local"}') == 4

    uvloop.run(scenario())
