"""The tcp data plane between two processes on loopback, against a raw socket between the same two in the same run.

The raw socket does nothing but `sendall` and `recv_into`, with buffers used again; both move the same pieces, and take
turns. The plane frames them, checks them by CRC-32, scatters them into the blocks that were reserved, and answers for
each. A source process serves both; figures are medians over turns.

python bench/kv_transfer.py --json bench/results/kv_transfer.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from pagefleet_engine.worker.kv_pages import make_kv_pages
from pagefleet_kv.p2p.data_plane import Frame, FrameArrived, FrameSent, Landing, LinkUp, PlaneEvent
from pagefleet_kv.p2p.planes.tcp.plane import TcpPlane
from pagefleet_kv.port import KVPages

from bench.report import write_report

KB = 1024
PIECES = (64 * KB, 256 * KB, 1024 * KB, 4096 * KB)
BLOCK_BYTES = 64 * KB
POOL_BYTES = 128 * KB * KB
COMPATIBILITY = b"c" * 32


def random_pages() -> KVPages:
    """Return a pool of its own in this process's memory."""
    return make_kv_pages(torch.randint(256, (POOL_BYTES // BLOCK_BYTES, BLOCK_BYTES), dtype=torch.uint8))


def host_of(pages: KVPages) -> memoryview:
    """Return the pool's bytes."""
    assert pages.host is not None, "the pool is on a device"
    return pages.host


def blocks_of(scattered: bool) -> list[int]:
    """Return all blocks of the pool; scattered: no two neighbours follow each other."""
    count = POOL_BYTES // BLOCK_BYTES
    return [*range(0, count, 2), *range(1, count, 2)] if scattered else list(range(count))


def wait_for(plane: TcpPlane, kind: type[PlaneEvent], count: int) -> None:
    """Take events until so many of one kind have come."""
    while count:
        select.select([plane.bell], [], [], 60)
        count -= sum(isinstance(event, kind) for event in plane.events())


def source(pipe: Connection) -> None:
    """The other process: sends all of its pool, whenever it is told how."""
    pages = random_pages()
    plane = TcpPlane(pages, COMPATIBILITY, "127.0.0.1", 0)
    pool = host_of(pages)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((plane.invite("target"), listener.getsockname()[1]))
        raw = listener.accept()[0]
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wait_for(plane, LinkUp, 1)
    while (asked := pipe.recv()) is not None:
        way, piece, epoch = asked
        if way == "raw":
            for start in range(0, POOL_BYTES, piece):
                raw.sendall(pool[start : start + piece])
            continue
        blocks = blocks_of(way == "scattered")
        size = piece // BLOCK_BYTES
        for number, first in enumerate(range(0, len(blocks), size)):
            plane.send("target", Frame(b"t" * 16, epoch, number, first, blocks[first : first + size]))
        wait_for(plane, FrameSent, len(blocks) // size)
    plane.close()


@dataclass
class Target:
    """This process's ends of both connections."""

    pipe: Connection
    plane: TcpPlane
    raw: socket.socket
    pool: memoryview
    epoch: int = 0

    def turn(self, way: str, piece: int) -> float:
        """Receive the whole pool once; return GB/s."""
        self.epoch += 1
        if way == "raw":
            took = self._timed(way, piece, lambda: self._receive_raw(piece))
        else:
            self.plane.land("source", Landing(b"t" * 16, self.epoch, 0, blocks_of(way == "scattered")))
            took = self._timed(way, piece, lambda: wait_for(self.plane, FrameArrived, POOL_BYTES // piece))
            self.plane.forget(b"t" * 16)
        return POOL_BYTES / took / 1e9

    def _timed(self, way: str, piece: int, receive: Callable[[], None]) -> float:
        began = time.perf_counter()
        self.pipe.send((way, piece, self.epoch))
        receive()
        return time.perf_counter() - began

    def _receive_raw(self, piece: int) -> None:
        for start in range(0, POOL_BYTES, piece):
            view = self.pool[start : start + piece]
            while view:
                view = view[self.raw.recv_into(view) :]


def measure(turns: int) -> dict[str, float]:
    """Take turns of all ways and pieces, and return medians and their ratios."""
    pipe, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=source, args=(theirs,))
    other.start()
    pages = random_pages()
    plane = TcpPlane(pages, COMPATIBILITY, "127.0.0.1", 0)
    invitation, port = pipe.recv()
    plane.connect("source", "127.0.0.1", invitation)
    wait_for(plane, LinkUp, 1)
    figures: dict[str, float] = {}
    with socket.create_connection(("127.0.0.1", port)) as raw:
        target = Target(pipe, plane, raw, host_of(pages))
        for piece in PIECES:
            rates: dict[str, list[float]] = {"raw": [], "plane": [], "scattered": []}
            for turn in range(turns + 1):
                for way, seen in rates.items():
                    rate = target.turn(way, piece)
                    if turn:  # the first warms up
                        seen.append(rate)
            name = f"{piece // KB}kb"
            for way, seen in rates.items():
                figures[f"{name}_{way}_gb_per_s"] = round(statistics.median(seen), 3)
            for way in ("plane", "scattered"):
                ratios = [one / other for one, other in zip(rates[way], rates["raw"], strict=True)]
                figures[f"{name}_{way}_to_raw"] = round(statistics.median(ratios), 3)
            print(name, {key: value for key, value in figures.items() if key.startswith(f"{name}_")}, flush=True)
    pipe.send(None)
    other.join()
    plane.close()
    return figures


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = measure(arguments.turns)
    if arguments.json:
        write_report(arguments.json, "kv_transfer", figures)


if __name__ == "__main__":
    main()
