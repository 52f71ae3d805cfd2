"""One request of a client, as far as HTTP goes."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_protocol.errors import ErrorShape
from pagefleet_protocol.tenants import Tenant

from pagefleet_router.errors import Refusal
from pagefleet_router.wire.access import Route


class ClientRequest:
    """Filled by the parser: first the head, then `body`, then it is handed on."""

    __slots__ = (
        "began_at", "body", "cors", "fields", "headers", "http_1_0", "keep_alive", "method", "num_counted", "refusal",
        "request_id", "route", "shape", "target", "tenant",
    )  # fmt: skip

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self.fields: dict[bytes, bytes] = {}
        """The same by name, once the head is complete; of headers that are there twice the last."""
        self.http_1_0 = False
        self.body = b""
        self.keep_alive = True
        self.route: Route | None = None
        """What the head asks for, once it was checked."""
        self.shape = ErrorShape.CHAT
        """How its errors are told."""
        self.tenant: Tenant | None = None
        """Whose API key it carries; None where none is asked for."""
        self.request_id = b""
        self.cors: Sequence[tuple[bytes, bytes]] = ()
        """Headers of its answer, whoever gives that, for the browser that asks."""
        self.refusal: Refusal | None = None
        """Set when the head alone decides: a short body is read over and not kept, and a long one ends the
        connection."""
        self.began_at = 0.0
        self.num_counted = 0
        """Bytes of the body as `BodyMemory` counts them."""

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of one header."""
        if len(self.fields) == len(self.headers):
            found = self.fields.get(name)
            return [] if found is None else [found]
        return [value for key, value in self.headers if key == name]
