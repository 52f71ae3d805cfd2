"""The request as an engine gets it."""

from __future__ import annotations

from pagefleet_router.proxy.client_request import ClientRequest
from pagefleet_router.proxy.http_names import NOT_FORWARDED, OWN_PREFIX


def forwarded_request(request: ClientRequest, url: str) -> bytes:
    """Return head and body for an engine.

    The target is the route's own path, and nothing that frames, addresses or authorises comes from the client: a key
    that the router has checked stays here.
    """
    assert request.route is not None
    keyed = request.tenant is not None
    lines = [f"{request.method} {request.route.name} HTTP/1.1\r\nhost: {url[7:]}\r\n".encode()]
    for name, value in request.headers:
        if name in NOT_FORWARDED or b"_" in name or name.startswith(OWN_PREFIX) or (keyed and name == b"authorization"):
            continue
        lines.append(b"%b: %b\r\n" % (name, value))
    lines.append(
        b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (request.request_id, len(request.body), request.body)
    )
    return b"".join(lines)
