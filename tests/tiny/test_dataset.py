"""The data files: enough of them, nothing twice, and answers that a small model and a reader can hold."""

from collections import Counter
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tiny.dataset import FOLDER, Knowledge, Turn, load_knowledge, turns_as_exchanges


def spoken(text: str) -> str:
    return text.lower().rstrip("?!.")


def test_there_are_enough_questions_and_conversations(knowledge: Knowledge) -> None:
    assert len(knowledge.questions) >= 170
    assert len(knowledge.conversations) >= 24
    assert {len(turns) for turns in knowledge.conversations} == {2, 3}


def test_a_wording_belongs_to_one_answer(knowledge: Knowledge) -> None:
    owners: dict[str, set[str]] = {}
    for turn in (*knowledge.questions, *(turns[0] for turns in knowledge.conversations)):
        for ask in (turn.ask, *turn.also):
            owners.setdefault(spoken(ask), set()).add(turn.answer)
    assert {ask for ask, answers in owners.items() if len(answers) > 1} == set()


def test_no_question_and_no_answer_comes_twice(knowledge: Knowledge) -> None:
    asks = Counter(turn.ask for turn in knowledge.questions)
    answers = Counter(turn.answer for turn in knowledge.questions)
    assert [text for text, count in (asks + answers).items() if count > 1] == []


def test_some_followups_mean_different_things_after_different_beginnings(knowledge: Knowledge) -> None:
    answers: dict[str, set[str]] = {}
    for conversation in knowledge.conversations:
        for turn in conversation[1:]:
            answers.setdefault(turn.ask, set()).add(turn.answer)
    assert sum(len(different) > 1 for different in answers.values()) >= 5


def test_what_is_unknown_is_not_also_known(knowledge: Knowledge) -> None:
    known = {spoken(ask) for turn in knowledge.questions for ask in (turn.ask, *turn.also)}
    unknown = [spoken(ask) for ask in (*knowledge.unknown, *knowledge.held_out)]
    assert known & set(unknown) == set()
    assert len(unknown) == len(set(unknown))


def test_answers_are_short_clean_sentences(knowledge: Knowledge, tokenizer: PreTrainedTokenizerFast) -> None:
    for exchange in knowledge.exchanges():
        assert exchange.answer == exchange.answer.strip()
        assert exchange.answer.isascii()
        assert exchange.answer[-1] in '.?"'
        assert len(tokenizer.encode(exchange.answer)) <= 60, exchange.answer


def test_an_exchange_carries_all_earlier_turns() -> None:
    first, second = turns_as_exchanges((Turn("Is it?", "Yes."), Turn("Why?", "Because.")))
    assert first.messages == ({"role": "user", "content": "Is it?"},)
    assert second.messages[:2] == (*first.messages, {"role": "assistant", "content": "Yes."})
    assert second.messages[2]["content"] == "Why?"
    assert second.answer == "Because."


def test_exchanges_count_every_turn(knowledge: Knowledge) -> None:
    turns = sum(len(conversation) for conversation in knowledge.conversations)
    assert len(list(knowledge.exchanges())) == len(knowledge.questions) + turns


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    for name in ("conversations.yaml", "unknown.yaml", "texts.yaml"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    (tmp_path / "questions.yaml").write_text('- {ask: "What?", answer: That., author: me}')
    with pytest.raises(TypeError, match="author"):
        load_knowledge(tmp_path)
