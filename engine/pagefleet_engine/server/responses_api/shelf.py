"""The responses that can be asked for again: those in the store, and those that run without their client."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from pagefleet_protocol.openai_json import InvalidRequest, shown
from pagefleet_protocol.responses_items import Item
from starlette.types import Message

from pagefleet_engine.client.stream import Chunks
from pagefleet_engine.errors import QueueFull
from pagefleet_engine.server.answer_script import NotedTelling, Telling, frames, tell_events
from pagefleet_engine.server.errors import HttpRefusal, ServerStoppingError, answer_of
from pagefleet_engine.server.interruption import ClientGoneError, OpenRequests
from pagefleet_engine.server.lifecycle import Drain
from pagefleet_engine.server.responses_api.response import ResponseScript
from pagefleet_engine.server.responses_api.store import Allowance, ResponseStore, StoredResponse, StoredTooLong

logger = logging.getLogger(__name__)

T = TypeVar("T")
_INPUT = 0x8000
"""Behind the number of a response: its items of input begin here, those of output at 0."""
_CUT_OFF = {"code": "server_error", "message": "The server stopped before this response was complete."}


class BackgroundResponse:
    """One response that runs without its client.

    Args:
        telling: of the answer.
        keeps_events: whether they can be streamed again.
    """

    def __init__(self, telling: Telling, keeps_events: bool) -> None:
        assert isinstance(telling.script, ResponseScript)
        self.script = telling.script
        self.over = asyncio.Event()
        self.status = "queued"
        self._keeps_events = keeps_events
        self._noted = NotedTelling(telling, None)
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self._cancelled = asyncio.Event()
        if keeps_events:
            self._add(b"".join(frames(self.script, self._opening())))

    @property
    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        return self.script.whole() if self.over.is_set() else self.script.so_far(self.status)

    @property
    def events(self) -> bytes | None:
        """All events so far; None where they are not kept."""
        return b"".join(self._events) if self._keeps_events else None

    async def run(self, chunks: Chunks, open_requests: OpenRequests) -> None:
        """Generate the answer to its end, whatever that is."""
        try:
            async with open_requests.scope(self._receive):
                async for events, _ in tell_events(self._noted, chunks):
                    self.status = "in_progress"
                    self._add(events)
        except ClientGoneError:
            self._add(b"".join(frames(self.script, self.script.broken("cancelled"))))
        except Exception as error:  # a background response ends as one, whatever happened to it
            code = "rate_limit_exceeded" if isinstance(error, QueueFull) else "server_error"
            message = answer_of(error, self.script.head.id).message
            self._add(b"".join(frames(self.script, self.script.broken("failed", code, message))))
        self.over.set()
        self._news.set()

    def cancel(self) -> None:
        """End the work; `run` returns soon."""
        self._cancelled.set()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events behind number `after` as they come, to the end."""
        position = after + 1
        while True:
            news = self._news
            while position < len(self._events):
                yield self._events[position]
                position += 1
            if self.over.is_set():
                return
            await news.wait()

    def _opening(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.queued"):
            yield {"type": kind, "response": self.script.so_far("queued")}

    def _add(self, events: bytes) -> None:
        if self._keeps_events:
            self._events += split_events(events)
            self._news.set()
            self._news = asyncio.Event()

    async def _receive(self) -> Message:
        await self._cancelled.wait()
        return {"type": "http.disconnect"}


def split_events(events: bytes) -> list[bytes]:
    """Return events one by one; the number of each is its index."""
    return [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]


class ResponseShelf:
    """Keeps responses for their tenants. Work on the store is done in a thread.

    Args:
        store: None: no response is kept.
        drain: counts those that run in the background.
        open_requests: ends them with the process.
    """

    def __init__(self, store: ResponseStore | None, drain: Drain, open_requests: OpenRequests) -> None:
        self._store = store
        self._drain = drain
        self._open = open_requests
        self._thread = ThreadPoolExecutor(1, "responses")
        self._running: dict[tuple[str, str], BackgroundResponse] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_unstored = 0
        self._mend()

    @property
    def keeps(self) -> bool:
        """Whether responses are stored."""
        return self._store is not None

    def new_number(self) -> str:
        """Return 32 hexadecimal digits for a new response: behind the store's name nobody can guess them."""
        name = "" if self._store is None else self._store.name
        return name + secrets.token_hex(16)[len(name) :]

    def stats(self) -> dict[str, float]:
        """Return counters and gauges, by the metrics' names."""
        stats = {"responses_background": float(len(self._running)), "responses_unstored_total": self._num_unstored}
        if self._store is not None:
            stats |= {"responses_stored": self._store.num_responses, "responses_stored_bytes": self._store.num_bytes}
            stats |= {f'responses_evicted_total{{reason="{why}"}}': n for why, n in self._store.num_evicted.items()}
        return {f"pagefleet_engine_{name}": value for name, value in stats.items()}

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response as it is now.

        Raises:
            HttpRefusal: 404, the tenant has none of this id.
        """
        stored = await self._call(lambda store: store.get(owner, response_id))
        if stored is None:
            raise not_found(response_id)
        running = self._running.get((owner, response_id))
        return stored if running is None else with_response(stored, running.response, running.events)

    def running(self, owner: str, response_id: str) -> BackgroundResponse | None:
        """Return a response that runs in the background."""
        return self._running.get((owner, response_id))

    async def before(self, owner: str, response_id: str, max_bytes: int) -> list[Item]:
        """Return all items that a response goes on from, and its own: input and output, in their order.

        Raises:
            InvalidRequest: it, or one before it, is gone, or still runs, or all have more than `max_bytes`.
        """
        try:
            chain = await self._call(lambda store: store.chain(owner, response_id, Allowance(max_bytes))) or []
        except StoredTooLong:
            raise _too_long("The responses before", "previous_response_id", max_bytes) from None
        if not chain:
            message = f"Previous response with id {shown(response_id)} not found."
            raise InvalidRequest(message, "previous_response_id", "previous_response_not_found")
        if any(one.is_running for one in chain):
            message = f"Previous response with id {shown(response_id)} is not complete yet."
            raise InvalidRequest(message, "previous_response_id", "previous_response_not_complete")
        return [item for one in chain for item in (*one.items, *one.output)]

    async def items(self, owner: str, item_ids: Sequence[str], max_bytes: int) -> list[Item]:
        """Return items of stored responses. Each response is read once, however often it is referred to.

        Raises:
            InvalidRequest: there is none of an id, or they or their responses have more than `max_bytes`.
        """
        try:
            return await self._call(lambda store: _items(store, owner, item_ids, max_bytes)) or []
        except StoredTooLong:
            raise _too_long("The items referred to, or their responses,", "input", max_bytes) from None

    async def keep(self, owner: str, stored: StoredResponse) -> None:
        """Store a response. One that cannot be stored stands: its client has it, and the log says why."""

        def put(store: ResponseStore) -> None:
            try:
                store.put(owner, stored)
            except sqlite3.Error as error:
                self._num_unstored += 1
                logger.error("response %s cannot be stored: %s", stored.id, error)

        await self._call(put)

    async def delete(self, owner: str, response_id: str) -> None:
        """Forget a response; one that runs is cancelled.

        Raises:
            HttpRefusal: 404, the tenant has none of this id.
        """
        running = self._running.pop((owner, response_id), None)  # first: what ends meanwhile is not stored again
        if running is not None:
            running.cancel()
        if not await self._call(lambda store: store.delete(owner, response_id)) and running is None:
            raise not_found(response_id)

    async def start(self, owner: str, begun: StoredResponse, background: BackgroundResponse, chunks: Chunks) -> None:
        """Begin a background response.

        Raises:
            QueueFull, ServerStoppingError: it cannot run now.
        """
        self._drain.enter()
        key = (owner, begun.id)
        self._running[key] = background
        try:
            await self.keep(owner, begun)
        except BaseException:
            self._leave(key)
            raise
        task = asyncio.create_task(self._run(key, begun, background, chunks))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self, owner: str, response_id: str) -> dict[str, Any]:
        """End a background response; return it.

        Raises:
            HttpRefusal: 404, the tenant has none of this id; 400, it has its client.
        """
        running = self._running.get((owner, response_id))
        if running is not None:
            running.cancel()
            await running.over.wait()
            return running.response
        response: dict[str, Any] = (await self.get(owner, response_id)).response
        if not response["background"]:
            message = "Only responses that were created with 'background': true can be cancelled."
            raise HttpRefusal(400, message, code="invalid_value")
        return response

    async def close(self) -> None:
        """Return when nothing runs any more and all is stored."""
        self._open.end_all(ServerStoppingError())
        await asyncio.gather(*self._tasks)
        if self._store is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()

    def _mend(self) -> None:
        """Say of responses that the end of an earlier process has cut off that they failed."""
        if self._store is not None:
            for tenant, cut in self._store.running():
                response = {**cut.response, "status": "failed", "error": _CUT_OFF}
                self._store.put(tenant, with_response(cut, response))

    async def _run(
        self, key: tuple[str, str], begun: StoredResponse, background: BackgroundResponse, chunks: Chunks
    ) -> None:
        try:
            await background.run(chunks, self._open)
            if key in self._running:  # else it was deleted
                await self.keep(key[0], with_response(begun, background.response, background.events))
        finally:
            self._leave(key)

    def _leave(self, key: tuple[str, str]) -> None:
        self._running.pop(key, None)
        self._drain.leave()

    async def _call(self, work: Callable[[ResponseStore], T]) -> T | None:
        store = self._store
        if store is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, store)


def _items(store: ResponseStore, owner: str, item_ids: Sequence[str], max_bytes: int) -> list[Item]:
    responses, copies = Allowance(max_bytes), Allowance(max_bytes)
    read: dict[str, dict[str, Item]] = {}
    found = []
    for item_id in item_ids:
        response_id = f"resp_{item_id.rpartition('_')[2][:32]}"
        if response_id not in read:
            turn = store.turn(owner, response_id, responses)
            items: list[Item] = [] if turn is None else [*turn.items, *turn.output]
            read[response_id] = {item["id"]: item for item in reversed(items) if "id" in item}
        item = read[response_id].get(item_id)
        if item is None:
            raise InvalidRequest(f"Item with id {shown(item_id)} not found.", "input", "item_not_found")
        copies.take(len(msgspec.json.encode(item)))
        found.append(item)
    return found


def with_response(stored: StoredResponse, response: dict[str, Any], events: bytes | None = None) -> StoredResponse:
    """Return what is stored with another state of the response."""
    is_running = response["status"] in ("queued", "in_progress")
    return replace(stored, response=response, events=events, is_running=is_running)


def with_ids(items: Sequence[Item], number: str) -> list[Item]:
    """Return items of a response's input with ids, by which they can be referred to."""
    prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
    return [
        {**item, "id": item.get("id") or f"{prefixes[item['type']]}_{number}{_INPUT + n:04x}"}
        for n, item in enumerate(items)
    ]


def _too_long(what: str, param: str, max_bytes: int) -> InvalidRequest:
    message = f"{what} have more than {max_bytes} bytes. Send as 'input' what the model is to read of them."
    return InvalidRequest(message, param, "context_length_exceeded")


def not_found(response_id: str) -> HttpRefusal:
    """Build the error of a response that a tenant does not have."""
    return HttpRefusal(404, f"Response with id {shown(response_id)} not found.", code="response_not_found")
