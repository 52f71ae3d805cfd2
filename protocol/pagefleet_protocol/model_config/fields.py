"""Typed access to a Hugging Face configuration: a wrong value becomes one line that names file, field and remedy."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagefleet_protocol.printable import escape_control

_MOST_BYTES = 256 << 20
_LEAST, _MOST = 1e-30, 1e30
"""Numbers beyond these are damage, and would not survive a product."""


class ModelConfigError(Exception):
    """A model's file cannot be read, or says what cannot be or is not run; the message is one line with the remedy,
    whatever stands in the file."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_control(message))


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        FileNotFoundError: there is none.
        ModelConfigError: it holds something else.
    """
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= _MOST_BYTES else b""
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelConfigError(f"{path} cannot be read ({error.strerror}): change its permissions") from None
    if size > _MOST_BYTES:
        raise ModelConfigError(f"{path} has {size} bytes, over {_MOST_BYTES}: repair the file")
    return json_object(data, str(path))


def json_object(data: bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object; `source` names it in errors.

    Raises:
        ModelConfigError: it is none, or nested so deeply that nothing could read it.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise ModelConfigError(f"{source} is nested too deeply to be a model's file: repair the file") from None
    except ValueError as error:
        said = " ".join(str(error).split())[:160]
        raise ModelConfigError(f"{source} cannot be read as JSON ({said}): download the file again") from None
    if not isinstance(value, dict):
        raise ModelConfigError(f"{source} does not hold a JSON object: download the file again")
    return value


class ConfigFields:
    """One JSON object. A field that is null counts as absent, as it does for Hugging Face."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        """`source` names the object in errors, e.g. its file."""
        self._values = values
        self.source = source

    def present(self, name: str) -> bool:
        """Whether the field has a value."""
        return self._values.get(name) is not None

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigFields:
        """The same with these values for fields that are not there at all; one that is null stays so."""
        return ConfigFields({**defaults, **self._values}, self.source)

    def spelled(self, names: Mapping[str, str]) -> ConfigFields:
        """The same with the fields of these names under the names that they stand for, where those have no value."""
        ours = {name: self._values[theirs] for theirs, name in names.items() if self.present(theirs)}
        return ConfigFields(
            {**self._values, **{name: v for name, v in ours.items() if not self.present(name)}}, self.source
        )

    def count(self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1) -> int:
        """An integer from `low` to `high`; an error when absent without a default."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(name, default)
        if not _is_positive(value):
            raise self._wrong(name, "a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A positive number, or None."""
        return self.number(name) if self.present(name) else None

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of so many positive numbers."""
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) != length or not all(_is_positive(value) for value in values):
            raise self._wrong(name, f"a list of {length} positive numbers")
        return tuple(float(value) for value in values)

    def fractions(self, name: str, length: int) -> tuple[float, ...]:
        """A list of so many numbers from 0 to under 1."""
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) != length or not all(_is_fraction(value) for value in values):
            raise self._wrong(name, f"a list of {length} numbers from 0 to under 1")
        return tuple(float(value) for value in values)

    def one_count(self, name: str, length: int) -> int:
        """A positive integer, or a list of so many that are equal."""
        value = self._get(name, None)
        if isinstance(value, list) and len(value) == length and value == value[:1] * length:
            return ConfigFields({name: value[0]}, self.source).count(name)
        if isinstance(value, list):
            raise self._wrong(name, f"one positive integer, or {length} times the same")
        return self.count(name)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; none when absent."""
        value = self._get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise self._wrong(name, "a token id or a list of token ids")
        return tuple(ids)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers from 0 on; none when absent."""
        values = self._get(name, [])
        if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
            raise self._wrong(name, "a list of integers from 0 on")
        return tuple(values)

    def must_be_unset(self, name: str) -> None:
        """An error when the field has a value other than false: it asks for what we do not run."""
        value = self._values.get(name)
        if value is not None and value is not False:
            said = f"{name} is {reprlib.repr(value)}; pagefleet runs this kind of model without it only"
            raise ModelConfigError(f"{self.source}: {said}")

    def choices(self, name: str, length: int, known: Sequence[str]) -> list[str] | None:
        """A list of so many of the known words; None when absent."""
        words = self._values.get(name)
        if words is None:
            return None
        if not isinstance(words, list) or len(words) != length or any(word not in known for word in words):
            raise self._wrong(name, f"a list of {length} of {', '.join(known)}")
        return words

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; none when absent."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self._wrong(name, "a list of strings")
        return tuple(value)

    def nested_texts(self, name: str) -> tuple[str, ...]:
        """A list of strings and of lists of them, as one; none when absent."""
        value = self._get(name, [])
        each = (
            [text for one in value for text in (one if isinstance(one, list) else [one])]
            if isinstance(value, list)
            else [value]
        )
        if not all(isinstance(text, str) for text in each):
            raise self._wrong(name, "a list of strings, or of lists of them")
        return tuple(each)

    def joined_texts(self, name: str) -> tuple[str, ...]:
        """As nested_texts, or one string with commas between them."""
        value = self._get(name, [])
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return self.nested_texts(name)

    def pair(self, name: str) -> tuple[int, int]:
        """Two positive integers."""
        value = self._get(name, [])
        if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
            raise self._wrong(name, "a list of two positive integers")
        return value[0], value[1]

    def section(self, name: str, inherited: Sequence[str] = ()) -> ConfigFields:
        """An object inside, empty when absent. Where it lacks one of `inherited`, it has it from outside."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        outer = {field: self._values[field] for field in inherited if field in self._values}
        return ConfigFields({**outer, **value}, f"{self.source}: {name}")

    def objects(self, name: str) -> list[ConfigFields]:
        """A list of objects, or one alone; none when absent."""
        value = self._get(name, [])
        each = value if isinstance(value, list) else [value]
        if not all(isinstance(one, dict) for one in each):
            raise self._wrong(name, "a list of objects")
        return [ConfigFields(one, f"{self.source}: {name}") for one in each]

    def names(self) -> list[str]:
        """Of all fields, with a value or without."""
        return list(self._values)

    def section_names(self) -> list[str]:
        """Fields whose values are objects."""
        return [name for name, value in self._values.items() if isinstance(value, dict)]

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def _wrong(self, name: str, expected: str) -> ModelConfigError:
        said = f"is {reprlib.repr(self._values[name])}" if name in self._values else "is missing"
        return ModelConfigError(f"{self.source}: {name} {said}; it must be {expected}: repair the file")


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _LEAST <= value <= _MOST
