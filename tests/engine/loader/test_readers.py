"""Ranges of files into tensors: straight, through a conversion, from several threads, and where the file ends early."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pagefleet_engine.layers.weight import Kept, Placement, Weight
from pagefleet_engine.loader.readers import PIECE_BYTES, HostReader, PinnedReader, read_into, reader_for
from pagefleet_engine.loader.weight_map import Destination
from torch import Tensor


@pytest.fixture
def values() -> Tensor:
    return torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 30


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


def put(descriptor: int, tensor: Tensor, offset: int) -> None:
    os.pwrite(descriptor, tensor.contiguous().view(torch.uint8).numpy().tobytes(), offset)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_numbers_arrive_in_the_type_of_the_room(
    stored: torch.dtype, wanted: torch.dtype, values: Tensor, descriptor: int
) -> None:
    put(descriptor, values.to(stored), 17)
    room = torch.empty(values.shape, dtype=wanted)
    HostReader().read(descriptor, 17, stored, room)
    assert torch.equal(room, values.to(stored).to(wanted))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_eight_bits_are_not_touched(stored: torch.dtype, values: Tensor, descriptor: int) -> None:
    put(descriptor, values.to(stored), 0)
    room = torch.empty(values.shape, dtype=stored)
    HostReader().read(descriptor, 0, stored, room)
    assert torch.equal(room.view(torch.uint8), values.to(stored).view(torch.uint8))


def test_many_threads_share_one_reader(values: Tensor, descriptor: int) -> None:
    put(descriptor, values.to(torch.bfloat16), 0)
    room, reader = torch.empty(values.shape), HostReader()

    def read(start: int) -> None:
        reader.read(descriptor, 2 * start, torch.bfloat16, room[start : start + 100])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(0, 5000, 100)))
    assert torch.equal(room, values.to(torch.bfloat16).float())


def test_a_read_that_comes_in_pieces_goes_on(values: Tensor, descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put(descriptor, values, 0)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: whole(file, [views[0][:999]], offset))
    room = torch.empty(values.shape)
    read_into(descriptor, 0, room)
    assert torch.equal(room, values)


def test_a_file_that_ends_early(values: Tensor, descriptor: int) -> None:
    put(descriptor, values, 0)
    with pytest.raises(EOFError, match="the file ends at byte 20000"):
        read_into(descriptor, 4, torch.empty(values.shape))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="descriptor"):
        read_into(-1, 0, torch.empty(4))


class Elsewhere:
    """A file that each call asks a store for."""

    def __init__(self, values: Tensor) -> None:
        self._bytes = values.numpy().tobytes()
        self.asked: list[int] = []

    def fill(self, view: memoryview, offset: int) -> None:
        self.asked.append(len(view))
        view[:] = self._bytes[offset : offset + len(view)]


@pytest.mark.parametrize(("span", "requests"), [(1 << 20, 1), (4 * 400, 25), (1, 100)])
def test_a_store_is_asked_for_several_rows_at_once(span: int, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagefleet_engine.loader.readers._SPAN_BYTES", span)
    values = torch.arange(10_000.0).view(100, 100)
    file, room = Elsewhere(values), torch.zeros(100, 40)
    read_into(file, 4 * 50, room[:, 10:30], stride=400)
    assert torch.equal(room[:, 10:30], values[:, 50:70])
    assert not room[:, :10].any()
    assert not room[:, 30:].any()
    assert len(file.asked) == requests
    assert max(file.asked) <= max(span, 80)


def slot(rows: int, is_copied: bool, installed: list[Tensor]) -> Destination:
    place = Placement(torch.float32, torch.device("cpu"), use_kernels=False)
    return Destination(Weight((rows,), None, place, installed.append, kept=Kept(torch.float32, is_copied)), 0)


def test_memory_of_copied_tensors_is_used_again() -> None:
    reader, installed = HostReader(), list[Tensor]()
    first, kept, second, much_smaller = (
        slot(rows, is_copied, installed) for rows, is_copied in ((100, True), (100, False), (90, True), (10, True))
    )
    rooms = []
    for destination in (first, kept, second, much_smaller):
        rooms.append(reader.room(destination))
        reader.settle(destination)
    assert [room.numel() for room in rooms] == [100, 100, 90, 10]
    assert rooms[2].data_ptr() == rooms[0].data_ptr()
    assert rooms[1].data_ptr() not in (rooms[0].data_ptr(), rooms[3].data_ptr())
    assert rooms[3].data_ptr() != rooms[0].data_ptr()  # a large tensor's memory is kept for large ones


def test_memory_that_is_out_is_not_lent_again() -> None:
    reader, installed = HostReader(), list[Tensor]()
    both = [reader.room(slot(100, True, installed)) for _ in range(2)]
    assert both[0].data_ptr() != both[1].data_ptr()


def test_the_reader_follows_the_device() -> None:
    assert isinstance(reader_for(torch.device("cpu")), HostReader)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_buffers_fill_a_gpu(values: Tensor, descriptor: int) -> None:
    device = torch.device("cuda")
    reader = PinnedReader(device, num_threads=2)
    put(descriptor, values.to(torch.bfloat16), 8)
    for wanted in (torch.bfloat16, torch.float32):
        installed: list[Tensor] = []
        place = Placement(wanted, device, use_kernels=True)
        destination = Destination(Weight((len(values),), None, place, installed.append), 0)
        room = reader.room(destination)
        with ThreadPoolExecutor(2) as pool:  # more pieces than buffers
            pieces = [
                pool.submit(reader.read, descriptor, 8 + 2 * start, torch.bfloat16, room[start : start + 250])
                for start in range(0, 5000, 250)
            ]
        for piece in pieces:
            piece.result()
        reader.settle(destination)
        assert torch.equal(installed[0].cpu(), values.to(torch.bfloat16).to(wanted))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_some_columns_of_a_matrix_are_read_to_some_of_another(stored: torch.dtype, descriptor: int) -> None:
    matrix = torch.randn(9, 20).to(stored)
    put(descriptor, matrix, 6)
    room = torch.zeros(9, 7)
    size = stored.itemsize
    HostReader().read(descriptor, 6 + 4 * size, stored, room[:, 2:5], 20 * size)
    assert torch.equal(room[:, 2:5], matrix[:, 4:7].float())
    assert not room[:, :2].any()
    assert not room[:, 5:].any()


def test_pieces_hold_whole_numbers_of_every_type() -> None:
    assert PIECE_BYTES % 8 == 0
