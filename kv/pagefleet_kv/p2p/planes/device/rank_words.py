"""What two engines tell each other of their ranks before a link has lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from pagefleet_kv.p2p.planes.device.lanes import ShardsDiffer
from pagefleet_kv.port import KVShard

MAX_RANKS = 256
_Place = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class _Held(msgspec.Struct, frozen=True, array_like=True):
    """`KVShard` on its way: first, and the one after the last."""

    layers: tuple[_Place, _Place]
    heads: tuple[_Place, _Place]
    vectors: _Place


class Shards(msgspec.Struct, frozen=True, array_like=True):
    """The ranks of one side, and what a link of theirs is called."""

    token: bytes
    ranks: list[_Held]

    @classmethod
    def of(cls, token: bytes, shards: Sequence[KVShard]) -> Shards:
        """Of ranks that hold these."""

        def ends(one: range) -> tuple[int, int]:
            return one.start, one.stop

        return cls(token, [_Held(ends(one.layers), ends(one.heads), one.vectors) for one in shards])

    @property
    def held(self) -> list[KVShard]:
        """What each holds."""
        return [KVShard(range(*one.layers), range(*one.heads), one.vectors) for one in self.ranks]


class Invited(msgspec.Struct, frozen=True, array_like=True):
    """Invitations of all lanes."""

    token: bytes
    lanes: list[bytes]


encode = msgspec.msgpack.Encoder().encode
decode_invited = msgspec.msgpack.Decoder(Invited).decode
_decode = msgspec.msgpack.Decoder(Shards).decode


def decode_shards(data: bytes) -> Shards:
    """Parse `Shards`.

    Raises:
        ShardsDiffer: they are none.
    """
    try:
        shards = _decode(data)
    except msgspec.MsgspecError as error:
        raise ShardsDiffer(f"its ranks cannot be read: {error}") from None
    if not 0 < len(shards.ranks) <= MAX_RANKS:
        raise ShardsDiffer(f"it says that it has {len(shards.ranks)} ranks")
    return shards
