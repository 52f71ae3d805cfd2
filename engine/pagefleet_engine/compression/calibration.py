"""The text that a model is calibrated with, and other text that it is tried on, as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagefleet_protocol.conversation import Conversation, read_messages
from pagefleet_protocol.openai_json import Fields, decode_object
from pagefleet_text.text_model import TextModel

from pagefleet_engine.errors import ConfigError, InvalidRequest
from pagefleet_engine.text.model_files import own_errors

_HELD_OUT = 8
"""One in so many sequences."""
_MOST_HELD_OUT = 32
_LEAST_TOKENS = 2
"""The first predicts the second."""


@dataclass(frozen=True, slots=True)
class Text:
    """Sequences of token ids."""

    calibration: tuple[list[int], ...]
    held_out: tuple[list[int], ...]
    """To measure perplexity with; none of them is in the other."""
    source: str = "the given text"
    """Where both come from, in words for a report."""


def read_text(file: Path | None, model: TextModel, num_samples: int, max_seq_length: int) -> Text:
    """Tokens of a file of lines, of texts in JSON lines, or of conversations in them, which the template renders; or of
    the description of Python that comes with it.

    Raises:
        ConfigError: there is too little of it, or a line cannot be used.
    """
    most = max(_HELD_OUT, num_samples + min(num_samples // (_HELD_OUT - 1) + 1, _MOST_HELD_OUT))
    sequences: list[list[int]] = []
    source = _own_text(model, max_seq_length) if file is None else _of_file(file, model)
    for tokens in source:
        if len(tokens) >= _LEAST_TOKENS:
            sequences.append(tokens[:max_seq_length])
        if len(sequences) == most:
            break
    held_out = sequences[_HELD_OUT - 1 :: _HELD_OUT][:_MOST_HELD_OUT]
    if not held_out:
        said = "this Python comes without its description" if file is None else f"{file} has {len(sequences)}"
        raise ConfigError(
            f"calibration takes at least {_HELD_OUT} texts of two tokens or more, and {said}: give --calibration FILE "
            "with a text or a conversation in each line"
        )
    tried = {id(tokens) for tokens in held_out}
    calibration = tuple(tokens for tokens in sequences if id(tokens) not in tried)[:num_samples]
    return Text(calibration, tuple(held_out), "the description of Python's language" if file is None else str(file))


def _own_text(model: TextModel, max_seq_length: int) -> Iterator[list[int]]:
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 large, and wanted by nobody else
    except ImportError:
        return
    for _, text in sorted(topics.items()):
        tokens = model.completion_tokens(text)
        for start in range(0, len(tokens), max_seq_length):
            yield tokens[start : start + max_seq_length]


def _of_file(file: Path, model: TextModel) -> Iterator[list[int]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _of_line(line, f"{file}:{number}", model, is_json=file.suffix in (".jsonl", ".json"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {file} cannot be read ({type(error).__name__}): check the path") from None


def _of_line(line: str, place: str, model: TextModel, is_json: bool) -> list[int]:
    if not is_json:
        return model.completion_tokens(line.strip())
    try:
        body = decode_object(line.encode())
        if isinstance(text := body.get("text"), str):
            return model.completion_tokens(text)
        with own_errors():
            return model.chat_tokens(_conversation(body))
    except InvalidRequest as error:
        raise ConfigError(
            f"{place}: {error}: give an object with `text`, or with `messages` as /v1/chat/completions takes them"
        ) from None


def _conversation(body: dict[str, Any]) -> Conversation:
    return Conversation(messages=read_messages(Fields(body)), add_generation_prompt=False)


def num_tokens(sequences: Sequence[list[int]]) -> int:
    """Of all of them."""
    return sum(map(len, sequences))
