"""`pagefleet chat [URL]`: talk to a model from a terminal, or pipe questions into it, one a line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol.settings.program import Program

from pagefleet_operator.chat.client import DEFAULT_URL, ChatClient
from pagefleet_operator.chat.conversation import Conversation
from pagefleet_operator.chat.session import TerminalSession, converse_by_line, history_file, leave_quietly
from pagefleet_operator.errors import ChatError, SettingsError

_DESCRIPTION = """\
Talks to a model. Where standard input is no terminal, each of its lines is a question. A key for the server comes from
OPENAI_API_KEY. /help tells what else can be typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """What `pagefleet chat` can be told."""

    url: str = DEFAULT_URL
    """Server."""
    model: str | None = None
    """Model's name; default: the first that the server has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkConfig:
    """How a conversation begins, and how it is shown."""

    system: str | None = None
    """Instruction that every conversation begins with."""
    markdown: bool = True
    """Render answers in a terminal; --no-markdown shows them as they come."""
    history: bool = True
    """Keep what was asked, for the next time, in ~/.local/state/pagefleet/chat-history."""


CHAT = Program(
    name="pagefleet chat",
    description=_DESCRIPTION,
    groups={"chat": ChatConfig, "conversation": TalkConfig},
    environment="PAGEFLEET_CHAT_",
    error=SettingsError,
    positional=("url",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 after a clean end, 1 when the server or a piped question has no answer, 2 when a flag has a mistake, 130 when
        Ctrl-C ended what was piped in.
    """
    try:
        given = CHAT.read(sys.argv[1:] if argv is None else argv, os.environ)
        config, talk = CHAT.build(ChatConfig, given), CHAT.build(TalkConfig, given)
    except SettingsError as error:
        return CHAT.tell(error)
    try:
        client = ChatClient(config.url, os.environ.get("OPENAI_API_KEY"))
        model = config.model or client.models()[0]
        conversation = Conversation(client, model, talk.system)
        if not sys.stdin.isatty():
            return converse_by_line(conversation, sys.stdin, sys.stdout, CHAT)
        print(f"{model} at {client.url}; /help tells what can be typed")
        return TerminalSession(conversation, history_file(os.environ) if talk.history else None, talk.markdown).run()
    except ChatError as error:
        CHAT.tell(error)
        return 1
    except KeyboardInterrupt:  # before there was a prompt
        return 130
    except BrokenPipeError:
        return leave_quietly()


if __name__ == "__main__":
    sys.exit(main())
