"""Tensors in pieces, installed in order; little is on its way at once, and an error ends it all."""

from __future__ import annotations

import threading

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement, Weight
from pagefleet_engine.loader import safetensors
from pagefleet_engine.loader.readers import Readable, Stored
from pagefleet_engine.loader.safetensors import StoredTensor, transfer
from pagefleet_engine.loader.weight_map import Destination
from torch import Tensor

PLACE = Placement(torch.float32, torch.device("cpu"), use_kernels=False)
ROWS = 100


class CountingReader:
    """A file in which number n stands at byte 4 n."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.num_threads, self.ahead_bytes = 3, 4 * ROWS * 2
        self.calls: list[tuple[str, int]] = []
        self._fail_at = fail_at
        self._lock = threading.Lock()

    def room(self, destination: Destination) -> Tensor:
        self.calls.append(("room", 0))
        return destination.weight.room(destination.part)

    def read(self, file: Readable, offset: int, stored: Stored, room: Tensor, stride: int | None = None) -> None:
        if offset == self._fail_at:
            raise EOFError("the file ends at byte 7")
        room.copy_(torch.arange(offset // 4, offset // 4 + room.numel()))
        with self._lock:
            self.calls.append(("read", room.numel()))

    def settle(self, destination: Destination) -> None:
        self.calls.append(("settle", 0))
        destination.weight.arrived(destination.part)


def slots(count: int, installed: list[Tensor]) -> list[tuple[StoredTensor, Destination]]:
    return [
        (
            StoredTensor(f"file: tensor {number}", 0, 4 * ROWS * number, torch.float32),
            Destination(Weight((ROWS,), None, PLACE, installed.append), 0),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("piece", [4 * 7, 4 * ROWS, 4 * 10 * ROWS])
def test_every_number_arrives_in_order(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "PIECE_BYTES", piece)
    installed: list[Tensor] = []
    reader = CountingReader()
    transfer(slots(9, installed), reader)
    assert torch.equal(torch.cat(installed), torch.arange(9.0 * ROWS))
    assert sum(size for call, size in reader.calls if call == "read") == 9 * ROWS
    assert max(size for call, size in reader.calls if call == "read") <= max(piece // 4, 1)


def test_little_is_on_its_way_at_once() -> None:
    installed: list[Tensor] = []
    reader = CountingReader()
    transfer(slots(9, installed), reader)
    waiting = most = 0
    for call, _ in reader.calls:
        waiting += {"room": 1, "settle": -1}.get(call, 0)
        most = max(most, waiting)
    assert most <= 3  # two within ahead_bytes, and the one that made it too many
    assert waiting == 0


def test_parts_of_a_merged_tensor_may_come_from_anywhere() -> None:
    installed: list[Tensor] = []
    weight = Weight((50, 30), None, PLACE, installed.append)
    tensors = [
        (StoredTensor("file: second", 0, 0, torch.float32), Destination(weight, 1)),
        (StoredTensor("file: first", 0, 400, torch.float32), Destination(weight, 0)),
    ]
    transfer(tensors, CountingReader())
    assert torch.equal(installed[0], torch.cat((torch.arange(100.0, 150.0), torch.arange(30.0))))


def test_an_error_names_file_and_tensor() -> None:
    installed: list[Tensor] = []
    reader = CountingReader(fail_at=4 * ROWS * 2)
    with pytest.raises(ModelLoadError, match=r"^file: tensor 2 cannot be read \(the file ends at byte 7\): check"):
        transfer(slots(9, installed), reader)
    assert len(installed) == 2


def test_nothing_to_do() -> None:
    reader = CountingReader()
    transfer([], reader)
    assert reader.calls == []


def test_bytes_are_counted_as_they_are_installed() -> None:
    installed: list[Tensor] = []
    counted: list[tuple[int, int, int]] = []
    transfer(slots(3, installed), CountingReader(), lambda *done: counted.append((*done, len(installed))))
    assert counted == [(400, 1200, 1), (800, 1200, 2), (1200, 1200, 3)]
