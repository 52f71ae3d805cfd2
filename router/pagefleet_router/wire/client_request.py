"""One request of a client, as far as HTTP goes."""

from __future__ import annotations

import msgspec
from pagefleet_protocol.tenants import Tenant

from pagefleet_router.errors import Refusal
from pagefleet_router.wire.access import Route


class ClientRequest(msgspec.Struct, eq=False):
    """Filled by the parser: first the head, then `body`, then it is handed on."""

    method: str = ""
    target: bytes = b""
    headers: list[tuple[bytes, bytes]] = []
    """Names in lower case."""
    fields: dict[bytes, bytes] = {}
    """The same by name, once the head is complete; of headers that are there twice the last."""
    http_1_0: bool = False
    body: bytes = b""
    keep_alive: bool = True
    route: Route | None = None
    """What the head asks for, once it was checked."""
    tenant: Tenant | None = None
    """Whose API key it carries; None where none is asked for."""
    request_id: bytes = b""
    refusal: Refusal | None = None
    """Set when the head alone decides: a short body is read over and not kept, and a long one ends the connection."""
    began_at: float = 0.0
    num_counted: int = 0
    """Bytes of the body as `BodyMemory` counts them."""

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of one header."""
        if len(self.fields) == len(self.headers):
            found = self.fields.get(name)
            return [] if found is None else [found]
        return [value for key, value in self.headers if key == name]
