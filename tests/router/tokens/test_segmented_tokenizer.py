"""Prompts that are cut and remembered in parts give the ids that whole ones give, for every kind of tokenizer."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pagefleet_router.tokens.segmented_tokenizer import SegmentCache, SegmentedTokenizer, cut_tokens, split
from pagefleet_text.tokenizer import Tokenizer
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.example_counts import examples
from tests.fakes.small_tokenizers import byte_fallback_backend, byte_level_backend

TEMPLATE = "<|im_start|> <|im_end|> <think> <s> </s> <odd> <|im_start|>x [a]"


def prepends_at_the_start() -> Backend:
    """Metaspace before the first word of a text alone."""
    backend = byte_fallback_backend()
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return backend


def takes_space_along() -> Backend:
    """A tokenizer with tokens that cannot be cut at beside some that can."""
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken("<odd>", lstrip=True, rstrip=True, special=True), AddedToken("aba")])
    backend.normalizer = normalizers.Lowercase()
    return backend


BACKENDS = {
    made.__name__: made()
    for made in (byte_level_backend, byte_fallback_backend, prepends_at_the_start, takes_space_along)
}
PIECES = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<odd>", "<think>", "<|im", "_start|>", "<|endoftext|>", "aba", "ab",
     " ", "  ", "\n", "\n\n", "the", " the", "The x", "你好", "é", "e\u0301", "'s", "'", "12", "3", "\u0301", "\ud800",
     "def f(x):\n    return x"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=30).map("".join)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=examples(120), deadline=None)
@given(start=TEXTS, ends=st.lists(TEXTS, min_size=1, max_size=3), min_chars=st.integers(1, 24))
def test_equals_the_plain_tokenizer(name: str, start: str, ends: list[str], min_chars: int) -> None:
    plain, cache = Tokenizer(BACKENDS[name], {}), SegmentCache(10**6, min_chars)
    cutting = SegmentedTokenizer(BACKENDS[name], {}, template=TEMPLATE, cache=cache, name="t")
    for end in ends:  # a conversation that goes on in several ways
        for text in (start + end, start):
            assert cutting.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False)
            assert cutting.encode(text) == plain.encode(text)


def test_cut_where_it_is_safe() -> None:
    assert set(cut_tokens(byte_level_backend(), TEMPLATE)) == {"<|im_start|>", "<|im_end|>"}
    assert set(cut_tokens(byte_fallback_backend(), TEMPLATE)) == {"<s>", "</s>"}
    assert "<odd>" not in cut_tokens(takes_space_along(), TEMPLATE)
    assert cut_tokens(byte_level_backend(), "no token") == ()


@pytest.mark.parametrize(
    "other",
    [
        AddedToken("<|im_start|>user", special=True),  # longer
        AddedToken("x<|im", special=True),  # ends as it begins
        AddedToken("|>!", special=True),  # begins as it ends
    ],
)
def test_not_cut_where_another_token_overlaps(other: AddedToken) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens([other])
    assert "<|im_start|>" not in cut_tokens(backend, TEMPLATE)


def test_not_cut_at_all_where_a_token_looks_at_its_neighbours() -> None:
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken("word", single_word=True, special=True)])
    assert cut_tokens(backend, TEMPLATE) == ()
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken("[a][a]", special=True), AddedToken("[a]", special=True)])
    assert "[a]" not in cut_tokens(backend, TEMPLATE)
    backend.model.dropout = 0.1
    assert cut_tokens(backend, TEMPLATE) == ()


@given(st.text("ab|", max_size=60), st.text("ab|", max_size=20), st.integers(1, 9))
def test_a_text_that_grows_keeps_its_parts(start: str, end: str, min_chars: int) -> None:
    parts, longer = list(split(start, "|", min_chars)), list(split(start + end, "|", min_chars))
    assert "".join(parts) == start
    assert longer[: len(parts) - 1] == parts[:-1]
    assert all(len(part) >= min_chars for part in parts[:-1])
    assert all(part.startswith("|") for part in parts[1:])


def turns(count: int) -> str:
    return "".join(f"<|im_start|>user\nturn {turn} of the quick brown fox<|im_end|>\n" for turn in range(count))


def test_only_what_is_new_is_tokenized() -> None:
    cache = SegmentCache(10**6, min_chars=40)
    tokenizer = SegmentedTokenizer(byte_level_backend(), {}, template=TEMPLATE, cache=cache, name="t")
    tokenizer.encode(turns(10), add_special_tokens=False)
    assert cache.num_hits == 0
    tokenizer.encode(turns(11), add_special_tokens=False)
    assert cache.num_hits == len(list(split(turns(10), ("<|im_start|>", "<|im_end|>"), 40))) - 1
    with tokenizer.working_for("another tenant"):
        before = cache.num_hits
        tokenizer.encode(turns(10), add_special_tokens=False)
        assert cache.num_hits == before, "one tenant's texts are not another's"


def test_the_cache_is_bounded_and_forgets_the_oldest() -> None:
    cache = SegmentCache(2000)
    keys = [SegmentCache.key(b"o", str(number)) for number in range(10)]
    assert len(set(keys)) == 10
    assert SegmentCache.key(b"p", "0") != keys[0]
    for key in keys[:5]:
        cache.put(key, bytes(200))
        cache.put(key, bytes(200))
        assert cache.get(keys[0]) == bytes(200)
    cache.put(keys[5], bytes(200))
    assert [cache.get(key) is not None for key in keys[:6]] == [True, False, True, True, True, True]
    assert cache.num_bytes == 2000
    cache.put(keys[6], bytes(1000))
    assert cache.get(keys[6]) is None, "one text does not push out all others"
