"""What the server needs of the rest of the engine. Tests pass fakes; the process passes the real parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagefleet_protocol.openai_chat import Message

from pagefleet_engine.client.health import EngineHealth
from pagefleet_engine.engine_core.messages import CoreStats, WireLogprobs
from pagefleet_engine.engine_core.output_text import NOTHING_ELSEWHERE, Elsewhere
from pagefleet_engine.sampling_params import SamplingParams


class Chunk(Protocol):
    """What one step gave one request. The last chunk has a finish reason; `text` may be empty before it."""

    @property
    def text(self) -> str:
        """Text that became certain."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """New tokens."""
        ...

    @property
    def logprobs(self) -> Sequence[WireLogprobs] | None:
        """One entry per new token, when asked for."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[WireLogprobs] | None:
        """One entry per prompt token after the first, in the chunk that completes them."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length` or `abort`; None while it goes on."""
        ...

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or stop token that ended it."""
        ...

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that came from the prefix cache, with the first chunk."""
        ...

    @property
    def kv_wait_s(self) -> float | None:
        """Seconds that the request waited for K/V from elsewhere, with the first chunk, if it did."""
        ...


class Engine(Protocol):
    """The engine core, as its asynchronous client shows it."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        elsewhere: Elsewhere = NOTHING_ELSEWHERE,
    ) -> AsyncGenerator[Chunk, None]:
        """Run one request with `n` 1, going on from what is done elsewhere. Closing the generator early aborts it.

        Raises:
            InvalidRequest, QueueFull: with the first chunk, the core refused it.
            RequestFailed: the core gave it up.
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

    def conversation_tokens(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Render and tokenize; PromptRefused when the template refuses the messages."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it."""

    name: str
    created: int
    """Unix time."""
    max_model_len: int
    vocab_size: int
    """Rows of the model's embedding: token ids at or over it are refused."""
    aliases: tuple[str, ...] = ()
    """Other names that requests may use; an answer carries the name that was asked for."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the model's own first."""
        return (self.name, *self.aliases)
