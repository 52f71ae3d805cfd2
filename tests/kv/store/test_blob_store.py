from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pagefleet_kv.store.blob_store import DAMAGE_TOLD_S, RETRY_S, BlobStore
from pagefleet_kv.store.block_key import BlockKey, block_keys, group_of, hash_of
from pagefleet_kv.store.manifest import claim_folder
from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_blob import HEADER_BYTES

from tests.fakes.byte_pages import SHAPE

SIZE = 5000


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(number: int, group: int = 0) -> BlockKey:
    return block_keys([BlockHash(hashlib.sha256(bytes([number])).digest())], group)[0]


def content(number: int) -> memoryview:
    return memoryview(bytes([number]) * SIZE)


def read(store: BlobStore, wanted: BlockKey) -> bytes | str:
    buffer = bytearray(SIZE)
    return store.read(wanted, memoryview(buffer)) or bytes(buffer)


def file_of(folder: Path, wanted: BlockKey) -> Path:
    return folder / wanted.hex()[:2] / f"{wanted.hex()}.kv"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[BlobStore]:
    store = BlobStore(claim_folder(tmp_path, SHAPE, alone=True), SHAPE, SIZE, clock)
    yield store
    store.close()


def test_what_is_written_is_read(store: BlobStore, tmp_path: Path) -> None:
    assert store.write(key(1), content(1))
    assert store.write(key(2), content(2))
    assert read(store, key(1)) == bytes(content(1))
    assert read(store, key(2)) == bytes(content(2))
    assert file_of(tmp_path, key(1)).stat().st_size == HEADER_BYTES + SIZE
    assert list((tmp_path / "unfinished").iterdir()) == []


def test_groups_of_one_hash_are_apart(store: BlobStore) -> None:
    store.write(key(1), content(1))
    assert not store.contains(key(1, group=3))
    store.write(key(1, group=3), content(3))
    assert read(store, key(1)) == bytes(content(1))
    assert read(store, key(1, group=3)) == bytes(content(3))
    assert (hash_of(key(1, group=3)), group_of(key(1, group=3)), group_of(key(1))) == (key(1), 3, 0)


def test_a_block_that_is_not_there_is_no_damage(store: BlobStore) -> None:
    assert read(store, key(9)) == "the file is gone"
    assert store.num_damaged == 0
    store.remove(key(9))


@pytest.mark.parametrize("at", [0, 5, 20, 60, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_every_flipped_byte_is_found_and_the_file_deleted(store: BlobStore, tmp_path: Path, at: int) -> None:
    store.write(key(1), content(1))
    path = file_of(tmp_path, key(1))
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)
    assert isinstance(read(store, key(1)), str)
    assert not path.exists()
    assert store.num_damaged == 1


@pytest.mark.parametrize("length", [0, 10, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_torn_file_is_found(store: BlobStore, tmp_path: Path, length: int) -> None:
    store.write(key(1), content(1))
    os.truncate(file_of(tmp_path, key(1)), length)
    assert isinstance(read(store, key(1)), str)
    assert not store.contains(key(1))


def test_many_files_that_are_wrong_are_one_line(
    store: BlobStore, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        store.write(key(number), content(number))
        os.truncate(file_of(tmp_path, key(number)), 10)
    with caplog.at_level(logging.WARNING, "pagefleet_kv"):
        for number in range(3):
            read(store, key(number))
        assert len(caplog.records) == 1
        assert f"{file_of(tmp_path, key(0))} was of no use (10 bytes are no header)" in caplog.text
        clock.now += DAMAGE_TOLD_S
        read(store, key(3))
    assert len(caplog.records) == 2
    assert store.num_damaged == 4


def test_file_under_another_blocks_name_is_refused(store: BlobStore, tmp_path: Path) -> None:
    store.write(key(1), content(1))
    target = file_of(tmp_path, key(2))
    target.parent.mkdir(exist_ok=True)
    file_of(tmp_path, key(1)).rename(target)
    assert read(store, key(2)) == "the file holds another block"


def test_blob_of_another_model_is_refused(store: BlobStore, tmp_path: Path) -> None:
    other_shape = msgspec.structs.replace(SHAPE, model="ee" * 32)
    other_folder = tmp_path / "other"
    other = BlobStore(claim_folder(other_folder, other_shape, alone=True), other_shape, SIZE)
    other.write(key(1), content(1))
    other.close()
    target = file_of(tmp_path, key(1))
    target.parent.mkdir(exist_ok=True)
    file_of(other_folder, key(1)).rename(target)
    assert read(store, key(1)) == "the blob is of another model, layout or type"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_disk_that_takes_nothing_is_told_of_once_and_tried_again_later(
    store: BlobStore,
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    store.write(key(1), content(1))
    tries = []

    def refuse(self: Path, target: Path) -> Path:
        tries.append(target)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "pagefleet_kv"):
        patch.setattr(Path, "replace", refuse)
        assert not any(store.write(key(number), content(number)) for number in range(2, 6))
        assert len(tries) == 1
        clock.now += RETRY_S + 1
        assert not store.write(key(6), content(6))
        assert len(tries) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(code) in caplog.text
    assert store.num_failed_writes == 5
    assert list((tmp_path / "unfinished").iterdir()) == []
    assert read(store, key(1)) == bytes(content(1)), "what is there can be read all the time"

    clock.now += RETRY_S + 1
    with caplog.at_level(logging.INFO, "pagefleet_kv"):
        assert store.write(key(7), content(7))
    assert caplog.records[-1].levelname == "INFO"
    assert store.write(key(8), content(8))
    assert len(caplog.records) == 2


def test_scan_gives_the_oldest_first_and_bounds_the_folder(store: BlobStore, tmp_path: Path) -> None:
    for number in range(8):
        store.write(key(number), content(number))
        os.utime(file_of(tmp_path, key(number)), (100 + number, 100 + number))
    read(store, key(0))  # now the newest
    assert store.scan(5, lambda: False) == [key(number) for number in (4, 5, 6, 7, 0)]
    assert [number for number in range(8) if store.contains(key(number))] == [0, 4, 5, 6, 7]


def test_scan_deletes_torn_and_unfinished_files_and_passes_over_others(store: BlobStore, tmp_path: Path) -> None:
    for number in range(3):
        store.write(key(number), content(number))
    os.truncate(file_of(tmp_path, key(0)), 7)
    unfinished = tmp_path / "unfinished" / "of a process that died"
    unfinished.write_bytes(b"half")
    foreign = file_of(tmp_path, key(1)).with_name("README")
    foreign.write_text("whose?")
    odd = file_of(tmp_path, key(1)).with_name("zz.kv")
    odd.write_text("no key")
    assert set(store.scan(100, lambda: False)) == {key(1), key(2)}
    assert not file_of(tmp_path, key(0)).exists()
    assert not unfinished.exists()
    assert not odd.exists()
    assert foreign.exists()


def test_scan_stops_when_told(store: BlobStore) -> None:
    for number in range(5):
        store.write(key(number), content(number))
    assert store.scan(100, lambda: True) == []
    assert all(store.contains(key(number)) for number in range(5))


def test_clear_deletes_all_blocks_and_keeps_the_folder(store: BlobStore, tmp_path: Path) -> None:
    for number in range(5):
        store.write(key(number), content(number))
    store.clear()
    assert not any(store.contains(key(number)) for number in range(5))
    assert (tmp_path / "manifest.json").exists()
    assert store.write(key(1), content(1))


def test_file_bytes_are_whole_blocks_of_a_file_system(store: BlobStore) -> None:
    assert store.file_bytes == 8192
