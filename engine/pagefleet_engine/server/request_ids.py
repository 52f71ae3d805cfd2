"""Request ids: the client's own where it is harmless in a header and a log line, else a new one."""

from __future__ import annotations

import re
import secrets

from pagefleet_protocol import headers
from starlette.types import Scope

_HARMLESS = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_KEY = "pagefleet_request_id"


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
