import threading
import time

from hypothesis import given
from hypothesis import strategies as st
from pagefleet_text.tokenizer import Tokenizer, without_surrogates

from tests.fakes.small_tokenizers import byte_fallback_backend, byte_level_backend

BYTE_LEVEL = Tokenizer(byte_level_backend(), {})
BYTE_FALLBACK = Tokenizer(byte_fallback_backend(), {})


@given(st.text())
def test_any_text_comes_back_from_a_byte_level_tokenizer(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text), skip_special_tokens=False) == without_surrogates(text)


@given(st.text(alphabet=st.characters(exclude_characters="▁<", exclude_categories=["Cs"])))
def test_any_text_comes_back_from_a_byte_fallback_tokenizer(text: str) -> None:
    assert BYTE_FALLBACK.decode(BYTE_FALLBACK.encode(text)) == text


def test_a_text_is_the_bytes_of_its_tokens(byte_level: Tokenizer) -> None:
    text = "grüße 你好 😀"
    assert b"".join(map(byte_level.token_bytes, byte_level.encode(text))) == text.encode()


def test_part_of_a_character_is_shown_by_its_bytes(byte_fallback: Tokenizer) -> None:
    smile = byte_fallback.encode("😀", add_special_tokens=False)
    assert [byte_fallback.token_text(t) for t in smile[-4:]] == [
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x98",
        "bytes:\\x80",
    ]


def test_an_id_outside_the_vocabulary_stands_for_nothing(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(byte_level.vocab_size + 5) == b""
    assert byte_level.token_bytes(-1) == b""


def test_special_tokens_are_left_out_on_request(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_end|>b")
    assert byte_level.decode(ids) == "ab"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_bos_follows_the_configuration() -> None:
    def encode(wanted: object) -> list[int]:
        settings = {"bos_token": "<s>", **({} if wanted is None else {"add_bos_token": wanted})}
        return Tokenizer(byte_fallback_backend(), settings).encode("x")

    assert encode(True)[0] == 1
    assert encode(False) == encode(None) == encode(True)[1:]


def test_a_lone_surrogate_becomes_a_replacement_character(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("a\ud800b")) == "a\ufffdb"


def test_hopeless_length_is_seen_without_tokenizing(byte_level: Tokenizer) -> None:
    assert byte_level.surely_longer_than("x" * 1_000_000, 2048)
    assert not byte_level.surely_longer_than("x" * 2048, 2048)


def test_a_long_text_lets_other_threads_run(byte_level: Tokenizer) -> None:
    text = "<" * 2**19
    turns = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal turns
        while not done.is_set():
            time.sleep(0.001)
            turns += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    most, deadline = 0, time.monotonic() + 60
    while most < 5 and time.monotonic() < deadline:  # again where the machine itself gave the watcher no turn
        before = turns
        ids = byte_level.encode(text, add_special_tokens=False)
        most = max(most, turns - before)
    done.set()
    watcher.join()
    assert byte_level.decode(ids) == text
    assert most >= 5, "about a hundred; one or two when the interpreter's lock is kept"


def test_a_long_text_has_the_tokens_of_the_short_way(byte_level: Tokenizer) -> None:
    text = "the quick brown fox <|im_end|> é \n" * 300
    assert byte_level.encode(text) == byte_level.backend.encode(text).ids
