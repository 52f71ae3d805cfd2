"""Whether a request that an engine did not answer goes to another one, and to which."""

from __future__ import annotations

import msgspec
from pagefleet_protocol.engine_facts import EngineFacts

from pagefleet_router.engines.endpoints import EngineView, Snapshot
from pagefleet_router.errors import Failure
from pagefleet_router.exchange.dispatcher import Dispatcher
from pagefleet_router.exchange.stream_tape import StreamTape
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.policy import Choice

MAX_RETRIES = 2
MAX_TAKEOVERS = 2
"""Times that a stream goes on elsewhere."""
_ENGINE_ENDED = frozenset({Failure.RESET, Failure.ENDING})
_NOT_BEGUN = frozenset({Failure.REJECTED, Failure.HANDOFF})
"""No K/V was lost: an engine does not take the request, or not from this router, as while the fleet key changes."""


class Retries:
    """The attempts of one request.

    A request may be what killed its engine, so that its end is followed by one more try, not two, whichever part of it
    an engine had. Nor does one that is said to be its own failure get more: if the second engine says so too, it is. A
    stream is not taken over again from an engine that ended before it gave an event.
    """

    __slots__ = ("_num_ended", "num", "num_budgeted", "num_takeovers", "tried")

    def __init__(self) -> None:
        self.num = 0
        self.num_takeovers = 0
        self.num_budgeted = 0
        """Those that the retry budget counts."""
        self.tried: list[str] = []
        """Ids of the engines that failed."""
        self._num_ended = 0
        """Engines that ended while they had the request or its prompt."""

    def again(self, dispatcher: Dispatcher, view: RequestView, failure: Failure, was_sent: bool) -> Choice | None:
        """Return the engine that gets the request from its start, if any may."""
        has_ended = failure in _ENGINE_ENDED and was_sent
        self._num_ended += has_ended
        limit = 1 if has_ended or failure is Failure.OWN else MAX_RETRIES
        if self.num >= limit:
            return None
        return self._choose(dispatcher, view, self.tried, failure)

    def takeover(
        self, dispatcher: Dispatcher, view: RequestView, failure: Failure, lost: EngineView, tape: StreamTape | None
    ) -> Choice | None:
        """Return the engine that goes on with a stream that `lost` has given a part of, if any may."""
        if tape is None or not tape.noted or not tape.can_go_on or self.num_takeovers >= MAX_TAKEOVERS:
            return None
        if failure in _ENGINE_ENDED and self.num_takeovers and not tape.moved:
            return None
        unfit = _unfit(dispatcher.table.snapshot, view.model, lost.facts)
        view = msgspec.structs.replace(
            view,
            may_split=False,  # what is left is more than a prompt
            store="" if tape.prompt else view.store,  # of which nothing more is needed
        )
        choice = self._choose(dispatcher, view, [*self.tried, *unfit], failure)
        self.num_takeovers += choice is not None
        return choice

    def another_prefill(
        self, dispatcher: Dispatcher, view: RequestView, failure: Failure, may_compute: bool
    ) -> Choice | None:
        """Return who gets a request whose K/V did not come, the same decode engine among others.

        Args:
            dispatcher: chooses.
            view: of the request.
            failure: why it did not.
            may_compute: whether the decode engine may compute the prompt where no other prefill engine is left, though
                its K/V was on its way.
        """
        self._num_ended += failure in _ENGINE_ENDED
        if self._num_ended > 1:
            return None
        if failure is not Failure.REJECTED and self.num < MAX_RETRIES and dispatcher.prefills(view, self.tried):
            choice = self._choose(dispatcher, view, self.tried, failure)
            if choice is not None:
                return choice
        choice = dispatcher.choose_whole(view, self.tried) if may_compute or failure in _NOT_BEGUN else None
        self.num += choice is not None
        return choice

    def is_last_pair(self, dispatcher: Dispatcher, view: RequestView, prefill: str) -> bool:
        """Whether no other prefill engine than `prefill` would be asked."""
        return self.num >= MAX_RETRIES or not dispatcher.prefills(view, [*self.tried, prefill])

    def _choose(self, dispatcher: Dispatcher, view: RequestView, tried: list[str], failure: Failure) -> Choice | None:
        choice, counted = dispatcher.choose_again(view, tried, failure)
        if choice is not None:
            self.num += 1
        self.num_budgeted += counted
        return choice


def _unfit(snapshot: Snapshot, model: str | None, facts: EngineFacts | None) -> list[str]:
    """Return the engines that would go on with other tokens or another text than the lost one."""
    usable = snapshot.usable.get(model, ()) if model is not None else ()
    return [engine.id for engine in usable if not _is_alike(engine.facts, facts)]


def _is_alike(one: EngineFacts | None, other: EngineFacts | None) -> bool:
    if one is None or other is None:
        return False
    return (one.scope, one.text_digest, one.vocab_size) == (other.scope, other.text_digest, other.vocab_size)
