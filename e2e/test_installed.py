"""What people install: wheels and source archives, in an environment that holds nothing of this tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pagefleet_protocol.version import VERSION

from e2e.fleet_process import FleetProcess
from images.dependencies import build

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(path.parent for path in ROOT.glob("*/pyproject.toml"))

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels are compiled twice here, and what is asked is which files a wheel has, not how fast they are."""
    compiler = tmp_path_factory.mktemp("compiler") / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" -O0\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(compiler))
        yield


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a wheel of each distribution, each made from its source archive."""
    folder = tmp_path_factory.mktemp("dist")
    unpacked = []
    for archive in build(FOLDERS, folder / "sdists", "sdist"):
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        unpacked.append(folder / archive.name.removesuffix(".tar.gz"))
    return build(unpacked, folder / "wheels", "wheel")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, wheels: list[Path]) -> Path:
    """Return the interpreter of an environment with the wheels, and with other people's libraries from this one."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, *map(str, wheels)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    # Its .pth files, those of this tree's editable installs among them, count for nothing there.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_an_archive_makes_the_wheel_that_the_tree_makes(wheels: list[Path], tmp_path: Path) -> None:
    for ours, tree in zip(wheels, build(FOLDERS, tmp_path, "wheel"), strict=True):
        assert ours.name == tree.name
        assert f"-{VERSION}-" in ours.name
        with zipfile.ZipFile(ours) as one, zipfile.ZipFile(tree) as other:
            assert {each.filename: each.CRC for each in one.infolist()} == {
                each.filename: each.CRC for each in other.infolist()
            }


def test_the_names_of_vllms_users_are_there(python: Path) -> None:
    code = (
        "import pagefleet, pagefleet_engine, sys; from pagefleet import LLM, SamplingParams;"
        "print(pagefleet.__version__, 'torch' in sys.modules, pagefleet_engine.__file__);"
        "print(LLM('builtin://tiny').generate('Once', SamplingParams(max_tokens=4))[0].outputs[0].token_ids)"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300, check=True, cwd="/")
    version, _, file = done.stdout.splitlines()[0].split()
    assert version == VERSION
    assert Path(file).is_relative_to(python.parents[1])
    assert len(done.stdout.splitlines()[1].split(",")) == 4


def test_a_fleet_comes_up_and_answers(python: Path, tmp_path: Path) -> None:
    pagefleet = python.with_name("pagefleet")
    told = subprocess.run([pagefleet, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == f"pagefleet {VERSION}\n"
    with FleetProcess(tmp_path, (str(pagefleet), "up"), python=python) as fleet:
        fleet.until(lambda: fleet.serves(1))
        answer = httpx.post(f"{fleet.url}/v1/completions", json={"model": "tiny", "prompt": "Once"}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] > 0
