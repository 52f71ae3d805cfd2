"""ASGI middleware that lets web pages of chosen origins call, and answers their browsers before they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagefleet_protocol.cors import REFUSED, Cors, is_preflight
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagefleet_engine.server.errors import ErrorAnswer
from pagefleet_engine.server.middleware import send_error


class CorsGate:
    """Stands before all that may refuse: a page has to be able to read why.

    Args:
        app: what is behind the gate.
        cors: the rules.
        methods: returns those that the route of a path takes, by the path; None where there is no such route.
    """

    def __init__(self, app: ASGIApp, cors: Cors, methods: Callable[[str], Sequence[str] | None]) -> None:
        self._app = app
        self._cors = cors
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight, or pass the request on and tell the browser who may read the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fields = dict(scope["headers"])
        origin = fields[b"origin"].decode("latin-1") if b"origin" in fields else None
        told = [(name.encode(), value.encode("latin-1")) for name, value in self._cors.headers(origin)]
        methods = self._methods(scope["path"]) if is_preflight(scope["method"], fields) else None
        if methods is not None:
            if not self._cors.allows(origin or ""):
                await send_error(ErrorAnswer(403, REFUSED, None, "origin_not_allowed"), send)
                return
            wanted = fields.get(b"access-control-request-headers", b"").decode("latin-1")
            told += [(name.encode(), value.encode("latin-1")) for name, value in self._cors.preflight(wanted, methods)]
            await send({"type": "http.response.start", "status": 204, "headers": told})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *told]
            await send(message)

        await self._app(scope, receive, send_told)
