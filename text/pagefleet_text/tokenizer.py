"""The model's tokenizer: text to token ids, and token ids to bytes.

A thin layer over the tokenizers library; transformers is not needed, and importing it costs seconds at start-up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from pagefleet_text.token_bytes import token_bytes

_LONG_TEXT = 4096
"""Characters from which on a text is encoded without the interpreter's lock: shorter ones take a few milliseconds."""

_MOST_CHARS_PER_TOKEN = 64
"""On average over a prompt."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

SETTINGS = (*_SPECIAL_NAMES, "add_bos_token")
"""Fields of tokenizer_config.json that are read here."""


class Tokenizer:
    """One model's tokenizer. Its methods may be called from several threads at once.

    Attributes:
        settings: tokenizer_config.json as read.
        special_tokens: `bos_token`, `eos_token`, ... -> spelling, as chat templates use them.
        eos_token_ids: every token that ends a text, from the tokenizer, config.json and generation_config.json.
        special_ids: tokens that `skip_special_tokens` leaves out.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], eos_token_ids: Iterable[int] = ()
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.settings = settings
        self.special_tokens = {name: text for name in _SPECIAL_NAMES if (text := _spelling(settings.get(name)))}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._special_spellings = tuple(token.content for token in added.values() if token.special and token.content)
        self._vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        own_eos = self._id_of("eos_token")
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if own_eos is None else [own_eos])]))
        decoder = backend.decoder
        self.bytes_rule = token_bytes(None if decoder is None else json.loads(decoder.__getstate__()))
        self._bytes: dict[int, bytes] = {}
        self._longest: int | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows; the model's embedding may have more rows."""
        return self._vocab_size

    @property
    def special_spellings(self) -> tuple[str, ...]:
        """How the special tokens are written."""
        return self._special_spellings

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's object, for what this class does not offer."""
        return self._backend

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens spelled in it are special; lone surrogates become U+FFFD.

        For text from somebody who must not write special tokens, see `chat_prompt`.
        """
        ids = encode_text(self._backend, without_surrogates(text), add_special_tokens)
        return self._settle_bos(ids) if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence. Bytes that are no UTF-8 become U+FFFD."""
        data = bytearray()
        bare, leading = self.bytes_rule.bare_first, self.bytes_rule.leading_spaces
        for token_id in token_ids:
            if skip_special_tokens and token_id in self.special_ids:
                continue
            piece = self.token_bytes(token_id)
            data += piece.replace(b" ", b"") if bare else piece
            bare = False
        while leading and data.startswith(b" "):
            del data[0]
            leading -= 1
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for inside a text; none for an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < self._vocab_size:  # not remembered: there is no end of such ids
                return b""
            token = self._backend.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else self.bytes_rule.of(token)
        return known

    def token_text(self, token_id: int) -> str:
        r"""Return one token as text for log-probabilities; part of a character as `bytes:\xe2\x98`, losing nothing."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def surely_longer_than(self, text: str, num_tokens: int) -> bool:
        """Return True when `text` cannot fit `num_tokens` tokens, without tokenizing it.

        Tells a hopeless megabyte apart at once. A normalizer may shorten text, hence the margin of four. Where the
        vocabulary has very long tokens (runs of blanks, mostly), more than 64 characters per token are too many too.
        """
        return len(text) > num_tokens * min(4 * self._longest_token(), _MOST_CHARS_PER_TOKEN)

    def _longest_token(self) -> int:
        if self._longest is None:
            self._longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        return self._longest

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _settle_bos(self, ids: list[int]) -> list[int]:
        """Follow `add_bos_token` where tokenizer_config.json states it, whatever the post-processor did."""
        wanted, bos = self.settings.get("add_bos_token"), self.bos_token_id
        if bos is None or not isinstance(wanted, bool):
            return ids
        present = bool(ids) and ids[0] == bos
        if wanted and not present:
            return [bos, *ids]
        if not wanted and present and self._backend.encode("", add_special_tokens=True).ids[:1] == [bos]:
            return ids[1:]
        return ids


def encode_text(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text of any length, letting other threads run meanwhile.

    The library's `encode` keeps the interpreter's lock, for seconds per megabyte; its batch form gives it back, and is
    several times as fast because it counts no offsets.
    """
    if len(text) < _LONG_TEXT:
        short: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        return short
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def without_surrogates(text: str) -> str:
    """Return `text` with U+FFFD for each lone surrogate, which no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _spelling(value: object) -> str | None:
    """Special tokens are written as a string or as {"content": ...}."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
