"""Every message against the published schema, and the wire format against protobuf's own."""

from __future__ import annotations

import random

import pytest
from pagefleet_router.picker.ext_proc import (
    BodyMode,
    GatewayMessage,
    HeadEdits,
    Modes,
    Phase,
    answer_now,
    go_on,
    pass_on,
    read_message,
)
from pagefleet_router.picker.protobuf import WireError, embedded, integer, read_fields

from tests.fakes.ext_proc_schema import (
    BODY_SEND_MODES,
    BUFFERED,
    OVERWRITE,
    STREAMED,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)

FIELDS = [(b":method", b"POST"), (b"content-type", b"a/b"), (b"x", b"\xff")]
EDITS = HeadEdits([(b"a", b"1"), (b"b", b"\xff")], [b"c", b"d"])


def test_phases_and_modes_are_those_of_the_schema() -> None:
    numbers = {field.name: field.number for field in ProcessingRequest.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert {phase.name.lower(): phase.value for phase in Phase} == numbers
    assert tuple(mode.name for mode in BodyMode) == BODY_SEND_MODES


@pytest.mark.parametrize("as_text", [True, False])
def test_a_head_with_all_that_comes_with_it(as_text: bool) -> None:
    """`as_text`: old gateways give values as text."""
    headers = HeaderMap()
    for name, value in FIELDS[: 2 if as_text else 3]:
        one = HeaderValue(key=name.decode().title(), **({"value": value.decode()} if as_text else {"raw_value": value}))
        headers.headers.append(one)
    message = ProcessingRequest(
        request_headers=HttpHeaders(headers=headers, end_of_stream=True),
        protocol_config=ProtocolConfiguration(request_body_mode=BUFFERED, response_body_mode=STREAMED),
        observability_mode=False,
    )
    message.attributes["envoy.filters.http.ext_proc"].update({"a": 1.5})
    message.metadata_context.filter_metadata["another"].update({"x-gateway-destination-endpoint-subset": "no"})
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
        {"x-gateway-destination-endpoint-subset": ["1.2.3.4:5", "1.2.3.5:5"], "other": {"a": [1, None]}}
    )
    message.metadata_context.filter_metadata["envoy.lb"].update(
        {"x-gateway-destination-endpoint-served": "1.2.3.4:5", "canary": True}
    )
    found = read_message(message.SerializeToString())
    assert found.phase is Phase.REQUEST_HEADERS
    assert list(found.fields) == FIELDS[: 2 if as_text else 3]
    assert found.ends
    assert found.modes == Modes(BodyMode.BUFFERED, BodyMode.STREAMED)
    assert found.subset == ("1.2.3.4:5", "1.2.3.5:5")
    assert found.served == "1.2.3.4:5"


def test_what_is_not_said_is_not_there() -> None:
    found = read_message(ProcessingRequest(response_headers=HttpHeaders()).SerializeToString())
    assert found == GatewayMessage(Phase.RESPONSE_HEADERS, [])
    assert found.subset is None
    assert not found.served


@pytest.mark.parametrize("number", [1, 70_000])
def test_bodies_and_trailers(number: int) -> None:
    body = bytes(number)
    for kind, phase in (("request_body", Phase.REQUEST_BODY), ("response_body", Phase.RESPONSE_BODY)):
        for ends in (False, True):
            message = ProcessingRequest(**{kind: HttpBody(body=body, end_of_stream=ends)})
            assert read_message(message.SerializeToString()) == GatewayMessage(phase, (), body, ends)
        last = ProcessingRequest(**{kind: HttpBody(end_of_stream_without_message=True)})
        assert read_message(last.SerializeToString()) == GatewayMessage(phase, (), b"", True)
    for kind, phase in (("request_trailers", Phase.REQUEST_TRAILERS), ("response_trailers", Phase.RESPONSE_TRAILERS)):
        found = read_message(ProcessingRequest(**{kind: HttpTrailers()}).SerializeToString())
        assert found == GatewayMessage(phase, (), b"", True)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("destination", ["", "1.2.3.4:5,1.2.3.5:5"])
def test_an_answer_says_what_it_is_to_say_and_no_more(phase: Phase, destination: str) -> None:
    answer = ProcessingResponse.FromString(go_on(phase, EDITS, destination))
    assert answer.WhichOneof("kind") == phase.name.lower()
    expected = {"envoy.lb": {"x-gateway-destination-endpoint": destination}} if destination else {}
    assert {key: dict(value) for key, value in answer.dynamic_metadata.items()} == expected
    part = getattr(answer, phase.name.lower())
    if phase in (Phase.REQUEST_TRAILERS, Phase.RESPONSE_TRAILERS):
        assert not part.HasField("header_mutation")
        return
    mutation = part.response.header_mutation
    assert [(one.header.key, one.header.raw_value) for one in mutation.set_headers] == [("a", b"1"), ("b", b"\xff")]
    assert all(one.append_action == OVERWRITE for one in mutation.set_headers)
    assert list(mutation.remove_headers) == ["c", "d"]
    assert part.response.clear_route_cache is bool(destination)
    assert not part.response.HasField("body_mutation")
    plain = ProcessingResponse.FromString(go_on(phase))
    assert not getattr(plain, phase.name.lower()).response.HasField("header_mutation")


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("body", [b"", b"x" * 61_440])
def test_a_body_is_passed_on(body: bytes, ends: bool) -> None:
    answer = ProcessingResponse.FromString(pass_on(Phase.RESPONSE_BODY, body, ends))
    streamed = answer.response_body.response.body_mutation.streamed_response
    assert answer.response_body.response.body_mutation.WhichOneof("kind") == "streamed_response"
    assert (streamed.body, streamed.end_of_stream) == (body, ends)


def test_an_answer_in_an_engines_place() -> None:
    answer = ProcessingResponse.FromString(answer_now(429, [(b"retry-after", b"2")], b"{}", "pagefleet_queue_full"))
    said = answer.immediate_response
    assert (said.status.code, said.body, said.details) == (429, b"{}", "pagefleet_queue_full")
    assert [(one.header.key, one.header.raw_value) for one in said.headers.set_headers] == [("retry-after", b"2")]


def test_numbers_of_every_length() -> None:
    for bits in range(64):
        for value in (2**bits, 2**bits - 1, 2**63 + 2**bits):
            assert list(read_fields(integer(2**28, value) + embedded(1, b""))) == [
                *([(2**28, value)] if value else []),
                (1, b""),
            ]


def test_any_bytes_are_read_or_refused() -> None:
    rng = random.Random(0)
    message = ProcessingRequest(request_headers=HttpHeaders(headers=HeaderMap(headers=[HeaderValue(key="a")])))
    message.metadata_context.filter_metadata["envoy.lb"].update({"a": [1.0, "b", {"c": None}]})
    good = message.SerializeToString()
    num_refused = 0
    for _ in range(5000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            found = read_message(bytes(data[: rng.randrange(len(data) + 1)]))
            assert found.served == ""
            assert found.subset is None or isinstance(found.subset, tuple)
        except WireError:
            num_refused += 1
    assert 0 < num_refused < 5000
