"""One program's settings from flags, variables and a file, and the one form in which mistakes are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from pagefleet_protocol.settings.fields import Port, Shown
from pagefleet_protocol.settings.program import Program


class Mistake(Exception):
    """The component's own error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """What has no default."""

    model: str
    """What to load."""
    image: str
    """What to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The rest."""

    port: Port = 8000
    """Port, 100% yours; 0 takes any."""
    cache: bool = True
    """Keep things."""
    log: bool = False
    """Tell things."""
    engine: Annotated[tuple[str, ...], Shown("URL")] = ()
    """An engine."""


PROGRAM = Program(
    name="pagefleet try",
    description="Tries things.",
    groups={"needed": Needed, "server": Server},
    environment="PAGEFLEET_TRY_",
    error=Mistake,
    positional=("model",),
)


def read(flags: str = "", variables: dict[str, str] | None = None, file: Path | None = None) -> dict[str, object]:
    config = ["--config", str(file)] if file else []
    return PROGRAM.read([*flags.split(), *config], {f"PAGEFLEET_TRY_{k}": v for k, v in (variables or {}).items()})


def test_nothing_given_is_nothing() -> None:
    assert read() == {}
    assert PROGRAM.build(Server, {}) == Server()


def test_a_flag_beats_a_variable_and_that_the_file(tmp_path: Path) -> None:
    file = tmp_path / "try.yaml"
    file.write_text("model: of-file\nport: 1\nengine: [a, b]\nlog: on\nno-cache: true\n")
    assert read("m --port 3", {"PORT": "2", "ENGINE": "c, d,"}, file) == {
        **{"model": "m", "port": 3, "engine": ("c", "d"), "log": True, "cache": False},
    }
    assert read("--engine e --engine f,g", {"ENGINE": "c"}, file)["engine"] == ("e", "f,g")
    assert read("", {}, file)["engine"] == ("a", "b")


@pytest.mark.parametrize(
    ("flags", "variables", "cache"),
    [
        ("--no-cache", {}, False),
        ("--cache", {"CACHE": "0"}, True),
        ("--cache=off", {}, False),
        ("--cache=Yes", {"NO_CACHE": "true"}, True),
        ("", {"NO_CACHE": "on"}, False),
        ("", {"NO_CACHE": "no"}, True),
        ("", {"CACHE": "no"}, False),
    ],
)
def test_a_boolean_everywhere(flags: str, variables: dict[str, str], cache: bool) -> None:
    assert read(flags, variables) == {"cache": cache}


@pytest.mark.parametrize(
    ("flags", "variables", "says"),
    [
        ("--cache=maybe", {}, "--cache is 'maybe': give true or false"),
        ("--no-cache=1", {}, "argument --cache/--no-cache: ignored explicit argument '1' (see pagefleet try --help)"),
        ("", {"LOG": "ture"}, "PAGEFLEET_TRY_LOG is 'ture': give true or false"),
        ("", {"LOG": ""}, "PAGEFLEET_TRY_LOG is '': give true or false"),
        ("", {"NO_LOG": "x"}, "PAGEFLEET_TRY_NO_LOG is 'x': give true or false"),
        ("", {"NO_LOG": "1", "LOG": "1"}, "PAGEFLEET_TRY_NO_LOG and PAGEFLEET_TRY_LOG are both given: leave one out"),
        ("", {"PORT": "tcp:80"}, "PAGEFLEET_TRY_PORT is 'tcp:80': give a whole number, 0 to 65535"),
        ("--port 70000", {}, "--port is 70000: give 0 to 65535"),
        ("--port", {}, "argument --port: expected one argument (see pagefleet try --help)"),
        ("--prot 1", {}, "unknown argument '--prot'; did you mean --port? (see pagefleet try --help)"),
        ("--tensor-parallel-size=2", {}, "unknown argument '--tensor-parallel-size' (see pagefleet try --help)"),
        ("m n", {}, "unknown argument 'n' (see pagefleet try --help)"),
        ("--config /no/such", {}, "--config /no/such cannot be read (FileNotFoundError): check the path"),
    ],
)
def test_a_mistake_is_one_line(flags: str, variables: dict[str, str], says: str) -> None:
    with pytest.raises(Mistake) as refused:
        read(flags, variables)
    assert str(refused.value) == says


def test_a_level_that_is_none_is_a_mistake_of_every_program() -> None:
    with pytest.raises(Mistake, match="PAGEFLEET_LOG_LEVEL is 'CHATTY': give one of DEBUG"):
        PROGRAM.read([], {"PAGEFLEET_LOG_LEVEL": "chatty"})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prot: 5", "'prot' is not a setting; did you mean port?"),
        ("frobnicate: 5", "'frobnicate' is not a setting"),
        ("- 1", "holds no settings: write lines such as `port: 8000`"),
        ("", "holds no settings"),
        ("{", "is not YAML: "),
        ("[" * 5000, "is not YAML: "),
        ("port: true", "port is 'True': give a whole number, 0 to 65535"),
        ("port: [1]", "port is '[1]'"),
        ("port:", "port has no value"),
        ("log: maybe", "log is 'maybe': give true or false"),
        ("engine: {a: 1}", "engine is \"{'a': 1}\": give text"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "try.yaml"
    file.write_text(content)
    with pytest.raises(Mistake) as refused:
        read("", {}, file)
    assert str(refused.value).startswith(f"--config {file}")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    if "did you mean" not in says:
        assert "did you mean" not in str(refused.value)


def test_variables_that_kubernetes_adds_for_a_service_are_not_ours() -> None:
    assert read("", {"PORT": "tcp://10.0.0.7:80", "SERVICE_HOST": "10.0.0.7", "PORT_80_TCP": "x"}) == {}


def test_after_two_dashes_there_are_no_flags() -> None:
    assert read("--log -- --cache=maybe") == {"log": True, "model": "--cache=maybe"}


def test_what_is_missing_is_told_at_once() -> None:
    with pytest.raises(Mistake, match=r"^give MODEL, --image \(see pagefleet try --help\)$"):
        PROGRAM.build(Needed, {})
    with pytest.raises(Mistake, match=r"^give --image: What to run\.$"):
        PROGRAM.build(Needed, {"model": "m"})
    assert PROGRAM.build(Needed, {"model": "m", "image": "i", "port": 1}) == Needed(model="m", image="i")


def test_each_line_of_a_mistake_names_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAM.tell(Mistake("one\ntwo")) == 2
    assert capsys.readouterr().err == "pagefleet try: error: one\npagefleet try: error: two\n"


def test_the_help_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as shown:
        read("--help")
    assert shown.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--engine URL An engine. Repeatable." in text
    assert "--port N Port, 100% yours; 0 takes any. Default: 8000." in text
    assert "MODEL What to load." in text
    assert "PAGEFLEET_TRY_NAME" in text
    assert "PAGEFLEET_LOG_LEVEL is one of DEBUG" in text
