"""What the shelf holds while its store works, or fails."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from pagefleet_engine.server.errors import HttpRefusal
from pagefleet_engine.server.interruption import OpenRequests
from pagefleet_engine.server.lifecycle import Drain
from pagefleet_engine.server.responses_api.shelf import ResponseShelf
from pagefleet_engine.server.responses_api.store import ResponseStore, StoredResponse, StoreLimits

BEGUN = StoredResponse(id="one", is_running=True, response={"id": "one", "status": "queued", "output": []}, items=[])


class GatedStore(ResponseStore):
    """Waits before it forgets, and cannot keep what is broken."""

    def __init__(self) -> None:
        super().__init__(sqlite3.connect(":memory:", check_same_thread=False), None, StoreLimits(2**20, 60.0))
        self.is_forgetting, self.may_forget = threading.Event(), threading.Event()

    def delete(self, tenant: str, response_id: str) -> bool:
        forgotten = super().delete(tenant, response_id)
        self.is_forgetting.set()
        assert self.may_forget.wait(30)
        return forgotten


class Background:
    """A response that ends when it is told to."""

    events = None

    def __init__(self) -> None:
        self.may_end, self.is_cancelled = asyncio.Event(), False
        self.response = {**BEGUN.response, "status": "completed"}

    async def run(self, chunks: Any, open_requests: OpenRequests) -> None:
        await self.may_end.wait()

    def cancel(self) -> None:
        self.is_cancelled = True


async def no_chunks() -> AsyncGenerator[Any, None]:
    return
    yield


def test_what_ends_while_it_is_deleted_stays_deleted() -> None:
    async def main() -> None:
        store, drain = GatedStore(), Drain(8)
        shelf = ResponseShelf(store, drain, OpenRequests())
        background: Any = Background()
        await shelf.start("a", BEGUN, background, no_chunks())
        deleting = asyncio.create_task(shelf.delete("a", "one"))
        await asyncio.to_thread(store.is_forgetting.wait, 30)
        background.may_end.set()
        await some_turns()
        store.may_forget.set()
        await deleting
        await drain.wait_until_idle()
        assert background.is_cancelled
        with pytest.raises(HttpRefusal):
            await shelf.get("a", "one")
        await shelf.close()

    asyncio.run(main())


async def some_turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def test_a_start_that_fails_leaves_nothing_behind() -> None:
    async def main() -> None:
        drain = Drain(8)
        shelf = ResponseShelf(GatedStore(), drain, OpenRequests())
        background: Any = Background()
        broken = StoredResponse(id="one", is_running=True, response={"x": object()}, items=[])
        with pytest.raises(TypeError):
            await shelf.start("a", broken, background, no_chunks())
        assert shelf.running("a", "one") is None
        await asyncio.wait_for(drain.wait_until_idle(), 5)
        await shelf.close()

    asyncio.run(main())


def test_the_metrics_tell_what_runs_what_is_kept_and_what_could_not_be() -> None:
    async def main() -> None:
        store, drain = GatedStore(), Drain(8)
        shelf = ResponseShelf(store, drain, OpenRequests())
        background: Any = Background()
        await shelf.start("a", BEGUN, background, no_chunks())
        told = {name.removeprefix("pagefleet_engine_responses_"): value for name, value in shelf.stats().items()}
        assert (told["background"], told["stored"], told["unstored_total"]) == (1, 1, 0)
        assert told["stored_bytes"] == store.num_bytes > 0
        background.may_end.set()
        await drain.wait_until_idle()
        store._database.execute("PRAGMA query_only = ON")  # as a full disk does, it refuses what is written
        await shelf.keep("a", StoredResponse(id="two", response={}, items=[]))
        told = shelf.stats()
        assert told["pagefleet_engine_responses_background"] == 0
        assert told["pagefleet_engine_responses_unstored_total"] == 1
        assert told["pagefleet_engine_responses_stored"] == 1
        await shelf.close()

    asyncio.run(main())
