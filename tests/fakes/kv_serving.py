"""Engines as people start them, one for prompts and others for answers, of builtin://tiny unless another is given.

Requests come as a router sends them: two legs with a signed header. Prompts are the embedded model's own questions,
each in a tenancy of its own, so that nothing is cached and every answer is known by heart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, decode_facts
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_handoff import KV_TRANSFER, KvRole, KvTransfer, OnFailure
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.fleet_processes import all_gone, child_pids
from tiny.dataset import Exchange, load_knowledge

PATIENCE_S = 300.0
MODEL_NAME = "tiny"
BLOCK_SIZE = 16
METRIC = "pagefleet_engine_kv_transfer_"
_SERVES = re.compile(r"serving \S+ on (http://\S+)")
# Prompts of the longest questions take three steps: transfers have a middle.
ENGINE_FLAGS = (
    *("--port", "0", "--served-model-name", MODEL_NAME, "--num-threads", "1", "--num-kv-blocks", "512"),
    *("--max-num-batched-tokens", "48", "--max-num-seqs", "16", "--kv-connector", "p2p"),
)


class ServedEngine:
    """One `pagefleet serve` that passes K/V. `started` waits until it answers.

    Args:
        log: file for what it says.
        key_file: of the fleet's key.
        role: of its K/V.
        flags: of `pagefleet serve`, after and over our own.
        model: a folder, if not the embedded one.
        within: a command that runs others somewhere else.
    """

    def __init__(
        self,
        log: Path,
        key_file: Path,
        role: KvRole,
        flags: Sequence[str] = (),
        model: str = "builtin://tiny",
        within: Sequence[str] = (),
    ) -> None:
        self._log = log
        command = [*within, sys.executable, "-m", "pagefleet_engine.cli", model, *ENGINE_FLAGS]
        command += ["--kv-role", role, "--fleet-key-file", str(key_file), *flags]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.is_killed = False
        self.url = ""
        self.facts: EngineFacts
        self._http = httpx.Client(timeout=30)

    def started(self, within_s: float = PATIENCE_S) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + within_s
        while not self._is_ready():
            assert self.is_alive, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        self.facts = decode_facts(self._http.get(self.url + FACTS_PATH).content)

    def _is_ready(self) -> bool:
        if not self.url and (found := _SERVES.search(self._log.read_text())):
            self.url = found[1]
        with contextlib.suppress(httpx.TransportError):
            return bool(self.url) and self._http.get(self.url + "/readyz").status_code == 200
        return False

    @property
    def is_alive(self) -> bool:
        """Whether its server runs."""
        return self.process.poll() is None

    @property
    def core_pid(self) -> int:
        """The process that computes, and passes K/V."""
        (pid,) = child_pids(self.process.pid)
        return pid

    @property
    def log(self) -> str:
        """What it has said."""
        return self._log.read_text()

    def metrics(self) -> dict[str, float]:
        """All series by name and labels, the model's left out."""
        found = {}
        for family in text_string_to_metric_families(self._http.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sample.labels.items() if k != "model_name")
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def figure(self, name: str) -> float:
        """One of its KV transfers' series."""
        return self.metrics().get(METRIC + name, 0.0)

    @property
    def at_baseline(self) -> bool:
        """Whether no request is open and no block is held, pinned, promised or spilled."""
        now = self.metrics()
        held = ("kv_usage_ratio", "requests_running", "requests_waiting")
        figures = [f"pagefleet_engine_{name}" for name in held] + [f"{METRIC}pinned_blocks", f"{METRIC}spilled_blocks"]
        return all(now[name] == 0.0 for name in figures)

    def kill(self) -> None:
        """End it at once, as when its node is gone."""
        self.is_killed = True
        self._http.close()
        core = self.core_pid
        os.kill(core, signal.SIGKILL)
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert all_gone([core])

    def freeze(self, frozen: bool = True) -> None:
        """Let its core do nothing any more with all connections open, or go on."""
        os.kill(self.core_pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def stop(self) -> None:
        """End it as its supervisor does, if it runs."""
        self._http.close()
        if not self.is_alive:
            return
        with contextlib.suppress(ValueError, ProcessLookupError):
            self.freeze(False)
        for _ in range(2):  # the second signal: at once
            self.process.terminate()
        self.process.wait(PATIENCE_S)


@dataclass(frozen=True, slots=True)
class Asked:
    """Both legs of one request, under way. Cancel one to have its client leave."""

    exchange: Exchange
    prefill: asyncio.Task[httpx.Response]
    decode: asyncio.Task[httpx.Response]
    engine: ServedEngine
    """That decodes."""

    async def answers(self) -> list[str]:
        """Return what decode has answered."""
        reply = await self.decode
        assert reply.status_code == 200, f"{reply.text}\n{self.engine.log[-4000:]}"
        return [one["message"]["content"] for one in reply.json()["choices"]]

    async def num_passed(self) -> int:
        """Check the answer; return how many of its prompt's tokens came from elsewhere."""
        assert set(await self.answers()) == {self.exchange.answer}
        usage = self.decode.result().json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def drop(self) -> None:
        """Have both clients leave."""
        self.prefill.cancel()
        self.decode.cancel()


class Questions:
    """What the embedded model knows, with the longest prompts first, asked of pairs of engines.

    Args:
        http: the client.
        key: of the fleet.
    """

    def __init__(self, http: httpx.AsyncClient, key: FleetKey) -> None:
        self._http = http
        self._key = key
        by_length = sorted(load_knowledge().exchanges(), key=lambda one: -len(str(one.messages)))
        self._exchanges = itertools.cycle(by_length[:60])
        self._legs: list[asyncio.Task[httpx.Response]] = []

    def ask(
        self,
        prefill: ServedEngine,
        decode: ServedEngine,
        address: str,
        on_failure: OnFailure = "recompute",
        **fields: Any,
    ) -> Asked:
        """Send both legs of a request.

        Args:
            prefill: computes the prompt.
            decode: answers.
            address: of prefill's control socket, as decode reaches it.
            on_failure: of decode.
            fields: of the request.
        """
        exchange = next(self._exchanges)
        body = {"messages": list(exchange.messages), **fields}
        return Asked(
            exchange, *self._legs_of(prefill, decode, address, on_failure, "/v1/chat/completions", body), decode
        )

    def complete(
        self, prefill: ServedEngine, decode: ServedEngine, address: str, prompt: list[int], on_failure: OnFailure
    ) -> Asked:
        """As `ask`, of any prompt; its answer is not known by heart."""
        body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        return Asked(
            Exchange((), ""), *self._legs_of(prefill, decode, address, on_failure, "/v1/completions", body), decode
        )

    async def ended(self) -> None:
        """Wait for all legs, however they end."""
        await asyncio.gather(*self._legs, return_exceptions=True)

    def _legs_of(
        self,
        prefill: ServedEngine,
        decode: ServedEngine,
        address: str,
        on_failure: OnFailure,
        path: str,
        fields: dict[str, Any],
    ) -> tuple[asyncio.Task[httpx.Response], asyncio.Task[httpx.Response]]:
        transfer_id = secrets.token_hex(16)
        body = {"model": MODEL_NAME, "temperature": 0, "cache_salt": transfer_id, **fields}
        legs = {
            prefill: KvTransfer("prefill", transfer_id, decode.facts.incarnation),
            decode: KvTransfer("decode", transfer_id, prefill.facts.incarnation, address, on_failure),
        }
        sent = []
        for engine, leg in legs.items():
            header = {KV_TRANSFER: leg.encode(self._key, engine.facts.incarnation)}
            sent.append(asyncio.create_task(self._http.post(f"{engine.url}{path}", json=body, headers=header)))
        self._legs += sent
        return sent[0], sent[1]


async def until(holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> float:
    """Wait for something; returns the seconds it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() < began + timeout_s, "it never happens"
        await asyncio.sleep(0.02)
    return time.monotonic() - began
