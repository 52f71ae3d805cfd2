"""By which of its addresses and interfaces a machine reaches another."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine that packets to another one carry; nothing is sent.

    Raises:
        OSError: the host is unknown, or no way leads there.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asked:
        asked.connect(address)
        return str(asked.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address."""
    found: Mapping[str, Sequence[Any]] = psutil.net_if_addrs()
    for name, addresses in found.items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None
