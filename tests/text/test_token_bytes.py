from typing import Any

import pytest
from pagefleet_text.errors import TextDamaged
from pagefleet_text.token_bytes import token_bytes
from tokenizers import Tokenizer, models, pre_tokenizers


def sentencepiece(*more: dict[str, Any]) -> dict[str, Any]:
    parts = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {"type": "Sequence", "decoders": [*parts, *more]}


def test_the_byte_level_alphabet_is_the_library_s() -> None:
    spell = token_bytes({"type": "ByteLevel"}).of
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(spell(char) for char in alphabet) == [bytes([byte]) for byte in range(256)]
    assert spell("Ġthe") == b" the"


def test_an_added_token_outside_the_alphabet_keeps_its_spelling() -> None:
    assert token_bytes({"type": "ByteLevel"}).of("<｜end▁of▁text｜>") == "<｜end▁of▁text｜>".encode()


def test_sentencepiece_spells_spaces_and_bytes() -> None:
    rule = token_bytes(sentencepiece({"type": "Strip", "content": " ", "start": 1, "stop": 0}))
    assert rule.of("▁the") == b" the"
    assert rule.of("<0xE4>") == b"\xe4"
    assert rule.of("<0xE4>x") == b"<0xE4>x"
    assert rule.leading_spaces == 1


def test_without_strip_a_leading_space_stays() -> None:
    assert token_bytes(sentencepiece()).leading_spaces == 0


def test_metaspace_drops_the_marks_of_the_first_token_only_where_it_adds_one() -> None:
    assert token_bytes({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}).bare_first
    rule = token_bytes({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"})
    assert not rule.bare_first
    assert rule.of("▁a") == b" a"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece"},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}, {"type": "Fuse"}]},
        sentencepiece({"type": "CTC"}),
    ],
)
def test_unknown_decoders_are_refused(decoder: dict[str, Any]) -> None:
    with pytest.raises(TextDamaged, match="not supported"):
        token_bytes(decoder)


def test_without_a_decoder_tokens_stand_apart_as_the_library_writes_them() -> None:
    library = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    rule = token_bytes(None)
    text = b"".join(rule.of(token) for token in ("two", "one"))[rule.leading_spaces :].decode()
    assert text == library.decode([1, 0]) == "two one"
