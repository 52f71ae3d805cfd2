"""Ranks as actors that Ray places: each starts its rank and follows the core, as a machine with one rank does.

Ray finds the machines and starts the actors; what the ranks are told and tell goes over our own link.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.settings.log import set_up_logging

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.errors import ConfigError, EngineError
from pagefleet_engine.executor.node import RankNode
from pagefleet_engine.nodes.agreement import model_digest
from pagefleet_engine.nodes.follower import Follower, LeaderAddress
from pagefleet_engine.nodes.leader import begin_with_all
from pagefleet_engine.nodes.link import NodeLink, Terms
from pagefleet_engine.nodes.messages import Present
from pagefleet_engine.nodes.model_copy import ONLY_COPY, ModelCopy

_log = logging.getLogger(__name__)


class ActorPlace(msgspec.Struct, frozen=True):
    """What an actor is told."""

    config: EngineConfig
    rank: int
    folder: str
    """Of the model, on every machine."""
    host: str
    port: int
    secret: bytes
    log_level: int


class RankActor:
    """Runs one rank, in a process of its own below the actor's.

    Args:
        told: an `ActorPlace`, as msgpack.
    """

    def __init__(self, told: bytes) -> None:
        self._place = msgspec.msgpack.decode(told, type=ActorPlace)

    def run(self) -> str:
        """Follow to the end; returns what ended it."""
        place = self._place
        set_up_logging(place.config.parallel.name(place.rank), "pagefleet_engine")
        logging.getLogger("pagefleet_engine").setLevel(place.log_level)
        leader = LeaderAddress(place.host, place.port, FleetKey(place.secret))
        follower = Follower(place.config, place.rank, leader)
        try:
            follower.bring(Path(place.folder))
            follower.run()
        except EngineError as error:
            return str(error)
        return "was stopped"


class RayMachines:
    """Implements `Machines` by a placement group with a bundle for each rank.

    Args:
        config: of the engine.
        device: that ranks compute on.
        folder: of the model, the same on every machine.
        of: which copy of the model the ranks are.

    Raises:
        ConfigError: Ray is not installed, or its cluster cannot be reached.
    """

    def __init__(self, config: EngineConfig, device: torch.device, folder: Path, of: ModelCopy = ONLY_COPY) -> None:
        self._ray = _ray()
        self._config, self._device = config, device
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._group: Any = None
        size = config.parallel.world_size
        secret = secrets.token_bytes(32)
        try:
            self._ray.init(ignore_reinit_error=True)
            host = self._ray.util.get_node_ip_address()
        except (ConnectionError, RuntimeError, ValueError) as error:
            line = " ".join(str(error).split())[:200]
            raise ConfigError(f"Ray cannot be reached ({line}): see `ray status`, and RAY_ADDRESS") from error
        threads = max(1, (config.model.num_threads or size) // size)
        terms = Terms(config, Present(model_digest(folder), device.type), threads, of=of)
        self._threads = threads
        self._link = NodeLink(terms, host, 0, FleetKey(secret), [(rank, range(rank, rank + 1)) for rank in range(size)])
        self.nodes: Sequence[RankNode] = [*self._link.nodes.values()]
        """See Machines."""
        self._told = [
            ActorPlace(config, rank, str(folder), host, self._link.port, secret, _log.getEffectiveLevel())
            for rank in range(size)
        ]

    def start(self, folder: Path, command: Sequence[str]) -> None:
        """See Machines. Waits until Ray has placed all actors, and they have come."""
        util, size = self._ray.util, len(self._told)
        gpus = 1 if self._device.type == "cuda" else 0
        bundle = {"CPU": self._threads, **({"GPU": gpus} if gpus else {})}
        self._group = util.placement_group([bundle] * size, strategy="PACK")
        within_s = self._config.parallel.rank_wait_timeout
        if not self._group.wait(within_s):
            raise ConfigError(
                f"Ray had no room for {size} ranks with {bundle} each within {within_s:.0f} s: see `ray status`, add "
                "machines, or lower tensor_parallel_size"
            )
        kind = self._ray.remote(RankActor)
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        for told in self._told:
            placed = strategy(self._group, placement_group_bundle_index=told.rank)
            options = kind.options(num_cpus=self._threads, num_gpus=gpus, max_restarts=0, scheduling_strategy=placed)
            self._actors.append(options.remote(msgspec.msgpack.encode(told)))
            self._runs.append(self._actors[-1].run.remote())
        begin_with_all(self._link, within_s, self._look)

    def close(self) -> None:
        """See Machines."""
        for actor in self._actors:
            with contextlib.suppress(Exception):  # Ray itself may be gone
                self._ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._group)
        self._link.close()

    def _look(self) -> None:
        """Raises ConfigError where an actor has ended."""
        ended, _ = self._ray.wait(self._runs, timeout=0)
        for run in ended:
            rank = self._runs.index(run)
            try:
                line = self._ray.get(run)
            except Exception as error:  # whatever Ray says of an actor that is gone
                line = " ".join(str(error).split())[:300]
            raise ConfigError(f"rank {rank} under Ray: {line}")


def _ray() -> Any:
    """Import Ray.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "distributed_executor_backend is ray, and Ray is not installed: pip install 'pagefleet-engine[ray]'"
        ) from error
