"""Moves a checkpoint's tensors into a model's slots: threads read ahead, this one installs what is complete.

file    |--- tensor ---|------------ tensor ------------|-- tensor --|
pieces  |--------------|----------|----------|----------|------------|    read by many threads, in any order
slots            arrived               arrived              arrived       in the order of the file
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader.readers import PIECE_BYTES, Reader
from pagefleet_engine.loader.weight_map import Destination


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's numbers lie."""

    name: str
    """Of file and tensor, for errors."""
    file: int
    """An open file descriptor."""
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A tensor that is on its way."""

    name: str
    destination: Destination
    pieces: list[Future[None]]
    num_bytes: int


def transfer(tensors: Iterable[tuple[StoredTensor, Destination]], reader: Reader) -> None:
    """Fill every destination, in order.

    Raises:
        ModelLoadError: a file cannot be read; the model is not usable then.
    """
    on_the_way: deque[_Arrival] = deque()
    num_bytes = 0
    pool = ThreadPoolExecutor(reader.num_threads, "load")
    try:
        for tensor, destination in tensors:
            arrival = _send_for(tensor, destination, reader, pool)
            on_the_way.append(arrival)
            num_bytes += arrival.num_bytes
            while num_bytes > reader.ahead_bytes or (on_the_way and _is_here(on_the_way[0])):
                num_bytes -= on_the_way[0].num_bytes
                _install(on_the_way.popleft(), reader)
        while on_the_way:
            _install(on_the_way.popleft(), reader)
    finally:
        pool.shutdown(cancel_futures=True)


def _send_for(tensor: StoredTensor, destination: Destination, reader: Reader, pool: ThreadPoolExecutor) -> _Arrival:
    room = reader.room(destination).view(-1)
    size = tensor.dtype.itemsize
    pieces = []
    for start in range(0, room.numel(), PIECE_BYTES // size):
        piece = room[start : start + PIECE_BYTES // size]
        pieces.append(pool.submit(reader.read, tensor.file, tensor.offset + start * size, tensor.dtype, piece))
    return _Arrival(tensor.name, destination, pieces, room.numel() * size)


def _is_here(arrival: _Arrival) -> bool:
    return all(piece.done() for piece in arrival.pieces)


def _install(arrival: _Arrival, reader: Reader) -> None:
    try:
        for piece in arrival.pieces:
            piece.result()
    except (OSError, EOFError) as error:
        raise ModelLoadError(f"{arrival.name} cannot be read ({error}): check the disk, or download again") from error
    reader.settle(arrival.destination)
