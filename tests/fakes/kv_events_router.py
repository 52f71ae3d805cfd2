"""A router's side of KV events, by the document alone: subscribe, add up, ask for what was missed."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import zmq
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_events import (
    TOPIC,
    Answer,
    Cleared,
    Done,
    Dump,
    DumpPart,
    EventBatch,
    KvEvent,
    Removed,
    Request,
    Stored,
    decode_answer,
    decode_published,
    encode,
    unpack_keys,
)
from zmq.utils import z85

WAIT_S = 300.0


def apply(keys: set[int], events: list[KvEvent]) -> None:
    """Change a set as events say."""
    for event in events:
        match event:
            case Cleared():
                keys.clear()
            case Stored():
                keys.update(unpack_keys(event.keys))
            case Removed():
                keys.difference_update(unpack_keys(event.keys))


class RouterSide:
    """One subscriber with its question socket.

    Attributes:
        keys: what it believes to be cached, once it has been brought up to date by `sync`.
        seq: of the newest batch in `keys`; None before `sync`.
        batches: all that came.
    """

    def __init__(self, port: int, key: FleetKey | None = None, role_key: FleetKey | None = None) -> None:
        """`role_key`: whose router's key it claims to have; default: of `key`, which names the server's."""
        self.keys: set[int] = set()
        self.seq: int | None = None
        self.batches: list[EventBatch] = []
        self._context = zmq.Context()
        self._sub = self._connect(zmq.SUB, port, key, role_key or key)
        self._sub.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._dealer = self._connect(zmq.DEALER, port + 1, key, role_key or key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def read(self, timeout_s: float) -> EventBatch | None:
        """Return the next batch, None when none comes."""
        if not self._sub.poll(int(timeout_s * 1000)):
            return None
        topic, data = self._sub.recv_multipart()
        assert topic == TOPIC
        batch = decode_published(data)
        self.batches.append(batch)
        if self.seq is not None and batch.seq > self.seq:
            assert batch.seq == self.seq + 1, "a batch was lost"
            self.seq = batch.seq
            apply(self.keys, batch.events)
        return batch

    def sync(self) -> None:
        """Wait until the subscription works, and begin with a dump."""
        self.read_until(lambda: bool(self.batches))
        *parts, end = self.ask(Dump())
        self.seq = end.seq
        for part in parts:
            assert isinstance(part, DumpPart)
            assert part.seq == end.seq
            self.keys.update(unpack_keys(part.keys))

    def read_until(self, holds: Callable[[], bool]) -> None:
        """Take batches in until something holds."""
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < WAIT_S, f"{len(self.batches)} batches, {len(self.keys)} keys"
            self.read(0.05)

    def catch_up(self) -> None:
        """Take in all that the engine has told its publisher by now; a dump says the same."""
        *parts, end = self.ask(Dump())
        self.read_until(lambda: self.seq is not None and self.seq >= end.seq)
        if self.seq == end.seq:
            dumped: set[int] = set()
            for part in parts:
                assert isinstance(part, DumpPart)
                dumped.update(unpack_keys(part.keys))
            assert self.keys == dumped

    def send(self, *frames: bytes) -> bool:
        """Send anything to the answering port; returns whether there was room for it."""
        try:
            self._dealer.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def answers(self, timeout_s: float = WAIT_S) -> list[Answer]:
        """Return the next answer up to its end; an empty list when nothing comes."""
        answers: list[Answer] = []
        while self._dealer.poll(int((WAIT_S if answers else timeout_s) * 1000)):
            answers.append(decode_answer(self._dealer.recv()))
            if isinstance(answers[-1], Done):
                return answers
        assert not answers, "an answer has no end"
        return answers

    def ask(self, request: Request) -> list[Answer]:
        """Ask and wait for the whole answer."""
        self.send(encode(request))
        return self.answers()

    def _connect(self, kind: int, port: int, key: FleetKey | None, role_key: FleetKey | None) -> zmq.Socket[bytes]:
        connected = self._context.socket(kind)
        connected.setsockopt(zmq.RECONNECT_IVL, 20)
        if key is not None and role_key is not None:
            secret = z85.encode(role_key.curve_secret("router"))
            connected.setsockopt(zmq.CURVE_SECRETKEY, secret)
            connected.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            connected.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(key.curve_secret("engine"))))
        connected.connect(f"tcp://127.0.0.1:{port}")
        return connected
