"""An engine that speaks notes: gives one fixed answer, goes on with it from any state, and ends where a test says.

No test in here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, encode_facts
from pagefleet_protocol.handoff import (
    COUNTED,
    ENDED,
    OPENED,
    PROMPT_TOKENS,
    STREAM,
    StreamState,
    decode_stream_state,
    encode_note,
    split_body,
)

from tests.fakes.faulty_engine import SSE_HEAD, FaultyEngine, Seen, chunked

TOKENS = ((11, "Hé"), (12, ""), (13, "llo 🙂"), (14, " :pf x\n"), (15, ""), (16, ""), (17, "wörld"), (18, "!"))
"""Ids and texts; those without text show theirs with the next one."""

End = Literal["reset", "silent", "note", "dead", "stopping", "half"]
DEAD = b'data: {"error":{"message":"gone","type":"x","param":null,"code":"engine_dead"}}\n\n'
STOPPING = DEAD.replace(b"engine_dead", b"server_shutting_down")


@dataclass(frozen=True)
class Noted:
    """An event, and what its note says."""

    ids: tuple[int, ...]
    num_chars: int
    event: bytes

    @property
    def wire(self) -> bytes:
        return encode_note(self.ids, self.num_chars) + self.event


def whole_answer(state: StreamState) -> list[Noted]:
    """Every event of the answer."""

    def event(inner: dict[str, Any]) -> bytes:
        data = {"id": f"chatcmpl-{state.answer_id}", "created": state.created, **inner}
        return b"data: " + json.dumps(data).encode() + b"\n\n"

    noted = [Noted((OPENED,), 0, event({"role": "assistant"}))]
    ids: tuple[int, ...] = ()
    num_chars = 0
    for token, text in TOKENS:
        ids += (token,)
        if text:
            num_chars += len(text)
            noted.append(Noted(ids, num_chars, event({"content": text})))
            ids = ()
    noted.append(Noted((*ids, ENDED), num_chars, event({"finish_reason": "stop"})))
    noted.append(Noted((COUNTED,), num_chars, event({"usage": len(TOKENS)})))
    noted.append(Noted((), num_chars, b"data: [DONE]\n\n"))
    return noted


NUM_EVENTS = len(whole_answer(StreamState("0" * 32, 1)))


def rest_of_answer(state: StreamState, given: Sequence[int]) -> list[Noted]:
    """The events that a client in this state has not; checks that there is such a state."""
    events = whole_answer(state)
    ids: list[int] = []
    while ids != list(given):
        first = events.pop(0)
        ids += first.ids
        assert len(ids) <= len(given), "tokens of half an event"
        assert first.num_chars <= state.choices[0].num_chars
    assert not given or first.num_chars == state.choices[0].num_chars
    return events


@dataclass
class Ends:
    """How the next requests end: after so many events, in which way. None: well."""

    plan: list[tuple[int, End] | None] = field(default_factory=list)
    states: list[StreamState | None] = field(default_factory=list)
    """Of all requests, as they came."""
    bodies: list[bytes] = field(default_factory=list)
    """Their JSON."""
    write_size: int = 1 << 20
    """Bytes of events per write."""
    refusals: list[tuple[int, bytes]] = field(default_factory=list)
    """What the next requests that are to go on with a stream get in its place: status and headers."""


class NotingEngine(FaultyEngine):
    """Behaves as `ends` says, which several engines may share."""

    def __init__(self, ends: Ends, scope: str = "s", with_facts: bool = True) -> None:
        super().__init__(self._behave)
        self.ends = ends
        self.incarnation = f"{id(self) % 2**64:032x}"
        if with_facts:
            facts = EngineFacts(
                incarnation=self.incarnation, model="m", scope=scope, block_size=16, num_blocks=100, max_model_len=256,
                max_num_seqs=64, max_num_batched_tokens=512, vocab_size=300, text_digest="d",
            )  # fmt: skip
            self.internal[FACTS_PATH] = encode_facts(facts)

    async def _behave(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        ends, header = self.ends, seen.header(STREAM)
        state = None if header is None else decode_stream_state(header)
        num_generated = 0 if state is None else state.num_tokens
        body, _, given = split_body(seen.body, int(seen.header(PROMPT_TOKENS) or 0), num_generated)
        ends.states.append(state)
        ends.bodies.append(body)
        if num_generated and ends.refusals:
            status, lines = ends.refusals.pop(0)
            body = STOPPING.removeprefix(b"data: ").strip() if b"close" in lines else b"{}"
            writer.write(b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (status, lines, len(body), body))
            return
        if state is None:
            parts = [noted.event for noted in whole_answer(StreamState("f" * 32, 7))]
        else:
            parts = [noted.wire for noted in rest_of_answer(state, given)]
        end = ends.plan.pop(0) if ends.plan else None
        kept = parts if end is None else parts[: end[0]]
        wire = b"".join(kept)
        if end is not None and end[1] not in ("reset", "silent"):
            last = {"note": b":pf !!!! 5\n" + parts[-1], "dead": DEAD, "stopping": STOPPING, "half": parts[-1][:-5]}
            wire += last[end[1]]
        writer.write(SSE_HEAD)
        for start in range(0, len(wire), ends.write_size):
            writer.write(chunked(wire[start : start + ends.write_size]))
            await writer.drain()
            if ends.write_size < len(wire):
                await asyncio.sleep(0)
        if end is None:
            writer.write(b"0\r\n\r\n")
        elif end[1] == "silent":
            await asyncio.sleep(3600)
        elif end[1] == "dead":
            writer.write(b"0\r\n\r\n")
        else:
            # What was written arrives before the end, which an abort would not promise.
            await writer.drain()
            writer.close()
