"""How large each room is, and how large `rooms.toml` lets it be: `python -m tests.architecture.rooms` prints both.

`--write` makes today's sizes the budget.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET = Path(__file__).with_name("rooms.toml")
DISTRIBUTIONS = tuple(sorted(path.parent.name for path in ROOT.glob("*/pyproject.toml")))
SLACK = 1.02
"""A room may grow by so much before its budget has to."""

HEADER = """\
# The files and lines of Python that each room may hold; 2 % more pass. Shrinking needs no change here. A commit that
# needs more raises its room's numbers on purpose: `make budget` writes today's.
"""


@dataclass(frozen=True)
class Size:
    """How many Python files a room has, and how many lines they have together."""

    files: int
    lines: int

    def exceeds(self, budget: Size) -> bool:
        return self.files > budget.files * SLACK or self.lines > budget.lines * SLACK

    def __add__(self, other: Size) -> Size:
        return Size(self.files + other.files, self.lines + other.lines)


def python_files() -> list[Path]:
    """Return the tree's Python files, also those that are not yet committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listed if (ROOT / name).exists()]


def room_of(path: Path) -> str:
    """Return the room of a file: `engine/core` for one below engine/pagefleet_engine/core, `engine` for one beside it.

    Tests have the room's name after `tests/`, all else that of its folder.
    """
    parts = path.relative_to(ROOT).parent.parts
    if parts[:1] == ("tests",):
        return "/".join(parts[:2])
    if parts and parts[0] in DISTRIBUTIONS:
        return "/".join([parts[0], *parts[2:3]])
    return parts[0] if parts else "."


def sizes() -> dict[str, Size]:
    """Return every room's size."""
    found: defaultdict[str, Size] = defaultdict(lambda: Size(0, 0))
    for path in python_files():
        found[room_of(path)] += Size(1, path.read_text().count("\n"))
    return dict(sorted(found.items()))


def budgets() -> dict[str, Size]:
    """Return what rooms.toml says."""
    return {room: Size(**entry) for room, entry in tomllib.loads(BUDGET.read_text()).items()}


def written(rooms: Mapping[str, Size]) -> str:
    entries = [f'"{room}" = {{ files = {size.files}, lines = {size.lines} }}' for room, size in rooms.items()]
    return "\n".join([HEADER, *entries, ""])


def table(rooms: Mapping[str, Size], allowed: Mapping[str, Size]) -> str:
    """Return a line per room: files and lines, and both of its budget."""
    product = [size for room, size in rooms.items() if room.partition("/")[0] in DISTRIBUTIONS]
    rows = {**rooms, "product": sum(product, Size(0, 0)), "all": sum(rooms.values(), Size(0, 0))}
    lines = [f"{'room':24} {'files':>6} {'lines':>8}   budget"]
    for room, size in rows.items():
        budget = allowed.get(room)
        told = f"{budget.files:>4} {budget.lines:>7}" if budget else ""
        lines.append(f"{room:24} {size.files:>6} {size.lines:>8}   {told}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        BUDGET.write_text(written(sizes()))
    print(table(sizes(), budgets()))
