"""Tokenizers and chat templates from model folders, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.text.model_files import load_chat_template, load_tokenizer, read_eos_token_ids
from pagefleet_text.tokenizer import Tokenizer

from tests.fakes.small_tokenizers import byte_level_backend


def test_eos_of_every_source_counts_once(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "text_config": {"eos_token_id": 9}}')
    assert read_eos_token_ids(tmp_path) == (7, 5, 9)
    tokenizer = Tokenizer(byte_level_backend(), {"eos_token": "<|im_end|>"}, read_eos_token_ids(tmp_path))
    assert tokenizer.eos_token_ids == (7, 5, 9, 1)


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
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "does not hold a JSON object"),
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


def test_what_ends_a_text_is_the_model_s_to_say(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load_tokenizer(tmp_path, model).eos_token_ids == (3, 4, 1)
    assert load_tokenizer(tmp_path).eos_token_ids == (1,)


def test_the_template_s_place_in_the_folder(tmp_path: Path) -> None:
    def found(settings: dict[str, object]) -> str | None:
        template = load_chat_template(tmp_path, settings, {})
        return None if template is None else template.render([{"role": "user", "content": "hi"}])

    assert found({}) is None
    assert found({"chat_template": "from settings"}) == "from settings"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert found({"chat_template": named}) == "default"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert found({"chat_template": "from settings"}) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert found({"chat_template": "from settings"}) == "from jinja"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja cannot be read"):
        found({})


def test_a_damaged_template_is_the_engine_s_error(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelLoadError, match=r"chat template is damaged \(line 1"):
        load_chat_template(tmp_path, {}, {})
