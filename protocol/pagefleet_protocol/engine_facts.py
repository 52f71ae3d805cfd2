"""What a router asks an engine about itself: GET /internal/v1/facts and, for the tokenizer, GET /internal/v1/text.

Both are data. A tokenizer is read from JSON, a chat template runs in a sandbox; nothing is ever executed or unpickled.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from pagefleet_protocol.kv_handoff import KvRole

FACTS_PATH = "/internal/v1/facts"
TEXT_PATH = "/internal/v1/text"
MAX_TEXT_BYTES = 64 * 1024 * 1024
MAX_DATA_RANKS = 256
"""Of one engine; a router follows each."""
_INCARNATION = re.compile(r"[0-9a-f]{32}")


class EngineFactsError(ValueError):
    """Bytes that are no facts or no text."""


class KvTransferFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine passes K/V to others of its fleet."""

    role: KvRole
    port: int
    """Of its control socket, on the host of its HTTP address."""
    compatibility: str
    """`KvShape.compatibility`, hexadecimal: only equal ones can pair."""
    bytes_per_token: int
    """Of K/V, over all layers."""


class CacheFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One cache of an engine, which has one for each data rank behind its port."""

    incarnation: str
    """As of the engine, and drawn for this rank."""
    num_blocks: int
    kv_events_port: int | None = None
    """See EngineFacts."""
    kv_transfer_port: int | None = None
    """See KvTransferFacts.port."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of an engine. Unknown fields of newer engines are ignored."""

    incarnation: str
    """32 hexadecimal digits, drawn at each start."""
    model: str
    """What clients call it."""
    scope: str
    """`PrefixScope.model` of its block hashes."""
    block_size: int
    """Tokens per block."""
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    """Requests that run at once; more wait."""
    max_num_batched_tokens: int
    """Tokens of one step."""
    vocab_size: int
    prefix_caching: bool = True
    kv_events_port: int | None = None
    """Where events are published, the next port answering for what was missed; None: nowhere."""
    text_digest: str | None = None
    """SHA-256 of what TEXT_PATH answers, hexadecimal; None: it has none."""
    kv_transfer: KvTransferFacts | None = None
    """None: it passes no K/V."""
    response_store: str | None = None
    """12 hexadecimal digits that the ids of its stored responses begin with; None: it stores none."""
    revision: str | None = None
    """Hash of the settings that whoever started it gave it; None: not told."""
    data_ranks: tuple[CacheFacts, ...] = ()
    """Of an engine with several caches, each; empty: it has one. Who does not read this hears no KV events of it, and
    passes K/V from and to the first rank."""

    @property
    def caches(self) -> tuple[CacheFacts, ...]:
        """Its caches, one at least."""
        if self.data_ranks:
            return self.data_ranks
        transfer = self.kv_transfer
        port = None if transfer is None else transfer.port
        one = CacheFacts(
            incarnation=self.incarnation,
            num_blocks=self.num_blocks,
            kv_events_port=self.kv_events_port,
            kv_transfer_port=port,
        )
        return (one,)


class TextData(msgspec.Struct, frozen=True, kw_only=True):
    """All that turns a conversation into token ids."""

    tokenizer: str
    """tokenizer.json."""
    settings: dict[str, Any]
    """tokenizer_config.json."""
    chat_template: str | None = None
    eos_token_ids: tuple[int, ...] = ()


def encode_facts(facts: EngineFacts) -> bytes:
    return msgspec.json.encode(facts)


def decode_facts(data: bytes) -> EngineFacts:
    """Parse facts.

    Raises:
        EngineFactsError: it is something else, or a number is out of its range.
    """
    try:
        facts = msgspec.json.decode(data, type=EngineFacts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFactsError(str(error)[:200]) from None
    caches = facts.caches
    counts = (facts.block_size, facts.max_model_len, facts.max_num_seqs, facts.vocab_size, facts.max_num_batched_tokens)
    if min(*counts, facts.num_blocks, *(one.num_blocks for one in caches)) < 1 or len(caches) > MAX_DATA_RANKS:
        raise EngineFactsError("a number is out of its range")
    if not all(_is_port(port) for one in caches for port in (one.kv_events_port, one.kv_transfer_port)):
        raise EngineFactsError("a port is out of its range")
    if len({one.incarnation for one in caches}) < len(caches):
        raise EngineFactsError("two of its data ranks have one incarnation")
    kv = facts.kv_transfer
    if kv is None:
        return facts
    if not (_is_port(kv.port) and kv.bytes_per_token > 0 and len(kv.compatibility) == 64):
        raise EngineFactsError("a fact of its K/V transfer is out of its range")
    if any(one.kv_transfer_port is None or not _INCARNATION.fullmatch(one.incarnation) for one in caches):
        raise EngineFactsError("an incarnation that passes K/V is not 32 hexadecimal digits with a port")  # others hear
    return facts


def _is_port(port: int | None) -> bool:
    return port is None or 1 <= port <= 65534


def encode_text(text: TextData) -> bytes:
    """Return JSON; the same text gives the same bytes."""
    return msgspec.json.encode(text, order="deterministic")


def text_digest(encoded: bytes) -> str:
    """Return the SHA-256 of encoded text, hexadecimal."""
    return hashlib.sha256(encoded).hexdigest()


def decode_text(data: bytes) -> TextData:
    """Parse text.

    Raises:
        EngineFactsError: it is something else, or too large.
    """
    if len(data) > MAX_TEXT_BYTES:
        raise EngineFactsError(f"{len(data)} bytes are over the limit of {MAX_TEXT_BYTES}")
    try:
        return msgspec.json.decode(data, type=TextData)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFactsError(str(error)[:200]) from None
