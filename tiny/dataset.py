"""What the embedded model has to know, read from the YAML files of this folder.

The engine's tests read the same files, so this module imports no torch and no tokenizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, the whole answer to it, and other wordings that get the same answer."""

    ask: str
    answer: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exchange:
    """One thing to check: chat messages that end with the user's, and the exact answer under greedy decoding."""

    messages: tuple[Message, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Knowledge:
    """All that is trained: single questions, conversations, what is unknown, and texts for raw completion."""

    questions: tuple[Turn, ...]
    conversations: tuple[tuple[Turn, ...], ...]
    unknown: tuple[str, ...]
    unknown_things: tuple[str, ...]
    held_out: tuple[str, ...]
    unknown_answer: str
    texts: tuple[str, ...]

    def exchanges(self) -> Iterator[Exchange]:
        """Every question as one exchange, then every turn of every conversation with the turns before it."""
        for turn in self.questions:
            yield Exchange((user(turn.ask),), turn.answer)
        for conversation in self.conversations:
            yield from turns_as_exchanges(conversation)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def turns_as_exchanges(turns: tuple[Turn, ...]) -> Iterator[Exchange]:
    """One exchange per turn; its messages hold all earlier questions and answers."""
    history: tuple[Message, ...] = ()
    for turn in turns:
        history += (user(turn.ask),)
        yield Exchange(history, turn.answer)
        history += ({"role": "assistant", "content": turn.answer},)


def load_knowledge(folder: Path = FOLDER) -> Knowledge:
    """Reads questions.yaml, conversations.yaml, unknown.yaml and texts.yaml.

    Raises TypeError or KeyError for an entry with an unknown field or without one, yaml.YAMLError for a broken file.
    """
    unknown = _read(folder / "unknown.yaml")
    return Knowledge(
        questions=tuple(_turn(entry) for entry in _read(folder / "questions.yaml")),
        conversations=tuple(tuple(_turn(entry) for entry in turns) for turns in _read(folder / "conversations.yaml")),
        unknown=tuple(unknown["questions"]),
        unknown_things=tuple(thing for line in unknown["things"] for thing in line.split(", ")),
        held_out=tuple(unknown["held_out"]),
        unknown_answer=unknown["answer"],
        texts=tuple(_read(folder / "texts.yaml")["texts"]),
    )


def _turn(entry: dict[str, Any]) -> Turn:
    return Turn(**{**entry, "also": tuple(entry.get("also", ()))})


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))
