"""The published schema of Envoy's external processing, as far as a gateway and an endpoint picker use it.

Numbers and types are those of envoy/service/ext_proc/v3/external_processor.proto, of its ProcessingMode and of
envoy/config/core/v3/base.proto; protobuf's own library makes messages of them. The package with Envoy's whole schema,
xds-protos, replaces files of opentelemetry-proto. No test in here.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

_EXT, _CORE = "envoy.service.ext_proc.v3", "envoy.config.core.v3"
BODY_SEND_MODES = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED", "GRPC")
_APPEND_ACTIONS = ("APPEND_IF_EXISTS_OR_ADD", "ADD_IF_ABSENT", "OVERWRITE_IF_EXISTS_OR_ADD", "OVERWRITE_IF_EXISTS")
_STRUCT = "google.protobuf.Struct"

# Message -> lines of: number, type, name. `*`: repeated; `|`: one of several; `<`: a map from text.
_SCHEMA = {
    f"{_CORE}.HeaderValue": "1 string key, 2 string value, 3 bytes raw_value",
    f"{_CORE}.HeaderMap": f"1 *{_CORE}.HeaderValue headers",
    f"{_CORE}.HeaderValueOption": f"1 {_CORE}.HeaderValue header, 3 action append_action",
    f"{_CORE}.Metadata": f"1 <{_STRUCT} filter_metadata",
    f"{_EXT}.HttpHeaders": f"1 {_CORE}.HeaderMap headers, 3 bool end_of_stream",
    f"{_EXT}.HttpBody": "1 bytes body, 2 bool end_of_stream, 3 bool end_of_stream_without_message",
    f"{_EXT}.HttpTrailers": f"1 {_CORE}.HeaderMap trailers",
    f"{_EXT}.ProtocolConfiguration": (
        "1 mode request_body_mode, 2 mode response_body_mode, 3 bool send_body_without_waiting_for_header_response"
    ),
    f"{_EXT}.ProcessingRequest": (
        f"2 |{_EXT}.HttpHeaders request_headers, 3 |{_EXT}.HttpHeaders response_headers, "
        f"4 |{_EXT}.HttpBody request_body, 5 |{_EXT}.HttpBody response_body, "
        f"6 |{_EXT}.HttpTrailers request_trailers, 7 |{_EXT}.HttpTrailers response_trailers, "
        f"8 {_CORE}.Metadata metadata_context, 9 <{_STRUCT} attributes, 10 bool observability_mode, "
        f"11 {_EXT}.ProtocolConfiguration protocol_config"
    ),
    f"{_EXT}.HeaderMutation": f"1 *{_CORE}.HeaderValueOption set_headers, 2 *string remove_headers",
    f"{_EXT}.StreamedBodyResponse": "1 bytes body, 2 bool end_of_stream",
    f"{_EXT}.BodyMutation": f"1 |bytes body, 2 |bool clear_body, 3 |{_EXT}.StreamedBodyResponse streamed_response",
    f"{_EXT}.CommonResponse": (
        f"1 status status, 2 {_EXT}.HeaderMutation header_mutation, 3 {_EXT}.BodyMutation body_mutation, "
        f"4 {_CORE}.HeaderMap trailers, 5 bool clear_route_cache"
    ),
    f"{_EXT}.HeadersResponse": f"1 {_EXT}.CommonResponse response",
    f"{_EXT}.BodyResponse": f"1 {_EXT}.CommonResponse response",
    f"{_EXT}.TrailersResponse": f"1 {_EXT}.HeaderMutation header_mutation",
    f"{_EXT}.HttpStatus": "1 status code",
    f"{_EXT}.ImmediateResponse": (
        f"1 {_EXT}.HttpStatus status, 2 {_EXT}.HeaderMutation headers, 3 bytes body, 5 string details"
    ),
    f"{_EXT}.ProcessingResponse": (
        f"1 |{_EXT}.HeadersResponse request_headers, 2 |{_EXT}.HeadersResponse response_headers, "
        f"3 |{_EXT}.BodyResponse request_body, 4 |{_EXT}.BodyResponse response_body, "
        f"5 |{_EXT}.TrailersResponse request_trailers, 6 |{_EXT}.TrailersResponse response_trailers, "
        f"7 |{_EXT}.ImmediateResponse immediate_response, 8 {_STRUCT} dynamic_metadata"
    ),
}
_SCALARS = {"string": 9, "bytes": 12, "bool": 8, "mode": 5, "action": 5, "status": 5}
"""Types of protobuf's descriptors; enumerations are numbers on the wire."""
_MESSAGE = 11


def _field(message: descriptor_pb2.DescriptorProto, text: str) -> None:
    number, kind, name = text.split()
    field = message.field.add(name=name, number=int(number), label=3 if kind[0] in "*<" else 1)
    if kind[0] == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="kind")
        field.oneof_index = 0
    of = kind.lstrip("*|<")
    if kind[0] == "<":
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=9)
        entry.field.add(name="value", number=2, label=1, type=_MESSAGE, type_name=f".{of}")
        field.type, field.type_name = _MESSAGE, entry.name
    elif of in _SCALARS:
        field.type = _SCALARS[of]
    else:
        field.type, field.type_name = _MESSAGE, f".{of}"


def _messages() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    for package in (_CORE, _EXT):
        file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
        file.dependency.append(struct_pb2.DESCRIPTOR.name)
        if package == _EXT:
            file.dependency.append(f"{_CORE}.proto")
        for name, fields in _SCHEMA.items():
            if name.rpartition(".")[0] == package:
                message = file.message_type.add(name=name.rpartition(".")[2])
                for text in fields.split(", "):
                    _field(message, text)
        pool.AddSerializedFile(file.SerializeToString())
    found = ((name, pool.FindMessageTypeByName(name)) for name in _SCHEMA)
    return {name.rpartition(".")[2]: message_factory.GetMessageClass(one) for name, one in found}


_MADE = _messages()
HeaderMap: Any = _MADE["HeaderMap"]
HeaderValue: Any = _MADE["HeaderValue"]
HttpBody: Any = _MADE["HttpBody"]
HttpHeaders: Any = _MADE["HttpHeaders"]
HttpTrailers: Any = _MADE["HttpTrailers"]
ProcessingRequest: Any = _MADE["ProcessingRequest"]
ProcessingResponse: Any = _MADE["ProcessingResponse"]
ProtocolConfiguration: Any = _MADE["ProtocolConfiguration"]
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX, GRPC = range(len(BODY_SEND_MODES))
OVERWRITE = _APPEND_ACTIONS.index("OVERWRITE_IF_EXISTS_OR_ADD")
