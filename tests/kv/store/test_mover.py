from __future__ import annotations

import hashlib
import logging
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagefleet_kv.errors import KVConfigError, TransfersDead
from pagefleet_kv.store import block_io, mover
from pagefleet_kv.store.blob_store import BlobStore
from pagefleet_kv.store.block_io import CopyOutJob, FolderJob, Job, LoadJob, MoveDone, ProbeJob, SpillJob, StoreJob
from pagefleet_kv.store.block_key import BlockKey
from pagefleet_kv.store.manifest import claim_folder
from pagefleet_kv.store.mover import BlockMover
from pagefleet_protocol.block_hash import BlockHash

from tests.fakes.bells import rings
from tests.fakes.byte_pages import PATIENCE_S, SHAPE, BytePages

SIZE = 64


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(bytes([number])).digest())


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


class Scene:
    def __init__(self, folder: Path) -> None:
        self.pages = BytePages(64, SIZE)
        self.slots = memoryview(bytearray(32 * SIZE))
        self.folder = folder
        self.store = BlobStore(claim_folder(folder, SHAPE, alone=True), SHAPE, SIZE)
        self.mover = BlockMover(self.pages, self.slots, self.store, scan=100)
        self.done: dict[int, MoveDone] = {}

    def run(self, *jobs: Job) -> list[MoveDone]:
        for job in jobs:
            self.mover.start(job)
        return [self.wait(job.job_id) for job in jobs]

    def wait(self, job_id: int) -> MoveDone:
        while job_id not in self.done:
            assert rings([self.mover.bell], PATIENCE_S), "the bell does not ring"
            self.done.update({move.job_id: move for move in self.mover.finished()})
        return self.done[job_id]

    def slot(self, number: int) -> bytes:
        return bytes(self.slots[number * SIZE : (number + 1) * SIZE])


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.pages.gate.set()
    scene.mover.close()


@pytest.fixture(params=[1, 3, 1000])
def _piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_io, "PIECE_BYTES", request.param * SIZE)


