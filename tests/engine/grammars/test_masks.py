"""Masks against brute force: over small vocabularies every token is tried against every word of the language."""

import re
from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from pagefleet_engine.errors import GrammarFailed, InvalidRequest
from pagefleet_engine.grammars.compiler import GrammarCompiler
from pagefleet_engine.grammars.guidance_backend import GuidanceBackend
from pagefleet_engine.grammars.port import GrammarBackend, Matcher
from pagefleet_engine.grammars.vocabulary import Vocabulary, VocabularyFiles
from pagefleet_engine.grammars.xgrammar_backend import XgrammarBackend
from pagefleet_protocol.structured_outputs import StructuredOutputsParams

from tests.example_counts import examples
from tests.fakes.grammars import BACKENDS, allowed, backend_of, byte_vocabulary, compiled

WORDS = st.lists(st.text('ab"é\n', min_size=1, max_size=5), min_size=1, max_size=6, unique=True)
VOCABULARY = byte_vocabulary([b"ab", b"aa", b"ba", b"bab", b'a"', b'"\n', "é".encode(), b"\xa9a", b"aab"], padding=45)


def expected(words: set[bytes], prefix: bytes, vocabulary: Vocabulary) -> set[int]:
    """What may come after `prefix`, found by trying every token against every word."""
    special = set(vocabulary.special_ids)
    found = {
        id_
        for id_, token in enumerate(vocabulary.tokens)
        if token and id_ not in special and any(word.startswith(prefix + token) for word in words)
    }
    return found | (set(vocabulary.ending_ids) if prefix in words else set())


def follow(matcher: Matcher, words: set[bytes], prefix: bytes, vocabulary: Vocabulary) -> None:
    """Look at the mask in every state of the language: each is gone into by a token, and left by going back."""
    tokens = expected(words, prefix, vocabulary)
    assert allowed(matcher, vocabulary) == tokens, prefix
    assert matcher.is_complete == (prefix in words)
    assert matcher.is_finished == (tokens <= set(vocabulary.ending_ids))
    for forbidden in set(range(vocabulary.size)) - tokens:
        if forbidden % 37 == 0 or forbidden > 255:
            assert not matcher.accept(forbidden)
    for token in sorted(tokens):
        assert matcher.accept(token)
        if token in vocabulary.ending_ids:
            assert matcher.is_finished
            assert not matcher.accept(token)
        else:
            follow(matcher, words, prefix + vocabulary.tokens[token], vocabulary)
        matcher.rollback(1)
    assert allowed(matcher, vocabulary) == tokens, prefix


@pytest.mark.parametrize("name", BACKENDS)
@given(words=WORDS)
@settings(max_examples=examples(20), deadline=None)
def test_a_choice_allows_what_a_word_of_it_goes_on_with(name: str, words: list[str]) -> None:
    grammar = compiled(backend_of(name, VOCABULARY), StructuredOutputsParams(choice=tuple(words)))
    follow(grammar.matcher(), {word.encode() for word in words}, b"", VOCABULARY)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "pattern",
    ["(a|bb){1,3}", "a*b{2}", "^a[^a]?b$", "(ab|a)(b|bb)?", "[ab]{0,3}", "a+?b|ba+", "(a|b)*aa", r"a\.b|\"b?\""],
)
def test_a_regex_allows_what_a_text_that_matches_goes_on_with(name: str, pattern: str) -> None:
    letters = 'ab."' if set('."') & set(pattern) else "ab"
    texts = {"".join(word) for n in range(7 if len(letters) > 2 else 10) for word in product(letters, repeat=n)}
    texts = {text for text in texts if re.fullmatch(pattern, text)}
    words = {text.encode() for text in texts}
    alphabet = byte_vocabulary([b"ab", b"aa", b"ba", b"bab", b'a"'])
    matcher = compiled(backend_of(name, alphabet), StructuredOutputsParams(regex=pattern)).matcher()
    todo = [b""]
    for prefix in todo:  # the words are all there are up to a length, so masks are right some letters before it
        copy = compiled_once(matcher, prefix)
        seen = {
            id_
            for id_ in allowed(copy, alphabet)
            if set(alphabet.tokens[id_]) <= set(letters.encode()) or id_ in alphabet.special_ids
        }
        assert seen == expected(words, prefix, alphabet)
        copy.rollback(len(prefix))
        todo += [prefix + bytes([id_]) for id_ in seen if id_ < 256 and len(prefix) < 4]


