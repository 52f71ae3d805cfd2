"""config.json with other values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pagefleet_protocol.model_config.fields import ModelConfigError
from pagefleet_protocol.model_config.overrides import overridden, read_config


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ({"a": 2}, {"a": 2, "b": {"c": 1, "d": [1, 2]}}),
        ({"new": {"x": 1}}, {"a": 1, "b": {"c": 1, "d": [1, 2]}, "new": {"x": 1}}),
        ({"b": {"c": 5}}, {"a": 1, "b": {"c": 5, "d": [1, 2]}}),
        ({"b": {"d": [3]}}, {"a": 1, "b": {"c": 1, "d": [3]}}),
        ({"b": None}, {"a": 1, "b": None}),
        ({"b": 7, "a": {"c": 1}}, {"a": {"c": 1}, "b": 7}),
    ],
)
def test_objects_are_merged_and_all_else_is_replaced(overrides: dict[str, Any], changed: dict[str, Any]) -> None:
    config = {"a": 1, "b": {"c": 1, "d": [1, 2]}}
    before = json.dumps(config)
    assert overridden(config, overrides) == changed
    assert json.dumps(config) == before


@pytest.mark.parametrize("within", [False, True])
def test_an_older_spelling_that_nobody_would_read_is_refused(within: bool) -> None:
    config: dict[str, Any] = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    overrides: dict[str, Any] = {"rope_theta": 1e6}
    if within:
        config, overrides = {"text_config": config}, {"text_config": overrides}
    with pytest.raises(
        ModelConfigError, match=r'has rope_theta, and this .* as \{"rope_parameters": \{"rope_theta": \.\.\.'
    ):
        overridden(config, overrides)
    both = {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6}}
    assert overridden({"rope_parameters": {"rope_type": "default"}}, both)["rope_parameters"]["rope_theta"] == 1e6
    assert overridden({"rope_theta": 1e4}, {"rope_theta": 1e6}) == {"rope_theta": 1e6}


def test_a_file_is_read_with_them(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": 1, "b": 2}')
    assert read_config(file, None) == {"a": 1, "b": 2}
    assert read_config(file, '{"b": 3}') == {"a": 1, "b": 3}
