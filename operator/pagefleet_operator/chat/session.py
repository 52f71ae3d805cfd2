"""The loops of a conversation: in a terminal, and line by line where there is none."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pagefleet_protocol.settings.program import Program

from pagefleet_operator.chat.commands import COMMANDS, EndOfChatError, run_command
from pagefleet_operator.chat.conversation import AnswerView, Conversation
from pagefleet_operator.chat.view import MarkdownView, PlainView
from pagefleet_operator.errors import ChatError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_BLOCK = '"""'
_INTERRUPTED = 130


def converse_by_line(conversation: Conversation, lines: TextIO, out: TextIO, program: Program) -> int:
    """Ask line by line until the input ends. Returns the exit status: 1 when a question had no answer."""
    status = 0
    for line in lines:
        try:
            told = run_command(line.strip(), conversation)
            if told is None and line.strip():
                conversation.ask(line.strip(), PlainView(out))
            elif told:
                print(told, file=sys.stderr)
        except EndOfChatError:
            break
        except KeyboardInterrupt:
            return _INTERRUPTED
        except ChatError as error:
            out.flush()
            program.tell(error)
            status = 1
    return status


class TerminalSession:
    """A conversation with a person.

    Args:
        conversation: to go on with.
        history: file of what was asked before; made private. None: nothing is kept.
        markdown: render answers; False writes them as they come.
        is_lost: says why no question can be answered any more; None while one can.
    """

    def __init__(
        self,
        conversation: Conversation,
        history: Path | None,
        markdown: bool,
        is_lost: Callable[[], Exception | None] = lambda: None,
    ) -> None:
        from rich.console import Console  # noqa: PLC0415 - pipes need none of this

        self._conversation = conversation
        self._console = Console(highlight=False)
        self._markdown = markdown and self._console.is_terminal and not self._console.is_dumb_terminal
        self._is_lost = is_lost
        self._ask = input if self._console.is_dumb_terminal else _prompt_of(_prompt_session(history))

    def run(self) -> int:
        """Ask until somebody leaves. Returns the exit status: 0, or 1 where nobody answers any more."""
        while True:
            try:
                line = self._ask("> ").strip()
            except (EOFError, KeyboardInterrupt):
                return 0
            try:
                self._take(_without_marks(line))
            except EndOfChatError:
                return 0
            except ChatError as error:
                self._say(f"error: {error}", "red")
                if (why := self._is_lost()) is not None:
                    self._say(f"error: {why}", "red")
                    return 1

    def _take(self, line: str) -> None:
        told = run_command(line, self._conversation)
        if told is not None:
            self._say(told)
        elif line:
            try:
                speed = self._conversation.ask(line, self._view())
            except KeyboardInterrupt:
                self._say("stopped", "dim")
                return
            self._say(speed.describe(), "dim")

    def _view(self) -> AnswerView:
        return MarkdownView(self._console) if self._markdown else PlainView(sys.stdout, with_thoughts=True)

    def _say(self, text: str, style: str = "") -> None:
        if text:
            self._console.print(text, style=style, markup=False, soft_wrap=True)


def _without_marks(line: str) -> str:
    """Return what stands between the marks of a block of lines."""
    is_block = line.startswith(_BLOCK) and line.endswith(_BLOCK) and len(line) >= 2 * len(_BLOCK)
    return line[len(_BLOCK) : -len(_BLOCK)].strip("\n") if is_block else line


def _prompt_of(session: PromptSession[str]) -> Callable[[str], str]:
    """Return what asks for a line. Ctrl-C gives up what was typed; only where that is nothing it gets out."""

    def ask(prompt: str) -> str:
        while True:
            try:
                return session.prompt(prompt)
            except KeyboardInterrupt:
                if not session.default_buffer.text:
                    raise

    return ask


def _prompt_session(history: Path | None) -> PromptSession[str]:
    from prompt_toolkit import PromptSession  # noqa: PLC0415 - takes a moment that pipes need not wait for
    from prompt_toolkit.completion import WordCompleter  # noqa: PLC0415

    words = WordCompleter([f"/{name}" for name in COMMANDS], sentence=True)
    return PromptSession(
        history=_history(history),
        key_bindings=_keys(),
        multiline=True,
        prompt_continuation=". ",
        completer=words,
        complete_while_typing=False,
        enable_open_in_editor=False,
    )


def _keys() -> KeyBindings:
    """Enter asks, unless the text says that more comes."""
    from prompt_toolkit.key_binding import KeyBindings  # noqa: PLC0415

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        before = buffer.document.text_before_cursor
        if before.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif buffer.text.startswith(_BLOCK) and (len(buffer.text) < 6 or not buffer.text.rstrip().endswith(_BLOCK)):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(file: Path | None) -> History:
    """Return what was asked before, from a file that only its owner reads; of this conversation alone without one."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory  # noqa: PLC0415

    if file is not None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.fchmod(descriptor, 0o600)  # refused where it is another user's
            finally:
                os.close(descriptor)
            return FileHistory(file)
    return InMemoryHistory()


def history_file(environment: Mapping[str, str]) -> Path:
    """Return where questions are kept: under $XDG_STATE_HOME, or ~/.local/state."""
    home = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "pagefleet" / "chat-history"


def leave_quietly() -> int:
    """End where whoever read the answers has left: nothing may be written at exit either. Returns the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
