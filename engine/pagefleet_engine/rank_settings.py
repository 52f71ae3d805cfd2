"""Data ranks with ports of their own: what each is told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pagefleet_protocol.kube_names import RANK_PORTS_APART

from pagefleet_engine.config import EngineConfig, ServerConfig
from pagefleet_engine.errors import ConfigError


def rank_settings(config: EngineConfig, server: ServerConfig) -> Sequence[tuple[EngineConfig, ServerConfig]]:
    """Return the settings of the server of each data rank; none where ranks have no ports of their own.

    Raises:
        ConfigError: two of them would listen on the same port.
    """
    parallel = config.parallel
    if not parallel.data_parallel_multi_port_external_lb:
        return ()
    if server.port == 0:
        raise ConfigError("data_parallel_multi_port_external_lb counts ports from port, and port is 0: give one")
    found = [_of_rank(config, server, rank) for rank in range(parallel.data_parallel_size)]
    _check_ports([("data_parallel_supervisor_port", supervisor_port(config, server))], found)
    return found


def supervisor_port(config: EngineConfig, server: ServerConfig) -> int:
    """Return where the state of all ranks is told."""
    return server.data_parallel_supervisor_port or server.port + config.parallel.data_parallel_size


def _of_rank(config: EngineConfig, server: ServerConfig, rank: int) -> tuple[EngineConfig, ServerConfig]:
    parallel = replace(config.parallel, data_parallel_multi_port_external_lb=False, data_parallel_rank=rank)
    transfer, apart = config.kv_transfer, rank * RANK_PORTS_APART
    if transfer.kv_port:
        transfer = replace(transfer, kv_port=_port("kv_port", transfer.kv_port + apart + 1) - 1)
    events = server.kv_events_port
    return (
        replace(config, parallel=parallel, kv_transfer=transfer),
        replace(
            server,
            port=_port("port", server.port + rank),
            kv_events_port=events and _port("kv_events_port", events + apart + 1) - 1,
            profiler_dir=None if server.profiler_dir is None else str(Path(server.profiler_dir) / f"rank-{rank}"),
        ),
    )


def _port(name: str, port: int) -> int:
    if port > 65535:
        raise ConfigError(f"{name} of the last data rank would be {port}, and ports end at 65535: give a lower {name}")
    return port


def _check_ports(taken: list[tuple[str, int]], ranks: Sequence[tuple[EngineConfig, ServerConfig]]) -> None:
    """Raises ConfigError where one port has two uses."""
    for rank, (config, server) in enumerate(ranks):
        pairs = [("kv_events_port", server.kv_events_port)]
        if "p2p" in config.kv_transfer.connectors:
            pairs.append(("kv_port", config.kv_transfer.kv_port))
        taken.append((f"port of rank {rank}", server.port))
        taken += [(f"{name} of rank {rank}", port + next_one) for name, port in pairs if port for next_one in (0, 1)]
    users: dict[int, str] = {}
    for name, port in taken:
        if port in users:
            raise ConfigError(
                f"{name} and {users[port]} are both {port}: ranks count on from port by 1, from kv_events_port and "
                f"kv_port, with two ports each, by {RANK_PORTS_APART}; give others"
            )
        users[port] = name
