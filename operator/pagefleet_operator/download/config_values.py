"""Typed access to a model's configuration: a wrong value becomes one line that names file, field and remedy."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from pagefleet_operator.download.errors import BadModel

_MOST = 2**31 - 1


class ConfigValues:
    """One JSON object. A field that is null counts as absent, unless it is about a default."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        """`source` names the object in errors."""
        self._values = values
        self.source = source

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigValues:
        """The same with these values for fields that are not there at all; one that is null stays so."""
        return ConfigValues({**defaults, **self._values}, self.source)

    def present(self, name: str) -> bool:
        """Whether the field has a value."""
        return self._values.get(name) is not None

    def count(self, name: str, default: int | None = None, *, low: int = 1, high: int = _MOST) -> int:
        """An integer from `low` to `high`; an error when absent without a default."""
        value = self._get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(name, "a positive number")
        return float(value)

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

    def choices(self, name: str, length: int, known: Sequence[str]) -> list[str] | None:
        """A list of so many of the known words; None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or any(word not in known for word in value):
            raise self._wrong(name, f"a list of {length} of {', '.join(known)}")
        return value

    def section(self, name: str, inherited: Sequence[str] = ()) -> ConfigValues:
        """An object inside, empty when absent. Where it lacks one of `inherited`, it has it from outside."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        outer = {field: self._values[field] for field in inherited if field in self._values}
        return ConfigValues({**outer, **value}, f"{self.source}: {name}")

    def sections(self, name: str) -> list[ConfigValues]:
        """The objects in an object inside."""
        inner = self.section(name)
        return [inner.section(field) for field, value in inner._values.items() if isinstance(value, dict)]

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def _wrong(self, name: str, expected: str) -> BadModel:
        said = f"is {reprlib.repr(self._values[name])}" if name in self._values else "is missing"
        return BadModel(f"{self.source}: {name} {said}; it must be {expected}: repair the file")
