"""What images and releases ask of the distributions: their third-party requirements, their wheels, their sources.

`dependencies.py [--extra NAME]... FOLDER...` prints the requirements of all of them but pagefleet's own, one a line.
`dependencies.py --wheels OUT FOLDER...` builds a wheel of each, with the backend of this environment; `--sdists OUT`
builds archives of their sources.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

OWN = "pagefleet-"


def third_party(folders: Iterable[Path], extras: Sequence[str] = ()) -> list[str]:
    """Return the requirements of distributions, and those of some extras, without those on each other, sorted."""
    found = set()
    for folder in folders:
        with (folder / "pyproject.toml").open("rb") as file:
            project = tomllib.load(file)["project"]
        optional = project.get("optional-dependencies", {})
        found |= {*project["dependencies"], *(one for extra in extras for one in optional.get(extra, ()))}
    return sorted(one for one in found if not one.startswith(OWN))


def build(folders: Iterable[Path], out: Path, kind: Literal["wheel", "sdist"]) -> list[Path]:
    """Build one of each distribution by its own backend (PEP 517), without an environment for each."""
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    made = []
    here = Path.cwd()
    for folder in folders:
        with (folder / "pyproject.toml").open("rb") as file:
            backend = importlib.import_module(tomllib.load(file)["build-system"]["build-backend"])
        os.chdir(folder)  # a backend builds the folder it stands in
        try:
            made.append(out / str(getattr(backend, f"build_{kind}")(str(out))))
        finally:
            os.chdir(here)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, metavar="OUT")
    parser.add_argument("--sdists", type=Path, metavar="OUT")
    parser.add_argument("--extra", metavar="NAME", action="append", default=[])
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.wheels:
        build(arguments.folders, arguments.wheels, "wheel")
    if arguments.sdists:
        build(arguments.folders, arguments.sdists, "sdist")
    if not (arguments.wheels or arguments.sdists):
        print("\n".join(third_party(arguments.folders, arguments.extra)))


if __name__ == "__main__":
    main()
