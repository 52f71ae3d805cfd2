"""How a model gets into its folder, and what a crash at each step leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pagefleet_download import target_folder
from pagefleet_download.errors import BadSettings, disk_error
from pagefleet_download.manifest import InstalledFile, Journal, Manifest, decode, encode, part_name
from pagefleet_download.source import RemoteFile
from pagefleet_download.target_folder import TargetFolder
from pagefleet_protocol.kube_names import COMPILED_FOLDER
from pagefleet_protocol.model_facts import ModelFacts

FACTS = ModelFacts("r", 1, 1, "llama", "bfloat16", "", 1, 0, 0, 1, 1, 8, 512)
OLD = {"config.json": b"old", "gone.txt": b"gone", "same.txt": b"same"}
NEW = {"config.json": b"new one", "model.safetensors": b"weights", "same.txt": b"same"}


def manifest_of(files: dict[str, bytes], source: str) -> Manifest:
    entries = tuple(InstalledFile(name, len(data), "", f"tag-{name}-{data!r}") for name, data in files.items())
    return Manifest(source, "", entries, FACTS)


def remote(name: str, data: bytes) -> RemoteFile:
    return RemoteFile(name, len(data), f"tag-{name}-{data!r}")


def bring(folder: TargetFolder, files: dict[str, bytes], source: str) -> None:
    """What a download does once it knows the files."""
    before = folder.manifest()
    wanted = [remote(name, data) for name, data in files.items()]
    folder.make_room(wanted)
    for file in wanted:
        if folder.present(before, file) is None:
            folder.part(file).write_bytes(files[file.name])
    folder.install(manifest_of(files, source), before)


def contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.is_file() and entry.name[0] != "."}


@pytest.fixture
def folder(tmp_path: Path) -> TargetFolder:
    found = TargetFolder(tmp_path)
    bring(found, OLD, "old://")
    return found


def test_there_is_a_place_for_what_engines_compile_also_in_a_folder_that_was_finished_before(
    folder: TargetFolder,
) -> None:
    folder.create()
    assert (folder.path / COMPILED_FOLDER).is_dir()
    bring(folder, NEW, "new://")
    assert (folder.path / COMPILED_FOLDER).is_dir()
    assert contents(folder.path) == NEW


def test_a_new_model_replaces_the_old_one(folder: TargetFolder) -> None:
    assert contents(folder.path) == OLD
    bring(folder, NEW, "new://")
    assert contents(folder.path) == NEW
    assert folder.finished("old://", None) is None
    assert folder.finished("new://", None) == manifest_of(NEW, "new://")
    assert sorted(os.listdir(folder.path)) == sorted([*NEW, ".pagefleet.json"])


class Crash(BaseException):
    """The process ends here."""


def test_after_a_crash_anywhere_the_folder_is_one_model_or_not_finished(
    folder: TargetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: dict[str, Callable[..., object]] = {"replace": Path.replace, "unlink": Path.unlink, "rmdir": Path.rmdir}
    outcomes = []
    for steps in range(100):
        left = [steps]

        def crashing(name: str, left: list[int] = left) -> Callable[..., object]:
            def step(self: Path, *args: object, **options: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    raise Crash
                return real[name](self, *args, **options)

            return step

        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(Path, name, crashing(name))
            try:
                bring(folder, NEW, "new://")
            except Crash:
                outcomes.append("crash")
            else:
                outcomes.append("done")
        old, new = folder.finished("old://", None), folder.finished("new://", None)
        assert not (old and contents(folder.path) != OLD)
        assert not (new and contents(folder.path) != NEW)
        folder.recover()
        if not folder.finished("old://", None):
            assert folder.finished("new://", None)
            assert contents(folder.path) == NEW
            bring(folder, OLD, "old://")
        assert contents(folder.path) == OLD
        if outcomes[-1] == "done":
            break
    assert outcomes[-1] == "done"
    assert len(outcomes) > 8


def test_nothing_is_recovered_from_a_journal_that_is_none(folder: TargetFolder) -> None:
    (folder.path / ".incoming").mkdir()
    (folder.path / ".incoming" / "journal.json").write_bytes(b'{"manifest": 7}')
    folder.recover()
    assert contents(folder.path) == OLD
    assert folder.finished("old://", None) is not None


@pytest.mark.parametrize("name", ["../outside", "/outside", "..", "", "a/b", "a\0b"])
@pytest.mark.parametrize("stale", [False, True])
def test_a_journal_that_others_wrote_leads_nowhere(folder: TargetFolder, name: str, stale: bool) -> None:
    files = {} if stale else {name: b"theirs"}
    (folder.path / ".incoming").mkdir()
    journal = Journal(manifest_of(files, "new://"), (name,) if stale else ())
    (folder.path / ".incoming" / "journal.json").write_bytes(encode(journal))
    outside = folder.path.parent / "outside"
    outside.write_bytes(b"mine")
    folder.recover()
    assert outside.read_bytes() == b"mine"
    assert contents(folder.path) == OLD
    (folder.path / ".pagefleet.json").write_bytes(encode(journal.manifest))
    assert (folder.manifest() is None) != stale


def test_parts_of_other_contents_go(folder: TargetFolder) -> None:
    wanted, other = remote("a.json", b"1"), remote("a.json", b"22")
    folder.make_room([wanted])
    for file in (wanted, other):
        folder.part(file).write_bytes(b"1")
    folder.make_room([wanted])
    assert [path.name for path in (folder.path / ".incoming").iterdir()] == [folder.part(wanted).name]
    assert (folder.part_size(wanted), folder.part_size(other)) == (1, 0)


def test_a_part_of_unknown_content_counts_for_nothing(folder: TargetFolder) -> None:
    untagged = RemoteFile("a.json", 5, "")
    folder.make_room([untagged])
    folder.part(untagged).write_bytes(b"123")
    assert folder.part_size(untagged) == 0


def test_links_in_place_of_our_own_files_are_not_followed(folder: TargetFolder, tmp_path: Path) -> None:
    (folder.path / "elsewhere").mkdir()
    (folder.path / ".incoming").symlink_to("elsewhere")
    with pytest.raises(BadSettings, match="is a link: remove it"):
        folder.recover()
    manifest = folder.path / ".pagefleet.json"
    manifest.rename(folder.path / "kept")
    manifest.symlink_to("kept")
    assert folder.manifest() is None


def test_weights_that_nobody_downloaded_are_noticed(folder: TargetFolder) -> None:
    files = [remote(name, data) for name, data in NEW.items()]
    folder.refuse_strangers(folder.manifest(), files)
    for name in ("other.safetensors", "model.safetensors.index.json"):
        (folder.path / name).write_bytes(b"")
        with pytest.raises(BadSettings, match=name):
            folder.refuse_strangers(folder.manifest(), files)
        (folder.path / name).unlink()


def test_a_branch_is_settled_once_and_a_commit_is_itself() -> None:
    manifest = Manifest("hf://a/b", "main", (), FACTS)
    assert manifest.answers("hf://a/b", "main")
    assert manifest.answers("hf://a/b", "r")
    assert not manifest.answers("hf://a/b", "v2")
    assert not manifest.answers("hf://a/b", None)
    assert not manifest.answers("hf://a/c", "main")


def test_documents_of_another_format_are_not_believed() -> None:
    manifest = manifest_of(NEW, "new://")
    assert decode(encode(manifest), Manifest) == manifest
    assert decode(encode(Journal(manifest, ("a",))), Journal) == Journal(manifest, ("a",))
    assert decode(encode(manifest).replace(b'"format": 1', b'"format": 2'), Manifest) is None
    assert decode(b"\xff", Manifest) is None


def test_each_content_has_a_part_of_its_own() -> None:
    names = {part_name("a", 1, "t"), part_name("a", 2, "t"), part_name("a", 1, "u"), part_name("b", 1, "t")}
    assert len(names) == 4
    assert all(name.endswith(".part") for name in names)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, "DiskFull"),
        (errno.EDQUOT, "DiskFull"),
        (errno.EIO, "StoreUnreachable"),
        (errno.ESTALE, "StoreUnreachable"),
        (errno.EROFS, "BadSettings"),
        (errno.EACCES, "BadSettings"),
    ],
)
def test_what_a_disk_says(code: int, reason: str) -> None:
    error = disk_error(Path("/models/x"), OSError(code, os.strerror(code)))
    assert (error.reason, str(error).startswith(f"/models/x: {os.strerror(code)}")) == (reason, True)


def test_the_folder_may_be_a_mount_point() -> None:
    # Renames stay inside it; this is why parts are there as well.
    folder = TargetFolder(Path("/models/model"))
    assert folder.part(remote("a", b"")).is_relative_to(folder.path)
    assert folder.lock_path.parent == folder.path
    assert target_folder.__doc__ is not None
