"""Strict JSON for request bodies, and typed access to the fields of an object, with OpenAI's messages.

Refused: anything that RFC 8259 does not know (NaN, Infinity, a byte order mark, text after the value), numbers that no
double holds, invalid UTF-8, lone surrogates, and nesting over MAX_DEPTH. Of a key given twice the last one counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_DEPTH = 64
MAX_FIELDS = 1024
MAX_CONTAINERS = 65_536
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_JSON_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


class BodyError(ValueError):
    """A request body is not acceptable: HTTP 400.

    Attributes:
        message: for the client, naming the field and what is allowed.
        param: the field, e.g. `messages[2].content`; None when the body as a whole is wrong.
        code: OpenAI's short reason, e.g. `integer_above_max_value`.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def decode_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises:
        BodyError: the body is empty, not strict JSON, nested too deeply, not an object, or has too many fields.
    """
    if not body:
        raise BodyError("The request body is empty: send a JSON object.")
    _check_nesting(body)
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise BodyError("The request body is not valid UTF-8.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyError("The request body is not valid JSON.") from error
    if not isinstance(value, dict):
        raise BodyError(f"The request body must be a JSON object, but got {json_name(value)} instead.")
    if len(value) > MAX_FIELDS:
        raise BodyError(f"The request body has {len(value)} fields; at most {MAX_FIELDS} are allowed.")
    return value


def _check_nesting(body: bytes) -> None:
    """Refuse text that nests too deeply or holds too many arrays and objects.

    Strings are cut out and one level of empty brackets is removed at a time, all in C: a recursive parser is never
    shown a body that could exhaust its stack. Text that is not JSON may pass; the parser refuses it.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_BRACKETS)
    brackets = b"".join(bare.split(b'"')[::2]).translate(_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise BodyError(f"The request body is not valid JSON, or has more than {MAX_CONTAINERS} arrays and objects.")
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise BodyError(f"The request body is not valid JSON, or nested deeper than {MAX_DEPTH} levels.")


def json_name(value: object) -> str:
    """Name a decoded value's JSON type with its article."""
    return _JSON_NAMES.get(type(value), "a value")


def wrong_type(param: str, expected: str, value: object) -> BodyError:
    """Build the error of a field whose JSON type is wrong."""
    message = f"Invalid type for '{param}': expected {expected}, but got {json_name(value)} instead."
    return BodyError(message, param, "invalid_type")


def shown(value: object) -> str:
    """Return a value for a message: printable ASCII, at most 40 characters."""
    text = ascii(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else text[:36] + " ..."


class Fields:
    """The fields of one JSON object: each is read by type first and range second, and null means absent.

    `ignored` is what nobody asked for. `prefix` is put before field names in errors, e.g. `stream_options.`.
    """

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix
        self._known: set[str] = set()

    def raw(self, name: str) -> Any:
        """Return the field as decoded, or None."""
        self._known.add(name)
        return self._body.get(name)

    def path(self, name: str) -> str:
        """Return the field's name as errors give it."""
        return self._prefix + name

    def missing(self, name: str) -> BodyError:
        """Build the error of a field that must be there."""
        path = self.path(name)
        if name in self._body:
            return wrong_type(path, "a value", None)
        return BodyError(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")

    def ignored(self) -> list[str]:
        """Return the names of the fields that were never read, without null ones."""
        return [name for name, value in self._body.items() if name not in self._known and value is not None]

    def boolean(self, name: str) -> bool | None:
        """Read true or false."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise wrong_type(self.path(name), "a boolean", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Read an integer of at least `low` and at most `high`."""
        value = self.raw(name)
        return None if value is None else checked_integer(value, self.path(name), low, high)

    def number(self, name: str, low: float, high: float, open_low: bool = False) -> float | None:
        """Read a number in [low, high], or (low, high] with `open_low`."""
        value = self.raw(name)
        return None if value is None else checked_number(value, self.path(name), low, high, open_low)

    def string(self, name: str, max_chars: int, min_chars: int = 0) -> str | None:
        """Read a string of a bounded length."""
        value = self.raw(name)
        return None if value is None else checked_string(value, self.path(name), max_chars, min_chars)

    def array(self, name: str, max_items: int, min_items: int = 0) -> list[Any] | None:
        """Read an array of a bounded length; its items are not looked at."""
        value = self.raw(name)
        if value is None:
            return None
        path = self.path(name)
        if not isinstance(value, list):
            raise wrong_type(path, "an array", value)
        if len(value) < min_items:
            raise BodyError(f"Invalid '{path}': empty array. Expected at least {min_items} item.", path, "empty_array")
        if len(value) > max_items:
            limits = f"Expected at most {max_items} items, but got {len(value)} instead."
            raise BodyError(f"Invalid '{path}': array too long. {limits}", path, "array_above_max_length")
        return value

    def integers(self, name: str, max_items: int, low: int, high: int) -> tuple[int, ...] | None:
        """Read an array of integers in a range."""
        value = self.array(name, max_items)
        if value is None:
            return None
        return tuple(checked_integer(item, f"{self.path(name)}[{i}]", low, high) for i, item in enumerate(value))

    def strings(self, name: str, max_items: int, max_chars: int) -> tuple[str, ...] | None:
        """Read an array of non-empty strings."""
        value = self.array(name, max_items)
        if value is None:
            return None
        return tuple(checked_string(item, f"{self.path(name)}[{i}]", max_chars, 1) for i, item in enumerate(value))

    def object(self, name: str) -> dict[str, Any] | None:
        """Read an object; its fields are not looked at."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise wrong_type(self.path(name), "an object", value)
        return value


def checked_integer(value: object, path: str, low: int, high: int) -> int:
    """Return `value` as an integer of at least `low` and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(path, "an integer", value)
    if value < low:
        raise _out_of_range(path, "integer below minimum value", f">= {low}", value)
    if value > high:
        raise _out_of_range(path, "integer above maximum value", f"<= {high}", value)
    return value


def checked_number(value: object, path: str, low: float, high: float, open_low: bool = False) -> float:
    """Return `value` as a finite number in [low, high], or (low, high] with `open_low`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(path, "a number", value)
    if value < low or (open_low and value == low):
        raise _out_of_range(path, "decimal below minimum value", f"{'>' if open_low else '>='} {low:g}", value)
    if value > high or not math.isfinite(value):
        raise _out_of_range(path, "decimal above maximum value", f"<= {high:g}", value)
    return float(value)


def checked_string(value: object, path: str, max_chars: int, min_chars: int = 0) -> str:
    """Return `value` as a string of a bounded length."""
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    if len(value) < min_chars:
        message = f"Invalid '{path}': empty string. Expected at least {min_chars} character."
        raise BodyError(message, path, "empty_string")
    if len(value) > max_chars:
        limits = f"Expected at most {max_chars} characters, but got {len(value)} instead."
        raise BodyError(f"Invalid '{path}': string too long. {limits}", path, "string_above_max_length")
    return value


def _out_of_range(path: str, problem: str, allowed: str, value: object) -> BodyError:
    kind, side, _ = problem.split(" ", 2)
    message = f"Invalid '{path}': {problem}. Expected a value {allowed}, but got {shown(value)} instead."
    return BodyError(message, path, f"{kind}_{side}_{'min' if side == 'below' else 'max'}_value")
