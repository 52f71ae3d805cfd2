"""The one error shape of every HTTP answer: OpenAI's envelope.

Source: OpenAI API reference, "Error codes". `type` and `code` are strings, `param` names the field at fault.
"""

from __future__ import annotations

import msgspec

INVALID_REQUEST = "invalid_request_error"
AUTHENTICATION = "authentication_error"
NOT_FOUND = "not_found_error"
RATE_LIMIT = "rate_limit_error"
SERVER = "server_error"
UNAVAILABLE = "service_unavailable_error"

TYPE_OF_STATUS = {
    400: INVALID_REQUEST,
    401: AUTHENTICATION,
    404: NOT_FOUND,
    405: INVALID_REQUEST,
    413: INVALID_REQUEST,
    415: INVALID_REQUEST,
    429: RATE_LIMIT,
    500: SERVER,
    502: SERVER,
    503: UNAVAILABLE,
    504: SERVER,
}


class ErrorBody(msgspec.Struct, frozen=True):
    """What is inside `{"error": ...}`."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """A whole error answer, also the data of an in-stream SSE error event."""

    error: ErrorBody


def error_envelope(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorEnvelope:
    """Build the envelope whose `type` follows from the HTTP status."""
    return ErrorEnvelope(ErrorBody(message, TYPE_OF_STATUS.get(status, SERVER), param, code))


def error_json(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return the envelope as JSON bytes."""
    return msgspec.json.encode(error_envelope(status, message, param, code))
