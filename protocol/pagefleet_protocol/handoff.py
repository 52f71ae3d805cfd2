"""What a router adds to a request and takes out of a stream, so that work is not done twice and not lost.

Token ids travel behind the body: the body is the client's JSON as it came, followed by the ids as little-endian
uint32, prompt first, then the tokens that another engine has generated already. Headers say how many. Clients cannot
send these headers through a router, which drops every header of this prefix.

A stream that may be continued carries notes: before each event a comment line (which readers of event streams skip)
with the tokens since the last note, and how many characters of text the client has after that event. The router takes
them out. An event without a note is an error.
"""

from __future__ import annotations

import binascii
import hashlib
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

PROMPT_TOKENS = "x-pagefleet-prompt-tokens"
"""Number of prompt token ids behind the JSON."""
STREAM = "x-pagefleet-stream"
"""A `StreamState`; asks for notes."""
CACHE_SALT = "x-pagefleet-cache-salt"
"""The tenant's salt, from the router."""
MAX_TOKENS_BEHIND = 16 * 1024 * 1024

OPENED = 0xFFFF_FFFF
ENDED = 0xFFFF_FFFE
COUNTED = 0xFFFF_FFFD
MARKS = frozenset({OPENED, ENDED, COUNTED})
"""What notes have among the token ids, and no vocabulary has: the event is the one that opens the answer, the one with
its finish reason, the one with the usage. To a router they are ids like others: it counts them and hands them on."""

NOTE_START = b":pf "
_NOTE = re.compile(rb":pf ([A-Za-z0-9+/=]*) ([0-9]{1,12})\n")
_STATE = re.compile(r"id=([0-9a-f]{32});created=([0-9]{1,12});tokens=([0-9]{1,9});chars=([0-9]{1,12})")
_SALT = re.compile(r"[A-Za-z0-9_-]{1,256}")


class HandoffError(ValueError):
    """A header, note or body that no router or engine of ours writes."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream that may go on elsewhere: how its answer is called, and what the client has of it."""

    answer_id: str
    """32 hexadecimal digits: the answer's `id` behind its prefix (chatcmpl-, cmpl-)."""
    created: int
    """The answer's `created`, seconds."""
    num_tokens: int = 0
    """Generated tokens behind the body; 0 in a request that is not continued."""
    num_chars: int = 0
    """Characters (code points) of text that the client has."""

    def encode(self) -> str:
        """Return the header's value."""
        return f"id={self.answer_id};created={self.created};tokens={self.num_tokens};chars={self.num_chars}"


def decode_stream_state(value: str) -> StreamState:
    """Parse the header's value.

    Raises:
        HandoffError: it is something else.
    """
    found = _STATE.fullmatch(value)
    if found is None:
        raise HandoffError(f"{STREAM} is not valid")
    return StreamState(found[1], int(found[2]), int(found[3]), int(found[4]))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return ids as little-endian uint32.

    Raises:
        OverflowError: an id does not fit.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return ids.

    Raises:
        HandoffError: the length is no multiple of 4.
    """
    if len(packed) % 4:
        raise HandoffError(f"{len(packed)} bytes are no whole number of token ids")
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def split_body(body: bytes, num_prompt: int, num_generated: int) -> tuple[bytes, list[int], list[int]]:
    """Return the JSON, the prompt's token ids and the generated ones.

    Raises:
        HandoffError: the body is shorter than the headers say.
    """
    num_behind = num_prompt + num_generated
    if num_prompt < 0 or num_generated < 0 or num_behind > MAX_TOKENS_BEHIND or 4 * num_behind > len(body):
        raise HandoffError("the body is shorter than its headers say")
    end = len(body) - 4 * num_behind
    middle = end + 4 * num_prompt
    return body[:end], unpack_tokens(body[end:middle]), unpack_tokens(body[middle:])


def encode_note(token_ids: Sequence[int], num_chars: int) -> bytes:
    """Return the comment line to put before an event."""
    return b"%b%b %d\n" % (NOTE_START, binascii.b2a_base64(pack_tokens(token_ids), newline=False), num_chars)


def take_notes(events: bytes) -> tuple[bytes, bytes, int | None]:
    """Separate whole events from their notes.

    Returns:
        The events without notes, the packed tokens of all notes, and the last note's number of characters (None where
        there is no note).

    Raises:
        HandoffError: a note is damaged.
    """
    if NOTE_START not in events:
        return events, b"", None
    tokens, num_chars, kept, end = [], None, [], 0
    for found in _NOTE.finditer(events):
        if found.start() and events[found.start() - 1] not in b"\r\n":
            continue  # inside a line: text that looks like a note
        try:
            tokens.append(binascii.a2b_base64(found[1], strict_mode=True))
        except binascii.Error as error:
            raise HandoffError(f"a note is damaged ({error})") from None
        num_chars = int(found[2])
        kept.append(events[end : found.start()])
        end = found.end()
    kept.append(events[end:])
    return b"".join(kept), b"".join(tokens), num_chars


def tenant_salt(tenant: str) -> str:
    """Return the cache salt of a tenant's name: the same in every router, and not the name itself."""
    return "t-" + hashlib.sha256(b"pagefleet tenant salt 1 " + tenant.encode()).hexdigest()


def combined_salt(tenants: str | None, clients: str | None) -> str | None:
    """Return the salt that block hashes are made with, from the tenant's and the one in the request's body.

    Raises:
        HandoffError: the tenant's salt is not one.
    """
    if tenants is None:
        return clients
    if not _SALT.fullmatch(tenants):
        raise HandoffError(f"{CACHE_SALT} is not valid")
    return tenants if clients is None else f"{tenants}/{clients}"
