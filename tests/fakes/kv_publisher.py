"""An engine's event ports that lose, repeat and invent messages as a test says, in the test's own event loop.

No test in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence

import zmq
from pagefleet_kv.events.history import History
from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_events import TOPIC, Replay, decode_request

from tests.fakes.free_ports import free_ports


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(8, "little") * 4)


class KvPublisher:
    """Publishes what `tell` says, with `loss` of the batches lost and as many sent twice."""

    def __init__(self, rng: random.Random, loss: float = 0.0) -> None:
        self.loss = loss
        self.cached: set[int] = set()
        self.num_questions = 0
        self.deaf = False
        """Answers nothing."""
        self._rng = rng
        self._serial = 0
        self._context = zmq.Context()
        self.port = free_ports(2)
        self._published = self._context.socket(zmq.PUB)
        self._published.bind(f"tcp://127.0.0.1:{self.port}")
        self._answers = self._context.socket(zmq.ROUTER)
        self._answers.bind(f"tcp://127.0.0.1:{self.port + 1}")
        self.restart()

    @property
    def incarnation(self) -> str:
        return f"{self._serial:032x}"

    def restart(self) -> None:
        """Another incarnation, with nothing cached, at the same address."""
        self._serial += 1
        self._history = History(self.incarnation, keys_per_message=50, max_batches=20)
        self.cached = set()

    def tell(self, stored: Sequence[int] = (), removed: Sequence[int] = (), cleared: bool = False) -> None:
        stored = [number for number in stored if number not in self.cached or cleared]
        removed = [number for number in removed if number in self.cached and number not in stored]
        if cleared:
            self.cached, removed = set(), []
        self.cached = (self.cached - set(removed)) | set(stored)
        for batch in self._history.tell(cleared, list(map(block, removed)), list(map(block, stored))):
            chance = self._rng.random()
            for _ in range(0 if chance < self.loss else 2 if chance > 1 - self.loss else 1):
                self.send([TOPIC, batch])

    def lose(self) -> None:
        """Tell of one more block, which is lost on the way for certain."""
        loss, self.loss = self.loss, 1.0
        self.tell([next(number for number in itertools.count() if number not in self.cached)])
        self.loss = loss

    def send(self, frames: list[bytes]) -> None:
        """Send anything."""
        self._published.send_multipart(frames)

    async def run(self) -> None:
        """Answer, and send a heartbeat every few hundredths of a second."""
        while True:
            self._answer()
            self.tell()
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _answer(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                peer, data = self._answers.recv_multipart(zmq.NOBLOCK)
                self.num_questions += 1
                request = decode_request(data)
                if self.deaf:
                    continue
                answer = self._history.replay(request) if isinstance(request, Replay) else self._history.dump()
                for message in answer:
                    self._answers.send_multipart([peer, message])


@contextlib.asynccontextmanager
async def publishing(publisher: KvPublisher) -> AsyncIterator[KvPublisher]:
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.close()
