"""Commands that are printed for people to paste."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def pasted(*words: str) -> str:
    """Return a command of this environment that can be pasted into a shell, e.g. `pagefleet chat URL`.

    It names the program by its path where a shell would find none, or that of another environment.
    """
    own, found = Path(sys.executable).parent / "pagefleet", shutil.which("pagefleet")
    is_found = found is not None and (not own.is_file() or Path(found).resolve() == own.resolve())
    program = "pagefleet" if is_found or not own.is_file() else str(own)
    return " ".join([shlex.quote(program), *words])
