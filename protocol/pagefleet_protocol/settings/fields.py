"""One setting: a field of a frozen dataclass. Its type says what it takes, the text under it is its help.

    port: Port = 8000
    \"\"\"Port to listen on; 0 takes a free one.\"\"\"

A type is bool, int, float, str or Path, a Literal of words, a tuple of one of these (a list), or one of them or None.
`Annotated` adds what such a type cannot say: a unit, limits, other spellings, the name of a value in the help, JSON.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import math
import re
import sys
import types
import typing
from collections.abc import Hashable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

Takes = Literal["switch", "value", "words"]
"""What follows a flag: nothing, one word, or as many as come."""
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
"""How a boolean is written, in any case."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B?)", re.IGNORECASE)
_SIZE_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])|([KMGT])i?)")
_COUNT_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, **_SIZE_FACTORS}
"""As vLLM reads numbers of people: 32k is 32,000, and 32K is 32,768."""
_LARGE = 65535
"""What cannot be larger, such as a port, nobody abbreviates."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")
_DURATION_FACTORS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_Note = TypeVar("_Note")


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts: a size may be written 512M or 4G (powers of 1024), a duration 500ms, 30s, 5m or 1h."""

    of: Literal["bytes", "seconds"]


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    """Limits of a number; `over` leaves out the lower one itself, `hint` goes on where the limits are told."""

    low: float
    high: float = math.inf
    over: bool = False
    hint: str = ""

    def allow(self, value: float) -> bool:
        """Whether a value is inside; NaN and infinity never are."""
        is_finite = -math.inf < value < math.inf  # math.isfinite takes no integer of 309 digits
        return is_finite and self.low <= value <= self.high and not (self.over and value == self.low)

    def __str__(self) -> str:
        low, high = f"{self.low:.16g}", f"{self.high:.16g}"
        if math.isinf(self.high):
            text = f"more than {low}" if self.over else f"at least {low}"
        else:
            text = f"more than {low}, at most {high}" if self.over else f"{low} to {high}"
        return text + self.hint


@dataclasses.dataclass(frozen=True, slots=True)
class Spellings:
    """Other words for a setting's choices, each with the choice that it means."""

    means: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """What the help calls a value."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """A text of words with commas between them, which may also be given as a list."""


@dataclasses.dataclass(frozen=True, slots=True)
class JsonObject:
    """A text that is a JSON object, which may also be given as a mapping; it is kept in one spelling."""


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """A name or an IP address, which sockets may be asked to listen on."""

    def allow(self, value: str) -> bool:
        """Whether it can be looked up; other text ends a look-up with an error of no operating system."""
        try:
            return value.isprintable() and bool(value.encode("idna"))
        except UnicodeError:
            return False

    def __str__(self) -> str:
        return "a host name or an IP address"


HostName = Annotated[str, Address(), Shown("HOST")]
Bytes = Annotated[int, Unit("bytes")]
Seconds = Annotated[float, Unit("seconds")]
Count = Annotated[int, Between(1)]
Port = Annotated[int, Between(0, 65535)]
Share = Annotated[float, Between(0, 1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One field of a dataclass."""

    name: str
    group: type[Any]
    kind: type[Any]
    """bool, int, float, str or Path: of each entry, where it is a list."""
    choices: tuple[str, ...]
    is_list: bool
    optional: bool
    default: Any
    """`dataclasses.MISSING` for one that must be given."""
    help: str
    notes: tuple[Any, ...]
    """What `Annotated` adds."""

    @property
    def flag(self) -> str:
        """The name on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def takes(self) -> Takes:
        """What follows the flag."""
        if self.kind is bool and not self.is_list:
            return "switch"
        return "words" if self.is_list or self._note(Words) is not None else "value"

    @property
    def value_name(self) -> str:
        """What the help calls a value."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        shown = self._note(Shown)
        unit = self._note(Unit)
        names = {bool: "BOOL", int: "N", float: "X", str: "TEXT", Path: "PATH"}
        if self._note(JsonObject) is not None:
            return "JSON"
        return shown.name if shown else unit.of.upper() if unit else names[self.kind]

    def parse(self, value: object, called: str) -> Any:
        """Return a value for the field from text, or from what YAML makes of it.

        Args:
            value: text, or a YAML value.
            called: what the setting is called where the value was found, e.g. `--port`.

        Raises:
            ValueError: the setting cannot have this value; the message says what it can.
        """
        if value is None or (self.optional and isinstance(value, str) and value.lower() in ("none", "null")):
            if self.optional:
                return None
            raise ValueError(f"{called} has no value: give {self.wanted()}")
        if self.is_list:
            entries = value if isinstance(value, list | tuple) else [value]
            return tuple(self._parse_one(entry, called) for entry in entries)
        if isinstance(value, list | tuple) and self._note(Words) is not None:
            value = ",".join(str(self._parse_one(entry, called)) for entry in value)
        if self._note(JsonObject) is not None:
            return self._json(value, called)
        return self._parse_one(value, called)

    def check(self, value: Any, called: str) -> None:
        """Check choices and limits of a value of the right type.

        Raises:
            ValueError: it is outside; the message says what is inside.
        """
        limits = self._note(Between) or self._note(Address)
        for one in value if self.is_list else (value,):
            if one is not None and ((self.choices and one not in self.choices) or (limits and not limits.allow(one))):
                unit = self._note(Unit)
                what = self.wanted() if self.choices else f"{limits} {unit.of}" if unit else limits
                raise ValueError(f"{called} is {repr(one)[:80]}: give {what}")

    def wanted(self) -> str:
        """What to give."""
        limits, unit = self._note(Between), self._note(Unit)
        if self.choices:
            return "one of " + ", ".join(self.choices)
        plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
        what = plain[self.kind]
        if self._note(JsonObject) is not None:
            what = """a JSON object such as '{"name": 1}'"""
        if self._is_count():
            what += " such as 4096, 32k (32,000) or 32K (32,768)"
        if unit:
            what = "bytes, or a size such as 512M or 4G" if unit.of == "bytes" else "seconds, or such as 500ms or 5m"
        return f"{what}, {limits}" if limits else what

    def _json(self, value: object, called: str) -> str:
        try:
            found = json.loads(value) if isinstance(value, str) else value
            text = json.dumps(found, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError):  # of a mapping: it holds what no JSON does
            found = None
        if not isinstance(found, Mapping):
            raise ValueError(f"{called} is {str(value)[:80]!r}: give {self.wanted()}")
        return text

    def _parse_one(self, value: object, called: str) -> Any:
        parsed = None
        if not isinstance(value, list | tuple | Mapping) and isinstance(value, bool) <= (self.kind is bool):
            text = str(value).strip()
            spellings = self._note(Spellings)
            parsed = self._of_text(spellings.means.get(text, text) if spellings else text)
        if parsed is None:
            raise ValueError(f"{called} is {str(value)[:80]!r}: give {self.wanted()}")
        self.check((parsed,) if self.is_list else parsed, called)
        return parsed

    def _of_text(self, text: str) -> Any:
        if self.kind is bool:
            return text.lower() in TRUE if text.lower() in TRUE + FALSE else None
        if self.kind in (str, Path):
            return self.kind(text) if text or self.default == "" else None
        unit = self._note(Unit)
        pattern, factors = (_SIZE, _SIZE_FACTORS) if unit and unit.of == "bytes" else (_DURATION, _DURATION_FACTORS)
        try:
            if unit and (match := pattern.fullmatch(text)):
                return self.kind(float(match[1]) * factors[match[2].upper() if unit.of == "bytes" else match[2]])
            if self._is_count() and (match := _COUNT.fullmatch(text)):
                count = Fraction(match[1]) * _COUNT_FACTORS[match[2] or match[3]]
                return count.numerator if count.denominator == 1 else None
            number = self.kind(text)
            return number if math.isfinite(number) else None
        except (ValueError, OverflowError):
            return None

    def _is_count(self) -> bool:
        """Whether it is a whole number that people may abbreviate."""
        limits = self._note(Between)
        return self.kind is int and self._note(Unit) is None and (limits is None or limits.high > _LARGE)

    def _note(self, kind: type[_Note]) -> _Note | None:
        return next((note for note in self.notes if isinstance(note, kind)), None)


