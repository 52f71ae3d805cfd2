"""What a field's type takes, and what is said of a value that it does not take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pagefleet_protocol.settings.fields import (
    Between,
    Bytes,
    Count,
    HostName,
    JsonObject,
    Port,
    Seconds,
    Share,
    Spellings,
    check_limits,
    settings_of,
)


class Mistake(Exception):
    """The component's own error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One field of each kind."""

    yes: bool = False
    """A switch
    over two lines."""
    maybe: bool | None = None
    """A switch that may be left open."""
    number: Count | None = None
    """A number."""
    port: Port = 8000
    """A port."""
    share: Share = 0.5
    """A share."""
    size: Bytes = 1
    """A size."""
    pause: Annotated[Seconds, Between(0, 3600, over=True)] = 1.0
    """A duration."""
    kind: Annotated[Literal["half", "whole"], Spellings({"0.5": "half"})] = "whole"
    """A choice."""
    text: str = "x"
    """Text."""
    note: str = ""
    """Text that may be empty."""
    file: Path | None = None
    """A file."""
    ports: tuple[Port, ...] = ()
    """Several ports."""
    host: HostName = "127.0.0.1"
    """A host."""
    fields: Annotated[str, JsonObject()] | None = None
    """An object."""

    def __post_init__(self) -> None:
        check_limits(self, Mistake)


def parse(name: str, value: object) -> Any:
    return settings_of(Example)[name].parse(value, f"--{name}")


@pytest.mark.parametrize("word", ["true", "yes", "on", "1", "TRUE", " On ", True])
def test_spellings_of_true(word: object) -> None:
    assert parse("yes", word) is True
    assert parse("maybe", word) is True


@pytest.mark.parametrize("word", ["false", "no", "off", "0", "False", "OFF", False])
def test_spellings_of_false(word: object) -> None:
    assert parse("yes", word) is False
    assert parse("maybe", word) is False


