"""Messages of Envoy's external processing (envoy.service.ext_proc.v3), with what the endpoint picker protocol puts in.

Field numbers are those of the published schema; a test holds every message against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from pagefleet_router.picker.protobuf import WireError, embedded, integer, read_fields, read_texts
from pagefleet_router.wire.http_names import MAX_HEAD_BYTES, MAX_HEADERS

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
"""Header and metadata that name the chosen endpoints, IP:PORT with commas between them."""
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
_DESTINATION_NAMESPACE = "envoy.lb"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"

Fields = Sequence[tuple[bytes, bytes]]


class Phase(IntEnum):
    """What a gateway tells, by the number of its field."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7


_ANSWERS = {
    Phase.REQUEST_HEADERS: 1,
    Phase.RESPONSE_HEADERS: 2,
    Phase.REQUEST_BODY: 3,
    Phase.RESPONSE_BODY: 4,
    Phase.REQUEST_TRAILERS: 5,
    Phase.RESPONSE_TRAILERS: 6,
}
"""Numbers of the fields of an answer."""
_IMMEDIATE, _METADATA = 7, 8
_MAX_ENCODED_BYTES = MAX_HEAD_BYTES + 32 * MAX_HEADERS
"""Of a head as a message, of which lengths take more than colons and ends of lines."""
_MAX_METADATA_BYTES = 256 * 1024
"""Room for a hint that names some ten thousand endpoints."""


class BodyMode(IntEnum):
    """How a gateway sends bodies."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


@dataclass(frozen=True, slots=True)
class Modes:
    """How the bodies of one request, and of its answer, come."""

    request: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    answer: BodyMode = BodyMode.FULL_DUPLEX_STREAMED


@dataclass(frozen=True, slots=True)
class GatewayMessage:
    """What a gateway says at one point of a request's way."""

    phase: Phase
    fields: Fields = ()
    """Of a head: names in lower case, those with a colon first."""
    body: bytes = b""
    ends: bool = False
    """Whether nothing of the request, or of its answer, follows."""
    metadata: bytes = b""
    modes: Modes | None = None
    """Of the first message; None: the gateway does not say it."""
    fits: bool = True
    """Whether a head is within the router's limits; else `fields` are not all of it."""

    @property
    def subset(self) -> tuple[str, ...] | None:
        """The endpoints among which to choose, as IP:PORT or IP; None: among all."""
        return _metadata(self.metadata, _SUBSET_NAMESPACE, SUBSET)

    @property
    def served(self) -> str:
        """The endpoint that answers; empty: the gateway does not say it."""
        found = _metadata(self.metadata, _DESTINATION_NAMESPACE, SERVED)
        return found[0] if found else ""


def read_message(data: bytes) -> GatewayMessage:
    """Read a ProcessingRequest.

    Raises:
        WireError: it is none, of a kind that is not known here, or its metadata is too long.
    """
    phase, content, metadata, told = None, b"", b"", None
    for number, value in read_fields(data):
        if not isinstance(value, bytes):
            continue
        if number in _ANSWERS:
            phase, content = Phase(number), value
        elif number == 8:
            metadata = value
        elif number == 11:
            told = value
    modes = None if told is None else _read_modes(told)
    if len(metadata) > _MAX_METADATA_BYTES:
        raise WireError(f"its metadata is over {_MAX_METADATA_BYTES} bytes")
    if phase is None:
        raise WireError("there is neither a head nor a body nor a trailer in it")
    if phase in (Phase.REQUEST_BODY, Phase.RESPONSE_BODY):
        body, ends = _read_body(content)
        return GatewayMessage(phase, (), body, ends, metadata, modes)
    if phase in (Phase.REQUEST_TRAILERS, Phase.RESPONSE_TRAILERS):
        return GatewayMessage(phase, (), b"", True, metadata, modes)
    fields, ends, fits = _read_head(content)
    return GatewayMessage(phase, fields, b"", ends, metadata, modes, fits)


def _read_modes(content: bytes) -> Modes:
    found = {number: value for number, value in read_fields(content) if isinstance(value, int)}
    try:
        return Modes(BodyMode(found.get(1, 0)), BodyMode(found.get(2, 0)))
    except ValueError:
        raise WireError("the gateway sends bodies in a way that is not known here") from None


def _read_head(content: bytes) -> tuple[Fields, bool, bool]:
    """Return fields, whether nothing follows, and whether that is all of it: what is over the limits is not read."""
    fields: list[tuple[bytes, bytes]] = []
    num_headers, num_bytes, ends = 0, 0, False
    if len(content) > _MAX_ENCODED_BYTES:
        return fields, ends, False
    for number, value in read_fields(content):
        if number == 3:
            ends = bool(value)
        if number != 1 or not isinstance(value, bytes):
            continue
        for one in read_texts(value, 1):
            name, text = _read_field(one)
            num_headers += not name.startswith(b":")
            num_bytes += len(name) + len(text) + 4  # as on a line of its own
            if num_headers > MAX_HEADERS or num_bytes > MAX_HEAD_BYTES:
                return fields, ends, False
            fields.append((name, text))
    return fields, ends, True


