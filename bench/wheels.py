"""Collects, for bench/gpu_check.sh, the wheels that a machine with torch, triton, transformers and pytest may lack.

python bench/wheels.py FOLDER [--python-version 3.12]

Which ones follows from what is installed here (`make install`): all that the engine and the GPU tests require, and what
that requires, without what such a machine has anyway. Versions are those of constraints.txt.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
WANTED = ("pagefleet-engine", "hypothesis", "pytest-timeout", "pytest-xdist")
THERE = ("torch", "triton", "transformers", "pytest")
Requires = Callable[[str], Iterable[str]]
PLATFORMS = (*(f"manylinux_2_{glibc}" for glibc in range(39, 16, -1)), "manylinux2014", "manylinux1")
"""Of glibc 2.39 and older: pip takes a wheel of exactly these names."""


def installed_requirements(name: str) -> list[str]:
    """What an installed distribution says that it requires."""
    return metadata.requires(name) or []


def wheels(requires: Requires, python_version: str) -> list[str]:
    """Names of the wheels to collect, in order. Of what the machine has, versions and what they need are its own."""
    needs = partial(requirements, requires, python_version)
    there = set(THERE).union(*map(needs, THERE))
    needed: set[str] = set()
    waiting = list(WANTED)
    while waiting:
        name = waiting.pop()
        if name not in needed and name not in there:
            needed.add(name)
            waiting += needs(name)
    return sorted(name for name in needed if not name.startswith("pagefleet-"))


def requirements(requires: Requires, python_version: str, name: str) -> list[str]:
    """Names of what a distribution requires on Linux with that Python; nothing that only an extra asks for."""
    target = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}
    target |= {"python_version": python_version, "python_full_version": f"{python_version}.0"}
    wanted = map(Requirement, requires(name))
    return [_normal(each.name) for each in wanted if each.marker is None or each.marker.evaluate(target)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Returns pip's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", default="3.12", help="Of that machine. Default: %(default)s.")
    arguments = parser.parse_args()
    version = arguments.python_version
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}", *platforms]
    command += ["-c", str(ROOT / "constraints.txt"), "-d", str(arguments.folder)]
    return subprocess.run([*command, *wheels(installed_requirements, version)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
