"""Tokenizers of both families, from metadata as converters write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.gguf.file import GgufModel
from pagefleet_engine.gguf.tokenizer import tokenizer_files
from pagefleet_text.tokenizer import Tokenizer

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_WORDS = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "▁h", "w"]
_SCORES = [-50.0, *[-60.0] * 4, -3.0, -2.0, -1.5, -1.0, -0.5, -9.0, -60.0]
SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", *_BYTES, *_WORDS, "<turn>"],
    "token_type": [2, 3, 3, *[6] * 256, *[1] * len(_WORDS), 4],
    "scores": [0.0, 0.0, 0.0, *[0.0] * 256, *_SCORES, 0.0],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def model(**metadata: Any) -> GgufModel:
    """Of lists that the reader would give."""
    for name in ("token_type", "scores"):
        if name in metadata:
            metadata[name] = np.array(metadata[name]).data
    return GgufModel((Path("model.gguf"),), {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, {})


def loaded(**metadata: Any) -> Tokenizer:
    files = {name: json.loads(content) for name, content in tokenizer_files(model(**metadata)).items()}
    backend = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    return Tokenizer(backend, files["tokenizer_config.json"], files["generation_config.json"]["eos_token_id"])


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = loaded(**SENTENCEPIECE)
    assert [tokenizer.backend.id_to_token(id_) for id_ in tokenizer.encode("hello helé")] == [
        *("<s>", "▁hello", "▁", "he", "l", "<0xC3>", "<0xA9>")
    ]
    assert tokenizer.decode(tokenizer.encode("hello helé")) == "hello helé"
    assert tokenizer.encode("hello", add_special_tokens=False) == [tokenizer.backend.token_to_id("▁hello")]
    assert tokenizer.special_ids == {1, 2}
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.backend.token_to_id("<turn>") in tokenizer.encode("hello<turn>hello")


def test_no_space_and_no_beginning_where_the_file_says_so() -> None:
    tokenizer = loaded(**SENTENCEPIECE, add_space_prefix=False, add_bos_token=False)
    assert [tokenizer.backend.id_to_token(id_) for id_ in tokenizer.encode("hello")] == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["He", "'LL", " pay", " ", "123", "45", "!!\n", " ", " ok"]),
        ("qwen2", ["He", "'LL", " pay", " ", "1", "2", "3", "4", "5", "!!\n", " ", " ok"]),
        ("gpt-2", ["He", "'", "LL", " pay", " 12345", "!!", "\n ", " ok"]),
        ("smollm", ["He", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "!!", "\n ", " ok"]),
        ("tekken", ["He", "'LL", " pay", " ", "1", "2", "3", "4", "5", "!!\n", " ", " ok"]),
        ("gpt-4o", ["He'LL", " pay", " ", "123", "45", "!!\n", " ", " ok"]),
        ("minimax-m2", ["He'LL", " pay", " ", "123", "45", "!!\n", " ", " ok"]),
        ("seed-coder", ["He", "'LL", " pay", " ", "1", "2", "3", "4", "5", "!!", "\n", " ", " ok"]),
        ("kimi-k2", ["He'LL", " pay", " ", "123", "45", "!!\n", " ", " ok"]),
        ("deepseek-llm", ["He", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "!!", "\n", " ", " ok"]),
        ("deepseek-coder", ["He", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "!!", "\n", " ", " ok"]),
        ("deepseek-v3", ["He", "'LL", " pay", " ", "123", "45", "!!\n", " ", " ok"]),
        ("falcon", ["He", "'", "LL", " pay", " ", "123", "45", "!!", "\n ", " ok"]),
        ("bloom", ["He'LL", " pay", " 12345", "!!\n ", " ok"]),
    ],
)
def test_text_is_cut_as_the_name_says(pre: str, pieces: list[str]) -> None:
    files = tokenizer_files(model(model="gpt2", pre=pre, tokens=["a", "b", "ab"], merges=["a b"]))
    before = tokenizers.Tokenizer.from_str(files["tokenizer.json"]).pre_tokenizer
    cut = [
        piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in before.pre_tokenize_str("He'LL pay 12345!!\n  ok")
    ]
    assert cut == pieces


def test_ends_of_texts_and_beginnings() -> None:
    tokens = ["a", "<|endoftext|>", "<|im_end|>", "<|eot_id|>"]
    tokenizer = loaded(
        model="gpt2", pre="llama-bpe", tokens=tokens, token_type=[1, 3, 3, 1], merges=[], bos_token_id=1, eos_token_id=2
    )
    assert tokenizer.eos_token_ids == (2, 1)  # what is no control token ends nothing
    assert tokenizer.encode("a") == [1, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "t5"}, "of the kind 't5'"),
        ({"tokens": None}, "has no list of tokens"),
        ({"tokens": []}, "has 0 tokens"),
        ({"token_type": [1]}, "as many types"),
        ({"tokens": ["a", "a", "b"]}, "there twice"),
        ({"pre": "novel"}, "cuts text ('novel') is not known"),
        ({"merges": ["a c"]}, "the merge 'a c'"),
        ({"merges": ["a"]}, "the merge 'a'"),
        ({"model": "llama"}, "no scores"),
    ],
)
def test_what_cannot_be_is_one_line(change: dict[str, Any], words: str) -> None:
    sound = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    with pytest.raises(ModelLoadError) as error:
        tokenizer_files(model(**sound | change))
    assert words in str(error.value)
    assert "--tokenizer" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_without_a_tokenizer_has_none() -> None:
    assert tokenizer_files(model()) == tokenizer_files(model(model="none")) == {}
