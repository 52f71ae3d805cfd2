"""Parts of the server that need no socket: the error seam, interruption, framing, log-probabilities, signals."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from pagefleet_engine import errors
from pagefleet_engine.client.stream import Generation
from pagefleet_engine.core.admission import ModelLimits, fitting_max_tokens
from pagefleet_engine.engine_core.messages import WireLogprobs
from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.errors import ConfigError, EngineError, InvalidRequest
from pagefleet_engine.server.answers import AnswerHead, EventWriter, TokenCounts
from pagefleet_engine.server.chat import ChatFormat, Shown
from pagefleet_engine.server.errors import HttpRefusal, ServerStoppingError, known_answer
from pagefleet_engine.server.interruption import ClientGoneError, OpenRequests
from pagefleet_engine.server.lifecycle import Drain, StopSignals, bind
from pagefleet_engine.server.logprobs import IMPOSSIBLE, CompletionLogprobList, chat_logprobs, prompt_logprobs
from pagefleet_engine.server.responses import EventStream, WholeResponse
from pagefleet_protocol.openai_chat import read_chat_request
from pagefleet_protocol.openai_common import StreamOptions
from pagefleet_protocol.sampling_params import SamplingParams
from starlette.types import Message

from tests.engine.server.conftest import MODEL
from tests.fakes.scripted_engine import ByteTokenizer

ASKED = Generation("id", [[1, 2, 3]], SamplingParams(n=2))


def subclasses(of: type[Exception]) -> Iterator[type[Exception]]:
    for kind in of.__subclasses__():
        yield kind
        yield from subclasses(kind)


@pytest.mark.parametrize(
    "kind", sorted([*subclasses(EngineError), InvalidRequest, *subclasses(InvalidRequest)], key=str)
)
def test_every_engine_error_has_an_answer(kind: type[Exception]) -> None:
    samples: dict[type[Exception], Exception] = {
        errors.QueueFull: errors.QueueFull("full", 1.0),
        errors.ContextTooLong: errors.ContextTooLong("too long", "prompt"),
    }
    answer = known_answer(samples.get(kind) or kind("what happened"))
    if issubclass(kind, ConfigError):
        assert answer is None, "met while serving, it is a bug"
    else:
        assert answer is not None, f"{kind.__name__} has no HTTP status"
        assert 400 <= answer.status < 600
        assert json.loads(answer.body())["error"]["message"]


def test_other_errors_are_unknown_to_the_seam() -> None:
    assert known_answer(ValueError("x")) is None
    refusal = known_answer(HttpRefusal(418, "Short and stout.", param="pot", code="teapot"))
    assert refusal is not None
    assert (refusal.status, refusal.param, refusal.code) == (418, "pot", "teapot")


async def forever() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def gone() -> Message:
    return {"type": "http.disconnect"}


def test_a_disconnect_interrupts_the_work() -> None:
    seen = []

    async def interrupted(open_requests: OpenRequests) -> None:
        async with open_requests.scope(gone):
            try:
                await asyncio.sleep(60)
            finally:
                seen.append("cleaned up")

    async def work() -> None:
        open_requests = OpenRequests()
        with pytest.raises(ClientGoneError):
            await interrupted(open_requests)
        assert len(open_requests) == 0
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(work())
    assert seen == ["cleaned up"]


def test_ending_all_reaches_open_and_later_scopes() -> None:
    async def scoped(open_requests: OpenRequests) -> None:
        async with open_requests.scope(forever):
            await asyncio.sleep(60)

    async def work() -> None:
        open_requests = OpenRequests()
        tasks = [asyncio.create_task(scoped(open_requests)) for _ in range(3)]
        await asyncio.sleep(0)
        assert len(open_requests) == 3
        open_requests.end_all(ServerStoppingError())
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [ServerStoppingError] * 3
        with pytest.raises(ServerStoppingError):
            await scoped(open_requests)

    asyncio.run(work())


def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def work() -> None:
        open_requests = OpenRequests()

        async def scoped() -> None:
            async with open_requests.scope(forever):
                await asyncio.sleep(60)

        task = asyncio.create_task(scoped())
        await asyncio.sleep(0)
        open_requests.end_all(ServerStoppingError())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())


def test_work_that_ends_is_not_interrupted() -> None:
    async def work() -> str:
        open_requests = OpenRequests()
        async with open_requests.scope(forever) as scope:
            result = "done"
        scope.interrupt(ClientGoneError())
        await asyncio.sleep(0)
        return result

    assert asyncio.run(work()) == "done"


@pytest.mark.parametrize("kind", [WholeResponse, EventStream])
def test_nothing_is_sent_before_the_first_piece(kind: type[WholeResponse] | type[EventStream]) -> None:
    sent: list[Message] = []

    async def fails() -> AsyncGenerator[bytes, None]:
        if not sent:
            raise errors.QueueFull("full", 1.0)
        yield b"never"

    async def send(message: Message) -> None:
        sent.append(message)

    async def work() -> None:
        with pytest.raises(errors.QueueFull):
            await kind(fails(), OpenRequests())({}, forever, send)

    asyncio.run(work())
    assert sent == []


def test_the_drain_counts() -> None:
    async def work() -> None:
        drain = Drain(max_in_flight=2)
        await drain.wait_until_idle()
        drain.enter()
        drain.enter()
        with pytest.raises(errors.QueueFull):
            drain.enter()
        drain.begin()
        with pytest.raises(ServerStoppingError):
            drain.enter()
        waiting = asyncio.create_task(drain.wait_until_idle())
        drain.leave()
        await asyncio.sleep(0)
        assert not waiting.done()
        drain.leave()
        await asyncio.wait_for(waiting, 30)

    asyncio.run(work())


@pytest.mark.parametrize(("asked", "allowed"), [(None, 5), (1, 1), (5, 5), (6, None)])
def test_max_tokens_and_the_context(asked: int | None, allowed: int | None) -> None:
    limits = ModelLimits(10, 300)
    if allowed is None:
        with pytest.raises(errors.ContextTooLong, match="can be 5 at most"):
            fitting_max_tokens(asked, 5, limits)
    else:
        assert fitting_max_tokens(asked, 5, limits) == allowed


def writer(options: StreamOptions = StreamOptions(), **fields: Any) -> EventWriter:  # noqa: B008 immutable
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 2, **fields}
    choice = ChatFormat(Shown(read_chat_request(body).sampling, ByteTokenizer()))
    head = AnswerHead("chatcmpl-1", 5, 'odd"name\u2028')
    return EventWriter("chat.completion.chunk", head, choice, TokenCounts(ASKED, choice), options)


def decoded(events: bytes) -> list[Any]:
    assert events.endswith(b"\n\n") or not events
    return [json.loads(event.removeprefix(b"data: ")) for event in events.split(b"\n\n") if event]


@pytest.mark.parametrize("text", ["a", 'quote " and \\', "line\nfeed\r\n\n", "é😀\u2028", "data: [DONE]", "\x00\x1b"])
def test_any_text_is_one_event(text: str) -> None:
    role, content = decoded(writer().events(1, Chunk(text, [7])))
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert content["choices"] == [
        {"index": 1, "delta": {"content": text}, "logprobs": None, "finish_reason": None},
    ]
    assert (content["id"], content["created"], content["model"]) == ("chatcmpl-1", 5, 'odd"name\u2028')


def test_chunks_without_text_make_no_event() -> None:
    events = writer()
    events.events(0, Chunk("a", [1]))
    assert events.events(0, Chunk("", [2])) == b""
    (end,) = decoded(events.events(0, Chunk("", [3], finish_reason="stop", stop_reason=9)))
    assert end["choices"][0]["finish_reason"] == "stop"
    assert end["choices"][0]["stop_reason"] == 9


def test_the_usage_event_counts_every_token() -> None:
    events = writer(StreamOptions(include_usage=True))
    first = decoded(events.events(0, Chunk("a", [1, 2], num_cached_tokens=2)))
    assert all(event["usage"] is None for event in first)
    events.events(1, Chunk("", [3], num_cached_tokens=3))
    (last,) = decoded(events.usage_event())
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert writer().usage_event() == b""


def test_logprob_shapes() -> None:
    entry = WireLogprobs([0xE2, 65, 66], [float("-inf"), -0.5, -1.0], 9)
    tokenizer = ByteTokenizer()
    (chat,) = chat_logprobs([entry], 1, tokenizer).content
    assert (chat.token, chat.logprob, chat.bytes) == ("bytes:\\xe2", IMPOSSIBLE, [0xE2])
    assert [top.token for top in chat.top_logprobs] == ["A"]
    growing = CompletionLogprobList(1, tokenizer, offset=4)
    growing.add([entry])
    taken = growing.take()
    assert taken.top_logprobs == [{"A": -0.5, "bytes:\\xe2": IMPOSSIBLE}]
    assert taken.text_offset == [4]
    assert growing.take().tokens == []
    assert prompt_logprobs([entry], tokenizer) == [
        None,
        {
            "226": {"logprob": IMPOSSIBLE, "rank": 9, "decoded_token": "bytes:\\xe2"},
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
            "66": {"logprob": -1.0, "rank": 2, "decoded_token": "B"},
        },
    ]


def test_a_signal_while_the_model_loads_stops_the_loading() -> None:
    async def work() -> tuple[None, int | None]:
        signals = StopSignals()
        cancelled = []

        async def loading() -> int:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return 1

        asyncio.get_running_loop().call_later(0.01, signals.received)
        first = await signals.unless_stopped(loading())
        assert cancelled == [True]
        assert first is None
        return first, await StopSignals().unless_stopped(asyncio.sleep(0, 7))

    assert asyncio.run(work()) == (None, 7)


def test_a_port_in_use_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="give another") as told:
        bind("127.0.0.1", taken.getsockname()[1])
    assert "\n" not in str(told.value)
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("no-such-host.invalid", 0)
