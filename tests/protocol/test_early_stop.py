"""Programs that are stopped while they import, as the first process of a container: it ignores what nothing handles."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

_IMAGES = ("--engine-image", "e:1", "--router-image", "r:1", "--operator-image", "o:1")


@pytest.mark.parametrize(
    ("program", "imports", "arguments"),
    [
        ("pagefleet_engine.cli", "pagefleet_engine.server.serve", ["builtin://tiny"]),
        ("pagefleet_router.cli", "pagefleet_router.app", ["--endpoints-file", "engines.json"]),
        ("pagefleet_operator.operate_cli", "pagefleet_operator.handlers", _IMAGES),
    ],
)
def test_sigterm_ends_a_program_whose_imports_never_end(program: str, imports: str, arguments: Sequence[str]) -> None:
    code = (
        "import importlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "class Slow:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {imports!r}:\n"
        "            print('imports', flush=True)\n"
        "            for _ in range(600): time.sleep(0.1)\n"  # one long sleep outlasts a signal just before it
        "sys.meta_path.insert(0, Slow())\n"
        f"sys.exit(importlib.import_module({program!r}).main({[*arguments]!r}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imports\n"
        process.terminate()
        assert process.wait(120) == 128 + signal.SIGTERM
