"""What crosses between the leader, which has the engine's core, and the other machines of its ranks.

A message is frames: a struct as msgpack, and behind it what it carries on, as ranks and executor write it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.executor.vital_signs import RankProgress, Signs


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first message of a follower, on every connection."""

    version: str
    """Of its code. Of another version, nothing else of the message may be looked at."""
    node_rank: int
    host: str
    address: str
    """By which this machine is reached from where the leader is."""
    config: msgspec.Raw
    """An `EngineConfig`."""


class Present(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The follower has the model's files."""

    model: str
    """Digest of what they are."""
    device: str
    """That its ranks will compute on."""


class Told(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A rank's `Reply` follows."""

    rank: int
    pools_port: int = 0
    """Where the K/V of the machine's ranks can be asked for; 0: not before all have loaded, nor without connectors."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """How the follower's ranks are, every half second."""

    signs: Sequence[Signs]
    """Of each, by a clock that is 0 now."""
    progress: Sequence[RankProgress]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A rank has ended."""

    rank: int
    status: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The follower cannot go on, and ends; the message is a line with the remedy."""

    message: str
    by_model: bool
    """Whether the model is to blame, and no setting."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A request to the `Rendezvous` follows."""

    number: int


class PlanesTold(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """What planes on a rank's device tell follows."""

    rank: int


ToLeader = Hello | Present | Told | Beat | Ended | Failed | Ask | PlanesTold


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The follower belongs here, and is to fetch the model."""

    commit: str | None = None
    """Of the model that the leader has from the hub; a branch may mean another one elsewhere."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The follower does not belong here, and ends."""

    message: str


class Start(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Start the ranks."""

    config: EngineConfig
    """Of the leader."""
    ranks: tuple[int, int]
    """The first one, and the one after the last."""
    num_threads: int
    """Of each rank on a CPU."""
    together: int | None = None
    """Which copy of the model they are of, where these step together."""


class Command(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The parts of a command to all ranks follow."""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The answer to an `Ask` follows."""

    number: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The engine ends."""

    why: str


class Still(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Nothing; that it can be sent says that somebody is there."""


class AskPlanes(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """What planes on a rank's device are asked follows."""

    rank: int


ToFollower = Welcome | Refused | Start | Command | Answer | End | Still | AskPlanes

encode = msgspec.msgpack.Encoder().encode
decode_to_leader = msgspec.msgpack.Decoder(ToLeader).decode
decode_to_follower = msgspec.msgpack.Decoder(ToFollower).decode
