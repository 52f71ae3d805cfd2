"""Runs the steps of one target of the Dockerfile in clean root file systems, where no image builder is at hand.

`python -m images.try_steps TARGET --root BASE.tar --work FOLDER`, from the repository's root, needs root's rights.
BASE.tar takes the place of the base image: a Debian with `python` and `pip`, as `docker export` of python:3.13-slim
makes one. Each stage starts from a copy of it; RUN and the last check happen in a chroot, with this machine's network.
--bind lets steps see a folder or a file of this machine (pip's settings, for example); it does not stay in the image.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from images.dockerfile_reader import Instruction, Stage, expanded, read

CONTEXT = Path(__file__).parents[1]

FORBIDDEN_IN = {"router": ("torch", "triton", "transformers", "pip"), "operator": ("torch", "triton", "pip")}


@dataclass
class Built:
    """A stage's file system and what its instructions left to the next ones."""

    root: Path
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    )
    folder: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


class Trial:
    """Builds the stages that a target needs, each once."""

    def __init__(self, base: Path, work: Path, arguments: Mapping[str, str], binds: Sequence[Path]) -> None:
        self._base = base
        self._work = work
        self._arguments = arguments
        self._binds = tuple(binds)
        self._stages = read((CONTEXT / "Dockerfile").read_text(), arguments)
        self._built: dict[str, Built] = {}

    def build(self, name: str) -> Built:
        """Return a stage, built first if it was not. Raises CalledProcessError where a step fails."""
        if name not in self._built:
            stage = self._stages[name]
            built = self._start(stage)
            arguments: dict[str, str] = {}
            for instruction in stage.instructions:
                self._step(stage, built, instruction, arguments)
            self._built[name] = built
        return self._built[name]

    def _start(self, stage: Stage) -> Built:
        root = self._work / stage.name
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        if stage.base not in self._stages:
            subprocess.run(["tar", "--extract", "--file", self._base, "--directory", root], check=True)
            return Built(root)
        parent = self.build(stage.base)
        subprocess.run(["cp", "--archive", f"{parent.root}/.", root], check=True)
        return Built(root, dict(parent.environment), parent.folder, parent.user, parent.entrypoint, parent.command)

    def _step(self, stage: Stage, built: Built, instruction: Instruction, arguments: dict[str, str]) -> None:
        began = time.monotonic()
        values = {**arguments, **built.environment}
        match instruction.name:
            case "ARG":
                name, _, default = instruction.text.partition("=")
                arguments[name] = self._arguments.get(name, default)
            case "ENV":
                for pair in instruction.words:
                    name, _, value = pair.partition("=")
                    built.environment[name] = expanded(value, values)
            case "WORKDIR":
                built.folder = instruction.text
                _inside(built, built.folder).mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(built, instruction)
            case "RUN":
                self.run(built, ["/bin/sh", "-c", instruction.text], values, user="0:0")
            case "USER":
                built.user = instruction.text
            case "ENTRYPOINT":
                built.entrypoint = tuple(instruction.words)
            case "CMD":
                built.command = tuple(instruction.words)
        print(
            f"{stage.name:<15} {time.monotonic() - began:6.1f} s  {instruction.name} {instruction.text[:70]}",
            flush=True,
        )

    def _copy(self, built: Built, instruction: Instruction) -> None:
        *sources, target = (word for word in instruction.words if not word.startswith("--"))
        origin = instruction.flags.get("from")
        root = self.build(origin).root if origin else CONTEXT
        for source in sources:
            path = root / source.lstrip("/")
            place = _inside(built, target)
            place = place / path.name if target.endswith("/") and path.is_file() else place
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                ignored = shutil.ignore_patterns() if origin else shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(path, place, symlinks=True, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy2(path, place)

    def run(
        self, built: Built, command: Sequence[str], environment: Mapping[str, str], user: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a stage's file system; returns it with its output."""
        pairs = [f"{name}={value}" for name, value in environment.items()]
        inner = f"cd {shlex.quote(built.folder)} && exec {shlex.join(command)}"
        entered = [
            "chroot",
            f"--userspec={user}",
            str(built.root),
            "/usr/bin/env",
            "-i",
            *pairs,
            "/bin/sh",
            "-c",
            inner,
        ]
        # A mount namespace of its own: the mounts end with the command, whatever happens to it or to us.
        places = self._places(built.root)
        mounts = [shlex.join(["mount", "--bind", str(path), str(place)]) for path, place in places]
        script = " && ".join([*mounts, f"exec {shlex.join(entered)}"])
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            print(done.stdout[-4000:], file=sys.stderr)
            done.check_returncode()
        return done

    def _places(self, root: Path) -> list[tuple[Path, Path]]:
        """Return what of this machine a step sees, each with its place; the places exist."""
        found = []
        for path in (Path("/dev"), Path("/proc"), Path("/etc/resolv.conf"), *self._binds):
            place = root / str(path).lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                place.mkdir(exist_ok=True)
            else:
                place.touch()
            found.append((path.resolve(), place))
        return found


def check(trial: Trial, target: str, built: Built) -> None:
    """Run the entry point as the image's user; exits when the environment holds what it must not."""
    print(trial.run(built, [*built.entrypoint, "--version"], built.environment, built.user).stdout.strip())
    for name in FORBIDDEN_IN.get(target, ()):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
        trial.run(built, ["/opt/pagefleet/bin/python", "-c", code], built.environment, built.user)
    size = subprocess.check_output(["du", "--summarize", "--block-size=M", built.root / "opt"], text=True)
    print(f"{target}: user {built.user}, {size.split()[0]} in /opt, holds none of {FORBIDDEN_IN.get(target, ())}")


def _inside(built: Built, path: str) -> Path:
    return built.root / os.path.normpath(os.path.join("/", built.folder, path)).lstrip("/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=("engine", "router", "operator"))
    parser.add_argument("--root", type=Path, required=True, metavar="BASE.tar")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--bind", type=Path, action="append", default=[], metavar="PATH")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("chroot and mount need root")
    values = dict(pair.split("=", 1) for pair in arguments.build_arg)
    trial = Trial(arguments.root, arguments.work, values, arguments.bind)
    check(trial, arguments.target, trial.build(arguments.target))


if __name__ == "__main__":
    main()
