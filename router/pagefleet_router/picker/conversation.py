"""What a gateway and the picker say to each other about one request (proposal 004 of Gateway API Inference Extension).

The choice needs the body. In full duplex the gateway sends head and body without waiting, and gets both back once the
choice is made; where it buffers the body it waits for a word after the head first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from pagefleet_router.errors import Refusal, overloaded
from pagefleet_router.exchange.front import milliseconds
from pagefleet_router.picker.ext_proc import (
    BodyMode,
    Fields,
    GatewayMessage,
    HeadEdits,
    Modes,
    Phase,
    answer_now,
    go_on,
    pass_on,
    read_message,
)
from pagefleet_router.picker.picked_request import PickedRequest
from pagefleet_router.picker.picks import Picker
from pagefleet_router.picker.protobuf import WireError
from pagefleet_router.request_view import ANONYMOUS
from pagefleet_router.telemetry.access_record import AccessRecord
from pagefleet_router.telemetry.recent_requests import PassedRequest
from pagefleet_router.wire.access import Kind
from pagefleet_router.wire.client_connection import OwnAnswer
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.request_parser import head_too_large

CLIENT_LEFT = 499
CHUNK_BYTES = 60 * 1024
"""Of a body that goes back: gateways take no more than 64 KiB at once."""
_NO_BODY = b"{}"
"""Stands for a body that comes too late for a choice: the model can then only be the one that is served."""
_ROLE = (b"x-pagefleet-role", b"router")


class Conversation:
    """One request, from its head to its answer's end, or to the gateway's leaving.

    Args:
        picker: the router's parts that it takes.
    """

    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._clock = picker.services.dispatcher.clock
        self._modes = Modes()
        self._request: ClientRequest | None = None
        self._picked: PickedRequest | None = None
        self._subset: tuple[str, ...] | None = None
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._status = CLIENT_LEFT
        self._code: str | None = None
        self.is_over = False
        """Whether nothing more is to be said."""

    async def hear(self, data: bytes) -> list[bytes]:
        """Return what to say to a message: nothing yet, one answer, or several.

        Raises:
            WireError: it cannot be read.
        """
        message = read_message(data)
        try:
            return await self._answer(message)
        except Refusal as refusal:
            return [self._refuse(refusal)]

    def said(self) -> None:
        """Note that the gateway has what was to be said to it: with a choice, the body."""
        if self._picked is not None and self._request is not None:
            self._picker.memory.give_back(self._request)

    def end(self) -> None:
        """Let go of the request, however far it came; to be called once."""
        picked, request = self._picked, self._request
        if picked is not None:
            if self._modes.answer is BodyMode.NONE:
                picked.whole()  # there is no more to see than its head
            elif picked.answer is not None and not picked.answer.is_whole:
                self._status = CLIENT_LEFT
            picked.end()
            self._picker.inside.discard(picked)
        if request is not None:
            self._picker.memory.give_back(request)
            seconds = self._clock() - request.began_at
            self._picker.front.on_picked(request, passed(request, picked, self._status, seconds, self._code))

    async def _answer(self, message: GatewayMessage) -> list[bytes]:
        phase = message.phase
        if phase is Phase.REQUEST_HEADERS:
            return await self._begin(message)
        if self._request is None:
            return [go_on(phase)]  # the gateway does not show requests: there is nothing to choose by
        if phase is Phase.REQUEST_BODY:
            return await self._take_request(message)
        if phase is Phase.REQUEST_TRAILERS:
            answers = [] if self._picked is not None else await self._pick_by_body(ends=False)
            return [*answers, go_on(phase)]
        if phase is Phase.RESPONSE_HEADERS:
            return [self._begin_answer(message)]
        return [self._take_answer(message)]

    async def _begin(self, message: GatewayMessage) -> list[bytes]:
        """Check the head; choose where that is all there is to know."""
        if self._request is not None:
            raise WireError("a second head came on one stream")
        request = self._request = client_request(message.fields, self._clock())
        self._modes = message.modes or self._modes
        self._subset = message.subset
        front = self._picker.front
        front.on_head(request)
        if not message.fits:
            raise head_too_large()
        if request.refusal is not None:
            raise request.refusal
        assert request.route is not None
        if request.route.kind is not Kind.PROXY:
            return [self._own(await front.own(request))]
        if message.ends:
            return await self._pick_by_head(b"")
        if self._modes.request is BodyMode.FULL_DUPLEX_STREAMED:
            return []
        if self._modes.request is BodyMode.BUFFERED:
            return [go_on(message.phase)]
        return await self._pick_by_head(_NO_BODY)

    async def _take_request(self, message: GatewayMessage) -> list[bytes]:
        if self._picked is not None:
            return [go_on(message.phase)]
        self._keep(message.body)
        if self._modes.request is BodyMode.FULL_DUPLEX_STREAMED:
            return await self._pick_by_body(ends=True) if message.ends else []
        destination, edits = await self._pick(b"".join(self._parts))
        return [go_on(message.phase, edits, destination)]

    async def _pick_by_head(self, body: bytes) -> list[bytes]:
        destination, edits = await self._pick(body)
        return [go_on(Phase.REQUEST_HEADERS, edits, destination)]

    async def _pick_by_body(self, ends: bool) -> list[bytes]:
        """Choose, and give back the head and the body."""
        body = b"".join(self._parts)
        destination, edits = await self._pick(body)
        head = go_on(Phase.REQUEST_HEADERS, edits, destination)
        return [head, *(pass_on(Phase.REQUEST_BODY, part, last and ends) for part, last in chunks(body))]

    async def _pick(self, body: bytes) -> tuple[str, HeadEdits]:
        request, began_at = self._request, self._clock()
        assert request is not None
        self._parts = []
        request.body = body
        services = self._picker.services
        self._picked = picked = PickedRequest(request, self._picker.front.view(request), services)
        self._picker.inside.add(picked)
        destination = await picked.pick(self._subset)
        self._picker.picks.picked(picked, self._clock() - began_at - picked.held_s)
        edits = picked.request_edits(destination)
        picked.forget_request()
        return destination, edits

    def _keep(self, body: bytes) -> None:
        """Keep a part of the body, within limits.

        Raises:
            Refusal: it is too long (413), or all bodies together are (503).
        """
        request, limit = self._request, self._picker.max_body_bytes
        assert request is not None
        self._num_bytes += len(body)
        if self._num_bytes > limit:
            raise Refusal(413, f"The request body is larger than {limit} bytes.", code="request_too_large")
        if not self._picker.memory.take(request, self._num_bytes):
            raise overloaded()
        self._parts.append(body)

    def _begin_answer(self, message: GatewayMessage) -> bytes:
        picked = self._picked
        if picked is None:
            return go_on(message.phase)
        if not message.fits:
            raise picked.unreadable()
        picked.answered_by(message.served)
        status = dict(message.fields).get(b":status", b"")
        self._status = int(status) if len(status) == 3 and status.isdigit() else 502
        edits = picked.take_head(self._status, message.fields)
        if message.ends:
            self._whole()
        return go_on(message.phase, edits)

    def _take_answer(self, message: GatewayMessage) -> bytes:
        if self._picked is not None and message.body:
            self._picked.take_body(message.body)
        if message.ends:
            self._whole()
        if message.phase is Phase.RESPONSE_BODY and self._modes.answer is BodyMode.FULL_DUPLEX_STREAMED:
            return pass_on(message.phase, message.body, message.ends)
        return go_on(message.phase)

    def _whole(self) -> None:
        self.is_over = True
        if self._picked is not None:
            self._picked.whole()

    def _own(self, answer: OwnAnswer) -> bytes:
        request = self._request
        assert request is not None
        self.is_over = True
        self._status = answer.status
        fields = [*answer.fields, (b"x-request-id", request.request_id), _ROLE, *request.cors]
        return answer_now(answer.status, fields, b"" if request.method == "HEAD" else answer.body, "pagefleet")

    def _refuse(self, refusal: Refusal) -> bytes:
        request = self._request
        assert request is not None
        self.is_over = True
        self._status, self._code = refusal.status, refusal.code
        if self._picked is None or self._picked.choice is None:
            self._picker.picks.refused(refusal, request)
        fields = [(b"content-type", b"application/json"), (b"x-request-id", request.request_id)]
        fields += [(name.encode(), value.encode()) for name, value in refusal.headers.items() if name != "connection"]
        details = f"pagefleet_{refusal.code or refusal.status}"
        return answer_now(refusal.status, [*fields, *request.cors], refusal.body(request.shape), details)


def client_request(fields: Fields, now: float) -> ClientRequest:
    """Return the request that a gateway's head tells of."""
    request = ClientRequest()
    request.began_at = now
    for name, value in fields:
        if name == b":method":
            request.method = value.decode("latin-1")
        elif name == b":path":
            request.target = value
        elif not name.startswith(b":"):
            request.headers.append((name, value))
    request.fields = dict(request.headers)
    return request


