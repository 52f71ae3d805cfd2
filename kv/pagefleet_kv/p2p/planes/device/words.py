"""What the two ends of a device plane tell each other over the control plane, which keeps it secret and in order.

A word may come twice, where two engines are each other's source; its number tells. One that is missing ends the link.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec
from pagefleet_protocol.kv_blob import HEADER_BYTES

TOKEN_BYTES = 16
_ENVELOPE = struct.Struct("<16s?Q")

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class BadWord(ValueError):
    """Bytes that are no word of this version."""


class _Word(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=True):
    pass


class Join(_Word, frozen=True):
    """Target: I was invited."""


class Joined(_Word, frozen=True):
    """Source: frames can go."""


class Leave(_Word, frozen=True):
    """Either: the link is over."""

    reason: Annotated[str, msgspec.Meta(max_length=1024)]


class Announce(_Word, frozen=True):
    """Source: a frame waits in a slot of mine."""

    number: Number
    """Of the frame on this link, from 0."""
    slot: Number
    total: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    """Its `DeviceCopies.total`."""
    header: Annotated[bytes, msgspec.Meta(min_length=HEADER_BYTES, max_length=HEADER_BYTES)]


class Go(_Word, frozen=True):
    """Target: the frame has a place, and what receives it runs."""

    number: Number


class Taken(_Word, frozen=True):
    """Target: the frame's slot is read no more."""

    number: Number


class Want(_Word, frozen=True):
    """Source: I would make a communicator."""

    generation: Number


class Seat(_Word, frozen=True):
    """Target: there is room for it here."""

    generation: Number


class Meet(_Word, frozen=True):
    """Source: this is its id."""

    generation: Number
    unique_id: Annotated[bytes, msgspec.Meta(min_length=128, max_length=128)]


class PleasePark(_Word, frozen=True):
    """Target: others wait for its room; give it up if nothing is under way."""

    generation: Number


class Park(_Word, frozen=True):
    """Source: it is given up; nothing is under way."""

    generation: Number


Word = Join | Joined | Leave | Announce | Go | Taken | Want | Seat | Meet | PleasePark | Park

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Word)


@dataclass(frozen=True, slots=True)
class Envelope:
    """Which link a word belongs to, and where in its order."""

    token: bytes
    """Of the invitation that the link came from."""
    to_source: bool
    number: int


def encode_word(envelope: Envelope, word: Word) -> bytes:
    """Return what `decode_word` reads."""
    return _ENVELOPE.pack(envelope.token, envelope.to_source, envelope.number) + _ENCODER.encode(word)


def decode_word(data: bytes) -> tuple[Envelope, Word]:
    """Parse a word.

    Raises:
        BadWord: it is none.
    """
    if len(data) < _ENVELOPE.size:
        raise BadWord(f"{len(data)} bytes are no word")
    try:
        return Envelope(*_ENVELOPE.unpack_from(data)), _DECODER.decode(data[_ENVELOPE.size :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadWord(str(error)[:200]) from None
