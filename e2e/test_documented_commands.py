"""The documents' requests, as they stand there, to a fleet: each is answered, and the model says what is shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from e2e.fleet_process import FleetProcess
from tests.architecture.documented_commands import ROOT, Command, documented_commands

ADDRESS = re.compile(r"(?:http://)?(?:localhost|127\.0\.0\.1):(\d+)")
PIPED = re.compile(r'^\$ echo "([^"]+)" \| pagefleet chat\n((?:.+\n)+?)```', re.MULTILINE)


REQUESTS = {
    command.words: command
    for command in documented_commands()
    if command.words[0] == "curl" and ADDRESS.search(str(command))
}
"""Each curl that asks this machine, once."""


@pytest.mark.parametrize("command", REQUESTS.values(), ids=lambda one: f"{one.document.parent.name}-{one.words[-1]}")
def test_a_request_is_answered(command: Command, fleet: FleetProcess) -> None:
    """Port 8000 is the router's; another is that of an engine, as the log named it."""
    engine = fleet.endpoints()[0].url

    def here(found: re.Match[str]) -> str:
        return fleet.url if found[1] == "8000" else engine

    words = [ADDRESS.sub(here, word) for word in command.words]
    done = subprocess.run([*words, "--fail-with-body"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    if "-o" not in words:
        assert re.search(r'"usage"|^# TYPE ', done.stdout, re.MULTILINE), done.stdout
    if "-si" in words:
        assert "x-pagefleet-engine: tiny-engine-" in done.stdout


def test_a_piped_question_is_answered_as_shown(fleet: FleetProcess) -> None:
    shown = PIPED.search((ROOT / "examples" / "01-quickstart" / "README.md").read_text())
    assert shown is not None
    question, answer = shown.groups()
    done = subprocess.run(
        [sys.executable, "-m", "pagefleet_operator.chat.cli"],
        env={**os.environ, "PAGEFLEET_CHAT_URL": fleet.url},
        input=f"{question}\n", capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == answer
