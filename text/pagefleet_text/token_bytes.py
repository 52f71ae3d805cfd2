"""From a token's spelling in the vocabulary to the bytes it stands for.

Covers the two families of decoder-only models: byte-level BPE (GPT-2's alphabet of printable stand-ins, in Llama 3 and
Qwen) and SentencePiece with byte fallback (`▁` for a space, `<0x0A>` for a byte, in Llama 2 and Mistral). A token then
always means the same bytes, which is what makes incremental decoding exact; only the start of a text is special. A
tokenizer without a decoder writes its tokens with a space between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagefleet_text.errors import TextDamaged

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """How one tokenizer spells bytes.

    Attributes:
        of: a token's spelling -> its bytes, anywhere but at the start of a text.
        leading_spaces: spaces that the encoder puts before a text and that decoding takes away again.
        bare_first: the first token loses every space mark (the `Metaspace` decoder's rule).
    """

    of: Callable[[str], bytes]
    leading_spaces: int = 0
    bare_first: bool = False


def token_bytes(decoder: Mapping[str, Any] | None) -> TokenBytes:
    """Read the `decoder` section of a tokenizer.json.

    Raises:
        TextDamaged: the decoder is of another family.
    """
    if decoder is None:
        return TokenBytes(lambda token: f" {token}".encode(), leading_spaces=1)
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return TokenBytes(_byte_level)
    if kind == "Metaspace":
        return _metaspace(decoder)
    if kind == "Sequence":
        parts: Sequence[Mapping[str, Any]] = decoder.get("decoders") or ()
        return token_bytes(parts[0]) if len(parts) == 1 else _sequence(parts)
    raise TextDamaged(
        f"tokenizer.json has the decoder {kind}, which is not supported: "
        "use a byte-level BPE or SentencePiece (byte fallback) tokenizer"
    )


def _metaspace(decoder: Mapping[str, Any]) -> TokenBytes:
    mark = str(decoder.get("replacement", "▁"))
    never = decoder.get("prepend_scheme") == "never" or decoder.get("add_prefix_space") is False
    return TokenBytes(lambda token: token.replace(mark, " ").encode(), bare_first=not never)


def _sequence(parts: Sequence[Mapping[str, Any]]) -> TokenBytes:
    replacements: list[tuple[str, str]] = []
    byte_fallback = byte_level = fused = False
    leading = 0
    for part in parts:
        kind, pattern = part.get("type"), part.get("pattern")
        if kind == "Replace" and isinstance(pattern, Mapping) and "String" in pattern and not fused:
            replacements.append((str(pattern["String"]), str(part.get("content", ""))))
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "ByteLevel":
            byte_level = fused = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and part.get("content") == " " and not part.get("stop"):
            leading = int(part.get("start", 0))
        else:
            raise TextDamaged(f"tokenizer.json has the decoder step {kind}, which is not supported in this place")
    spell = _byte_level if byte_level else str.encode
    return TokenBytes(_Spelling(tuple(replacements), byte_fallback, spell), leading)


@dataclass(frozen=True, slots=True)
class _Spelling:
    """A token's bytes after literal replacements, with byte tokens where the tokenizer has them."""

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    spell: Callable[[str], bytes]

    def __call__(self, token: str) -> bytes:
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return self.spell(token)


def _alphabet() -> dict[str, int]:
    """Map GPT-2's printable characters to bytes: printable Latin-1 stands for itself, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token keeps its own spelling
        return token.encode()
