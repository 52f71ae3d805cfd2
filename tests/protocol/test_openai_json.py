"""Strict decoding, and fields read by type first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.openai_json import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    Fields,
    InvalidRequest,
    checked_number,
    decode_object,
    shown,
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def without_surrogates(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def outcome(call: Callable[[], Any]) -> tuple[Any, InvalidRequest | None]:
    try:
        return call(), None
    except InvalidRequest as error:
        return None, error


def refusal(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode_object(body)
    return caught.value


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=6))
def test_every_json_object_is_read_as_it_is(value: dict[str, Any]) -> None:
    if not without_surrogates(value):
        return
    assert decode_object(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    value, error = outcome(lambda: decode_object(body))
    assert error.param is None if error else value == json.loads(body)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("extra", [-1, 0, 1, 50_000])
def test_depth(opening: bytes, extra: int) -> None:
    inner = MAX_DEPTH - 1 + extra
    closing = b"]" if opening == b"[" else b"}"
    body = b'{"x":' + opening * inner + b"1" + closing * inner + b"}"
    if extra <= 0:
        assert "x" in decode_object(body)
    else:
        assert "deeper" in refusal(body).message


def test_brackets_in_strings_are_no_depth() -> None:
    text = '[{"\\' * 1000 + '"'
    assert decode_object(json.dumps({"a": text, "b": [text]}).encode()) == {"a": text, "b": [text]}


def test_hostile_bodies_are_refused_quickly() -> None:
    bodies = [b"[" * 8_000_000, (b"[" * 64 + b"]" * 64 + b",") * 60_000, b"{" * 8_000_000, b"[]" * 4_000_000]
    started = time.process_time()
    for body in bodies:
        refusal(body)
    assert time.process_time() - started < 5
    assert "arrays and objects" in refusal(b'{"a":[' + b"[]," * (MAX_CONTAINERS + 1) + b"1]}").message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "empty"),
        (b"[1]", "an array"),
        (b"null", "null"),
        (b'"x"', "a string"),
        (b"5", "an integer"),
        (b'{"a":NaN}', "not valid JSON"),
        (b'{"a":-Infinity}', "not valid JSON"),
        (b'{"a":1e999}', "not valid JSON"),
        (b'{"a":1' + b"0" * 5000 + b"}", "not valid JSON"),
        (b'{"a":01}', "not valid JSON"),
        (b'{"a":1}}', "not valid JSON"),
        (b"{'a':1}", "not valid JSON"),
        (b'{"a":"\\ud800"}', "not valid JSON"),
        (b'{"a":"\xff"}', "not valid UTF-8"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(1025)) + b"}", "1025 fields"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_refused_is_named(body: bytes, said: str) -> None:
    assert said in refusal(body).message


@pytest.mark.parametrize(
    ("item", "count", "said"),
    [
        (b"1.2345678901234567890123e-300", 2_100, "decimals"),
        (b'"k%d":1', 140_000, "fields"),
        (b'""', 270_000, "strings"),
        (b"1", 1_300_000, "values"),
        (b"[1]", 70_000, "arrays and objects"),
    ],
)
def test_what_takes_long_to_decode_is_counted_before(item: bytes, count: int, said: str) -> None:
    """8 MB of such decimals held the interpreter for four seconds, of keys for 0.6 s."""
    items = b",".join(item % i if b"%" in item else item for i in range(count))
    whole = b'{"a":{%b}}' % items if b"%" in item else b'{"a":[%b]}' % items
    assert said in refusal(whole).message
    half = items[: len(items) // 3].rpartition(b",")[0]
    assert decode_object(b'{"a":{%b}}' % half if b"%" in item else b'{"a":[%b]}' % half)


def test_text_may_hold_any_number_of_such_signs() -> None:
    text = '.,:"[{\\' * 200_000
    assert decode_object(msgspec.json.encode({"prompt": text})) == {"prompt": text}


def test_the_messages_are_openais() -> None:
    fields = Fields({"n": 130, "max_tokens": "5", "temperature": -1, "stop": [], "user": "abc"})
    with pytest.raises(InvalidRequest) as above:
        fields.integer("n", 1, 128)
    assert above.value.message == (
        "Invalid 'n': integer above maximum value. Expected a value <= 128, but got 130 instead."
    )
    assert (above.value.param, above.value.code) == ("n", "integer_above_max_value")
    with pytest.raises(InvalidRequest) as kind:
        fields.integer("max_tokens", 1, 5)
    assert kind.value.message == "Invalid type for 'max_tokens': expected an integer, but got a string instead."
    with pytest.raises(InvalidRequest) as below:
        checked_number(fields.raw("temperature"), "temperature", 0.0, 2.0)
    assert below.value.message == (
        "Invalid 'temperature': decimal below minimum value. Expected a value >= 0, but got -1 instead."
    )
    with pytest.raises(InvalidRequest) as empty:
        fields.array("stop", 4, min_items=1)
    assert empty.value.code == "empty_array"
    with pytest.raises(InvalidRequest) as long:
        fields.string("user", 2)
    assert long.value.code == "string_above_max_length"
    assert fields.missing("seed").code == "missing_required_parameter"


READS: dict[str, Any] = {
    "boolean": lambda fields: fields.boolean("x"),
    "integer": lambda fields: fields.integer("x", -5, 5),
    "number": lambda fields: (
        None if fields.raw("x") is None else checked_number(fields.raw("x"), fields.path("x"), -5, 5)
    ),
    "string": lambda fields: fields.string("x", 5),
    "array": lambda fields: fields.array("x", 5),
    "integers": lambda fields: fields.integers("x", 5, -5, 5),
    "strings": lambda fields: fields.strings("x", 5, 5),
    "object": lambda fields: fields.object("x"),
}


@pytest.mark.parametrize("read", READS)
@given(value=JSON_VALUES)
def test_a_read_gives_its_type_or_a_refusal_that_names_the_field(read: str, value: Any) -> None:
    fields = Fields({"x": value}, prefix="outer.")
    result, error = outcome(lambda: READS[read](fields))
    if error is None:
        assert (result is None) == (value is None)
    else:
        assert (error.param or "").startswith("outer.x")
        assert len(error.message) < 300
    assert fields.ignored() == []


def test_a_boolean_is_no_number() -> None:
    for read in ("integer", "number"):
        with pytest.raises(InvalidRequest) as caught:
            READS[read](Fields({"x": True}))
        assert caught.value.code == "invalid_type"


def test_fields_nobody_read_are_reported() -> None:
    fields = Fields({"a": 1, "b": 2, "c": None, "d": {"e": 1}})
    fields.integer("a", 0, 5)
    assert fields.ignored() == ["b", "d"]


@given(st.text() | st.integers())
def test_values_in_messages_are_short_printable_ascii(value: object) -> None:
    text = shown(value)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= 40
