"""What the Dockerfile asks of the distributions: their third-party requirements, and their wheels.

`dependencies.py [--extra NAME] FOLDER...` prints the requirements of all of them but pagefleet's own, one a line.
`dependencies.py --wheels OUT FOLDER...` builds a wheel of each, with the backend of this environment.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path

OWN = "pagefleet-"


def third_party(folders: Iterable[Path], extra: str | None = None) -> list[str]:
    """Return the requirements of distributions, and those of an extra, without those on each other, sorted."""
    found = set()
    for folder in folders:
        with (folder / "pyproject.toml").open("rb") as file:
            project = tomllib.load(file)["project"]
        found |= {*project["dependencies"], *project.get("optional-dependencies", {}).get(extra, ())}
    return sorted(one for one in found if not one.startswith(OWN))


def build_wheels(folders: Iterable[Path], out: Path) -> list[Path]:
    """Build a wheel of each distribution by its own backend (PEP 517), without an environment for each."""
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    made = []
    here = Path.cwd()
    for folder in folders:
        with (folder / "pyproject.toml").open("rb") as file:
            backend = importlib.import_module(tomllib.load(file)["build-system"]["build-backend"])
        os.chdir(folder)  # a backend builds the folder it stands in
        try:
            made.append(out / str(backend.build_wheel(str(out))))
        finally:
            os.chdir(here)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, metavar="OUT")
    parser.add_argument("--extra", metavar="NAME")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.wheels is None:
        print("\n".join(third_party(arguments.folders, arguments.extra)))
    else:
        build_wheels(arguments.folders, arguments.wheels)


if __name__ == "__main__":
    main()