def chunks(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield a body in parts that a gateway takes, at least one, and whether each is the last."""
    last = max(0, len(body) - 1) // CHUNK_BYTES
    for number in range(last + 1):
        yield body[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES], number == last


def passed(
    request: ClientRequest, picked: PickedRequest | None, status: int, seconds: float, code: str | None
) -> PassedRequest:  # fmt: skip
    """Return what the log and the console say of a request that is over."""
    route = "unknown" if request.route is None else request.route.name
    tenant = ANONYMOUS if request.tenant is None else request.tenant.name
    request_id, total_ms = request.request_id.decode(), milliseconds(seconds)
    if picked is None:
        return PassedRequest(AccessRecord(request_id, route, status, total_ms), time.time(), tenant, code)
    view, choice, answer = picked.view, picked.choice, picked.answer
    has_read = answer is not None and answer.num_reads > 0
    record = AccessRecord(
        request_id,
        route,
        status,
        total_ms,
        engine=None if choice is None else choice.engine.id,
        retries=len(picked.tried),
        bytes_out=0 if answer is None else answer.num_bytes,
        model=view.model,
        prompt_tokens=view.num_tokens,
        cached_tokens=0 if choice is None else choice.cached_tokens,
        queue_ms=milliseconds(picked.waited_s),
        pd="none" if choice is None else choice.kind,
    )
    is_stream = answer is not None and answer.head.is_event_stream
    return PassedRequest(
        record,
        time.time(),
        tenant,
        code,
        ttft_s=answer.first_at - request.began_at if answer is not None and has_read and is_stream else None,
        generated_tokens=answer.num_tokens if answer is not None and is_stream else None,
        tried=tuple(picked.tried),
    )
