"""What is printed to be typed works in the shell that it is pasted into."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from pagefleet_protocol.pasted_command import pasted


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose path has a blank in it, and which is not on PATH."""
    folder = tmp_path / "an environment" / "bin"
    folder.mkdir(parents=True)
    (folder / "pagefleet").write_text("#!/bin/sh\n")
    (folder / "pagefleet").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return folder


def test_the_path_is_given_where_a_shell_finds_no_command(environment: Path) -> None:
    command = pasted("chat", "http://127.0.0.1:8000")
    assert shlex.split(command) == [str(environment / "pagefleet"), "chat", "http://127.0.0.1:8000"]


def test_the_path_is_given_where_a_shell_finds_another_environments(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "pagefleet").write_text("#!/bin/sh\n")
    (other / "pagefleet").chmod(0o755)
    monkeypatch.setenv("PATH", str(other))
    assert shlex.split(pasted("up", "FILE"))[0] == str(environment / "pagefleet")


def test_the_name_is_enough_where_a_shell_finds_this_one(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(environment))
    assert pasted("up", "FILE") == "pagefleet up FILE"
    linked = tmp_path / "links"
    linked.mkdir()
    (linked / "pagefleet").symlink_to(environment / "pagefleet")
    monkeypatch.setenv("PATH", str(linked))
    assert pasted("up", "FILE") == "pagefleet up FILE"
