"""examples/03-offline prints what its README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "03-offline"
SHOWN = re.compile(r"```\n\$ python (\S+)\n(.*?)```", re.DOTALL)


def test_prints_what_the_readme_shows() -> None:
    shown = SHOWN.search((EXAMPLE / "README.md").read_text())
    assert shown is not None
    script, output = shown.groups()
    done = subprocess.run(
        [sys.executable, script],
        cwd=EXAMPLE.parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == output
    assert len(output.splitlines()) == 4


def test_is_short_enough_to_be_read_at_once() -> None:
    assert len((EXAMPLE / "offline.py").read_text().splitlines()) < 30
