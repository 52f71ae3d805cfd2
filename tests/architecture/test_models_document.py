"""docs/models.md names the models that the engine builds, and mkdocs.yml every document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pagefleet_engine.models.model import MODEL_MODULES

ROOT = Path(__file__).parents[2]


def test_the_table_has_every_kind_of_model() -> None:
    table = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    named = [name for cell in table[1:] for name in re.findall("`(.*?)`", cell)]
    assert sorted(named) == sorted(MODEL_MODULES)


def pages(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for where in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages(where) if isinstance(where, list) else [where]


def test_the_site_shows_every_document() -> None:
    shown = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert not [page for page in shown if not (ROOT / page).exists()]
    assert {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} <= set(shown)
    assert len(shown) == len(set(shown))
