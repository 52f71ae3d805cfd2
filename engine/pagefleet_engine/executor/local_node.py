"""The ranks of this machine: a process for each, over rings in shared memory."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from pagefleet_kv.p2p.planes.device.opening import PlaneDevice
from pagefleet_kv.port import KVShard

from pagefleet_engine.config import EngineConfig, cpu_threads
from pagefleet_engine.cores import CoreShare, allowed_cores, share_cores
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.executor.asked_planes import AskedDevice, PlaneRings, PlaneWire
from pagefleet_engine.executor.asked_pool import AskedPool
from pagefleet_engine.executor.local_rank import LocalRank
from pagefleet_engine.executor.messages import Loaded, RankStart, Reply, decode_reply
from pagefleet_engine.executor.rank_memory import RankMemory
from pagefleet_engine.executor.rank_pages import MappedPool, RankPool, StepFence, wait_for_steps
from pagefleet_engine.executor.ring import Buffer, RingWriter
from pagefleet_engine.executor.vital_signs import RankProgress, Signs, VitalSigns
from pagefleet_engine.ranks.network import interface_of
from pagefleet_engine.ranks.rendezvous import MAX_BYTES, Rendezvous
from pagefleet_engine.ranks.together import CopyShares


class LocalNode:
    """Implements `RankNode` over child processes.

    Args:
        ranks: their numbers, which follow each other.
        config: of the engine.
        device: that they compute on.
        rendezvous: answers what they ask.
        address: of this machine, where there are others.
        shares: of each rank, where there are other copies that step together.

    Raises:
        ConfigError: the system gives no memory, or no more descriptors.
    """

    def __init__(
        self,
        ranks: range,
        config: EngineConfig,
        device: torch.device,
        rendezvous: Rendezvous,
        address: str = "",
        shares: Sequence[CopyShares] = (),
    ) -> None:
        self.ranks = ranks
        self.host = socket.gethostname()
        self._config = config
        self._device = device
        self._rendezvous = rendezvous
        self._address = address
        self._copy_shares = shares
        self._ranks: list[LocalRank] = []
        self._end_lock = threading.Lock()
        self._has_ended = False
        copy = shares[0].copy if shares else config.parallel.data_parallel_rank or 0
        self._first_device = config.parallel.index_on_node(copy) * len(ranks)
        """Of those that this process sees, where several copies of the model are on one of several machines."""
        needed = self._first_device + len(ranks)
        if device.type == "cuda" and (found := torch.cuda.device_count()) < needed:
            raise ConfigError(
                f"{needed} ranks are to run on {self.host}, which shows {found} GPUs: lower tensor_parallel_size, "
                "or give more nodes"
            )
        try:
            self._share(device.type == "cpu")
        except OSError as error:
            raise ConfigError(_too_few("the ranks' memory cannot be made", error)) from error

    def start(self, folder: str, command: Sequence[str], num_threads: int | None = None) -> None:
        """Start the processes.

        Args:
            folder: of the model.
            command: of a rank's process.
            num_threads: of each rank on a CPU; default: its share of this machine's.

        Raises:
            ConfigError: the system starts no more.
        """
        config, size, memory, on_cpu = self._config, len(self.ranks), self._memory, self._device.type == "cpu"
        shares = _shares(config, size)
        # Where there are other copies of the model, they use the same cores.
        is_bound = on_cpu and config.parallel.data_parallel_size == 1
        for place, rank in enumerate(self._ranks):
            copies = self._copy_shares[place] if self._copy_shares else None
            start = RankStart(
                rank=self.ranks[place],
                size=config.parallel.world_size,
                place=place,
                num_places=size,
                sentinel=rank.writing,
                config=config,
                num_threads=num_threads or shares[place].num_threads,
                folder=folder,
                cores=shares[place].cores if is_bound else (),
                log_level=logging.getLogger("pagefleet_engine").getEffectiveLevel(),
                commands=memory.commands,
                replies=memory.replies[place],
                signs=memory.signs,
                shared=memory.shared[place],
                copy_shares=copies,
                store=rank.asked.fileno(),
                address=self._address,
                pool=memory.pool(place),
                copies=memory.copies(place),
                planes=memory.planes(place),
            )
            seen = "" if on_cpu else _visible_devices()[self._first_device + place]
            environment = {} if on_cpu else {"CUDA_VISIBLE_DEVICES": seen, **self._network()}
            try:
                inherited = (*memory.fds(place), *(() if copies is None else copies.fds))
                rank.start(start, command, environment, inherited)
            except OSError as error:
                name = f"rank {self.ranks[place]} on {self.host}"
                raise ConfigError(_too_few(f"{name} cannot be started", error)) from error

    @property
    def bell(self) -> int:
        """See RankNode."""
        return self._bells.fileno()

    @property
    def pids(self) -> list[int]:
        """Of the processes, which were started."""
        return [rank.pid for rank in self._ranks]

    def send(self, parts: Sequence[Buffer], or_raise: Callable[[], None]) -> None:
        """See RankNode."""
        self._commands.send(parts, or_raise)

    def receive(self) -> Iterator[tuple[int, Reply]]:
        """See RankNode."""
        ready = {fd for fd, _ in self._bells.poll(0)}
        for number, rank in zip(self.ranks, self._ranks, strict=True):
            if rank.replies.fileno() in ready:
                while (parts := rank.replies.receive(0)) is not None:
                    yield number, decode_reply(parts)
            if rank.asking.fileno() in ready:
                self._answer(rank.asking)

    def ended(self) -> tuple[int, str] | None:
        """See RankNode."""
        with self._end_lock:
            ready = set() if self._has_ended else {fd for fd, _ in self._bells.poll(0)}
            for number, rank in zip(self.ranks, self._ranks, strict=True):
                if rank.sentinel in ready:
                    return number, rank.exit_status()
        return None

    def signs(self) -> Sequence[Signs]:
        """See RankNode."""
        return self._signs.read()

    def progress(self) -> Sequence[RankProgress]:
        """See RankNode."""
        return self._signs.progress()

    def num_finished(self) -> int:
        """Return how many steps all ranks are done with."""
        return self._signs.num_finished

    def pools(
        self, shards: Sequence[KVShard], loaded: Mapping[int, Loaded], is_over: Callable[[], bool]
    ) -> list[tuple[KVShard, RankPool]]:
        """See RankNode."""
        try:
            return [(shards[rank], self._pool(shards[rank], loaded[rank], rank, is_over)) for rank in self.ranks]
        except OSError as error:
            raise ConfigError(_too_few("K/V of ranks cannot be reached", error)) from error

    def _pool(self, shard: KVShard, told: Loaded, rank: int, is_over: Callable[[], bool]) -> RankPool:
        place = rank - self.ranks.start
        memory = self._memory.pool(place)
        if (rings := self._memory.copies(place)) is None:
            return MappedPool(told.num_blocks, told.bytes_per_block, shard, memory)
        return AskedPool(told.bytes_per_block, shard, memory, rings, is_over)

    def devices(self, fence: StepFence, is_over: Callable[[], bool]) -> Sequence[PlaneDevice]:
        """See RankNode."""
        wires = self.plane_wires().items()
        return [AskedDevice(wire, f"rank {rank} on {self.host}", fence, is_over) for rank, wire in wires]

    def plane_wires(self) -> Mapping[int, PlaneWire]:
        """Return a wire to the planes of each rank, by its number; none: they can have no planes."""
        try:
            return {rank: PlaneRings(rings) for rank, rings in zip(self.ranks, self._memory.plane_rings, strict=False)}
        except OSError as error:
            raise ConfigError(_too_few("planes of ranks cannot be reached", error)) from error

    def wait_for_steps(self, num_steps: int, is_over: Callable[[], bool]) -> None:
        """See RankNode."""
        wait_for_steps(self.num_finished, is_over, num_steps)

    def leave(self, why: str) -> None:
        """See RankNode."""
        for rank in self._ranks:
            rank.leave()

    def kill(self, why: str) -> None:
        """See RankNode."""
        for rank in self._ranks:
            rank.kill()

    def end(self, within_s: float) -> None:
        """See RankNode."""
        deadline = time.monotonic() + within_s
        with self._end_lock:
            self._has_ended = True
            for rank in self._ranks:
                rank.end(max(0.0, deadline - time.monotonic()))
            self._bells.close()
        self._commands.close()
        self._memory.close()

    def _answer(self, asking: socket.socket) -> None:
        try:
            request = asking.recv(MAX_BYTES)
        except OSError:  # the rank ended before it read its answer
            request = b""
        if request:
            self._rendezvous.ask(request, partial(_send, asking))
        else:
            self._bells.unregister(asking)

    def _network(self) -> dict[str, str]:
        """What leads NCCL to the other machines, unless the environment says that already."""
        if not self._address or "NCCL_SOCKET_IFNAME" in os.environ:
            return {}
        name = interface_of(self._address)
        return {} if name is None else {"NCCL_SOCKET_IFNAME": f"={name}"}

    def _share(self, on_cpu: bool) -> None:
        """Make what the ranks share, and the ends that are this process's. Raises OSError, and leaves nothing then."""
        size = len(self.ranks)
        with contextlib.ExitStack() as on_failure:
            self._bells = select.epoll()
            on_failure.callback(self._bells.close)
            self._memory = RankMemory.make(self.ranks, self._config, on_cpu)
            on_failure.callback(self._memory.close)
            self._signs = VitalSigns(self._memory.signs, size)
            self._commands = RingWriter(self._memory.commands)
            for replies in self._memory.replies:
                rank = LocalRank(replies)
                on_failure.callback(rank.end, 0.0)
                self._ranks.append(rank)
                self._bells.register(rank.sentinel, select.EPOLLIN)
                self._bells.register(rank.replies.fileno(), select.EPOLLIN)
                self._bells.register(rank.asking, select.EPOLLIN)
            on_failure.pop_all()


def default_threads(config: EngineConfig, num_ranks: int) -> int:
    """Return the threads of each of so many ranks on this machine's CPU."""
    return _shares(config, num_ranks)[0].num_threads


def _shares(config: EngineConfig, num_ranks: int) -> list[CoreShare]:
    given = config.model.num_threads
    # Over several machines a copy of the model is given its share only where there was something to share.
    copies = config.parallel.copies_a_node if given is None else 1
    return share_cores(num_ranks, allowed_cores(), max(1, cpu_threads(given) // copies))


def _send(asking: socket.socket, answer: bytes) -> None:
    with contextlib.suppress(OSError):  # a rank that is gone is told otherwise
        asking.send(answer)


def _too_few(what: str, error: OSError) -> str:
    return f"{what} ({error}): raise the limits of processes and open files"


def _visible_devices() -> list[str]:
    """The GPUs that this process sees, as its children are to be told of them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]
