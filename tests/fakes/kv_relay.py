"""A network between two engines: a TCP relay that harms what goes to who connected, as it is told. No test in here."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

FaultKind = Literal["none", "hold", "slow", "cut", "flip", "drop", "repeat", "swap", "hang"]
"""What happens to the bytes of the answering side, from the moment it is armed.

hold: none passes after `at` bytes, until it is armed anew. slow: pieces with pauses. cut: the connection ends after
`at` bytes. flip, drop, repeat: byte `at` is changed, 64 bytes from there are left out or come twice. swap: 64 bytes
from there change places with the 64 after them. hang: connections are accepted, and nothing passes in any direction.
"""
SPAN = 64
_PIECE = 1 << 14
_PAUSE_S = 0.005


@dataclass(slots=True)
class _Armed:
    """A fault, and how far the stream has come since."""

    kind: FaultKind
    at: int
    passed: int = 0
    kept: bytes = b""
    """Of a swap, until both parts are there."""
    done: bool = False

    def change(self, data: bytes) -> bytes:
        """Return what is passed on of more bytes."""
        data, self.kept = self.kept + data, b""
        place = self.at - self.passed
        if self.done or place >= len(data):
            self.passed += len(data)
            return data
        needed = {"flip": 1, "drop": SPAN, "repeat": SPAN, "swap": 2 * SPAN}[self.kind]
        if len(data) < place + needed:
            self.kept, data = data[max(place, 0) :], data[: max(place, 0)]
            self.passed += len(data)
            return data
        self.done = True
        self.passed += len(data)
        head, one, tail = data[:place], data[place : place + SPAN], data[place + SPAN :]
        match self.kind:
            case "flip":
                return head + bytes([one[0] ^ 0x40]) + data[place + 1 :]
            case "drop":
                return head + tail
            case "repeat":
                return head + one + one + tail
            case _:
                return head + tail[:SPAN] + one + tail[SPAN:]


class Relay:
    """Listens on one address and passes on to another until the block ends; connections live in threads.

    Args:
        listen: host and port.
        to: host and port; nobody need listen there.
    """

    def __init__(self, listen: tuple[str, int], to: tuple[str, int]) -> None:
        self._to = to
        self._armed = _Armed("none", 0)
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(listen)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    @property
    def num_passed(self) -> int:
        """Bytes of answers since a fault was armed, passed on or held."""
        return self._armed.passed

    @property
    def struck(self) -> bool:
        """Whether the stream has come to where the fault is."""
        return self._armed.done

    def arm(self, kind: FaultKind, at: int = 0) -> None:
        """Do something else from now on, for connections that are open too."""
        self._armed = _Armed(kind, at)

    def cut(self) -> None:
        """End all connections."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                asking = self._listener.accept()[0]
                self._open.append(asking)
                threading.Thread(target=self._serve, args=(asking,), daemon=True).start()

    def _serve(self, asking: socket.socket) -> None:
        with asking:
            self._while_held("hang")
            try:
                answering = socket.create_connection(self._to, 5)
            except OSError:
                return
            answering.settimeout(None)
            self._open.append(answering)
            with answering:
                back = threading.Thread(target=self._pass, args=(asking, answering, self._ask), daemon=True)
                back.start()
                self._pass(answering, asking, self._answer)
                back.join()

    def _pass(self, source: socket.socket, to: socket.socket, pass_on: Callable[[bytes, socket.socket], None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                pass_on(data, to)
        for one in (source, to):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _ask(self, data: bytes, to: socket.socket) -> None:
        self._while_held("hang")
        to.sendall(data)

    def _answer(self, data: bytes, to: socket.socket) -> None:
        self._while_held("hang")
        armed = self._armed
        match armed.kind:
            case "none":
                armed.passed += len(data)
                to.sendall(data)
            case "slow":
                armed.passed += len(data)
                for start in range(0, len(data), _PIECE):
                    to.sendall(data[start : start + _PIECE])
                    time.sleep(_PAUSE_S)
            case "hold" | "cut":
                room = max(0, armed.at - armed.passed)
                armed.passed += len(data)
                to.sendall(data[:room])
                if armed.passed >= armed.at:
                    armed.done = True
                    if armed.kind == "cut":
                        raise ConnectionAbortedError
                    while self._armed is armed:
                        time.sleep(_PAUSE_S)
                    to.sendall(data[room:])
            case _:
                to.sendall(armed.change(data))

    def _while_held(self, kind: FaultKind) -> None:
        while self._armed.kind == kind:
            time.sleep(_PAUSE_S)
