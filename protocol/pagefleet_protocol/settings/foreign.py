"""Options of another program that people bring along: a table, as data, says what each means here.

[tensor_parallel_size]              # its name there; its flag is --tensor-parallel-size
flags = ["-tp"]                     # other spellings of the flag
neutral = ["1"]                     # values that change nothing here; "any": all of them
remark = "start one engine ..."     # told with a refusal, and shown in the documents

`means` names the setting that is the same, `cases` gives settings by value. What has neither, and no setting of its
name, is refused with the remark.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pagefleet_protocol.settings.fields import FALSE, TRUE, Takes


class ForeignOption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One option of the other program."""

    takes: Takes = "value"
    flags: tuple[str, ...] = ()
    """Spellings of its flag beside the long one."""
    means: str = ""
    """The setting that it is called here."""
    cases: dict[str, dict[str, Any]] = {}
    """Value -> the settings that it means."""
    neutral: Literal["any"] | tuple[str, ...] = ()
    remark: str = ""
    secret: bool = False
    """No message shows its value."""
    gone: bool = False
    """The other program has it no more."""

    def is_neutral(self, value: object) -> bool:
        """Whether a value changes nothing here."""
        return self.neutral == "any" or _word(value) in self.neutral

    def settings(self, value: object, called: str) -> Mapping[str, Any]:
        """Return the settings that a value means which is not neutral.

        Raises:
            ValueError: there are none; `called` is what the option is called where it was found, for the message.
        """
        if self.means:
            return {self.means: _unpacked(value)}
        word = _word(value)
        if (found := self.cases.get(word)) is not None:
            return found
        is_flag = called.startswith("--") and " " not in called
        if self.takes == "switch" and is_flag:
            called = called if word == "true" else f"--no-{called.removeprefix('--')}"
        elif not self.secret:
            called += f" {str(value)[:80]}" if is_flag else f"={str(value)[:80]}"
        choices = " or ".join(choice for choice in self.neutral if choice.strip("[]{}"))
        only = f", only {choices}" if choices and self.takes != "switch" else ""
        raise ValueError(f"{called} is not supported{only}: {self.remark}")


def read_foreign(table: str) -> Mapping[str, ForeignOption]:
    """Read a table, TOML, by the options' names."""
    return msgspec.convert(tomllib.loads(table), dict[str, ForeignOption])


def _unpacked(value: object) -> object:
    """Return the list that a text holds as JSON, as the other program may want lists; else the value."""
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _word(value: object) -> str:
    if isinstance(value, str):
        text = value.strip().lower()
        return "true" if text in TRUE[:3] else "false" if text in FALSE[:3] else text
    if isinstance(value, bool | Mapping | list | tuple):
        return json.dumps(value, default=str)
    return str(value).lower()
