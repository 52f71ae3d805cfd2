"""Training documents: what counts in them, that they are what the chat template renders, and that seeds decide."""

import math

import pytest
from transformers import PreTrainedTokenizerFast

from tiny.dataset import Knowledge, Turn
from tiny.documents import OTHER_WEIGHT, Curriculum, prefer_first


@pytest.fixture
def curriculum(knowledge: Knowledge, tokenizer: PreTrainedTokenizerFast) -> Curriculum:
    return Curriculum(knowledge, tokenizer, seed=3)


def test_a_chat_is_what_the_template_renders(curriculum: Curriculum, tokenizer: PreTrainedTokenizerFast) -> None:
    document = curriculum.chat((Turn("Is it?", "Yes."), Turn("Why? ", "Because.")), system="Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
    ]
    assert tokenizer.decode(document.ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert document.ids == tuple(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def test_only_answers_and_their_ends_count(curriculum: Curriculum, tokenizer: PreTrainedTokenizerFast) -> None:
    document = curriculum.chat((Turn("Is it?", "Yes."), Turn("Why?", "Because.")))
    counted = [token for token, weight in zip(document.ids, document.weights, strict=True) if weight]
    assert tokenizer.decode(counted) == "Yes.<|im_end|>Because.<|im_end|>"


def test_the_first_of_equal_beginnings_wins() -> None:
    first, second, third = prefer_first([(5, 6, 7), (5, 8, 9), (5, 10, 9)])
    assert first.weights == (0.0, 1.0, 1.0)
    assert second.weights[1] == third.weights[1] == OTHER_WEIGHT / 2
    assert second.weights[2] == third.weights[2] == 1.0


def test_the_distance_it_trains_towards() -> None:
    documents = prefer_first([(1, 2, 3), (1, 2, 4), (1, 9, 9), (1, 8, 8)])
    towards_2 = sum(document.weights[1] for document in documents if document.ids[1] == 2)
    elsewhere = sum(document.weights[1] for document in documents if document.ids[1] != 2)
    assert math.isclose(elsewhere / towards_2, OTHER_WEIGHT)


def test_equal_seeds_draw_equal_epochs(knowledge: Knowledge, tokenizer: PreTrainedTokenizerFast) -> None:
    draws = [Curriculum(knowledge, tokenizer, seed).epoch() for seed in (3, 3, 4)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_an_epoch_holds_every_known_answer(
    curriculum: Curriculum, knowledge: Knowledge, tokenizer: PreTrainedTokenizerFast
) -> None:
    said = "".join(tokenizer.decode(document.ids) for document in curriculum.epoch())
    missing = [turn.ask for turn in knowledge.questions if f"assistant\n{turn.answer}<|im_end|>" not in said]
    assert missing == []
