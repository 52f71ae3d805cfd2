"""Which web pages may call a server from a browser (Fetch standard, section 3.2): the pages of chosen origins.

Answers never allow credentials: a key travels in a header that a page has to set itself, and there are no cookies. What
an origin that is not allowed gets is the answer without these headers, which its browser keeps from the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagefleet_protocol.headers import ENGINE_ID, EXPLAIN, REQUEST_ID, RETRY_AFTER

ANY = "*"
EXPOSED = ", ".join((REQUEST_ID, ENGINE_ID, EXPLAIN, RETRY_AFTER))
"""Headers of an answer that a page may read besides the few that it always may."""
MAX_AGE_S = 600
"""For so long a browser need not ask again; most keep it no longer anyway."""
REFUSED = "Pages of this origin may not call this server: whoever runs it can allow the origin by --cors-origins."
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}(?:\s*,\s*[A-Za-z0-9-]{1,64}){0,63}")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class CorsError(ValueError):
    """An origin cannot be allowed as it is written; the message is the end of a sentence about the setting."""


@dataclass(frozen=True, slots=True)
class Cors:
    """The rules of one server; made by `allow`."""

    origins: frozenset[str]

    def headers(self, origin: str | None) -> Sequence[tuple[str, str]]:
        """Return the headers of any answer to a request that names this origin, or None.

        Where single origins are allowed each answer says that it depends on who asks: a cache must not mix them up.
        """
        told = (("access-control-expose-headers", EXPOSED),)
        if ANY in self.origins:
            return () if origin is None else (("access-control-allow-origin", ANY), *told)
        vary = ("vary", "origin")
        if origin is None or origin not in self.origins:
            return (vary,)
        return ("access-control-allow-origin", origin), vary, *told

    def allows(self, origin: str) -> bool:
        """Whether pages of an origin may call."""
        return ANY in self.origins or origin in self.origins

    def preflight(self, wanted_headers: str | None, methods: Sequence[str]) -> Sequence[tuple[str, str]]:
        """Return what an allowed origin is told besides `headers` when it asks before it calls.

        Args:
            wanted_headers: the value of Access-Control-Request-Headers; whatever it names may be sent.
            methods: that the route takes.
        """
        named = "" if wanted_headers is None else wanted_headers.strip()
        allowed = (("access-control-allow-headers", named),) if _HEADER_NAMES.fullmatch(named) else ()
        age = ("access-control-max-age", str(MAX_AGE_S))
        return ("access-control-allow-methods", ", ".join(methods)), *allowed, age


def allow(origins: Sequence[str]) -> Cors | None:
    """Return the rules for the origins of a setting; None where no page of another origin may call.

    Raises:
        CorsError: one is not `*` or of the form scheme://host or scheme://host:port, as a browser writes it.
    """
    for origin in origins:
        if origin != ANY and _ORIGIN.fullmatch(origin) is None:
            raise CorsError(
                f"names {origin[:80]!r}: give origins as browsers do, e.g. https://chat.example.com, or '*'"
            )
        scheme = origin.partition("://")[0]
        if origin.endswith(_DEFAULT_PORTS.get(scheme, "\n")):
            raise CorsError(f"names {origin[:80]!r}: leave the port out, as browsers do where it is the scheme's own")
    return Cors(frozenset(origins)) if origins else None


def is_preflight(method: str, fields: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks if a page may call; `fields`: headers by their name in lower case."""
    return method == "OPTIONS" and b"origin" in fields and b"access-control-request-method" in fields
