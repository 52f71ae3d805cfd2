"""The one seam from exceptions to HTTP: status, the API's own shape of errors, headers.

Whatever is not in the table is our own bug: the client gets a sentence without particulars, the log the traceback.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagefleet_protocol import headers
from pagefleet_protocol.errors import ErrorShape, Fault
from pagefleet_protocol.kv_handoff import KV_FAULT
from starlette.exceptions import HTTPException

from pagefleet_engine.errors import (
    EngineDead,
    InvalidRequest,
    KVLoadFailed,
    OwnFailure,
    ProfileRefused,
    QueueFull,
    RequestFailed,
    StepOutOfMemory,
    TransferRefused,
)

logger = logging.getLogger(__name__)

_INTERNAL = "The server had an error while processing this request."
_DEAD = "The model is not available: its engine stopped. Try again later."
_FAILED = "The engine could not finish this request."
_OWN_FAULT = {headers.FAULT: "request"}
"""No reason for a router to send the engine less: what others ask for it answers."""


class HttpRefusal(Exception):
    """The server refuses a request for a reason of HTTP's own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.answer = ErrorAnswer(status, message, param, code, dict(headers or {}))


class ServerStoppingError(HttpRefusal):
    """The process was told to end: HTTP 503, and the connection closes."""

    def __init__(self, message: str = "The server is shutting down. Try again at another replica.") -> None:
        go_elsewhere = {headers.RETRY_AFTER: "1", "connection": "close"}
        super().__init__(503, message, code="server_shutting_down", headers=go_elsewhere)


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as a client sees it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def fault(self) -> Fault:
        """What went wrong."""
        return Fault(self.status, self.message, self.param, self.code)

    def body(self, shape: ErrorShape = ErrorShape.CHAT) -> bytes:
        """Return it as JSON."""
        return self.fault.body(shape)


def answer_of(error: Exception, request_id: str) -> ErrorAnswer:
    """Map any exception; our own bugs are logged here, with `request_id`, and nowhere else."""
    known = known_answer(error)
    if known is not None:
        return known
    logger.error("request %s failed", request_id, exc_info=error)
    message = f"{_INTERNAL} Give the operator this request id: {request_id}."
    return ErrorAnswer(500, message, None, "internal_error", _OWN_FAULT)


def known_answer(error: Exception) -> ErrorAnswer | None:
    """Map an expected exception, None for any other.

    ConfigError and its kin are not here: they stop the process before it listens.
    """
    answer: ErrorAnswer | None = None
    match error:
        case HttpRefusal():
            answer = error.answer
        case TransferRefused():
            answer = ErrorAnswer(400, error.message, error.param, error.code, {KV_FAULT: "not_believed"})
        case InvalidRequest():
            answer = ErrorAnswer(400, error.message, error.param, error.code)
        case QueueFull():
            wait = {headers.RETRY_AFTER: str(max(1, math.ceil(error.retry_after_s)))}
            answer = ErrorAnswer(429, str(error), None, "queue_full", wait)
        case EngineDead():
            # The process ends with its engine; the closing connection tells the router that this is no overload.
            gone = {headers.RETRY_AFTER: "5", "connection": "close"}
            answer = ErrorAnswer(503, _DEAD, None, "engine_dead", gone)
        case KVLoadFailed():
            fault = {} if error.fault is None else {KV_FAULT: str(error.fault)}
            answer = ErrorAnswer(503, str(error), None, "kv_load_failed", {headers.RETRY_AFTER: "1", **fault})
        case StepOutOfMemory() | ProfileRefused():
            status, code = (409, "profile_refused") if isinstance(error, ProfileRefused) else (500, "out_of_memory")
            answer = ErrorAnswer(status, str(error), None, code)
        case RequestFailed():
            logger.error("the engine gave up a request: %s", error)
            own = _OWN_FAULT if isinstance(error, OwnFailure) else {}
            answer = ErrorAnswer(500, _FAILED, None, "request_failed", own)
        case HTTPException():
            answer = _http_answer(error)
    return answer


def _http_answer(error: HTTPException) -> ErrorAnswer:
    """Map what the routing raises."""
    allow = dict(error.headers or {})
    if error.status_code == 405:
        return ErrorAnswer(405, "This route does not take this method.", None, "method_not_allowed", allow)
    if error.status_code == 404:
        return ErrorAnswer(404, "There is no such route.", None, "unknown_url")
    return ErrorAnswer(error.status_code, str(error.detail), None, None, allow)
