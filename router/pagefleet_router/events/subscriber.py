"""Follows the KV events of one incarnation of an engine, or of one of its caches, into the exact index.

A message is applied some keys at a time, so that no batch, however large, holds up the event loop for long. Meanwhile
the next ones wait in the socket, whose queue is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pagefleet_protocol.kv_events import (
    KEY_BYTES,
    TOPIC,
    Answer,
    Cleared,
    DumpPart,
    EventBatch,
    KvEvent,
    KvEventError,
    Stored,
    decode_answer,
    decode_published,
    unpack_keys,
)

from pagefleet_router.events.feed import EngineFeed
from pagefleet_router.events.sockets import EventSockets
from pagefleet_router.prefix.exact import ExactIndex, TooManyKeys

logger = logging.getLogger(__name__)

Message = TypeVar("Message", EventBatch, Answer)

SLICE_KEYS = 4096
"""Applied at once: about two milliseconds."""
TURN_MESSAGES = 32
"""Taken in a row before others get their turn."""
LOOK_S = 0.5
"""Between two looks at the clock."""


@dataclass(slots=True)
class EventCounts:
    """What all subscribers of a router have seen."""

    num_messages: int = 0
    """Batches and parts of answers that were taken."""
    num_gaps: int = 0
    num_dropped: int = 0
    """Messages that were garbage, or of another incarnation than the engine's facts say."""


class EventSubscriber:
    """One engine's events.

    Args:
        engine_id: whose; of one of its caches, that one's name.
        incarnation: of its facts.
        index: has a place for it already.
        counts: where what happens is counted.
        on_live: called with True when the index holds what the engine has, with False when it may not.
    """

    def __init__(
        self, engine_id: str, incarnation: str, index: ExactIndex, counts: EventCounts,
        on_live: Callable[[str, bool], None],
    ) -> None:  # fmt: skip
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._index = index
        self._counts = counts
        self._on_live = on_live
        self._is_live = False

    async def run(self, connect: Callable[[], EventSockets]) -> None:
        """Follow until cancelled, or until the engine says what cannot be: then it loses its place in the index."""
        feed = EngineFeed(self._incarnation, time.monotonic())
        try:
            with connect() as sockets:
                while True:
                    await self._turn(feed, sockets)
        except TooManyKeys:
            self._index.leave(self._engine_id)
            logger.warning("engine %s claims more blocks than it has: its KV events are ignored", self._engine_id)
        finally:
            self._tell(False)

    async def _turn(self, feed: EngineFeed, sockets: EventSockets) -> None:
        if feed.tick(time.monotonic()):
            self._tell(False)
            sockets.reconnect()
        self._ask(feed, sockets)
        for _ in range(TURN_MESSAGES):
            if not await self._take(feed, sockets):
                self._tell(feed.is_live)
                await sockets.wait(LOOK_S)
                return
            self._ask(feed, sockets)
        self._tell(feed.is_live)
        await asyncio.sleep(0)

    def _ask(self, feed: EngineFeed, sockets: EventSockets) -> None:
        question = feed.take_question()
        if question is not None:
            sockets.ask(question)

    async def _take(self, feed: EngineFeed, sockets: EventSockets) -> bool:
        """Take one message; returns whether there was one."""
        counts = self._counts
        gaps, foreign = feed.num_gaps, feed.num_foreign
        try:
            if (frames := sockets.take_answer()) is not None:
                events = feed.answered(_whole(decode_answer(frames[-1])), time.monotonic())
            elif (frames := sockets.take_published()) is not None:
                if len(frames) != 2 or frames[0] != TOPIC:
                    raise KvEventError("it is no topic with a batch")
                events = feed.published(_whole(decode_published(frames[1])), time.monotonic())
            else:
                return False
        except KvEventError as error:
            counts.num_dropped += 1
            logger.debug("engine %s: garbage among its KV events: %s", self._engine_id, error)
            return True
        for event in events:
            await self.apply(event)
        dropped = feed.num_foreign - foreign
        counts.num_gaps += feed.num_gaps - gaps
        counts.num_dropped += dropped
        counts.num_messages += 1 - dropped
        return True

    async def apply(self, event: KvEvent) -> None:
        """Put one event into the index, letting others run in between."""
        if isinstance(event, Cleared):
            self._index.clear(self._engine_id)
            return
        keys = unpack_keys(event.keys)
        change = self._index.add if isinstance(event, Stored) else self._index.remove
        for start in range(0, len(keys), SLICE_KEYS):
            if start:
                await asyncio.sleep(0)
            change(self._engine_id, keys[start : start + SLICE_KEYS])

    def _tell(self, is_live: bool) -> None:
        if is_live != self._is_live:
            self._is_live = is_live
            self._on_live(self._engine_id, is_live)


def _whole(message: Message) -> Message:
    """Return a message whose keys are whole.

    Raises:
        KvEventError: some are not.
    """
    packed: list[bytes] = []
    if isinstance(message, DumpPart):
        packed.append(message.keys)
    elif isinstance(message, EventBatch):
        packed.extend(event.keys for event in message.events if not isinstance(event, Cleared))
    if any(len(keys) % KEY_BYTES for keys in packed):
        raise KvEventError("it holds a part of a key")
    return message
