"""Small GETs to an engine, on a connection of their own: probes must not queue behind requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagefleet_router.errors import Failure
from pagefleet_router.wire.engine_call import EngineCall
from pagefleet_router.wire.pool import EnginePool
from pagefleet_router.wire.upstream import AnswerHead

MAX_ANSWER_BYTES = 4 * 2**20
_REASONS = {
    Failure.REFUSED: "nothing listens there",
    Failure.UNREACHABLE: "there is no such host, or no way to it",
    Failure.RESET: "the connection ended early",
    Failure.GARBAGE: "the answer is not HTTP",
}


class ProbeError(Exception):
    """No usable answer; the message is for the log."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What came back. Of a header given twice the last one counts."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By names in lower case."""


class Prober:
    """Asks one engine, one question after another, and keeps the connection in between.

    Where the engine has just closed it, the question is asked once more on a new one.

    Args:
        url: the engine's base URL.
        timeout_s: for a question and its whole answer, connecting included.
        max_bytes: that a body may have.
    """

    def __init__(self, url: str, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._pool = EnginePool(url, timeout_s, time.monotonic)
        self._rest_of_head = f" HTTP/1.1\r\nhost: {url.removeprefix('http://')}\r\nuser-agent: pagefleet-router\r\n\r\n"

    async def get(self, path: str) -> ProbeAnswer:
        """Return the answer to `GET path`.

        Raises:
            ProbeError: no connection, no HTTP, too much, or not in time.
        """
        question = _Question(f"GET {path}{self._rest_of_head}".encode(), self._pool, self._max_bytes)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await question.answer()
        except TimeoutError as error:
            raise ProbeError(f"no answer in {self._timeout_s:g} s") from error

    def close(self) -> None:
        """Keep no connection any more."""
        self._pool.close()


class _Question:
    """One request, and what has come of its answer."""

    def __init__(self, request: bytes, pool: EnginePool, max_bytes: int) -> None:
        self._request = request
        self._max_bytes = max_bytes
        self._call = EngineCall(self, pool, paused=False)
        self._head: AnswerHead | None = None
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._answer: asyncio.Future[ProbeAnswer] = asyncio.get_running_loop().create_future()

    async def answer(self) -> ProbeAnswer:
        """Ask and wait. Whoever stops waiting closes the connection, on which the answer might yet come."""
        try:
            self._call.start()
            return await self._answer
        finally:
            self._call.abandon()

    def encode_request(self) -> list[bytes]:
        """See CallListener."""
        return [self._request]

    def on_answer(self, head: AnswerHead | None, body: bytes, complete: bool) -> None:
        """Collect the answer."""
        if complete:
            self._call.completed()
        self._head = head or self._head
        self._parts.append(body)
        self._num_bytes += len(body)
        if self._answer.done():
            return
        if self._num_bytes > self._max_bytes:
            self._answer.set_exception(ProbeError("the answer is too large"))
        elif complete:
            assert self._head is not None
            fields = self._head.fields.items()
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in fields}
            self._answer.set_result(ProbeAnswer(self._head.status, b"".join(self._parts), headers))

    def on_lost(self, failure: Failure) -> None:
        """Ask again where a kept connection was stale."""
        if not self._call.sends_again(failure, self._head is not None) and not self._answer.done():
            self._answer.set_exception(ProbeError(_REASONS[failure]))
