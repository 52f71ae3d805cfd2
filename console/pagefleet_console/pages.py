"""What the router and the engine serve of the console: `read_pages` once, then `Page.answer` for each request.

The files hold no data and need no key. What they show comes from `/console/state` and `/v1`, with the key that the user
enters.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Final

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""No code, style or picture but our own and what the user attaches; no other host; in nobody's frame; no innerHTML."""

HEADERS: Final = MappingProxyType(
    {
        "cache-control": "no-cache",  # kept, and asked for by its ETag: files of two versions never mix
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
        "referrer-policy": "no-referrer",
        "vary": "accept, accept-encoding",  # at `/` a program gets another answer than a browser
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }
)

_CONTENT_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Answer:
    """One HTTP answer: its status, its headers in lower case (without a date or a length), its body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Page:
    """One file of the console, ready to be sent."""

    body: bytes
    gzipped: bytes
    content_type: str
    etag: str
    """Quoted, as the header has it."""
    headers: Mapping[str, str]
    """Those that each answer has: caching and security. Content-Type, ETag and Content-Encoding are not among them."""

    def answer(self, accept_encoding: str | None = None, if_none_match: str | None = None) -> Answer:
        """Answer a GET by the values of two of its headers, None where it has not got them.

        304 without a body where the client has this version; else 200, gzipped where the client takes that.
        """
        headers = {**self.headers, "content-type": self.content_type, "etag": self.etag}
        if if_none_match is not None and _names(if_none_match, self.etag):
            return Answer(304, headers, b"")
        if accept_encoding is not None and _takes_gzip(accept_encoding):
            return Answer(200, {**headers, "content-encoding": "gzip"}, self.gzipped)
        return Answer(200, headers, self.body)


def read_pages() -> Mapping[str, Page]:
    """Read the console's files: `/` and `/docs` are pages, `/console/<file>` their parts. Compresses each once."""
    folder = files("pagefleet_console") / "page"
    named = {one.name: _page(one.name, one.read_bytes()) for one in folder.iterdir() if one.is_file()}
    roots = {"/": named.pop("index.html"), "/docs": named.pop("docs.html")}
    return MappingProxyType(roots | {f"/console/{name}": page for name, page in sorted(named.items())})


def wants_page(accept: str | None) -> bool:
    """Say whether who asks for `/` is a browser that opens it, by the Accept header; programs send `*/*` or nothing."""
    kinds = {part.partition(";")[0].strip().lower() for part in (accept or "").split(",")}
    return bool(kinds & {"text/html", "application/xhtml+xml"})


def _page(name: str, body: bytes) -> Page:
    return Page(
        body=body,
        gzipped=gzip.compress(body, 9, mtime=0),
        content_type=_CONTENT_TYPES[name.rpartition(".")[2]],
        etag=f'"{hashlib.sha256(body).hexdigest()[:20]}"',
        headers=HEADERS,
    )


def _names(if_none_match: str, etag: str) -> bool:
    """Compare weakly, as RFC 9110 asks of If-None-Match: a proxy that compresses makes a strong tag a weak one."""
    tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return etag in tags or "*" in tags


def _takes_gzip(accept_encoding: str) -> bool:
    for coding in accept_encoding.lower().split(","):
        name, _, quality = coding.partition(";")
        if name.strip() in {"gzip", "*"}:
            return quality.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False
