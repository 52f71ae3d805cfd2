"""An answer as it comes: plain text for pipes, Markdown that grows in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TextIO

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from pagefleet_operator.chat.client import Piece
from pagefleet_operator.chat.conversation import CallText

_REFRESH_S = 0.1


def printable(text: str) -> str:
    """Keep a model from steering the terminal: no control characters but line ends and tabs."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")


class PlainView:
    """Text as it is. `with_thoughts` shows thoughts too, in brackets: for a terminal that is no pipe."""

    def __init__(self, out: TextIO, with_thoughts: bool = False) -> None:
        self._out = out
        self._with_thoughts = with_thoughts
        self._thinks = False
        self._calls = CallText()
        self._wrote = False

    def show(self, piece: Piece) -> None:
        """Write a piece at once; calls are written whole, at the end."""
        if piece.thought and self._with_thoughts:
            self._write(("" if self._thinks else "(thinks: ") + printable(piece.thought))
            self._thinks = True
        if piece.text:
            self._end_thought()
            self._write(printable(piece.text))
        for call in piece.calls:
            self._calls.add(call)

    def end(self) -> None:
        """End the line."""
        self._end_thought()
        calls = [f"calls {printable(line)}" for line in self._calls.lines()]
        self._write("\n".join((["", *calls] if self._wrote else calls) + [""]))

    def _end_thought(self) -> None:
        if self._thinks:
            self._thinks = False
            self._write(")\n")

    def _write(self, text: str) -> None:
        self._wrote = self._wrote or bool(text)
        self._out.write(text)
        self._out.flush()


Kind = Literal["text", "thought"]


class MarkdownView:
    """Whole blocks scroll away as Markdown; the one that still grows is drawn again, a few times a second.

    Args:
        console: a terminal.
        clock: monotonic seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._kind: Kind = "text"
        self._rest = ""
        """Of the block that still grows."""
        self._calls = CallText()
        self._has_printed = False
        self._drawn_at = -_REFRESH_S
        self._live.start()

    def show(self, piece: Piece) -> None:
        """Take a piece, and draw it when it is time."""
        self._add("thought", piece.thought)
        self._add("text", piece.text)
        for call in piece.calls:
            self._calls.add(call)
        now = self._clock()
        if now - self._drawn_at >= _REFRESH_S:
            self._drawn_at = now
            self._settle()
            self._live.update(_Last(self._whole()), refresh=True)

    def end(self) -> None:
        """Leave the whole answer on the screen."""
        self._live.update("")
        self._live.stop()
        self._print(self._rest)
        self._rest = ""
        for line in self._calls.lines():
            self._console.print(Text(f"calls {printable(line)}", style="cyan"))

    def _add(self, kind: Kind, text: str) -> None:
        if text and kind != self._kind:
            self._print(self._rest)
            self._rest, self._kind = "", kind
        self._rest += printable(text)

    def _settle(self) -> None:
        """Print the blocks that are whole."""
        if self._kind == "text":
            whole, self._rest = split_blocks(self._rest)
            self._print(whole)

    def _print(self, text: str) -> None:
        if text.strip():
            if self._has_printed:
                self._console.print()
            self._has_printed = True
            self._console.print(self._rendered(text))

    def _whole(self) -> RenderableType:
        calls = self._calls.lines()
        return Text(f"calls {printable(calls[-1])}", style="cyan") if calls else self._rendered(self._rest)

    def _rendered(self, text: str) -> RenderableType:
        if self._kind == "thought":
            return Text(text.strip("\n"), style="dim italic")
        # A link's address is shown, and is no hyperlink: the text is a stranger's.
        return Markdown(text, hyperlinks=False)


class _Last:
    """The last lines of something that may be higher than the screen."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        for number, line in enumerate(lines[-max(1, console.height - 2) :]):
            if number:
                yield Segment.line()
            yield from line


def split_blocks(text: str) -> tuple[str, str]:
    """Cut Markdown before its last block: what comes before it cannot change any more."""
    starts = [token.map[0] for token in MarkdownIt().enable("table").parse(text) if token.level == 0 and token.map]
    if not starts or starts[-1] == 0:
        return "", text
    lines = text.splitlines(keepends=True)
    return "".join(lines[: starts[-1]]), "".join(lines[starts[-1] :])
