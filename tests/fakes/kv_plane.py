"""The two ends of a data plane with pools of bytes, and a source that sends whatever a test wants."""

from __future__ import annotations

import contextlib
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

from pagefleet_kv.p2p.data_plane import DataPlane, Frame, Landing, LinkUp, PlaneEvent
from pagefleet_kv.p2p.planes.landing import FrameName
from pagefleet_kv.p2p.planes.tcp.hello import HELLO_BYTES, Invitation, invitation_number
from pagefleet_kv.p2p.planes.tcp.plane import TcpPlane
from pagefleet_protocol.kv_blob import BlobHeader

from tests.fakes.bells import rings
from tests.fakes.byte_pages import PATIENCE_S, BytePages

COMPATIBILITY = b"c" * 32
TRANSFER = b"t" * 16
BLOCK = 1024
NUM_BLOCKS = 256
GARBAGE = b"\xee" * BLOCK


def content(number: int) -> bytes:
    """What a block holds at the source."""
    return number.to_bytes(4, "little") * (BLOCK // 4)


class PlaneEnd:
    """One end: a plane, its pages, and what it told."""

    def __init__(self, make: Callable[[BytePages], DataPlane], pages: BytePages) -> None:
        self.pages = pages
        self.plane = make(pages)
        self.seen: list[PlaneEvent] = []

    def wait_for(self, kind: type[PlaneEvent], count: int = 1) -> list[PlaneEvent]:
        """Return the next events of a kind, and drop those before them."""
        deadline = time.monotonic() + PATIENCE_S
        while sum(isinstance(event, kind) for event in self.seen) < count:
            assert time.monotonic() < deadline, f"no {kind.__name__} comes after {self.seen}"
            rings([self.plane.bell], PATIENCE_S)
            self.seen += self.plane.events()
        found = [event for event in self.seen if isinstance(event, kind)][:count]
        self.seen = self.seen[self.seen.index(found[-1]) + 1 :]
        return list(found)


def tcp_end(
    *, filled: bool = False, on_host: bool = True, stall_s: float = 60.0, handshake_s: float = 60.0
) -> PlaneEnd:
    """A tcp plane on loopback; `filled`: its blocks hold what `content` says, else garbage."""
    pages = BytePages(NUM_BLOCKS, BLOCK, on_host=on_host)
    for block in range(NUM_BLOCKS):
        pages.poke(block, content(block) if filled else GARBAGE)
    return PlaneEnd(lambda pages: TcpPlane(pages, COMPATIBILITY, "127.0.0.1", 0, handshake_s, stall_s), pages)


@contextlib.contextmanager
def joined(source: PlaneEnd, target: PlaneEnd) -> Iterator[tuple[PlaneEnd, PlaneEnd]]:
    """Both ends, connected; the target calls the source `p` and is `d`."""
    try:
        target.plane.connect("p", "127.0.0.1", source.plane.invite("d"))
        source.wait_for(LinkUp)
        target.wait_for(LinkUp)
        yield source, target
    finally:
        source.plane.close()
        target.plane.close()


def frame(seq: int, first: int, blocks: Sequence[int], epoch: int = 1, transfer_id: bytes = TRANSFER) -> Frame:
    """A frame of blocks of the pool."""
    return Frame(transfer_id, epoch, seq, first, blocks)


def landing(blocks: Sequence[int], first: int = 0, epoch: int = 1) -> Landing:
    """Where the transfer's frames go."""
    return Landing(TRANSFER, epoch, first, blocks)


class LyingSource:
    """A source that was really invited for, and then sends bytes by hand."""

    def __init__(self, target: PlaneEnd) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            invitation = Invitation.draw(listener.getsockname()[1])
            target.plane.connect("p", "127.0.0.1", invitation.encode())
            self.socket = listener.accept()[0]
        hello = b""
        while len(hello) < HELLO_BYTES:
            hello += self.socket.recv(HELLO_BYTES - len(hello))
        assert invitation_number(hello) == invitation.number
        self.socket.sendall(invitation.welcome(COMPATIBILITY))
        target.wait_for(LinkUp)

    def header(
        self, payload: bytes, num_blocks: int, seq: int = 0, first: int = 0, num_bytes: int | None = None
    ) -> bytes:
        """A header for a payload; `num_bytes`: what it says instead of its length."""
        name = FrameName(TRANSFER, 1, seq).encode()
        size = len(payload) if num_bytes is None else num_bytes
        return BlobHeader(COMPATIBILITY, name, first, num_blocks, size, zlib.crc32(payload)).encode()

    def close(self) -> None:
        """Leave."""
        self.socket.close()
