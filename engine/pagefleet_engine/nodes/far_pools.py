"""KV pools of ranks on another machine, for connectors, which are the leader's: blocks pass a connection of their own.

So none is in the way of a step's plan, whose link has one thread. The follower listens, at the port that it tells;
whoever has the engine's key may ask. A request or answer is a number, a struct as msgpack, and behind it the blocks'
bytes as the rank has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from pagefleet_kv.curve import CurveGate, SocketLimits, bind, dial_with, received
from pagefleet_kv.port import KVShard
from pagefleet_protocol.fleet_key import FleetKey

from pagefleet_engine.errors import ConfigError
from pagefleet_engine.executor.rank_pages import RankPool, wait_for_steps
from pagefleet_engine.ranks.doorbell import Doorbell

PART_BYTES = 4 * 2**20
"""Of blocks in one message, which are one block at least; two are under way at a time."""
_UNDER_WAY = 2
_LOOK_MS = 500
"""Between two looks whether the machine is there, while its answer is waited for."""
_HEARTBEAT_MS, _SILENCE_MS = 1_000, 7_000
_LIMITS = SocketLimits(0, 0, 1 << 30, _HEARTBEAT_MS, _SILENCE_MS)
_READ_MOST = 16

RAW = KVShard(range(1), range(1), 1)
"""What a follower takes a rank's blocks for: bytes."""

Bytes = NDArray[np.uint8]
Socket = zmq.Socket[bytes]


