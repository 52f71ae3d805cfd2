"""The fleet key: one secret that the engines and routers of one service share, and what is derived from it.

Whoever has it is part of the fleet. ZMQ sockets between pods use CURVE: each role's key pair comes from the fleet key,
so there is nothing to exchange, and a peer without the key can neither listen nor be heard.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MIN_BYTES = 32
MAX_BYTES = 4096

FleetRole = Literal["engine", "router", "engine-peer", "node"]
"""`engine` listens; `router`, `engine-peer` (an engine that asks another for K/V) and `node` (a machine of some of its
ranks) connect to it."""


class FleetKeyError(ValueError):
    """The file holds no fleet key; the message is the end of a sentence about it."""


@dataclass(frozen=True, slots=True)
class FleetKey:
    """The secret. It does not show in a repr."""

    secret: bytes = field(repr=False)

    def curve_secret(self, role: FleetRole) -> bytes:
        """Return the 32 bytes of a role's CURVE secret key."""
        return hmac.new(self.secret, b"pagefleet curve 1 " + role.encode(), hashlib.sha256).digest()


def read_fleet_key(file: Path) -> FleetKey:
    """Read a fleet key; space around it does not count.

    Raises:
        FleetKeyError: the file cannot be read, or is too short or too long.
    """
    try:
        with file.open("rb") as stream:
            secret = stream.read(MAX_BYTES + 1).strip()
    except OSError as error:
        raise FleetKeyError(f"cannot be read ({error.strerror}): give a readable file") from error
    if not MIN_BYTES <= len(secret) <= MAX_BYTES:
        raise FleetKeyError(f"holds {len(secret)} bytes: write at least {MIN_BYTES} random ones, as hexadecimal digits")
    return FleetKey(secret)
