"""By which of its addresses and interfaces a machine reaches another."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from pagefleet_engine.errors import ConfigError


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine that packets to another one carry; nothing is sent.

    Raises:
        OSError: the host is unknown, or no way leads there.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asked:
        asked.connect(address)
        return str(asked.getsockname()[0])


def named_address(name: str, port: int) -> str:
    """Return the address of this machine that its name stands for, `master_addr`.

    Raises:
        ConfigError: there is none, or none that another machine reaches.
    """
    try:
        found = address_towards(name, port)
    except OSError as error:
        raise ConfigError(
            f"master_addr {name} leads nowhere ({error.strerror}): give the name or address by which other nodes reach "
            "node 0"
        ) from error
    if _is_loopback(found) and name != "localhost" and not _is_loopback(name):
        raise ConfigError(
            f"master_addr {name} is {found} on node 0, where no other reaches it: give an address, or correct its "
            "/etc/hosts"
        )
    return found


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address."""
    found: Mapping[str, Sequence[Any]] = psutil.net_if_addrs()
    for name, addresses in found.items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None
