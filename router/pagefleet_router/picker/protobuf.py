"""The wire format of Protocol Buffers, as far as a few small messages need it: no generated code, nothing to install.

A message is a row of fields, each with a number and either an integer or bytes, which may be a text or another message.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_SHIFT = 63
_MAX_FIELDS = 16 * 1024
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


class WireError(ValueError):
    """Bytes are no message."""


def read_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field in the order in which they stand; numbers of a fixed size as their bytes.

    Raises:
        WireError: it is no message, has too many fields, or groups, which nobody makes any more.
    """
    at, end, num_fields = 0, len(message), 0
    while at < end:
        num_fields += 1
        if num_fields > _MAX_FIELDS:
            raise WireError(f"there are over {_MAX_FIELDS} fields in a message")
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind in _FIXED_BYTES:
            size = _FIXED_BYTES[kind]
        else:
            raise WireError(f"there is a field of the unknown kind {kind}")
        if at + size > end:
            raise WireError("a field is longer than its message")
        yield key >> 3, message[at : at + size]
        at += size


def read_texts(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the bytes of every field of one number: texts, or messages.

    Raises:
        WireError: see `read_fields`.
    """
    return (value for found, value in read_fields(message) if found == number and isinstance(value, bytes))


def embedded(number: int, content: bytes) -> bytes:
    """Return a field that holds a text or a message; an empty one is there, too."""
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def integer(number: int, value: int) -> bytes:
    """Return a field that holds a number from zero on, or a truth; zero needs no field."""
    return _varint(number << 3) + _varint(value) if value else b""


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > _MAX_SHIFT:
            raise WireError("a number does not end")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
