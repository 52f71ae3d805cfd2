"""What is rendered is what was reviewed. `python -m tests.operator.render.regenerate` writes the files anew."""

from __future__ import annotations

import pytest
import yaml

from tests.operator.render.service_table import GOLDEN, TABLE, golden


@pytest.mark.parametrize("name", TABLE)
def test_children_are_as_reviewed(name: str) -> None:
    assert golden(name) == (GOLDEN / f"{name}.yaml").read_text()


def test_every_golden_file_belongs_to_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*")} == set(TABLE)


def test_golden_files_are_yaml() -> None:
    documents = list(yaml.safe_load_all((GOLDEN / "five-lines.yaml").read_text()))
    assert documents == list(TABLE["five-lines"].wanted())
