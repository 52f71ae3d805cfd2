"""What installing and importing a distribution brings along: images of router and operator hold no torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pagefleet_protocol.version import VERSION

HEAVY = frozenset({"torch", "triton", "transformers", "safetensors", "numpy"})
PROGRAM = Path(sys.executable).with_name("pagefleet")


def closure(distribution: str) -> set[str]:
    """Return all that pip installs with a distribution on this platform, by its installed metadata."""
    found: set[str] = set()
    left = [Requirement(distribution)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while left:
        wanted = left.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(name)
        for text in requires(name) or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                left.append(requirement)
    return found


@pytest.mark.parametrize("distribution", ["pagefleet-protocol", "pagefleet-router", "pagefleet-operator"])
def test_no_tensor_library_is_installed_with(distribution: str) -> None:
    installed = closure(distribution)
    assert not installed & (HEAVY | {"pagefleet-kernels", "pagefleet-engine"})
    assert {"pagefleet-protocol", "pydantic", "pydantic-core", "msgspec"} <= installed
    assert (distribution == "pagefleet-router") == ("tokenizers" in installed) == ("pagefleet-text" in installed)


def test_type_checkers_believe_every_distribution() -> None:
    root = Path(__file__).parents[2]
    packages = [
        package
        for file in root.glob("*/pyproject.toml")
        for package in file.parent.glob("pagefleet*")
        if package.is_dir()
    ]
    assert len(packages) == 10
    assert not [package.name for package in packages if not (package / "py.typed").exists()]


def test_pagefleet_brings_all_parts_in_its_own_version() -> None:
    parts = {file.parent.name for file in Path(__file__).parents[2].glob("*/pyproject.toml")} - {"pagefleet"}
    wanted = [Requirement(text) for text in requires("pagefleet") or ()]
    assert {str(one) for one in wanted if one.marker is None} == {f"pagefleet-{part}=={VERSION}" for part in parts}


def test_the_walk_finds_what_is_wanted_indirectly() -> None:
    assert {"pagefleet-kernels", "torch", "triton", "transformers"} <= closure("pagefleet-engine")


@pytest.mark.parametrize(
    "module",
    [
        "pagefleet_protocol.inference_service",
        "pagefleet_protocol.openai_chat",
        "pagefleet.command",
        "pagefleet_text.text_model",
        "pagefleet_console.pages",
        "pagefleet_router.cli",
        "pagefleet_router.app",
        "pagefleet_operator.cli",
        "pagefleet_operator.local.up",
        "pagefleet_operator.chat.cli",
        "pagefleet_download.cli",
        "obstore.store",
    ],
)
def test_no_tensor_library_is_imported_with(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    imported = set(done.stdout.split())
    assert module.partition(".")[0] in imported
    assert not imported & (HEAVY | {"pagefleet_kernels", "pagefleet_engine"})


def test_the_commands_help_imports_nothing_slow() -> None:
    command = [sys.executable, "-X", "importtime", str(PROGRAM), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "usage: pagefleet VERB" in done.stdout
    assert "pagefleet_protocol" in imported
    assert not imported & {"pydantic", "pydantic_core", "msgspec", "asyncio", "argparse", "typing_extensions"}
