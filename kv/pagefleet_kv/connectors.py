"""From the names in the configuration to a connector.

What cannot work is refused in one line, before the model is loaded where it can be known then.

A kind of connector is a module, or an object, that an installed package names in the entry point group
`pagefleet.kv_connectors`; it is loaded when a configuration names it.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol

from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.multi import MultiConnector
from pagefleet_kv.port import BuiltConnector, EngineIdentity, EngineSide

GROUP = "pagefleet.kv_connectors"


class ConnectorKind(Protocol):
    """What an entry point names."""

    def check(self, config: KVTransferConfig, identity: EngineIdentity) -> None:
        """Refuse what can be seen to be wrong before a model is loaded.

        Raises:
            KVConfigError: a setting is missing or wrong, or a port is taken.
        """

    def build(self, config: KVTransferConfig, side: EngineSide) -> BuiltConnector:
        """Make the connector of an engine.

        Raises:
            KVConfigError: it cannot be made, e.g. as its folder or its port is taken.
        """


def check_connectors(config: KVTransferConfig, identity: EngineIdentity) -> None:
    """Refuse connectors that cannot be.

    Raises:
        KVConfigError: a name is unknown or stands twice, or `ConnectorKind.check` refuses.
    """
    names = config.connectors
    for name in names:
        if names.count(name) > 1:
            raise KVConfigError(f"kv_connector names {name} twice: give each connector once")
    for kind in [_kind(name) for name in names]:
        kind.check(config, identity)


def build_connector(config: KVTransferConfig, side: EngineSide) -> BuiltConnector:
    """Make what the configuration names, at least one; several are one connector that asks them in this order.

    Raises:
        KVConfigError: one of them cannot be made.
    """
    built: list[BuiltConnector] = []
    try:
        for name in config.connectors:
            built.append(_kind(name).build(config, side))
    except KVConfigError:
        for other in built:
            other.connector.close()
        raise
    if len(built) == 1:
        return built[0]
    ports = [other.port for other in built if other.port is not None]
    return BuiltConnector(MultiConnector([other.connector for other in built]), ports[0] if ports else None)


def _kind(name: str) -> ConnectorKind:
    """Load the kind of connector that goes by a name.

    Raises:
        KVConfigError: no installed package has it, several have, or it cannot be loaded.
    """
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        known = ", ".join(sorted(entry_points(group=GROUP).names))
        raise KVConfigError(f"kv_connector names {name!r}: give {known}, or several with commas between")
    if len({entry.value for entry in found}) > 1:
        packages = ", ".join(sorted(entry.dist.name for entry in found if entry.dist is not None))
        raise KVConfigError(f"kv_connector {name} is in several packages ({packages}): uninstall all but one")
    try:
        kind: ConnectorKind = found[0].load()
    except (ImportError, AttributeError) as error:
        raise KVConfigError(f"kv_connector {name} cannot be loaded ({error}): install its package again") from error
    if not (callable(getattr(kind, "check", None)) and callable(getattr(kind, "build", None))):
        raise KVConfigError(f"kv_connector {name} is no connector: {found[0].value} has no check and build")
    return kind
