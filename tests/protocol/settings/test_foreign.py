"""A program that understands another one's options, and a command line in all its spellings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from pagefleet_protocol.settings.fields import Words
from pagefleet_protocol.settings.foreign import read_foreign
from pagefleet_protocol.settings.program import Program

OPTIONS = read_foreign("""
[width]
flags = ["-tp"]
neutral = ["1"]
remark = "start more of them"
[port_number]
means = "port"
[keys]
means = "key"
[eager]
takes = "switch"
cases = { true = { mode = "eager" }, false = {} }
[trust]
takes = "switch"
neutral = "any"
[lora]
takes = "switch"
neutral = ["false"]
remark = "merge it"
[mode]
neutral = ["whatever"]
flags = ["-m"]
[token]
secret = true
remark = "set the variable"
[origins]
takes = "words"
remark = "use a proxy"
""")


class Mistake(Exception):
    """The component's own error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Settings."""

    model: str
    """What to load."""
    port: int = 1
    """A port."""
    mode: str | None = None
    """A mode."""
    cache_dir: str | None = None
    """A folder."""
    quick: bool = False
    """Faster."""
    name: Annotated[str, Words()] | None = None
    """Names."""
    key: tuple[str, ...] = ()
    """Keys."""


PROGRAM = Program(
    name="pagefleet try",
    description="",
    groups={"all": Group},
    environment="PAGEFLEET_TRY_",
    error=Mistake,
    positional=("model",),
    foreign=lambda: OPTIONS,
)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("m --port-number 5", {"model": "m", "port": 5}),
        ("--model m --port=5", {"model": "m", "port": 5}),
        ("--model=m", {"model": "m"}),
        ("m --cache_dir /a --no_quick", {"model": "m", "cache_dir": "/a", "quick": False}),
        ("m --eager", {"model": "m", "mode": "eager"}),
        ("m --eager=true --quick=yes", {"model": "m", "mode": "eager", "quick": True}),
        ("m --no-eager", {"model": "m"}),
        ("m -m lazy", {"model": "m", "mode": "lazy"}),
        ("m --mode whatever", {"model": "m"}),
        ("m --name a b --port 2", {"model": "m", "name": "a,b", "port": 2}),
        ("--name a m", {"model": "m", "name": "a"}),
        ("--name a,b m", {"model": "m", "name": "a,b"}),
        ("--model m --name a b", {"model": "m", "name": "a,b"}),
        ("m --key a b --key c", {"model": "m", "key": ("a", "b", "c")}),
        ("--key a m", {"model": "m", "key": ("a",)}),
        ("m --keys a", {"model": "m", "key": ("a",)}),
        ('m --keys ["a","b"]', {"model": "m", "key": ("a", "b")}),
        ("m --keys [a", {"model": "m", "key": ("[a",)}),
        ("m --width 1 -tp 1 --trust", {"model": "m"}),
        ("m --port -1", {"model": "m", "port": -1}),
    ],
)
def test_a_line_in_many_spellings(line: str, values: dict[str, Any]) -> None:
    assert PROGRAM.read(line.split(), {}) == values


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("m -tp 2", "--width 2 is not supported, only 1: start more of them"),
        ("m --width=2", "--width 2 is not supported, only 1: start more of them"),
        ("m --lora", "--lora is not supported: merge it"),
        ("m --token s3cret", "--token is not supported: set the variable"),
        ("m --origins a b", "--origins ['a', 'b'] is not supported: use a proxy"),
        ("m --origins.first a", "--origins ['a'] is not supported: use a proxy"),
        ("m --port-number x", "--port-number is 'x': give a whole number such as 4096, 32k (32,000) or 32K (32,768)"),
        ("m --eager=maybe", "--eager is 'maybe': give true or false"),
        ("m --model n", "unknown argument 'n' (see pagefleet try --help)"),
        ("m --quality", "unknown argument '--quality' (see pagefleet try --help)"),
        ("m --qiuck", "unknown argument '--qiuck'; did you mean --quick? (see pagefleet try --help)"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(line: str, says: str) -> None:
    with pytest.raises(Mistake) as refused:
        PROGRAM.read(line.split(), {})
    assert str(refused.value) == says


def test_what_changes_nothing_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    PROGRAM.read(["m", "--width", "1", "--trust", "--mode", "whatever"], {})
    assert capsys.readouterr().err == "pagefleet try: nothing changes by --width, --trust, --mode: ignored\n"
    PROGRAM.read(["m", "--eager"], {})
    assert capsys.readouterr().err == ""


def test_a_file_of_the_other_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("model: m\nwidth: 1\nport-number: 4\neager: true\nname: [a, b]\ntrust: true\nlora: false\n")
    assert PROGRAM.read(["--config", str(file)], {}) == {"model": "m", "port": 4, "mode": "eager", "name": "a,b"}
    assert capsys.readouterr().err == "pagefleet try: nothing changes by width, trust, lora: ignored\n"
    file.write_text("model: m\nlora: true\n")
    with pytest.raises(Mistake, match="lora=True is not supported: merge it"):
        PROGRAM.read(["--config", str(file)], {})


def test_the_help_shows_own_settings_alone() -> None:
    text = PROGRAM.parser().format_help()
    assert "--port" in text
    assert not any(word in text for word in ("--width", "--port-number", "-tp", "--eager", "--model"))
