"""Last words of requests that are over here, held until their K/V is where it should be."""

from __future__ import annotations

from collections.abc import Iterable

from pagefleet_kv.port import AnswerDone

from pagefleet_engine.core.outputs import RequestUpdate
from pagefleet_engine.core.request import FinishReason
from pagefleet_engine.core.step import FailureKind


class HeldAnswers:
    """By the numbers that the connector gave. A request whose answer is held has no blocks and is in no step."""

    def __init__(self) -> None:
        self._held: dict[int, RequestUpdate] = {}
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._numbers

    def hold(self, number: int, update: RequestUpdate) -> None:
        """Keep the last update of a request."""
        self._held[number] = update
        self._numbers[update.request_id] = number

    def drop(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        del self._held[self._numbers.pop(request_id)]

    def settle(self, done: Iterable[AnswerDone]) -> list[RequestUpdate]:
        """Return what can be told now: the answer as it was, or an error. Numbers that were dropped are ignored."""
        told = []
        for answer in done:
            update = self._held.pop(answer.number, None)
            if update is None:
                continue
            del self._numbers[update.request_id]
            if answer.failure is not None:
                kind = FailureKind.KV_SEND_FAILED
                update = RequestUpdate(update.request_id, (), FinishReason.ERROR, failure=kind)
            told.append(update)
        return told
