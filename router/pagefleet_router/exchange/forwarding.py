"""The request as an engine gets it, and what both engines of a pair are told of a transfer of K/V between them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol import headers
from pagefleet_protocol.engine_facts import CacheFacts
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.handoff import CACHE_SALT, PROMPT_TOKENS, STREAM, tenant_salt
from pagefleet_protocol.key_file import API_KEY
from pagefleet_protocol.kv_handoff import KV_TRANSFER, KvTransfer, OnFailure
from pagefleet_protocol.tracing import CONTEXT_HEADERS, Header

from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.exchange.stream_tape import StreamTape
from pagefleet_router.request_view import ANONYMOUS, RequestView
from pagefleet_router.scheduling.policy import Choice
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.http_names import NOT_FORWARDED, OWN_PREFIX

_KEYS = (b"authorization", API_KEY.encode())
_LONG_BYTES = 16 * 1024
"""From here on a copy of a body takes longer than sending it apart from its head."""


def forwarded_request(
    request: ClientRequest, view: RequestView, engine: EngineView, tape: StreamTape | None,
    context: Sequence[Header] | None = None, transfer: str = "",
) -> list[bytes]:  # fmt: skip
    """Return head and body for an engine, in pieces: a long body is not copied.

    The target is the route's own path, or that of a stored response as the front has checked it; nothing that frames,
    addresses or authorises comes from the client: a key that the router has checked stays here. Token ids travel behind
    the client's JSON, see `handoff`.

    Args:
        request: what the client sent.
        view: what became of it here.
        engine: who gets it.
        tape: of a stream that may go on elsewhere; only for engines that know what it is.
        context: of the trace, in place of the client's; None: the client's is passed on.
        transfer: of K/V, as this engine is told of it; empty: there is none.
    """
    assert request.route is not None
    keyed = request.tenant is not None
    target = request.target.decode() if request.route.stored else request.route.name
    lines = [f"{request.method} {target} HTTP/1.1\r\nhost: {engine.endpoint.url[7:]}\r\n".encode()]
    for name, value in request.headers:
        if name in NOT_FORWARDED or b"_" in name or name.startswith(OWN_PREFIX) or (keyed and name in _KEYS):
            continue
        if context is not None and name in CONTEXT_HEADERS:
            continue
        lines += (name, b": ", value, b"\r\n")
    lines += [b"%b: %b\r\n" % header for header in context or ()]
    if request.tenant is not None:  # a body may ask for less urgency, and not for more
        lines.append(f"{headers.PRIORITY}: {request.tenant.max_priority}\r\n".encode())
    if view.tenant != ANONYMOUS:
        lines.append(f"{CACHE_SALT}: {tenant_salt(view.tenant)}\r\n".encode())
    behind = _prompt(view, engine, tape)
    if behind:
        lines.append(f"{PROMPT_TOKENS}: {len(behind) // 4}\r\n".encode())
    if transfer:
        lines.append(f"{KV_TRANSFER}: {transfer}\r\n".encode())
    if tape is not None:
        lines.append(f"{STREAM}: {tape.state()}\r\n".encode())
        behind += tape.tokens
    num_bytes = len(request.body) + len(behind)
    framing = f"\r\ncontent-length: {num_bytes}\r\n\r\n".encode()
    lines += (b"x-request-id: ", request.request_id, framing)
    parts = [request.body, behind] if behind else [request.body]
    if num_bytes > _LONG_BYTES:
        return [b"".join(lines), *parts]
    return [b"".join(lines + parts)]


def _prompt(view: RequestView, engine: EngineView, tape: StreamTape | None) -> bytes:
    """Return the packed ids of the prompt that an engine is given; none where it makes it itself."""
    if tape is not None and tape.prompt:
        return tape.prompt
    reads_it_so = engine.facts is not None and engine.facts.text_digest == view.text_digest
    return view.token_ids if view.token_ids and reads_it_so else b""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One attempt to answer a request with two engines."""

    id: str
    prefill: str
    """Header's value for the prefill engine."""
    decode: str
    """The same for the decode engine."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Makes transfers that engines believe in.

    Args:
        key: of the fleet.
        fallback: what a decode engine does in the end without the K/V.
    """

    key: FleetKey
    fallback: OnFailure

    def make(self, choice: Choice, on_failure: OnFailure) -> Transfer:
        """Return a new transfer between the engines of a choice.

        Args:
            choice: of two engines whose facts are known.
            on_failure: what the decode engine does without the K/V.
        """
        assert choice.prefill is not None
        prefill, decode = _cache(choice.prefill), _cache(choice)
        number = secrets.token_hex(16)
        asked = KvTransfer("prefill", number, decode.incarnation)
        asks = KvTransfer("decode", number, prefill.incarnation, control_address(choice.prefill), on_failure)
        return Transfer(number, asked.encode(self.key, prefill.incarnation), asks.encode(self.key, decode.incarnation))


def control_address(choice: Choice) -> str:
    """Return HOST:PORT of the control socket of an engine's data rank, on the host of its HTTP address."""
    host = choice.engine.endpoint.url.removeprefix("http://").rpartition(":")[0]
    return f"{host}:{_cache(choice).kv_transfer_port}"


def _cache(choice: Choice) -> CacheFacts:
    assert choice.engine.facts is not None
    return choice.engine.facts.caches[choice.rank or 0]
