from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.store.manifest import MANIFEST, MANIFEST_LOCK, FolderClaim, claim_folder

from tests.fakes.byte_pages import PATIENCE_S, SHAPE


def test_new_folder_is_made_and_claimed_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    claim_folder(folder, SHAPE, alone=True).release()
    written = json.loads((folder / MANIFEST).read_text())
    assert written["shape"]["block_size"] == SHAPE.block_size
    claim_folder(folder, SHAPE, alone=True).release()
    assert {path.name for path in folder.iterdir()} == {MANIFEST, MANIFEST_LOCK}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 8}, "block_size 4 here, 8 there"),
        ({"model": "ab" * 32}, "model "),
        ({"cache_dtype": "fp8"}, "cache_dtype float32 here, fp8 there"),
    ],
)
def test_folder_of_another_shape_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, str | int], said: str
) -> None:
    claim_folder(tmp_path, msgspec.structs.replace(SHAPE, **change), alone=True).release()
    with pytest.raises(KVConfigError, match=said) as caught:
        claim_folder(tmp_path, SHAPE, alone=True)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_of_another_version_is_refused_whatever_else_it_says(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"pagefleet_kv_folder": 7, "shapes": ["of another kind"]}')
    with pytest.raises(KVConfigError, match="is of version 7, this engine's is 1"):
        claim_folder(tmp_path, SHAPE, alone=False)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pagefleet_kv_folder": 1}', b"\xff" * 100_000])
def test_damaged_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(KVConfigError, match="is damaged"):
        claim_folder(tmp_path, SHAPE, alone=False)


def test_folder_with_somebodys_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(KVConfigError, match=r"holds other files \(thesis.tex\)"):
        claim_folder(tmp_path, SHAPE, alone=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_folder_whose_manifest_was_being_written_is_no_strangers(tmp_path: Path) -> None:
    (tmp_path / f"{MANIFEST}.0011223344556677").write_text("{")
    claim_folder(tmp_path, SHAPE, alone=True).release()
    assert (tmp_path / MANIFEST).exists()


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KVConfigError, match="cannot be used"):
        claim_folder(tmp_path / "file", SHAPE, alone=True)


def test_one_engine_at_a_time_has_a_folder_alone(tmp_path: Path) -> None:
    first = claim_folder(tmp_path, SHAPE, alone=True)
    with pytest.raises(KVConfigError, match="is used by another engine"):
        claim_folder(tmp_path, SHAPE, alone=True)
    first.release()
    first.release()
    claim_folder(tmp_path, SHAPE, alone=True).release()


def test_engines_may_share_a_folder(tmp_path: Path) -> None:
    claims = [claim_folder(tmp_path, SHAPE, alone=False) for _ in range(2)]
    assert {claim.folder for claim in claims} == {tmp_path}
    with pytest.raises(KVConfigError, match="is used by another engine or connector"):
        claim_folder(tmp_path, SHAPE, alone=True)
    for claim in claims:
        claim.release()


def test_folder_without_file_locks_is_told_apart_from_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_folder(tmp_path, SHAPE, alone=True).release()

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(KVConfigError, match=r"without file locks \(No locks available\)"):
        claim_folder(tmp_path, SHAPE, alone=True)


# --- engines that start at once


class Engine(threading.Thread):
    """Claims a folder in a thread of its own."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        super().__init__(daemon=True)
        self.claim: FolderClaim | None = None
        self.refusal = ""
        self._folder = folder
        self._alone = alone

    def run(self) -> None:
        try:
            self.claim = claim_folder(self._folder, SHAPE, alone=self._alone)
        except KVConfigError as error:
            self.refusal = str(error)


def start_two_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch, *, alone: bool) -> list[Engine]:
    """The first one's manifest is written and about to be in place when the second asks for its first lock."""
    about_to_place, second_asks = threading.Event(), threading.Event()
    real_replace, real_lock = Path.replace, fcntl.flock
    engines: list[Engine] = []

    def replace(self: Path, target: Path) -> Path:
        if threading.current_thread() is engines[0]:
            about_to_place.set()
            assert second_asks.wait(PATIENCE_S)
        return real_replace(self, target)

    def lock(descriptor: int, operation: int) -> None:
        if threading.current_thread() is not engines[0]:
            second_asks.set()
        real_lock(descriptor, operation)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(fcntl, "flock", lock)
    engines.append(Engine(folder, alone=alone))
    engines[0].start()
    assert about_to_place.wait(PATIENCE_S)
    engines.append(Engine(folder, alone=alone))
    engines[1].start()
    for engine in engines:
        engine.join(PATIENCE_S)
        assert not engine.is_alive()
    return engines


def test_one_of_two_that_start_at_once_has_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = start_two_at_once(tmp_path / "kv", monkeypatch, alone=True)
    claims = [engine.claim for engine in engines if engine.claim is not None]
    assert len(claims) == 1
    assert ["is used by another engine" in engine.refusal for engine in engines].count(True) == 1
    claims[0].release()


def test_two_that_share_a_new_folder_lock_one_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = start_two_at_once(tmp_path / "kv", monkeypatch, alone=False)
    for engine in engines:
        assert engine.claim is not None, engine.refusal
        with pytest.raises(KVConfigError, match="is used by another engine"):
            claim_folder(tmp_path / "kv", SHAPE, alone=True)
        engine.claim.release()
    claim_folder(tmp_path / "kv", SHAPE, alone=True).release()


CLAIM = """
import sys
from pathlib import Path
import msgspec
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.store.manifest import claim_folder
from pagefleet_protocol.kv_blob import KvShape

print("ready", flush=True)
sys.stdin.readline()
try:
    claim = claim_folder(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=KvShape), alone=True)
    print("taken", flush=True)
except KVConfigError as error:
    print(error, flush=True)
sys.stdin.readline()
"""


@contextmanager
def claiming_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """One that claims the folder at its first line of input and has it until it ends."""
    command = [sys.executable, "-c", CLAIM, str(folder), msgspec.json.encode(SHAPE).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert line_of(process) == "ready"
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_one_of_many_processes_has_a_new_folder_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with ExitStack() as stack:
        processes = [stack.enter_context(claiming_process(folder)) for _ in range(4)]
        for process in processes:
            go(process)
        said = [line_of(process) for process in processes]
        refused = [line for line in said if line != "taken"]
        assert len(refused) == len(processes) - 1, said
        assert all("is used by another engine" in line for line in refused), said
        with pytest.raises(KVConfigError, match="is used by another engine"):
            claim_folder(folder, SHAPE, alone=True)
        holder = processes[said.index("taken")]
        holder.kill()
        holder.wait()
        claim_folder(folder, SHAPE, alone=True).release()