@pytest.mark.parametrize("word", ["ture", "y", "t", "", "2", "enabled", 2, 1.5, [True]])
def test_a_misspelt_boolean_is_refused_with_its_name_and_what_is_allowed(word: object) -> None:
    with pytest.raises(ValueError, match=r"^--yes is .*: give true or false$"):
        parse("yes", word)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("number", "7", 7),
        ("number", 7, 7),
        ("number", "32k", 32_000),
        ("number", "32K", 32_768),
        ("number", "25.6k", 25_600),
        ("number", "1.5 Ki", 1536),
        ("number", "1m", 1_000_000),
        ("number", "2G", 2**31),
        ("number", "none", None),
        ("number", None, None),
        ("size", "512", 512),
        ("size", "1.5k", 1536),
        ("size", "2 GiB", 2 * 2**30),
        ("size", "4Gi", 4 * 2**30),
        ("size", "4gb", 4 * 2**30),
        ("size", 64, 64),
        ("pause", "30", 30.0),
        ("pause", "1e3", 1000.0),
        ("pause", "500ms", 0.5),
        ("pause", "2.5m", 150.0),
        ("pause", "1h", 3600.0),
        ("pause", 2, 2.0),
        ("kind", "0.5", "half"),
        ("kind", 0.5, "half"),
        ("text", 7, "7"),
        ("note", "", ""),
        ("file", "/a b", Path("/a b")),
        ("ports", ["1", 2], (1, 2)),
        ("ports", "3", (3,)),
        ("host", "::", "::"),
        ("host", "fe80::1%eth0", "fe80::1%eth0"),
        ("host", "gpu-1.example.org.", "gpu-1.example.org."),
        ("host", "r\u00e4chner.example.org", "r\u00e4chner.example.org"),
        ("fields", ' {"b": 1, "a": {"c": [null]}} ', '{"a":{"c":[null]},"b":1}'),
        ("fields", {"b": 1, "a": True}, '{"a":true,"b":1}'),
        ("fields", None, None),
    ],
)
def test_values(name: str, given: object, value: object) -> None:
    assert parse(name, given) == value


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("number", "x", "--number is 'x': give a whole number such as 4096, 32k (32,000) or 32K (32,768), at least 1"),
        ("number", "0.3K", "--number is '0.3K': give a whole number"),
        ("number", "32kB", "--number is '32kB': give a whole number such as 4096, 32k"),
        ("number", "-1k", "--number is '-1k': give a whole number"),
        ("number", "9" * 5000 + "k", "': give a whole number"),
        ("port", "8k", "--port is '8k': give a whole number, 0 to 65535"),
        ("number", "1.5", "--number is '1.5': give a whole number"),
        ("number", 0, "--number is 0: give at least 1"),
        ("number", True, "--number is 'True': give a whole number"),
        ("port", None, "--port has no value: give a whole number, 0 to 65535"),
        ("port", "65536", "--port is 65536: give 0 to 65535"),
        ("share", "nan", "--share is 'nan': give a number, 0 to 1"),
        ("share", "inf", "--share is 'inf'"),
        ("share", 1.01, "--share is 1.01: give 0 to 1"),
        ("fields", "[1]", """--fields is '[1]': give a JSON object such as '{"name": 1}'"""),
        ("fields", '{"a": 1', """': give a JSON object"""),
        ("fields", '{"a": NaN}', """': give a JSON object"""),
        ("fields", "[" * 100_000, """': give a JSON object"""),
        ("fields", {"a": len}, 'function len>}": give a JSON object'),
        ("fields", len, "--fields is '<built-in function len>': give a JSON object"),
        ("size", "much", "--size is 'much': give bytes, or a size such as 512M or 4G"),
        ("size", "-1K", "--size is '-1K'"),
        ("size", "9" * 400 + "G", "': give bytes, or a size such as 512M or 4G"),
        ("number", "1e400", "--number is '1e400': give a whole number"),
        ("port", "9" * 400, "give a whole number, 0 to 65535"),
        ("pause", "9" * 400, "give seconds, or such as 500ms or 5m"),
        ("pause", "5 days", "--pause is '5 days': give seconds, or such as 500ms or 5m"),
        ("pause", "0ms", "--pause is 0.0: give more than 0, at most 3600 seconds"),
        ("kind", "third", "--kind is 'third': give one of half, whole"),
        ("text", "", "--text is '': give text"),
        ("text", True, "--text is 'True': give text"),
        ("text", ["a"], "give text"),
        ("text", {"a": 1}, "give text"),
        ("file", " ", "--file is ' ': give a path"),
        ("ports", ["1", "x"], "--ports is 'x': give a whole number, 0 to 65535"),
        ("ports", [70000], "--ports is 70000: give 0 to 65535"),
        ("ports", [[1]], "--ports is '[1]'"),
        ("host", "..x", "--host is '..x': give a host name or an IP address"),
        ("host", "x" * 64, "give a host name or an IP address"),
        ("host", "a\0b", "--host is 'a\\x00b': give"),
    ],
)
def test_what_a_type_does_not_take(name: str, given: object, says: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - its text is compared below
        parse(name, given)
    assert says in str(refused.value)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - its text is measured below
        parse("number", "9" * 100_000)
    assert len(str(refused.value)) < 200


def test_a_long_number_is_cut_in_the_message() -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - its text is measured below
        parse("port", "9" * 300)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"port": 70000}, "port is 70000: give 0 to 65535"),
        ({"port": 10**400}, "port is 1000"),
        ({"share": math.nan}, "share is nan: give 0 to 1"),
        ({"pause": math.inf}, "pause is inf: give more than 0, at most 3600 seconds"),
        ({"kind": "third"}, "kind is 'third': give one of half, whole"),
        ({"ports": (1, -1)}, "ports is -1: give 0 to 65535"),
    ],
)
def test_a_value_that_no_text_gave_is_checked_too(given: dict[str, Any], says: str) -> None:
    with pytest.raises(Mistake, match=says):
        Example(**given)


def test_the_help_is_the_text_under_the_field() -> None:
    assert settings_of(Example)["yes"].help == "A switch over two lines."
    assert [one.value_name for one in settings_of(Example).values()] == [
        *(
            "BOOL",
            "BOOL",
            "N",
            "N",
            "X",
            "BYTES",
            "SECONDS",
            "{half,whole}",
            "TEXT",
            "TEXT",
            "PATH",
            "N",
            "HOST",
            "JSON",
        ),
    ]
