"""What begins with a slash: a word that is typed instead of a question."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pagefleet_protocol.spelling import near_words

from pagefleet_operator.chat.conversation import SETTINGS, Conversation
from pagefleet_operator.errors import ChatError

_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)


class EndOfChatError(Exception):
    """Somebody wants to leave."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    usage: str
    help: str
    run: Callable[[Conversation, str], str]
    """Returns what is to be told; raises ChatError."""


def run_command(line: str, conversation: Conversation) -> str | None:
    """Run what a line asks for; returns what is to be told of it, or None where the line is a question.

    Raises:
        ChatError: there is no such command, or it cannot be done.
        EndOfChatError: the conversation is over.
    """
    found = _COMMAND.fullmatch(line)
    if found is None:
        return None
    name, rest = found[1].lower(), (found[2] or "").strip()
    command = COMMANDS.get(_OTHER_NAMES.get(name, name))
    if command is None:
        near = near_words(name, [*COMMANDS, *_OTHER_NAMES])
        raise ChatError(
            f"there is no /{name}; " + (f"did you mean /{near[0]}?" if near else "/help lists what there is")
        )
    return command.run(conversation, rest)


def _help(conversation: Conversation, rest: str) -> str:
    width = max(len(one.usage) for one in COMMANDS.values())
    lines = [f"{one.usage:<{width}}  {one.help}" for one in COMMANDS.values()]
    return "\n".join([*lines, "", KEYS])


KEYS = (
    "Enter asks; Alt-Enter, or a backslash at the end of a line, begins a new line; so does Enter between two "
    'lines of """.\nCtrl-C stops an answer, and at an empty prompt ends, as Ctrl-D does. '
    "Up and down recall what was asked before."
)


def _set(conversation: Conversation, rest: str) -> str:
    name, _, value = rest.partition(" ")
    if not name:
        values = [f"{one} {json.dumps(value)}" for one, value in conversation.settings.items()]
        return "\n".join(values) or f"nothing is set; there are {', '.join(SETTINGS)}"
    if not value.strip():
        raise ChatError(f"/set {name} wants a value, e.g. /set temperature 0.2; `default` takes it back")
    conversation.set(name.replace("-", "_"), value.strip())
    return ""


def _system(conversation: Conversation, rest: str) -> str:
    if not rest:
        return conversation.system or "there is no instruction; give one with /system TEXT"
    conversation.system = None if rest == "off" else rest
    return ""


def _save(conversation: Conversation, rest: str) -> str:
    file = _file(rest, "save")
    conversation.save(file)
    return f"saved to {file}"


def _load(conversation: Conversation, rest: str) -> str:
    conversation.load(_file(rest, "load"))
    return f"goes on after {len(conversation.messages)} messages"


def _file(rest: str, verb: str) -> Path:
    if not rest:
        raise ChatError(f"/{verb} wants a file, e.g. /{verb} talk.json")
    return Path(rest).expanduser()


def _clear(conversation: Conversation, rest: str) -> str:
    conversation.reset()
    return "forgot what was said"


def _model(conversation: Conversation, rest: str) -> str:
    models = conversation.client.models()
    if not rest:
        return "\n".join(f"{'*' if one == conversation.model else ' '} {one}" for one in models)
    if rest not in models:
        near = near_words(rest, models)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(models[:20])}"
        raise ChatError(f"the server has no model {rest[:80]!a}; {hint}")
    conversation.model = rest
    return ""


def _quit(conversation: Conversation, rest: str) -> str:
    raise EndOfChatError


COMMANDS: Mapping[str, Command] = {
    "help": Command("/help", "what can be typed", _help),
    "set": Command("/set NAME VALUE", "how to sample: temperature, max_tokens ...; /set shows what is set", _set),
    "system": Command("/system TEXT", "the instruction that the conversation begins with; off: none", _system),
    "model": Command("/model NAME", "ask another model; /model lists what there is", _model),
    "save": Command("/save FILE", "keep the conversation in a file", _save),
    "load": Command("/load FILE", "go on with one that was kept", _load),
    "clear": Command("/clear", "forget what was said", _clear),
    "quit": Command("/quit", "end, as Ctrl-D does", _quit),
}
_OTHER_NAMES = {"reset": "clear", "exit": "quit", "bye": "quit", "?": "help"}
