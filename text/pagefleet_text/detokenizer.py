"""Text from tokens as they come, equal to decoding all of them at once.

A token may end inside a character. The bytes of an unfinished character wait for the next token, and become U+FFFD
only when the text ends or when they can no longer be completed. Each token costs its own bytes, whatever came before.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pagefleet_text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one output.

    Args:
        tokenizer: of the model.
        skip_special_tokens: leave special tokens out.
        continues: the text follows a prompt, so that a first word keeps its space. False: as `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, continues: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        rule = tokenizer.bytes_rule
        self._bare = rule.bare_first and not continues
        self._leading = 0 if continues else rule.leading_spaces

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the characters that these tokens complete."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        if self._bare or self._leading:
            data = b"".join(self._at_start(token_id) for token_id in token_ids if token_id not in skipped)
        else:
            data = b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped])
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Return what is left: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _at_start(self, token_id: int) -> bytes:
        data = self._tokenizer.token_bytes(token_id)
        if self._bare:
            data, self._bare = data.replace(b" ", b""), False
        while self._leading and data.startswith(b" "):
            data = data[1:]
            self._leading -= 1
        if data:
            self._leading = 0
        return data
