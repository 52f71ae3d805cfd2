"""API keys that change while they are in use."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
from pagefleet_protocol.key_file import RECHECK_S, KeyFile, KeyFileError, read_bearer_key

LOGGER = logging.getLogger("test.keys")


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def later(self) -> None:
        self.now += RECHECK_S


class MountedSecret:
    """A Secret's folder as a kubelet keeps it: `..data` points to the current version and is swapped by a rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "keys"
        self._version = 0

    def publish(self, text: str) -> None:
        self._version += 1
        version = self.folder / f"..v{self._version}"
        version.mkdir()
        (version / "keys").write_text(text)
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        link.replace(self.folder / "..data")
        if not self.file.is_symlink():
            self.file.symlink_to("..data/keys")


def accepted(keys: KeyFile, *given: bytes) -> list[bool]:
    return [keys.digest_of(key) is not None for key in given]


def test_a_rotated_secret_is_followed_with_old_and_new_overlapping(tmp_path: Path) -> None:
    secret, clock = MountedSecret(tmp_path), Clock()
    secret.publish("old\n")
    keys = KeyFile(secret.file, LOGGER, clock)
    secret.publish("old\nnew\n")
    assert accepted(keys, b"old", b"new") == [True, False], "not looked at again within a second"
    clock.later()
    assert accepted(keys, b"old", b"new") == [True, True]
    secret.publish("new\n")
    clock.later()
    assert accepted(keys, b"old", b"new") == [False, True]
    assert keys.digest_of(b"new") == hashlib.sha256(b"new").digest()


@pytest.mark.parametrize("damage", ["gone", "binary", "folder"])
def test_a_damaged_file_leaves_the_last_keys_and_is_mentioned_once(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("one\n")
    keys = KeyFile(file, LOGGER, clock)
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "gone":
        file.write_bytes(b"\xff\xfe\x00")
    for _ in range(5):
        clock.later()
        assert accepted(keys, b"one", b"two") == [True, False]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the last keys stay in force" in caplog.text
    assert "one" not in caplog.text.replace("one a line", ""), "a key is never logged"
    if damage == "folder":
        file.rmdir()
    file.write_text("two\n")
    clock.later()
    assert accepted(keys, b"one", b"two") == [False, True]


@pytest.mark.parametrize("nothing", ["", "# withdrawn\n", "\n \n"])
def test_a_file_that_is_emptied_withdraws_every_key(
    tmp_path: Path, nothing: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret, clock = MountedSecret(tmp_path), Clock()
    secret.publish("one\ntwo\n")
    keys = KeyFile(secret.file, LOGGER, clock)
    secret.publish(nothing)
    for _ in range(3):
        clock.later()
        assert accepted(keys, b"one", b"two", b"", b"# withdrawn") == [False] * 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "nobody is let in" in caplog.text
    secret.publish("three\n")
    clock.later()
    assert accepted(keys, b"one", b"three") == [False, True]


def test_a_file_that_comes_back_unchanged_is_good_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, aside, clock = tmp_path / "keys", tmp_path / "aside", Clock()
    file.write_text("one\n")
    keys = KeyFile(file, LOGGER, clock)
    for _ in range(2):
        file.rename(aside)
        clock.later()
        assert accepted(keys, b"one") == [True]
        aside.rename(file)
        clock.later()
        assert accepted(keys, b"one") == [True]
    assert len(caplog.records) == 2, "each loss is mentioned, the return of the same keys is no news"


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"", "has no key"), (b"# only\n", "has no key"), (b"\xff", "Unicode")],
)
def test_there_must_be_a_key_at_the_start(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(KeyFileError, match=says):
        KeyFile(file, LOGGER)


def test_keys_are_lines_without_the_space_around_them(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("  a b \r\n\n#c\nd # e\n")
    keys = KeyFile(file, LOGGER)
    assert accepted(keys, b"a b", b"d # e", b"#c", b"d", b"") == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (b"Bearer k", b"k"),
        (b"bEARER   k ", b"k"),
        (b"Bearer a b", b"a b"),
        (b"Bearer", b""),
        (b"Basic k", None),
        (b"k", None),
        (b"", None),
    ],
)
def test_the_header_s_form(header: bytes, key: bytes | None) -> None:
    assert read_bearer_key(header) == key
