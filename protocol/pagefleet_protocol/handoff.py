"""What a router adds to a request and takes out of a stream, so that work is not done twice and not lost.

Token ids travel behind the body: the body is the client's JSON as it came, followed by the ids as little-endian
uint32, prompt first, then the tokens that another engine has generated already. Headers say how many. Clients cannot
send these headers through a router, which drops every header of this prefix.

A stream that may be continued carries notes: before each event a comment line (which readers of event streams skip)
with the tokens of its choice since the choice's last note, and how many characters of the choice's text the client has
after that event. The router takes them out. An event without a note is an error.

Where a prompt is made of what only its engine has (stored responses), comments before the first event tell its ids, so
that another engine can be given them.

Where events are numbered, or one token makes several, a note stands before all events that come of the same tokens and
says how many they are. The client gets all of them or none, and the router counts what it has.
"""

from __future__ import annotations

import binascii
import hashlib
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

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
its finish reason, the one with the usage. To a router they are ids like others, which it hands on."""

NOTE_START = b":pf "
_NOTE = re.compile(rb":pf ([A-Za-z0-9+/=]*) ([0-9]{1,12})(?: ([0-9]{1,6}))?(?: x([0-9]{1,6}))?\n")
_NOTE_LINE = b"\n" + NOTE_START
PROMPT_START = b":pp "
_PROMPT_PIECE = 8192
"""Ids in one comment: readers of event streams hold so much."""
_STATE = re.compile(
    r"id=([0-9a-f]{32});created=([0-9]{1,12});tokens=([0-9]{1,9}(?:,[0-9]{1,9})*);chars=([0-9]{1,12}(?:,[0-9]{1,12})*)"
    r"(?:;events=([0-9]{1,12}))?"
)
_SALT = re.compile(r"[A-Za-z0-9_-]{1,256}")


class HandoffError(ValueError):
    """A header, note or body that no router or engine of ours writes."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the client has of one choice."""

    num_tokens: int = 0
    """Generated tokens and marks behind the body."""
    num_chars: int = 0
    """Characters (code points) of text."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream that may go on elsewhere: how its answer is called, and what the client has of it."""

    answer_id: str
    """32 hexadecimal digits: the answer's `id` behind its prefix (chatcmpl-, cmpl-)."""
    created: int
    """The answer's `created`, seconds."""
    choices: tuple[Shown, ...] = (Shown(),)
    """By index; those that are missing have not begun. Their tokens stand behind the body in this order."""
    num_events: int = 0
    """That the client has, where notes say how many events they are for."""

    @property
    def num_tokens(self) -> int:
        """Of all choices; 0 in a request that is not continued."""
        return sum(choice.num_tokens for choice in self.choices)

    def encode(self) -> str:
        """Return the header's value."""
        tokens = ",".join(str(choice.num_tokens) for choice in self.choices)
        chars = ",".join(str(choice.num_chars) for choice in self.choices)
        events = f";events={self.num_events}" if self.num_events else ""
        return f"id={self.answer_id};created={self.created};tokens={tokens};chars={chars}{events}"


def decode_stream_state(value: str) -> StreamState:
    """Parse the header's value.

    Raises:
        HandoffError: it is something else.
    """
    found = _STATE.fullmatch(value)
    tokens, chars = ("", "") if found is None else (found[3].split(","), found[4].split(","))
    if found is None or len(tokens) != len(chars):
        raise HandoffError(f"{STREAM} is not valid")
    choices = tuple(Shown(int(n), int(c)) for n, c in zip(tokens, chars, strict=True))
    return StreamState(found[1], int(found[2]), choices, int(found[5] or 0))


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


def count_tokens(packed: bytes) -> int:
    """Return how many of the ids are tokens: MARKS end in three bytes that no id of a vocabulary has."""
    return len(packed) // 4 - packed.count(b"\xff\xff\xff")


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


class Note(msgspec.Struct, frozen=True, gc=False):
    """What stands before an event. One is read for each event of each stream: a dataclass takes ten times as long."""

    choice: int
    tokens: bytes
    """Packed."""
    num_chars: int
    num_events: int = 0
    """That it stands before; 0: one, which is not counted."""


def encode_note(token_ids: Sequence[int], num_chars: int, choice: int = 0, num_events: int = 0) -> bytes:
    """Return the comment line to put before an event, or several; the first choice is not named."""
    packed = binascii.b2a_base64(pack_tokens(token_ids), newline=False)
    of_choice = b" %d" % choice if choice else b""
    of_events = b" x%d" % num_events if num_events else b""
    return b"%b%b %d%b%b\n" % (NOTE_START, packed, num_chars, of_choice, of_events)


def take_note(event: bytes) -> tuple[bytes, Note | None]:
    """Separate an event from its note, which is its first line.

    Raises:
        HandoffError: the note is damaged, or not the first line.
    """
    note = None
    if event.startswith(NOTE_START):
        found = _NOTE.match(event)
        if found is None:
            raise HandoffError("a note is damaged")
        packed, num_chars, choice, num_events = found.groups()
        try:
            tokens = binascii.a2b_base64(packed, strict_mode=True)
        except binascii.Error as error:
            raise HandoffError(f"a note is damaged ({error})") from None
        if len(tokens) % 4:
            raise HandoffError("a note holds a part of a token")
        note = Note(int(choice or 0), tokens, int(num_chars), int(num_events or 0))
        event = event[found.end() :]
    if NOTE_START in event and (event.startswith(NOTE_START) or _NOTE_LINE in event):
        raise HandoffError("a note is damaged")
    return event, note


def encode_prompt(token_ids: Sequence[int]) -> bytes:
    """Return the comments that tell a prompt."""
    pieces = [token_ids[start : start + _PROMPT_PIECE] for start in range(0, len(token_ids), _PROMPT_PIECE)]
    return b"".join(
        b"%b%b\n\n" % (PROMPT_START, binascii.b2a_base64(pack_tokens(piece), newline=False)) for piece in pieces
    )


def take_prompt(comment: bytes) -> bytes:
    """Return the packed ids of one such comment.

    Raises:
        HandoffError: it is damaged.
    """
    try:
        packed = binascii.a2b_base64(comment[len(PROMPT_START) : -2], strict_mode=True)
    except binascii.Error as error:
        raise HandoffError(f"a part of a prompt is damaged ({error})") from None
    if len(packed) % 4:
        raise HandoffError("a part of a prompt holds a part of a token")
    return packed


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


def salt_owner(salt: str | None) -> str:
    """Return what tells tenants apart in a `combined_salt`; a client's own counts where tenants have none."""
    return "" if salt is None else salt.partition("/")[0]
