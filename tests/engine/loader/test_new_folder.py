"""Folders that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.loader.new_folder import new_folder


class Usage(NamedTuple):
    """Of a disk."""

    free: int


def write(out: Path, num_bytes: int = 1, error: Exception | None = None) -> None:
    """A folder of one file, which is not yet there while it is written."""
    with new_folder(out, num_bytes, "--output") as folder:
        (folder / "a").touch(0o600)
        assert not (out / "a").exists()
        if error:
            raise error


def test_it_is_there_when_all_is_written(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out[1]"
    write(out)
    assert [*out.parent.iterdir(), *out.iterdir()] == [out, out / "a"]
    assert (out / "a").stat().st_mode & 0o777 == 0o644


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    with pytest.raises(
        ConfigError, match=r"out cannot be written \(Disk quota exceeded\), and nothing is left of it: "
    ):
        write(tmp_path / "out", error=full)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_there_stays(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    match kind:
        case "folder":
            (out / "b").mkdir(parents=True)
        case "file":
            out.touch()
        case _:
            out.symlink_to(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"^--output .*out exists and is no empty folder: give a new folder$"):
        write(out)


def test_a_volume_is_no_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(ConfigError, match="is where a volume is mounted: give a new folder in it"):
        write(tmp_path)


def test_too_small_a_disk_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=10**9))
    with pytest.raises(ConfigError, match=r"out takes 2\.00 GB, and its disk has 1\.00 GB left: make room"):
        write(tmp_path / "out", 2 * 10**9)
    assert [*tmp_path.iterdir()] == []


def test_what_a_killed_run_left_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".out-abc" / "out").mkdir(parents=True)
    (tmp_path / ".out-of-mine").mkdir()
    write(tmp_path / "out")
    (said,) = caplog.messages
    assert said == f"{tmp_path}/.out-abc is of a run that was killed, unless one goes on: remove it"
