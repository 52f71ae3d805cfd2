import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_text.detokenizer import Detokenizer
from pagefleet_text.tokenizer import Tokenizer

from tests.fakes.small_tokenizers import byte_fallback_backend, byte_level_backend

TOKENIZERS = {
    "byte level": Tokenizer(byte_level_backend(), {}),
    "byte fallback": Tokenizer(byte_fallback_backend(), {}),
}
each_family = pytest.mark.parametrize("family", TOKENIZERS)


@st.composite
def token_ids_in_pieces(draw: st.DrawFn) -> list[list[int]]:
    piece = st.lists(st.integers(0, 400), max_size=4)
    return draw(st.lists(piece, max_size=12))


@each_family
@given(pieces=token_ids_in_pieces(), skip=st.booleans())
def test_pieces_give_what_the_whole_gives(family: str, pieces: list[list[int]], skip: bool) -> None:
    tokenizer = TOKENIZERS[family]
    detokenizer = Detokenizer(tokenizer, skip, continues=False)
    text = "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.finish()
    assert text == tokenizer.decode([token for piece in pieces for token in piece], skip)


@given(pieces=token_ids_in_pieces(), skip=st.booleans())
def test_byte_level_text_is_the_library_s_for_any_tokens(pieces: list[list[int]], skip: bool) -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = [token for piece in pieces for token in piece if token < tokenizer.vocab_size]
    assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@each_family
@given(text=st.text(max_size=40))
def test_text_is_the_library_s_for_tokens_that_are_text(family: str, text: str) -> None:
    tokenizer = TOKENIZERS[family]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


@each_family
@given(text=st.text(min_size=1, max_size=30))
def test_no_piece_ends_inside_a_character(family: str, text: str) -> None:
    tokenizer = TOKENIZERS[family]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = codecs.decode(b"".join(map(tokenizer.token_bytes, ids)), "utf-8")
    shown = ""
    for token in ids:
        shown += detokenizer.push([token])
        assert expected.startswith(shown)
    assert shown == expected
    assert detokenizer.finish() == ""


def test_an_emoji_waits_for_its_last_byte(byte_fallback: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_fallback)
    smile = byte_fallback.encode("😀", add_special_tokens=False)[-4:]
    assert [detokenizer.push([token]) for token in smile] == ["", "", "", "😀"]


def test_an_unfinished_character_shows_at_the_end_only(byte_fallback: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_fallback)
    first_half = byte_fallback.encode("😀", add_special_tokens=False)[-4:-2]
    assert detokenizer.push(first_half) == ""
    assert detokenizer.finish() == "\ufffd"


def test_an_output_keeps_the_space_of_its_first_word_and_a_text_does_not(byte_fallback: Tokenizer) -> None:
    the = byte_fallback.encode("the", add_special_tokens=False)
    assert Detokenizer(byte_fallback).push(the) == " the"
    assert Detokenizer(byte_fallback, continues=False).push(the) == "the" == byte_fallback.decode(the)
