"""The training loop, on a handful of questions: it learns, it repeats itself exactly, and it never saves a failure."""

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tiny.dataset import Exchange, Knowledge, user
from tiny.documents import Document
from tiny.recitation import complete, distance_to_second, recite
from tiny.train import Recipe, Trainer, batches, build_model, examine_and_save, variants

RECIPE = Recipe(epochs=2, tokens_per_batch=2048, warmup=1)


@pytest.fixture(autouse=True)
def _torch_is_put_back() -> Iterator[None]:
    """A trainer has all of torch be deterministic, and other tests come after it."""
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)


@pytest.fixture
def few(knowledge: Knowledge) -> Knowledge:
    return replace(knowledge, questions=knowledge.questions[:4], conversations=(), texts=knowledge.texts[:2])


def small_trainer(knowledge: Knowledge, tokenizer: PreTrainedTokenizerFast) -> Trainer:
    trainer = Trainer(RECIPE, knowledge, tokenizer)
    lesson = [trainer.curriculum.chat((turn,)) for turn in knowledge.questions]
    trainer.curriculum.epoch = lambda: lesson  # type: ignore[method-assign]
    return trainer


def test_two_epochs_lower_the_loss_and_repeat_exactly(few: Knowledge, tokenizer: PreTrainedTokenizerFast) -> None:
    once = [loss for _, loss in small_trainer(few, tokenizer).epochs()]
    again = [loss for _, loss in small_trainer(few, tokenizer).epochs()]
    assert once[1] < once[0]
    assert once == again


def test_a_model_that_does_not_know_its_answers_is_not_saved(
    few: Knowledge, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = small_trainer(few, tokenizer)
    short = replace(few, held_out=few.held_out[:1])
    trainer.knowledge = short
    with caplog.at_level(logging.INFO, logger="tiny"):
        assert not examine_and_save(trainer, list(short.exchanges()), tmp_path / "out", num_drawn=3)
    assert not (tmp_path / "out").exists()
    assert "float32: 0/4 by heart" in caplog.text


def test_batches_keep_to_their_budget_and_lose_nothing() -> None:
    documents = [Document((0,) * length, (0.0,) * length) for length in range(1, 60)]
    grouped = batches(documents, 100, random.Random(1))
    assert sorted(len(document.ids) for group in grouped for document in group) == list(range(1, 60))
    assert all(len(group) * max(len(document.ids) for document in group) <= 100 for group in grouped)


def test_a_document_over_the_budget_is_a_batch_of_its_own() -> None:
    long, short = Document((0,) * 300, (0.0,) * 300), Document((0,), (0.0,))
    grouped = batches([long, short], 100, random.Random(1))
    assert sorted(len(group) for group in grouped) == [1, 1]


def test_an_untrained_model_recites_nothing(few: Knowledge, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model = build_model(tokenizer).eval()
    result = recite(model, tokenizer, list(few.exchanges()))
    assert (result.by_heart, result.asked) == (0, 4)
    assert result.margin < 0
    assert len(tokenizer.encode(complete(model, tokenizer, "What is", tokens=3).text)) <= 3


def test_distance_to_second() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.5], [0.0, 3.0, 9.0]])
    assert distance_to_second(logits, torch.tensor([1, 2])) == 1.5
    assert distance_to_second(logits, torch.tensor([0, 2])) == -3.0


def test_variants_ask_for_the_same_answers(few: Knowledge) -> None:
    found = variants(few)
    assert {exchange.answer for exchange in found} == {turn.answer for turn in few.questions}
    assert Exchange((user("who are you"),), few.questions[1].answer) in found
