"""API keys that change while they are in use."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from pagefleet_protocol.key_file import RECHECK_S, KeyFile, KeyFileError, read_bearer_key
from pagefleet_protocol.tenants import Tenant

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
    return [keys.tenant_of(key) is not None for key in given]


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


ATTRIBUTES = """
# tenants
alpha tenant=chat weight=2 rpm=60 tpm=100000 priority=5
beta  tenant=chat weight=2.0 rpm=60 tpm=100000 priority=5
batch\ttenant=batch priority=-10
bare
a key with spaces rpm=5
base64==
"""


def test_lines_say_what_a_tenant_may_do(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(ATTRIBUTES)
    keys = KeyFile(file, LOGGER)
    chat = Tenant("chat", 2.0, 60, 100_000, 5)
    assert keys.tenant_of(b"alpha") == keys.tenant_of(b"beta") == chat
    assert keys.tenant_of(b"batch") == Tenant("batch", max_priority=-10)
    bare = Tenant("key-" + hashlib.sha256(b"bare").hexdigest()[:16])
    assert keys.tenant_of(b"bare") == bare
    spaced = keys.tenant_of(b"a key with spaces")
    assert spaced is not None
    assert spaced.rpm == 5
    assert keys.tenant_of(b"base64==") is not None
    assert keys.tenant_of(b"alpha tenant=chat") is None, "attributes are no part of a key"
    assert keys.tenant_named("chat") == chat
    assert keys.tenant_named("nobody") is None


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("a\nb wieght=2\n", "line 2: wieght= is no attribute"),
        ("a rpm=1 rpm=1\n", "line 1: rpm= is given twice"),
        ("# x\n\na tenant=\n", "line 3: tenant= is no name"),
        ("a tenant=a/b\n", "tenant= is no name"),
        ("a weight=0\n", "weight= is no weight"),
        ("a weight=nan\n", "weight= is no weight"),
        ("a weight=1e9\n", "weight= is no weight"),
        ("a rpm=0\n", "rpm= is no limit"),
        ("a tpm=-5\n", "tpm= is no limit"),
        ("a tpm=\u0665\n", "tpm= is no limit"),
        ("a priority=101\n", "priority= is no priority"),
        ("a priority=1.5\n", "priority= is no priority"),
        ("a tenant=t\nb tenant=t rpm=5\n", "line 2: tenant t has other attributes"),
        ("a tenant=t\na tenant=u\n", "line 2: tenant u has other attributes, or this key another tenant"),
    ],
)
def test_a_wrong_line_is_named_without_its_key(tmp_path: Path, lines: str, says: str) -> None:
    file = tmp_path / "keys"
    file.write_text(lines.replace("a ", "secret-a ").replace("\nb ", "\nsecret-b "), encoding="utf-8")
    with pytest.raises(KeyFileError, match=re.escape(says)) as caught:
        KeyFile(file, LOGGER)
    assert "secret" not in str(caught.value)


def test_a_wrong_line_leaves_the_last_tenants_in_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret, clock = MountedSecret(tmp_path), Clock()
    secret.publish("one tenant=t rpm=5\n")
    keys = KeyFile(secret.file, LOGGER, clock)
    secret.publish("one tenant=t rpm=many\ntwo\n")
    clock.later()
    assert accepted(keys, b"one", b"two") == [True, False]
    assert keys.tenant_named("t") == Tenant("t", rpm=5)
    assert "line 1: rpm= is no limit" in caplog.text
    secret.publish("one tenant=t rpm=7\n")
    clock.later()
    assert keys.tenant_of(b"one") == keys.tenant_named("t") == Tenant("t", rpm=7)
