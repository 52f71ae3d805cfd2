"""A gateway as Envoy is one, as far as an endpoint picker sees it: gRPC by the published schema, HTTP to engines.

No test in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.fakes.ext_proc_schema import (
    BUFFERED,
    FULL_DUPLEX,
    NONE,
    OVERWRITE,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
)
from tests.fakes.faulty_engine import CHAT, Answer, Client, chat

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"


@dataclass
class Passed:
    """One request that went by, and its answer as the client got it."""

    answer: Answer
    destination: str = ""
    """What the picker said, in its header and in its metadata."""
    served: str = ""
    """Who answered; empty: the picker itself, or nobody."""
    engine_head: dict[str, str] = field(default_factory=dict)
    """The request's fields as the engine got them."""
    engine_body: bytes = b""


@dataclass
class Gateway:
    """Where to ask, and how bodies are sent there."""

    channel: Any
    request_mode: int = FULL_DUPLEX
    answer_mode: int = FULL_DUPLEX
    chunk_bytes: int = 16 * 1024
    tells_modes: bool = True
    tells_served: bool = True

    async def send(
        self, body: bytes | None, *, path: str = CHAT, fields: Sequence[tuple[str, str]] = (),
        subset: Iterable[str] | str | None = None, trailers: bool = False,
    ) -> Passed:  # fmt: skip
        """Carry one request: POST with a body, GET without."""
        stream = self.channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()
        carried = Carried(self, stream, {":method": "GET" if body is None else "POST", ":path": path, **dict(fields)})
        try:
            return await carried.run(body, subset, trailers)
        finally:
            stream.cancel()

    async def health(self, service: str) -> int:
        """Return the status of a gRPC health check: 1 is SERVING, 2 is NOT_SERVING."""
        check = self.channel.unary_unary("/grpc.health.v1.Health/Check")
        name = service.encode()
        answer: bytes = await check(b"\x0a" + bytes((len(name),)) + name)
        assert answer[:1] == b"\x08"
        return answer[1]