def _read_field(content: bytes) -> tuple[bytes, bytes]:
    name = value = b""
    for number, text in read_fields(content):
        if number == 1 and isinstance(text, bytes):
            name = text.lower()
        elif number in (2, 3) and isinstance(text, bytes):
            value = text or value
    return name, value


def _read_body(content: bytes) -> tuple[bytes, bool]:
    body, ends = b"", False
    for number, value in read_fields(content):
        if number == 1 and isinstance(value, bytes):
            body = value
        elif number in (2, 3) and value:  # ...without_message: it ends without another byte
            ends = True
    return body, ends


def _metadata(content: bytes, namespace: str, key: str) -> tuple[str, ...] | None:
    """Return the texts that stand under a key: one with commas in it, or a list of them; None where there is no key."""
    found: tuple[str, ...] | None = None
    for entry in read_texts(content, 1):
        name, struct = _entry(entry)
        if name != namespace.encode():
            continue
        for inner in read_texts(struct, 1):
            name, value = _entry(inner)
            if name == key.encode():
                texts = [text for one in _texts(value) for text in one.decode("utf-8", "replace").split(",")]
                found = tuple(text.strip() for text in texts if text.strip())
    return found


def _entry(content: bytes) -> tuple[bytes, bytes]:
    """Return key and value of a map's entry."""
    parts = {number: value for number, value in read_fields(content) if isinstance(value, bytes)}
    return parts.get(1, b""), parts.get(2, b"")


def _texts(value: bytes) -> Iterator[bytes]:
    """Yield the texts of a google.protobuf.Value that is a text or a list of texts."""
    for number, content in read_fields(value):
        if number == 3 and isinstance(content, bytes):
            yield content
        elif number == 6 and isinstance(content, bytes):
            for one in read_texts(content, 1):
                yield from read_texts(one, 3)


@dataclass(frozen=True, slots=True)
class HeadEdits:
    """What becomes of a head: names are taken out, then fields are set in the place of any of their name."""

    fields: Fields = ()
    remove: Sequence[bytes] = ()

    def encode(self) -> bytes:
        """Return it as a HeaderMutation."""
        parts = []
        for name, value in self.fields:
            field = embedded(1, name) + embedded(3, value)
            parts.append(embedded(1, embedded(1, field) + integer(3, _OVERWRITE)))
        return b"".join((*parts, *(embedded(2, name) for name in self.remove)))


_OVERWRITE = 2
NO_EDITS = HeadEdits()


def go_on(phase: Phase, edits: HeadEdits = NO_EDITS, destination: str = "") -> bytes:
    """Return the answer that lets a head, a trailer, or a body as it came, go on.

    Args:
        phase: of what is answered.
        edits: of the head.
        destination: where the request goes, IP:PORT[,IP:PORT...]; empty: nothing is said of that.
    """
    mutation = edits.encode()
    if phase in (Phase.REQUEST_TRAILERS, Phase.RESPONSE_TRAILERS):
        content = b""
    else:
        common = embedded(2, mutation) if mutation else b""
        content = embedded(1, common + integer(5, bool(destination)))  # a route may have been chosen by the old head
    answer = embedded(_ANSWERS[phase], content)
    return answer + embedded(_METADATA, _destination(destination)) if destination else answer


def pass_on(phase: Phase, body: bytes, ends: bool) -> bytes:
    """Return the answer that sends bytes on which the gateway, in full duplex, no longer has."""
    streamed = (embedded(1, body) if body else b"") + integer(2, ends)
    return embedded(_ANSWERS[phase], embedded(1, embedded(3, embedded(3, streamed))))


def answer_now(status: int, fields: Fields, body: bytes, details: str) -> bytes:
    """Return the answer that ends the request with one of our own; `details` stands in the gateway's log."""
    content = embedded(1, integer(1, status)) + embedded(2, HeadEdits(fields).encode())
    content += (embedded(3, body) if body else b"") + embedded(5, details.encode())
    return embedded(_IMMEDIATE, content)


def _destination(endpoints: str) -> bytes:
    """Return the Struct {"envoy.lb": {DESTINATION: endpoints}}."""
    inner = _struct_entry(DESTINATION, embedded(3, endpoints.encode()))
    return _struct_entry(_DESTINATION_NAMESPACE, embedded(5, inner))


def _struct_entry(key: str, value: bytes) -> bytes:
    return embedded(1, embedded(1, key.encode()) + embedded(2, value))
