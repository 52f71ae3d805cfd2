"""Engines of two data ranks behind one port: each cache is told of, and passes K/V to those of the other engine."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, decode_facts
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kube_names import RANK_PORTS_APART
from pagefleet_protocol.kv_handoff import KV_TRANSFER, KvTransfer

from tests.engine.server.test_process import PATIENCE_S
from tests.engine.server.test_rank_servers import Process, gauge
from tests.fakes.fleet_processes import all_gone, child_pids
from tests.fakes.free_ports import free_ports

pytestmark = pytest.mark.fleet

BLOCK = 16
SECRET = b"s" * 40


class Fleet:
    """A prefill and a decode engine of two ranks each, and a router."""

    def __init__(self, key_file: Path) -> None:
        key_file.write_bytes(SECRET)
        ports, self._processes = [free_ports(12) for _ in range(2)], list[Process]()
        peers = ",".join(f"127.0.0.1:{ports[0] + 4 + RANK_PORTS_APART * rank}" for rank in range(2))
        self.urls = [
            self._engine(port, "--kv-role", role, "--fleet-key-file", str(key_file), *more)
            for role, port, more in zip(("prefill", "decode"), ports, ((), ("--kv-peers", peers)), strict=True)
        ]
        port = free_ports()
        named = (word for url in self.urls for word in ("--engine", url))
        flags = ("--model-name", "m", "--port", str(port), "--fleet-key-file", str(key_file), "--pd-threshold", "1")
        self.router = self._start(Process("pagefleet_router.cli", *named, *flags))
        self.url = f"http://127.0.0.1:{port}"
        self.router.until(lambda: gauge(self.url, "pagefleet_router_kv_engines_followed") == 4)
        self.router.until(lambda: any("the tokenizer of " in line for line in self.router.log))

    def _engine(self, port: int, *flags: str) -> str:
        ports = ("--port", str(port), "--kv-events-port", str(port + 2), "--kv-port", str(port + 4))
        size = ("--num-threads", "2", "--num-kv-blocks", "512", "--dtype", "float32", "--served-model-name", "m")
        ranks = ("-dp", "2", "--kv-connector", "p2p")
        self._start(Process("pagefleet_engine.cli", "builtin://tiny", *ranks, *ports, *size, *flags))
        return f"http://127.0.0.1:{port}"

    def _start(self, process: Process) -> Process:
        self._processes.append(process)
        return process

    @property
    def decode(self) -> Process:
        return self._processes[1]

    def stop(self) -> None:
        for one in reversed(self._processes):
            one.stop()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path / "key")
    try:
        yield fleet
    finally:
        fleet.stop()


def ask(url: str, prompt: str, leg: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=leg, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def pass_kv(fleet: Fleet, prefill: tuple[EngineFacts, int], decode: tuple[EngineFacts, int], prompt: str) -> str:
    """Send both legs, as a router does that has chosen these ranks; returns the answer, computed with what was passed.

    Args:
        prefill: facts, and the rank.
        decode: the same.
    """
    source, target = (facts.caches[rank] for facts, rank in (prefill, decode))
    number, key = secrets.token_hex(16), FleetKey(SECRET)
    address = f"127.0.0.1:{source.kv_transfer_port}"
    legs = (
        KvTransfer("prefill", number, target.incarnation).encode(key, source.incarnation),
        KvTransfer("decode", number, source.incarnation, address, "fail").encode(key, target.incarnation),
    )
    with ThreadPoolExecutor(2) as pool:
        _, answer = pool.map(lambda url, leg: ask(url, prompt, {KV_TRANSFER: leg}), fleet.urls, legs)
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - BLOCK
    return str(answer["choices"][0]["text"])


def test_each_rank_passes_kv_to_each_and_a_router_knows_what_they_have(fleet: Fleet) -> None:
    prefill, decode = (decode_facts(httpx.get(url + FACTS_PATH, timeout=PATIENCE_S).content) for url in fleet.urls)
    assert len({cache.incarnation for one in (prefill, decode) for cache in one.caches}) == 4
    pairs = list(itertools.product(range(2), range(2)))
    prompts = [f"{number}: the fox had a little house in the wood, " * 50 for number in range(len(pairs))]
    found = [
        pass_kv(fleet, (prefill, source), (decode, target), prompt)
        for (source, target), prompt in zip(pairs, prompts, strict=True)
    ]
    answers = [ask(fleet.urls[0], prompt) for prompt in prompts]  # each from the rank that has it, or computed anew
    assert found == [one["choices"][0]["text"] for one in answers]
    num_blocks = sum(one["usage"]["prompt_tokens"] // BLOCK for one in answers)
    fleet.router.until(lambda: gauge(fleet.url, "pagefleet_router_kv_blocks") >= 2 * num_blocks)

    def is_found_by_the_router() -> bool:  # unless the machine is so busy that a prompt was not tokenized in time
        assert [ask(fleet.url, prompt)["choices"][0]["text"] for prompt in prompts] == found
        return bool(gauge(fleet.url, "pagefleet_router_prefix_hits_tokens_total") >= BLOCK * num_blocks)

    fleet.router.until(is_found_by_the_router)

    core, other = child_pids(fleet.decode.process.pid)
    os.kill(core, signal.SIGKILL)
    assert fleet.decode.ended() == 1
    assert all_gone([core, other])
    fleet.router.until(lambda: gauge(fleet.url, "pagefleet_router_kv_engines_followed") == 2)
    assert ask(fleet.url, prompts[0])["choices"][0]["text"] == found[0]
