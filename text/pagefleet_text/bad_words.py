"""Bad words as token sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Encoder(Protocol):
    """The part of a tokenizer that spelling needs."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...


def bad_words_token_ids(tokenizer: Encoder, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell each word: at the start of a text, and after a space.

    Spellings that tokenize in another way inside a longer word are not covered, as in other engines.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for spelling in (bare, " " + bare) if bare else (word,):
            token_ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            if token_ids:
                found[token_ids] = None
    return tuple(found)