class Immediate(Exception):
    """The picker answered in an engine's place."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


@dataclass
class Carried:
    """One request on its way."""

    gateway: Gateway
    stream: Any
    head: dict[str, str]
    destination: str = ""

    async def run(self, body: bytes | None, subset: Iterable[str] | str | None, trailers: bool) -> Passed:
        try:
            sent = await self._ask(body, subset, trailers)
            # What Envoy's cluster does: the first endpoint that works, in order.
            assert self.destination, "the picker let a request go on without a destination"
            for address in self.destination.split(","):
                client = await self._reach(address, sent)
                if client is not None:
                    return await self._relay(client, address, sent)
            return Passed(Answer(503, {}, b"no healthy upstream"), self.destination)
        except Immediate as immediate:
            return Passed(immediate.answer, self.destination)

    async def _ask(self, body: bytes | None, subset: Iterable[str] | str | None, trailers: bool) -> bytes:
        """Show the request; returns its body as the picker gave it back."""
        gateway = self.gateway
        head = self._message(request_headers=self._headers(self.head, body is None))
        if gateway.tells_modes:
            head.protocol_config.request_body_mode = gateway.request_mode
            head.protocol_config.response_body_mode = gateway.answer_mode
        if subset is not None:
            hint = head.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({f"{DESTINATION}-subset": subset if isinstance(subset, str) else list(subset)})
        await self.stream.write(head)
        if body is None:
            await self._heard("request_headers")
            return b""
        if gateway.request_mode == FULL_DUPLEX:
            return await self._ask_in_full_duplex(body, trailers)
        await self._heard("request_headers")
        parts = [body] if gateway.request_mode == BUFFERED else list(self._parts(body))
        if gateway.request_mode == NONE:
            parts = []
        for number, part in enumerate(parts, 1):
            ends = number == len(parts) and not trailers
            await self.stream.write(self._message(request_body=HttpBody(body=part, end_of_stream=ends)))
            await self._heard("request_body")
        return body

    async def _ask_in_full_duplex(self, body: bytes, trailers: bool) -> bytes:
        parts = list(self._parts(body))
        for number, part in enumerate(parts, 1):
            ends = number == len(parts) and not trailers
            await self.stream.write(self._message(request_body=HttpBody(body=part, end_of_stream=ends)))
        if trailers:
            await self.stream.write(self._message(request_trailers=HttpTrailers()))
        await self._heard("request_headers")
        back, ended = b"", False
        while not ended and len(back) < len(body):
            streamed = (await self._heard("request_body")).response.body_mutation.streamed_response
            assert len(streamed.body) <= 64 * 1024, "a chunk that gateways refuse"
            back += streamed.body
            ended = streamed.end_of_stream
        if trailers:
            await self._heard("request_trailers")
        assert ended is not trailers
        return back

    async def _reach(self, address: str, body: bytes) -> Client | None:
        host, _, port = address.rpartition(":")
        try:
            client = Client(*await asyncio.open_connection(host, int(port)))
        except OSError:
            return None
        fields = {name: value for name, value in self.head.items() if not name.startswith(":")}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        request = f"{self.head[':method']} {self.head[':path']} HTTP/1.1\r\nhost: gateway\r\n{lines}"
        await client.send(f"{request}content-length: {len(body)}\r\n\r\n".encode() + body)
        return client

    async def _relay(self, client: Client, address: str, sent: bytes) -> Passed:
        """Show the answer, and collect it as the client would."""
        found = Passed(Answer(0, {}), self.destination, address, dict(self.head), sent)
        try:
            answer = await client.head()
            is_chunked = "transfer-encoding" in answer.headers
            length = int(answer.headers.get("content-length", 0))
            self.head = {":status": str(answer.status), **answer.headers}
            is_empty = not is_chunked and not length
            head = self._message(response_headers=self._headers(self.head, is_empty))
            if self.gateway.tells_served:
                head.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": address})
            await self.stream.write(head)
            await self._heard("response_headers")
            found.answer = Answer(answer.status, self.head)
            if is_empty:
                return found
            if self.gateway.answer_mode == NONE:
                await self.stream.done_writing()
                return found
            async for part, ends in self._read(client, is_chunked, length):
                found.answer.body += await self._show(part, ends)
        except (asyncio.IncompleteReadError, ConnectionError):
            found.answer.cut = True
        finally:
            client.close()
        return found

    async def _show(self, part: bytes, ends: bool) -> bytes:
        await self.stream.write(self._message(response_body=HttpBody(body=part, end_of_stream=ends)))
        heard = await self._heard("response_body")
        if self.gateway.answer_mode != FULL_DUPLEX:
            assert not heard.response.HasField("body_mutation")
            return part
        streamed = heard.response.body_mutation.streamed_response
        assert streamed.end_of_stream is ends
        returned: bytes = streamed.body
        return returned

    async def _read(self, client: Client, is_chunked: bool, length: int) -> AsyncIterator[tuple[bytes, bool]]:
        if not is_chunked:
            yield await client.reader.readexactly(length), True
            return
        while part := await client.chunk():
            yield part, False
        yield b"", True

    async def _heard(self, expected: str) -> Any:
        """Return the next answer, obeyed."""
        answer = await self.stream.read()
        assert answer is not grpc.aio.EOF, f"the picker ended where {expected} was to be answered"
        kind = answer.WhichOneof("kind")
        if kind == "immediate_response":
            said = answer.immediate_response
            fields = {one.header.key: one.header.raw_value.decode() for one in said.headers.set_headers}
            raise Immediate(Answer(said.status.code, fields, said.body))
        assert kind == expected
        part = getattr(answer, kind)
        mutation = part.header_mutation if kind.endswith("trailers") else part.response.header_mutation
        for name in mutation.remove_headers:
            self.head.pop(name, None)
        for one in mutation.set_headers:
            assert one.append_action == OVERWRITE
            self.head[one.header.key] = one.header.raw_value.decode()
        if "envoy.lb" in answer.dynamic_metadata:
            assert not self.destination, "the picker chose twice"
            self.destination = answer.dynamic_metadata["envoy.lb"][DESTINATION]
            assert self.head[DESTINATION] == self.destination, "header and metadata differ"
            assert part.response.clear_route_cache
        return part

    def _parts(self, body: bytes) -> Iterator[bytes]:
        size = self.gateway.chunk_bytes
        return (body[start : start + size] for start in range(0, max(1, len(body)), size))

    @staticmethod
    def _headers(fields: dict[str, str], ends: bool) -> HttpHeaders:
        given = [HeaderValue(key=name, raw_value=value.encode()) for name, value in fields.items()]
        return HttpHeaders(headers=HeaderMap(headers=given), end_of_stream=ends)

    @staticmethod
    def _message(**part: Any) -> Any:
        return ProcessingRequest(**part)


@contextlib.asynccontextmanager
async def gateway(port: int, certificate: bytes | None = None, **settings: Any) -> AsyncIterator[Gateway]:
    """Connect to a picker on this machine; `certificate`: what it must show."""
    address = f"127.0.0.1:{port}"
    if certificate is None:
        channel = grpc.aio.insecure_channel(address)
    else:
        options = [("grpc.ssl_target_name_override", "pagefleet-endpoint-picker")]
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(certificate), options)
    async with channel:
        yield Gateway(channel, **settings)


def ask(text: str = "hi", **fields: Any) -> bytes:
    """Return a chat's body."""
    return json.dumps(chat(text, **fields)).encode()
