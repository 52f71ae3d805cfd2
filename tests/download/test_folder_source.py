"""`file://`: looked at in place, or copied. Links that lead out of the folder are refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from pagefleet_download.download import download, inspect
from pagefleet_download.progress import ProgressMeter
from pagefleet_download.target_folder import TargetFolder

from tests.fakes.downloads import fast, run, visible
from tests.fakes.model_files import WANTED, sharded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with everything that lies beside it."""
    model = tmp_path / "a model"
    for name, data in sharded().items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(data)
    return model


def uri_of(folder: Path) -> str:
    return folder.as_uri()


def test_inspecting_in_place_writes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    result = asyncio.run(inspect(uri_of(folder), fast(), ProgressMeter()))
    assert result.facts is not None
    assert (result.facts.revision, result.facts.weights_bytes) == ("", 10001)
    assert sorted(folder.rglob("*")) == before


def test_a_folder_is_not_copied_into_itself(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    assert run(uri_of(folder), folder, fast()).reason == ""
    assert sorted(folder.rglob("*")) == before


def test_a_copy_is_what_an_engine_needs(folder: Path, tmp_path: Path) -> None:
    assert run(uri_of(folder), tmp_path / "copy", fast()).reason == ""
    assert visible(tmp_path / "copy") == WANTED
    assert all((tmp_path / "copy" / name).read_bytes() == (folder / name).read_bytes() for name in WANTED)


def test_a_file_that_changed_is_copied_again(folder: Path, tmp_path: Path) -> None:
    run(uri_of(folder), tmp_path / "copy", fast())
    (tmp_path / "copy" / "merges.txt").unlink()
    (folder / "merges.txt").write_bytes(b"c d")
    assert run(uri_of(folder), tmp_path / "copy", fast()).reason == ""
    assert (tmp_path / "copy" / "merges.txt").read_bytes() == b"c d"


def test_links_within_the_folder_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "merges.txt").rename(folder / "original" / "merges")
    (folder / "merges.txt").symlink_to("original/merges")
    assert run(uri_of(folder), tmp_path / "copy", fast()).reason == ""
    copied = tmp_path / "copy" / "merges.txt"
    assert (copied.is_symlink(), copied.read_bytes()) == (False, b"a b")


@pytest.mark.parametrize("target", ["../secret.json", "/etc/hostname"])
def test_links_out_of_the_folder_are_refused(folder: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "secret.json").write_bytes(b"{}")
    (folder / "tokenizer_config.json").symlink_to(target)
    result = run(uri_of(folder), tmp_path / "copy", fast())
    assert result.reason == "BadModel"
    assert "tokenizer_config.json is a link that leads out of the folder" in result.message


def test_what_is_no_folder(folder: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", folder / "config.json"):
        result = run(uri_of(path), tmp_path / "copy", fast())
        assert (result.reason, result.exit_code) == ("ModelNotFound", 2)
        assert f"{path} is not a folder" in result.message


def test_a_folder_that_may_not_be_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)  # root, who runs some tests, may read everything
    result = run(uri_of(folder), tmp_path / "copy", fast())
    assert (result.reason, result.exit_code) == ("AccessDenied", 2)
    assert f"{folder} may not be read by this user" in result.message


def test_a_file_that_may_not_be_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    result = run(uri_of(folder), tmp_path / "copy", fast())
    assert result.reason == "AccessDenied"
    assert "config.json may not be read by this user" in result.message


def test_the_lock_is_held_until_an_install_has_ended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, install = tmp_path / "copy", TargetFolder.install
    begun, go_on, free_meanwhile = threading.Event(), threading.Event(), []

    def slowly(self: TargetFolder, *arguments: Any) -> None:
        begun.set()
        go_on.wait(60)
        descriptor = os.open(self.lock_path, os.O_RDWR)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free_meanwhile.append(True)
        os.close(descriptor)
        install(self, *arguments)

    async def scenario() -> None:
        work = asyncio.create_task(download(uri_of(folder), target, fast(), ProgressMeter()))
        await asyncio.to_thread(begun.wait, 60)
        work.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert (target / ".pagefleet.json").exists()

    monkeypatch.setattr(TargetFolder, "install", slowly)
    asyncio.run(scenario())
    assert free_meanwhile == []


def test_a_folder_that_cannot_be_made(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    result = run(uri_of(folder), tmp_path / "file" / "below", fast())
    assert (result.reason, result.exit_code) == ("BadSettings", 2)
    assert "give a folder that this user can write" in result.message


@pytest.mark.parametrize("uri", ["pvc://claim/model", "builtin://tiny"])
def test_what_is_mounted_is_not_downloaded(tmp_path: Path, uri: str) -> None:
    result = run(uri, tmp_path, fast())
    assert (result.reason, result.exit_code) == ("BadSettings", 2)
    assert "is not downloaded" in result.message


@pytest.mark.parametrize(
    "uri",
    ["hf://only-a-name", "ftp://example.org/model", "https://me@example.org/model", "model", "file://relative", ""],
)
def test_what_is_no_uri(tmp_path: Path, uri: str) -> None:
    result = run(uri, tmp_path, fast())
    assert result.reason == "BadSettings"
    assert ascii(uri) in result.message
