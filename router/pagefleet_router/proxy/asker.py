"""What the head of a request says of who asks: tenant, urgency, session."""

from __future__ import annotations

import hashlib
import re

import msgspec
from pagefleet_protocol import headers
from pagefleet_protocol.tenants import MAX_PRIORITY

from pagefleet_router.errors import Refusal
from pagefleet_router.proxy.client_request import ClientRequest
from pagefleet_router.request_view import ANONYMOUS

_PRIORITY = headers.PRIORITY.encode()
_INTEGER = re.compile(rb"[+-]?[0-9]{1,9}")


class Asker(msgspec.Struct, frozen=True, gc=False):
    """Becomes part of the `RequestView`."""

    tenant: str = ANONYMOUS
    priority: int = 0
    session: int | None = None


NOBODY = Asker()
"""Who sends no key, no session and no priority."""


def read_asker(request: ClientRequest, session_header: bytes) -> Asker:
    """Read a head.

    A tenant gets no priority above its own highest; where no keys are asked for everybody may have any.

    Raises:
        Refusal: the priority is no integer (400).
    """
    priority = request.fields.get(_PRIORITY, b"")
    session = request.fields.get(session_header, b"")
    tenant = request.tenant
    if tenant is None and not priority and not session:
        return NOBODY
    name_of_tenant = ANONYMOUS if tenant is None else tenant.name
    highest = MAX_PRIORITY if tenant is None else tenant.max_priority
    return Asker(
        name_of_tenant,
        min(_priority(priority), highest) if priority or highest < 0 else 0,
        _session(name_of_tenant, session) if session else None,
    )


def _priority(value: bytes) -> int:
    if not value:
        return 0
    if not _INTEGER.fullmatch(value):
        message = f"The header {headers.PRIORITY} must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}."
        raise Refusal(400, message, param=headers.PRIORITY, code="invalid_value")
    return max(-MAX_PRIORITY, min(int(value), MAX_PRIORITY))


def _session(tenant: str, value: bytes) -> int:
    """Return a hash that is the same in every router: they must all prefer the same engine."""
    return int.from_bytes(hashlib.blake2b(tenant.encode() + b"\0" + value, digest_size=8).digest(), "little")