def settings_of(group: type[Any]) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by name, in its order."""
    return _settings_of(typing.cast("Hashable", group))


@functools.cache
def _settings_of(group: Any) -> Mapping[str, Setting]:
    hints, help_of = typing.get_type_hints(group, include_extras=True), _help_of(group)
    found = {}
    for field in dataclasses.fields(group):
        kind, choices, is_list, optional, notes = _read_type(hints[field.name])
        found[field.name] = Setting(
            field.name, group, kind, choices, is_list, optional, field.default, help_of.get(field.name, ""), notes
        )
    return found


def check_limits(config: object, error: type[Exception]) -> None:
    """Check every field of a configuration that may have been made without parsing; for `__post_init__`.

    Raises:
        error: a value is outside the limits or choices of its type.
    """
    for name, setting in settings_of(type(config)).items():
        try:
            setting.check(getattr(config, name), name)
        except ValueError as wrong:
            raise error(str(wrong)) from None


def _read_type(hint: Any) -> tuple[type[Any], tuple[str, ...], bool, bool, tuple[Any, ...]]:
    """Take a field's type apart: plain type, choices, whether a list, whether it may be None, notes."""
    is_list, optional, notes = False, False, []
    while True:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated:
            notes += hint.__metadata__
            hint = hint.__origin__
        elif origin in (types.UnionType, typing.Union):
            optional = True
            hint = next(part for part in arguments if part is not type(None))
        elif origin is tuple:
            is_list, hint = True, arguments[0]
        elif origin is Literal:
            return str, arguments, is_list, optional, tuple(notes)
        else:
            return hint, (), is_list, optional, tuple(notes)


def _help_of(group: type[Any]) -> Mapping[str, str]:
    """Return the text under each field of a class, which Python does not keep: read from the source."""
    return _texts(group.__module__).get(group.__name__, {})


@functools.cache
def _texts(module: str) -> Mapping[str, Mapping[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(node, ast.ClassDef):
            continue
        of_class = found.setdefault(node.name, {})
        for field, text in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                of_class[field.target.id] = " ".join(str(text.value.value).split())
    return found
