"""`pagefleet run MODEL`: starts an engine, and talks to its model; in the end the engine is gone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol.settings.program import Program

from pagefleet_operator.chat.cli import TalkConfig
from pagefleet_operator.chat.client import ChatClient
from pagefleet_operator.chat.conversation import Conversation
from pagefleet_operator.chat.engine_run import EngineFailed, EngineRun
from pagefleet_operator.chat.session import TerminalSession, converse_by_line, history_file, leave_quietly
from pagefleet_operator.errors import ChatError, CommandMissing, SettingsError

_LOOK_S = 0.1
_LAST_BREATH_S = 1.0
"""An engine that breaks an answer off may be about to end."""
_DESCRIPTION = """\
Serves a model on a free port of this machine, and talks to it: `pagefleet serve` and `pagefleet chat` in one. What
follows -- are flags of the engine: pagefleet run MODEL -- --max-model-len 4096. In the end the engine is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What `pagefleet run` can be told."""

    model: str
    """Folder in Hugging Face layout, or whatever else `pagefleet serve` takes."""


RUN = Program(
    name="pagefleet run",
    description=_DESCRIPTION,
    groups={"model": RunConfig, "conversation": TalkConfig},
    environment="PAGEFLEET_RUN_",
    error=SettingsError,
    positional=("model",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 after a clean end, 1 when a piped question has no answer, 2 when a flag has a mistake, 3 when the model cannot
        be loaded, 130 when Ctrl-C came before the model was ready.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, flags = _split(arguments)
    try:
        given = RUN.read(own, os.environ)
        config, talk = RUN.build(RunConfig, given), RUN.build(TalkConfig, given)
        return _run(config.model, flags, talk)
    except (SettingsError, CommandMissing) as error:
        return RUN.tell(error)
    except EngineFailed as error:
        RUN.tell(error)
        return error.status
    except ChatError as error:
        RUN.tell(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return leave_quietly()


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return our own arguments, and those of the engine."""
    if "--" not in arguments:
        return arguments, ()
    end = arguments.index("--")
    return arguments[:end], arguments[end + 1 :]


def _run(model: str, flags: Sequence[str], talk: TalkConfig) -> int:
    from pagefleet_operator.local.settings import Commands  # noqa: PLC0415 - a mistake in a flag costs nothing
    from pagefleet_operator.local.state_dir import state_home  # noqa: PLC0415

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    command = (*Commands.serve_installed(), model, *flags)
    with EngineRun(command, state_home(os.environ) / "run", os.environ) as engine:
        _wait_until_ready(engine)
        client = ChatClient(engine.url, os.environ.get("OPENAI_API_KEY"))
        conversation = Conversation(client, client.models()[0], talk.system)
        if not sys.stdin.isatty():
            return converse_by_line(conversation, sys.stdin, sys.stdout, RUN)
        print(f"{conversation.model} at {engine.url}; /help tells what can be typed")
        history = history_file(os.environ) if talk.history else None
        return TerminalSession(conversation, history, talk.markdown, lambda: engine.failure(_LAST_BREATH_S)).run()


def _leave(number: int, frame: object) -> None:
    """End as a person would, so that the engine ends too."""
    raise SystemExit(128 + number)


def _wait_until_ready(engine: EngineRun) -> None:
    """Show how far the engine is until it is ready."""
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from pagefleet_operator.local.bars import load_line  # noqa: PLC0415

    console = Console(stderr=True, highlight=False)
    shown = console.is_terminal and not console.is_dumb_terminal
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while (progress := engine.loading()) is not None:
            if shown:
                live.update(load_line(progress, engine.last_words()), refresh=True)
            time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
