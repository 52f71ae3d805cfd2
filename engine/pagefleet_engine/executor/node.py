"""How the executor reaches ranks: those of one machine, this one or another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from pagefleet_kv.p2p.planes.device.opening import PlaneDevice
from pagefleet_kv.port import KVShard

from pagefleet_engine.executor.messages import Carry, Loaded, Reply, encode
from pagefleet_engine.executor.rank_pages import RankPool, StepFence
from pagefleet_engine.executor.ring import Buffer
from pagefleet_engine.executor.vital_signs import RankProgress, Signs

_LOOK_S = 0.1
"""Between two calls of `or_raise` while another thread sends."""


class RankNode(Protocol):
    """The ranks of one machine. Used by one thread, but for `ended`, and for `send`, which is used by one at a time."""

    @property
    def host(self) -> str:
        """The machine's name."""
        ...

    @property
    def ranks(self) -> range:
        """Their numbers."""
        ...

    @property
    def bell(self) -> int:
        """A descriptor that is readable while there is something to hear of them."""
        ...

    def send(self, parts: Sequence[Buffer], or_raise: Callable[[], None]) -> None:
        """Send a message to all of them; `or_raise` is called while there is no room for it, and may give up."""
        ...

    def receive(self) -> Iterator[tuple[int, Reply]]:
        """Give what they told, each with the rank's number."""
        ...

    def ended(self) -> tuple[int, str] | None:
        """Return a rank that has ended, by itself or with its machine, and how in words; None while none has, or once
        `end` was called. Of any thread."""
        ...

    def signs(self) -> Sequence[Signs]:
        """Return the signs of life of each."""
        ...

    def progress(self) -> Sequence[RankProgress]:
        """Return how far each has loaded."""
        ...

    def pools(
        self, shards: Sequence[KVShard], loaded: Mapping[int, Loaded], is_over: Callable[[], bool]
    ) -> list[tuple[KVShard, RankPool]]:
        """Return the ranks' KV pools, each with what its rank holds; where the configuration has a connector.

        Args:
            shards: what each rank of the engine holds.
            loaded: what each told of its pool, which it has made.
            is_over: whether the ranks are gone.

        Raises:
            ConfigError: the system gives no memory, or no more descriptors.
        """
        ...

    def devices(self, fence: StepFence, is_over: Callable[[], bool]) -> Sequence[PlaneDevice]:
        """Return the devices of the ranks, on which a connector may open planes; none: there are no such.

        Args:
            fence: tells which steps are to be over.
            is_over: whether the ranks are gone.
        """
        ...

    def wait_for_steps(self, num_steps: int, is_over: Callable[[], bool]) -> None:
        """Wait until all of them are done with so many steps; where there are pools, from any thread.

        Raises:
            OSError: they are gone.
        """
        ...

    def leave(self, why: str) -> None:
        """Have them end by themselves."""
        ...

    def kill(self, why: str) -> None:
        """End them at once."""
        ...

    def end(self, within_s: float) -> None:
        """Wait until they have ended and free what they took, by force where that takes longer; call this once."""
        ...


class Commands:
    """What all ranks are told, from any thread: those of each machine get the same, in one order for all.

    Args:
        nodes: the machines. More may come before anything is sent.
    """

    def __init__(self, nodes: Sequence[RankNode]) -> None:
        self._nodes = nodes
        self._lock = threading.RLock()  # who waits for room may find the ranks gone, and end them
        self._is_closed = False
        self._num_steps = 0
        """That they were told to launch."""

    def send(self, parts: Sequence[Buffer], or_raise: Callable[[], None]) -> None:
        """Tell them something; `or_raise` is called while there is no room for it, and may give up.

        Raises:
            OSError: `close` was called, by another thread.
        """
        with self._held(or_raise):
            self._send(parts, or_raise)

    def launch(self, parts: Sequence[Buffer], or_raise: Callable[[], None]) -> None:
        """As `send`, of a step."""
        with self._held(or_raise):
            self._send(parts, or_raise)
            self._num_steps += 1

    @contextlib.contextmanager
    def _held(self, or_raise: Callable[[], None]) -> Iterator[None]:
        """Within it no other thread tells them anything."""
        while not self._lock.acquire(timeout=_LOOK_S):
            or_raise()
        try:
            if self._is_closed:
                raise OSError("the engine's ranks are gone")
            yield
        finally:
            self._lock.release()

    def _send(self, parts: Sequence[Buffer], or_raise: Callable[[], None]) -> None:
        for node in reversed(self._nodes):  # other machines are further away
            node.send(parts, or_raise)

    def close(self) -> None:
        """Send nothing any more. Who waits for room gives up first."""
        with self._lock:
            self._is_closed = True

    def carry(self, is_over: Callable[[], bool], command: Carry, may: Callable[[int], bool]) -> bool:
        """Have ranks launch transfers of K/V, by the thread that passes it; nothing happens where they are gone.

        Args:
            is_over: whether they are.
            command: which transfers.
            may: whether they may be launched behind so many steps. Returned; if not, nothing was told.
        """

        def raise_gone() -> None:
            if is_over():
                raise OSError("the engine's ranks are gone")

        with contextlib.suppress(OSError), self._held(raise_gone):
            if not may(self._num_steps):
                return False
            self._send(encode(command), raise_gone)
        return True