class _Wait(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Answer once all ranks of the machine are done with so many steps."""

    num_steps: int


class _Read(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answer with the blocks' bytes."""

    rank: int
    blocks: Sequence[int]


class _Write(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Fill the blocks with the bytes that follow."""

    rank: int
    blocks: Sequence[int]


_Request = _Wait | _Read | _Write
_encode = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(_Request)
_fault = msgspec.msgpack.Decoder(str)


class PoolServer:
    """The follower's end: a thread that copies, from its construction until `close`.

    Args:
        pools: of the ranks here, by their numbers, over `RAW`.
        num_finished: tells how many steps all of them are done with.
        host: address to listen on.
        key: of the engine.

    Raises:
        ConfigError: there is no port.

    Attributes:
        port: that it listens on.
    """

    def __init__(
        self, pools: Mapping[int, RankPool], num_finished: Callable[[], int], host: str, key: FleetKey
    ) -> None:
        self._pools = pools
        self._num_finished = num_finished
        self._is_over = threading.Event()
        self._wake = Doorbell()
        self._context = zmq.Context()
        try:
            self._gate = CurveGate(self._context, key, "node")
            self._router = _LIMITS.open(self._context, zmq.ROUTER)
            self._gate.guard(self._router)
            self.port = bind(self._router, host, 0)
        except OSError as error:
            self._context.destroy(linger=0)
            self._wake.close()
            raise ConfigError(f"K/V cannot be asked for at {host} ({error.strerror})") from error
        self._thread = threading.Thread(target=self._run, name="far pools", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; nothing touches the pools afterwards."""
        self._is_over.set()
        self._wake.ring()
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for inbound in (self._router, self._gate.socket, self._wake.fileno()):
            poller.register(inbound, zmq.POLLIN)
        while not self._is_over.is_set():
            poller.poll()
            self._gate.judge()
            for peer, number, *frames in received(self._router, _READ_MOST):
                self._router.send_multipart([peer, number, *self._answer(frames)])
        self._context.destroy(linger=0)

    def _answer(self, frames: Sequence[bytes]) -> Sequence[bytes | bytearray]:
        try:
            asked = _asked.decode(frames[0])
            match asked:
                case _Wait(num_steps):
                    wait_for_steps(self._num_finished, self._is_over.is_set, num_steps)
                case _Read(rank, blocks):
                    pool = self._pools[rank]
                    read = bytearray(len(blocks) * pool.layer_bytes)
                    pool.read(blocks, _as_blocks(read, len(blocks)))
                    return [_encode(""), read]
                case _Write(rank, blocks):
                    self._pools[rank].write(_as_blocks(frames[1], len(blocks)), blocks)
        except Exception as error:  # whatever a copy or a message may raise is told to who asked
            return [_encode(f"{type(error).__name__}: {error}")]
        return [_encode("")]


class FarPools:
    """The leader's end: the pools of one machine's ranks. Used by any thread.

    Args:
        host: of the machine, by which it is reached.
        port: of its `PoolServer`.
        key: of the engine.
        is_over: whether the ranks are gone.
        on_lost: is called when the connection is lost while something is asked. What was asked may still be done, later
            than anybody counts on, so the engine cannot go on.
    """

    def __init__(
        self, host: str, port: int, key: FleetKey, is_over: Callable[[], bool], on_lost: Callable[[], None]
    ) -> None:
        self._is_over, self._on_lost = is_over, on_lost
        self._is_closed = False
        self._lock = threading.Lock()
        self._num_sent = 0
        self._context = zmq.Context()
        self._dealer = _LIMITS.open(self._context, zmq.DEALER)
        dial_with(self._dealer, key, "node")
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._dealer.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")

    def of_rank(self, rank: int, bytes_per_block: int, shard: KVShard) -> FarPool:
        """Return the pool of one of its ranks, whose part of a block is so large."""
        return FarPool(self, rank, bytes_per_block, shard)

    def wait(self, num_steps: int) -> None:
        """Wait until all ranks of the machine are done with so many steps.

        Raises:
            OSError: they are gone.
        """
        self.ask([_Wait(num_steps)])

    def ask(
        self,
        requests: Sequence[_Request],
        payload: Callable[[int], Bytes] | None = None,
        take: Callable[[int, bytes], None] = lambda index, answer: None,
    ) -> None:
        """Send requests, some ahead of their answers.

        Args:
            requests: what is asked.
            payload: what the request of an index carries.
            take: is called with the index of a request, and what its answer carries.

        Raises:
            OSError: the machine is gone, or could not copy.
        """
        fault, asked = "", 0
        with self._lock:
            if self._is_closed:
                raise OSError("the engine's ranks are gone")
            for _ in received(self._monitor, _READ_MOST):
                pass  # it was lost while nobody waited, and is made again
            first = self._num_sent
            for index in range(len(requests)):
                while asked < min(index + _UNDER_WAY, len(requests)) and not fault:
                    self._send(requests[asked], None if payload is None else payload(asked))
                    asked += 1
                if index == asked:
                    break
                told, answer = self._receive(first + index)
                if fault := fault or told:
                    continue  # what is under way is still answered
                take(index, answer)
        if fault:
            raise OSError(f"a rank of another machine could not copy K/V: {fault}")

    def close(self) -> None:
        """Free the connection; whoever waits for an answer has been told that the ranks are gone."""
        with self._lock:
            self._is_closed = True
            self._dealer.disable_monitor()
            self._context.destroy(linger=0)

    def _send(self, request: _Request, payload: Bytes | None) -> None:
        more = [] if payload is None else [np.ascontiguousarray(payload).data]
        self._dealer.send_multipart([_number(self._num_sent), _encode(request), *more])
        self._num_sent += 1

    def _receive(self, number: int) -> tuple[str, bytes]:
        while True:
            while not self._dealer.poll(_LOOK_MS):
                self._raise_over()
            answered, head, *payload = self._dealer.recv_multipart()
            if answered == _number(number):  # else nobody waits for it any more
                return _fault.decode(head), payload[0] if payload else b""

    def _raise_over(self) -> None:
        if self._is_over():
            raise OSError("the engine's ranks are gone")
        if self._monitor.poll(0):  # what was asked may never be answered
            self._on_lost()
            raise OSError("the connection to K/V of another machine was lost")


class FarPool:
    """Implements `RankPool` over the network.

    Args:
        pools: of its machine.
        rank: its number.
        bytes_per_block: of the rank's part.
        shard: what the rank holds.
    """

    def __init__(self, pools: FarPools, rank: int, bytes_per_block: int, shard: KVShard) -> None:
        self._pools = pools
        self._rank = rank
        self.layer_bytes = bytes_per_block // len(shard.layers) // shard.vectors
        """See RankPool."""
        self._part = len(shard.layers), shard.vectors, self.layer_bytes
        self._most = max(1, PART_BYTES // bytes_per_block)

    def read(self, blocks: Sequence[int], into: Bytes) -> None:
        """See RankPool."""
        parts = self._parts(blocks)

        def take(index: int, answer: bytes) -> None:
            start, part = parts[index]
            into[start : start + len(part)] = np.frombuffer(answer, np.uint8).reshape(len(part), *self._part)

        self._pools.ask([_Read(self._rank, part) for _, part in parts], take=take)

    def write(self, source: Bytes, blocks: Sequence[int]) -> None:
        """See RankPool."""
        parts = self._parts(blocks)

        def payload(index: int) -> Bytes:
            start, part = parts[index]
            return source[start : start + len(part)]

        self._pools.ask([_Write(self._rank, part) for _, part in parts], payload)

    def _parts(self, blocks: Sequence[int]) -> list[tuple[int, list[int]]]:
        return [(start, [*blocks[start : start + self._most]]) for start in range(0, len(blocks), self._most)]


def _number(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _as_blocks(memory: bytes | bytearray, count: int) -> Bytes:
    return np.frombuffer(memory, np.uint8).reshape(count, 1, 1, -1)
