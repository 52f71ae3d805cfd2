"""From the names in the configuration to a connector.

What cannot work is refused in one line, most of it before the model is loaded.
"""

from __future__ import annotations

from pagefleet_engine.config import EngineConfig, KVTransferConfig
from pagefleet_engine.core.kv_groups import KVGroups
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.kv_transfer.engine_side import BuiltConnector, EngineIdentity, EngineSide
from pagefleet_engine.kv_transfer.multi import MultiConnector
from pagefleet_engine.kv_transfer.p2p.listening import check_listening
from pagefleet_engine.kv_transfer.p2p.peers import parse_peers

NAMES = ("p2p", "offload", "file")


def check_connectors(config: EngineConfig, identity: EngineIdentity) -> None:
    """Refuse connectors that cannot be.

    Raises:
        ConfigError: a name is unknown or stands twice, a setting that one needs is missing or wrong, a port is taken,
            or there is no prefix cache for what they bring.
    """
    names = config.kv_transfer.connectors
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"kv_connector names {name!r}: give {', '.join(NAMES)}, or several with commas between")
        if names.count(name) > 1:
            raise ConfigError(f"kv_connector names {name} twice: give each connector once")
    if names and not config.cache.enable_prefix_caching:
        raise ConfigError("kv_connector needs the prefix cache: leave enable_prefix_caching on, or kv_connector out")
    if "file" in names and config.kv_transfer.kv_offload_dir is None:
        raise ConfigError("kv_connector file needs a folder: give kv_offload_dir")
    parse_peers(config.kv_transfer.kv_peers)
    if "p2p" in names:
        check_listening(config.kv_transfer, identity)


def check_layers(config: EngineConfig, groups: KVGroups) -> None:
    """Refuse connectors for models whose layers do not share one block table.

    Raises:
        ConfigError: layers see different parts of the context.
    """
    if config.kv_transfer.connectors and (len(groups) > 1 or groups.groups[0].window is not None):
        raise ConfigError(
            "kv_connector passes the K/V of models whose layers all see the whole context, and some of this one's have "
            "a sliding window: leave kv_connector out, or give a max_model_len within the window"
        )


def build_connector(config: KVTransferConfig, side: EngineSide) -> BuiltConnector:
    """Make what the configuration names, at least one; several are one connector that asks them in this order.

    Raises:
        ConfigError: one of them cannot be made, e.g. as its folder or its port is taken.
    """
    built: list[BuiltConnector] = []
    try:
        for name in config.connectors:
            built.append(_build_one(name, config, side))
    except ConfigError:
        for other in built:
            other.connector.close()
        raise
    if len(built) == 1:
        return built[0]
    ports = [other.port for other in built if other.port is not None]
    return BuiltConnector(MultiConnector([other.connector for other in built]), ports[0] if ports else None)


def _build_one(name: str, config: KVTransferConfig, side: EngineSide) -> BuiltConnector:
    # Imported where they are asked for: each brings what an engine without it need not load.
    match name:
        case "p2p":
            from pagefleet_engine.kv_transfer.p2p.build import build_p2p  # noqa: PLC0415

            return build_p2p(config, side)
        case "offload":
            from pagefleet_engine.kv_transfer.offload.build import build_offload  # noqa: PLC0415

            return BuiltConnector(build_offload(config, side.shape, side.pages))
        case "file":
            from pagefleet_engine.kv_transfer.file.connector import build_file  # noqa: PLC0415

            return BuiltConnector(build_file(config, side.shape, side.pages))
        case _:
            raise ConfigError(f"kv_connector {name} is not part of this engine")
