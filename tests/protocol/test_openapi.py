"""The API's description says what the readers of bodies do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from pagefleet_protocol.openai_chat import read_chat_request
from pagefleet_protocol.openai_common import REFUSED
from pagefleet_protocol.openai_json import Fields
from pagefleet_protocol.openapi import body_schema, openapi_document

DOCUMENT = json.loads(openapi_document())
SCHEMAS = DOCUMENT["components"]["schemas"]
CHAT = SCHEMAS["Body_of__v1_chat_completions"]


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(DOCUMENT)
    wanted = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert wanted
    assert wanted <= SCHEMAS.keys()


def test_fields_of_a_chat_are_there_with_types_and_bounds() -> None:
    fields = CHAT["properties"]
    assert fields["n"] == {"type": "integer", "minimum": 1, "maximum": 128}
    assert fields["temperature"]["type"] == "number"
    assert fields["stream"] == {"type": "boolean"}
    assert fields["stop"] == {"type": ["string", "array"]}
    assert CHAT["required"] == ["messages", "model"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_not_offered(name: str) -> None:
    assert name not in CHAT["properties"]


def test_each_field_that_is_offered_is_read() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "nobody_knows": 1}
    assert read_chat_request(body).ignored == ("nobody_knows",)
    assert "nobody_knows" not in CHAT["properties"]


def test_a_schema_follows_its_reader() -> None:
    def read(body: Mapping[str, Any]) -> None:
        fields = Fields(body)
        if fields.integer("count", 2, 9) is None:
            raise fields.missing("count")
        fields.raw("anything")
        fields.object("more")

    assert body_schema(read, {"count": 2}) == {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "minimum": 2, "maximum": 9},
            "anything": {},
            "more": {"type": "object"},
        },
        "required": ["count"],
    }


def test_answers_are_described_by_their_types() -> None:
    answer = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]
    assert answer["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatCompletion"}
    assert {"id", "choices", "usage"} <= SCHEMAS["ChatCompletion"]["properties"].keys()
