"""What every request passes, as plain ASGI: its id, its record, the error seam, sanity of the head. Nothing buffers."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from pagefleet_protocol import headers
from pagefleet_protocol.errors import ErrorShape, shape_of
from pagefleet_protocol.key_file import KEY_IN_URL, has_key_in_query
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagefleet_engine.metrics import EngineMetrics
from pagefleet_engine.server.access import route_of
from pagefleet_engine.server.console import EngineBoard, begin_note, note_error
from pagefleet_engine.server.errors import ErrorAnswer, HttpRefusal, answer_of
from pagefleet_engine.server.responses import NUM_EVENTS

_HARMLESS = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_KEY = "pagefleet_request_id"
_NO_BODY = "/cancel"
"""Ends the paths of requests that say all by it."""


def assign_request_id(scope: Scope) -> str:
    """Choose the request's id and keep it in the scope. It need not be unique: the engine gets ids of its own."""
    given = [value for name, value in scope["headers"] if name == headers.REQUEST_ID.encode()]
    harmless = len(given) == 1 and _HARMLESS.fullmatch(given[0])
    request_id = given[0].decode() if harmless else new_id("req")
    scope[_KEY] = request_id
    return request_id


def request_id_of(scope: Scope) -> str:
    """Return the id that `assign_request_id` chose."""
    return str(scope.get(_KEY, "unknown"))


def new_id(prefix: str) -> str:
    """Return an id nobody can guess, e.g. `chatcmpl-5f0c...`."""
    return f"{prefix}-{secrets.token_hex(12)}"


access_logger = logging.getLogger("pagefleet_engine.access")

MAX_HEADERS = 100
_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_JSON_TYPE = re.compile(rb"application/json\s*(?:;.*)?", re.IGNORECASE)


class RequestRecord:
    """Gives each request its id, counts its status, and logs a line when asked to (never a word of its text)."""

    def __init__(self, app: ASGIApp, metrics: EngineMetrics, access_log: bool, board: EngineBoard | None) -> None:
        self._app = app
        self._board = board
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and record its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = assign_request_id(scope)
        id_header = (headers.REQUEST_ID.encode(), request_id.encode())
        started, status = time.monotonic(), 0
        if self._board is not None:
            begin_note(scope)

        async def send_recorded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
            await send(message)

        try:
            await self._app(scope, receive, send_recorded)
        finally:
            route = route_of(scope["path"]) or "other"
            self._metrics.http_request(route, status)
            if self._board is not None:
                self._board.passed(scope, request_id, route, status, time.monotonic() - started)
            if self._access_log:
                took_ms = (time.monotonic() - started) * 1000
                access_logger.info("%s %s %s %d %.1fms", request_id, scope["method"], route, status, took_ms)


class ErrorSeam:
    """Turns every exception into one answer: an envelope, or the last event of a stream that has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; nothing but a cancellation gets through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the top of a request: whatever it is, the client gets an answer
            answer = answer_of(error, request_id_of(scope))
            note_error(scope, answer.code, answer.status)
            shape = shape_of(scope["path"])
            if started:  # only streams begin before all of their work is done
                event = answer.fault.event(shape, scope.get(NUM_EVENTS, 0))
                await send({"type": "http.response.body", "body": event, "more_body": False})
            else:
                await send_error(answer, send, shape)


class HeadCheck:
    """Refuses requests whose head no honest client sends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http":
            _check_head(scope)
        await self._app(scope, receive, send)


def _check_head(scope: Scope) -> None:
    if scope["query_string"] and has_key_in_query(scope["query_string"].decode("latin-1")):
        raise HttpRefusal(400, KEY_IN_URL, code="key_in_url")
    if len(scope["headers"]) > MAX_HEADERS:
        raise HttpRefusal(431, f"The request has more than {MAX_HEADERS} headers.", code="too_many_headers")
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    no_host_needed = not hosts and scope["http_version"] == "1.0"
    if not no_host_needed and (len(hosts) != 1 or not _HOST.fullmatch(hosts[0])):
        raise HttpRefusal(400, "The request needs one valid Host header.", code="invalid_host")
    if scope["method"] == "POST" and not scope["path"].endswith(_NO_BODY):
        types = [value for name, value in scope["headers"] if name == b"content-type"]
        if len(types) != 1 or not _JSON_TYPE.fullmatch(types[0]):
            message = "Send the body as JSON, with one header 'Content-Type: application/json'."
            raise HttpRefusal(415, message, code="unsupported_media_type")


async def send_error(answer: ErrorAnswer, send: Send, shape: ErrorShape = ErrorShape.CHAT) -> None:
    """Send an error as a whole answer."""
    body = answer.body(shape)
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    head += [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": head})
    await send({"type": "http.response.body", "body": body})
