"""The bytes that each token id stands for, in the shape that grammars need them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from pagefleet_text.tokenizer import Tokenizer

from pagefleet_engine.grammars.port import Mask
from pagefleet_engine.text.model_files import load_tokenizer

_FORMAT = 1
_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
)


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """One model's tokens; travels between processes and is kept on disk."""

    tokens: list[bytes]
    """One per row of the logits: what a token stands for inside a text; of a special token its spelling; of a row that
    is padding nothing."""
    special_ids: list[int]
    """Tokens that are no text, however they are spelled; the ending ones are among them."""
    ending_ids: list[int]
    """Tokens that end an answer."""

    @property
    def size(self) -> int:
        """Rows of the logits."""
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Words of 32 bits in a mask."""
        return (self.size + 31) // 32

    def row_of(self, token_ids: Sequence[int]) -> Mask:
        """Return the mask that allows these tokens, int32 [num_words]."""
        bits = np.zeros(32 * self.num_words, np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def digest(self) -> bytes:
        """Return the SHA-256 of all of it."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()

    def special_spellings(self) -> dict[str, int]:
        """Return how the special tokens are written -> their ids."""
        return {self.tokens[id_].decode(errors="replace"): id_ for id_ in self.special_ids if self.tokens[id_]}


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Return the vocabulary of a model with `size` rows of logits, which may be more or fewer than the tokenizer's."""
    ending = [id_ for id_ in tokenizer.eos_token_ids if id_ < size]
    special = sorted({id_ for id_ in tokenizer.special_ids if id_ < size} | set(ending))
    return Vocabulary([tokenizer.token_bytes(id_) for id_ in range(size)], special, ending)


class VocabularyFiles(msgspec.Struct, frozen=True):
    """Where a vocabulary comes from."""

    tokenizer_folder: str
    model_folder: str
    size: int
    """Rows of the logits."""
    overrides: str | None = None
    """Of the model's configuration."""

    def load(self) -> Vocabulary:
        """Read the tokenizer; seconds for a large one.

        Raises:
            ModelLoadError: it cannot be read.
        """
        tokenizer = load_tokenizer(Path(self.tokenizer_folder), Path(self.model_folder), self.overrides)
        return vocabulary_of(tokenizer, self.size)

    def digest(self) -> bytes:
        """Return the SHA-256 of all that `load` looks at.

        Raises:
            OSError: a file cannot be read.
        """
        total = hashlib.sha256(f"vocabulary {_FORMAT} {self.size}{self.overrides or ''}".encode())
        for folder in (self.tokenizer_folder, self.model_folder):
            for data in _contents(Path(folder), _FILES):
                total.update(hashlib.sha256(data).digest())
        return total.digest()


def _contents(folder: Path, names: Sequence[str]) -> list[bytes]:
    return [(folder / name).read_bytes() if (folder / name).is_file() else b"" for name in names]
