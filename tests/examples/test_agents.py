"""examples/12-agents prints what its README shows, against an engine that serves the embedded model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "12-agents"
SHOWN = re.compile(r"```\n\$ \.venv/bin/python examples/12-agents/(\w+)\.py\n(.*?)```", re.DOTALL)
SERVES = re.compile(r"http://127\.0\.0\.1:\d+")
PATIENCE_S = 300.0

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("agents") / "engine.log"
    command = [sys.executable, "-m", "pagefleet_engine.cli", "builtin://tiny", "--port", "0"]
    with log.open("w") as said:
        engine = subprocess.Popen(
            [*command, "--served-model-name", "agents", "--num-threads", "1"],
            stderr=said,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield _ready(engine, log)
    finally:
        engine.terminate()
        engine.wait(PATIENCE_S)


def _ready(engine: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert engine.poll() is None, log.read_text()
        found = SERVES.search(log.read_text())
        try:
            if found and httpx.get(f"{found[0]}/readyz").status_code == httpx.codes.OK:
                return found[0]
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError(log.read_text())


@pytest.mark.parametrize(("name", "output"), SHOWN.findall((EXAMPLE / "README.md").read_text()))
def test_prints_what_the_readme_shows(name: str, output: str, url: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / f"{name}.py")],
        env={**os.environ, "PAGEFLEET_URL": url},
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == output


def test_the_readme_shows_every_agent() -> None:
    shown = {name for name, _ in SHOWN.findall((EXAMPLE / "README.md").read_text())}
    assert shown == {path.stem for path in EXAMPLE.glob("*_agent.py")}
