"""Renders a conversation with the model's own chat template, as Hugging Face transformers would.

The template comes with the model, so it is trusted to be sensible but not to be safe: it runs in jinja2's immutable
sandbox, its output is capped, and it looks at the clock with every turn of a loop and every call of a macro. A template
from a request is never rendered.
Source of the environment: Hugging Face "Chat templates" (trim and lstrip blocks, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that keeps the text readable, `{% generation %}`).
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pagefleet_text.errors import PromptRefused, TextDamaged

MAX_RENDERED_CHARS = 16 * 1024 * 1024
MAX_RENDER_S = 10.0


class ChatTemplate:
    """One model's template, compiled.

    Args:
        source: the jinja text.
        special_tokens: `bos_token`, `eos_token`, ... -> spelling, visible to the template.

    Attributes:
        source: as given.

    Raises:
        TextDamaged: the source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        try:
            self._environment = _environment()
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TextDamaged(f"the model's chat template is damaged (line {error.lineno}: {error.message})") from None
        except (SyntaxError, RecursionError, ValueError, MemoryError) as error:
            # What jinja2 makes of it is Python, with limits of its own on nesting.
            raise TextDamaged(f"the model's chat template cannot be compiled ({type(error).__name__})") from None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text.

        Args:
            messages: `role`, `content` and what else the template reads.
            add_generation_prompt: end with the opening of the assistant's answer.
            variables: more names for the template, e.g. `tools` or `enable_thinking`.

        Raises:
            PromptRefused: the template refuses these messages, or takes too long, or its output is too long.
        """
        names = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        pieces: list[str] = []
        size = 0
        self._environment.allow(MAX_RENDER_S)
        try:
            for piece in self._template.generate(names, messages=messages, add_generation_prompt=add_generation_prompt):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise _too_long()
                self._environment.check_time()
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise _refusal(str(error.message or "")) from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError):
            # Templates index and concatenate freely: messages of a shape they do not expect end in any of these.
            raise _refusal("they have a shape that it does not expect") from None
        return "".join(pieces)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a clock that no template can do without: a loop need not write anything to run for ever."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation], autoescape=False
        )
        self._thread = threading.local()

    def allow(self, seconds: float) -> None:
        """Let a rendering that begins in this thread take so long."""
        self._thread.until = time.monotonic() + seconds

    def check_time(self) -> None:
        """Raise PromptRefused when the time is over; templates call it."""
        if time.monotonic() > getattr(self._thread, "until", math.inf):
            raise _too_long()

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        bodies = [node.body for node in template.find_all(jinja2.nodes.For)]
        bodies += [node.body for node in template.find_all(jinja2.nodes.Macro)]
        bodies += [node.body for node in template.find_all(jinja2.nodes.CallBlock)]
        for body in bodies:
            clock = jinja2.nodes.EnvironmentAttribute("check_time")  # which no source can spell, nor set
            body.insert(0, jinja2.nodes.ExprStmt(jinja2.nodes.Call(clock, [], [], None, None), lineno=1))
        return template


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 jinja2 reads a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    environment = _Environment()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 the template wants the local date


def _too_long() -> PromptRefused:
    return PromptRefused("The conversation is too long for the chat template.", "messages", "invalid_value")


def _refusal(reason: str) -> PromptRefused:
    return PromptRefused(
        f"The model's chat template does not accept these messages: {' '.join(reason.split())[:300]}",
        "messages",
        "invalid_value",
    )
