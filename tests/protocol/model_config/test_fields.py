"""Model files that are no JSON, or not what a model's file can be."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.text.model_files import load_tokenizer
from pagefleet_protocol.model_config.fields import ModelConfigError, json_object, read_json_file

DEEP = [b'{"a":' * 200_000, b"[" * 200_000 + b"]" * 200_000, b'{"model_type":' * 100_000 + b"1" + b"}" * 100_000]


@pytest.mark.parametrize("data", DEEP, ids=["objects", "lists", "closed"])
def test_a_file_that_is_nested_deeply_is_one_line(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"^config.json is nested too deeply to be a model's file: repair"):
        json_object(data, "config.json")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"config.json is nested too deeply"):
        read_arch(tmp_path)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config.json is nested too deeply"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (b"[1]", "does not hold a JSON object"),
        (b"<html>\n</html>", "cannot be read as JSON"),
    ],
)
def test_what_is_no_object_is_one_line(data: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(ModelConfigError, match=says) as refused:
        read_json_file(file)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="cannot be read"):
        read_json_file(tmp_path)
