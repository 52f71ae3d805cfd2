"""A real engine with builtin://tiny: what a router believes to be cached is what the next request finds cached."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.core_process import Surroundings
from pagefleet_engine.client.stream import Generation
from pagefleet_engine.config import EngineConfig
from pagefleet_engine.engine_core.model_folder import resolve_model_folder
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.settings import engine_config
from pagefleet_engine.text.model_files import load_tokenizer
from pagefleet_kv.config import KvEventsConfig
from pagefleet_protocol.block_hash import BlockHash, PrefixScope, extend_hashes, root_hash
from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, decode_facts
from pagefleet_protocol.exit_status import MISTAKE
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_events import routing_key
from pagefleet_protocol.sampling_params import SamplingParams
from pagefleet_text.tokenizer import Tokenizer

from tests.fakes.free_ports import free_ports
from tests.fakes.kv_events_router import RouterSide

pytestmark = pytest.mark.fleet

BLOCK_SIZE = 4
SETTINGS = {
    "model": "builtin://tiny",
    "block_size": BLOCK_SIZE,
    "num_kv_blocks": 24,
    "num_threads": 1,
    "served_model_name": "small,alias",
}
SECRET = b"s" * 40


def predicted(keys: set[int], tokens: Sequence[int], scope: PrefixScope) -> int:
    """What an engine with these blocks should find of a prompt: never its last token."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root_hash(scope), tokens, BLOCK_SIZE)
    matched = next((index for index, found in enumerate(hashes) if routing_key(found) not in keys), len(hashes))
    return min(matched, (len(tokens) - 1) // BLOCK_SIZE) * BLOCK_SIZE


async def start(
    config: EngineConfig, tokenizer: Tokenizer, place: Callable[[int], KvEventsConfig]
) -> tuple[AsyncEngineClient, int]:
    """Start an engine on ports that were free a moment ago."""
    while True:
        port = free_ports(2)
        try:
            return await AsyncEngineClient.start(config, tokenizer, around=Surroundings(kv_events=place(port))), port
        except ConfigError as error:
            if "in use" not in str(error):
                raise


def test_what_was_told_is_what_is_found(tmp_path: Path) -> None:
    key_file = tmp_path / "fleet-key"
    key_file.write_bytes(SECRET)
    tokenizer = load_tokenizer(resolve_model_folder("builtin://tiny"))
    prompts = [[start + offset for offset in range(33)] for start in (20, 60, 100, 140)]

    async def ask(client: AsyncEngineClient, prompt: list[int], salt: str | None = None) -> int:
        sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        asked = Generation("r", [prompt], sampling, cache_salt=salt)
        found = [chunk.num_cached_tokens async for _, chunk in client.generate(asked)]
        assert found[0] is not None
        return found[0]

    async def scenario() -> None:
        config = engine_config(SETTINGS)
        client, port = await start(config, tokenizer, lambda port: KvEventsConfig("127.0.0.1", port, str(key_file)))
        try:
            with RouterSide(port, FleetKey(SECRET)) as router:
                scope, salted = PrefixScope("small"), PrefixScope("small", salt="tenant")

                async def found_as_predicted(prompt: list[int], salt: str | None = None) -> int:
                    await asyncio.to_thread(router.catch_up)
                    expected = predicted(router.keys, prompt, scope if salt is None else salted)
                    assert await ask(client, prompt, salt) == expected
                    return expected

                await asyncio.to_thread(router.sync)
                assert {batch.incarnation for batch in router.batches} == {client.incarnation}
                assert await found_as_predicted(prompts[0]) == 0
                assert await found_as_predicted(prompts[0]) == 32
                assert await found_as_predicted([*prompts[0][:10], 7, 7, 7]) == 8
                assert await found_as_predicted(prompts[0], "tenant") == 0
                assert await found_as_predicted(prompts[0], "tenant") == 32
                for prompt in [*prompts, *reversed(prompts)]:  # more than the pool holds: some are evicted
                    await found_as_predicted(prompt)
                client.reset_prefix_cache()
                # A request comes after the reset on the same way.
                assert await ask(client, [1, 2, 3]) == 0
                assert await found_as_predicted(prompts[-1]) == 0
                assert await found_as_predicted(prompts[-1]) == 32
                assert len(router.keys) <= 24
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 240))


class Served:
    """`pagefleet serve builtin://tiny` with KV events."""

    def __init__(self, events_port: int) -> None:
        command = [sys.executable, "-m", "pagefleet_engine.cli", "builtin://tiny", "--port", "0", "--num-threads", "1"]
        command += ["--block-size", str(BLOCK_SIZE), "--num-kv-blocks", "64", "--kv-events-port", str(events_port)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if " on http://" in line:
                break
        self.url = self.lines[-1].split()[-1] if self.lines else ""
        self._rest = threading.Thread(target=self._read_on, daemon=True)
        self._rest.start()

    def stop(self) -> int:
        self.process.terminate()
        status = self.process.wait(60)
        self._rest.join(60)
        return status

    def _read_on(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)
        self.process.stderr.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[httpx.Client, int]]:
    for _ in range(20):
        port = free_ports(2)
        served = Served(port)
        if served.url.startswith("http"):
            break
        assert served.stop() == MISTAKE, served.lines  # somebody took the port
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client, port
    assert served.stop() == 0


def facts_of(client: httpx.Client) -> EngineFacts:
    return decode_facts(client.get(FACTS_PATH).content)


def test_usage_says_what_the_events_said(served: tuple[httpx.Client, int]) -> None:
    client, port = served
    facts = facts_of(client)
    assert facts.kv_events_port == port
    with RouterSide(port) as router:
        router.sync()
        assert {batch.incarnation for batch in router.batches} == {facts.incarnation}
        prompt = "Which city is the capital of France, and what is it known for besides?"
        tokens = client.post("/tokenize", json={"model": facts.model, "prompt": prompt}).json()["tokens"]
        assert len(tokens) > 2 * BLOCK_SIZE
        body = {"model": facts.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        for _ in range(2):
            router.catch_up()
            expected = predicted(router.keys, tokens, PrefixScope(facts.scope))
            usage = client.post("/v1/completions", json=body).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected
        assert expected == (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_published_batches_and_garbage_are_counted(served: tuple[httpx.Client, int]) -> None:
    client, port = served

    def total(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        (line,) = (line for line in lines if line.startswith(f"pagefleet_engine_{name}_total{{"))
        return float(line.split()[-1])

    with RouterSide(port) as router:
        router.sync()
        before = total("kv_events_dropped")
        assert router.send(b"garbage")
        router.read_until(lambda: total("kv_events_dropped") == before + 1)
        assert total("kv_events") > 0


def test_a_port_in_use_ends_the_start_with_one_line(served: tuple[httpx.Client, int]) -> None:
    _, port = served
    command = [sys.executable, "-m", "pagefleet_engine.cli", "builtin://tiny", "--port", "0"]
    done = subprocess.run(
        [*command, "--kv-events-port", str(port)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, "it may be free the next time"
    last = done.stderr.splitlines()[-1]
    assert f"cannot publish KV events on 127.0.0.1 port {port} (Address already in use)" in last
    assert "give another kv_events_port" in last
