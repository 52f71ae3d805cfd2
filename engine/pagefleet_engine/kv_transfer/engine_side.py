"""What a connector learns of the engine that it serves."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from pagefleet_protocol.kv_blob import KvShape

from pagefleet_engine.core.kv_connector import KVConnector, KVPages


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """One start of one engine."""

    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    """32 hexadecimal digits, drawn at each start."""
    fleet_key_file: str | None = None
    """File of the secret that the engines of one service share."""


@dataclass(frozen=True, slots=True)
class EngineSide:
    """One engine, as its connectors see it."""

    identity: EngineIdentity
    shape: KvShape
    """Of its blocks."""
    pages: KVPages
    """Of its worker."""
    num_blocks: int
    """Of its pool."""


@dataclass(frozen=True, slots=True)
class BuiltConnector:
    """A connector, and where others may ask it for K/V."""

    connector: KVConnector
    port: int | None = None
    """Of its control socket; None: it has none."""
