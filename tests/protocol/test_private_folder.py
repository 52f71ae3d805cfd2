"""Folders of sockets: private, swept when their owner was killed, and made somewhere when the disk is full."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagefleet_protocol.private_folder import PrivateFolder

PREFIX = "pagefleet-try-"
OWNER = f"""
import sys, time
from pagefleet_protocol.private_folder import PrivateFolder
folder = PrivateFolder({PREFIX!r})
(folder.path / "core.sock").touch()
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder for temporary files; pytest's own have long names."""
    tmp_path_factory.getbasetemp()  # which otherwise would come to lie in this one
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def age(folder: Path) -> None:
    os.utime(folder, (1.0, 1.0))


def test_it_is_private_and_gone_afterwards(base: Path) -> None:
    with PrivateFolder(PREFIX) as folder:
        assert folder.path.parent == base
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert len(bytes(folder.path)) < 100
    assert not folder.path.exists()
    folder.remove()


def test_what_a_killed_program_left_is_swept_and_what_lives_stays() -> None:
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(2)
    ]
    try:
        left, lives = (Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout)
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait(60)
        for folder in (left, lives):
            age(folder)
        with PrivateFolder("pagefleet-other-"):
            assert left.exists(), "another program's"
        with PrivateFolder(PREFIX):
            assert not left.exists()
            assert (lives / "core.sock").exists()
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()


def test_what_may_just_be_made_or_is_of_no_owner_is_left_alone(base: Path) -> None:
    young, strange = base / f"{PREFIX}young", base / f"{PREFIX}strange"
    young.mkdir()
    (young / "owner.lock").touch()
    strange.mkdir()
    (strange / "mine").touch()
    age(strange)
    (base / f"{PREFIX}link").symlink_to(strange)
    with PrivateFolder(PREFIX):
        assert young.exists()
        assert (strange / "mine").exists()


def test_a_full_disk_leaves_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    make, enough = tempfile.mkdtemp, False

    def full(prefix: str, dir: str) -> str:  # noqa: A002 - the library's name
        if dir != "/dev/shm" and not enough:
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with PrivateFolder(PREFIX) as folder:
        assert folder.path.parent == Path("/dev/shm")
        os.close(folder._lock)  # as the system does when a process is killed
        age(folder.path)
        enough = True
        with PrivateFolder(PREFIX):
            assert not folder.path.exists(), "memory is swept too"
        folder._lock = -1


def test_a_path_that_is_too_long_for_a_socket_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with PrivateFolder(PREFIX) as folder:
        assert folder.path.parent == Path("/tmp")
