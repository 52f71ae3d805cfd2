"""Which ports each data rank has, and what those with a server of their own are told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pagefleet_kv.config import KVTransferConfig
from pagefleet_protocol.kube_names import RANK_PORTS_APART

from pagefleet_engine.config import EngineConfig, ServerConfig
from pagefleet_engine.errors import ConfigError


def rank_settings(config: EngineConfig, server: ServerConfig) -> Sequence[tuple[EngineConfig, ServerConfig]]:
    """Return the settings of the server of each data rank; none where they are behind one port.

    Raises:
        ConfigError: two of them would listen on the same port.
    """
    parallel = config.parallel
    if not parallel.data_parallel_multi_port_external_lb:
        if parallel.data_ranks > 1:
            ranks = range(parallel.data_ranks)
            _check_ports([("port", server.port)], [_kv_ports(config, server, rank) for rank in ranks])
        return ()
    if server.port == 0:
        raise ConfigError("data_parallel_multi_port_external_lb counts ports from port, and port is 0: give one")
    found = [_of_rank(config, server, rank) for rank in range(parallel.data_parallel_size)]
    taken = [("data_parallel_supervisor_port", supervisor_port(config, server))]
    taken += [(f"port of rank {rank}", own.port) for rank, (_, own) in enumerate(found)]
    _check_ports(taken, [_kv_ports(config, server, rank) for rank, _ in enumerate(found)])
    return found


def supervisor_port(config: EngineConfig, server: ServerConfig) -> int:
    """Return where the state of all ranks is told."""
    return server.data_parallel_supervisor_port or server.port + config.parallel.data_parallel_size


def events_port(first: int, rank: int) -> int:
    """Return where a data rank publishes KV events, given where the first one does; 0 stays 0.

    Raises:
        ConfigError: there is no such port.
    """
    return _kv_port("kv_events_port", first, rank)


def transfer_of_rank(config: KVTransferConfig, rank: int) -> KVTransferConfig:
    """Return the settings with which a data rank passes its K/V: it has ports of its own.

    Raises:
        ConfigError: there is no such port.
    """
    return replace(config, kv_port=_kv_port("kv_port", config.kv_port, rank))


def _of_rank(config: EngineConfig, server: ServerConfig, rank: int) -> tuple[EngineConfig, ServerConfig]:
    parallel = replace(config.parallel, data_parallel_multi_port_external_lb=False, data_parallel_rank=rank)
    return (
        replace(config, parallel=parallel, kv_transfer=transfer_of_rank(config.kv_transfer, rank)),
        replace(
            server,
            port=_port("port", server.port + rank),
            kv_events_port=events_port(server.kv_events_port, rank),
            profiler_dir=None if server.profiler_dir is None else str(Path(server.profiler_dir) / f"rank-{rank}"),
        ),
    )


def _kv_ports(config: EngineConfig, server: ServerConfig, rank: int) -> list[tuple[str, int]]:
    """Name the first of each two ports that a rank's cache has."""
    found = [("kv_events_port", events_port(server.kv_events_port, rank))]
    if "p2p" in config.kv_transfer.connectors:
        found.append(("kv_port", transfer_of_rank(config.kv_transfer, rank).kv_port))
    return found


def _kv_port(name: str, first: int, rank: int) -> int:
    """The next port is taken too."""
    return first and _port(name, first + rank * RANK_PORTS_APART + 1) - 1


def _port(name: str, port: int) -> int:
    if port > 65535:
        raise ConfigError(f"{name} of the last data rank would be {port}, and ports end at 65535: give a lower {name}")
    return port


def _check_ports(taken: Sequence[tuple[str, int]], ranks: Sequence[Sequence[tuple[str, int]]]) -> None:
    """Raises ConfigError where one port has two uses."""
    kv = [
        (f"{name} of rank {rank}", port + next_one)
        for rank, pairs in enumerate(ranks)
        for name, port in pairs
        for next_one in (0, 1)
        if port
    ]
    users: dict[int, str] = {}
    for name, port in [(name, port) for name, port in taken if port] + kv:
        if port in users:
            raise ConfigError(
                f"{name} and {users[port]} are both {port}: ranks count on from port by 1, from kv_events_port and "
                f"kv_port, with two ports each, by {RANK_PORTS_APART}; give others"
            )
        users[port] = name
