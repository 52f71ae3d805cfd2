"""What was said so far, and how it is asked: model, instruction, settings of the sampling. It can be kept in a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml
from pagefleet_protocol.openai_chat import read_chat_request
from pagefleet_protocol.openai_json import InvalidRequest
from pagefleet_protocol.spelling import near_words

from pagefleet_operator.chat.client import CallPiece, ChatClient, Message, Piece
from pagefleet_operator.errors import ChatError

SETTINGS = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "reasoning_effort", "thinking_token_budget"),
)
"""Fields of a request that may be set."""
_ROLES = ("system", "user", "assistant")
_KIND = "pagefleet chat"


class AnswerView(Protocol):
    """Whom an answer is shown to as it comes."""

    def show(self, piece: Piece) -> None:
        """Show a piece."""

    def end(self) -> None:
        """Show the rest: nothing more comes."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast an answer came."""

    num_tokens: int | None
    """None: the server did not say."""
    first_s: float
    """From the question to the first piece."""
    rest_s: float
    """From the first piece to the last."""

    def describe(self) -> str:
        """Say it in a line; empty where there is nothing to say."""
        if self.num_tokens is None:
            return ""
        rate = (
            f", {(self.num_tokens - 1) / self.rest_s:.1f} tokens/s" if self.num_tokens > 1 and self.rest_s > 0 else ""
        )
        return f"{self.num_tokens} tokens{rate}, the first after {self.first_s:.2f} s"


@dataclass(slots=True)
class Conversation:
    """One conversation with one model. A question that has no answer is forgotten, so that the next one makes sense."""

    client: ChatClient
    model: str
    system: str | None = None
    """Instruction that it begins with."""
    messages: list[Message] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of each request, of `SETTINGS`."""
    clock: Callable[[], float] = time.monotonic

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = []

    def ask(self, question: str, view: AnswerView) -> Speed:
        """Send a question and show the answer as it comes. What was said of one that is interrupted counts.

        Raises:
            ChatError: there is no full answer; the question is forgotten.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": question}]
        instruction: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        answer, num_tokens, began = "", None, self.clock()
        first = last = None
        try:
            for piece in self.client.answer(self.model, [*instruction, *asked], self.settings):
                if piece.text or piece.thought or piece.calls:
                    last = self.clock()
                    first = first if first is not None else last
                answer += piece.text
                num_tokens = piece.num_tokens if piece.num_tokens is not None else num_tokens
                view.show(piece)
        except KeyboardInterrupt:
            self._keep(asked, answer)
            raise
        finally:
            view.end()
        self._keep(asked, answer)
        ended = self.clock()
        first, last = first or ended, last or ended
        return Speed(num_tokens, first - began, last - first)

    def _keep(self, asked: list[Message], answer: str) -> None:
        if answer:  # calls alone would want their results next
            self.messages = [*asked, {"role": "assistant", "content": answer}]

    def set(self, name: str, text: str) -> None:
        """Set a field of requests; `default` takes it back.

        Raises:
            ChatError: there is no such field, or it takes no such value.
        """
        if name not in SETTINGS:
            near = near_words(name, SETTINGS)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SETTINGS)}"
            raise ChatError(f"{name!a} cannot be set; {hint}")
        if text == "default":
            self.settings.pop(name, None)
            return
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        check_setting(name, value)
        self.settings[name] = value

    def save(self, file: Path) -> None:
        """Write all of it into a file that only its owner reads.

        Raises:
            ChatError: it cannot be written, or holds something else.
        """
        if file.exists():
            _read(file)  # what is no conversation is not overwritten
        kept = {
            "kind": _KIND,
            "model": self.model,
            "system": self.system,
            "settings": self.settings,
            "messages": self.messages,
        }
        part = file.with_name(f".{file.name}.part")
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
                json.dump(kept, out, ensure_ascii=False, indent=1)
            part.replace(file)
        except OSError as error:
            raise ChatError(f"{file} cannot be written ({error.strerror}): give another file") from error

    def load(self, file: Path) -> None:
        """Go on with a conversation of a file; the model stays.

        Raises:
            ChatError: it cannot be read, or holds something else.
        """
        kept = _read(file)
        for name, value in kept["settings"].items():
            check_setting(name, value)
        self.system, self.settings, self.messages = kept["system"], kept["settings"], kept["messages"]


def check_setting(name: str, value: object) -> None:
    """Check a field by the rules of the server.

    Raises:
        ChatError: in the server's words.
    """
    body = {"model": "any", "messages": [{"role": "user", "content": "?"}], name: value}
    try:
        read_chat_request(body)
    except InvalidRequest as error:
        raise ChatError(str(error)) from error


def _read(file: Path) -> Mapping[str, Any]:
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ChatError(f"{file} cannot be read ({error.strerror}): give a file that /save wrote") from error
    except ValueError:
        kept = None
    if not _is_conversation(kept):
        raise ChatError(f"{file} holds no conversation: give a file that /save wrote")
    return kept  # type: ignore[no-any-return]


def _is_conversation(kept: object) -> bool:
    if not isinstance(kept, dict) or kept.get("kind") != _KIND:
        return False
    system, settings, messages = kept.get("system"), kept.get("settings"), kept.get("messages")
    return (
        (system is None or isinstance(system, str))
        and isinstance(settings, dict)
        and settings.keys() <= set(SETTINGS)
        and isinstance(messages, list)
        and all(
            isinstance(one, dict)
            and one.keys() == {"role", "content"}
            and one["role"] in _ROLES
            and isinstance(one["content"], str)
            for one in messages
        )
    )


class CallText:
    """Calls as they come, in a line each: `name(arguments)`."""

    def __init__(self) -> None:
        self._calls: dict[int, list[str]] = {}

    def add(self, piece: CallPiece) -> None:
        """Take a piece of a call."""
        call = self._calls.setdefault(piece.index, ["", ""])
        call[0] += piece.name
        call[1] += piece.arguments

    def lines(self) -> list[str]:
        """Return what there is of all calls."""
        return [f"{name}({arguments})" for _, (name, arguments) in sorted(self._calls.items())]
