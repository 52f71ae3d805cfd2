from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn() -> list[int]:
    seen: list[int] = []

    @settings(max_examples=300)
    @given(st.integers())
    def draw(number: int) -> None:
        seen.append(number)

    draw()
    return seen


def test_examples_do_not_depend_on_what_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if settings.get_current_profile_name() == "all":
        pytest.skip("it draws others in each run")
    before = drawn()
    (tmp_path / "with_numbers.py").write_text(f"NUMBERS = {[*range(12345, 12445)]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("with_numbers")
    assert drawn() == before
