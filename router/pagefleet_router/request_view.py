"""What the choice of an engine depends on, taken from a request once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ANONYMOUS = ""
"""The tenant of requests where no key is asked for. No line of a key file can name it."""

Pieces = tuple[int, ...]
"""A prompt's text as a chain of hashes, see `prefix.pieces`."""


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """A request as admission and scheduling see it; made by `exchange.view`, completed by a `PromptReader`.

    A `msgspec` structure because one is made per request: a frozen dataclass takes ten times as long.
    """

    model: str | None
    """Name of the model's endpoints, aliases resolved; None: any engine can answer."""
    pieces: Pieces = ()
    """Empty where prefixes do not matter."""
    num_tokens: int = 0
    """Of the prompt: counted where it was tokenized, else estimated from its bytes."""
    max_tokens: int | None = None
    """That the client allows for the answer; None where it does not say."""
    blocks: Sequence[int] = ()
    """Routing keys of the prompt's full blocks (`pagefleet_protocol.kv_events`), where it was tokenized."""
    block_size: int = 0
    """Tokens of each of `blocks`."""
    scope: str = ""
    """`EngineFacts.scope` that `blocks` were hashed for: they say nothing of another engine's cache."""
    token_ids: bytes = b""
    """The prompt packed by `handoff.pack_tokens`; empty: the engine tokenizes."""
    text_digest: str = ""
    """`EngineFacts.text_digest` of the tokenizer that made `token_ids`: only such engines may be handed them."""
    tenant: str = ANONYMOUS
    priority: int = 0
    """Larger is more urgent; below zero is shed first."""
    session: int | None = None
    """Hash of tenant and session; None: the request belongs to no session."""
    draw: int = 99
    """0 to 99, of all requests of a session the same: below the percent of a revision that is tried out, it goes there.
    """
    stream: bool = False
    store: str = ""
    """Of responses: only the engine that has it can answer. Empty: any can."""
    may_split: bool = False
    """Whether another engine may compute its prompt; looked at only where engines have parts."""
