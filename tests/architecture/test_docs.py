"""Documents point at things that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
PLACE = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def documents() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert not broken


def places(document: Path) -> set[str]:
    """What links to its headings say, as GitHub makes it of them: letters, digits and hyphens, in lower case."""
    headings = HEADING.findall(document.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_a_heading_find_it(document: Path) -> None:
    found = [
        (document.parent / file if file else document, place) for file, place in PLACE.findall(document.read_text())
    ]
    assert not [f"{file}#{place}" for file, place in found if place not in places(file)]


def test_the_life_of_a_request_fits_a_screen_or_two() -> None:
    assert len((ROOT / "docs" / "request-lifecycle.md").read_text().splitlines()) <= 80


def test_the_readme_lists_every_folder() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {name.split("/")[0] for name in listed if "/" in name} - {".ci"}
    readme = (ROOT / "README.md").read_text()
    assert not [folder for folder in sorted(folders) if f"\n{folder}/ " not in readme]


def test_every_room_of_make_quick_is_there() -> None:
    listed = re.search(r"^PURE := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    rooms = listed[1].replace("\\", "").split()
    assert len(rooms) > 10
    assert not [room for room in rooms if not (ROOT / "tests" / room).exists()]
