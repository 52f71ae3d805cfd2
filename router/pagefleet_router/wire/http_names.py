"""What HTTP/1.1 says about single headers and heads (RFC 9110, RFC 9112), as far as a relay needs it."""

from __future__ import annotations

import re
from http import HTTPStatus

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade http2-settings".split()
)
"""Never passed on in either direction."""

NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id"}
"""Request headers that an engine gets from us or not at all. An engine must not compress: streams stay readable."""

NOT_RETURNED = HOP_BY_HOP | {
    b"x-request-id",
    *(b"access-control-" + name for name in (b"allow-origin", b"allow-credentials", b"expose-headers")),
}
"""Answer headers that a client gets from us or not at all; so are those of OWN_PREFIX."""

OWN_PREFIX = b"x-pagefleet-"
"""Headers between our own processes: what a client or an engine sends under these names is not passed on."""

HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?")
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
PATH = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


def status_line(status: int) -> bytes:
    """Return the first line of an answer."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def chunk(data: bytes) -> bytes:
    """Return one chunk of the chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def render_answer(status: int, headers: list[tuple[bytes, bytes]], body: bytes, keep_alive: bool) -> bytes:
    """Return a whole answer of our own."""
    lines = [status_line(status)]
    lines += [b"%b: %b\r\n" % header for header in headers]
    if status not in {204, 304}:
        lines.append(b"content-length: %d\r\n" % len(body))
    lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    lines.append(body)
    return b"".join(lines)
