"""KV events: what an engine's prefix cache gains and loses, told to the routers. msgpack over ZMQ.

Blocks are named by routing keys, the first 8 bytes of their `block_hash`: a router computes the same from a prompt's
tokens. A key is a hint for the choice of an engine; 64 bits are enough, since a wrong one costs a prefill.

An engine publishes on a PUB socket, two frames a message: TOPIC, then an `EventBatch`. Batches are numbered from 1 by
each incarnation of an engine, without a gap. Whoever missed some asks on the ROUTER socket beside it (the next port)
for `Replay` or, where that is gone, `Dump`, and gets `EventBatch`es or `DumpPart`s, ending with `Done`.

An engine whose layers see different parts of the context has a block for the same tokens in each KV group. Group 0,
whose layers see most, is told in `EventBatch.events`: no hit is longer than what it has. The others are told apart
from it, where readers of an earlier version do not look.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec

from pagefleet_protocol.block_hash import BlockHash

T = TypeVar("T")

TOPIC = b"pagefleet.kv.1"
KEY_BYTES = 8
MAX_BATCH_BYTES = 1024 * 1024
"""Of one message on either socket; senders split what is larger."""
MAX_BATCH_EVENTS = 64
"""Many small events would take far more memory and time than their bytes."""


class KvEventError(ValueError):
    """Bytes that are no event message."""


class Stored(msgspec.Struct, tag="s", frozen=True, array_like=True, gc=False):
    """Blocks that later requests can use now. `keys`: packed, in the order of the prompt."""

    keys: bytes


class Removed(msgspec.Struct, tag="r", frozen=True, array_like=True, gc=False):
    """Blocks that are gone."""

    keys: bytes


class Cleared(msgspec.Struct, tag="c", frozen=True, array_like=True, gc=False):
    """All blocks are gone, of every group."""


KvEvent = Stored | Removed | Cleared


class GroupEvents(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What changed in one KV group, in this order."""

    group_idx: Annotated[int, msgspec.Meta(ge=1, le=255)]
    events: Annotated[list[Stored | Removed], msgspec.Meta(max_length=MAX_BATCH_EVENTS)]


class EventBatch(msgspec.Struct, tag="b", frozen=True, array_like=True, gc=False):
    """What changed, in this order: first in group 0, and all groups where it was cleared. `seq` counts from 1."""

    incarnation: str
    seq: int
    events: Annotated[list[KvEvent], msgspec.Meta(max_length=MAX_BATCH_EVENTS)]
    other_groups: Annotated[list[GroupEvents], msgspec.Meta(max_length=MAX_BATCH_EVENTS)] = []


class Replay(msgspec.Struct, tag="replay", frozen=True, array_like=True, gc=False):
    """Ask for the batches from `first` to `last`, both included."""

    first: int
    last: int


class Dump(msgspec.Struct, tag="dump", frozen=True, array_like=True, gc=False):
    """Ask for everything that is cached: of group 0, or of every group."""

    every_group: bool = False


class DumpPart(msgspec.Struct, tag="p", frozen=True, array_like=True, gc=False):
    """Some of what is cached as of batch `seq`."""

    incarnation: str
    seq: int
    keys: bytes
    group_idx: int = 0


class Done(msgspec.Struct, tag="done", frozen=True, array_like=True, gc=False):
    """The end of an answer. `complete` False: some of the replay is not kept any more, ask for a dump.

    `seq`: the newest batch there is.
    """

    incarnation: str
    seq: int
    complete: bool = True


Published = EventBatch
Request = Replay | Dump
Answer = EventBatch | DumpPart | Done


def routing_key(block_hash: BlockHash) -> int:
    """Return the 64-bit name of a block."""
    return int.from_bytes(block_hash[:KEY_BYTES], "little")


def pack_keys(block_hashes: Iterable[bytes]) -> bytes:
    """Return the packed keys of blocks, from their hashes."""
    return b"".join([block_hash[:KEY_BYTES] for block_hash in block_hashes])


def unpack_keys(packed: bytes) -> Sequence[int]:
    """Return keys as integers.

    Raises:
        KvEventError: the length is no multiple of a key's.
    """
    if len(packed) % KEY_BYTES:
        raise KvEventError(f"{len(packed)} bytes are no whole number of keys")
    keys = array("Q", packed)
    if sys.byteorder == "big":
        keys.byteswap()
    return keys


def encode(message: Published | Request | Answer) -> bytes:
    """Return a message's bytes."""
    return msgspec.msgpack.encode(message)


def decode_published(data: bytes) -> EventBatch:
    """Parse what came on the SUB socket.

    Raises:
        KvEventError: it is something else.
    """
    return _decode(data, _PUBLISHED)


def decode_request(data: bytes) -> Request:
    """Parse what somebody asks an engine.

    Raises:
        KvEventError: it is something else.
    """
    return _decode(data, _REQUEST)


def decode_answer(data: bytes) -> Answer:
    """Parse what an engine answers.

    Raises:
        KvEventError: it is something else.
    """
    return _decode(data, _ANSWER)


_PUBLISHED: msgspec.msgpack.Decoder[EventBatch] = msgspec.msgpack.Decoder(EventBatch)
_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    if len(data) > MAX_BATCH_BYTES:
        raise KvEventError(f"a message of {len(data)} bytes is over the limit of {MAX_BATCH_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KvEventError(str(error)[:200]) from None
