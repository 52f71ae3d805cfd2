"""Another machine of an engine's ranks, as the executor sees it: what is said to it and heard goes by the link."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from pagefleet_kv.p2p.planes.device.opening import PlaneDevice
from pagefleet_kv.port import KVShard
from pagefleet_protocol.fleet_key import FleetKey

from pagefleet_engine.executor.asked_planes import AskedDevice
from pagefleet_engine.executor.messages import Loaded, Reply
from pagefleet_engine.executor.rank_pages import RankPool, StepFence
from pagefleet_engine.executor.ring import Buffer
from pagefleet_engine.executor.vital_signs import RankProgress, Signs
from pagefleet_engine.nodes.far_pools import FarPools
from pagefleet_engine.nodes.messages import AskPlanes, Beat, Command, End, Hello, ToFollower
from pagefleet_engine.ranks.doorbell import Doorbell


class RemoteNode:
    """Implements `RankNode` over the link. The link's thread fills it in, under its lock."""

    def __init__(
        self, node: int, ranks: range, post: Callable[[int, ToFollower, Sequence[Buffer]], None], key: FleetKey
    ) -> None:
        self.node = node
        self._key = key
        self._pools_port = 0
        """Where its ranks' K/V can be asked for, once they have loaded."""
        self._pools: FarPools | None = None
        self._wires: Mapping[int, LinkWire] = {}
        """To the planes of its ranks, where those may have some."""
        self.ranks = ranks
        self.peer: bytes | None = None
        """The connection; None: nobody has come, or who came has gone."""
        self.gone = threading.Event()
        """Set when the follower came and is there no more."""
        self.is_present = False
        """Whether the follower has the model, and was not told to start yet."""
        self.last_refusal = ""
        self.has_come = False
        """Whether a follower has been let in, and has not gone since, unless the engine has begun."""
        self._hello: Hello | None = None
        """Of the last one."""
        self._post = post
        self._bell = Doorbell()
        self._lock = threading.Lock()
        self._replies: deque[tuple[int, Reply]] = deque()
        self._ended: tuple[int, str] | None = None
        self._signs: Sequence[Signs] = [Signs()] * len(ranks)
        self._progress: Sequence[RankProgress] = [("starting", 0, 0)] * len(ranks)

    # --- the executor's side

    @property
    def host(self) -> str:
        """See RankNode; "node 1" while nobody has come."""
        return f"node {self.node}" if self._hello is None else self._hello.host

    @property
    def bell(self) -> int:
        """See RankNode."""
        return self._bell.fileno()

    def send(self, parts: Sequence[Buffer], or_raise: Callable[[], None]) -> None:
        """See RankNode: there is always room."""
        self._post(self.node, Command(), parts)

    def receive(self) -> Iterator[tuple[int, Reply]]:
        """See RankNode."""
        self._bell.take()
        while self._replies:
            yield self._replies.popleft()

    def ended(self) -> tuple[int, str] | None:
        """See RankNode."""
        with self._lock:
            return self._ended

    def signs(self) -> Sequence[Signs]:
        """See RankNode, by this machine's clock."""
        with self._lock:
            return self._signs

    def progress(self) -> Sequence[RankProgress]:
        """See RankNode."""
        with self._lock:
            return self._progress

    def pools(
        self, shards: Sequence[KVShard], loaded: Mapping[int, Loaded], is_over: Callable[[], bool]
    ) -> list[tuple[KVShard, RankPool]]:
        """See RankNode."""
        lost = partial(self.lost, self.ranks[0], "can no longer be asked for its K/V: the connection to it was lost")
        self._pools = far = FarPools(self.address, self._pools_port, self._key, is_over, lost)
        return [(shards[one], far.of_rank(one, loaded[one].bytes_per_block, shards[one])) for one in self.ranks]

    def devices(self, fence: StepFence, is_over: Callable[[], bool]) -> Sequence[PlaneDevice]:
        """See RankNode."""
        wires = {rank: LinkWire(partial(self._post, self.node, AskPlanes(rank))) for rank in self.ranks}
        self._wires = wires  # whole, as the link's thread looks for them
        return [AskedDevice(wire, f"rank {rank} on {self.host}", fence, is_over) for rank, wire in wires.items()]

    def wait_for_steps(self, num_steps: int, is_over: Callable[[], bool]) -> None:
        """See RankNode."""
        assert self._pools is not None, "nobody has asked for the pools"
        self._pools.wait(num_steps)

    def leave(self, why: str) -> None:
        """See RankNode."""
        self._post(self.node, End(why), ())

    def kill(self, why: str) -> None:
        """See RankNode: the follower does it."""
        self._post(self.node, End(why), ())

    def end(self, within_s: float) -> None:
        """See RankNode. A follower that is out of reach ends by itself."""
        if self.has_come:
            self.gone.wait(within_s)

    @property
    def address(self) -> str:
        """Of the machine, which has come."""
        assert self._hello is not None
        return self._hello.address

    # --- the link's side

    def came(self, peer: bytes, hello: Hello) -> None:
        """Take a follower in."""
        self.peer, self._hello, self.has_come = peer, hello, True

    def told(self, rank: int, reply: Reply, pools_port: int = 0) -> None:
        """Pass on what a rank told, and where its machine's K/V can be asked for."""
        self._pools_port = pools_port
        self._replies.append((rank, reply))
        self._bell.ring()

    def planes_told(self, rank: int, parts: Sequence[bytes]) -> None:
        """Pass on what planes of a rank told."""
        if (wire := self._wires.get(rank)) is not None:
            wire.put(parts)

    def beat(self, beat: Beat) -> None:
        """Take in how the ranks are; their clocks' zero is not ours."""
        now = time.monotonic()
        if len(beat.signs) != len(self.ranks) or len(beat.progress) != len(self.ranks):
            return
        with self._lock:
            self._signs = [one.moved(now) for one in beat.signs]
            self._progress = beat.progress

    def lost(self, rank: int, status: str) -> None:
        """Note that a rank has ended; the first one counts."""
        with self._lock:
            self._ended = self._ended or (rank, status)
        self._bell.ring()

    def left(self, status: str, is_begun: bool) -> None:
        """Note that the follower is there no more; before the engine has begun, another may come in its place."""
        self.peer = None
        if is_begun:
            self.lost(self.ranks[0], status)
            self.gone.set()
        else:
            self.has_come = self.is_present = False

    def close(self) -> None:
        """Free the bell, which nobody may ring any more, and the connection to its pools."""
        if self._pools is not None:
            self._pools.close()
        self._bell.close()


class LinkWire:
    """Implements `PlaneWire` to a rank of another machine. The link's thread puts in what its planes tell.

    Args:
        post: has the link say something to the rank's planes; nothing happens where it has ended.
    """

    def __init__(self, post: Callable[[Sequence[Buffer]], None]) -> None:
        self._post = post
        self._told: deque[Sequence[bytes]] = deque()
        self._bell = Doorbell()
        weakref.finalize(self, os.close, self._bell.fd)  # the link may be over before who waits for the bell

    @property
    def bell(self) -> int:
        """See PlaneWire."""
        return self._bell.fileno()

    def send(self, parts: Sequence[Buffer], or_raise: Callable[[], None]) -> None:
        """See PlaneWire: there is always room."""
        self._post(parts)

    def receive(self, timeout_s: float) -> Sequence[Buffer] | None:
        """See PlaneWire; None also where the bell has rung for what was received already."""
        if not self._told:
            self._bell.wait(timeout_s)
        self._bell.take()
        told = self._told.popleft() if self._told else None
        if self._told:
            self._bell.ring()
        return told

    def put(self, parts: Sequence[bytes]) -> None:
        """Add what is told."""
        self._told.append(parts)
        self._bell.ring()
