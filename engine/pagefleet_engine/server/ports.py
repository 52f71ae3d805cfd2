"""What the server needs of the rest of the engine. Tests pass fakes; the process passes the real parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pagefleet_protocol.conversation import Conversation

from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.engine_core.messages import CoreStats
from pagefleet_engine.engine_core.progress import EngineHealth


class Engine(Protocol):
    """The engine core, as its asynchronous client shows it."""

    def generate(self, asked: Generation) -> Chunks:
        """Run the choices of a request, whose prompts and parameters were checked. Closing it early aborts them.

        Raises:
            InvalidRequest, QueueFull: with the first chunk, the core refused it.
            RequestFailed: the core gave a choice up.
            EngineDead: the core is gone.
        """
        ...

    def health(self) -> EngineHealth:
        """Return the state now, without waiting."""
        ...

    @property
    def stats(self) -> CoreStats | None:
        """The core's latest figures."""
        ...


class Profiler(Protocol):
    """Records the engine's steps."""

    async def start_profile(self) -> None:
        """Record from now on; ProfileRefused where that cannot be."""
        ...

    async def stop_profile(self) -> str:
        """Return the path of what was recorded; ProfileRefused where that is nothing."""
        ...


class Tokenizer(Protocol):
    """The model's tokenizer; its methods are called from several threads."""

    @property
    def vocab_size(self) -> int:
        """Tokens it knows."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return one token as text, losing nothing."""
        ...

    def surely_longer_than(self, text: str, num_tokens: int) -> bool:
        """Tell at once that a text cannot fit."""
        ...


class ChatPrompt(Protocol):
    """From a conversation to token ids; called from several threads."""

    @property
    def template_names(self) -> frozenset[str]:
        """What the template reads."""
        ...

    def chat_tokens(self, conversation: Conversation) -> list[int]:
        """Render and tokenize; PromptRefused when the template refuses the messages."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it."""

    name: str
    created: int
    """Unix time."""
    limits: ModelLimits
    aliases: tuple[str, ...] = ()
    """Other names that requests may use; an answer carries the name that was asked for."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the model's own first."""
        return (self.name, *self.aliases)
