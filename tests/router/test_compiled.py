"""The router as its image has it: what it does for every request is compiled to C, from the same files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("protocol", "text", "console", "router")
TESTS = ("tests/router/wire", "tests/router/admission", "tests/router/faults")
"""None of these puts a stand-in of its own in the place of a compiled class, which compiled code does not take."""


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_the_compiled_router_does_as_the_one_that_is_not(tmp_path: Path) -> None:
    for name in SOURCES:  # mypyc's hook writes beside the sources while it works
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    siblings = os.pathsep.join(str(tmp_path / name) for name in SOURCES if name != "router")
    building = {**os.environ, "HATCH_BUILD_HOOK_ENABLE_MYPYC": "true", "MYPYPATH": siblings}
    run([str(ROOT / "images" / "dependencies.py"), "--wheels", "dist", "router"], building, tmp_path)
    (wheel,) = (tmp_path / "dist").iterdir()
    site = tmp_path / "site"
    run(["-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], os.environ, tmp_path)

    compiled = {**os.environ, "PYTHONPATH": str(site)}
    where = run(["-c", "import pagefleet_router.exchange.front as it; print(it.__file__)"], compiled, tmp_path)
    assert where.strip().endswith(".so")
    run(["-m", "pytest", "-p", "no:cacheprovider", *TESTS], compiled, ROOT)


def run(arguments: list[str], environment: os._Environ[str] | dict[str, str], folder: Path) -> str:
    """Run Python. What it prints is shown where it fails, and returned where it does not."""
    command = [sys.executable, *arguments]
    ended = subprocess.run(
        command, check=False, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    return ended.stdout
