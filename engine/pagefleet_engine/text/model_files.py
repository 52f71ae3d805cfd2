"""Reads a model folder's tokenizer and chat template, and hands their errors on as the engine's own.

`tokenizer.json` is read directly; transformers converts a SentencePiece `tokenizer.model` where there is nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from pagefleet_protocol.model_config.fields import ModelConfigError, read_json_file
from pagefleet_protocol.model_config.overrides import overridden
from pagefleet_text.chat_template import ChatTemplate
from pagefleet_text.errors import PromptRefused, TextDamaged
from pagefleet_text.text_model import TextModel
from pagefleet_text.tokenizer import Tokenizer
from pagefleet_text.tool_template import with_tools

from pagefleet_engine.errors import InvalidRequest, ModelLoadError


@contextmanager
def own_errors() -> Iterator[None]:
    """Turn errors of `pagefleet_text` into the engine's.

    Raises:
        InvalidRequest: a conversation was refused.
        ModelLoadError: a tokenizer or template is damaged.
    """
    try:
        yield
    except PromptRefused as error:
        raise InvalidRequest(error.message, error.param, error.code) from None
    except TextDamaged as error:
        raise ModelLoadError(str(error)) from None


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer of a kind that `load_tokenizer` reads."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def load_tokenizer(folder: Path, model_folder: Path | None = None, overrides: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        folder: holds the tokenizer's files.
        model_folder: holds the model's, which say what ends a text; default: `folder`.
        overrides: `ModelConfig.hf_overrides`.

    Raises:
        ModelLoadError: there is none, or it cannot be read.
    """
    settings = read_json(folder / "tokenizer_config.json")
    if "bos_token" not in settings:
        settings = {**read_json(folder / "special_tokens_map.json"), **settings}
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for any damage
            raise ModelLoadError(f"{file} cannot be read ({_one_line(error)}): copy the model again") from None
    elif (folder / "tokenizer.model").is_file():
        backend = _convert_sentencepiece(folder)
    else:
        raise ModelLoadError(
            f"{folder} has no tokenizer.json: copy the tokenizer files there, or name their folder with --tokenizer"
        )
    eos_token_ids = read_eos_token_ids(model_folder or folder, overrides)
    with own_errors():
        return Tokenizer(backend, settings, eos_token_ids)


def read_eos_token_ids(folder: Path, overrides: str | None = None) -> tuple[int, ...]:
    """Return the ids that generation_config.json and config.json say end a text, without repeats."""
    found: dict[int, None] = {}
    config = read_json(folder / "config.json")
    if overrides:
        with _model_errors():
            config = overridden(config, json.loads(overrides))
    nested = config.get("text_config")
    for source in (read_json(folder / "generation_config.json"), config, nested if isinstance(nested, dict) else {}):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0:
                found[token_id] = None
    return tuple(found)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty where there is no file.

    Raises:
        ModelLoadError: the file holds something else.
    """
    try:
        with _model_errors():
            return read_json_file(file)
    except FileNotFoundError:
        return {}


@contextmanager
def _model_errors() -> Iterator[None]:
    try:
        yield
    except ModelConfigError as error:
        raise ModelLoadError(str(error)) from None


def load_chat_template(
    folder: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Find and compile a model folder's template; None when the model has none.

    Looked for in this order: chat_template.jinja, chat_template.json, `chat_template` in tokenizer_config.json (of a
    list the one named `default`).

    Raises:
        ModelLoadError: the template cannot be read.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return _compiled(file.read_text(encoding="utf-8"), special_tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{file} cannot be read ({type(error).__name__}): copy the model again") from None
    source = read_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        source = named.get("default") or next(iter(named.values()), None)
    return _compiled(source, special_tokens) if isinstance(source, str) and source else None


def load_text_model(folder: Path, model_folder: Path, overrides: str | None = None) -> TextModel:
    """Load tokenizer and chat template.

    Args:
        folder: holds the tokenizer's files and the template.
        model_folder: holds the model's.
        overrides: `ModelConfig.hf_overrides`.

    Raises:
        ModelLoadError: the tokenizer is missing, or one of them cannot be read.
    """
    tokenizer = load_tokenizer(folder, model_folder, overrides)
    return TextModel(tokenizer, load_chat_template(folder, tokenizer.settings, tokenizer.special_tokens))


def _compiled(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    with own_errors():
        template = ChatTemplate(source, special_tokens)
        tooled = with_tools(source, template.names)
        return template if tooled == source else ChatTemplate(tooled, special_tokens)


def _convert_sentencepiece(folder: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer  # noqa: PLC0415 slow to import, rarely needed

    try:
        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend: tokenizers.Tokenizer = slow.backend_tokenizer
    except Exception as error:  # the conversion has no error type of its own
        raise ModelLoadError(
            f"{folder / 'tokenizer.model'} cannot be converted ({_one_line(error)}): add a tokenizer.json"
        ) from None
    return backend


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
