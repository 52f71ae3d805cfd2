"""The committed tokenizer: every text survives it, the chat template is what was trained, and it fits the data."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.builtin import builtin_model_path
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.example_counts import examples
from tiny.dataset import Knowledge
from tiny.tokenizer import END_OF_TEXT, END_OF_TURN, START_OF_TURN, VOCABULARY, train_tokenizer

TOKENIZER = AutoTokenizer.from_pretrained(builtin_model_path("tiny"))


@settings(max_examples=examples(200), deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_text_decodes_to_itself(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00",
        " leading",
        "trailing ",
        "\r\n\t",
        "🙂👩‍👩‍👧",
        "a<|im_end|>b",
        "<|im_start|",
        "don 't , .",
        "é e\u0301",
        "日本語",
    ],
)
def test_awkward_text_decodes_to_itself(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_encoding_adds_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.encode("Hi") == tokenizer.encode("Hi", add_special_tokens=False)


def test_special_tokens_have_fixed_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids([END_OF_TEXT, START_OF_TURN, END_OF_TURN]) == [0, 1, 2]
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == (END_OF_TEXT, END_OF_TURN, None)
    assert tokenizer.decode([1, *tokenizer.encode("Hi"), 2], skip_special_tokens=True) == "Hi"
    assert len(tokenizer) == VOCABULARY


def test_chat_template_is_golden(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  What is a pod?\n"},
        {"role": "assistant", "content": "A group."},
        {"role": "user", "content": "Why?"},
    ]
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is a pod?<|im_end|>\n"
        "<|im_start|>assistant\nA group.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == rendered
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == rendered + "<|im_start|>assistant\n"


def test_an_empty_content_renders(tokenizer: PreTrainedTokenizerFast) -> None:
    for content in ("", None):
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        assert text == "<|im_start|>user\n<|im_end|>\n"


def test_roles_are_cheap(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer.encode("<|im_start|>assistant\n")) == 3


def test_training_it_again_gives_the_committed_one(knowledge: Knowledge, tokenizer: PreTrainedTokenizerFast) -> None:
    again = json.loads(train_tokenizer(knowledge).backend_tokenizer.to_str())
    committed = json.loads(tokenizer.backend_tokenizer.to_str())
    assert again["model"] == committed["model"], "the data has changed: run make tiny"
