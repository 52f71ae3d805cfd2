"""One pair of engines for all that can go wrong between them, with a network between the two that can be harmed.

No test in here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from pagefleet_protocol.fleet_key import FleetKey

from tests.fakes.free_ports import free_ports
from tests.fakes.kv_relay import Relay
from tests.fakes.kv_serving import Asked, Questions, ServedEngine, until

Ask = Callable[..., Asked]
"""`Questions.ask` of a pair."""
LEASE_S = 4
MIDWAY = 50_000
"""Bytes: within the second block of a transfer."""


class Pair:
    """A prefill engine and a decode engine that reaches it over relays, one for each port.

    Args:
        folder: for keys, lists and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = FleetKey(secrets.token_hex(32).encode())
        self.key_file = folder / "fleet-key"
        self.key_file.write_bytes(self.key.secret)
        self.port = free_ports(2)
        self.address = f"127.0.0.2:{self.port}"
        self.control, self.data = (
            Relay(("127.0.0.2", port), ("127.0.0.1", port)) for port in (self.port, self.port + 1)
        )
        self.peers = folder / "peers"
        self.peers.write_text(f"{self.address}\n")
        self._num_logs = 0
        self.prefill, self.decode = self._start_prefill(), self._start_decode()

    def repair(self) -> None:
        """Start again what is gone, under its old address, and let the network be good."""
        self.control.arm("none")
        self.data.arm("none")
        for name, start in (("prefill", self._start_prefill), ("decode", self._start_decode)):
            engine: ServedEngine = getattr(self, name)
            assert engine.is_alive or engine.is_killed, f"{name} ended by itself:\n{engine.log}"
            if engine.is_killed:
                setattr(self, name, start())
        self.prefill.started()
        self.decode.started()

    async def link(self) -> None:
        """Ask until K/V is passed: who was lost is dialled again after a while."""
        async with self.questions() as ask:
            while await ask().num_passed() == 0:  # noqa: ASYNC110 - what is awaited is in other processes
                await asyncio.sleep(0.3)

    async def midway(self, ask: Ask, **fields: Any) -> Asked:
        """Ask until a transfer is held within its second block: until the network is armed anew."""
        self.data.arm("hold", MIDWAY)
        while True:
            asked = ask(**fields)
            await until(lambda asked=asked: self.data.struck or asked.decode.done())  # type: ignore[misc]
            if self.data.struck:
                return asked

    def engine(self, *flags: str, model: str = "builtin://tiny") -> ServedEngine:
        """Start another prefill engine."""
        return ServedEngine(self._next_log(), self.key_file, "prefill", ("--kv-lease", str(LEASE_S), *flags), model)

    def close(self) -> None:
        """End all."""
        for engine in (self.prefill, self.decode):
            engine.stop()
        for relay in (self.control, self.data):
            relay.__exit__()

    @asynccontextmanager
    async def questions(self) -> AsyncIterator[Ask]:
        """Yield what asks the pair; in the end all have their answer, and both engines every block back."""
        # A connection for each request: one that is used again may just have been closed, which routers expect.
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_keepalive_connections=0)) as http:
            questions = Questions(http, self.key)
            yield lambda **fields: questions.ask(self.prefill, self.decode, self.address, **fields)
            await questions.ended()
            for engine in (self.prefill, self.decode):
                if engine.is_alive:
                    await until(lambda engine=engine: engine.at_baseline)  # type: ignore[misc]

    def _start_prefill(self) -> ServedEngine:
        return self.engine("--kv-port", str(self.port))

    def _start_decode(self) -> ServedEngine:
        flags = ("--kv-peers", f"file:{self.peers}", "--kv-lease", str(LEASE_S))
        return ServedEngine(self._next_log(), self.key_file, "decode", flags)

    def _next_log(self) -> Path:
        self._num_logs += 1
        return self.folder / f"engine-{self._num_logs}.log"
