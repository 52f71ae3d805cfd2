"""What p2p listens with: the fleet's key and its ports, one for control messages and the next one for the tcp plane."""

from __future__ import annotations

import socket

from pagefleet_protocol.fleet_key import FleetKey

from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.curve import load_fleet_key
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.port import EngineIdentity


def check_listening(config: KVTransferConfig, identity: EngineIdentity) -> None:
    """Refuse, before anything is loaded, what nobody could be heard with. A port may still be taken afterwards.

    Raises:
        KVConfigError: there is no fleet key, or an address cannot be used.
    """
    fleet_key(identity)
    listen(config.kv_host, config.kv_port).close()
    if config.kv_port and has_tcp(config):
        listen(config.kv_host, config.kv_port + 1).close()


def fleet_key(identity: EngineIdentity) -> FleetKey:
    """Return the key of the fleet, without which nobody is heard.

    Raises:
        KVConfigError: there is none.
    """
    if identity.fleet_key_file is None:
        raise KVConfigError("kv_connector p2p passes K/V to who has the fleet's key: give fleet_key_file")
    return load_fleet_key(identity.fleet_key_file)


def has_tcp(config: KVTransferConfig) -> bool:
    """Return whether blocks may travel by tcp, which takes the port after the control port."""
    return config.kv_data_plane in ("auto", "tcp")


def listen(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that listens.

    Raises:
        KVConfigError: the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise KVConfigError(
            f"cannot listen for K/V on {host} port {port} ({error.strerror}): give another kv_port or kv_host"
        ) from error
    listener.setblocking(False)
    return listener
