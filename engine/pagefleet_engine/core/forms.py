"""Requests whose form is being compiled, or the vocabulary read that their thoughts are cut by.

Each is then given a matcher of its own, led to the end of its output so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagefleet_protocol.handoff import salt_owner

from pagefleet_engine.core.advance import form_failed
from pagefleet_engine.core.outputs import RequestUpdate
from pagefleet_engine.core.parking import NOTHING_SETTLED, Lost, Settled
from pagefleet_engine.core.request import FinishReason, Request
from pagefleet_engine.core.stop import FORM_COMPLETE
from pagefleet_engine.core.thoughts import Markers, ThoughtFirst
from pagefleet_engine.errors import InvalidRequest
from pagefleet_engine.grammars.port import Grammar, GrammarSource, Matcher, Spelled, Ticket


@dataclass(frozen=True, slots=True)
class _Awaited:
    """What one request waits for."""

    form: Ticket[Grammar] | None
    vocabulary: Ticket[Spelled] | None
    """Where there may be a thought before the answer."""

    @property
    def is_done(self) -> bool:
        return all(ticket is None or ticket.done() for ticket in (self.form, self.vocabulary))


class Forms:
    """Implements `parking.Wait`."""

    def __init__(self, source: GrammarSource | None, clock: Callable[[], float]) -> None:
        """`source` compiles; None: no form is held. `clock`: monotonic seconds."""
        self._source = source
        self._clock = clock
        self._awaited: dict[Request, _Awaited] = {}
        self._markers: Markers | None = None
        self._is_used = False
        self.num_requests = 0
        """Of those that ask for a form, all that were taken."""

    @property
    def num_parked(self) -> int:
        """See Wait."""
        return len(self._awaited)

    @property
    def parked(self) -> list[Request]:
        """See Wait."""
        return list(self._awaited)

    def submit(self, request: Request) -> None:
        """Begin to compile what a new request asks for, if anything; `park` or `drop` must follow.

        Raises:
            InvalidRequest: no form is held here.
            QueueFull: too many forms wait to be compiled.
        """
        p = request.sampling
        limits_thought = p.thinking is not None and p.thinking.budget is not None
        if p.structured_outputs is None and not limits_thought:
            return
        if self._source is None:
            param = "structured_outputs" if p.structured_outputs is not None else "thinking.budget"
            message = f"This engine has no tokenizer, and so holds no form: leave '{param}' out."
            raise InvalidRequest(message, param, "unsupported_parameter")
        self._awaited[request] = _Awaited(
            None
            if p.structured_outputs is None
            else self._source.submit(p.structured_outputs, salt_owner(request.scope.salt)),
            None if p.thinking is None else self._source.spell(),
        )
        self.num_requests += p.structured_outputs is not None
        self._is_used = True

    def park(self, request: Request) -> bool:
        """See Wait."""
        if request not in self._awaited:
            return False
        request.park(self._clock())
        return True

    def settle(self, num_running: int) -> Settled:
        """See Wait."""
        if self._source is None or not self._is_used:
            return NOTHING_SETTLED
        self._source.silence()  # also where nobody waits any more: the bell may ring for one that has left
        ready, lost = [], []
        for request, awaited in list(self._awaited.items()):
            if not awaited.is_done:
                continue
            del self._awaited[request]
            end = self._begin(request, awaited)
            if end is None:
                ready.append(request)
            else:
                lost.append(Lost(request, end))
        return Settled(ready, lost)

    def drop(self, request: Request) -> None:
        """See Wait."""
        self._awaited.pop(request, None)

    def check_integrity(self) -> None:
        """See Wait; there are no accounts."""

    def _begin(self, request: Request, awaited: _Awaited) -> RequestUpdate | None:
        """Give a request its matcher, led through the output that it came with; returns its end where that is due."""
        try:
            matcher = self._matcher(request, awaited)
            _lead(matcher, request)
        except InvalidRequest as error:
            return RequestUpdate(request.request_id, (), FinishReason.ERROR, refusal=error)
        except Exception:  # whatever a library may raise, the other requests must go on
            return form_failed(request)
        request.matcher = matcher.after_thought if isinstance(matcher, ThoughtFirst) else matcher
        if request.num_output_tokens and matcher.is_finished:
            return RequestUpdate(request.request_id, (), FORM_COMPLETE.reason, form_complete=True)
        return None

    def _matcher(self, request: Request, awaited: _Awaited) -> Matcher:
        form = None if awaited.form is None else awaited.form.result().matcher()
        thinking = request.sampling.thinking
        if awaited.vocabulary is None or thinking is None:
            assert form is not None, "nothing else was awaited"
            return form
        if self._markers is None:
            self._markers = Markers(awaited.vocabulary.result())
        return ThoughtFirst(thinking, self._markers, form)


def _lead(matcher: Matcher, request: Request) -> None:
    """Lead a matcher to the end of the request's output.

    Raises:
        InvalidRequest: that output does not have the form.
    """
    for place, token in enumerate(request.token_ids[request.num_prompt_tokens :]):
        if not matcher.accept(token):
            raise InvalidRequest(
                f"the output to resume leaves its form with token {place}: resume it only with the parameters that it "
                "was made with.",
                "resumed_token_ids",
                "invalid_value",
            )
