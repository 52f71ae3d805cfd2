"""What is read of a server's stream."""

from __future__ import annotations

import asyncio
import json

from pagefleet_engine.bench.load_client import Answer, Asked, Outcome, Target, drive

EVENTS = [
    {"choices": [{"text": "one "}], "usage": None},
    {"choices": [{"text": "two three"}], "usage": None},
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": None}},
]


async def answers_of(*asked: Asked) -> list[Outcome]:
    """Of a server that sends two of its three tokens at once."""
    outcomes: list[Outcome] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        writer.write(b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in EVENTS) + b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        await drive(Target(f"http://{host}:{port}/v1", "m"), asked, None, lambda _, outcome: outcomes.append(outcome))
    return outcomes


def test_tokens_are_those_that_the_server_counts() -> None:
    of_text, of_ids = asyncio.run(answers_of(Asked("a text", 3), Asked([5] * 4, 3)))
    assert isinstance(of_text, Answer)
    assert isinstance(of_ids, Answer)
    assert {of_text.timing.num_input_tokens, of_ids.timing.num_input_tokens} == {7, 4}
    for found in (of_text, of_ids):
        assert (found.text, found.num_cached_tokens) == ("one two three", None)
        assert (found.timing.num_output_tokens, len(found.timing.token_times)) == (3, 2)
