"""A fleet engine in a process of its own, which does what it is told over a pipe, and can be killed or frozen."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pagefleet_protocol.kv_handoff import KvTransfer

from tests.fakes.kv_engines import FIRST_TOKEN, PATIENCE_S, Fleet, FleetEngine


class EngineProcess:
    """Steps only when asked to.

    Attributes:
        address: of its control socket.
        incarnation: of this start.
    """

    def __init__(self, model: Path, key_file: Path, name: str, **kv: Any) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(theirs, model, key_file, name, kv), daemon=True
        )
        self._process.start()
        theirs.close()
        self.address: str = self._answer()
        self.incarnation = name * 32

    def add(self, request_id: str, prompt: list[int], transfer: KvTransfer) -> None:
        """Give it one leg."""
        self._ask("add", request_id, prompt, transfer)

    def step(self) -> float:
        """Have it step once; returns how many blocks it has sent and received so far."""
        return float(self._ask("step"))

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)
        self._process.join(PATIENCE_S)
        self._pipe.close()

    def freeze(self) -> None:
        """Let it do nothing any more, with all its connections open."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _ask(self, *question: Any) -> Any:
        self._pipe.send(question)
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the engine's process does not answer"
        return self._pipe.recv()


def _serve(pipe: Connection, model: Path, key_file: Path, name: str, kv: dict[str, Any]) -> None:
    engine: FleetEngine = Fleet(model, key_file).engine(name, **kv)
    pipe.send(engine.address)
    while True:
        verb, *arguments = pipe.recv()
        if verb == "add":
            request_id, prompt, transfer = arguments
            engine.add(request_id, prompt, FIRST_TOKEN, transfer)
        else:
            engine.step()
        pipe.send(engine.figure("sent_blocks_total") + engine.figure("received_blocks_total"))
