"""The `pagefleet` command: finds verbs as git does, and is instant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pagefleet.command import find_verbs, refusal, search_path, usage
from pagefleet_protocol.version import VERSION


def program(folder: Path, name: str, body: str = "exit 0", mode: int = 0o755) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(mode)
    return path


def run(*words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    code = "import sys; from pagefleet.command import main; sys.exit(main())"
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_runs_the_verb_with_its_arguments_and_exit_status(tmp_path: Path) -> None:
    program(tmp_path, "pagefleet-testverb", 'echo "[$1][$2]"; exit 7')
    result = run("testverb", "two words", "--flag", path=str(tmp_path))
    assert result.stdout == "[two words][--flag]\n"
    assert result.returncode == 7


def test_help_lists_verbs_known_and_unknown(tmp_path: Path) -> None:
    program(tmp_path, "pagefleet-testverb")
    result = run("--help", path=str(tmp_path))
    assert result.returncode == 0
    assert f"testverb    {tmp_path}/pagefleet-testverb" in result.stdout
    assert run(path=str(tmp_path)).stdout == result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"pagefleet {VERSION}\n"


def test_unknown_verb_names_the_nearest(tmp_path: Path) -> None:
    program(tmp_path, "pagefleet-testverb")
    result = run("testberv", path=str(tmp_path))
    assert result.returncode == 2
    assert result.stderr == "pagefleet: error: there is no verb 'testberv'; did you mean 'testverb'?\n"


def test_known_verb_that_is_not_installed_names_its_package() -> None:
    assert "belongs to pagefleet-engine, which is not installed" in refusal("serve", {})
    assert "--help lists" in refusal("xyz", {"up": Path("x")})


def test_a_control_sequence_in_a_verb_is_not_printed() -> None:
    assert "\x1b" not in refusal("\x1b[31m", {})


def test_only_programs_count_and_the_first_folder_wins(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    program(first, "pagefleet-notes", mode=0o644)
    (first / "pagefleet-folder").mkdir()
    mine = program(first, "pagefleet-up")
    program(second, "pagefleet-up")
    other = program(second, "pagefleet-other")
    found = find_verbs(iter([tmp_path / "missing", first, second]))
    assert found == {"up": mine, "other": other}


def test_looks_beside_itself_first() -> None:
    folders = list(search_path(Path("/opt/pf/bin/pagefleet"), f"/usr/bin{os.pathsep}{os.pathsep}/bin"))
    assert folders == [Path("/opt/pf/bin"), Path(sys.executable).parent, Path("/usr/bin"), Path("/bin")]


def test_known_verbs_come_in_the_order_one_needs_them() -> None:
    text = usage({verb: Path(verb) for verb in ("zeta", "serve", "chat", "up")})
    positions = [text.index(f"\n  {verb} ") for verb in ("up", "chat", "serve", "zeta")]
    assert positions == sorted(positions)


def test_without_any_verb_says_what_to_install() -> None:
    assert "install pagefleet's engine, router and operator" in usage({})


@pytest.mark.parametrize("heavy", ["pydantic", "msgspec", "asyncio", "argparse", "difflib"])
def test_help_imports_nothing_slow(heavy: str) -> None:
    code = f"import sys; from pagefleet.command import main; main(['--help']); sys.exit({heavy!r} in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False, timeout=120).returncode
        == 0
    )
