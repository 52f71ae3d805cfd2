"""Other spellings of a question, and input that means nothing: varied, but decided by the seed alone."""

import random
import re

import pytest

from tiny.variations import SYSTEM_PROMPTS, UNKNOWN_PATTERNS, noise, respell, system_prompt, unknown_question


def draws(count: int = 400) -> list[random.Random]:
    return [random.Random(seed) for seed in range(count)]


def test_a_question_is_often_left_alone_and_never_loses_its_words() -> None:
    spellings = [respell("What is a pod?", rng) for rng in draws()]
    assert 0.3 < spellings.count("What is a pod?") / len(spellings) < 0.5
    assert {"what is a pod", "What's a pod?", "What is a pod"} <= set(spellings)
    assert all(re.search(r"(what is|what's) a pod", spelling, re.IGNORECASE) for spelling in spellings)


@pytest.mark.parametrize("ask", ["?", "...", "!?"])
def test_marks_alone_stay_as_they_are(ask: str) -> None:
    assert {respell(ask, rng) for rng in draws(50)} == {ask}


def test_system_prompts_are_listed_ones_or_filler() -> None:
    prompts = {system_prompt(["alpha", "beta"], rng) for rng in draws()}
    listed = prompts & set(SYSTEM_PROMPTS)
    assert listed == set(SYSTEM_PROMPTS)
    assert {word for prompt in prompts - listed for word in prompt.split()} == {"alpha", "beta"}


def test_unknown_questions_get_other_numbers_and_things() -> None:
    asked = {unknown_question(["What is number 7?"], ["tiger"], rng) for rng in draws()}
    patterned = {pattern.format("tiger") for pattern in UNKNOWN_PATTERNS}
    numbered = asked - patterned
    assert patterned <= asked
    assert all(re.fullmatch(r"What is number \d{1,3}\?", ask) for ask in numbered)
    assert len(numbered) > 50


def test_noise_is_never_empty_and_always_text() -> None:
    for rng in draws():
        text = noise(["one", "two"], rng)
        assert text
        assert text.encode().decode() == text


def test_equal_seeds_draw_equally() -> None:
    for one, other in zip(draws(50), draws(50), strict=True):
        assert noise(["one", "two"], one) == noise(["one", "two"], other)
        assert respell("What is it?", one) == respell("What is it?", other)
