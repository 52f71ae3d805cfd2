"""An engine's event ports that say whatever a test wants, as fast as the other side reads. No test in here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import zmq

from tests.fakes.free_ports import free_ports


class LyingPublisher:
    """Publishes and answers from a thread of its own, so that its tests' event loop measures nothing of it.

    Args:
        publish: makes the messages to publish, one after the other, each a list of frames; the last is not followed.
        answer: makes the messages that answer any question.
    """

    def __init__(
        self, publish: Callable[[], Iterator[list[bytes]]], answer: Callable[[], Iterator[bytes]] | None = None
    ) -> None:
        self.num_published = self.num_answered = 0
        self._publish = publish
        self._answer = answer or (lambda: iter(()))
        self._context = zmq.Context()
        self.port = free_ports(2)
        self._published, self._answers = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._published.bind(f"tcp://127.0.0.1:{self.port}")
        self._answers.bind(f"tcp://127.0.0.1:{self.port + 1}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        answering: dict[bytes, Iterator[bytes]] = {}
        messages = self._publish()
        self._answers.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._answers.setsockopt(zmq.SNDHWM, 4)
        while not self._stop.is_set():
            with contextlib.suppress(zmq.Again):
                peer, _ = self._answers.recv_multipart(zmq.NOBLOCK)
                answering[peer] = self._answer()
            if (message := next(messages, None)) is not None:
                self._published.send_multipart(message)
                self.num_published += 1
            for peer, parts in list(answering.items()):
                if not self._send_next(peer, parts):
                    del answering[peer]
            self._stop.wait(0.0005)

    def _send_next(self, peer: bytes, parts: Iterator[bytes]) -> bool:
        part = next(parts, None)
        if part is None:
            return False
        while not self._stop.is_set():
            try:
                self._answers.send_multipart([peer, part], zmq.NOBLOCK)
            except zmq.Again:
                self._stop.wait(0.001)
                continue
            except zmq.ZMQError:
                return False  # it has left
            self.num_answered += 1
            return True
        return False