def compiled_once(matcher: Matcher, prefix: bytes) -> Matcher:
    """Take the prefix byte by byte."""
    for byte in prefix:
        assert matcher.accept(byte)
    return matcher


@pytest.mark.parametrize("name", BACKENDS)
def test_filling_many_at_once_gives_what_each_gives(name: str) -> None:
    backend = backend_of(name, VOCABULARY)
    grammars = [compiled(backend, StructuredOutputsParams(choice=(word, "ab"))) for word in ("aab", "b", 'a"')]
    matchers = [grammar.matcher() for grammar in grammars for _ in range(5)]
    for number, matcher in enumerate(matchers):
        if number % 2:
            assert matcher.accept(sorted(allowed(matcher, VOCABULARY))[0])
    assert matchers[-1].accept(ord("a"))
    for matcher in matchers[:1]:
        assert matcher.accept(ord("a"))
        assert matcher.accept(ord("b"))
        assert matcher.accept(VOCABULARY.ending_ids[1])
    masks = np.full((len(matchers) + 2, VOCABULARY.num_words), 0x5A5A5A5A, np.int32)
    backend.fill([(matcher, row) for row, matcher in enumerate(matchers)], masks)
    for matcher, mask in zip(matchers, masks, strict=False):
        alone = np.zeros_like(mask)
        matcher.fill(alone)
        assert np.array_equal(alone, mask)
    assert (masks[len(matchers) :] == 0x5A5A5A5A).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_grammar_that_takes_ever_longer_fails_alone(name: str) -> None:
    readings = iter([0.0, 0.01, 0.0, 1.0, 0.0, 0.01])
    kind = GuidanceBackend if name == "guidance" else XgrammarBackend
    made: GrammarBackend = kind(VOCABULARY, 1, lambda: next(readings))
    grammar = compiled(made, StructuredOutputsParams(regex="[ab]*"))
    slow, other = grammar.matcher(), grammar.matcher()
    assert slow.accept(ord("a"))
    with pytest.raises(GrammarFailed, match="too ambiguous"):
        slow.accept(ord("b"))
    assert isinstance(slow.failure, GrammarFailed)
    with pytest.raises(GrammarFailed):
        slow.fill(np.zeros(VOCABULARY.num_words, np.int32))
    assert other.accept(ord("b"))
    assert other.failure is None


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_mask_that_takes_too_long_fails_alone(name: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0.0, 1.0, 0.0, 0.01])
    kind = GuidanceBackend if name == "guidance" else XgrammarBackend
    made: GrammarBackend = kind(VOCABULARY, 1, lambda: next(readings))
    grammar = compiled(made, StructuredOutputsParams(regex="[ab]*"))
    rows = [(grammar.matcher(), 0), (grammar.matcher(), 1)]
    source = GrammarCompiler(VocabularyFiles("", "", VOCABULARY.size), "auto", None)
    masks = np.zeros((2, VOCABULARY.num_words), np.int32)
    if fails:  # which of the rows did, the library does not say
        monkeypatch.setattr(made, "fill", lambda rows, masks: 1 / 0)
    else:
        monkeypatch.setattr("pagefleet_engine.grammars.compiler.MAX_FILL_S", -1.0)
        assert source.fill(rows, masks) == {}
        masks[:] = 0
    failures = source.fill(rows, masks)
    assert list(failures) == [0]
    assert isinstance(failures[0], GrammarFailed)
    alone = np.zeros_like(masks[1])
    compiled(backend_of(name, VOCABULARY), StructuredOutputsParams(regex="[ab]*")).matcher().fill(alone)
    assert np.array_equal(masks[1], alone)
    source.close()


def object_of(num_properties: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(num_properties)}}


def test_an_object_of_many_properties_is_held() -> None:
    grammar = compiled(backend_of("guidance", VOCABULARY), StructuredOutputsParams(json=object_of(600)))
    matcher = grammar.matcher()
    for byte in b'{"p0":1,"p599":2}':
        assert byte in allowed(matcher, VOCABULARY)
        assert matcher.accept(byte)
    assert matcher.is_complete


@pytest.mark.parametrize("place", ["#", "#/properties/inner"])
def test_an_object_of_too_many_properties_is_refused_before_it_is_begun(place: str) -> None:
    schema = object_of(3000)
    if place != "#":
        schema = {"type": "object", "properties": {"inner": schema}, "required": ["inner"]}
    with pytest.raises(InvalidRequest, match=f"Invalid schema at '{place}': .*items"):
        compiled(backend_of("guidance", VOCABULARY), StructuredOutputsParams(json=schema))
