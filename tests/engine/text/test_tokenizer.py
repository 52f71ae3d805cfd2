import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.text.bad_words import bad_words_token_ids
from pagefleet_engine.text.tokenizer import Tokenizer, load_tokenizer, read_eos_token_ids, without_surrogates

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


def test_eos_of_every_source_counts_once(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "text_config": {"eos_token_id": 9}}')
    assert read_eos_token_ids(tmp_path) == (7, 5, 9)
    tokenizer = Tokenizer(byte_level_backend(), {"eos_token": "<|im_end|>"}, read_eos_token_ids(tmp_path))
    assert tokenizer.eos_token_ids == (7, 5, 9, 1)


def test_a_lone_surrogate_becomes_a_replacement_character(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("a\ud800b")) == "a\ufffdb"


def test_hopeless_length_is_seen_without_tokenizing(byte_level: Tokenizer) -> None:
    assert byte_level.surely_longer_than("x" * 1_000_000, 2048)
    assert not byte_level.surely_longer_than("x" * 2048, 2048)


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}
    assert tokenizer.eos_token_ids == (1,)


def test_special_tokens_of_the_older_file_are_known(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|endoftext|>"}')
    assert load_tokenizer(tmp_path).bos_token_id == 2


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "is not a JSON object"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json cannot be read"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(tmp_path: Path, files: dict[str, str], says: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=says) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_decoder_of_another_family_is_refused(tmp_path: Path) -> None:
    spec = json.loads(byte_level_backend().to_str())
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelLoadError, match="WordPiece"):
        load_tokenizer(tmp_path)


def test_bad_words_are_spelled_at_the_start_and_after_a_space(byte_level: Tokenizer) -> None:
    spelled = bad_words_token_ids(byte_level, ["fox", " fox", "fox"])
    assert {byte_level.decode(ids) for ids in spelled} == {"fox", " fox"}
    assert len(spelled) == 2


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
    before = turns
    ids = byte_level.encode(text, add_special_tokens=False)
    meanwhile = turns - before
    done.set()
    watcher.join()
    assert byte_level.decode(ids) == text
    assert meanwhile >= 5, "about a hundred; one or two when the interpreter's lock is kept"


def test_a_long_text_has_the_tokens_of_the_short_way(byte_level: Tokenizer) -> None:
    text = "the quick brown fox <|im_end|> é \n" * 300
    assert byte_level.encode(text) == byte_level.backend.encode(text).ids


def test_what_ends_a_text_is_the_model_s_to_say(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load_tokenizer(tmp_path, model).eos_token_ids == (3, 4, 1)
    assert load_tokenizer(tmp_path).eos_token_ids == (1,)
