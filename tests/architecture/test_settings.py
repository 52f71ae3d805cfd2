"""Every program reads its settings by the same rules, and tells a mistake in the same form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from pagefleet_download import cli as download
from pagefleet_engine import cli as serve
from pagefleet_engine.compression import cli as quantize
from pagefleet_engine.settings import SERVE
from pagefleet_operator import cli as up
from pagefleet_operator import operate_cli
from pagefleet_operator.chat import cli as chat
from pagefleet_operator.chat import run_cli as run
from pagefleet_protocol.settings.program import Program
from pagefleet_router import cli as route

PROGRAMS: dict[str, tuple[Program, Callable[[Sequence[str] | None], int]]] = {
    "serve": (SERVE, serve.main),
    "route": (route.ROUTE, route.main),
    "operate": (operate_cli.OPERATE, operate_cli.main),
    "up": (up.UP, up.main),
    "chat": (chat.CHAT, chat.main),
    "run": (run.RUN, run.main),
    "download": (download.DOWNLOAD, download.main),
    "quantize": (quantize.QUANTIZE, quantize.main),
}


@pytest.mark.parametrize("verb", PROGRAMS)
@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        (["--no-such-flag"], {}, "unknown argument '--no-such-flag'"),
        (["--config", "/no/such.yaml"], {}, "--config /no/such.yaml cannot be read"),
        (["--config"], {}, "argument --config: expected one argument (see pagefleet"),
        ([], {"PAGEFLEET_LOG_LEVEL": "chatty"}, "PAGEFLEET_LOG_LEVEL is 'CHATTY': give one of DEBUG"),
        (["--port=99999"], {}, "--port"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    verb: str,
    arguments: list[str],
    variables: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.environ", variables)
    assert PROGRAMS[verb][1](arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"pagefleet {verb}: error: ")
    assert says in told.err
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("verb", PROGRAMS)
def test_every_setting_has_a_name_of_its_own_and_a_help(verb: str) -> None:
    program, _ = PROGRAMS[verb]
    assert len(program.settings) == sum(len(group.__dataclass_fields__) for group in program.groups.values())
    text = program.parser().format_help()
    for name, setting in program.settings.items():
        assert (name.upper() if name in program.positional else setting.flag) in text
        assert setting.help.endswith((".", ")")), name


def switches() -> list[tuple[str, str]]:
    return [
        (verb, name)
        for verb, (program, _) in PROGRAMS.items()
        for name, one in program.settings.items()
        if one.kind is bool
    ]


@pytest.mark.parametrize(("verb", "name"), switches())
def test_a_misspelt_boolean_is_refused_wherever_it_is(
    verb: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, main = PROGRAMS[verb]
    flag, variable = program.settings[name].flag, program.environment + name.upper()
    for arguments, variables, called in (([f"{flag}=ture"], {}, flag), ([], {variable: "ture"}, variable)):
        monkeypatch.setattr("os.environ", variables)
        assert main(arguments) == 2
        assert capsys.readouterr().err == f"pagefleet {verb}: error: {called} is 'ture': give true or false\n"