@pytest.mark.usefixtures("_piece")
def test_blocks_go_to_memory_and_disk_and_come_back_from_both(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for number in range(10):
        scene.pages.poke(number, content(number))
    slots = [0, 1, 2, 3, 9, 8, 7, 20, 21, 22]
    assert scene.run(CopyOutJob(1, range(10), slots)) == [MoveDone(1, 10)]
    assert [scene.slot(slot)[0] for slot in slots] == list(range(10))
    spills = [SpillJob(10 + number, slots[number], key(number)) for number in range(4, 8)]
    assert scene.run(*spills) == [MoveDone(10 + number, 1) for number in range(4, 8)]
    sources: list[int | BlockKey] = [*slots[:4], *(key(number) for number in range(4, 8)), *slots[8:]]
    assert scene.run(LoadJob(2, range(30, 40), sources)) == [MoveDone(2, 10)]
    assert [scene.pages.peek(30 + number) for number in range(10)] == [content(number) for number in range(10)]
    scene.mover.close()


def test_pages_are_stored_once_and_probed(scene: Scene) -> None:
    for number in range(4):
        scene.pages.poke(number, content(number))
    scene.run(StoreJob(1, [0, 1], [key(0), key(1)]))
    scene.pages.poke(0, content(99))
    scene.run(StoreJob(2, [0, 3], [key(0), key(3)]))
    assert scene.run(ProbeJob(3, 0, [BlockHash(key(number)) for number in range(4)])) == [MoveDone(3, 2)]
    buffer = bytearray(SIZE)
    assert scene.store.read(key(0), memoryview(buffer)) is None
    assert buffer == content(0)


def test_load_ends_at_the_first_block_that_is_wrong(scene: Scene) -> None:
    scene.run(StoreJob(1, range(4), [key(number) for number in range(4)]))
    name = key(2).hex()
    (scene.folder / name[:2] / f"{name}.kv").write_bytes(b"no blob")
    (done,) = scene.run(LoadJob(2, range(10, 14), [key(number) for number in range(4)]))
    assert done.num_blocks == 2
    assert done.error is not None
    assert scene.store.num_damaged == 1
    assert not scene.store.contains(key(2))


def test_cancelled_load_ends_soon_and_touches_nothing_afterwards(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.mover._io, "_piece", 1)
    scene.pages.gate.clear()
    scene.mover.start(LoadJob(1, range(8), range(8)))
    scene.mover.cancel(1)
    scene.pages.gate.set()
    done = scene.wait(1)
    assert done.num_blocks < 8
    assert done.error is None
    assert scene.run(LoadJob(2, range(8), range(8))) == [MoveDone(2, 8)]


def test_copies_to_memory_do_not_wait_for_the_disk_and_loads_for_neither(scene: Scene) -> None:
    scene.pages.gate.clear()
    scene.mover.start(CopyOutJob(1, [0], [0]))
    assert scene.run(ProbeJob(2, 0, [BlockHash(key(0))]), FolderJob(3, "drop", [key(0)])) == [
        MoveDone(2, 0),
        MoveDone(3, 1),
    ]
    assert 1 not in scene.done
    scene.pages.gate.set()
    assert scene.wait(1) == MoveDone(1, 1)


def test_clear_waits_for_the_loads_before_it(scene: Scene) -> None:
    scene.run(StoreJob(1, [0, 1], [key(0), key(1)]))
    scene.pages.gate.clear()
    scene.mover.start(LoadJob(2, [5, 6], [key(0), key(1)]))
    scene.mover.start(FolderJob(3, "clear"))
    scene.pages.gate.set()
    assert scene.wait(2) == MoveDone(2, 2)
    assert scene.wait(3) == MoveDone(3, 0)
    assert not scene.store.contains(key(0))


def test_device_that_fails_ends_the_job_with_its_words(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.pages.broken = True
    with caplog.at_level(logging.WARNING, "pagefleet_kv"):
        done = scene.run(LoadJob(1, [0], [0]), CopyOutJob(2, [0], [0]))
    assert done == [MoveDone(1, 0, "the device does not answer"), MoveDone(2, 0, "the device does not answer")]
    assert "could not be moved" in caplog.text
    scene.pages.broken = False
    assert scene.run(LoadJob(3, [0], [0])) == [MoveDone(3, 1)]


@pytest.mark.parametrize("job", [LoadJob(1, [0], [0]), CopyOutJob(1, [0], [0]), StoreJob(1, [0], [key(0)])])
def test_mistake_of_ours_ends_the_engine(scene: Scene, monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr(scene.pages, "read", fail)
    monkeypatch.setattr(scene.pages, "write", fail)
    scene.mover.start(job)

    def settle() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:  # the scan of the folder rings too
            rings([scene.mover.bell], PATIENCE_S)
            scene.mover.finished()

    with pytest.raises(TransfersDead, match="a thread that moves K/V has ended"):
        settle()


def test_scan_finds_what_an_earlier_start_has_left(tmp_path: Path) -> None:
    first = Scene(tmp_path)
    first.run(StoreJob(1, range(3), [key(number) for number in range(3)]))
    first.mover.close()
    second = Scene(tmp_path)
    second.run(FolderJob(1, "drop", []))  # runs after the scan
    assert set(second.mover.found()) == {key(number) for number in range(3)}
    assert second.mover.found() == []
    second.mover.close()


def test_what_a_scan_finds_is_told_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "FOUND_AT_ONCE", 2)
    first = Scene(tmp_path)
    first.run(StoreJob(1, range(5), [key(number) for number in range(5)]))
    first.mover.close()
    second = Scene(tmp_path)
    second.run(FolderJob(1, "drop", []))  # runs after the scan
    parts = [second.mover.found()]
    while select.select([second.mover.bell], [], [], 0)[0]:
        second.mover.finished()
        parts.append(second.mover.found())
    assert [len(part) for part in parts if part] == [2, 2, 1]
    assert {one for part in parts for one in part} == {key(number) for number in range(5)}
    second.mover.close()


def test_close_ends_with_jobs_under_way_and_may_be_repeated(scene: Scene) -> None:
    for number in range(20):
        scene.mover.start(LoadJob(number, range(8), range(8)))
        scene.mover.start(StoreJob(100 + number, [0], [key(number)]))
    with pytest.raises(KVConfigError, match="is used by another"):
        claim_folder(scene.folder, SHAPE, alone=True)
    scene.mover.close()
    scene.mover.close()
    claim = claim_folder(scene.folder, SHAPE, alone=True)
    assert claim.folder == scene.folder
    claim.release()
